"""Caches that lie otherwise than each alone and by sequence, turned by nodes around the model.

    past [P, B, N, D]       past [B, P, N, D] -- Transpose
    past [B * N, P, D]      past [B, N, P, D] -- Reshape
    past [2, B, N, P, D]    past.0, past.1 [B, N, P, D] -- Unsqueeze, Concat
    past [B, N, P, 2 * D]   past.0, past.1 [B, N, P, D] -- Concat

`Stack` in the plan says so, and the check and `verify` turn the model as exported likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx

from trt_kvcache.importer import extensions
from trt_kvcache.importer.plan import Stack, StackPart
from trt_kvcache.importer.protos import FLOATS, INTEGERS, Shape, elem_type_of, names_read, replace_field, shape_of

Pair = tuple[onnx.ValueInfoProto, onnx.ValueInfoProto, int]
_MOST_HEADS = 128


def growing(graph: onnx.GraphProto) -> list[Pair]:
    """Caches that grow: inputs and outputs that have one shape but for one open axis.

    A present comes from its past, and from fewer others than the presents of later layers are.
    """
    constants = {t.name for t in graph.initializer}
    counted = [dims[1] for v in graph.input if elem_type_of(v) in INTEGERS and len(dims := shape_of(v) or ()) == 2]
    inputs = [v for v in graph.input if v.name not in constants and elem_type_of(v) in FLOATS]
    sources = {v.name: frozenset([v.name]) for v in inputs}
    for node in graph.node:
        if node.op_type not in ("Shape", "Size"):
            read = frozenset[str]().union(*(sources.get(n, frozenset()) for n in names_read(node)))
            sources |= dict.fromkeys(node.output, read)

    def likely(output: onnx.ValueInfoProto) -> tuple[int, int]:
        """Logits are as long as the tokens."""
        return sum(d in counted for d in shape_of(output) or ()), len(sources.get(output.name, ()))

    outputs = sorted(graph.output, key=likely)
    pairs = []
    for past in inputs:
        for present in outputs:
            axis = _grown(past, present) if past.name in sources.get(present.name, ()) else None
            if axis is not None:
                outputs.remove(present)
                pairs.append((past, present, axis))
                break
    return pairs


def _grown(past: onnx.ValueInfoProto, present: onnx.ValueInfoProto) -> int | None:
    """The axis along which a cache grows, as far as shapes tell."""
    one, two = shape_of(past) or (), shape_of(present) or ()
    if elem_type_of(past) != elem_type_of(present) or len(one) != len(two) or len(one) < 3:
        return None
    differing = [a for a, (m, n) in enumerate(zip(one, two, strict=True)) if m != n]
    if len(differing) != 1 or isinstance(one[differing[0]], int) or isinstance(two[differing[0]], int):
        return None
    return differing[0]


def _turned(model: onnx.ModelProto, stacks: Sequence[Stack], shapes: dict[str, Shape]) -> onnx.ModelProto:
    """The model with the interface that `stacks` say, whose parts have these shapes."""
    turned = extensions.stacked_caches.unstacked(model, stacks)
    for stack in (s for s in stacks if s.io == "input"):
        _measure_parts(turned.graph, stack)
    for value in (v for v in (*turned.graph.input, *turned.graph.output) if v.name in shapes):
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, elem_type_of(value), list(shapes[value.name])))
    return turned


def _measure_parts(graph: onnx.GraphProto, stack: Stack) -> None:
    """Read, in place, the shape of a tensor as exported off that of its first part: nothing else then reads it."""
    whole, part = f"{stack.name}/whole", stack.parts[0]
    nodes: list[onnx.NodeProto] = []

    def node(op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{whole}/size_{len(nodes)}"
        nodes.append(onnx.helper.make_node(op, inputs, [name], name, **attributes))
        return name

    readers = [n for n in graph.node if n.op_type == "Shape" and n.input[0] == whole]
    if not readers:
        return
    rank = part.place.count(None) + (stack.heads is not None)
    axes = [node("Shape", part.name, start=a, end=a + 1) for a in range(rank)]
    count = node("Constant", value_ints=[len(stack.parts)])
    for axis in (a for a, at in enumerate(part.place) if at is not None):
        axes.insert(axis, count)
    if stack.beside is not None:
        axes[stack.beside] = node("Mul", axes[stack.beside], count)
    if stack.order is not None:
        axes = [axes[a] for a in stack.order]
    if stack.heads is not None:
        axes[:2] = [node("Mul", *axes[:2])]
    for reader in readers:
        bounds = {a.name: a.i for a in reader.attribute}
        taken = axes[bounds.get("start", 0) : bounds.get("end", len(axes))]
        nodes.append(onnx.helper.make_node("Concat", taken, reader.output, reader.name, axis=0))
    replace_field(graph.node, [*nodes, *(n for n in graph.node if n not in readers)])


def ways(model: onnx.ModelProto) -> Iterator[tuple[onnx.ModelProto, tuple[Stack, ...]]]:
    """The model with caches turned, in each way that shapes allow; first as it is if caches lie by sequence."""
    pairs = growing(model.graph)
    taken = {v.name for pair in pairs for v in pair[:2]}
    batch = next((s[0] for v in model.graph.input if v.name not in taken and (s := _of_tokens(v))), None)
    if not pairs or batch is None:
        return
    shape, axis = shape_of(pairs[0][0]) or (), pairs[0][2]
    for heads, halves in _tries(shape, axis, batch):
        shapes: dict[str, Shape] = {}
        stacks = [s for pair in pairs for s in _stacks(pair, batch, heads, halves, shapes)]
        yield (_turned(model, stacks, shapes) if stacks else model), tuple(stacks)


def _of_tokens(value: onnx.ValueInfoProto) -> Shape | None:
    """The shape of an input that may hold tokens, ids or embeddings."""
    shape = shape_of(value) or ()
    rank = 2 if elem_type_of(value) in INTEGERS else 3
    return shape if len(shape) == rank and elem_type_of(value) in (INTEGERS | FLOATS) else None


def _tries(shape: Shape, axis: int, batch: int | str) -> Iterator[tuple[int, int | None]]:
    """Heads in the first axis (0: none), and the axis along which keys and values lie side by side (None: none)."""
    others = [a for a in range(len(shape)) if a != axis]
    if batch in [shape[a] for a in others] or len(shape) > 3:
        yield 0, None
        if len(shape) == 4:
            yield from ((0, a) for a in reversed(others) if isinstance(d := shape[a], int) and d % 2 == 0)
    elif isinstance(shape[0], int):
        yield shape[0] // (batch if isinstance(batch, int) else 1), None
    else:
        yield from ((heads, None) for heads in range(1, _MOST_HEADS + 1))


def _stacks(pair: Pair, batch: int | str, heads: int, halves: int | None, shapes: dict[str, Shape]) -> Iterator[Stack]:
    """The past and the present of a cache as stacks; none if it lies as it should. `shapes` gets those of the parts."""
    for io, value in zip(("input", "output"), pair[:2], strict=True):
        shape = shape_of(value) or ()
        one: Shape = shape
        place: tuple[int | None, ...] = (None,) * len(shape)
        names, beside, order = [value.name], None, None
        if heads:
            one = (batch, heads, *shape[1:])
        elif halves is not None:
            one = tuple(d // 2 if a == halves and isinstance(d, int) else d for a, d in enumerate(shape))
            names, beside = [f"{value.name}.{i}" for i in (0, 1)], halves
        elif len(shape) > 4:
            row = shape.index(batch) if batch in shape else 0
            axis = next(a for a, d in enumerate(shape) if isinstance(d, int) and a not in (row, pair[2]))
            count = shape[axis]
            assert isinstance(count, int)
            names = [f"{value.name}.{i}" for i in range(count)]
            one = (*shape[:axis], *shape[axis + 1 :])
            place = tuple(0 if a == axis else None for a in range(len(shape)))
        first = one.index(batch) if batch in one else 0
        if first and not heads and len(names) == 1:
            order = (*range(1, first + 1), 0, *range(first + 1, len(one)))
            one = (one[first], *one[:first], *one[first + 1 :])
        if one == shape:
            return
        at = [tuple(i if p is not None else None for p in place) for i in range(len(names))]
        shapes |= dict.fromkeys(names, one)
        parts = tuple(StackPart(n, p) for n, p in zip(names, at, strict=True))
        yield Stack(value.name, io, shape, parts, order, heads or None, beside)
