"""Models that the importer rewrites rightly pass, and the report says what was run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from decoders import DTYPES, FORMS, DecoderConfig, make_decoder, write_decoder
from needs import ORT_VERSION

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import CacheLayout, Fallback, PlanOptions
from trt_kvcache.verify import VerifyOptions, VerifyReport, sessions, verify_model
from trt_kvcache.verify.sessions import EngineError, OrtSession

DEFAULTS = PlanOptions()

since_1_32 = pytest.mark.skipif(ORT_VERSION < (1, 32), reason="ONNX Runtime before 1.32 knows opsets up to 26")


def verify(
    folder: Path,
    config: DecoderConfig,
    options: PlanOptions = DEFAULTS,
    wanted: VerifyOptions | None = None,
) -> VerifyReport:
    report = verify_model(write_decoder(folder / "m.onnx", config), options, wanted or VerifyOptions())
    report.check()
    assert report.passed
    assert {o.name for o in report.outputs} >= {"logits"}
    assert all(o.max_relative is not None and o.max_relative <= o.tolerance for o in report.outputs)
    return report


def episodes(report: VerifyReport) -> list[str]:
    return list(dict.fromkeys(step.episode for step in report.steps))


@pytest.mark.few(5)
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["grouped", "multi-head"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_linear_decoders(tmp_path: Path, form: str, dtype: str, kv_heads: int) -> None:
    report = verify(tmp_path, DecoderConfig(form=form, dtype=dtype, kv_heads=kv_heads))
    assert episodes(report) == ["decode", "full", "short", "padded"]
    assert max(max(step.valid) for step in report.steps) == 64
    assert report.garbage == (1e4 if dtype == "float16" else 1e30)
    assert report.float32_twin is (dtype == "bfloat16")
    if form != "five-d":
        assert {len(step.spans) - (step.length > 1) for step in report.steps} == {1, 3}
    for step in report.steps:
        assert step.kept[0] == step.length  # logits of all positions, and in one more run of fewer
        assert (min(step.kept) < step.length) is (step.length > 1)
    assert {1, 2} <= {min(step.kept) for step in report.steps if step.length > 1}


@pytest.mark.few(4)
@pytest.mark.parametrize("sequence", ["S", 1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_circular_decoders_wrap(tmp_path: Path, form: str, sequence: int | str) -> None:
    report = verify(tmp_path, DecoderConfig(form=form, mode="circular", sequence=sequence))
    assert "wrap" in episodes(report)
    straddling = [s for s in report.steps if any(start % 64 + s.length > 64 for start in s.starts)]
    assert not straddling
    assert any("contract" in note for note in report.notes) is (sequence != 1)


def test_updates_straddle_the_wrap_without_a_contract(tmp_path: Path) -> None:
    report = verify(tmp_path, DecoderConfig(mode="circular"), PlanOptions(fallback=Fallback.FUNCTIONAL))
    assert any(start % 64 + s.length > 64 for s in report.steps for start in s.starts)
    assert not any("contract" in note for note in report.notes)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(mask="bool"),
        DecoderConfig(mask="float"),
        DecoderConfig(mask="float", lengths=False, causal=False),
        DecoderConfig(softcap=4.0),
        DecoderConfig(softmax_precision="float32", dtype="float16"),
        DecoderConfig(softmax_precision="bfloat16", softcap=4.0, dtype="float16"),
        DecoderConfig(softmax_precision="bfloat16", dtype="bfloat16"),
        DecoderConfig(value_head_size=24),
        DecoderConfig(lengths=False),
        DecoderConfig(batch=2, sequence=1),
        DecoderConfig(capacity=4),
        DecoderConfig(capacity=3, mode="circular"),
    ],
    ids=lambda c: ",".join(f"{k}={v}" for k, v in dataclasses.asdict(c).items() if v != getattr(DecoderConfig(), k)),
)
def test_other_decoders(tmp_path: Path, config: DecoderConfig) -> None:
    verify(tmp_path, config)


@pytest.mark.parametrize("layout", CacheLayout)
@pytest.mark.parametrize("span", [True, False])
def test_options(tmp_path: Path, span: bool, layout: CacheLayout) -> None:
    report = verify(tmp_path, DecoderConfig(), PlanOptions(attention_span=span, cache_layout=layout))
    assert any(step.spans for step in report.steps) is span


def test_symbolic_capacity(tmp_path: Path) -> None:
    report = verify(tmp_path, DecoderConfig(capacity="max_len"), PlanOptions(capacity=48))
    assert max(max(step.valid) for step in report.steps) == 48


@pytest.mark.parametrize("dtype", DTYPES)
def test_external_weights_in_a_read_only_folder(tmp_path: Path, dtype: str) -> None:
    write_decoder(tmp_path / "m.onnx", DecoderConfig(dtype=dtype), external_threshold=1024)
    tmp_path.chmod(0o555)
    try:
        verify_model(tmp_path / "m.onnx").check()
    finally:
        tmp_path.chmod(0o755)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]


def test_schedule_follows_the_options(tmp_path: Path) -> None:
    wanted = VerifyOptions(batch=2, chunks=(6,), tokens=2, seed=3)
    report = verify(tmp_path, DecoderConfig(), wanted=wanted)
    assert [s.length for s in report.steps if s.episode == "decode"] == [6, 1, 1]
    assert {len(s.starts) for s in report.steps} == {2}


def test_a_fixed_batch_and_length_win(tmp_path: Path) -> None:
    report = verify(tmp_path, DecoderConfig(batch=4, sequence=2))
    assert {(len(s.starts), s.length) for s in report.steps} == {(4, 2)}


@pytest.mark.few(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opset", [25, 26, pytest.param(27, marks=since_1_32)])
def test_newer_opsets(tmp_path: Path, opset: int, form: str) -> None:
    assert verify(tmp_path, DecoderConfig(opset=opset, form=form)).original_engine.startswith("ONNX Runtime")


@pytest.mark.parametrize("form", FORMS)
def test_an_opset_that_onnx_runtime_lacks_runs_on_the_reference_evaluator(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """27 of 1.31; 1.32 knows all that ONNX 1.23 has, and is made to refuse it."""

    class Older(OrtSession):
        def __init__(self, model: Path | onnx.ModelProto, *given: Any) -> None:
            loaded = onnx.load(model) if isinstance(model, Path) else model
            if any(entry.version >= 27 for entry in loaded.opset_import):
                raise EngineError("Opset 27 is under development")
            super().__init__(model, *given)

    monkeypatch.setattr(sessions, "OrtSession", Older)
    report = verify(tmp_path, DecoderConfig(opset=27, form=form))
    assert report.original_engine.startswith("ONNX reference evaluator")
    assert report.rewritten_engine.startswith("ONNX reference evaluator")
    assert "does not run the original model" in report.notes[0]


def test_report_survives_json(tmp_path: Path) -> None:
    report = verify(tmp_path, DecoderConfig())
    assert msgspec.json.decode(msgspec.json.encode(report), type=VerifyReport) == report


def with_extra_input(config: DecoderConfig, *shape: int | str) -> onnx.ModelProto:
    """The decoder with an input that scales the logits: nothing says what it is."""
    model = make_decoder(config)
    model.graph.node[-1].output[0] = "unscaled"
    model.graph.input.append(onnx.helper.make_tensor_value_info("temperature_scale", onnx.TensorProto.FLOAT, shape))
    model.graph.node.append(onnx.helper.make_node("Mul", ["unscaled", "temperature_scale"], ["logits"], name="scale"))
    return model


def test_unexplained_inputs_of_known_shape_are_filled(tmp_path: Path) -> None:
    onnx.save(with_extra_input(DecoderConfig(), 256), tmp_path / "m.onnx")
    verify_model(tmp_path / "m.onnx").check()


def test_unexplained_inputs_of_unknown_shape_need_values(tmp_path: Path) -> None:
    onnx.save(with_extra_input(DecoderConfig(), "who_knows"), tmp_path / "m.onnx")
    with pytest.raises(OptionError, match="axis 0 of input 'temperature_scale'"):
        verify_model(tmp_path / "m.onnx")
    np.savez(tmp_path / "values.npz", temperature_scale=np.linspace(0.5, 1.5, 256, dtype=np.float32))
    verify_model(tmp_path / "m.onnx", verify=VerifyOptions(inputs=str(tmp_path / "values.npz"))).check()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nobody": np.zeros(1)}, "'nobody', which is no input of the model; inputs are input_ids"),
        ({"write_indices": np.zeros(3)}, r"'write_indices' \(write_indices\), which verification sets itself"),
        ({"input_ids": np.zeros((1, 1), np.int64)}, r"shape \[1, 1\], and a step needs \[3, 5\]"),
    ],
)
def test_given_values_must_fit(tmp_path: Path, values: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "values.npz", **values)
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig())
    with pytest.raises(OptionError, match=message):
        verify_model(path, verify=VerifyOptions(inputs=str(tmp_path / "values.npz")))


def test_given_values_must_be_readable(tmp_path: Path) -> None:
    (tmp_path / "values.npz").write_text("no archive")
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig())
    with pytest.raises(OptionError, match=r"cannot be read as an \.npz file"):
        verify_model(path, verify=VerifyOptions(inputs=str(tmp_path / "values.npz")))


def test_caches_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trt_kvcache.verify.memory.spare", lambda: 8 << 30)
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(capacity="max_len"))
    with pytest.raises(OptionError, match="verify with a smaller capacity"):
        verify_model(path, PlanOptions(capacity=1 << 24))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"chunks": (0,)}, r"chunks are \[0\]"),
        ({"chunks": (), "tokens": 0}, "at least one step"),
        ({"tolerance": 1.5}, "tolerance is 1.5"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        VerifyOptions(**wrong)
