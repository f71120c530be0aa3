"""Rewrites a prepared graph into standard ONNX that TensorRT builds with the same meaning, as the plan says.

`cache_updates` and `attention_nodes` rewrite caches and attention. This module adds two inputs of which only the shape
matters. The length of ``attention_span`` (int64 ``[span]``: 0, 1, ... span - 1) says how many cache rows a step reads.
TensorRT knows a shape without a copy from the device, a CUDA graph captured for one span stays valid for that span, and
one constant buffer serves all spans. If the other input has length K, the step returns logits of its last K positions:

    x [B, S, H] -- Slice(S - K, S) -- [B, K, H] -- norm, MatMul, ... -- logits [B, K, V]

Repeats before a Scan become a Concat of copies:

    Tile(x, [1, 1, n, 1, 1]), Expand(x, [1, 1, n, 1, 1])   ->   Concat(x, ..., x), n times

Gated delta nets (mobius-onnx exports of Qwen3-Next and Qwen3.5) scan over the tokens of an update. Measured on TensorRT
for RTX 1.7.1: if a Scan over a dynamic number of tokens depends on a Tile, or on an Expand by constants, the build
fails with ``value.h:884: CHECK(is_const()) failed``. The build succeeds with Concat, with Tile beside or after a Scan,
or with a fixed number of tokens.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer import families
from trt_kvcache.importer.cache_plan import CachePlan, Role, Route
from trt_kvcache.importer.graph import INT64, Emitter, dims, is_op, small_constant, tidy
from trt_kvcache.importer.planning.attention_plans import nodes_before_scans
from trt_kvcache.importer.rewrite.attention_nodes import rewrite_attention
from trt_kvcache.importer.rewrite.cache_updates import rewrite_caches


def rewrite_graph(graph: gs.Graph, plan: CachePlan) -> None:
    """Rewrite a prepared graph as its plan says, in place."""
    emitter = Emitter(graph)
    shapes = {t.name: t.shape for t in plan.tensors if t.io == "input" and (t.role is Role.MASK or "keys" in t.axes)}
    for tensor in graph.inputs:
        if tensor.name in shapes:
            tensor.shape = [None if d == "?" else d for d in shapes[tensor.name]]
    graph.inputs += [gs.Variable(span.name, dtype=np.int64, shape=[span.symbol]) for span in plan.spans]
    _slice_logits(graph, emitter, plan)
    views = rewrite_caches(emitter, plan)
    rewrite_attention(graph, emitter, plan, views)
    if any(cache.route is Route.PLUGIN for cache in plan.caches):
        families.plugin_route.rewrite_updates(graph, emitter, plan)
    copy_repeats(graph, emitter)
    planned = plan.tensor(Role.LOGITS, "output")
    for tensor in graph.outputs:  # ONNX Runtime refuses a caller's buffer with another shape than the stated one
        if planned is not None and tensor.name == planned.name and tensor.shape and len(planned.shape) == 3:
            tensor.shape = [tensor.shape[0], *planned.shape[1:2], tensor.shape[2]]
    tidy(graph)


def _slice_logits(graph: gs.Graph, emitter: Emitter, plan: CachePlan) -> None:
    span = plan.logits_span
    if span is None:
        return
    count = gs.Variable(span.name, dtype=np.int64, shape=[span.symbol])
    graph.inputs.append(count)
    tensor, axis = graph.tensors()[span.tensor], span.axis
    length = emitter.op("Shape", [tensor], "positions", INT64, start=axis, end=axis + 1)
    size = emitter.op("Shape", [count], "kept", INT64)
    first = emitter.op("Max", [emitter.op("Sub", [length, size], "dropped", INT64), emitter.ints([0])], "first", INT64)
    last = emitter.op("Slice", [tensor, first, length, emitter.ints([axis])], "last_positions")
    last.shape = [span.symbol if i == axis else None if d == "?" else d for i, d in enumerate(dims(tensor) or ())]
    for node in [node for node in graph.nodes if node.name in span.readers]:
        node.inputs = [last if t is tensor else t for t in node.inputs]


def copy_repeats(graph: gs.Graph, emitter: Emitter) -> None:
    """Replace each Tile or constant Expand by a Concat if a Scan with a dynamic number of steps depends on it."""
    for node in list(nodes_before_scans(graph)):
        counts = _counts(node)
        if counts is None:
            continue
        data = node.inputs[0]
        *first, last = [axis for axis, count in enumerate(counts) if count > 1] or [0]
        for axis in first:
            data = emitter.op("Concat", [data] * counts[axis], "repeated", axis=axis)
        node.op, node.attrs, node.inputs = "Concat", {"axis": last}, [data] * counts[last]


def _counts(node: gs.Node) -> list[int] | None:
    if not is_op(node, "Tile", "Expand"):
        return None
    repeats = small_constant(node.inputs[1])
    if repeats is None or not len(repeats) or (repeats < 1).any():
        return None
    counts = [int(n) for n in repeats]
    if is_op(node, "Tile"):
        return counts
    shape = dims(node.inputs[0]) or ()
    if len(shape) != len(counts) or any(n > 1 and size not in (1, n) for n, size in zip(counts, shape, strict=True)):
        return None
    return [n if size == 1 else 1 for n, size in zip(counts, shape, strict=True)]
