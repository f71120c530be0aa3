"""ONNX functions that define the plugin's operators by plain operators.

In words, for sequence ``b`` with tokens ``start[b] .. end[b]`` of its update (padded: 0 to S_new; packed:
``lengths[b]`` to ``lengths[b + 1]``): token ``t`` goes to row ``write_indices[b] + t - start[b]``, circular:
modulo the capacity, where the last tokens win. A sequence whose bounds lie outside the update writes nothing, nor does
a linear one that does not fit into the cache; packed lengths that do not ascend write nothing at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from trt_kvcache.importer.plan import UpdateMode
from trt_kvcache.plugins.operators import NAMESPACE, Operator

_ATTRIBUTES = ("plugin_namespace", "plugin_version", "aot")  # for TensorRT's parser; they say nothing about the meaning


class _Body:
    """Nodes of a function under construction."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def constant(self, value: Any, name: str, dtype: Any = np.int64) -> str:
        return self.add("Constant", [], name, value=onnx.numpy_helper.from_array(np.asarray(value, dtype), name))


def operator_function(operator: Operator, opset: int, *, through_float: bool = False) -> onnx.FunctionProto:
    """Make the function of one operator, for a model of this opset.

    Args:
        operator: which one.
        opset: of the model.
        through_float: values go through float32, unchanged: for caches of 8-bit and 4-bit floats and 4-bit integers,
            which ONNX's GatherND and ScatterND do not take (float32 holds all of theirs, and those of the other types
            but int32 and int64).
    """
    body = _Body()
    for value in (0, 1):
        body.constant(value, f"scalar_{value}")
    for value in (0, 1, -1):
        body.constant([value], f"vector_{value}")
    body.constant([2**62], "vector_end")
    suffix = "_float" if through_float else ""
    if through_float:
        for name in (name for name in operator.inputs if name.startswith(("cache", "update"))):
            body.add("Cast", [name], name + suffix, to=TensorProto.FLOAT)
    _bounds(body, operator, suffix)
    _accepted(body, operator)
    _places(body, operator)
    for i in range(operator.caches):
        _scatter(body, operator, i, suffix)
    return helper.make_function(
        NAMESPACE, operator.name, list(operator.inputs), list(operator.outputs), body.nodes,
        [helper.make_opsetid("", opset)], attributes=list(_ATTRIBUTES),
    )  # fmt: skip


def _bounds(body: _Body, operator: Operator, suffix: str) -> None:
    """``first``, ``start``, ``end`` and ``count`` [B]; ``length`` and ``capacity`` [1]."""
    axis = 0 if operator.packed else 2
    body.add("Shape", [f"update_0{suffix}"], "length", start=axis, end=axis + 1)
    body.add("Shape", [f"cache_0{suffix}"], "capacity", start=2, end=3)
    body.add("Cast", ["write_indices"], "given_first", to=TensorProto.INT64)
    circular = operator.mode is UpdateMode.CIRCULAR
    body.add("Mod", ["given_first", "capacity"], "first") if circular else body.add(
        "Identity", ["given_first"], "first"
    )
    if operator.packed:
        body.add("Cast", ["lengths"], "bounds", to=TensorProto.INT64)
        body.add("Slice", ["bounds", "vector_0", "vector_-1"], "start")
        body.add("Slice", ["bounds", "vector_1", "vector_end"], "end")
    else:
        body.add("Mul", ["first", "scalar_0"], "start")
        body.add("Add", ["start", "length"], "end")
    body.add("Sub", ["end", "start"], "count")


def _accepted(body: _Body, operator: Operator) -> None:
    """Emit ``accepted`` [B]: True for sequences that the operator writes."""
    tests = [
        body.add("GreaterOrEqual", ["start", "scalar_0"], "starts_inside"),
        body.add("GreaterOrEqual", ["count", "scalar_0"], "ascends"),
        body.add("LessOrEqual", ["end", "length"], "ends_inside"),
    ]
    if operator.packed:
        body.add("Cast", ["ascends"], "ascends_int", to=TensorProto.INT64)
        body.add("ReduceMin", ["ascends_int"], "all_ascend_int", keepdims=0)
        tests.append(body.add("Cast", ["all_ascend_int"], "all_ascend", to=TensorProto.BOOL))
    if operator.mode is UpdateMode.LINEAR:
        body.add("Sub", ["capacity", "count"], "last_first")
        body.add("LessOrEqual", ["first", "last_first"], "fits_after")
        body.add("GreaterOrEqual", ["first", "scalar_0"], "fits_before")
        body.add("And", ["fits_after", "fits_before"], "fits_inside")
        body.add("Equal", ["count", "scalar_0"], "is_empty")
        tests.append(body.add("Or", ["fits_inside", "is_empty"], "fits"))
    _all(body, tests, "accepted")


def _places(body: _Body, operator: Operator) -> None:
    """Emit ``sources`` [K, 2]: sequence and token to write; ``targets`` [K, 2]: sequence and row of the cache."""
    for name in ("first", "start", "count", "accepted"):
        body.add("Unsqueeze", [name, "vector_1"], f"{name}_column")
    body.add("Squeeze", ["length"], "length_scalar")
    body.add("Range", ["scalar_0", "length_scalar", "scalar_1"], "token")
    body.add("Sub", ["token", "start_column"], "ahead")
    tests = [
        "accepted_column",
        body.add("GreaterOrEqual", ["ahead", "scalar_0"], "is_after_start"),
        body.add("Less", ["ahead", "count_column"], "is_before_end"),
    ]
    body.add("Add", ["first_column", "ahead"], "unwrapped")
    if operator.mode is UpdateMode.CIRCULAR:
        body.add("Sub", ["count_column", "capacity"], "overwritten")
        tests.append(body.add("GreaterOrEqual", ["ahead", "overwritten"], "stays"))
        body.add("Mod", ["unwrapped", "capacity"], "position")
    else:
        body.add("Identity", ["unwrapped"], "position")
    _all(body, tests, "written")
    body.add("NonZero", ["written"], "written_indices")
    body.add("Transpose", ["written_indices"], "sources")
    body.add("GatherND", ["position", "sources"], "written_position")
    body.add("Unsqueeze", ["written_position", "vector_1"], "position_column")
    body.add("Slice", ["sources", "vector_0", "vector_1", "vector_1"], "row_column")
    body.add("Concat", ["row_column", "position_column"], "targets", axis=1)
    if operator.packed:
        body.add("Slice", ["sources", "vector_1", "vector_end", "vector_1"], "token_column")


def _scatter(body: _Body, operator: Operator, i: int, suffix: str) -> None:
    update, cache, present = f"update_{i}{suffix}", f"cache_{i}{suffix}", f"present_{i}{suffix}"
    if operator.quantized:
        update = _quantize(body, i)
        if suffix:
            update = body.add("Cast", [update], f"quantized_{i}{suffix}", to=TensorProto.FLOAT)
    if operator.packed:
        body.add("GatherND", [update, "token_column"], f"rows_{i}")
    else:
        body.add("Transpose", [update], f"update_rows_{i}", perm=[0, 2, 1, 3])
        body.add("GatherND", [f"update_rows_{i}", "sources"], f"rows_{i}")
    body.add("Transpose", [cache], f"cache_rows_{i}", perm=[0, 2, 1, 3])
    body.add("ScatterND", [f"cache_rows_{i}", "targets", f"rows_{i}"], f"present_rows_{i}")
    body.add("Transpose", [f"present_rows_{i}"], present, perm=[0, 2, 1, 3])
    if suffix:
        body.add("CastLike", [present, f"cache_{i}"], f"present_{i}")


def _quantize(body: _Body, i: int) -> str:
    """Quantize an update in float32 to the cache's type; axis 1 is the axis of heads in both forms."""
    body.add("Cast", [f"update_{i}"], f"unquantized_{i}", to=TensorProto.FLOAT)
    body.add("Mul", [f"scale_{i}", body.constant(0, f"zero_{i}", np.float32)], f"zeros_{i}")
    body.add("CastLike", [f"zeros_{i}", f"cache_{i}"], f"zero_point_{i}")
    inputs = [f"unquantized_{i}", f"scale_{i}", f"zero_point_{i}"]
    return body.add("QuantizeLinear", inputs, f"quantized_{i}", axis=1)


def _all(body: _Body, tests: list[str], name: str) -> None:
    """Emit ``name``, which is True if all `tests` are."""
    result = tests[0]
    for i, test in enumerate(tests[1:], start=2):
        result = body.add("And", [result, test], name if i == len(tests) else f"{name}_{i}")
