"""A speech decoder with stacked caches beside its encoder, against both as exported in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from speech_graphs import HEARD, LAYERS, WIDTH, Speech, make_decoder, make_encoder

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import PromptError
from trt_kvcache.importer import plan_model
from trt_kvcache.importer.extensions.encoders.model import import_encoder
from trt_kvcache.importer.plan import Role

CONFIG = GenerationConfig(max_new_tokens=4)
STACKS = ["n_layer_cross_k", "n_layer_cross_v"]
Array = NDArray[Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speech")
    onnx.save(make_decoder(Speech(room=9)), made / "decoder.onnx")
    onnx.save(make_encoder(), made / "encoder.onnx")
    return made


def ran(model: Any, names: list[str] | None, feeds: dict[str, Array]) -> list[Array]:
    found: list[Array] = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(names, feeds)
    return found


def heard(seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(1, HEARD, WIDTH)).astype(np.float32)


def encoded(folder: Path, mel: Array) -> dict[str, Array]:
    return dict(zip(STACKS, ran(str(folder / "encoder.onnx"), STACKS, {"mel": mel}), strict=True))


def greedy(folder: Path, prompt: list[int], mel: Array) -> list[int]:
    """The model as exported, fed as those who made it do: the prompt at once, then tokens one by one."""
    caches = [np.full((LAYERS, 1, 9, WIDTH), 1e4, np.float32) for _ in "kv"]
    offset, news, found = 0, prompt, []
    for _ in range(4):
        feed = dict(zip(("in_n_layer_self_k_cache", "in_n_layer_self_v_cache"), caches, strict=True))
        feed |= {"tokens": np.array([news]), "offset": np.array([offset]), **encoded(folder, mel)}
        logits, *caches = ran(str(folder / "decoder.onnx"), None, feed)
        offset, news = offset + len(news), [int(logits[0, -1].argmax())]
        found += news
    return found


@pytest.mark.slow
def test_tokens_are_those_of_the_model_as_exported(folder: Path) -> None:
    """From what the encoder gives and from whole stacks; stacks that do not fit are refused."""
    prompts = [[1, 2, 3], [4]]
    wanted = [greedy(folder, prompt, heard(i)) for i, prompt in enumerate(prompts)]
    made = encoded(folder, heard(0))
    key = made[STACKS[0]]
    with DecodeSession.open(folder / "decoder.onnx", max_batch=2, max_chunk=2) as session:
        sources = [session.encode({"mel": heard(i)}) for i in range(2)]
        for constants in (sources, [encoded(folder, heard(i)) for i in range(2)]):
            assert [r.tokens for r in session.generate(prompts, CONFIG, constants)] == wanted
        for given, words in (
            ({STACKS[0]: key}, "all of them together: n_layer_cross_k, n_layer_cross_v"),
            (made | {STACKS[0]: key[:1]}, rf"k' is \[1, 1, {HEARD}, {WIDTH}\], and .* takes \[{LAYERS}, n_audio"),
            (made | {"cross": key}, "'cross' is no input of the model"),
        ):
            with pytest.raises(PromptError, match=words):
                session.generate([[1]], CONFIG, [given])


@pytest.mark.slow
def test_an_encoder_for_tensorrt_gives_what_the_decoder_takes(folder: Path) -> None:
    plan = plan_model(folder / "decoder.onnx")
    constants = [t for t in plan.tensors if t.role is Role.CONSTANT]
    model = import_encoder(folder / "encoder.onnx", None, constants, plan.options, plan.stacks).model
    names = [f"n_layer_cross_{kind}.{i}" for kind in "kv" for i in range(LAYERS)]
    whole = encoded(folder, heard(3))
    for name, value in zip(names, ran(model.SerializeToString(), names, {"mel": heard(3)}), strict=True):
        stack, layer = name.rsplit(".", 1)
        np.testing.assert_allclose(value, whole[stack][int(layer)], rtol=1e-5, atol=1e-6)
