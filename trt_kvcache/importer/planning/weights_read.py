"""Counts the bytes of weights that a step of one token reads. Only the shapes of weights are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from trt_kvcache.importer.protos import byte_size, constants_of, int_attribute, readers_of

_SAME = ("Cast", "DequantizeLinear", "Identity")
"""Operators whose result has the same rows as the first input."""


def weights_read(model: ModelProto) -> int:
    """Return the bytes of weights that a step of one token reads. Of lookup tables, only the rows read count."""
    constants = constants_of(model.graph)
    readers = readers_of(model.graph.node)
    makers = {name: node for node in model.graph.node for name in node.output}
    return sum(
        math.ceil((byte_size(tensor) or 0) * _share(name, tensor.dims, readers, makers, constants))
        for name, tensor in constants.items()
    )


def _share(
    name: str, shape: Sequence[int], readers: Mapping[str, list[NodeProto]], makers: Mapping[str, NodeProto],
    constants: Mapping[str, TensorProto],
) -> float:  # fmt: skip
    """Return the share (0 to 1) of a constant that a step of one token reads."""
    shares = [0.0] if name in readers else [1.0]
    for node in readers.get(name, ()):
        if node.op_type in _SAME and node.input[0] == name:
            shares.append(_share(node.output[0], shape, readers, makers, constants))
        elif node.op_type in ("Gather", "GatherND") and node.input[0] == name and shape:
            axis = int_attribute(node, "axis") if node.op_type == "Gather" else 0
            shares.append(min(1.0, _rows(node.input[1], makers, constants) / max(shape[axis], 1)))
        elif node.op_type == "Slice" and node.input[0] == name and not {*node.input[1:3]} <= constants.keys():
            shares.append(0.0)  # of row numbers and masks, only the rows in use are read
        elif node.op_type == "RotaryEmbedding" and name != node.input[0] and len(shape) == 2:
            shares.append(1 / max(shape[0], 1))
        else:
            return 1.0
    return max(shares)


def _rows(indices: str, makers: Mapping[str, NodeProto], constants: Mapping[str, TensorProto]) -> float:
    """Return the number of table rows to read for a token: the count of the TopK behind `indices`, or 1."""
    pending, seen = [indices], {indices}
    while pending:
        node = makers.get(pending.pop())
        if node is None:
            continue
        if node.op_type == "TopK":
            count = constants.get(node.input[1])
            known = count is not None and not count.external_data
            return float(numpy_helper.to_array(count).item()) if count is not None and known else math.inf
        pending += {*node.input} - seen
        seen.update(node.input)
    return 1.0
