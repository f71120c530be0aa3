"""Emit the canonical form: TensorScatter caches, Attention over them, and the inputs that both need.

    write_indices [B]        first row that this step writes, per sequence
    nonpad_kv_seqlen [B]     rows that hold tokens after this step: write_indices + S
    present = TensorScatter(past [B, N, L, D], update [B, N, S, D], write_indices, axis=2)
    output  = Attention(query [B, Hq, S, D], present key, present value, own mask?, nonpad_kv_seqlen, is_causal=1)

    with sinks [Hq], logits beside the scores of all keys:
    y, scores = Attention(..., qk_matmul_output_mode=2)
    output    = y * Sigmoid(ReduceLogSumExp(scores) - sinks)

mobius-onnx exports static caches in this form (https://onnx.ai/onnx/operators/onnx__TensorScatter.html,
https://onnx.ai/onnx/operators/onnx__Attention.html), and the importer plans it. It is standard ONNX.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import FLOAT, Emitter, consumers, dims, elem_type, is_op, replace_uses
from trt_kvcache.importer.normalize.layouts import PLAIN, is_plain, relaid
from trt_kvcache.importer.normalize.masks import emit_bias, emit_by_position, emit_slopes, emit_visible
from trt_kvcache.importer.plan import Dim, Role, TensorRole
from trt_kvcache.importer.recognize.records import Array, Attention, Cache

_INT64 = int(onnx.TensorProto.INT64)
_AFTER_MASK = 2
"""qk_matmul_output_mode: scores as the softmax takes them."""
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


class Canonical:
    """Emits into one graph. Inputs are added to the graph when the first node needs them.

    Args:
        graph: edited in place.
        tokens: the graph input ``[B, S, ...]`` of the new tokens: its shape gives B and S.
        cache: one of the caches: its first dimension is the batch.
        capacity: tokens per sequence.

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
        self.idioms: dict[str, str] = {}
        self.known: dict[str, tuple[int, tuple[Dim, ...]]] = {}  # types that shape inference may not find
        self.added: list[TensorRole] = []
        self.opset = 24
        self._taken = set(graph.tensors())

    @property
    def write_indices(self) -> gs.Variable:
        """int64 ``[B]``: the row at which each sequence writes its first new token."""
        return self._input("write_indices", Role.WRITE_INDICES)

    @property
    def lengths(self) -> gs.Variable:
        """int64 ``[B]``: rows that hold tokens after this step."""
        return self._input("nonpad_kv_seqlen", Role.VALID_LENGTHS)

    def positions(self) -> gs.Variable:
        """int64 ``[B, S]``: position of each new token."""
        emit = self.emit

        def make() -> gs.Variable:
            shape = emit.op("Shape", [self.tokens], "tokens_shape", _INT64)
            length = emit.op("Gather", [shape, emit.ints(1)], "new_tokens", _INT64, axis=0)
            steps = emit.op("Range", [emit.ints(0), length, emit.ints(1)], "new_token", _INT64)
            first = emit.op("Unsqueeze", [self.write_indices, emit.ints([1])], "first_position", _INT64)
            return emit.op("Add", [first, steps], "positions", _INT64)

        positions: gs.Variable = emit.once("positions", make)
        return positions

    def write(self, cache: Cache) -> None:
        """Make `cache.present` with a TensorScatter into `cache.past`, in place of its old producer."""
        update, perm, axis = cache.update, cache.perm, cache.axis
        assert update is not None
        if perm != tuple(range(len(perm))):
            update = self.emit.op("Transpose", [update], "update", perm=list(perm))
        mode = "circular" if cache.circular or cache.shifted else "linear"
        past, present = cache.past, cache.present
        present.inputs.clear()
        if elem_type(update) not in (None, 0, elem_type(past)):  # converters leave caches in a wider type
            past.dtype = update.dtype
            for cast in (n for n in consumers(past) if is_op(n, "Cast") and n.attrs["to"] == elem_type(past)):
                replace_uses(cast.outputs[0], past)
        if not isinstance(past.shape[axis], int):  # its symbol may be that of other inputs as well
            past.shape = [self.capacity if i == axis % len(past.shape) else d for i, d in enumerate(past.shape)]
        present.shape, present.dtype = past.shape, past.dtype
        name, attrs = self.emit.name(f"{past.name}:update"), {"axis": axis, "mode": mode}
        self.graph.nodes.append(gs.Node("TensorScatter", name, attrs, [past, update, self.write_indices], [present]))
        self.idioms[past.name] = cache.idiom

    def attend(self, attention: Attention) -> None:
        """Make `attention.result` with an Attention over caches, in place of its old producer."""
        emit, mask, sizes = self.emit, attention.mask, attention.sizes
        kind = elem_type(attention.key.past) or attention.query_type
        kind = FLOAT if attention.wide and kind in _HALVES else kind
        query, output = attention.query, attention.result
        output.inputs.clear()
        if not is_plain(attention.query_layout):
            query = relaid(emit, self.tokens, query, attention.query_layout, PLAIN, {**sizes, "d": sizes["d"]})
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
            attrs["left_window_size"] = mask.window - 1  # ONNX counts the keys before the query's own
            self.opset = 25
        nothing = gs.Variable.empty()
        inputs = [
            query,
            self._operand(attention.key, sizes["d"], kind),
            self._operand(attention.value, sizes["v"], kind),
        ]
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
        """Emit how sinks take a share of the weights of keys; returns the outputs of the attention without them."""
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
        """The mask of an attention, bool or in the type of its queries; None if its attributes say all."""
        emit, seen, mask = self.emit, attention.mask, attention.mask.own
        if attention.key.shifted and (rows := attention.key.kept) is not None:
            mask = emit_visible(emit, self.write_indices, None, self.tokens, rows, rows)
        if seen.by_position:
            mask = emit_by_position(emit, self.positions(), self.capacity)
        if seen.bias is not None:
            mask = emit_bias(emit, seen.bias, self.positions())
        if seen.slopes is not None:
            mask = emit_slopes(emit, seen.slopes, self.positions(), self.capacity)
        if mask is None or elem_type(mask) in (onnx.TensorProto.BOOL, kind):
            return mask
        own_mask: gs.Tensor = emit.once(
            ("mask", mask.name, kind), lambda: emit.op("Cast", [mask], "own_mask", kind, to=kind)
        )
        return own_mask

    def _operand(self, write: Cache, size: int, kind: int) -> gs.Tensor:
        """A present as ``[B, N, L, D]``, cast to float32 if the products need it."""
        tensor = self._heads_major(write, size)
        if kind != FLOAT or elem_type(write.past) not in _HALVES:
            return tensor
        wide: gs.Tensor = self.emit.once(
            ("wide", tensor.name), lambda: self.emit.op("Cast", [tensor], "wide", kind, to=kind)
        )
        return wide

    def _heads_major(self, write: Cache, size: int) -> gs.Tensor:
        """A present as ``[B, N, L, D]``. The importer later changes the layout of the cache itself."""
        if write.axis == 2 and len(write.perm) == 4:
            return write.present
        tensor = write.present
        shape = dims(tensor) or ()
        if len(shape) == 3:
            tensor = self.emit.op("Reshape", [tensor, self.emit.ints([0, 0, int(shape[2]) // size, size])], "heads")
        return self.emit.op("Transpose", [tensor], "heads_major", perm=[0, 2, 1, 3])

    def _input(self, name: str, role: Role) -> gs.Variable:
        def make() -> gs.Variable:
            free = name
            while free in self._taken:
                free += "_"
            self._taken.add(free)
            tensor = gs.Variable(free, dtype=np.int64, shape=[self.batch])
            self.graph.inputs.append(tensor)
            self.added.append(TensorRole(free, "input", role, "int64", (self.batch,), "added", ("batch",)))
            return tensor

        variable: gs.Variable = self.emit.once(("input", name), make)
        return variable
