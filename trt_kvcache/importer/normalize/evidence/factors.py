"""Factors that a graph computes from sizes that never change, as the constants that they are.

    keys * Sqrt(Sqrt(Cast(Shape(query)[-1])))        becomes        keys * 2.8284

TorchScript scales like this. Where nothing is rounded behind it, a core of attention is proven by its values, whatever
made them; what is rounded is followed operator by operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import FLOATS, Emitter, dims, is_op, producer, small_constant

_ALIKE = ("Identity", "Squeeze", "Unsqueeze", "Reshape")  # of a single number
_Value = npt.NDArray[Any]


def fold_factors(graph: gs.Graph) -> None:
    """Edit, in place, what a Mul or Div takes as a single number.

    Args:
        graph: with inferred shapes.
    """
    emitter = Emitter(graph)
    for node in [n for n in graph.nodes if is_op(n, "Mul", "Div")]:
        for place, tensor in enumerate(node.inputs):
            rank = len(dims(tensor) or ())
            value = _value(tensor) if small_constant(tensor) is None and rank <= 1 else None
            if value is not None and value.size == 1 and _is_float(value) and np.isfinite(value).all():
                node.inputs[place] = emitter.constant(value.reshape([1] * rank))


def _value(tensor: gs.Tensor) -> _Value | None:
    """What constants and sizes make. Sizes are float64, unknown ones NaN; nothing else is float64."""
    if (value := small_constant(tensor)) is not None:
        return None if value.dtype == np.float64 else value
    node = producer(tensor)
    if node is None:
        return None
    if is_op(node, "Shape"):
        shape = dims(node.inputs[0])
        sizes = None if shape is None else np.array([d if isinstance(d, int) else np.nan for d in shape])
        return None if sizes is None else sizes[node.attrs.get("start", 0) : node.attrs.get("end", len(sizes))]
    values = [_value(t) for t in node.inputs if not t.is_empty()]
    return None if any(value is None for value in values) else _result(node, values)


def _result(node: gs.Node, values: list[Any]) -> _Value | None:
    first = values[0]
    if is_op(node, "Slice") and first.ndim == 1 and all(value.size == 1 for value in values[1:]):
        start, end, step = (*(int(v.reshape(())) for v in (*values[1:3], *values[4:])), 1)[:3]
        return np.asarray(first[start:end:step])
    if is_op(node, "Gather") and first.ndim == 1 and values[1].size == 1:
        return np.asarray(first[int(values[1].reshape(()))])
    if is_op(node, "Cast") and int(node.attrs["to"]) in FLOATS:
        return np.asarray(first.astype(onnx.helper.tensor_dtype_to_np_dtype(int(node.attrs["to"]))))
    if is_op(node, *_ALIKE) and first.size == 1:
        return np.asarray(first.reshape(()))
    if is_op(node, "Sqrt") and _is_float(first):
        return np.asarray(np.sqrt(first))
    if is_op(node, "Div", "Mul") and all(map(_is_float, values)):
        return np.asarray(np.divide(*values) if is_op(node, "Div") else np.multiply(*values))
    return None


def _is_float(value: _Value) -> bool:
    return value.dtype in (np.float32, np.float16)
