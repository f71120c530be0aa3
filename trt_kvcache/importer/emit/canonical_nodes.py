"""Emits the nodes of the canonical form: TensorScatter caches, Attention over them, and the inputs that both need.

    write_indices [B]        the first row that this step writes in each sequence
    nonpad_kv_seqlen [B]     the number of rows that hold tokens after this step: write_indices + S
    present = TensorScatter(past [B, N, L, D], update [B, N, S, D], write_indices, axis=2)
    output  = Attention(query [B, Hq, S, D], present key, present value, own mask?, nonpad_kv_seqlen, is_causal=1)

    with sinks [Hq] (one more logit in the softmax of each head):
    y, scores = Attention(..., qk_matmul_output_mode=2)
    output    = y * Sigmoid(ReduceLogSumExp(scores) - sinks)

mobius-onnx exports static caches in this standard ONNX form (https://onnx.ai/onnx/operators/onnx__TensorScatter.html,
https://onnx.ai/onnx/operators/onnx__Attention.html). Masks and biases express what Attention's attributes cannot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.cache_plan import Dim, InterfaceChange, OriginalTensor, Role, StateUpdate, TensorRole
from trt_kvcache.importer.graph import BOOL, FLOAT, INT64, Emitter, dims, elem_type, free_name, is_op, replace_uses
from trt_kvcache.importer.planning.cache_plans import emit_row_slice
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.recognize.records import ATTENTION, Attention, Cache, Layout, order_of

_AFTER_MASK = 2
"""Value of qk_matmul_output_mode: scores after mask and softcap, before the softmax."""
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


class Canonical:
    """Emits cache updates and attentions into one graph, in place, with the inputs that these nodes need.

    `tokens` is the graph input ``[B, S, ...]`` of the new tokens, `cache` one of the caches: their shapes give B and S.

    Attributes:
        added: roles of the inputs that were added.
    """

    def __init__(self, graph: gs.Graph, tokens: gs.Tensor, cache: gs.Tensor, capacity: int) -> None:
        self.graph = graph
        self.emit = Emitter(graph)
        self.tokens = tokens
        first = (dims(cache) or ("?",))[0]
        self.batch = "batch" if first == "?" else first
        self.capacity = capacity
        self.written: list[str] = []
        self.known: dict[str, tuple[int, tuple[Dim, ...]]] = {}  # types and shapes that shape inference may not find
        self.added: list[TensorRole] = []
        self.opset = 24
        self._taken = set(graph.tensors())

    @property
    def write_indices(self) -> gs.Variable:
        """Return int64 ``[B]``: the row in which each sequence writes its first new token."""
        return self._input("write_indices", Role.WRITE_INDICES)

    @property
    def lengths(self) -> gs.Variable:
        """Return int64 ``[B]``: the number of rows that hold tokens after this step."""
        return self._input("nonpad_kv_seqlen", Role.VALID_LENGTHS)

    def positions(self) -> gs.Variable:
        """Emit the position of each new token, int64 ``[B, S]``."""
        emit = self.emit

        def make() -> gs.Variable:
            shape = emit.op("Shape", [self.tokens], "tokens_shape", INT64)
            length = emit.op("Gather", [shape, emit.ints(1)], "new_tokens", INT64, axis=0)
            steps = emit.op("Range", [emit.ints(0), length, emit.ints(1)], "new_token", INT64)
            first = emit.op("Unsqueeze", [self.write_indices, emit.ints([1])], "first_position", INT64)
            return emit.op("Add", [first, steps], "positions", INT64)

        return emit.once("positions", make)

    def write(self, cache: Cache) -> None:
        """Replace the nodes that update a cache with a TensorScatter from `cache.past` to `cache.present`."""
        update, perm, axis = cache.update, cache.perm, cache.axis
        assert update is not None
        if perm != tuple(range(len(perm))):
            update = self.emit.op("Transpose", [update], "update", perm=list(perm))
        mode = "circular" if cache.circular or cache.shifted else "linear"
        past, present = cache.past, cache.present
        present.inputs.clear()
        if elem_type(update) not in (None, 0, elem_type(past)):  # caches may be wider than updates
            past.dtype = update.dtype
            for cast in (n for n in past.outputs if is_op(n, "Cast") and n.attrs["to"] == elem_type(past)):
                replace_uses(cast.outputs[0], past)
        # only this input gets the capacity: other inputs may have the same symbol for another size
        if not isinstance(past.shape[axis], int):
            past.shape = [self.capacity if i == axis % len(past.shape) else d for i, d in enumerate(past.shape)]
        present.shape, present.dtype = past.shape, past.dtype
        name, attrs = self.emit.name(f"{past.name}:update"), {"axis": axis, "mode": mode}
        self.graph.nodes.append(gs.Node("TensorScatter", name, attrs, [past, update, self.write_indices], [present]))
        self.written.append(present.name)

    def attend(self, attention: Attention) -> None:
        """Replace the nodes that compute `attention.result` with an Attention over caches."""
        emit, mask, sizes = self.emit, attention.mask, attention.sizes
        kind = elem_type(attention.key.past) or attention.query_type
        kind = FLOAT if attention.wide and kind in _HALVES else kind
        query, output = attention.query, attention.result
        output.inputs.clear()
        if not is_plain(attention.query_layout):
            query = relaid(emit, self.tokens, query, attention.query_layout, PLAIN, sizes)
        if not is_plain(attention.result_layout):
            heads = gs.Variable(emit.name("result_heads"), dtype=output.dtype)
            last = relaid(emit, self.tokens, heads, PLAIN, attention.result_layout, {**sizes, "d": sizes["v"]})
            last.inputs[0].outputs = [output]
            output = heads
        if attention.query_type != kind:
            query = emit.op("Cast", [query], "query", kind, to=kind)
        if attention.result_type != kind:
            raw = gs.Variable(emit.name("attention"), dtype=kind)
            self.graph.nodes.append(gs.Node("Cast", emit.name("cast"), {"to": attention.result_type}, [raw], [output]))
            output = raw
        news = (dims(self.tokens) or ("?", "?"))[1]
        self.known[query.name] = (kind, (self.batch, attention.heads, news, sizes["d"]))
        self.known[output.name] = (kind, (self.batch, attention.heads, news, sizes["v"]))
        attrs: dict[str, int | float] = {"is_causal": int(mask.causal), "scale": float(np.float32(attention.scale))}
        if attention.softcap:
            attrs["softcap"] = float(np.float32(attention.softcap))
        if mask.window is not None:
            attrs["left_window_size"] = mask.window - 1  # ONNX does not count the query's own key
            self.opset = 25
        nothing = gs.Variable.empty()
        key, value = self._operand(attention.key, sizes["d"], kind), self._operand(attention.value, sizes["v"], kind)
        inputs = [query, key, value]
        if (shown := self._mask(attention, kind)) is not None:
            inputs.append(shown)
        if mask.bounded or mask.causal:
            inputs += [nothing] * (6 - len(inputs)) + [self.lengths]
        outputs = [output]
        if attention.sinks is not None:
            outputs = self._beside_sinks(output, attention.sinks, kind)
            attrs["qk_matmul_output_mode"] = _AFTER_MASK
            self.known[outputs[0].name] = self.known[output.name]
        self.graph.nodes.append(gs.Node("Attention", emit.name(attention.name), attrs, inputs, outputs))
        if elem_type(output) in (None, 0):
            output.dtype = query.dtype

    def _beside_sinks(self, output: gs.Tensor, sinks: Array, kind: int) -> list[gs.Tensor]:
        """Multiply attention's result by the share of softmax that sinks leave to keys. Return Attention's outputs."""
        emit, nothing = self.emit, gs.Variable.empty()
        plain, scores = (gs.Variable(emit.name(name), dtype=kind) for name in ("attention", "scores"))
        wide = scores if kind == FLOAT else emit.op("Cast", [scores], "scores_wide", FLOAT, to=FLOAT)
        whole = emit.op("ReduceLogSumExp", [wide, emit.ints([-1])], "all_keys", FLOAT, keepdims=1)
        ahead = emit.op("Sub", [whole, emit.constant(sinks.reshape(1, -1, 1, 1))], "ahead_of_sinks", FLOAT)
        share = emit.op("Sigmoid", [ahead], "share_of_keys", FLOAT)
        if kind != FLOAT:
            share = emit.op("Cast", [share], "share_of_keys", kind, to=kind)
        self.graph.nodes.append(gs.Node("Mul", emit.name("beside_sinks"), {}, [plain, share], [output]))
        return [plain, nothing, nothing, scores]

    def _mask(self, attention: Attention, kind: int) -> gs.Tensor | None:
        emit, seen, mask = self.emit, attention.mask, attention.mask.own
        if attention.key.shifted and (rows := attention.key.window_rows) is not None:
            mask = emit_visible(emit, self.write_indices, None, self.tokens, rows, rows)
        if seen.bias is not None:
            mask = emit_bias(emit, seen.bias, self.positions())
        if seen.slopes is not None:
            mask = emit_slopes(emit, seen.slopes, self.positions(), self.capacity)
        if mask is None or elem_type(mask) in (onnx.TensorProto.BOOL, kind):
            return mask
        return emit.once(("mask", mask.name, kind), partial(emit.op, "Cast", [mask], "own_mask", kind, to=kind))

    def _operand(self, write: Cache, size: int, kind: int) -> gs.Tensor:
        tensor = write.present
        if write.axis != 2 or len(write.perm) != 4:
            shape = dims(tensor) or ()
            if len(shape) == 3:
                heads = self.emit.ints([0, 0, int(shape[2]) // size, size])
                tensor = self.emit.op("Reshape", [tensor, heads], "heads")
            tensor = self.emit.op("Transpose", [tensor], "heads_major", perm=[0, 2, 1, 3])
        if kind != FLOAT or elem_type(write.past) not in _HALVES:
            return tensor
        return self.emit.once(("wide", tensor.name), partial(self.emit.op, "Cast", [tensor], "wide", kind, to=kind))

    def _input(self, name: str, role: Role) -> gs.Variable:
        def make() -> gs.Variable:
            free = free_name(name, self._taken)
            self._taken.add(free)
            tensor = gs.Variable(free, dtype=np.int64, shape=[self.batch])
            self.graph.inputs.append(tensor)
            self.added.append(TensorRole(free, "input", role, "int64", (self.batch,), "added", ("batch",)))
            return tensor

        return self.emit.once(("input", name), make)


def emit_visible(
    emit: Emitter, write_indices: gs.Tensor, lengths: gs.Tensor | None, query: gs.Tensor, window: int, rows: int
) -> gs.Variable:
    """Emit a bool mask ``[B, 1, S, R]`` of the rows of a circular cache (ring) that each query sees.

    `write_indices` ``[B]`` are the numbers of tokens before the step. `lengths` ``[B]`` are 0 for sequences without
    tokens in this step (None: all have tokens). `query` is ``[B, H, S, D]``, or has S as axis 1. `window` counts the
    query's own key; `rows` is R.
    """
    length_of = query.shape[2] if query.shape is not None and len(query.shape) == 4 else query.name

    def op(name: str, inputs: Sequence[gs.Tensor], hint: str, dtype: int = INT64, **attrs: int) -> gs.Variable:
        return emit.op(name, inputs, hint, dtype, **attrs)

    def make() -> gs.Variable:
        axis = 2 if query.shape is None or len(query.shape) == 4 else 1
        shape = op("Shape", [query], "window_queries", start=axis, end=axis + 1)
        length = op("Squeeze", [shape], "window_new_tokens")
        steps = op("Range", [emit.ints(0), length, emit.ints(1)], "window_steps")
        first = op("Unsqueeze", [write_indices, emit.ints([1, 2, 3])], "window_first")
        position = op("Add", [first, op("Unsqueeze", [steps, emit.ints([0, 1, 3])], "window_step")], "window_position")
        last = op("Add", [first, op("Sub", [length, emit.ints(1)], "window_last_step")], "window_last")
        slots = emit.constant(np.arange(rows, dtype=np.int64).reshape(1, 1, 1, rows))
        age = op("Mod", [op("Sub", [last, slots], "window_distance"), emit.ints(rows)], "window_age")
        newest = op("Sub", [last, age], "window_newest")
        written = op("GreaterOrEqual", [newest, emit.ints(0)], "window_written", BOOL)
        past = op("LessOrEqual", [newest, position], "window_past", BOOL)
        oldest = op("Sub", [position, emit.ints(window)], "window_oldest")
        near = op("Greater", [newest, oldest], "window_near", BOOL)
        visible = op("And", [op("And", [written, past], "window_known", BOOL), near], "window_visible", BOOL)
        if lengths is None:
            return visible
        valid = op("Unsqueeze", [lengths, emit.ints([1, 2, 3])], "window_valid")
        return op("And", [visible, op("Greater", [valid, emit.ints(0)], "window_in_use", BOOL)], "window_rows", BOOL)

    return emit.once(("window", write_indices.name, lengths and lengths.name, length_of, window, rows), make)


def emit_bias(emit: Emitter, bias: Array, positions: gs.Tensor) -> gs.Variable:
    """Emit a float32 bias ``[B, H, S, L]`` by the distance of query and key. Layers with the same `bias` share it.

    `bias` is float32 ``[L, H]``, for key minus query positions ``-(L - 1) .. 0``. `positions` of the new tokens are
    int64 ``[B, S]``. The rewrite later slices the result to the cache rows in use.
    """
    rows = len(bias)

    def make() -> gs.Variable:
        index = emit.op("Add", [_distance(emit, positions, rows), emit.ints(rows - 1)], "bias_row", INT64)
        known = emit.op("Clip", [index, emit.ints(0), emit.ints(rows - 1)], "bias_index", INT64)
        values = emit.op("Gather", [emit.constant(bias), known], "bias_found", FLOAT, axis=0)
        return emit.op("Transpose", [values], "bias", FLOAT, perm=[0, 3, 1, 2])

    return emit.once(("bias", bias.tobytes()), make)


def emit_slopes(emit: Emitter, slopes: Array, positions: gs.Tensor, rows: int) -> gs.Variable:
    """Emit the ALiBi bias (a head's slope times key minus query position), float32 ``[B, H, S, L]``, L = `rows`."""

    def make() -> gs.Variable:
        distance = emit.op("Unsqueeze", [_distance(emit, positions, rows), emit.ints([1])], "slope_distance", INT64)
        wide = emit.op("Cast", [distance], "slope_distance", FLOAT, to=FLOAT)
        return emit.op("Mul", [wide, emit.constant(slopes.reshape(1, -1, 1, 1))], "slanted", FLOAT)

    return emit.once(("slopes", slopes.tobytes()), make)


def _distance(emit: Emitter, positions: gs.Tensor, rows: int) -> gs.Variable:
    query = emit.op("Unsqueeze", [positions, emit.ints([2])], "bias_query", INT64)
    keys = emit_row_slice(emit, emit.constant(np.arange(rows, dtype=np.int64)), 0, rows)
    keys.dtype = np.int64
    return emit.op("Sub", [keys, query], "bias_distance", INT64)


PLAIN: Layout = (("b",), ("n", "g"), ("s",), ("d",))
"""``[B, H, S, D]``."""


def is_plain(layout: Layout) -> bool:
    """True if the layout is ``[B, H, S, D]``."""
    order = order_of(layout)
    in_order = order == tuple(n for n in ATTENTION if n in order)
    return in_order and len(layout) == 4 and all(map(set.issuperset, map(set, PLAIN), layout))


def relaid(
    emit: Emitter, tokens: gs.Tensor, tensor: gs.Tensor, old: Layout, new: Layout, sizes: Mapping[str, int]
) -> gs.Tensor:
    """Bring a tensor from one layout to another. `sizes`: n (K/V heads), g (Q heads per K/V head), d (head size)."""
    named: dict[str, Dim] = {"b": "batch", "n": sizes["n"], "g": sizes["g"], "s": "sequence", "d": sizes["d"]}
    both = set(order_of(old)).intersection(order_of(new))  # a layout has no sizes of 1
    before, after = ([n for n in order_of(layout) if n in both] for layout in (old, new))
    if before != after:
        shape = emit_sizes(emit, tokens, tuple(named[n] for n in before))
        tensor = emit.op("Reshape", [tensor, shape], "axes")
        tensor = emit.op("Transpose", [tensor], "turned", perm=[before.index(n) for n in after])
    shape = emit_sizes(emit, tokens, tuple(_size([named[n] for n in axis]) for axis in new))
    return emit.op("Reshape", [tensor, shape], "laid")


def _size(axis: Sequence[Dim]) -> Dim:
    """Return the size of an axis that joins several: their product, or "?" if "batch" or "sequence" is among them."""
    if len(axis) == 1:
        return axis[0]
    return prod(d for d in axis if isinstance(d, int)) if all(isinstance(d, int) for d in axis) else "?"


def emit_sizes(emit: Emitter, tokens: gs.Tensor, dims: tuple[Dim, ...]) -> gs.Tensor:
    """Emit a Reshape's shape, int64. A dimension is a number, "batch", "sequence" (new tokens), or at most one "?"."""
    if "?" not in dims:
        last = max((i for i, d in enumerate(dims) if isinstance(d, str)), default=-1)
        dims = tuple("?" if i == last else d for i, d in enumerate(dims))

    def size(dim: Dim) -> gs.Tensor:
        if dim not in ("batch", "sequence"):
            return emit.ints([-1 if isinstance(dim, str) else dim])
        start = int(dim == "sequence")
        return emit.op("Shape", [tokens], "tokens_size", INT64, start=start, end=start + 1)

    return emit.once(("sizes", dims), lambda: emit.op("Concat", [size(d) for d in dims], "sizes", INT64, axis=0))


@dataclass(frozen=True)
class Findings:
    """Facts for the plan about a model in canonical form: TensorScatter updates caches, and Attention reads them.

    Attributes:
        written: cache outputs of the canonical form; empty if the model did not change.
        idioms: how the exported model writes each of these caches, such as ``"Concat"``.
        changes: changes of inputs and outputs.
        original: inputs and outputs of the exported model; empty if the model already was canonical.
        roles: roles of the inputs and outputs, and of added inputs.
        states: tensors that go from step to step, but are no caches.
        notes: notes for the reader of the plan.
        longest: the most tokens of one update of each cache that became circular, by input name.
        capacity: tokens per sequence if the model does not fix the capacity; else None.
    """

    written: Collection[str] = ()
    idioms: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[InterfaceChange, ...] = ()
    original: tuple[OriginalTensor, ...] = ()
    roles: tuple[TensorRole, ...] = ()
    states: tuple[StateUpdate, ...] = ()
    notes: tuple[str, ...] = ()
    longest: dict[str, int] = field(default_factory=dict)
    capacity: int | None = None
