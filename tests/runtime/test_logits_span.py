"""Logits of the last positions only: an engine that gives few of them, one of before, and ONNX Runtime agree."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.engines import open_engine, runner_on, write_engine

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.importer.cache_plan import LogitPositions, PlanOptions
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner

ALL = PlanOptions(logits=LogitPositions.ALL)


def engine_of(path: Path, **options: Any) -> Any:
    """An engine, opened for the length of a block."""
    return closing(open_engine(path, **options))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64))


def last_only(model: Path) -> Path:
    """The same model, which gives logits ``[B, V]`` of the last position as it is exported."""
    graph = gs.import_onnx(onnx.load(model))
    logits = next(t for t in graph.outputs if t.name == "logits")
    every = gs.Variable("every", dtype=logits.dtype, shape=logits.shape)
    logits.inputs[0].outputs[0] = every
    last = gs.Constant("last", np.array(-1))
    graph.nodes.append(gs.Node("Gather", "pick", {"axis": 1}, [every, last], [logits]))
    logits.shape = [logits.shape[0], logits.shape[2]]
    onnx.save(gs.export_onnx(graph), model.with_name("last.onnx"))
    return model.with_name("last.onnx")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_scores_and_drafts_of_a_model_that_gives_the_last_ones_only(model: Path, device: str) -> None:
    few = last_only(model)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8, 2, 7]]
    config = GenerationConfig(max_new_tokens=9, prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
    with closing(runner_on(device, few, max_batch=3)) as runner:
        assert runner.max_logits == 1
        session, other = DecodeSession(runner), DecodeSession(OnnxRuntimeRunner(model, max_batch=3))
        assert [r.tokens for r in session.generate(prompts, config)] == [
            r.tokens for r in other.generate(prompts, config)
        ]
        stats = session.generate(prompts[:1], config)[0].speculation
        assert stats.proposed == 0
        assert stats.impossible.startswith("the model gives the logits of the last position only: export it")
        for keep in (1, 4, 30):
            found = [s.update({s.cache.acquire(): prompts[0]}, keep).popitem()[1] for s in (session, other)]
            assert found[0].shape == found[1].shape
            np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize(("built", "opened", "words"), [
    ({"max_logits": 1}, {}, "the engine gives the logits of one position: build it with --max-logits 2 or more"),
    ({}, {"max_chunk": 1}, "a step takes only one token: use a model that takes several, or a larger max_chunk"),
    ({"max_logits": 2}, {}, ""),
], ids=str)  # fmt: skip
def test_who_cannot_verify_drafts_says_so(
    built: dict[str, int], opened: dict[str, int], words: str, model: Path
) -> None:
    config = GenerationConfig(max_new_tokens=40, prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
    with engine_of(write_engine(model, **built), **opened) as runner:
        (result,) = DecodeSession(runner).generate([[1, 2, 1, 2, 1, 2, 1]], config)
    assert result.speculation.impossible == words
    assert bool(result.speculation.proposed) is not bool(words)


@pytest.mark.slow
def test_memory_of_logits_is_for_the_positions_that_are_given(model: Path) -> None:
    sizes = {}
    for most in (1, 8):
        with engine_of(write_engine(model, max_logits=most)) as runner:
            sizes[most] = runner.device_bytes
    assert sizes[8] - sizes[1] >= 3 * 7 * 256 * 4
