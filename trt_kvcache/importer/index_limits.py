"""How large token ids and positions may be: the rows of the tables that they look up."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import ModelProto

from trt_kvcache.importer.plan import CachePlan, Role

_PASSING = frozenset(
    {
        "Cast",
        "Identity",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Flatten",
        "Expand",
        "Transpose",
        "Gather",
        "Slice",
        "Split",
    }
)
"""Of what is in the first input, nothing else comes out: all of it, or planes of positions."""


@dataclass(frozen=True)
class IndexLimits:
    """Exclusive upper bounds by input name; inputs without an entry have no known bound."""

    tokens: dict[str, int]
    positions: dict[str, int]


def index_limits(model: ModelProto, plan: CachePlan) -> IndexLimits:
    """Bounds of the token and position inputs of a flat model."""
    tables = {t.name: tuple(t.dims) for t in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("t"):
                tables[node.output[0]] = tuple(attribute.t.dims)
    logits = [t.shape[-1] for t in plan.tensors if t.role is Role.LOGITS and t.io == "output" and t.shape]
    vocabulary = min((n for n in logits if isinstance(n, int)), default=None)
    limits = IndexLimits({}, {})
    for tensor in plan.tensors:
        if tensor.io != "input" or tensor.role not in (Role.TOKENS, Role.POSITIONS):
            continue
        rows = _rows(model, tensor.name, tables)
        if tensor.role is Role.TOKENS:
            known = [n for n in (rows, vocabulary) if n is not None]
            if known:
                limits.tokens[tensor.name] = min(known)
        elif rows is not None:
            limits.positions[tensor.name] = rows
    return limits


def _rows(model: ModelProto, name: str, tables: dict[str, tuple[int, ...]]) -> int | None:
    """Rows of the smallest table that is looked up with this input, through casts and reshapes."""
    aliases, found = {name}, []
    for node in model.graph.node:  # in topological order
        if node.op_type in _PASSING and node.input and node.input[0] in aliases:
            aliases.update(node.output)
        elif node.op_type == "Gather" and node.input[1] in aliases and node.input[0] in tables:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            found.append(tables[node.input[0]][axis])
        elif node.op_type == "RotaryEmbedding":
            # ONNX: X, cos_cache, sin_cache, position_ids; com.microsoft: X, position_ids, cos_cache, sin_cache.
            positions, table = (1, 2) if node.domain == "com.microsoft" else (3, 1)
            inputs = list(node.input)
            if len(inputs) > positions and inputs[positions] in aliases and inputs[table] in tables:
                found.append(tables[inputs[table]][0])
    return min(found, default=None)
