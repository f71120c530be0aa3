"""Models that the importer rewrites rightly pass, and the report says what was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from concat_graphs import Decoder
from concat_graphs import make_decoder as make_growing
from decoders import DTYPES, FORMS, DecoderConfig, make_decoder, write_decoder
from hybrids import hybrid_model
from onnx import ModelProto, TensorProto, helper, numpy_helper
from verify.mistakes import verify_with

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import import_model, pipeline
from trt_kvcache.importer.plan import Fallback, PlanOptions
from trt_kvcache.verify import VerifyOptions, VerifyReport, sessions, verify_import, verify_model
from trt_kvcache.verify.sessions import OrtSession, RunError


def verify(folder: Path, config: DecoderConfig, wanted: VerifyOptions | None = None, **options: Any) -> VerifyReport:
    report = verify_model(write_decoder(folder / "m.onnx", config), PlanOptions(**options), wanted or VerifyOptions())
    report.check()
    assert {o.name for o in report.outputs} >= {"logits"}
    assert all(o.max_relative is not None and o.max_relative <= o.tolerance for o in report.outputs)
    return report


def verified(model: ModelProto, folder: Path, capacity: int | None = 24) -> VerifyReport:
    onnx.save(model, folder / "model.onnx")
    return verify_model(folder / "model.onnx", PlanOptions(capacity=capacity))


def episodes(report: VerifyReport) -> list[str]:
    return list(dict.fromkeys(step.episode for step in report.steps))


@pytest.mark.few(3)
@pytest.mark.parametrize(("form", "dtype"), [*zip(FORMS, DTYPES, strict=False), ("mobius", "bfloat16")])
def test_linear_decoders(tmp_path: Path, form: str, dtype: str) -> None:
    report = verify(tmp_path, DecoderConfig(form=form, dtype=dtype, kv_heads=4 if form == "mobius" else 2))
    assert episodes(report) == ["decode", "full", "short", "padded"]
    assert max(max(step.valid) for step in report.steps) == 64
    assert report.garbage == (30 if dtype == "float16" else 1e4)
    assert report.float32_twin is (dtype == "bfloat16")
    if form != "five-d":
        assert {len(step.spans) - (step.length > 1) for step in report.steps} == {1, 3}
    for step in report.steps:
        assert step.kept[0] == step.length  # logits of all positions, and in one more run of fewer
        assert (min(step.kept) < step.length) is (step.length > 1)
    assert msgspec.json.decode(msgspec.json.encode(report), type=VerifyReport) == report


@pytest.mark.parametrize("sequence", ["S", 1])
def test_circular_decoders_wrap(tmp_path: Path, sequence: int | str) -> None:
    report = verify(tmp_path, DecoderConfig(mode="circular", sequence=sequence))
    assert "wrap" in episodes(report)
    assert not [s for s in report.steps if any(start % 64 + s.length > 64 for start in s.starts)]
    assert any("contract" in note for note in report.notes) is (sequence != 1)


def test_updates_straddle_the_wrap_without_a_contract(tmp_path: Path) -> None:
    report = verify(tmp_path, DecoderConfig(mode="circular"), fallback=Fallback.FUNCTIONAL)
    assert any(start % 64 + s.length > 64 for s in report.steps for start in s.starts)
    assert not any("contract" in note for note in report.notes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_external_weights_in_a_read_only_folder(tmp_path: Path, dtype: str) -> None:
    write_decoder(tmp_path / "m.onnx", DecoderConfig(dtype=dtype), external_threshold=1024)
    tmp_path.chmod(0o555)
    try:
        verify_model(tmp_path / "m.onnx").check()
    finally:
        tmp_path.chmod(0o755)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]


@pytest.mark.slow
def test_schedule_follows_the_options_and_the_model(tmp_path: Path) -> None:
    report = verify(tmp_path, DecoderConfig(), VerifyOptions(batch=2, chunks=(6,), tokens=2, seed=3))
    assert [s.length for s in report.steps if s.episode == "decode"] == [6, 1, 1]
    assert {len(s.starts) for s in report.steps} == {2}
    report = verify(tmp_path, DecoderConfig(capacity="max_len"), capacity=48)
    assert max(max(step.valid) for step in report.steps) == 48
    report = verify(tmp_path, DecoderConfig(batch=4, sequence=2))
    assert {(len(s.starts), s.length) for s in report.steps} == {(4, 2)}


def test_an_opset_that_onnx_runtime_lacks_runs_on_the_reference_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older(OrtSession):
        def __init__(self, model: Path | ModelProto, *given: Any) -> None:
            loaded = onnx.load(model) if isinstance(model, Path) else model
            if any(entry.version >= 27 for entry in loaded.opset_import):
                raise RunError("Opset 27 is under development")
            super().__init__(model, *given)

    monkeypatch.setattr(sessions, "OrtSession", Older)
    report = verify(tmp_path, DecoderConfig(opset=27))
    assert report.original_engine.startswith("ONNX reference evaluator")
    assert report.rewritten_engine.startswith("ONNX reference evaluator")
    assert "does not run the original model" in report.notes[0]


def with_extra_input(*shape: int | str) -> ModelProto:
    """A decoder with an input that scales the logits: nothing says what it is."""
    model = make_decoder(DecoderConfig())
    model.graph.node[-1].output[0] = "unscaled"
    model.graph.input.append(helper.make_tensor_value_info("temperature_scale", TensorProto.FLOAT, shape))
    model.graph.node.append(helper.make_node("Mul", ["unscaled", "temperature_scale"], ["logits"], name="scale"))
    return model


@pytest.mark.slow
def test_unexplained_inputs_are_filled_or_given(tmp_path: Path) -> None:
    verified(with_extra_input(256), tmp_path, None).check()
    with pytest.raises(OptionError, match="axis 0 of input 'temperature_scale'"):
        verified(with_extra_input("who_knows"), tmp_path, None)
    np.savez(tmp_path / "values.npz", temperature_scale=np.linspace(0.5, 1.5, 256, dtype=np.float32))
    wanted = VerifyOptions(inputs=str(tmp_path / "values.npz"))
    verify_model(tmp_path / "model.onnx", verify=wanted).check()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nobody": np.zeros(1)}, "'nobody', which is no input of the model; inputs are input_ids"),
        ({"write_indices": np.zeros(3)}, r"'write_indices' \(write_indices\), which verification sets itself"),
        ({"input_ids": np.zeros((1, 1), np.int64)}, r"shape \[1, 1\], and a step needs \[3, 5\]"),
        ({}, r"cannot be read as an \.npz file"),
    ],
)
def test_given_values_must_fit(tmp_path: Path, values: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "values.npz", **values)
    if not values:
        (tmp_path / "values.npz").write_text("no archive")
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig())
    with pytest.raises(OptionError, match=message):
        verify_model(path, verify=VerifyOptions(inputs=str(tmp_path / "values.npz")))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"chunks": (0,)}, r"chunks are \[0\]"),
        ({"chunks": (), "tokens": 0}, "at least one step"),
        ({"tolerance": 1.5}, "tolerance is 1.5"),
        ({"thorough": "yes"}, "thorough"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        VerifyOptions(**wrong)


def declared(decoder: Decoder, name: str, axis: int, size: int) -> ModelProto:
    """A decoder of which one input has a fixed size."""
    model = make_growing(decoder)
    value = next(v for v in model.graph.input if v.name == name)
    value.type.tensor_type.shape.dim[axis].dim_value = size
    return model


def test_a_mask_that_all_sequences_share(tmp_path: Path) -> None:
    """Then all are as long as each other, although positions have a row for each."""
    report = verified(declared(Decoder(mask="own", apply="where"), "mask", 0, 1), tmp_path)
    report.check()
    assert all(len(set(step.starts)) == 1 for step in report.steps)


@pytest.mark.parametrize("size", [1, 4])
def test_a_padding_mask_of_another_batch_is_refused(size: int, tmp_path: Path) -> None:
    model = declared(Decoder(mask="padding", positions="padding"), "attention_mask", 0, size)
    with pytest.raises(UnsupportedModelError, match=f"'attention_mask' .* has {size} rows for a batch of 2"):
        verified(model, tmp_path)


def test_an_original_that_fails_after_its_first_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def run(self: OrtSession, feeds: dict[str, Any], *into: Any) -> dict[str, Any]:
        runs.append(feeds)
        if len(runs) > 3:  # those of a trial, of one sequence each
            raise RunError("out of range")
        return given(self, feeds)

    given = OrtSession.run
    monkeypatch.setattr(OrtSession, "run", run)
    with pytest.raises(UnsupportedModelError, match="no engine runs the original at 5 tokens from .* out of range"):
        verified(make_growing(Decoder()), tmp_path)


def test_state_that_the_rewritten_model_drops_shows(tmp_path: Path) -> None:
    """A rewritten model that starts from zeros in every step is right in the first step of a sequence only."""
    onnx.save(hybrid_model(), tmp_path / "model.onnx")
    imported = import_model(tmp_path / "model.onnx")
    report = verify_import(imported, VerifyOptions())
    report.check()
    assert {o.name for o in report.outputs} >= {"present_conv.1", "present_recurrent.2"}

    def drop(model: ModelProto) -> None:
        state = imported.plan.states[0].past
        for node in model.graph.node:
            node.input[:] = ["nothing" if name == state else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("Sub", [state, state], ["nothing"]))

    assert not verify_with(imported, drop).passed


LENGTH = 41


def _odd(model: ModelProto) -> ModelProto:
    """One key less where ``length * length == 1681``: at one length, away from every number in the graphs."""
    graph, lengths = model.graph, "nonpad_kv_seqlen"
    readers = [n for n in graph.node if lengths in n.input]
    assert readers
    for reader in readers:
        inputs = ["fewer" if name == lengths else name for name in reader.input]
        del reader.input[:]
        reader.input.extend(inputs)
    graph.initializer.append(numpy_helper.from_array(np.array(LENGTH**2), "square"))
    made = (
        helper.make_node("Mul", [lengths, lengths], ["squared"], "squared"),
        helper.make_node("Equal", ["squared", "square"], ["is_odd"], "is_odd"),
        helper.make_node("Cast", ["is_odd"], ["less"], "less", to=TensorProto.INT64),
        helper.make_node("Sub", [lengths, "less"], ["fewer"], "fewer"),
    )
    for place, node in enumerate(made):
        graph.node.insert(place, node)
    return model


@pytest.mark.slow
def test_only_the_thorough_schedule_sees_one_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(form="heads-major"))
    verify_model(path, verify=VerifyOptions(thorough=True)).check()
    export = pipeline._export
    monkeypatch.setattr(pipeline, "_export", lambda *given: _odd(export(*given)))
    verify_model(path).check()  # the residual that the docs name
    with pytest.raises(UnsupportedModelError, match=f"after ({LENGTH - 3} tokens, 3|{LENGTH - 1} tokens, 1) new"):
        verify_model(path, verify=VerifyOptions(thorough=True))
    with pytest.raises(OptionError, match="leave rewritten"):
        verify_model(path, verify=VerifyOptions(thorough=True), rewritten=tmp_path / "out.onnx")
