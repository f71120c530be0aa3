"""Emit the canonical form: TensorScatter caches, Attention over them, and the inputs that both need.

    write_indices [B]        first row that this step writes, per sequence
    nonpad_kv_seqlen [B]     rows that hold tokens after this step: write_indices + S
    present = TensorScatter(past [B, N, L, D], update [B, N, S, D], write_indices, axis=2)
    output  = Attention(query [B, Hq, S, D], present key, present value, own mask?, nonpad_kv_seqlen, is_causal=1)

It is the form of mobius-onnx's static caches (https://onnx.ai/onnx/operators/onnx__TensorScatter.html,
https://onnx.ai/onnx/operators/onnx__Attention.html), which the importer plans. It is standard ONNX but for one input
more, or two, that an Attention may have here: `SINKS` and `SLOPES`, of which the rewrite leaves none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer import extensions
from trt_kvcache.importer.graph import FLOAT, SINKS, SLOPES, Emitter, consumers, dims, elem_type, is_op, replace_uses
from trt_kvcache.importer.normalize.findings import AttentionSite, Write
from trt_kvcache.importer.plan import Dim, Role, TensorRole

_INT64 = int(onnx.TensorProto.INT64)
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
        """int64 ``[B]``: the row that the first new token of each sequence goes to."""
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

    def write(self, write: Write) -> None:
        """Make `write.present` by TensorScatter from `write.past`, whatever made it before."""
        update, perm, axis = write.update, write.perm or tuple(range(len(write.past.shape))), write.axis
        present = write.present  # as the model reads it
        if write.relaid is not None:
            axis, perm = 2, tuple(perm[a] for a in write.relaid)
            write.past.shape = [write.past.shape[a] for a in write.relaid]
            present = self._as_exported(write.present, write.relaid)
            self._as_exported(write.past, write.relaid)
        if perm != tuple(range(len(perm))):
            update = self.emit.op("Transpose", [update], "update", perm=list(perm))
        mode = "circular" if write.circular else "linear"
        if write.fixed_rows is not None:
            write.past.shape = [self.capacity if i == axis else d for i, d in enumerate(write.past.shape)]
        past, present = write.past, write.present
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
        self.idioms[past.name] = write.idiom
        if write.growing and write.kept is None:
            for whole in write.aliases:
                replace_uses(whole, present)
            for whole, order in write.turned:
                replace_uses(whole, self.emit.op("Transpose", [present], "turned", perm=list(order)))

    def _as_exported(self, cache: gs.Tensor, perm: tuple[int, ...]) -> gs.Tensor:
        """A cache in the order of axes that its readers, but for attention, know."""
        turned = self.emit.op("Transpose", [cache], "as_exported", elem_type(cache), perm=list(perm))
        replace_uses(cache, turned, keep=turned.inputs)
        return turned

    def with_heads(self, site: AttentionSite) -> AttentionSite:
        """The attention over queries and results ``[B, H, S, D]``, with Reshapes where the model has other shapes."""
        emit, query, output = self.emit, site.query, site.output
        if site.query_is_flat:
            shape = emit_sizes(emit, self.tokens, ("batch", site.heads, "?", site.head_size))
            query = emit.op("Reshape", [query, shape], "query_heads", site.query_type)
        if site.output_shape is not None:
            output = gs.Variable(emit.name("result_heads"), dtype=site.output_type)
            shape = emit_sizes(emit, self.tokens, site.output_shape)
            site.output.inputs.clear()
            self.graph.nodes.append(gs.Node("Reshape", emit.name("result"), {}, [output, shape], [site.output]))
        return replace(site, query=query, output=output, query_is_flat=False, output_shape=None)

    def attend(self, site: AttentionSite) -> None:
        """Make `site.output` by Attention over caches, whatever made it before."""
        emit, seen = self.emit, site.visibility
        kind = elem_type(site.key.past) or site.query_type
        kind = FLOAT if site.wide and kind in _HALVES else kind
        query, output = site.query, site.output
        output.inputs.clear()
        if site.query_type != kind:
            query = emit.op("Cast", [query], "query", kind, to=kind)
        if site.output_type != kind:
            raw = gs.Variable(emit.name("attention"), dtype=kind)
            self.graph.nodes.append(gs.Node("Cast", emit.name("cast"), {"to": site.output_type}, [raw], [output]))
            output = raw
        news = (dims(self.tokens) or ("?", "?"))[1]
        self.known[query.name] = (kind, (self.batch, site.heads, news, site.head_size))
        self.known[output.name] = (kind, (self.batch, site.heads, news, site.value_size))
        attrs: dict[str, int | float | list[float]] = {
            "is_causal": int(seen.causal),
            "scale": float(np.float32(site.scale)),
        }
        if site.softcap:
            attrs["softcap"] = float(np.float32(site.softcap))
        if site.precision:
            attrs["softmax_precision"] = site.precision
        if seen.window is not None:
            attrs["left_window_size"] = seen.window - 1  # ONNX counts the keys before the query's own
            self.opset = 25
        nothing = gs.Variable.empty()
        sizes = ((site.key, site.head_size), (site.value, site.value_size))
        inputs = [query, *(self._operand(write, size, kind) for write, size in sizes)]
        if (mask := self._mask(site, kind)) is not None:
            inputs.append(mask)
        if seen.bounded or seen.causal:
            inputs += [nothing] * (6 - len(inputs)) + [self.lengths]
        for index, numbers in ((SINKS, site.sinks), (SLOPES, seen.slopes)):
            if numbers is not None:
                weight = isinstance(numbers, gs.Tensor)
                operand = numbers if weight else emit.constant(np.asarray(numbers, np.float32))
                inputs += [nothing] * (index - len(inputs)) + [operand]
        self.graph.nodes.append(gs.Node("Attention", emit.name(site.node), attrs, inputs, [output]))
        if elem_type(output) in (None, 0):
            output.dtype = query.dtype

    def _mask(self, site: AttentionSite, kind: int) -> gs.Tensor | None:
        """The mask of an attention, bool or in the type of its queries; None: it has none beside its attributes."""
        emit, seen, mask = self.emit, site.visibility, site.visibility.own
        if site.key.shifted and (rows := site.key.kept) is not None:
            mask = extensions.ring_windows.emit_visible(emit, self.write_indices, None, self.tokens, rows, rows)
        if seen.by_position:
            mask = extensions.ring_windows.emit_by_position(emit, self.positions(), self.capacity)
        if seen.bias is not None:
            mask = extensions.position_biases.emit_bias(emit, seen.bias, self.positions(), self.capacity)
        if mask is None or elem_type(mask) in (onnx.TensorProto.BOOL, kind):
            return mask
        own_mask: gs.Tensor = emit.once(
            ("mask", mask.name, kind), lambda: emit.op("Cast", [mask], "own_mask", kind, to=kind)
        )
        return own_mask

    def _operand(self, write: Write, size: int, kind: int) -> gs.Tensor:
        """A present as ``[B, N, L, D]``, in a wider type if the products have one."""
        tensor = self._heads_major(write, size)
        if kind != FLOAT or elem_type(write.past) not in _HALVES:
            return tensor
        wide: gs.Tensor = self.emit.once(
            ("wide", tensor.name), lambda: self.emit.op("Cast", [tensor], "wide", kind, to=kind)
        )
        return wide

    def _heads_major(self, write: Write, size: int) -> gs.Tensor:
        """A present as ``[B, N, L, D]``: the importer then changes the layout of the cache itself."""
        if write.axis == 2 or write.relaid is not None:
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


def emit_sizes(emit: Emitter, tokens: gs.Tensor, dims: tuple[Dim, ...]) -> gs.Tensor:
    """A shape of numbers, "batch" and "sequence" of the tokens, and one "?" at most."""
    if "?" not in dims:
        last = max((i for i, d in enumerate(dims) if isinstance(d, str)), default=-1)
        dims = tuple("?" if i == last else d for i, d in enumerate(dims))

    def size(dim: Dim) -> gs.Tensor:
        if dim not in ("batch", "sequence"):
            return emit.ints([-1 if isinstance(dim, str) else dim])
        start = int(dim == "sequence")
        return emit.op("Shape", [tokens], "tokens_size", _INT64, start=start, end=start + 1)

    sizes: gs.Tensor = emit.once(
        ("sizes", dims), lambda: emit.op("Concat", [size(d) for d in dims], "sizes", _INT64, axis=0)
    )
    return sizes
