"""Mistakes that a rewrite may make, each an edit of a model with TensorScatter and Attention."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper

from trt_kvcache.compare.verify_report import VerifyOptions, VerifyReport
from trt_kvcache.importer import ImportedModel
from trt_kvcache.verify import verify_import

Mistake = Callable[[ModelProto], None]


def verify_with(imported: ImportedModel, mistake: Mistake, options: VerifyOptions | None = None) -> VerifyReport:
    """Verify a model against its rewritten form with a mistake."""
    wrong = deepcopy(imported.model)
    mistake(wrong)
    return verify_import(replace(imported, model=wrong), options or VerifyOptions(station=("rewritten",)))


def nodes(model: ModelProto, op: str) -> list[NodeProto]:
    found = [n for n in model.graph.node if n.op_type == op]
    assert found, f"no {op} to change"
    return found


def constant(model: ModelProto, values: object, dtype: type = np.int64) -> str:
    name = f"mistake/{len(model.graph.initializer)}"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values, dtype), name))
    return name


def insert(model: ModelProto, node: NodeProto, place: int, op: str, *others: str, **attributes: int) -> None:
    """Puts an operator before one input of a node."""
    name = f"mistake/{op}/{node.name}/{place}"
    new = helper.make_node(op, [node.input[place], *others], [name], name=name, **attributes)
    node.input[place] = name
    model.graph.node.insert(list(model.graph.node).index(node), new)


def set_attribute(node: NodeProto, name: str, value: float | str) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def nothing(model: ModelProto) -> None:
    """No mistake."""


def no_lengths(model: ModelProto) -> None:
    for node in nodes(model, "Attention"):
        node.input[6] = ""


def lengths(op: str, number: int) -> Mistake:
    """Attention over other valid lengths."""

    def mistake(model: ModelProto) -> None:
        other = constant(model, [number])
        for node in nodes(model, "Attention"):
            insert(model, node, 6, op, other)

    return mistake


def no_mask(model: ModelProto) -> None:
    for node in nodes(model, "Attention"):
        node.input[3] = ""


def attention(name: str, value: float) -> Mistake:
    def mistake(model: ModelProto) -> None:
        for node in nodes(model, "Attention"):
            set_attribute(node, name, value)

    return mistake


def neither_mask_nor_causal(model: ModelProto) -> None:
    no_mask(model)
    attention("is_causal", 0)(model)


def swap_heads(model: ModelProto) -> None:
    """New keys of the first layer in another order of heads."""
    heads = next(v for v in model.graph.input if v.name == "key_cache.0").type.tensor_type.shape.dim[1].dim_value
    insert(model, nodes(model, "TensorScatter")[0], 1, "Gather", constant(model, [1, 0, *range(2, heads)]), axis=1)


def swap_keys_and_values(model: ModelProto) -> None:
    """New rows of the last layer, which attention may be decomposed in."""
    keys, values = nodes(model, "TensorScatter")[-2:]
    keys.input[1], values.input[1] = values.input[1], keys.input[1]


def write_one_early(model: ModelProto) -> None:
    one = constant(model, [1])
    for node in nodes(model, "TensorScatter"):
        insert(model, node, 2, "Sub", one)
        insert(model, node, 2, "Abs")


def rows(op: str, number: int) -> Mistake:
    """Circular updates written linearly, at other rows."""

    def mistake(model: ModelProto) -> None:
        other = constant(model, [number])
        for node in nodes(model, "TensorScatter"):
            set_attribute(node, "mode", "linear")
            insert(model, node, 2, op, other)

    return mistake


def nan_logits(model: ModelProto) -> None:
    insert(model, next(n for n in model.graph.node if "logits" in n.output), 0, "Sqrt")


def span_short_by_one(model: ModelProto) -> None:
    shorter = [constant(model, [i]) for i in (1, 2**31)]
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
    transpose.op_type = "Reshape"
    del transpose.attribute[:]
    transpose.input.append(constant(model, [0, 2, -1, 16]))


def mask_not_shifted(model: ModelProto) -> None:
    """The causal frontier at the upper left corner: the offset `nonpad - S_q` is lost."""
    no_mask(model)
    attention("is_causal", 1)(model)


def own_key_hidden(model: ModelProto) -> None:
    """The causal frontier one key too low."""
    for node in nodes(model, "LessOrEqual"):
        node.op_type = "Less"


def next_key_visible(model: ModelProto) -> None:
    """The causal frontier one key too high."""
    one = constant(model, 1)
    for node in nodes(model, "LessOrEqual"):
        insert(model, node, 1, "Add", one)


def one_position_early(model: ModelProto) -> None:
    """Logits of positions that end before the last."""
    cut = next(n for n in nodes(model, "Slice") if "last_positions" in n.name)
    one = constant(model, [1])
    for place in (1, 2):
        insert(model, cut, place, "Sub", one)


IN_REWRITES = (
    span_short_by_one, update_not_transposed, mask_not_shifted, own_key_hidden, next_key_visible, swap_keys_and_values,
)  # fmt: skip
