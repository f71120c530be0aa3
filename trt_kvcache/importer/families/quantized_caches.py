"""Quantizes caches for ``--cache-dtype``, after the rewrite and the check.

Each row of a head [H] is rotated, and stored as codes and one float32 scale, without calibration:

    turned = row R                              R: an orthonormal Hadamard matrix, its own inverse
    scale = max(|turned|) / M                   M: 127 for int8, 7 for int4, 448 for fp8
    codes = round(turned / scale)

Rows of trained models have a few large numbers; R spreads these over the whole row (QuaRot,
https://arxiv.org/abs/2404.00456). Attention gives the same numbers with rotated queries and a result that is rotated
back; for other readers of a cache, the graph rotates the rows back:

    softmax(Q K') V = softmax((Q R) (K R)') (V R) R

With `PlanOptions.cache_ranges`, each cache has one constant scale: range / M. Codes saturate as in QuantizeLinear;
integer codes are limited to -M - 1 .. M.

    past [B, N, S_max, H]  -- update(new rows) -- present  -- Slice(rows in use) -- reader
becomes
    past [B, N, S_max, L]  -- update(quantize(new rows)) -- present  -- Slice(rows in use) -- dequantize -- reader

TensorRT for RTX has no plugins, and its cache layer supports only floats. So each row of a cache has L float32 numbers.
The last is the scale; each of the others holds an integer of 24 bits exactly: three codes of 8 bits, or six of 4 bits.
Multiplications by powers of two and Floor separate the codes exactly.

On TensorRT, the plugin writes codes into a cache of int8 (one or two codes) or float8. A separate cache [B, N, S_max,
1] holds the scales. The builder allows no Slice of float8, so float8 codes become float32 before the Slice (measured on
TensorRT for RTX 1.7.1: "datatype FP8 but is not consumed by IPluginLayer, ..., IDequantizeLayer, IConcatenationLayer,
IShuffleLayer, IShapeLayer").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import OptionError
from trt_kvcache.importer import families
from trt_kvcache.importer.cache_plan import (
    CacheDtype,
    CachePlan,
    CacheUpdate,
    Dim,
    Fallback,
    InterfaceChange,
    PhysicalLayout,
    Role,
    Route,
    Target,
    TensorRole,
    UpdateForm,
    cache_bytes,
    dtype_bits,
)
from trt_kvcache.importer.graph import FLOAT, INT64, Emitter, consumers, free_name, is_op, small_constant
from trt_kvcache.importer.interface.exported_interface import in_words
from trt_kvcache.importer.planning.cache_plans import NATIVE_DTYPES

_ROW = 2
"""Axis of the rows in every cache of a rewritten model. The next axis is the numbers of a row."""
_LEAST = float(np.finfo(np.float32).tiny)  # the smallest divisor, for rows of zeros
_IN_ATTENTION = "GroupQueryAttention"
_MOST = {CacheDtype.INT8: 127, CacheDtype.INT4: 7, CacheDtype.FP8: 448}
_BITS = {CacheDtype.INT8: 8, CacheDtype.INT4: 4}
_EXACT = 24  # bits that float32 holds exactly
_FLOAT8 = "float8e4m3fn"
_INT4 = (
    "caches of 4 bits change the text of a small model (see docs/quantized-caches.md for figures): test the model on "
    "your texts, or use int8"
)


@dataclass(frozen=True)
class _Form:
    """The layout of a quantized row in a cache: codes (quantized numbers) and perhaps a scale.

    Attributes:
        most: the largest code.
        dtype: ONNX type of the numbers that hold codes.
        codes: how many codes one number of type `dtype` holds.
        bits: bits of each code; 0 for fp8.
        scale_inside: True if the scale is the last number of the row.
        ranges: for constant scales, the largest magnitude in each cache, by past. None: each row has its own scale.
        route: update route of the caches that hold codes.
    """

    most: int
    dtype: str
    codes: int
    bits: int
    scale_inside: bool
    ranges: Mapping[str, float] | None
    route: Route

    def numbers(self, size: int) -> int:
        """Return how many numbers of the cache's type a quantized row of `size` elements takes."""
        return -(-size // self.codes)

    def row_bits(self, size: int) -> int:
        """Return how many bits a row of `size` elements takes, including its scale."""
        return self.numbers(size) * dtype_bits(self.dtype) + (32 if self.ranges is None else 0)

    @property
    def zero(self) -> int:
        """The packed integer of quantized numbers that are all 0, before `_shift` is subtracted to fit `dtype`."""
        return sum(1 << (self.bits * i + self.bits - 1) for i in range(self.codes))


def rotation(size: int) -> npt.NDArray[np.float32]:
    """Return the rotation R ``[size, size]``: Hadamard blocks, of the largest power of two that divides `size`."""
    block = size & -size
    at = np.arange(block)
    signs = 1 - 2 * (np.bitwise_count(at[:, None] & at) & 1).astype(np.float32)
    turned: npt.NDArray[np.float32] = np.kron(np.eye(size // block, dtype=np.float32), signs / np.float32(block**0.5))
    return turned


def quantize(graph: gs.Graph, plan: CachePlan, *, plain: bool = False) -> CachePlan:
    """Quantize the caches of a rewritten model in place, as the plan's options say. Return the new plan.

    With `cache_ranges`, the model may have ONNX Runtime's GroupQueryAttention, which also updates its caches. With
    `plain`, the model is for ONNX Runtime, so standard operators write codes of int8 and int4, not the plugin. Raises
    `OptionError` if a cache cannot be quantized to this type.
    """
    form = _form(plan, plain=plain)
    for cache in plan.caches:
        _check(cache, plan, form)
    emitter = Emitter(graph)
    caches = [_Quantized(emitter, form, cache, _writer(graph, cache)) for cache in plan.caches]
    for each in caches:
        each.edit()
    planned = _plan(plan, [each.planned() for each in caches])
    if any(cache.route is Route.PLUGIN for cache in planned.caches):
        families.plugin_route.rewrite_updates(graph, emitter, planned)
    graph.cleanup(remove_unused_graph_inputs=False).toposort()
    return planned


def _writer(graph: gs.Graph, cache: CacheUpdate) -> gs.Node:
    """Return the node that updates a cache: TensorScatter, or ONNX Runtime's GroupQueryAttention."""
    (past,) = (t for t in graph.inputs if t.name == cache.past)
    return next(n for n in consumers(past) if n.name == cache.node or n.op == _IN_ATTENTION)


def _form(plan: CachePlan, *, plain: bool) -> _Form:
    wanted, target, ranges = plan.options.cache_dtype, plan.options.target, plan.options.cache_ranges
    assert wanted is not None
    if ranges is not None:
        names = {cache.past for cache in plan.caches}
        if wrong := sorted(names ^ ranges.keys()):
            verb = "has no range for" if wrong[0] in names else "names the unknown cache"
            raise OptionError(f"cache_ranges {verb} '{wrong[0]}'; give one range for each cache of this model")
    most = _MOST[wanted]
    if target is Target.TENSORRT or plain:
        if plan.options.fallback is not Fallback.AUTO and not plain:
            raise OptionError(
                f"cache_dtype {wanted.value} needs the plugin on TensorRT, but fallback {plan.options.fallback.value} "
                "excludes the plugin: leave one of the two options out"
            )
        if wanted is CacheDtype.FP8:  # ONNX Runtime's TensorScatter has no float8 kernel (1.32.0)
            return _Form(most, _FLOAT8, 1, 0, scale_inside=False, ranges=ranges, route=Route.PLUGIN)
        each, bits, route = 8 // _BITS[wanted], _BITS[wanted], Route.NATIVE if plain else Route.PLUGIN
        return _Form(most, "int8", each, bits, scale_inside=False, ranges=ranges, route=route)
    if wanted is CacheDtype.FP8:
        raise OptionError(
            "cache_dtype is fp8, but TensorRT for RTX has no 8-bit caches. Quantized values are packed into float32 "
            "caches, which works only for int8 and int4: use int8, which has as many bits, or plan for TensorRT"
        )
    each, bits = _EXACT // _BITS[wanted], _BITS[wanted]
    return _Form(most, "float", each, bits, scale_inside=ranges is None, ranges=ranges, route=Route.NATIVE)


def _check(cache: CacheUpdate, plan: CachePlan, form: _Form) -> None:
    wanted = plan.options.cache_dtype
    assert wanted is not None
    asked = f"cache_dtype is {wanted.value}, but cache '{cache.past}'"
    if cache.dtype not in NATIVE_DTYPES:
        raise OptionError(f"{asked} already is {cache.dtype}; only float caches can be quantized: leave the option out")
    if cache.route is not Route.NATIVE or not cache.carried:
        raise OptionError(
            f"{asked} is not updated by TensorRT's own cache layer ({cache.reason}); only caches with that layer can "
            "be quantized: leave the option out"
        )
    size = cache.physical_shape[-1]
    assert isinstance(size, int)
    before, after = size * dtype_bits(cache.dtype), form.row_bits(size)
    if after >= before:
        scales = " with a scale for each row" if form.ranges is None else ""
        raise OptionError(
            f"{asked} {list(cache.physical_shape)} has rows of {size} numbers, which need {before} bits as "
            f"{cache.dtype} and would need {after} bits{scales}: leave the option out"
        )


class _Quantized:
    """Quantizes one float cache of the plan; `node` writes the cache (TensorScatter or GroupQueryAttention)."""

    def __init__(self, emitter: Emitter, form: _Form, cache: CacheUpdate, node: gs.Node) -> None:
        self._emitter = emitter
        self._form = form
        self._cache = cache
        self._node = node
        # An update has the past as first input and the present as first output. GroupQueryAttention has Q, K and V
        # before the pasts, and the result before the presents.
        self._at = next(i for i, tensor in enumerate(node.inputs) if tensor.name == cache.past)
        self._past, self._present = node.inputs[self._at], node.outputs[max(0, self._at - 2)]
        shape = cache.physical_shape
        assert isinstance(shape[-1], int)
        self._size = shape[-1]
        self._numbers = form.numbers(self._size)
        self._scales: tuple[gs.Variable, gs.Variable, gs.Node] | None = None
        self._dtype = form.dtype
        self._scale = None if form.ranges is None else self._number(form.ranges[cache.past] / form.most)
        self._unit = self._scale if self._scale is not None and form.codes == 1 else self._number(1)

    def edit(self) -> None:
        """Make the update write quantized rows, and make readers read dequantized rows."""
        readers = [r for r in consumers(self._present) if not is_op(r, "Shape")]
        self._keep_shapes(self._past, self._cache.physical_shape)
        self._keep_shapes(self._present, self._cache.physical_shape)
        if self._node.op == _IN_ATTENTION:
            self._hold_in_attention()
            return
        codes, scale = self._quantize(self._node.inputs[1])
        if self._form.scale_inside:
            codes = self._op("Concat", [codes, scale], "rows", axis=-1)
        elif self._scale is None:
            self._add_scales(scale)
        self._node.inputs[1] = codes
        self._retype(codes.dtype)
        rows = self._codes(self._present) if self._form.dtype == _FLOAT8 else self._present
        for reader in readers:
            reader.inputs = [rows if t is self._present else t for t in reader.inputs]
            self._dequantize_for(reader, rows)

    def _retype(self, dtype: int) -> None:
        for tensor in (self._past, self._present):
            tensor.dtype, tensor.shape = dtype, [*tensor.shape[:-1], self._planned_size]

    def _hold_in_attention(self) -> None:
        """Make GroupQueryAttention quantize new rows and read quantized rows. A uint8 holds two numbers of 4 bits."""
        node, which, bits = self._node, "kv"[self._at - 3], self._form.bits
        assert self._scale is not None
        node.inputs[self._at - 2] = self._turn_packed(node.inputs[self._at - 2])
        if which == "k":
            node.inputs[0] = self._turn_packed(node.inputs[0])
        else:
            self._turn_result(node, self._turn_packed)
        self._dtype = "uint8" if self._form.codes > 1 else self._form.dtype
        at = 12 + self._at - 3
        node.inputs = [*node.inputs, *(gs.Variable.empty() for _ in range(at + 1 - len(node.inputs)))]
        node.inputs[at] = self._scale
        node.attrs |= {f"{which}_quant_type": "PER_TENSOR", "kv_cache_bit_width": bits}
        self._retype(_elem_type(self._dtype))

    def planned(self) -> tuple[CacheUpdate, ...]:
        """Return the plan of the cache of quantized numbers and, if scales have their own cache, of that cache."""
        form, cache = self._form, self._cache
        shape = cache.physical_shape[:-1]
        moved = replace(
            cache,
            update=self._node.inputs[self._at + 1].name,
            dtype=self._dtype,
            logical_shape=(*shape, self._planned_size),
            physical_shape=(*shape, self._planned_size),
            sequence_axis=_ROW,
            physical_sequence_axis=_ROW,
            layout=PhysicalLayout.AS_IS,
        )
        if form.dtype == "float":
            many = f"{form.codes} codes of {form.bits} bits in each float32"
            many += ", and a scale in the last float32 of a row" if form.scale_inside else ""
            return (replace(moved, reason=f"{cache.reason}; {many}"),)
        codes = "two codes of 4 bits in each int8" if form.codes > 1 else f"codes of {form.dtype}"
        if form.dtype == _FLOAT8:
            codes += "; a step reads the codes of all rows, not only those of the rows in use"
        if form.route is Route.PLUGIN:
            moved = replace(moved, route=form.route, reason=f"{codes}, which IKVCacheUpdateLayer does not support")
        if self._scales is None:
            return (moved,)
        past, present, node = self._scales
        scales = replace(
            moved, node=node.name, past=past.name, present=present.name, update=node.inputs[1].name, dtype="float",
            logical_shape=(*shape, 1), physical_shape=(*shape, 1), route=Route.NATIVE,
            reason=f"{cache.reason}; scales",
        )  # fmt: skip
        return moved, scales

    @property
    def _planned_size(self) -> int:
        return self._numbers + 1 if self._form.scale_inside else self._numbers

    def _op(
        self, op: str, inputs: list[gs.Tensor], what: str, dtype: int | None = FLOAT, **attributes: int
    ) -> gs.Variable:
        return self._emitter.op(op, inputs, f"{self._cache.past}_{what}", dtype, **attributes)

    def _number(self, value: float) -> gs.Constant:
        return self._emitter.scalar(value, FLOAT)

    def _quantize(self, rows: gs.Tensor) -> tuple[gs.Variable, gs.Tensor]:
        """Quantize new rows [..., H] to integers [..., L] and scales (float32 [..., 1], or a constant)."""
        form, scale = self._form, self._scale
        codes = self._turn(self._op("Cast", [rows], "wide", to=FLOAT), FLOAT)
        if scale is None:
            largest = self._op(
                "ReduceMax", [self._op("Abs", [codes], "abs"), self._emitter.ints([-1])], "largest", keepdims=1
            )
            scale = self._op("Div", [largest, self._number(form.most)], "scale")
            divisor = self._op("Max", [scale, self._number(_LEAST)], "divisor")
            codes = self._op("Div", [codes, divisor], "scaled")
        elif form.codes > 1:
            codes = self._op("Div", [codes, scale], "scaled")
        if form.codes > 1:
            codes = self._op("Round", [codes], "codes")
            if self._scale is not None:
                limits = [self._number(-form.most - 1), self._number(form.most)]
                codes = self._op("Clip", [codes, *limits], "saturated")
            codes = self._pack(codes)
        if form.dtype == "float":
            return codes, scale
        dtype = _elem_type(form.dtype)
        return self._op("QuantizeLinear", [codes, self._unit, self._zero(dtype)], "quantized", dtype), scale

    def _zero(self, dtype: int) -> gs.Constant:
        return self._emitter.tensor(onnx.helper.make_tensor("", dtype, [], [0]))

    def _pack(self, codes: gs.Variable) -> gs.Variable:
        """Pack quantized numbers [..., H] into [..., L]: the first L fill the lowest bits, the next L the next bits."""
        form, rank = self._form, 3 if self._cache.form is UpdateForm.PACKED_NHD else 4
        if missing := self._numbers * form.codes - self._size:
            pads = self._emitter.ints([0] * (2 * rank - 1) + [missing])
            codes = self._op("Pad", [codes, pads, self._number(0)], "padded")
        parts = self._op(
            "Reshape", [codes, self._emitter.ints([0] * (rank - 1) + [form.codes, self._numbers])], "parts"
        )
        placed = self._op("Mul", [parts, self._powers(0)], "placed")
        total = self._op("ReduceSum", [placed, self._emitter.ints([-2])], "packed", keepdims=0)
        # Half of the range is added to each code, so that negative codes become integers from 0 on.
        return self._op("Add", [total, self._number(form.zero - self._shift)], "numbers")

    def _unpack(self, numbers: gs.Tensor) -> gs.Variable:
        form = self._form
        if self._shift:
            numbers = self._op("Add", [numbers, self._number(self._shift)], "shifted")
        each = self._op("Unsqueeze", [numbers, self._emitter.ints([-2])], "each")
        # A code is the difference of two numbers: one without the lower bits, the other also without the code's bits.
        low = self._op("Floor", [self._op("Mul", [each, self._powers(0, -1)], "lower")], "from_code")
        high = self._op("Floor", [self._op("Mul", [each, self._powers(1, -1)], "upper")], "behind_code")
        above = self._op("Mul", [high, self._number(1 << form.bits)], "above_code")
        codes = self._op("Sub", [self._op("Sub", [low, above], "raw"), self._number(1 << (form.bits - 1))], "signed")
        whole = self._emitter.ints([0, 0, 0, form.codes * self._numbers])
        codes = self._op("Reshape", [codes, whole], "codes_read")
        return self._slice(codes, 0, self._size) if form.codes * self._numbers > self._size else codes

    @property
    def _shift(self) -> int:
        """The offset to subtract from packed integers so that these fit the cache's type."""
        return 0 if self._form.dtype == "float" else 1 << (dtype_bits(self._form.dtype) - 1)

    def _powers(self, first: int, sign: int = 1) -> gs.Constant:
        """Return powers of two ``[codes, 1]`` that shift each quantized number to its bits in a packed number."""
        places = np.arange(first, first + self._form.codes) * self._form.bits * sign
        return self._emitter.constant(np.exp2(places).astype(np.float32)[:, None])

    def _slice(self, tensor: gs.Tensor, first: int, last: int) -> gs.Variable:
        ends = [self._emitter.ints([end]) for end in (first, last, -1)]
        return self._op("Slice", [tensor, *ends], "part")

    def _dequantize_for(self, reader: gs.Node, present: gs.Tensor) -> None:
        """Dequantize a cache for a reader. If the reader is a Slice of the rows in use, dequantize its result."""
        axes = small_constant(reader.inputs[3]) if is_op(reader, "Slice") and len(reader.inputs) == 4 else None
        if axes is None or list(axes) not in ([_ROW], [_ROW - 4]):
            values = self._emitter.once(("values", present.name), lambda: self._dequantize(present, None))
            self._read(reader, present, values)
            return
        rows = reader.outputs[0]
        readers = consumers(rows)
        rows.dtype, rows.shape = present.dtype, None
        values = self._dequantize(rows, reader)
        for other in readers:
            self._read(other, rows, values)

    def _read(self, reader: gs.Node, codes: gs.Tensor, values: gs.Variable) -> None:
        """Connect `reader` to `values`, which are rotated back. For attentions, rotate queries or results instead."""
        if not self._turn_attention(reader, codes):
            values = self._emitter.once(("turned", values.name), lambda: self._turn(values, int(values.dtype)))
        reader.inputs = [values if t is codes else t for t in reader.inputs]

    def _turn_attention(self, node: gs.Node, codes: gs.Tensor) -> bool:
        """Rotate an Attention's queries if `codes` are its keys, or its result if they are its values; else False."""
        places = [i for i, tensor in enumerate(node.inputs) if tensor is codes]
        if not is_op(node, "Attention") or "q_num_heads" in node.attrs or places not in ([1], [2]):
            return False
        if places == [1]:
            node.inputs[0] = self._turn(node.inputs[0], _elem_type(self._cache.dtype))
        else:
            self._turn_result(node, lambda result: self._turn(result, _elem_type(self._cache.dtype)))
        return True

    def _turn_result(self, node: gs.Node, turn: Callable[[gs.Tensor], gs.Variable]) -> None:
        (result, *others), inner = node.outputs, gs.Variable(self._emitter.name("rotated"), dtype=node.outputs[0].dtype)
        node.outputs = [inner, *others]
        (maker,) = turn(inner).inputs
        maker.outputs = [result]

    def _turn(self, rows: gs.Tensor, dtype: int) -> gs.Variable:
        """Add nodes that rotate rows ``[..., H]``. A second rotation restores the rows."""
        matrix: gs.Tensor = self._emitter.constant(rotation(self._size))
        if dtype != FLOAT:
            cast = partial(self._op, "Cast", [matrix], "rotation", dtype, to=dtype)
            matrix = self._emitter.once(("rotation", self._size, dtype), cast)
        return self._op("MatMul", [rows, matrix], "rotated", dtype)

    def _turn_packed(self, rows: gs.Tensor) -> gs.Variable:
        """Add nodes that rotate each head in rows ``[B, S, N*H]``."""
        heads = self._op("Reshape", [rows, self._emitter.ints([0, 0, -1, self._size])], "heads")
        return self._op("Reshape", [self._turn(heads, FLOAT), self._emitter.ints([0, 0, -1])], "merged")

    def _dequantize(self, rows: gs.Tensor, reader: gs.Node | None) -> gs.Variable:
        codes, scale = rows if rows.dtype == FLOAT else self._codes(rows), self._scale
        if self._form.scale_inside:
            codes, scale = self._slice(rows, 0, self._numbers), self._slice(rows, self._numbers, self._numbers + 1)
        elif self._scales is not None:
            scale = self._scales[1]
            if reader is not None:
                scale = self._op("Slice", [scale, *reader.inputs[1:]], "scales_read")
        if self._form.codes > 1:
            codes = self._unpack(codes)
        values = codes if scale is self._unit else self._op("Mul", [codes, scale], "values")
        to = _elem_type(self._cache.dtype)
        return self._op("Cast", [values], "read", to, to=to)

    def _codes(self, numbers: gs.Tensor) -> gs.Variable:
        """Convert numbers of a cache (int8, float8) to float32, and apply a constant scale if each is one code."""
        return self._op("DequantizeLinear", [numbers, self._unit, self._zero(int(numbers.dtype))], "codes_held")

    def _add_scales(self, scale: gs.Variable) -> None:
        graph, node, past, present = self._emitter.graph, self._node, self._past, self._present
        names = [free_name(f"{tensor.name}_scale", graph.tensors()) for tensor in (past, present)]
        scales = [gs.Variable(name, np.float32, [*past.shape[:-1], 1]) for name in names]
        inputs = [scales[0], scale, *node.inputs[2:]]
        update = gs.Node(node.op, self._emitter.name(f"{names[1]}:{node.op}"), dict(node.attrs), inputs, [scales[1]])
        update.domain = node.domain
        graph.nodes.append(update)
        graph.inputs.insert(_place(graph.inputs, past) + 1, scales[0])
        graph.outputs.insert(_place(graph.outputs, present) + 1, scales[1])
        self._scales = scales[0], scales[1], update

    def _keep_shapes(self, tensor: gs.Tensor, shape: tuple[Dim, ...]) -> None:
        """Let Shape nodes of the cache `tensor` and its views still return `shape`, the shape before quantization."""
        for reader in consumers(tensor):
            if is_op(reader, "Shape"):
                seen = shape[slice(reader.attrs.get("start", 0), reader.attrs.get("end"))]
                batch = self._op("Shape", [self._past], "batch", INT64, start=0, end=1)
                reader.op, reader.attrs = "Concat", {"axis": 0}
                reader.inputs = [self._emitter.ints([d]) if isinstance(d, int) else batch for d in seen]
            elif tensor is not self._present and is_op(reader, "Transpose"):
                self._keep_shapes(reader.outputs[0], tuple(shape[i] for i in reader.attrs["perm"]))
            elif tensor is not self._present and is_op(reader, "Reshape"):
                self._keep_shapes(reader.outputs[0], self._cache.logical_shape)


def _elem_type(name: str) -> int:
    return int(onnx.TensorProto.DataType.Value(name.upper()))


def _place(tensors: list[gs.Tensor], tensor: gs.Tensor) -> int:
    return next(i for i, other in enumerate(tensors) if other is tensor)


def _plan(plan: CachePlan, updates: list[tuple[CacheUpdate, ...]]) -> CachePlan:
    by_name = {name: caches for caches in updates for name in (caches[0].past, caches[0].present)}
    tensors: list[TensorRole] = []
    changes = {(c.io, c.new.partition(" ")[0]): c for c in plan.changes if c.new}
    for role in plan.tensors:
        codes, *scales = by_name.get(role.name, (None,)) if role.role is Role.CACHE else (None,)
        if codes is None:
            tensors.append(role)
            continue
        tensors.append(replace(role, dtype=codes.dtype, shape=codes.physical_shape))
        old, new = in_words(role.name, role.shape), in_words(role.name, codes.physical_shape)
        before = changes.get((role.io, role.name)) or InterfaceChange(role.io, old, "", "")
        why = "; ".join(filter(None, (before.why, f"rows are quantized: {codes.reason}")))
        changes[role.io, role.name] = replace(before, new=new, why=why)
        for scale in scales:
            name = scale.past if role.io == "input" else scale.present
            tensors.append(replace(role, name=name, dtype=scale.dtype, shape=scale.physical_shape, found_by="added"))
            new = in_words(name, scale.physical_shape)
            changes[role.io, name] = InterfaceChange(role.io, "", new, f"scales of the rows of '{role.name}'")
    gone = tuple(c for c in plan.changes if not c.new)
    quantized = replace(
        plan,
        caches=tuple(cache for caches in updates for cache in caches),
        tensors=tuple(tensors),
        changes=(*gone, *changes.values()),
    )
    costs = (_INT4,) if plan.options.cache_dtype is CacheDtype.INT4 else ()
    return replace(quantized, notes=(_saved(plan, quantized), *costs, *plan.notes))


def _saved(plan: CachePlan, quantized: CachePlan) -> str:
    before, after = (
        sum(
            cache_bytes(replace(c, physical_shape=(1, *c.physical_shape[1:2], 1, c.physical_shape[3])), 1)
            for c in p.caches
        )
        for p in (plan, quantized)
    )
    wanted = plan.options.cache_dtype
    assert wanted is not None
    kinds = " and ".join(dict.fromkeys("float32" if c.dtype == "float" else c.dtype for c in plan.caches))
    scales = "with their scales" if plan.options.cache_ranges is None else "with a scale for each cache"
    return (
        f"--cache-dtype {wanted.value}: the caches take {after} bytes per token {scales}, instead of {before} as "
        f"{kinds}: {before - after} bytes saved ({1 - after / before:.0%})"
    )
