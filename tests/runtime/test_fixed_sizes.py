"""Models whose batch, or number of tokens per step, is fixed. Numbers of whole texts: test_families."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoders import DecoderConfig, write_decoder
from runtime.engines import runner_on

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.runtime.runner import Runner

BASE = DecoderConfig(vocab=64, capacity=32)
FIXED = replace(BASE, batch=3, sequence=4)
PROMPTS = ([5, 9, 3, 7, 11], [1, 2], list(range(10, 19)), [6, 5, 4], [8])


def runner(config: DecoderConfig, folder: Path, device: str, **limits: Any) -> Runner:
    model = write_decoder(folder / f"{abs(hash(config)):x}.onnx", config)
    chunk = config.sequence if isinstance(config.sequence, int) else 8
    return runner_on(device, model, build={"max_chunk": chunk}, **limits)


def open_twin(config: DecoderConfig) -> DecoderConfig:
    """The same decoder with nothing fixed."""
    return replace(config, batch="batch", sequence="sequence_len")


@pytest.mark.few(2)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_fewer_tokens_in_a_step_than_the_model_computes(device: str, chunk: int, tmp_path: Path) -> None:
    """Logits are counted from the end of a step, which what fills it up makes as long as ever."""
    config = GenerationConfig(max_new_tokens=8)
    fixed = replace(BASE, vocab=256, hidden=32, sequence=4)
    with DecodeSession(runner(open_twin(fixed), tmp_path, "cpu")) as session:
        expected = [g.tokens for g in session.generate(PROMPTS, config)]
    with DecodeSession(runner(fixed, tmp_path, device, max_batch=2, max_chunk=chunk)) as session:
        assert session.plan.logits_span is not None
        assert session.max_chunk == chunk
        assert [g.tokens for g in session.generate(PROMPTS, config)] == expected
        scores = session.update({(slot := session.cache.acquire()): PROMPTS[0]}, keep=3)[slot]
        assert [int(row.argmax()) for row in scores][-1] == expected[0][0]
