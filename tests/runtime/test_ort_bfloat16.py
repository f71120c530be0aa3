"""bfloat16 models on the CPU: in float32, against a decoder in NumPy that has the same weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder
from runtime.families import Twin

from trt_kvcache import DecodeSession, PlanOptions, calibrate_caches
from trt_kvcache.importer import import_model
from trt_kvcache.importer.steps.element_types import has_bfloat16
from trt_kvcache.plan import CacheDtype
from trt_kvcache.runtime.ort.cpu_model import NOTE, in_float32

BASE = DecoderConfig(layers=2, capacity=64, vocab=128, dtype="bfloat16", form="heads-major")
PROMPT = [5, 9, 3, 77, 1, 2, 4, 8]


@pytest.mark.few(3)
@pytest.mark.parametrize("inside", [True, False], ids=["weights inside", "external weights"])
@pytest.mark.parametrize("form", ["mobius", "heads-major", "five-d", "seq-major"])
def test_logits_equal_those_of_numpy(tmp_path: Path, form: str, inside: bool) -> None:
    config = replace(BASE, form=form)
    twin = Twin(write_decoder(tmp_path / "inside.onnx", config), config)
    model = write_decoder(tmp_path / "model.onnx", config, external_threshold=None if inside else 64)
    with DecodeSession.open(model, max_batch=2) as session:
        assert session.name.endswith("CPU, bfloat16 in float32")
        assert NOTE in session.plan.notes
        assert {c.dtype for c in session.plan.caches} == {"float"}
        slots = {session.cache.acquire(): list(PROMPT), session.cache.acquire(): PROMPT[:3]}
        logits = session.update(slots)
        for token in (7, 11):
            for slot, tokens in slots.items():
                wanted = twin.logits(tokens)
                assert np.abs(logits[slot][-1] - wanted).max() < 1e-4 * np.abs(wanted).max()
                tokens.append(token)
            logits = session.update({slot: [token] for slot in slots})


def test_quantized_caches_and_calibration(tmp_path: Path) -> None:
    """int8 with a scale for each row against NumPy, and with one for each cache against the model's own caches."""
    model = write_decoder(tmp_path / "model.onnx", BASE)
    wanted = Twin(model, BASE, levels=127).logits(PROMPT)
    options = PlanOptions(cache_dtype=CacheDtype.INT8)
    with DecodeSession.open(model, plan_options=options) as session:
        found = session.update({session.cache.acquire(): PROMPT})
        assert np.abs(next(iter(found.values()))[-1] - wanted).max() < 1e-3 * np.abs(wanted).max()
    options = replace(options, cache_ranges=calibrate_caches(model, [PROMPT]))
    with DecodeSession.open(model, plan_options=options) as session, DecodeSession.open(model) as own:
        assert session.generate(PROMPT, max_new_tokens=4).tokens == own.generate(PROMPT, max_new_tokens=4).tokens


def test_a_wide_model_is_left_alone(tmp_path: Path) -> None:
    imported = import_model(write_decoder(tmp_path / "model.onnx", replace(BASE, dtype="float16")))
    assert in_float32(imported) is imported


def test_large_weights_stay_in_their_file(tmp_path: Path) -> None:
    imported = import_model(write_decoder(tmp_path / "model.onnx", BASE, external_threshold=2000))
    before = {t.name: t.data_location for t in imported.model.graph.initializer}
    made = in_float32(imported).model
    assert has_bfloat16(imported.model)
    large = [t for t in made.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert {t.name.removesuffix("/bfloat16") for t in large} == {n for n, at in before.items() if at}
    assert all(t.data_type == onnx.TensorProto.BFLOAT16 for t in large)


def test_the_command_line_says_so(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", BASE)
    done = invoke("generate", model, "--tokens", "1,2,3", "--max-new-tokens", "2")
    assert "bfloat16 in float32" in " ".join(done.output.split())
