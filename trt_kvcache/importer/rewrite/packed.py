"""Packed updates: TensorRT's own operator, with its meaning attached as an ONNX function.

``TRT_KVCacheUpdate(past, update [T, N, H], write_indices [B], lengths [B + 1], update_form="packed_nhd")`` is not an
ONNX operator. TensorRT's parser takes it in any domain and prefers its own layer to a model-local function of that
name (measured, TensorRT for RTX 1.7.1), so the function makes the model valid and executable elsewhere at no cost.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from trt_kvcache.importer.graph import INT64, Emitter, input_or_none

DOMAIN = "trt_kvcache"
OP = "TRT_KVCacheUpdate"


def rewrite_packed(emitter: Emitter, node: gs.Node) -> None:
    """Move a packed update into the project's domain and give it explicit write indices."""
    node.domain = DOMAIN
    node.attrs = {"update_form": "packed_nhd"}
    if input_or_none(node, 2) is None:
        past = node.inputs[0]
        batch = emitter.op("Shape", [past], f"{past.name}_batch", INT64, start=0, end=1)
        node.inputs[2] = emitter.op("Expand", [emitter.ints(0), batch], f"{past.name}_first", INT64)


def add_packed_function(model: onnx.ModelProto) -> None:
    """Attach the meaning of the packed update to a model that has such nodes in `DOMAIN`."""
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    if not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    model.functions.append(packed_function(opset))


def packed_function(opset: int) -> onnx.FunctionProto:
    """The packed update in plain operators.

    Token t of the packed update belongs to the row b with ``lengths[b] <= t < lengths[b + 1]`` and is written at
    ``present[b, :, write_indices[b] + t - lengths[b], :]``; tokens at and beyond ``lengths[B]`` are padding.
    """

    def constant(name: str, value: int | list[int]) -> onnx.NodeProto:
        tensor = onnx.numpy_helper.from_array(np.asarray(value, np.int64), name)
        return helper.make_node("Constant", [], [name], value=tensor)

    node = helper.make_node
    body = [
        constant("zero", 0), constant("one", 1), constant("zero_1", [0]), constant("one_1", [1]),
        constant("minus_1", [-1]), constant("end_1", [2**62]),
        node("Cast", ["lengths"], ["bounds"], to=onnx.TensorProto.INT64),
        node("Cast", ["write_indices"], ["first"], to=onnx.TensorProto.INT64),
        node("Slice", ["bounds", "minus_1", "end_1"], ["total_1"]),
        node("Squeeze", ["total_1"], ["total"]),
        node("Range", ["zero", "total", "one"], ["token"]),
        node("Slice", ["update", "zero_1", "total_1"], ["tokens"]),
        node("Slice", ["bounds", "one_1", "end_1"], ["ends"]),
        node("Unsqueeze", ["ends", "one_1"], ["ends_2"]),
        node("LessOrEqual", ["ends_2", "token"], ["passed"]),
        node("Cast", ["passed"], ["passed_int"], to=onnx.TensorProto.INT64),
        node("ReduceSum", ["passed_int", "zero_1"], ["row"], keepdims=0),
        node("Gather", ["bounds", "row"], ["row_start"]),
        node("Gather", ["first", "row"], ["row_first"]),
        node("Sub", ["token", "row_start"], ["in_row"]),
        node("Add", ["row_first", "in_row"], ["position"]),
        node("Unsqueeze", ["row", "one_1"], ["row_2"]),
        node("Unsqueeze", ["position", "one_1"], ["position_2"]),
        node("Concat", ["row_2", "position_2"], ["where"], axis=1),
        node("Transpose", ["past"], ["past_rows"], perm=[0, 2, 1, 3]),
        node("ScatterND", ["past_rows", "where", "tokens"], ["present_rows"]),
        node("Transpose", ["present_rows"], ["present"], perm=[0, 2, 1, 3]),
    ]  # fmt: skip
    return helper.make_function(
        DOMAIN, OP, ["past", "update", "write_indices", "lengths"], ["present"], body,
        [helper.make_opsetid("", opset)], attributes=["update_form"],
    )  # fmt: skip
