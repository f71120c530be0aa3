"""A verifier that cannot fail proves nothing: every kind of wrong rewrite that is known must show in the report.

The rewritten model is either the importer's own with one mistake added, or the original with what TensorRT's parser
makes of it (`nonpad_kv_seqlen` dropped, causal aligned to the upper left corner).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder, write_decoder
from onnx import ModelProto, NodeProto, helper

from trt_kvcache.errors import UnsupportedModelError, VerificationError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.plan import LogitPositions, PhysicalLayout, PlanOptions
from trt_kvcache.verify import VerifyOptions, VerifyReport, verify_import, verify_model

Mistake = Callable[[ModelProto], None]


def verify_mutated(folder: Path, config: DecoderConfig, mistake: Mistake, *, original: bool) -> VerifyReport:
    """Verifies a rewritten model with a mistake; `original`: the original graph plays the rewritten one."""
    path = write_decoder(folder / "m.onnx", config)
    logits = LogitPositions.ALL if original else LogitPositions.LAST
    imported = import_model(path, PlanOptions(attention_span=not original, logits=logits))
    wrong = ModelProto()
    wrong.CopyFrom(imported.source.proto if original else imported.model)
    mistake(wrong)
    onnx.checker.check_model(wrong)
    plan = imported.plan
    if original:
        plain = {"layout": PhysicalLayout.AS_IS}
        plan = dataclasses.replace(plan, caches=tuple(dataclasses.replace(c, **plain) for c in plan.caches))
    return verify_import(ImportedModel(imported.source, plan, wrong), VerifyOptions())


def nodes(model: ModelProto, op: str) -> list[NodeProto]:
    found = [n for n in model.graph.node if n.op_type == op]
    assert found, f"no {op} to mutate"
    return found


def constant(model: ModelProto, name: str, values: list[int] | float, dtype: type = np.int64) -> str:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values, dtype), name))
    return name


def insert(model: ModelProto, node: NodeProto, place: int, op: str, *others: str, **attributes: int) -> None:
    """Puts an operator in front of one input of a node."""
    name = f"mistake/{op}/{node.name}/{place}"
    new = helper.make_node(op, [node.input[place], *others], [name], name=name, **attributes)
    node.input[place] = name
    model.graph.node.insert(list(model.graph.node).index(node), new)


def set_attribute(node: NodeProto, name: str, value: float | str) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def drop_lengths(model: ModelProto) -> None:
    for node in nodes(model, "Attention"):
        node.input[6] = ""


def not_causal(model: ModelProto) -> None:
    for node in nodes(model, "Attention"):
        set_attribute(node, "is_causal", 0)


def read_garbage(model: ModelProto) -> None:
    five = constant(model, "five", [5])
    for node in nodes(model, "Attention"):
        insert(model, node, 6, "Max", five)


def other_scale(model: ModelProto) -> None:
    set_attribute(nodes(model, "Attention")[0], "scale", 0.2)


def swap_heads(model: ModelProto) -> None:
    heads = next(v for v in model.graph.input if v.name == "key_cache.0").type.tensor_type.shape.dim[1].dim_value
    swapped = constant(model, "swapped", [1, 0, *range(2, heads)])
    insert(model, nodes(model, "TensorScatter")[0], 1, "Gather", swapped, axis=1)


def swap_keys_and_values(model: ModelProto) -> None:
    node = nodes(model, "Attention")[-1]
    node.input[1], node.input[2] = node.input[2], node.input[1]


def write_one_late(model: ModelProto) -> None:
    one = constant(model, "one", [1])
    for node in nodes(model, "TensorScatter"):
        insert(model, node, 2, "Sub", one)
        insert(model, node, 2, "Abs")


def drop_mask(model: ModelProto) -> None:
    for node in nodes(model, "Attention"):
        node.input[3] = ""


def clear_unused_rows(model: ModelProto) -> None:
    zero = constant(model, "zero", 0.0, np.float32)
    insert(model, nodes(model, "TensorScatter")[0], 0, "Mul", zero)


def modulo_off_by_one(model: ModelProto) -> None:
    modulo = constant(model, "modulo", [63])
    for node in nodes(model, "TensorScatter"):
        set_attribute(node, "mode", "linear")
        insert(model, node, 2, "Mod", modulo)


def no_modulo_clamp(model: ModelProto) -> None:
    last = constant(model, "last", [63])
    for node in nodes(model, "TensorScatter"):
        set_attribute(node, "mode", "linear")
        insert(model, node, 2, "Min", last)


def nan_logits(model: ModelProto) -> None:
    node = next(n for n in model.graph.node if "logits" in n.output)
    insert(model, node, 0, "Sqrt")


HEADS = DecoderConfig(form="heads-major")
ROLLING = DecoderConfig(form="heads-major", mode="circular", sequence=1)


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("mistake", "config", "outputs"),
    [
        (drop_lengths, HEADS, ["logits"]),
        (drop_lengths, dataclasses.replace(HEADS, dtype="float16"), ["logits"]),
        (drop_lengths, dataclasses.replace(HEADS, dtype="bfloat16"), ["logits"]),
        (drop_lengths, DecoderConfig(), ["logits"]),
        (not_causal, HEADS, ["logits"]),
        (read_garbage, HEADS, ["logits"]),
        (other_scale, HEADS, ["logits"]),
        (other_scale, dataclasses.replace(HEADS, dtype="float16"), ["logits"]),
        (swap_heads, HEADS, ["logits", "updated_key_cache.0"]),
        (swap_heads, dataclasses.replace(HEADS, kv_heads=4), ["logits", "updated_key_cache.0"]),
        (swap_keys_and_values, HEADS, ["logits"]),
        (write_one_late, HEADS, ["updated_key_cache.0", "updated_value_cache.1"]),
        (drop_mask, dataclasses.replace(HEADS, mask="bool"), ["logits"]),
        (drop_mask, dataclasses.replace(HEADS, mask="float"), ["logits"]),
        (drop_mask, dataclasses.replace(HEADS, mask="float", causal=False), ["logits"]),
        (clear_unused_rows, HEADS, ["updated_key_cache.0"]),
        (modulo_off_by_one, ROLLING, ["updated_key_cache.0", "updated_value_cache.1"]),
        (no_modulo_clamp, ROLLING, ["updated_key_cache.0", "updated_value_cache.1"]),
        (nan_logits, HEADS, ["logits"]),
    ],
)
def test_a_wrong_model_fails(tmp_path: Path, mistake: Mistake, config: DecoderConfig, outputs: list[str]) -> None:
    report = verify_mutated(tmp_path, config, mistake, original=True)
    assert not report.passed
    assert {o.name for o in report.outputs if not o.passed} >= set(outputs)
    with pytest.raises(VerificationError, match="does not give the original's numbers"):
        report.check()


@pytest.mark.parametrize("form", ["heads-major", "mobius"])
def test_the_same_model_passes(tmp_path: Path, form: str) -> None:
    report = verify_mutated(tmp_path, DecoderConfig(form=form), lambda model: None, original=True)
    assert report.passed
    assert all(o.exact for o in report.outputs)


def span_short_by_one(model: ModelProto) -> None:
    shorter = [constant(model, f"bound_{i}", [i]) for i in (1, 2**31)]
    readers = [(n, i) for n in model.graph.node for i, x in enumerate(n.input) if x == "attention_span"]
    assert readers
    model.graph.node.insert(0, helper.make_node("Slice", ["attention_span", *shorter], ["short_span"], name="short"))
    for node, place in readers:
        node.input[place] = "short_span"


def update_not_transposed(model: ModelProto) -> None:
    """Heads and tokens of an update mixed up: a reshape where a transpose belongs."""
    scatter = nodes(model, "TensorScatter")[0]
    transpose = next(n for n in model.graph.node if scatter.input[1] in n.output)
    assert transpose.op_type == "Transpose"
    shape = constant(model, "mixed", [0, 2, -1, 16])
    transpose.op_type = "Reshape"
    del transpose.attribute[:]
    transpose.input.append(shape)


def mask_not_shifted(model: ModelProto) -> None:
    """The causal frontier at the upper left corner: the offset `nonpad - S_q` is lost."""
    for node in nodes(model, "Attention"):
        node.input[3] = ""
        set_attribute(node, "is_causal", 1)


def own_key_hidden(model: ModelProto) -> None:
    """The causal frontier one key too low."""
    for node in nodes(model, "LessOrEqual"):
        node.op_type = "Less"


def next_key_visible(model: ModelProto) -> None:
    """The causal frontier one key too high."""
    one = constant(model, "one", [1])
    for node in nodes(model, "LessOrEqual"):
        insert(model, node, 1, "Add", one)


def first_positions(model: ModelProto) -> None:
    """Logits of the first positions instead of the last."""
    cut = next(n for n in nodes(model, "Slice") if "last_positions" in n.name)
    last = next(n for n in nodes(model, "Shape") if n.input[0] == "logits_span")
    cut.input[1], cut.input[2] = constant(model, "none", [0]), last.output[0]


def one_position_early(model: ModelProto) -> None:
    """Logits of positions that end before the last."""
    cut = next(n for n in nodes(model, "Slice") if "last_positions" in n.name)
    one = constant(model, "one", [1])
    for place in (1, 2):
        insert(model, cut, place, "Sub", one)


IMPORTER_MISTAKES = [
    span_short_by_one, update_not_transposed, mask_not_shifted, own_key_hidden, next_key_visible, swap_keys_and_values,
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("mistake", [*IMPORTER_MISTAKES, first_positions, one_position_early])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_mistake_in_the_importers_model_fails(tmp_path: Path, dtype: str, mistake: Mistake) -> None:
    report = verify_mutated(tmp_path, DecoderConfig(dtype=dtype), mistake, original=False)
    assert not report.passed
    assert "logits" in {o.name for o in report.outputs if not o.passed}


def test_stale_rows_are_counted(tmp_path: Path) -> None:
    report = verify_mutated(tmp_path, HEADS, clear_unused_rows, original=True)
    wrong = next(o for o in report.outputs if o.name == "updated_key_cache.0")
    assert wrong.max_relative == 0
    assert wrong.stale_rows_changed > 100
    with pytest.raises(VerificationError, match=r"'updated_key_cache.0' changes \d+ cache rows .* at step \d+ \("):
        dataclasses.replace(report, outputs=(wrong,)).check()


def test_not_finite_is_reported_without_a_number(tmp_path: Path) -> None:
    report = verify_mutated(tmp_path, HEADS, nan_logits, original=True)
    logits = report.outputs[0]
    assert (logits.max_absolute, logits.max_relative) == (None, None)
    with pytest.raises(VerificationError, match="is not finite where the original is"):
        report.check()


def test_a_rewritten_model_that_does_not_run_fails(tmp_path: Path) -> None:
    def misfit(model: ModelProto) -> None:
        insert(model, nodes(model, "Attention")[0], 0, "Reshape", constant(model, "wrong", [-1, 3, 7, 16]))

    report = verify_mutated(tmp_path, HEADS, misfit, original=True)
    assert not report.passed
    with pytest.raises(VerificationError, match="the rewritten model cannot be run where the original can"):
        report.check()


def test_a_missing_output_fails(tmp_path: Path) -> None:
    def lose(model: ModelProto) -> None:
        del model.graph.output[-1]

    report = verify_mutated(tmp_path, HEADS, lose, original=True)
    assert report.failure is not None
    assert "has no output 'updated_value_cache.1'" in report.failure


def test_an_original_that_does_not_run_is_refused_by_name(tmp_path: Path) -> None:
    model = make_decoder(HEADS)
    insert(model, nodes(model, "MatMul")[-1], 0, "Reshape", constant(model, "impossible", [-1, 7, 11, 64]))
    model.graph.node.append(helper.make_node("Reshape", ["odd", constant(model, "back", [1, -1, 256])], ["logits"]))
    next(n for n in model.graph.node if "logits" in n.output).output[0] = "odd"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match="no engine here runs the original model"):
        verify_model(tmp_path / "m.onnx")


def test_plugin_nodes_are_refused_by_name(tmp_path: Path) -> None:
    def plugin(model: ModelProto) -> None:
        node = nodes(model, "TensorScatter")[0]
        node.op_type, node.domain = "TRT_SomePlugin", "trt.plugins"
        del node.attribute[:]
        model.opset_import.append(helper.make_opsetid("trt.plugins", 1))

    with pytest.raises(UnsupportedModelError, match=r"no operator for updated_key_cache\.0/TensorScatter"):
        verify_mutated(tmp_path, HEADS, plugin, original=True)
