"""Finds every cache update of a prepared graph, and plans it.

`decide` chooses the route of each update (TensorRT's layer, a plugin or plain operators), only from the facts in a
`CacheUpdate`. Facts about TensorRT were measured on TensorRT for RTX 1.7.1, which has the parser of TensorRT 11;
tests/facts tests them.

If a graph computes keys or values from caches, the canonical form shortens these caches to the rows in use first:

    present -- Slice(0, L) -- MatMul, Reshape, ... -> K of an Attention

All operators from the cache to the attention work row by row. The row numbers of a bias have such a Slice, too. The
Slices take all L rows until the rewrite ends them at the rows in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import (
    TENSORRT_DTYPES,
    CacheLayout,
    CacheUpdate,
    Dim,
    Fallback,
    PhysicalLayout,
    PlanOptions,
    Route,
    Target,
    TensorRole,
    UpdateContract,
    UpdateForm,
    UpdateMode,
)
from trt_kvcache.importer.graph import (
    NAME_PREFIX,
    Emitter,
    consumers,
    contains,
    dims,
    dtype_name,
    input_or_none,
    is_op,
    producer,
    small_constant,
)
from trt_kvcache.importer.operators import PASSES
from trt_kvcache.importer.protos import TENSORRT_UPDATE
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS


def is_update(node: gs.Node) -> bool:
    """True if a node updates a cache."""
    return is_op(node, "TensorScatter") or node.op == TENSORRT_UPDATE


def analyze_caches(graph: gs.Graph, options: PlanOptions) -> tuple[CacheUpdate, ...]:
    """Plan every cache update, in the order of the graph's inputs; refuse invalid and unsupported updates."""
    for node in graph.nodes:
        if node.domain == NAMESPACE and node.op in OPERATORS:
            raise UnsupportedModelError(
                f"'{node.name}' is a node of this project's plugin ({node.op}), which only rewritten models have; the "
                "importer supports TensorScatter and the caches of exporters: give the model before its rewrite"
            )
    updates = [_plan(graph, node, options) for node in graph.nodes if is_update(node)]
    places = {tensor.name: place for place, tensor in enumerate(graph.inputs)}
    return tuple(sorted(updates, key=lambda cache: places.get(cache.past, len(places))))


def _plan(graph: gs.Graph, node: gs.Node, options: PlanOptions) -> CacheUpdate:
    past, present, indices = node.inputs[0], node.outputs[0], input_or_none(node, 2)
    shape = dims(past) or dims(present)
    if shape is None:
        raise UnsupportedModelError(
            f"the shape of cache '{past.name}' of '{node.name}' is unknown: export the model with shapes"
        )
    axis = node.attrs.get("axis", -2) if is_op(node, "TensorScatter") else -2
    if len(shape) < 2 or not -len(shape) <= axis < len(shape) or axis % len(shape) == 0:
        raise InvalidModelError(
            f"'{node.name}' has axis {axis} for cache '{past.name}' of shape {list(shape)}; the axis must come "
            "after the batch, which is axis 0: export the model again"
        )
    axis %= len(shape)
    form, capacity = _form(node), shape[axis]
    if not isinstance(capacity, int):
        raise UnsupportedModelError(
            f"cache '{past.name}' of '{node.name}' has no fixed length on axis {axis}, because it is computed in the "
            "graph: make it an input of the model, or export with a fixed length"
        )
    _check_rows(node, shape)
    _check_zero_points(node)
    rows = dims(node.inputs[1])
    length = "?" if rows is None else rows[axis if form is UpdateForm.PADDED else 0]
    if form is UpdateForm.PADDED and isinstance(length, int) and length > capacity:
        raise InvalidModelError(
            f"'{node.name}' writes an update of {length} tokens into a cache of {capacity} rows ('{past.name}'): "
            "export a longer cache or a shorter update"
        )
    update = CacheUpdate(
        node=node.name,
        past=past.name,
        present=present.name,
        update=node.inputs[1].name,
        write_indices=indices.name if indices is not None else None,
        update_lengths=node.inputs[3].name if form is UpdateForm.PACKED_NHD else None,
        dtype=dtype_name(past),
        logical_shape=shape,
        sequence_axis=axis,
        physical_shape=shape,
        physical_sequence_axis=axis,
        layout=PhysicalLayout.AS_IS,
        mode=UpdateMode(node.attrs.get("mode", "linear")),
        form=form,
        update_length=length,
        capacity=capacity,
        route=Route.FUNCTIONAL,
        reason="",
        readers=_readers(present),
        carried=contains(graph.inputs, past) and contains(graph.outputs, present),
    )
    update = decide(update, _find_obstacle(graph, node, shape), options)
    if update.route is Route.FUNCTIONAL and options.target is Target.TENSORRT_RTX and update.dtype == "int8":
        _check_one_reader(node)
    return _laid_out(update, present, options)


def _form(node: gs.Node) -> UpdateForm:
    form = node.attrs.get("update_form")
    if is_op(node, "TensorScatter") or form is None:
        return UpdateForm.PADDED
    if form != "packed_nhd":
        raise UnsupportedModelError(
            f"'{node.name}' has update_form '{form}'; TensorRT supports only 'packed_nhd', or no update_form for "
            "padded updates"
        )
    if input_or_none(node, 3) is None:
        raise InvalidModelError(
            f"packed update '{node.name}' has no fourth input, which must be the cumulative lengths [B + 1]"
        )
    _check_packed(node)
    return UpdateForm.PACKED_NHD


def _check_packed(node: gs.Node) -> None:
    """Refuse wrong ranks and types of TensorRT's packed cache update, because ONNX has no rules for this operator."""
    for i, rank, what in ((0, 4, "cache [B, N, S_max, H]"), (1, 3, "update [T, N, H]"), (2, 1, "write indices [B]"),
                          (3, 1, "cumulative lengths [B + 1]")):  # fmt: skip
        tensor = input_or_none(node, i)
        shape = dims(tensor) if tensor is not None else None
        if tensor is not None and shape is not None and len(shape) != rank:
            raise InvalidModelError(
                f"packed update '{node.name}' has '{tensor.name}' of shape {list(shape)} as its {what}: export it with "
                f"{rank} dimensions"
            )
        if i > 1 and tensor is not None and dtype_name(tensor) not in ("int32", "int64", "?"):
            raise InvalidModelError(
                f"packed update '{node.name}' has {dtype_name(tensor)} '{tensor.name}' as its {what}: cast it to int32 "
                "or int64"
            )
    cache, update = (dtype_name(t) for t in node.inputs[:2])
    if cache != update and "?" not in (cache, update):
        raise InvalidModelError(
            f"packed update '{node.name}' writes a {update} update into a {cache} cache: cast the update to {cache}"
        )


def _check_rows(node: gs.Node, shape: tuple[Dim, ...]) -> None:
    """Refuse a cache with a dynamic batch if its write indices have a fixed length."""
    write_indices = input_or_none(node, 2)
    if write_indices is None:
        return
    (rows,) = dims(write_indices) or ("?",)
    if isinstance(rows, int) and not isinstance(shape[0], int):
        raise UnsupportedModelError(
            f"'{node.name}' has {rows} write indices ('{write_indices.name}'), but cache '{node.inputs[0].name}' "
            f"{list(shape)} has a dynamic batch; each row needs one write index: export both with the same symbol, or "
            "with a fixed batch"
        )


def _check_zero_points(update: gs.Node) -> None:
    """Refuse quantized caches with a zero point other than 0, because TensorRT has no layer for them."""
    for node in (*update.inputs[1].inputs, *consumers(update.outputs[0])):
        if is_op(node, "QuantizeLinear", "DequantizeLinear"):
            zero = small_constant(input_or_none(node, 2))
            if zero is not None and np.any(zero.astype(np.int64)):
                raise UnsupportedModelError(
                    f"cache '{update.inputs[0].name}' is quantized by {node.op} '{node.name}' with the zero point "
                    f"{int(zero.reshape(-1)[0])}; TensorRT supports only 0: quantize the cache symmetrically"
                )


def _check_one_reader(update: gs.Node) -> None:
    """Refuse an int8 cache that two attentions read: the builder of TensorRT for RTX 1.7.1 crashes (SIGSEGV)."""
    readers = _readers(update.outputs[0], "DequantizeLinear")
    if len(readers) > 1:
        raise UnsupportedModelError(
            f"{len(readers)} attentions ({', '.join(map(repr, readers))}) read the int8 cache "
            f"'{update.inputs[0].name}'. TensorRT for RTX crashes when it builds such a model: export a shared cache "
            "in float16 or bfloat16, or build for --target tensorrt"
        )


def _find_obstacle(graph: gs.Graph, node: gs.Node, shape: tuple[Dim, ...]) -> str:
    """Return the reason why past and present of a cache cannot share a buffer; empty if they can."""
    past, present = node.inputs[0], node.outputs[0]
    if not contains(graph.inputs, past):
        for maker in filter(is_update, past.inputs):
            return f"'{maker.name}' already updates the same cache before this update"
        return f"the cache '{past.name}' is not an input of the model"
    if not contains(graph.outputs, present):
        return f"the updated cache '{present.name}' is not an output of the model"
    for reader in consumers(past):
        if reader is not node and _reads_values(graph, reader):
            what = "updates" if is_update(reader) else "reads"
            return f"'{reader.name}' also {what} the cache '{past.name}', and must see it as before this update"
    if any(not isinstance(d, int) for d in shape[1:]):
        return f"the cache '{past.name}' has dynamic dimensions other than the batch: {list(shape)}"
    return ""


def _reads_values(graph: gs.Graph, node: gs.Node) -> bool:
    """False if a node reads only the shape of its input, directly or after a Transpose."""
    if not is_op(node, "Transpose"):
        return not is_op(node, "Shape")
    output = node.outputs[0]
    return contains(graph.outputs, output) or any(_reads_values(graph, reader) for reader in consumers(output))


def _readers(present: gs.Tensor, *through: str) -> tuple[str, ...]:
    """Return the Attention nodes that read a cache as K or V, directly, or after operators that work row by row."""
    readers: list[str] = []
    seen: set[int] = set()
    queue = [(present, False)]
    while queue:
        tensor, computed = queue.pop(0)
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        for node in consumers(tensor):
            if is_op(node, "Attention"):
                if any(t is tensor for t in node.inputs[1:3]) and node.name not in readers:
                    readers.append(node.name)
            elif computed or is_row_slice(node) or (is_op(node, *PASSES, *through) and node.inputs[0] is tensor):
                queue += [(output, computed or is_row_slice(node)) for output in node.outputs]
    return tuple(readers)


def _laid_out(update: CacheUpdate, present: gs.Tensor, options: PlanOptions) -> CacheUpdate:
    shape, axis = update.logical_shape, update.sequence_axis
    native = len(shape) == 4 and axis == 2
    if native or update.route is Route.FUNCTIONAL or update.form is UpdateForm.PACKED_NHD:
        return update
    heads = _heads_of(present, shape) if options.cache_layout is CacheLayout.AUTO and axis == 1 else None
    before, after = (math.prod(int(d) for d in part) for part in (shape[1:axis], shape[axis + 1 :]))
    layout, physical = PhysicalLayout.VIEW, (shape[0], before, shape[axis], after)
    if heads is not None:
        layout, physical = PhysicalLayout.HEADS_MAJOR, (shape[0], heads, shape[1], after // heads)
    return replace(update, layout=layout, physical_shape=physical, physical_sequence_axis=2)


def _heads_of(present: gs.Tensor, shape: tuple[Dim, ...]) -> int | None:
    """Return the heads of a sequence-major cache if its readers transpose it to ``[B, N, S_max, H]``; else None."""
    if len(shape) not in (3, 4):
        return None
    heads: set[int] = set()
    for node in consumers(present):
        if len(shape) == 4 and to_heads_major(node):
            heads.add(int(shape[2]))
        elif len(shape) == 3 and (count := split_heads(node, shape)) is not None:
            heads.add(count)
        else:
            return None
    if len(heads) != 1:
        return None
    count = heads.pop()
    return count if count > 0 and (len(shape) == 4 or int(shape[2]) % count == 0) else None


def to_heads_major(node: gs.Node) -> bool:
    """True for ``Transpose(perm=[0, 2, 1, 3])``."""
    return is_op(node, "Transpose") and list(node.attrs.get("perm", [])) == [0, 2, 1, 3]


def split_heads(node: gs.Node, shape: tuple[Dim, ...]) -> int | None:
    """Return N if a Reshape returns ``[B, S_max, N, H]`` and all its readers swap the axes N and S_max; else None."""
    if not is_op(node, "Reshape"):
        return None
    target = small_constant(node.inputs[1])
    if target is None or target.size != 4 or int(target[1]) not in (0, shape[1]) or int(node.attrs.get("allowzero", 0)):
        return None
    if int(target[0]) not in (0, shape[0]) and not (int(target[0]) == -1 and (target[2:] > 0).all()):
        return None
    readers = consumers(node.outputs[0])
    if not readers or not all(to_heads_major(reader) for reader in readers):
        return None
    width, heads, size = int(shape[2]), int(target[2]), int(target[3])
    heads = width // size if heads == -1 and size > 0 else heads
    size = width // heads if size == -1 and heads > 0 else size
    return heads if heads > 0 and heads * size == width else None


NATIVE_DTYPES = ("float", "float16", "bfloat16")
"""Types that IKVCacheUpdateLayer supports."""

PLAIN_DTYPES = (*NATIVE_DTYPES, "int8", "int32", "int64", "bool")
"""Types that TensorRT's scatter supports, for updates in plain operators."""

PLUGIN_DTYPES = (*NATIVE_DTYPES, "int8", "int32", "int64", "float8e4m3fn", "int4", "float4e2m1")
"""Types that a plugin can write: neither bool nor uint8 (NvInferRuntime.h, IPluginV3OneBuild::getOutputDataTypes)."""


def decide(facts: CacheUpdate, obstacle: str, options: PlanOptions) -> CacheUpdate:
    """Return an update with its route (TensorRT's layer, a plugin or plain operators) and the reason for it.

    `obstacle` says why past and present cannot share a buffer; empty if they can.
    """
    if obstacle:
        _check_dtype(facts, PLAIN_DTYPES)
        if facts.form is UpdateForm.PACKED_NHD:
            raise UnsupportedModelError(
                f"update '{facts.node}' has packed tokens of all sequences, and must be in place, but {obstacle}: make "
                "the cache an input of the model, and its update an output"
            )
        return _by(facts, Route.FUNCTIONAL, obstacle)
    if facts.form is UpdateForm.PACKED_NHD:
        return _packed(facts, options)
    if facts.dtype not in NATIVE_DTYPES:
        return _other_dtype(facts, options)
    if facts.mode is UpdateMode.LINEAR:
        return _by(facts, Route.NATIVE, "linear update")
    return _circular(facts, options)


def _by(update: CacheUpdate, route: Route, reason: str, contract: UpdateContract | None = None) -> CacheUpdate:
    return replace(update, route=route, reason=reason, contract=contract)


def without_plugin(caches: Iterable[CacheUpdate]) -> str:
    """Return advice on how to plan without the plugin, for when it cannot be compiled or registered."""
    needed = [c for c in caches if c.route is Route.PLUGIN]
    packed = [c for c in needed if c.form is UpdateForm.PACKED_NHD]
    if packed:
        known = all(c.mode is UpdateMode.LINEAR and c.dtype in NATIVE_DTYPES for c in packed)
        return (
            "the packed updates of this model need the plugin"
            + (" on TensorRT before 11.0; later versions have a layer for them" if known else "")
            + ": export with padded updates"
        )
    narrow = next((c for c in needed if c.dtype not in PLAIN_DTYPES), None)
    if narrow is not None:
        return f"the {narrow.dtype} caches of this model need the plugin: export them as float16, bfloat16 or float32"
    ways = "--fallback functional (plain operators, which copy the cache in each step)"
    if all(c.mode is UpdateMode.CIRCULAR and c.dtype in NATIVE_DTYPES for c in needed):
        ways = f"--fallback contract (in place, but no update may cross the end of the ring) or {ways}"
    return f"or plan without the plugin: {ways}"


def _packed(facts: CacheUpdate, options: PlanOptions) -> CacheUpdate:
    _check_dtype(facts, NATIVE_DTYPES if options.target is Target.TENSORRT_RTX else PLUGIN_DTYPES)
    if facts.mode is UpdateMode.CIRCULAR:
        if options.target is Target.TENSORRT_RTX:
            raise UnsupportedModelError(
                f"packed update '{facts.node}' is circular, which TensorRT for RTX does not support; TensorRT supports "
                "it with the plugin: plan for TensorRT, or export with padded updates"
            )
        return _by(facts, Route.PLUGIN, "circular packed update, which IKVCacheUpdateLayer does not support")
    if options.packed_native and facts.dtype in NATIVE_DTYPES:
        return _by(facts, Route.NATIVE, "packed update, which TensorRT 11.0 or later and TensorRT for RTX support")
    return _by(facts, Route.PLUGIN, "packed update, which TensorRT before 11.0 does not support")


def _other_dtype(facts: CacheUpdate, options: PlanOptions) -> CacheUpdate:
    why = f"IKVCacheUpdateLayer supports float32, float16 and bfloat16, not {facts.dtype}"
    plugin = options.target is Target.TENSORRT and options.fallback is Fallback.AUTO
    if plugin and (facts.dtype in PLUGIN_DTYPES or facts.dtype not in PLAIN_DTYPES):
        _check_dtype(facts, PLUGIN_DTYPES)
        return _by(facts, Route.PLUGIN, why)
    _check_dtype(facts, PLAIN_DTYPES)
    return _by(facts, Route.FUNCTIONAL, why)


def _circular(facts: CacheUpdate, options: PlanOptions) -> CacheUpdate:
    if facts.update_length == 1:
        return _by(facts, Route.NATIVE, "circular update of one token: linear at write index mod capacity")
    if facts.write_indices is None:
        return _by(facts, Route.NATIVE, "circular update from index 0 never reaches the end of the ring: linear")
    if options.fallback is Fallback.FUNCTIONAL:
        why = "circular update of several tokens, in plain operators because of --fallback functional"
        return _by(facts, Route.FUNCTIONAL, why)
    if options.fallback is Fallback.AUTO and options.target is Target.TENSORRT:
        return _by(facts, Route.PLUGIN, "circular update of several tokens, which IKVCacheUpdateLayer does not support")
    length = facts.update_length if isinstance(facts.update_length, int) else None
    if length is not None and facts.capacity % length:
        why = f"circular updates of {length} tokens would cross the end of {facts.capacity} rows: plain operators"
        return _by(facts, Route.FUNCTIONAL, why)
    why = (
        "circular update of several tokens: linear at write index mod capacity, under the contract that no update "
        "crosses the end of the ring"
    )
    return _by(facts, Route.NATIVE, why, UpdateContract(no_straddle=True, max_update_length=length))


def _check_dtype(facts: CacheUpdate, supported: tuple[str, ...]) -> None:
    if facts.dtype in supported:
        return
    extra = " (TensorRT's parser would convert it to float32 without a message)" if facts.dtype == "double" else ""
    raise UnsupportedModelError(
        f"cache '{facts.past}' of update '{facts.node}' is {facts.dtype}, which this target does not support{extra}; "
        f"it supports {', '.join(supported)}: export the cache as float16, bfloat16 or float32"
    )


def check_dtypes(tensors: Iterable[TensorRole]) -> None:
    """Refuse inputs and outputs of dtypes that TensorRT engines do not support.

    TensorRT for RTX 1.7.1 converts double to float32 without a message; for other types, its error names no tensor.
    """
    for tensor in tensors:
        if tensor.dtype not in TENSORRT_DTYPES:
            raise UnsupportedModelError(
                f"{tensor.io} '{tensor.name}' is {tensor.dtype}, which TensorRT engines do not support; they support "
                f"{', '.join(TENSORRT_DTYPES)}: export it in one of these types"
            )


_HINT = "rows_in_use"


def emit_row_slice(emit: Emitter, present: gs.Tensor, axis: int, capacity: int) -> gs.Variable:
    """Emit a Slice of all `capacity` rows of an updated cache. The rewrite may shorten it to the rows in use."""
    rows = emit.op("Slice", [present, *(emit.ints([n]) for n in (0, capacity, axis))], _HINT)
    rows.shape = present.shape
    return rows


def is_row_slice(node: gs.Node, end: gs.Tensor | None = None) -> bool:
    """True for a Slice that `emit_row_slice` made, and that ends at a constant or at `end`."""
    return (
        is_op(node, "Slice")
        and node.name.startswith(NAME_PREFIX + _HINT)
        and (small_constant(node.inputs[2]) is not None or node.inputs[2] is end)
    )


def row_slices(tensor: gs.Tensor, end: gs.Tensor | None = None) -> list[gs.Node]:
    """Return the Slices of rows through which a tensor reads caches; empty if it reads any cache without a Slice."""
    slices: dict[int, gs.Node] = {}
    pending, seen = [tensor], set[int]()
    while pending:
        current = pending.pop()
        node = producer(current)
        if isinstance(current, gs.Constant) or current.is_empty() or id(node) in seen:
            continue
        if node is None or is_op(node, "TensorScatter"):
            return []
        seen.add(id(node))
        if is_row_slice(node, end):
            slices[id(node)] = node
        else:
            pending += reversed(node.inputs)
    return list(slices.values())


def cut_rows(tensor: gs.Tensor, end: gs.Tensor) -> bool:
    """Cut the row numbers from which a tensor is computed to `end` rows, in place. Return False if there are none."""
    pending, seen, found = [tensor], set[int](), False
    while pending:
        node = producer(pending.pop())
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if is_row_slice(node, end) and isinstance(node.inputs[0], gs.Constant):
            end_with(node, end)
            found = True
        else:
            pending += node.inputs
    return found


def end_with(node: gs.Node, end: gs.Tensor) -> None:
    """Make a Slice end at row `end`, int64 ``[1]``."""
    node.inputs[2] = end
    output = node.outputs[0]
    axis = small_constant(node.inputs[3])
    shape = dims(output)
    assert axis is not None
    output.shape = None if shape is None else [None if d == "?" or i == axis[0] else d for i, d in enumerate(shape)]
