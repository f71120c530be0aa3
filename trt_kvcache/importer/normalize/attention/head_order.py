"""Query heads that take turns at the heads of keys and values, where ONNX's attention has them in groups.

    query head       0 1 2 3 4 5
    reads, here      0 1 2 0 1 2        as ``keys.repeat(1, 2, 1, 1)`` and queries ``[B, G, N, S, D]`` have it
    reads, in ONNX   0 0 1 1 2 2

Queries are put in the order of their heads of keys, what is made of them in theirs; so is what each head has beside.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import Emitter, dims
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.findings import Core, Sinks, Visibility


def in_groups(core: Core, canonical: Canonical) -> Core:
    """The attention over heads in ONNX's order, with what puts queries and results in order around it.

    Args:
        core: as exported.
        canonical: of the graph.

    Raises:
        UnsupportedModelError: the caller's own mask is another one for each head.
    """
    if not core.turns:
        return core
    emit, output = canonical.emit, core.output
    query = _turned(core.query, core.query_type, (core.heads // core.turns, core.turns), core.head_size, emit)
    made = gs.Variable(emit.name(f"grouped:{output.name}"), dtype=core.output_type)
    result = _turned(made, core.output_type, (core.turns, core.heads // core.turns), core.value_size, emit)
    maker = result.inputs[0]
    output.inputs.clear()
    maker.outputs = [output]
    return replace(core, query=query, output=made, sinks=_sinks(core, emit), visibility=_seen(core, emit), turns=0)


def _turned(tensor: gs.Tensor, dtype: int, heads: tuple[int, int], size: int, emit: Emitter) -> gs.Variable:
    """``[B, heads[0] * heads[1], S, size]`` with heads of the second axis in front."""
    apart = emit.op("Reshape", [tensor, emit.ints([0, *heads, -1, size])], "heads_apart", dtype)
    turned = emit.op("Transpose", [apart], "heads_turned", dtype, perm=[0, 2, 1, 3, 4])
    shape = emit.ints([0, prod(heads), -1, size])
    merged: gs.Variable = emit.op("Reshape", [turned, shape], "heads_in_order", dtype)
    return merged


def _columns(weight: gs.Tensor, core: Core, emit: Emitter) -> gs.Variable:
    """A weight ``[rows, H]`` with the columns of the heads in order; one row where it has another shape."""
    apart = emit.op("Reshape", [weight, emit.ints([-1, core.heads // core.turns, core.turns])], "columns_apart")
    turned = emit.op("Transpose", [apart], "columns_turned", perm=[0, 2, 1])
    merged: gs.Variable = emit.op("Reshape", [turned, emit.ints([-1, core.heads])], "columns_in_order")
    return merged


def _sinks(core: Core, emit: Emitter) -> Sinks | None:
    if not isinstance(core.sinks, gs.Tensor):
        return None if core.sinks is None else core.sinks.reshape(-1, core.turns).T.reshape(-1)
    return _columns(core.sinks, core, emit)


def _seen(core: Core, emit: Emitter) -> Visibility:
    seen = core.visibility
    own, slopes, bias = seen.own, seen.slopes, seen.bias
    heads = (1,) if own is None else (dims(own) or ("?", "?", "?"))[-3:-2]
    if own is not None and heads not in ((), (1,)):
        raise UnsupportedModelError(
            f"the query heads of '{core.node}' take turns at the {core.turns} heads of cache '{core.key.past.name}', "
            f"and its mask '{own.name}' has {heads[0]} heads; supported is one mask for all, or query heads "
            "that share a head of keys next to each other, as torch.repeat_interleave repeats these"
        )
    if slopes is not None and slopes.size > 1:
        slopes = slopes.reshape(-1, core.turns).T.reshape(-1)
    if bias is not None:
        table = bias.table
        bias = replace(bias, table=emit.once(("columns", table.name, core.turns), lambda: _columns(table, core, emit)))
    return replace(seen, slopes=slopes, bias=bias)
