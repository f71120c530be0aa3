"""Caches that ``--cache-dtype`` quantizes: their bytes against NumPy, and what verify, plan and refusals say."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from graphs import scatter_model
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from runtime.families import turned

from trt_kvcache import (
    BuildOptions,
    DecodeSession,
    PlanOptions,
    VerifyOptions,
    build_engine,
    load_manifest,
    plan_model,
    verify_model,
)
from trt_kvcache.errors import OptionError, VerificationError
from trt_kvcache.importer import import_model, quantize_caches
from trt_kvcache.importer.cache_plan import Route
from trt_kvcache.plan import CacheDtype, Fallback, Target
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.verify import verify_import

Array = NDArray[Any]
CONFIG = DecoderConfig(layers=1, capacity=64, vocab=128, head_size=20, form="heads-major")
PROMPT = [5, 9, 3, 77, 1, 2, 4, 8, 16, 32]
INT8, INT4, FP8 = CacheDtype.INT8, CacheDtype.INT4, CacheDtype.FP8
RTX, FULL = Target.TENSORRT_RTX, Target.TENSORRT
FORMS = [(INT8, RTX), (INT4, RTX), (INT8, FULL), (INT4, FULL), (FP8, FULL)]
SHORT = VerifyOptions(chunks=(6,), tokens=2, batch=1)
MOST = {INT8: 127, INT4: 7, FP8: 448}
EACH = pytest.mark.parametrize(("kind", "target"), FORMS, ids=lambda value: value.value)


def options(kind: CacheDtype, target: Target = RTX, **more: Any) -> PlanOptions:
    return PlanOptions(cache_dtype=kind, target=target, **more)


def read(model: Path, planned: PlanOptions, prompt: Sequence[int] = PROMPT) -> dict[str, Array]:
    """All caches of one sequence after a prompt, by name, written in two steps and a single token."""
    runner = OnnxRuntimeRunner(model, planned, max_batch=1)
    with DecodeSession(runner) as session:
        slot = session.cache.acquire()
        for part in filter(None, (prompt[:6], prompt[6:-1], prompt[6:][-1:])):
            session.update({slot: part})
        return {c.past: runner.read_row(c.past, 0, len(prompt)) for c in runner.plan.caches}


def quantized(rows: Array, kind: CacheDtype) -> tuple[Array, Array]:
    """Codes ``[N, S, H]`` of rotated rows, and scales ``[N, S, 1]``."""
    rows = turned(rows).astype(np.float32)
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(MOST[kind])
    return rows / scale, scale


def unpacked(numbers: Array, size: int, each: int, bits: int) -> Array:
    """The codes of whole numbers from 0 on."""
    whole = numbers.astype(np.int64)
    parts = [(whole >> bits * i & (1 << bits) - 1) - (1 << bits - 1) for i in range(each)]
    return np.concatenate(parts, -1)[..., :size]


@pytest.mark.few(3)
@EACH
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_caches_hold_the_bytes_that_numpy_makes(tmp_path: Path, dtype: str, kind: CacheDtype, target: Target) -> None:
    model = write_decoder(tmp_path / "model.onnx", replace(CONFIG, dtype=dtype))
    own, found = read(model, PlanOptions(target=target)), read(model, options(kind, target))
    for name, rows in own.items():
        codes, scale = quantized(rows, kind)
        held, scales = found[name], found.get(f"{name}_scale")
        if target is RTX:
            assert held.dtype == np.float32
            held, scales = held[..., :-1], held[..., -1:]
        assert scales is not None
        np.testing.assert_allclose(scales, scale, rtol=1e-6)
        # A rotation is a sum, whose last bits depend on its order: a code may be the next one, never a farther one.
        if kind is FP8:
            assert held.dtype == ml_dtypes.float8_e4m3fn
            np.testing.assert_allclose(held.astype(np.float32), codes, rtol=1.001 / 16, atol=2**-10)
            continue
        bits = {INT8: 8, INT4: 4}[kind]
        whole = held.astype(np.float64) + (0 if target is RTX else 128)
        assert np.abs(unpacked(whole, rows.shape[-1], (24 if target is RTX else 8) // bits, bits) - codes).max() < 0.501
        assert held.shape[-1] == -(-rows.shape[-1] // ((24 if target is RTX else 8) // bits))


@pytest.mark.few(2)
@EACH
def test_plan_says_bytes_saved_and_sessions_take_them(tmp_path: Path, kind: CacheDtype, target: Target) -> None:
    model = write_decoder(tmp_path / "model.onnx", replace(CONFIG, head_size=64))
    own, plan = plan_model(model, PlanOptions(target=target)), plan_model(model, options(kind, target))
    row = {(INT8, RTX): 4 * 23, (INT4, RTX): 4 * 12, (INT8, FULL): 68, (INT4, FULL): 36, (FP8, FULL): 68}[kind, target]
    before, after = 2 * 2 * 4 * 64, 2 * 2 * row  # K and V of two heads
    assert own.cache_bytes() == 64 * before
    assert plan.cache_bytes() == 64 * after
    share = f"{1 - after / before:.0%}"
    assert plan.notes[0] == (
        f"--cache-dtype {kind.value}: the caches take {after} bytes per token with their scales, instead of "
        f"{before} as float32: {before - after} bytes saved ({share})"
    )
    assert any("caches of 4 bits change the text of a small model" in note for note in plan.notes) == (kind is INT4)
    assert {c.route for c in plan.caches} == ({Route.NATIVE} if target is RTX else {Route.NATIVE, Route.PLUGIN})
    assert all(c.in_place and c.carried for c in plan.caches)
    with DecodeSession.open(model, plan_options=options(kind, target), max_batch=2) as session:
        assert session.cache.bytes == 2 * 64 * after


@pytest.mark.few(2)
@EACH
@pytest.mark.parametrize("form", ["mobius", "five-d"])
def test_verify_compares_with_the_models_own_caches(
    tmp_path: Path, form: str, kind: CacheDtype, target: Target
) -> None:
    model = write_decoder(tmp_path / "model.onnx", replace(CONFIG, form=form))
    report = verify_model(
        model, options(kind, target), VerifyOptions(chunks=(4,), tokens=3, batch=2, station=("quantized",))
    )
    report.check()
    (station,) = (s for s in report.stations if s.name == "quantized")
    assert station.compared, station.note
    assert station.difference is not None
    assert station.difference < 1e-4 or "between two codes" in station.note
    found = report.quality
    assert found is not None
    assert found.cache_dtype == kind.value
    least, most = {INT8: (1e-4, 0.02), FP8: (1e-3, 0.08), INT4: (1e-2, 0.3)}[kind]
    assert least < found.typical < most
    assert found.agreement > 0.5


def scaled(factor: float, which: str) -> Callable[[onnx.ModelProto], None]:
    """Rows that are read with another scale than they were written with."""

    def fault(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.float32(factor), "factor"))
        for at, node in reversed(list(enumerate(model.graph.node))):
            if node.op_type == "Mul" and f"{which}_cache" in node.name and "_values" in node.name:
                wrong = f"{node.output[0]}/wrong"
                model.graph.node.insert(at, helper.make_node("Mul", [node.input[1], "factor"], [wrong]))
                node.input[1] = wrong

    return fault


def misplaced(model: onnx.ModelProto) -> None:
    """Codes that are read from the places of others."""
    for name in ("starts", "ends", "axes", "steps"):
        value = {"starts": -1, "ends": -(2**31), "axes": -2, "steps": -1}[name]
        model.graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), name))
    for at, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type == "Sub" and "_raw" in node.name:
            result, node.output[0] = node.output[0], f"{node.output[0]}/back"
            turned = helper.make_node("Slice", [node.output[0], "starts", "ends", "axes", "steps"], [result])
            model.graph.node.insert(at + 1, turned)


FAULTS = {
    "keys twice": scaled(2, "key"),
    "values twice": scaled(2, "value"),
    "keys of a quarter more": scaled(1.25, "key"),
    "values of a quarter less": scaled(0.75, "value"),
    "codes of others": misplaced,
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_scale_fails_verify(tmp_path: Path, name: str) -> None:
    imported = import_model(write_decoder(tmp_path / "model.onnx", CONFIG))
    planned = replace(imported.plan, options=options(INT8))
    found = quantize_caches(replace(imported, plan=planned))
    FAULTS[name](found.model)
    onnx.checker.check_model(found.model)
    report = verify_import(imported, replace(SHORT, station=("quantized",)), found)
    assert not report.passed
    with pytest.raises(VerificationError, match="quantized: logits differ by"):
        report.check()


@pytest.mark.parametrize(("config", "planned", "words"), [
    (CONFIG, options(FP8), "cache_dtype is fp8, but TensorRT for RTX has no 8-bit caches"),
    (replace(CONFIG, head_size=4, dtype="float16"), options(INT8), "rows of 4 numbers, which need 64 bits as fl"),
    (CONFIG, options(INT8, FULL, fallback=Fallback.FUNCTIONAL), "fallback functional excludes the plugin"),
    (replace(CONFIG, mode="circular", form="mobius"), options(INT8, fallback=Fallback.FUNCTIONAL),
     r"is not updated by TensorRT's own cache layer \(circular update of several tokens"),
], ids=["fp8", "small rows", "no plugin", "not in place"])  # fmt: skip
def test_refusals(tmp_path: Path, config: DecoderConfig, planned: PlanOptions, words: str) -> None:
    model = write_decoder(tmp_path / "model.onnx", config)
    with pytest.raises(OptionError, match=words):
        plan_model(model, planned)


def test_caches_that_are_quantized_already_are_refused(tmp_path: Path) -> None:
    onnx.save(scatter_model(dtype=onnx.TensorProto.INT8), tmp_path / "model.onnx")
    assert plan_model(tmp_path / "model.onnx", PlanOptions(target=FULL)).caches[0].dtype == "int8"
    with pytest.raises(OptionError, match="cache_dtype is int8, but cache 'past' already is int8"):
        plan_model(tmp_path / "model.onnx", options(INT8, FULL))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_builds_with_native_layers_and_a_proof(tmp_path: Path, dtype: str, kind: CacheDtype) -> None:
    model = write_decoder(tmp_path / "model.onnx", replace(CONFIG, dtype=dtype))
    manifest = build_engine(model, tmp_path / "model.engine", options=options(kind), build=BuildOptions(max_batch=2))
    assert load_manifest(tmp_path / "model.engine").plan == manifest.plan
    assert len(manifest.aliases) == 2
    assert manifest.proof is not None
    assert not any("proof" in warning for warning in manifest.warnings)
