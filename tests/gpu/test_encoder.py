"""Encoders on the GPU beside their decoders: what the CPU makes, within rounding, and the tokens of its meaning."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import encoder, first_step, heard, strided_encoder
from gpu_steps import built_for
from greedy import check_greedy
from hybrids import WIDTH, cross_logits, cross_model, write

from trt_kvcache import BuildOptions, DecodeSession, GenerationConfig, build_engine
from trt_kvcache.runtime.trt.cuda import DeviceArray

pytestmark = pytest.mark.gpu

PROMPTS, LENGTHS = ([5, 9, 3], [1, 2, 4, 8, 16], [60]), (6, 11, 1)
TOLERANCE = 5e-3  # of the scale: products in TF32


@pytest.mark.parametrize("kind", ["hidden", "keys"])
def test_constants_and_tokens_are_those_of_the_cpu(workshop: Any, kind: str, tmp_path: Path) -> None:
    """An encoder's output stays on the GPU; sources of several lengths, one after the other and again."""
    encoder(tmp_path / "encoder_model.onnx")
    if kind == "keys":
        first_step(tmp_path / "decoder_model.onnx")
    model = write(tmp_path / "decoder_with_past_model.onnx", cross_model(kind, "none"))
    engine = tmp_path / "model.engine"
    options = BuildOptions(backend=workshop.backend, max_batch=3, max_chunk=16, max_encoder=12, **built_for())
    assert build_engine(model, engine, build=options).encoder is not None
    sources = [{"input_features": heard(n, i)} for i, n in enumerate(LENGTHS)]
    config = GenerationConfig(max_new_tokens=10)
    with DecodeSession.open(model) as session:
        wanted = [session.encode(source) for source in sources]
    with DecodeSession.open(engine) as session:
        for _ in range(3):
            made = [session.encode(source) for source in sources]
            for found, array in ((f[name], w[name]) for f, w in zip(made, wanted, strict=True) for name in w):
                assert isinstance(found, DeviceArray)
                np.testing.assert_allclose(np.asarray(found), array, atol=TOLERANCE * np.abs(array).max())
            for constants in (made, wanted):
                for i, generated in enumerate(session.generate(PROMPTS, config, constants)):
                    assert len(generated.tokens) == 10
                    scores = partial(cross_logits, mask="none", length=LENGTHS[i], seed=i)
                    check_greedy(PROMPTS[i], generated.tokens, scores, TOLERANCE)
            del made, found, constants
            gc.collect()
        used = session._runner.device_bytes  # type: ignore[attr-defined]
        for _ in range(20):
            session.encode(sources[1])
        gc.collect()
        session.encode(sources[0])
        assert session._runner.device_bytes <= used  # type: ignore[attr-defined]


def test_a_transformer_behind_a_convolution(workshop: Any, tmp_path: Path) -> None:
    """The output is half as long as the input; from the shortest to the longest, and back."""
    strided_encoder(tmp_path / "encoder_model.onnx")
    model = write(tmp_path / "decoder_with_past_model.onnx", cross_model("hidden", "none"))
    engine, rng = tmp_path / "model.engine", np.random.default_rng(5)
    shapes = {f"{kind}_shapes": {"input_features": (1, WIDTH, n)} for kind, n in (("min", 1), ("opt", 24), ("max", 24))}
    options = BuildOptions(backend=workshop.backend, max_chunk=16, max_encoder=12, **shapes, **built_for())
    assert build_engine(model, engine, build=options).encoder is not None
    with DecodeSession.open(engine) as session, DecodeSession.open(model) as host:
        for length in (24, 7, 1, 2, 24):
            source = {"input_features": rng.normal(size=(1, WIDTH, length)).astype(np.float32)}
            (found,), (wanted,) = (s.encode(source).values() for s in (session, host))
            assert found.shape == wanted.shape == (1, (length + 1) // 2, WIDTH)
            np.testing.assert_allclose(np.asarray(found), wanted, atol=TOLERANCE * np.abs(wanted).max())
