"""Replaces cache updates that are planned for the project's own TensorRT plugin with nodes of this plugin.

    TensorScatter(past, update, write_indices, mode="circular")
        -> trt_kvcache::KVCacheUpdateCircular(past, update, write_indices)
    TensorScatter(past, QuantizeLinear(update, scale)), float32 scale
        -> trt_kvcache::KVCacheUpdateQuantized(past, update, write_indices, scale)
    two updates of one layer, at the same write indices
        -> trt_kvcache::KVCacheUpdatePair(past_k, past_v, update_k, update_v, write_indices)

`define` adds ONNX functions that define these operators, so that ONNX Runtime can run the model. TensorRT's parser
prefers a registered plugin to a model-local function of the same name (ModelImporter.cpp: ``isNodeInPluginRegistry``).

Sequence ``b`` has the tokens ``start[b] .. end[b]`` of the update (padded: 0 to S_new; packed: ``lengths[b]`` to
``lengths[b + 1]``). Token ``t`` goes to row ``write_indices[b] + t - start[b]``; in a circular cache, modulo the
capacity, and the last of several tokens for one row wins. A sequence writes nothing if its bounds lie outside the
update, or if its tokens do not fit into a linear cache. If packed lengths do not ascend, no sequence writes anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, CacheUpdate, PhysicalLayout, Route, UpdateForm, UpdateMode
from trt_kvcache.importer.families import is_update_outside_onnx
from trt_kvcache.importer.graph import (
    INT32,
    INT64,
    Emitter,
    consumers,
    contains,
    dims,
    dtype_name,
    elem_type,
    input_or_none,
    is_op,
    producer,
    small_constant,
)
from trt_kvcache.importer.lower.body import parse
from trt_kvcache.importer.protos import TENSORRT_UPDATE, copied, opset_version
from trt_kvcache.importer.rewrite import first_rows
from trt_kvcache.importer.simplify import OPSET
from trt_kvcache.plugins.operators import CACHE_BITS, NAMESPACE, OPERATORS, VERSION, Operator

_ATTRIBUTES = {"plugin_namespace": NAMESPACE, "plugin_version": VERSION, "aot": 1}  # for the parser only
_LINE = "\n"
_THROUGH_FLOAT = {onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.INT4, onnx.TensorProto.FLOAT4E2M1}


@dataclass(frozen=True)
class _Update:
    """One cache update, with the facts that a node of the plugin needs.

    Attributes:
        scale: the float32 scales if the update is quantized on write; else None.
        scales: the number of scales: 1 or N; 0 if the update is not quantized.
    """

    cache: CacheUpdate
    node: gs.Node
    operator: Operator
    scale: gs.Tensor | None
    scales: int

    @property
    def shared(self) -> list[gs.Tensor]:
        """Return the inputs that two updates in one plugin node share: write indices, and lengths if packed."""
        return list(self.node.inputs[2:4] if self.operator.packed else self.node.inputs[2:3])


def rewrite_updates(graph: gs.Graph, emitter: Emitter, plan: CachePlan) -> None:
    """Replace every cache update with `Route.PLUGIN` (all are 4-D) by a node of the plugin, in place."""
    nodes = {node.name: node for node in graph.nodes}
    planned = [c for c in plan.caches if c.route is Route.PLUGIN]
    _check_rows(planned)
    updates = [_update(emitter, nodes[c.node], c) for c in planned]
    while updates:
        update = updates.pop(0)
        partner = next((u for u in updates if _is_pair(update, u)), None)
        if partner is not None:
            updates.remove(partner)
        _emit(graph, emitter, [update] if partner is None else [update, partner])
    _check_types(graph)


def define(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add an ONNX function for each cache-update operator that ONNX lacks and the model does not define.

    TensorRT's own update moves to this project's domain, and gets write indices. TensorRT's parser accepts it in any
    domain, and prefers its own layer to a model-local function (measured on TensorRT for RTX 1.7.1).
    """
    defined = {(f.domain, f.name) for f in model.functions}
    unknown = [is_update_outside_onnx(n) and (n.domain, n.op_type) not in defined for n in model.graph.node]
    if not any(unknown):
        return model
    copy = copied(model)
    del copy.graph.node[:]
    types = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
    caches: dict[str, set[int]] = {}
    operators: dict[str, Operator] = {}
    for node, is_unknown in zip(model.graph.node, unknown, strict=True):
        if is_unknown:
            node = _with_indices(copy.graph, node)
            operators[node.op_type] = OPERATORS.get(node.op_type) or _tensorrt_operator(node)
            caches.setdefault(node.op_type, set()).add(types.get(node.input[0], 0))
        copy.graph.node.append(node)
    opset = opset_version(model) or OPSET
    if not any(o.domain == NAMESPACE for o in copy.opset_import):
        copy.opset_import.append(helper.make_opsetid(NAMESPACE, 1))
    for name, operator in operators.items():
        function = operator_function(operator, opset, through_float=bool(caches[name] & _THROUGH_FLOAT))
        if name == TENSORRT_UPDATE:
            function.name, function.attribute[:] = name, ["update_form", "mode"]
        copy.functions.append(function)
    return copy


def _tensorrt_operator(node: onnx.NodeProto) -> Operator:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    form = UpdateForm.PACKED_NHD if "update_form" in attributes else UpdateForm.PADDED
    return Operator(form, UpdateMode(attributes.get("mode", b"linear").decode()))


def _with_indices(graph: onnx.GraphProto, node: onnx.NodeProto) -> onnx.NodeProto:
    """Move a node to this project's domain. If the node has no write indices, give it zeros."""
    copy = copied(node)
    copy.domain = NAMESPACE
    if len(node.input) < 3 or not node.input[2]:
        batch, first = f"{node.output[0]}/batch", f"{node.output[0]}/first"
        zero = helper.make_tensor("zero", onnx.TensorProto.INT64, [1], [0])
        graph.node.append(helper.make_node("Shape", [node.input[0]], [batch], start=0, end=1))
        graph.node.append(helper.make_node("ConstantOfShape", [batch], [first], value=zero))
        copy.input[:] = [*node.input[:2], first, *node.input[3:]]
    return copy


def _check_types(graph: gs.Graph) -> None:
    """Refuse a model if one ONNX function of the plugin would need to handle cache types that exclude each other."""
    types: dict[str, set[int]] = {}
    for node in graph.nodes:
        if node.domain == NAMESPACE and node.op in OPERATORS:
            types.setdefault(node.op, set()).add(elem_type(node.inputs[0]) or 0)
    for kinds in types.values():
        if kinds & _THROUGH_FLOAT and kinds & {INT32, INT64}:
            names = " and ".join(sorted(onnx.TensorProto.DataType.Name(t).lower() for t in kinds))
            raise UnsupportedModelError(
                f"the model updates caches of types {names} in the same way, but the ONNX function that defines the "
                "plugin's node cannot handle all these types: export all caches in one type"
            )


def _check_rows(caches: list[CacheUpdate]) -> None:
    for cache in caches:
        size = cache.physical_shape[-1]
        if isinstance(size, int) and size * CACHE_BITS[cache.dtype] % 8:
            raise UnsupportedModelError(
                f"cache '{cache.past}' of '{cache.node}' is {cache.dtype} with rows of {size} elements, which do not "
                "fill whole bytes; the plugin writes only whole bytes: export it with an even size after the sequence "
                "axis"
            )


def _update(emitter: Emitter, node: gs.Node, cache: CacheUpdate) -> _Update:
    first_rows(emitter, node)
    scale, scales = _take_quantization(emitter, node, cache)
    return _Update(cache, node, Operator(cache.form, cache.mode, quantized=scale is not None), scale, scales)


def _take_quantization(emitter: Emitter, node: gs.Node, cache: CacheUpdate) -> tuple[gs.Tensor | None, int]:
    """Bypass a QuantizeLinear if the plugin can quantize the update. Return its scales and their number; or None, 0."""
    between: list[gs.Tensor] = []  # results of a Reshape and Transpose to the physical layout
    update = node.inputs[1]
    while update.name != cache.update:
        between.append(update)
        (maker,) = update.inputs
        update = maker.inputs[0]
    quantize = producer(update)
    if cache.dtype not in ("int8", "float8e4m3fn") or quantize is None or not is_op(quantize, "QuantizeLinear"):
        return None, 0
    source, scale = quantize.inputs[:2]
    zero = input_or_none(quantize, 2)
    zeros = np.zeros(1) if zero is None else small_constant(zero)
    attributes = quantize.attrs
    if (
        len(consumers(update)) > 1
        or contains(emitter.graph.outputs, update)
        or dtype_name(source) not in ("float16", "bfloat16", "float")
        or dtype_name(scale) != "float"
        or zeros is None
        or np.any(zeros.astype(np.float32))
        or attributes.get("block_size", 0) != 0
        or attributes.get("saturate", 1) != 1
        or attributes.get("precision", 0) not in (0, onnx.TensorProto.FLOAT)
        or not _scales_heads(scale, int(attributes.get("axis", 1)), cache)
    ):
        return None, 0
    reader = consumers(update)[0]
    reader.inputs = [source if t is update else t for t in reader.inputs]
    for tensor in between:
        tensor.dtype = source.dtype
    scales, value = prod(d for d in dims(scale) or () if isinstance(d, int)), small_constant(scale)
    if value is not None:
        return emitter.constant(value.astype(np.float32).reshape(-1)), scales
    return emitter.op("Reshape", [scale, emitter.ints([-1])], f"{cache.past}_scale"), scales


def _scales_heads(scale: gs.Tensor, axis: int, cache: CacheUpdate) -> bool:
    shape = dims(scale)
    if shape is None or len(shape) > 1 or any(not isinstance(d, int) for d in shape):
        return False
    if not shape or shape[0] == 1:
        return True
    packed, rank = cache.form is UpdateForm.PACKED_NHD, len(cache.logical_shape)
    if cache.layout is PhysicalLayout.VIEW or (cache.layout is PhysicalLayout.HEADS_MAJOR and rank != 4):
        return False
    heads_axis = 2 if cache.layout is PhysicalLayout.HEADS_MAJOR else 1
    return axis % (3 if packed else 4) == heads_axis and shape[0] == cache.physical_shape[1]


def _is_pair(a: _Update, b: _Update) -> bool:
    """True if one plugin node can do both updates: same operator, shapes and indices; neither depends on the other."""
    one, other = a.cache, b.cache
    return (
        one.readers == other.readers
        and a.operator == b.operator
        and a.scales == b.scales
        and one.dtype == other.dtype
        and one.physical_shape[:3] == other.physical_shape[:3]
        and all(x is y for x, y in zip(a.shared, b.shared, strict=True))
        and not _depends(b.node, a.node)
        and not _depends(a.node, b.node)
    )


def _depends(node: gs.Node, on: gs.Node) -> bool:
    seen: set[int] = set()
    queue = [node]
    while queue:
        current = queue.pop()
        for tensor in current.inputs:
            maker = producer(tensor)
            if maker is on:
                return True
            if maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                queue.append(maker)
    return False


def _emit(graph: gs.Graph, emitter: Emitter, updates: list[_Update]) -> None:
    first = updates[0]
    operator = replace(first.operator, caches=len(updates))
    inputs = [u.node.inputs[0] for u in updates] + [u.node.inputs[1] for u in updates] + first.shared
    inputs += [u.scale for u in updates if u.scale is not None]
    outputs = [u.node.outputs[0] for u in updates]
    for update in updates:
        update.node.inputs.clear()
        update.node.outputs.clear()
        graph.nodes.remove(update.node)
    name = first.node.name if len(updates) == 1 else emitter.name("+".join(u.node.name for u in updates))
    graph.nodes.append(gs.Node(operator.name, name, dict(_ATTRIBUTES), inputs, outputs, domain=NAMESPACE))


def operator_function(operator: Operator, opset: int, *, through_float: bool = False) -> onnx.FunctionProto:
    """Return the ONNX function that defines one operator, for a model of opset `opset`.

    With `through_float`, values are cast to float32 and back: ONNX's GatherND and ScatterND do not support 8-bit and
    4-bit floats and 4-bit integers. float32 holds all numbers of these types exactly, but not all of int32 and int64.
    """
    nodes, numbers = parse(_body(operator, "_float" if through_float else ""))
    constants = [helper.make_node("Constant", [], [name], value=number) for name, number in numbers.items()]
    return helper.make_function(
        NAMESPACE, operator.name, list(operator.inputs), list(operator.outputs), [*constants, *nodes],
        [helper.make_opsetid("", opset)], attributes=list(_ATTRIBUTES),
    )  # fmt: skip


def _body(operator: Operator, wide: str) -> str:
    """Return an operator's ONNX function as text. `wide` is the suffix of values cast to float32; empty: no casts.

    ``accepted`` [B] is True for sequences that are written. For each of K tokens, ``sources`` [K, 2] has the sequence
    and the place in the update, and ``targets`` [K, 2] the sequence and the cache row.
    """
    packed, circular = operator.packed, operator.mode is UpdateMode.CIRCULAR
    given = [name for name in operator.inputs if name.startswith(("cache", "update"))] if wide else []
    bounds = f"""
        bounds = Cast <to = {TensorProto.INT64}> (lengths)
        start = Slice (bounds, [0], [-1])
        end = Slice (bounds, [1], [{2**62}])
    """
    whole = """
        start = Mul (first, 0)
        end = Add (start, length)
    """
    ascending = f"""
        ascends_int = Cast <to = {TensorProto.INT64}> (ascends)
        all_ascend_int = ReduceMin <keepdims = 0> (ascends_int)
        all_ascend = Cast <to = {TensorProto.BOOL}> (all_ascend_int)
        legal = And (inside, all_ascend)
    """
    fitting = """
        last_first = Sub (capacity, count)
        fits_after = LessOrEqual (first, last_first)
        fits_before = GreaterOrEqual (first, 0)
        fits_inside = And (fits_after, fits_before)
        is_empty = Equal (count, 0)
        fits = Or (fits_inside, is_empty)
        accepted = And (legal, fits)
    """
    wrapped = """
        overwritten = Sub (count_column, capacity)
        stays = GreaterOrEqual (ahead, overwritten)
        written = And (among, stays)
        position = Mod (unwrapped, capacity)
    """
    straight = """
        written = Identity (among)
        position = Identity (unwrapped)
    """
    return f"""
        {_LINE.join(f"{name}{wide} = Cast <to = {TensorProto.FLOAT}> ({name})" for name in given)}
        length = Shape <start = {0 if packed else 2}, end = {1 if packed else 3}> (update_0{wide})
        capacity = Shape <start = 2, end = 3> (cache_0{wide})
        given_first = Cast <to = {TensorProto.INT64}> (write_indices)
        first = {"Mod (given_first, capacity)" if circular else "Identity (given_first)"}
        {bounds if packed else whole}
        count = Sub (end, start)
        starts_inside = GreaterOrEqual (start, 0)
        ascends = GreaterOrEqual (count, 0)
        ends_inside = LessOrEqual (end, length)
        begins = And (starts_inside, ascends)
        inside = And (begins, ends_inside)
        {ascending if packed else "legal = Identity (inside)"}
        {"accepted = Identity (legal)" if circular else fitting}
        first_column = Unsqueeze (first, [1])
        start_column = Unsqueeze (start, [1])
        count_column = Unsqueeze (count, [1])
        accepted_column = Unsqueeze (accepted, [1])
        length_scalar = Squeeze (length)
        token = Range (0, length_scalar, 1)
        ahead = Sub (token, start_column)
        is_after_start = GreaterOrEqual (ahead, 0)
        is_before_end = Less (ahead, count_column)
        between = And (is_after_start, is_before_end)
        among = And (accepted_column, between)
        unwrapped = Add (first_column, ahead)
        {wrapped if circular else straight}
        written_indices = NonZero (written)
        sources = Transpose (written_indices)
        written_position = GatherND (position, sources)
        position_column = Unsqueeze (written_position, [1])
        row_column = Slice (sources, [0], [1], [1])
        targets = Concat <axis = 1> (row_column, position_column)
        {f"token_column = Slice (sources, [1], [{2**62}], [1])" if packed else ""}
        {_LINE.join(_scatter(operator, i, wide) for i in range(operator.caches))}
    """


def _scatter(operator: Operator, i: int, wide: str) -> str:
    """Return ONNX text that writes update `i` into cache `i` ``[B, N, S_max, H]``, quantized per head if needed."""
    update, cache, present = f"update_{i}{wide}", f"cache_{i}{wide}", f"present_{i}{wide}"
    quantized = f"""
        unquantized_{i} = Cast <to = {TensorProto.FLOAT}> (update_{i})
        zeros_{i} = Mul (scale_{i}, 0.0)
        zero_point_{i} = CastLike (zeros_{i}, cache_{i})
        codes_{i} = QuantizeLinear <axis = 1> (unquantized_{i}, scale_{i}, zero_point_{i})
        new_{i} = {f"Cast <to = {TensorProto.FLOAT}>" if wide else "Identity"} (codes_{i})
    """
    padded = f"""
        turned_{i} = Transpose <perm = [0, 2, 1, 3]> (new_{i})
        rows_{i} = GatherND (turned_{i}, sources)
    """
    return f"""
        {quantized if operator.quantized else f"new_{i} = Identity ({update})"}
        {f"rows_{i} = GatherND (new_{i}, token_column)" if operator.packed else padded}
        cache_rows_{i} = Transpose <perm = [0, 2, 1, 3]> ({cache})
        present_rows_{i} = ScatterND (cache_rows_{i}, targets, rows_{i})
        {present} = Transpose <perm = [0, 2, 1, 3]> (present_rows_{i})
        {f"present_{i} = CastLike ({present}, cache_{i})" if wide else ""}
    """
