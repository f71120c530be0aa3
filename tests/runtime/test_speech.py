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

ROOM = 9
CONFIG = GenerationConfig(max_new_tokens=4)
Array = NDArray[Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speech")
    onnx.save(make_decoder(Speech(room=ROOM)), made / "decoder.onnx")
    onnx.save(make_encoder(), made / "encoder.onnx")
    return made


def heard(seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(1, HEARD, WIDTH)).astype(np.float32)


def encoded(folder: Path, mel: Array) -> dict[str, Array]:
    names = ["n_layer_cross_k", "n_layer_cross_v"]
    session = ort.InferenceSession(str(folder / "encoder.onnx"), providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, {"mel": mel}), strict=True))


def greedy(folder: Path, prompt: list[int], mel: Array) -> list[int]:
    """The model as exported, fed as those who made it do: the prompt at once, then tokens one by one."""
    session = ort.InferenceSession(str(folder / "decoder.onnx"), providers=["CPUExecutionProvider"])
    cross = encoded(folder, mel)
    caches = [np.full((LAYERS, 1, ROOM, WIDTH), 1e4, np.float32) for _ in "kv"]
    offset, news, found = 0, prompt, []
    for _ in range(4):
        feed = dict(zip(("in_n_layer_self_k_cache", "in_n_layer_self_v_cache"), caches, strict=True))
        feed |= {"tokens": np.array([news]), "offset": np.array([offset]), **cross}
        logits, *caches = session.run(None, feed)
        offset, news = offset + len(news), [int(logits[0, -1].argmax())]
        found += news
    return found


def test_tokens_are_those_of_the_model_as_exported(folder: Path) -> None:
    prompts = [[1, 2, 3], [4]]
    wanted = [greedy(folder, prompt, heard(i)) for i, prompt in enumerate(prompts)]
    with DecodeSession.open(folder / "decoder.onnx", max_batch=2, max_chunk=2) as session:
        sources = [session.encode({"mel": heard(i)}) for i in range(2)]
        assert [r.tokens for r in session.generate(prompts, CONFIG, sources)] == wanted
        wholes = [encoded(folder, heard(i)) for i in range(2)]
        assert [r.tokens for r in session.generate(prompts, CONFIG, wholes)] == wanted


def test_constants_that_do_not_fit_are_refused(folder: Path) -> None:
    made = encoded(folder, heard(0))
    few = made | {"n_layer_cross_k": made["n_layer_cross_k"][:1]}
    with DecodeSession.open(folder / "decoder.onnx") as session:
        for given, words in (
            ({"n_layer_cross_k": made["n_layer_cross_k"]}, "all of them together: n_layer_cross_k, n_layer_cross_v"),
            (few, rf"'n_layer_cross_k' is \[1, 1, {HEARD}, {WIDTH}\], and the model takes \[{LAYERS}, n_audio"),
            (made | {"cross": made["n_layer_cross_k"]}, "'cross' is no input of the model"),
        ):
            with pytest.raises(PromptError, match=words):
                session.generate([[1]], CONFIG, [given])


def test_an_encoder_for_tensorrt_gives_what_the_decoder_takes(folder: Path) -> None:
    plan = plan_model(folder / "decoder.onnx")
    constants = [t for t in plan.tensors if t.role is Role.CONSTANT]
    model = import_encoder(folder / "encoder.onnx", None, constants, plan.options, plan.stacks).model
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [f"n_layer_cross_{kind}.{i}" for kind in "kv" for i in range(LAYERS)]
    whole = encoded(folder, heard(3))
    for name, value in zip(names, session.run(names, {"mel": heard(3)}), strict=True):
        stack, layer = name.rsplit(".", 1)
        np.testing.assert_allclose(value, whole[stack][int(layer)], rtol=1e-5, atol=1e-6)
