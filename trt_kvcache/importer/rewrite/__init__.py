"""Rewrites a prepared graph into standard ONNX that TensorRT builds with the same meaning, as the plan says.

`attention_nodes` rewrites attention. Cache updates get the form that IKVCacheUpdateLayer supports (4-D, axis 2,
linear), or become plain operators:

    view:        past [B, P.., S_max, Q..]  -> past [B, P, S_max, Q]; update reshaped; readers get the logical shape
    heads-major: past [B, S_max, N*H]       -> past [B, N, S_max, H]; the (small) update is transposed, not the cache
    circular:    TensorScatter(mode=circular, w) -> TensorScatter(w mod S_max)
    functional:  TensorScatter(past, update, w)
                 -> ScatterElements(past, Expand((w + arange(S_new)) [mod S_max]), update)

This module also adds two inputs, to give numbers by their shape. The length of ``attention_span`` (int64 ``[span]``: 0,
1, ... span - 1) says how many cache rows a step reads. TensorRT knows a shape without a copy from the device, a CUDA
graph captured for one span stays valid for that span, and one constant buffer serves all spans. If the other input has
length K, the step returns logits of its last K positions:

    x [B, S, H] -- Slice(S - K, S) -- [B, K, H] -- norm, MatMul, ... -- logits [B, K, V]

Repeats before a Scan become a Concat of copies:

    Tile(x, [1, 1, n, 1, 1]), Expand(x, [1, 1, n, 1, 1])   ->   Concat(x, ..., x), n times

Gated delta nets (mobius-onnx exports of Qwen3-Next and Qwen3.5) scan over the tokens of an update. Measured on TensorRT
for RTX 1.7.1: if a Scan over a dynamic number of tokens depends on a Tile, or on an Expand by constants, the build
fails with ``value.h:884: CHECK(is_const()) failed``. The build succeeds with Concat, with Tile beside or after a Scan,
or with a fixed number of tokens.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer import families
from trt_kvcache.importer.cache_plan import CachePlan, CacheUpdate, PhysicalLayout, Role, Route, UpdateForm, UpdateMode
from trt_kvcache.importer.graph import (
    INT32,
    INT64,
    Emitter,
    consumers,
    dims,
    elem_type,
    input_or_none,
    is_op,
    replace_uses,
    small_constant,
    tidy,
)
from trt_kvcache.importer.planning.attention_plans import nodes_before_scans
from trt_kvcache.importer.planning.cache_plans import split_heads, to_heads_major
from trt_kvcache.importer.rewrite.attention_nodes import CacheView, rewrite_attention
from trt_kvcache.plugins.operators import NAMESPACE


def rewrite_graph(graph: gs.Graph, plan: CachePlan) -> None:
    """Rewrite a prepared graph as its plan says, in place."""
    emitter = Emitter(graph)
    shapes = {t.name: t.shape for t in plan.tensors if t.io == "input" and (t.role is Role.MASK or "keys" in t.axes)}
    for tensor in graph.inputs:
        if tensor.name in shapes:
            tensor.shape = [None if d == "?" else d for d in shapes[tensor.name]]
    graph.inputs += [gs.Variable(span.name, dtype=np.int64, shape=[span.symbol]) for span in plan.spans]
    _slice_logits(graph, emitter, plan)
    views = _rewrite_caches(emitter, plan)
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
    """Replace a Tile, or an Expand to a constant shape, with Concat if a Scan of dynamic length depends on the node."""
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


def _rewrite_caches(emitter: Emitter, plan: CachePlan) -> dict[str, CacheView]:
    """Rewrite every cache update as planned. Return the caches by the names of the tensors that attentions read."""
    nodes = {node.name: node for node in emitter.graph.nodes}
    views: dict[str, CacheView] = {}
    for cache in plan.caches:
        node = nodes[cache.node]
        if node.op == "TRT_KVCacheUpdate" and cache.form is UpdateForm.PADDED:
            _to_tensor_scatter(emitter, node)
        if cache.form is UpdateForm.PACKED_NHD:
            node.domain, node.attrs = NAMESPACE, {"update_form": "packed_nhd"}
            first_rows(emitter, node)
        if cache.route is Route.FUNCTIONAL:
            _to_scatter_elements(emitter, node, cache)
        elif cache.mode is UpdateMode.CIRCULAR and cache.route is Route.NATIVE:
            _unwrap(emitter, node, cache)
        if cache.layout is PhysicalLayout.VIEW:
            whole, logical = _to_view(emitter, node, cache)
            views[whole] = CacheView(node.outputs[0], 2, logical, cache.sequence_axis)
        elif cache.layout is PhysicalLayout.HEADS_MAJOR:
            _to_heads_major(emitter, node, cache)
        axis = cache.physical_sequence_axis
        views[cache.present] = CacheView(node.outputs[0], axis, None, axis)
    return views


def first_rows(emitter: Emitter, node: gs.Node) -> None:
    """Give a cache update write indices of 0, int64 ``[B]``, if it has no write indices."""
    if input_or_none(node, 2) is None:
        past = node.inputs[0]
        batch = emitter.op("Shape", [past], f"{past.name}_batch", INT64, start=0, end=1)
        zeros = emitter.op("Expand", [emitter.ints(0), batch], f"{past.name}_first", INT64)
        node.inputs = [*node.inputs[:2], zeros, *node.inputs[3:]]


def _to_tensor_scatter(emitter: Emitter, node: gs.Node) -> None:
    """Replace TensorRT's own padded cache update by an equal TensorScatter: linear, on axis -2, int64 indices."""
    node.op, node.domain, node.attrs = "TensorScatter", None, {"axis": -2}
    node.inputs = node.inputs[:3]
    if len(node.inputs) > 2 and elem_type(node.inputs[2]) == INT32:
        indices = node.inputs[2]
        cast = partial(emitter.op, "Cast", [indices], f"{indices.name}_int64", INT64, to=INT64)
        node.inputs[2] = emitter.once(("int64", indices.name), cast)


def _unwrap(emitter: Emitter, node: gs.Node, cache: CacheUpdate) -> None:
    """Make a circular update linear, at the write index modulo capacity: no update may cross the end of the cache."""
    node.attrs["mode"] = "linear"
    if cache.write_indices is None:
        return
    indices = node.inputs[2]
    wrapped = partial(emitter.op, "Mod", [indices, emitter.ints(cache.capacity)], f"{indices.name}_mod", INT64)
    node.inputs[2] = emitter.once(("mod", indices.name, cache.capacity), wrapped)


def _to_scatter_elements(emitter: Emitter, node: gs.Node, cache: CacheUpdate) -> None:
    """Replace a cache update by ScatterElements, which supports any rank and axis, but copies the cache."""
    past, update, indices = node.inputs[0], node.inputs[1], input_or_none(node, 2)
    axis, rank = cache.sequence_axis, len(cache.logical_shape)
    count = emitter.op("Shape", [update], f"{cache.past}_rows", INT64, start=axis, end=axis + 1)
    scalar = emitter.op("Squeeze", [count], f"{cache.past}_row_count", INT64)
    rows = emitter.op("Range", [emitter.ints(0), scalar, emitter.ints(1)], f"{cache.past}_iota", INT64)
    between = [i for i in range(0 if indices is None else 1, rank) if i != axis]
    if indices is not None:
        first = emitter.op("Unsqueeze", [indices, emitter.ints([1])], f"{cache.past}_first", INT64)
        rows = emitter.op("Add", [first, rows], f"{cache.past}_positions", INT64)
    if cache.mode is UpdateMode.CIRCULAR:
        rows = emitter.op("Mod", [rows, emitter.ints(cache.capacity)], f"{cache.past}_wrapped", INT64)
    if between:
        rows = emitter.op("Unsqueeze", [rows, emitter.ints(between)], f"{cache.past}_aligned", INT64)
    shape = emitter.op("Shape", [update], f"{cache.past}_update_shape", INT64)
    where = emitter.op("Expand", [rows, shape], f"{cache.past}_where", INT64)
    node.op, node.domain, node.attrs = "ScatterElements", None, {"axis": axis}
    node.inputs = [past, where, update]


def _to_view(emitter: Emitter, node: gs.Node, cache: CacheUpdate) -> tuple[str, tuple[int, ...]]:
    """Make an update write a 4-D view of the cache. Return the name and shape of a Reshape's output for the readers."""
    _, before, _, after = (int(d) if isinstance(d, int) else 0 for d in cache.physical_shape)
    logical = tuple(-1 if i == cache.sequence_axis else 0 if i == 0 else int(d)
                    for i, d in enumerate(cache.logical_shape))  # fmt: skip
    rows = cache.update_length if isinstance(cache.update_length, int) else -1
    update = emitter.op("Reshape", [node.inputs[1], emitter.ints([0, before, rows, after])], f"{cache.past}_update")
    _set_update(node, cache, update)
    present = node.outputs[0]
    whole = emitter.op("Reshape", [present, emitter.ints(logical)], f"{cache.present}_logical", elem_type(present))
    whole.shape = list(cache.logical_shape)
    replace_uses(present, whole, keep=whole.inputs)
    _keep_shape_readers(emitter, node, cache, logical)
    return whole.name, logical


def _to_heads_major(emitter: Emitter, node: gs.Node, cache: CacheUpdate) -> None:
    _, heads, _, size = (int(d) if isinstance(d, int) else 0 for d in cache.physical_shape)
    update = node.inputs[1]
    if len(cache.logical_shape) == 3:
        update = emitter.op("Reshape", [update, emitter.ints([0, 0, heads, size])], f"{cache.past}_update_heads")
    update = emitter.op("Transpose", [update], f"{cache.past}_update", perm=[0, 2, 1, 3])
    _set_update(node, cache, update)
    present = node.outputs[0]
    for reader in consumers(present):
        if to_heads_major(reader):
            _bypass(reader, present)
        elif split_heads(reader, cache.logical_shape) is not None:
            for transpose in consumers(reader.outputs[0]):
                _bypass(transpose, present)
    # 0 copies the batch, which may be dynamic; all other sizes are fixed.
    logical = tuple(0 if i == 0 else int(d) for i, d in enumerate(cache.logical_shape))
    _keep_shape_readers(emitter, node, cache, logical)


def _bypass(node: gs.Node, tensor: gs.Tensor) -> None:
    output = node.outputs[0]
    node.outputs.clear()
    replace_uses(output, tensor)


def _set_update(node: gs.Node, cache: CacheUpdate, update: gs.Tensor) -> None:
    node.inputs[1] = update
    node.attrs["axis"] = 2
    shape = [None if d == "?" else d for d in cache.physical_shape]
    node.inputs[0].shape = list(shape)
    node.outputs[0].shape = list(shape)


def _keep_shape_readers(emitter: Emitter, node: gs.Node, cache: CacheUpdate, logical: tuple[int, ...]) -> None:
    """Let Shape nodes that read a past cache return the same shape as before the rewrite."""
    past = node.inputs[0]
    readers = [n for n in consumers(past) if is_op(n, "Shape")]
    if not readers:
        return
    view = emitter.op("Reshape", [past, emitter.ints(logical)], f"{cache.past}_logical", elem_type(past))
    for reader in readers:
        reader.inputs = [view if t is past else t for t in reader.inputs]
