"""Compute row functions anew, from other rows than those of the model as exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_graphsurgeon as gs

from trt_kvcache.importer.extensions.latent_attention.function import RowFunction
from trt_kvcache.importer.extensions.latent_attention.rows import RowFunctions
from trt_kvcache.importer.graph import elem_type, is_op
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.blueprint import Array


def emit_rows(
    name: str,
    functions: RowFunctions,
    made: dict[str, gs.Tensor],
    canonical: Canonical,
    leaf: Callable[[RowFunction], gs.Tensor],
) -> gs.Tensor:
    """Compute a row function.

    Args:
        name: of it, as exported.
        functions: all of them.
        made: what was computed so far of the same rows, by name; more is added.
        canonical: of the graph.
        leaf: gives the rows of what is made of nothing else.
    """
    for function in _behind(name, functions):
        if function.tensor.name not in made:
            if function.taking is not None:
                rows = made[function.taking.source]  # of the new tokens already
                if function.shape is not None:
                    rows = canonical.emit.op("Reshape", [rows, canonical.emit.ints(list(function.shape))], "row")
                made[function.tensor.name] = rows
            elif function.node is None:
                made[function.tensor.name] = leaf(function)
            else:
                made.update(_emit(function, function.node, made, canonical, functions.fixed))
    return made[name]


def _behind(name: str, functions: RowFunctions) -> list[RowFunction]:
    """A row function and all that it is made of, each before what it is made into."""
    order: dict[str, RowFunction] = {}
    stack = [(name, False)]
    while stack:
        current, ready = stack.pop()
        function = functions.found.get(current)
        if function is None or current in order:
            continue
        if ready or function.node is None:
            order[current] = function
        else:
            stack.append((current, True))
            stack += [(t.name, False) for t in function.inputs]
    return list(order.values())


def _emit(
    function: RowFunction,
    node: gs.Node,
    made: Mapping[str, gs.Tensor],
    canonical: Canonical,
    fixed: Mapping[str, Array],
) -> dict[str, gs.Tensor]:
    """One operator over what is computed anew, with a constant for each shape."""
    emit = canonical.emit
    inputs = [made.get(t.name, emit.constant(fixed[t.name]) if t.name in fixed else t) for t in function.inputs]
    if function.shape is not None:
        op = "Expand" if is_op(node, "Expand") else "Reshape"
        shaped = emit.op(op, [inputs[0], emit.ints(list(function.shape))], "row", elem_type(function.tensor))
        return {function.tensor.name: shaped}
    outputs = [t if t.is_empty() else gs.Variable(emit.name("row"), dtype=t.dtype) for t in node.outputs]
    canonical.graph.nodes.append(gs.Node(node.op, emit.name(f"row:{node.op}"), dict(node.attrs), inputs, outputs))
    return {old.name: new for old, new in zip(node.outputs, outputs, strict=True) if not old.is_empty()}
