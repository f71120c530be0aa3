"""Finds upper bounds of token ids and positions: the numbers of rows of their lookup tables."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from trt_kvcache.importer.cache_plan import CachePlan, Role
from trt_kvcache.importer.operators import PASSES
from trt_kvcache.importer.protos import constants_of, int_attribute

_SHIFTING = {"Add": 1, "Sub": -1}


@dataclass(frozen=True)
class IndexLimits:
    """Exclusive upper bounds of token ids and positions, by input. Inputs without a bound are absent."""

    tokens: dict[str, int]
    positions: dict[str, int]


def index_limits(model: ModelProto, plan: CachePlan) -> IndexLimits:
    """Find the exclusive upper bounds of the token and position inputs of a model without functions."""
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
    """Return the number of rows of the smallest table that this input indexes, or None.

    If the graph adds a constant to the index, rows before this constant do not count.
    """
    constants = constants_of(model.graph)
    aliases, rows = {name: 0}, []  # tensors that hold the input plus a constant, and this constant
    for node in model.graph.node:  # in topological order
        if node.op_type in PASSES and node.input and node.input[0] in aliases:
            aliases.update(dict.fromkeys(node.output, aliases[node.input[0]]))
        elif node.op_type in _SHIFTING:
            _shift(node, aliases, constants)
        elif node.op_type == "Gather" and node.input[1] in aliases and node.input[0] in constants:
            rows.append(constants[node.input[0]].dims[int_attribute(node, "axis")] - aliases[node.input[1]])
        elif node.op_type == "RotaryEmbedding":
            # ONNX: X, cos_cache, sin_cache, position_ids; com.microsoft: X, position_ids, cos_cache, sin_cache.
            positions, table = (1, 2) if node.domain == "com.microsoft" else (3, 1)
            if len(node.input) > positions and node.input[positions] in aliases and node.input[table] in constants:
                rows.append(constants[node.input[table]].dims[0] - aliases[node.input[positions]])
    return min(rows, default=None)


def _shift(node: NodeProto, aliases: dict[str, int], constants: dict[str, TensorProto]) -> None:
    pairs = [(node.input[0], node.input[1])]
    pairs += [(node.input[1], node.input[0])] * (node.op_type == "Add")
    for source, other in pairs:
        shift = constants.get(other)
        if source in aliases and shift is not None and not shift.external_data and list(shift.dims) in ([], [1]):
            number = numpy_helper.to_array(shift).item()
            if isinstance(number, int):
                aliases[node.output[0]] = aliases[source] + _SHIFTING[node.op_type] * number
