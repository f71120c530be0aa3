"""A verifier that cannot fail proves nothing: every kind of wrong rewrite that is known must show in the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_graphs import Decoder as Growing
from concat_graphs import make_decoder as make_growing
from decoders import DecoderConfig, make_decoder, write_decoder
from foreign_decoders import make_foreign
from onnx import ModelProto, helper
from verify import mistakes as m

from trt_kvcache.errors import OptionError, UnsupportedModelError, VerificationError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.plan import LogitPositions, PhysicalLayout, PlanOptions
from trt_kvcache.importer.steps.original import OriginalInterface
from trt_kvcache.verify import VerifyReport, verify_model

HEADS = DecoderConfig(form="heads-major")
HALF = replace(HEADS, dtype="float16")
ROLLING = DecoderConfig(form="heads-major", mode="circular", sequence=1)
KEY, VALUE = "updated_key_cache.0", "updated_value_cache.1"


def verify_mutated(folder: Path, config: DecoderConfig, mistake: m.Mistake, *, original: bool) -> VerifyReport:
    """Verifies a rewritten model with a mistake; `original`: the original graph plays the rewritten one."""
    path = write_decoder(folder / "m.onnx", config)
    logits = LogitPositions.ALL if original else LogitPositions.LAST
    imported = import_model(path, PlanOptions(attention_span=not original, logits=logits))
    plan, model = imported.plan, imported.source.proto if original else imported.model
    if original:
        plan = replace(plan, caches=tuple(replace(c, layout=PhysicalLayout.AS_IS) for c in plan.caches))

    def checked(wrong: ModelProto) -> None:
        mistake(wrong)
        onnx.checker.check_model(wrong)

    return m.verify_with(ImportedModel(imported.source, plan, model), checked)


CANONICAL = [
    (m.no_lengths, HEADS, {"logits"}),
    (m.no_lengths, HALF, {"logits"}),
    (m.no_lengths, replace(HEADS, dtype="bfloat16"), {"logits"}),
    (m.no_lengths, DecoderConfig(), {"logits"}),
    (m.attention("is_causal", 0), HEADS, {"logits"}),
    (m.lengths("Max", 5), HEADS, {"logits"}),
    (m.attention("scale", 0.2), HALF, {"logits"}),
    (m.swap_heads, HEADS, {"logits", KEY}),
    (m.swap_heads, replace(HEADS, kv_heads=4), {"logits", KEY}),
    (m.swap_keys_and_values, HEADS, {"logits"}),
    (m.write_one_early, HEADS, {KEY, VALUE}),
    (m.no_mask, replace(HEADS, mask="bool"), {"logits"}),
    (m.no_mask, replace(HEADS, mask="float", causal=False), {"logits"}),
    (m.clear_unused_rows, HEADS, {KEY}),
    (m.rows("Mod", 63), ROLLING, {KEY, VALUE}),
    (m.rows("Min", 63), ROLLING, {KEY, VALUE}),
    (m.nan_logits, HEADS, {"logits"}),
]
ORIGINALS: dict[str, Callable[[], ModelProto]] = {
    **{str(how): (lambda how=how: make_growing(Growing(**how))) for how in (
        {}, {"mask": "padding", "positions": "padding"}, {"window": 5}, {"dtype": np.float16}, {"batch": 2})},
    "scatter": lambda: make_foreign("scatter", DecoderConfig(vocab=64, capacity=24)),
}  # fmt: skip
IN_ANY = (m.span_short_by_one, m.own_key_hidden, m.next_key_visible, m.write_one_early, m.swap_keys_and_values)


def fails(report: VerifyReport, outputs: set[str]) -> None:
    assert not report.passed
    assert {o.name for o in report.outputs if not o.passed} >= outputs
    with pytest.raises(VerificationError, match="does not give the original's numbers"):
        report.check()


@pytest.mark.few(4)
@pytest.mark.parametrize(("mistake", "config", "outputs"), CANONICAL)
def test_a_wrong_model_fails(tmp_path: Path, mistake: m.Mistake, config: DecoderConfig, outputs: set[str]) -> None:
    fails(verify_mutated(tmp_path, config, mistake, original=True), outputs)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("mistake", IN_ANY)
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_wrong_rewrite_of_another_interface_fails(tmp_path: Path, name: str, mistake: m.Mistake) -> None:
    onnx.save(ORIGINALS[name](), tmp_path / "m.onnx")
    imported = import_model(tmp_path / "m.onnx", PlanOptions(capacity=24))
    assert imported.plan.original
    fails(m.verify_with(imported, mistake), {"logits"})


def test_rows_that_start_apart_are_refused_where_the_batch_is_fixed(tmp_path: Path) -> None:
    onnx.save(make_growing(Growing(batch=2)), tmp_path / "m.onnx")
    interface = OriginalInterface(import_model(tmp_path / "m.onnx", PlanOptions(capacity=24)).plan, twin=False)
    with pytest.raises(OptionError, match=r"exported for 2 rows that start together, not at \[4, 0\]"):
        interface.groups({"write_indices": np.array([4, 0])})


@pytest.mark.few(1)
@pytest.mark.parametrize("mistake", [*m.IN_REWRITES, m.one_position_early])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_mistake_in_the_importers_model_fails(tmp_path: Path, dtype: str, mistake: m.Mistake) -> None:
    fails(verify_mutated(tmp_path, DecoderConfig(dtype=dtype), mistake, original=False), {"logits"})


def test_the_same_model_passes(tmp_path: Path) -> None:
    report = verify_mutated(tmp_path, HEADS, m.nothing, original=True)
    assert report.passed
    assert all(o.exact for o in report.outputs)


def test_stale_rows_are_counted(tmp_path: Path) -> None:
    report = verify_mutated(tmp_path, HEADS, m.clear_unused_rows, original=True)
    wrong = next(o for o in report.outputs if o.name == KEY)
    assert wrong.max_relative == 0
    assert wrong.stale_rows_changed > 100
    with pytest.raises(VerificationError, match=rf"'{KEY}' changes \d+ cache rows .* at step \d+ \("):
        replace(report, outputs=(wrong,)).check()


def test_not_finite_is_reported_without_a_number(tmp_path: Path) -> None:
    report = verify_mutated(tmp_path, HEADS, m.nan_logits, original=True)
    assert (report.outputs[0].max_absolute, report.outputs[0].max_relative) == (None, None)
    with pytest.raises(VerificationError, match="is not finite where the original is"):
        report.check()


def misfit(model: ModelProto) -> None:
    m.insert(model, m.nodes(model, "Attention")[0], 0, "Reshape", m.constant(model, [-1, 3, 7, 16]))


def lose_an_output(model: ModelProto) -> None:
    del model.graph.output[-1]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (misfit, "the rewritten model cannot be run where the original can"),
        (lose_an_output, f"has no output '{VALUE}'"),
    ],
)
def test_a_rewritten_model_that_does_not_run_fails(tmp_path: Path, mistake: m.Mistake, words: str) -> None:
    report = verify_mutated(tmp_path, HEADS, mistake, original=True)
    with pytest.raises(VerificationError, match=words):
        report.check()


def test_an_original_that_does_not_run_is_refused_by_name(tmp_path: Path) -> None:
    model = make_decoder(HEADS)
    m.insert(model, m.nodes(model, "MatMul")[-1], 0, "Reshape", m.constant(model, [-1, 7, 11, 64]))
    model.graph.node.append(helper.make_node("Reshape", ["odd", m.constant(model, [1, -1, 256])], ["logits"]))
    next(n for n in model.graph.node if "logits" in n.output).output[0] = "odd"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match="no engine here runs the original model"):
        verify_model(tmp_path / "m.onnx")


def test_plugin_nodes_are_refused_by_name(tmp_path: Path) -> None:
    def plugin(model: ModelProto) -> None:
        node = m.nodes(model, "TensorScatter")[0]
        node.op_type, node.domain = "TRT_SomePlugin", "trt.plugins"
        del node.attribute[:]
        model.opset_import.append(helper.make_opsetid("trt.plugins", 1))

    with pytest.raises(UnsupportedModelError, match=r"no operator for updated_key_cache\.0/TensorScatter"):
        verify_mutated(tmp_path, HEADS, plugin, original=True)
