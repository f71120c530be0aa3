"""How large token ids and positions may be: the rows of the tables that they look up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, numpy_helper

from trt_kvcache.importer.plan import CachePlan, Role

_PASSING = {
    "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Transpose", "Gather", "Slice", "Split",
}  # fmt: skip
"""Of what is in the first input, nothing else comes out: all of it, or planes of positions."""
_SHIFTING = {"Add": 1, "Sub": -1}


@dataclass(frozen=True)
class IndexLimits:
    """Exclusive upper bounds by input name; inputs without an entry have no known bound."""

    tokens: dict[str, int]
    positions: dict[str, int]


def index_limits(model: ModelProto, plan: CachePlan) -> IndexLimits:
    """Bounds of the token and position inputs of a flat model."""
    logits = [t.shape[-1] for t in plan.tensors if t.role is Role.LOGITS and t.io == "output" and t.shape]
    vocabulary = min((n for n in logits if isinstance(n, int)), default=None)
    limits = IndexLimits({}, {})
    for tensor in plan.tensors:
        if tensor.io != "input" or tensor.role not in (Role.TOKENS, Role.POSITIONS):
            continue
        rows = table_rows(model, tensor.name)
        if tensor.role is Role.TOKENS:
            known = [n for n in (rows, vocabulary) if n is not None]
            if known:
                limits.tokens[tensor.name] = min(known)
        elif rows is not None:
            limits.positions[tensor.name] = rows
    return limits


def table_rows(model: ModelProto, name: str) -> int | None:
    """Rows of the smallest table that is looked up with this input, through casts, reshapes and a constant beside it.

    Rows before that of a 0 do not count.
    """
    constants = _constants(model)
    aliases, found = {name: 0}, []  # and what was added on the way
    for node in model.graph.node:  # in topological order
        if node.op_type in _PASSING and node.input and node.input[0] in aliases:
            aliases.update(dict.fromkeys(node.output, aliases[node.input[0]]))
        elif node.op_type in _SHIFTING:
            _shift(node, aliases, constants)
        elif node.op_type == "Gather" and node.input[1] in aliases and node.input[0] in constants:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            found.append(constants[node.input[0]].dims[axis] - aliases[node.input[1]])
        elif node.op_type == "RotaryEmbedding":
            # ONNX: X, cos_cache, sin_cache, position_ids; com.microsoft: X, position_ids, cos_cache, sin_cache.
            positions, table = (1, 2) if node.domain == "com.microsoft" else (3, 1)
            inputs = list(node.input)
            if len(inputs) > positions and inputs[positions] in aliases and inputs[table] in constants:
                found.append(constants[inputs[table]].dims[0] - aliases[inputs[positions]])
    return min(found, default=None)


def _constants(model: ModelProto) -> dict[str, TensorProto]:
    constants = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            whole = list(attribute.ints) if attribute.type == AttributeProto.INTS else attribute.i
            numbers = attribute.name in ("value_int", "value_ints")
            constants[node.output[0]] = numpy_helper.from_array(np.array(whole)) if numbers else attribute.t
    return constants


def _shift(node: NodeProto, aliases: dict[str, int], constants: dict[str, TensorProto]) -> None:
    """Note what a node makes of an input by adding one whole number."""
    pairs = [(node.input[0], node.input[1])]
    pairs += [(node.input[1], node.input[0])] * (node.op_type == "Add")
    for source, other in pairs:
        shift = constants.get(other)
        if source in aliases and shift is not None and not shift.external_data and list(shift.dims) in ([], [1]):
            number = numpy_helper.to_array(shift).item()
            if isinstance(number, int):
                aliases[node.output[0]] = aliases[source] + _SHIFTING[node.op_type] * number
