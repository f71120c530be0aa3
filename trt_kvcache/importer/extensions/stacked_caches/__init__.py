"""Caches of several layers in one tensor, split before anything else looks at them.

    past [L, 2, B, N, P, H] -- Gather(i) -- Gather(0) -- Concat -- Unsqueeze, Concat -> present [L, 2, B, N, P + S, H]

        becomes

    past.0.0 [B, N, P, H] -- Concat -> present.0.0 [B, N, P + S, H]     and so on for past.0.1 .. past.(L - 1).1

    past [L, B, T, W] -- ScatterND(rows of layer 0, new) -- Gather(1) ..    becomes    past.0 [B, T, W] -- ScatterND, ..

Written by ONNX Runtime's converter of GPT-2 (keys and values of a layer in one tensor) and by sherpa-onnx' Whisper (the
layers in one tensor, each written in place). `apart` is the model as exported in `verify` and in the check.

Inputs are split if constants choose every place of them along one axis and nothing else reads them, outputs if
they are joined of such places; then the same again, along the next axis. Later stages see each cache by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions import Finish
from trt_kvcache.importer.extensions.stacked_caches.unstacked import unstacked as unstacked
from trt_kvcache.importer.graph import (
    FLOATS,
    INT64,
    Emitter,
    consumers,
    contains,
    elem_type,
    fold_identities,
    free_name,
    input_or_none,
    is_op,
    producer,
    replace_uses,
    small_constant,
)
from trt_kvcache.importer.normalize.idioms.cache_updates import find_candidates
from trt_kvcache.importer.plan import CachePlan, InterfaceChange, Stack, StackPart
from trt_kvcache.importer.protos import shape_of

__all__ = ["finish", "rewrite", "unstacked"]

_LEAST_RANK = 4
_SURELY = 5  # no single cache has as many axes
_SPREADS = ("Expand", "Unsqueeze", "Reshape", "Cast")
_ADVICE = (
    "supported are tensors of which every layer reads and writes its own part, chosen by a constant index (past[i], or "
    "unbind and stack), and heads of one cache that come back in their order: export them so, or with one input and "
    "one output for each cache"
)
Split = dict[str, tuple[int, list[str]]]
"""By name of a tensor that was split: the axis, and the names of the places along it."""


def rewrite(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Finish | None]:
    """Split the inputs and outputs that hold several caches; see `trt_kvcache.importer.extensions`.

    Raises:
        UnsupportedModelError: something reads such a tensor as a whole, or a cache comes back in another place.
    """
    whole = {v.name: (io, v) for io, vs in (("input", model.graph.input), ("output", model.graph.output)) for v in vs}
    parts = {name: [StackPart(name, (None,) * len(shape_of(v) or ()))] for name, (_, v) in whole.items()}
    graph: gs.Graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model, data_prop=True))
    fold_identities(graph)
    emit = Emitter(graph)
    while split := _split(graph.toposort(), emit):
        graph.cleanup(remove_unused_graph_inputs=False)
        for name, pieces in parts.items():
            parts[name] = [part for old in pieces for part in _refined(old, split)]
    stacks = tuple(
        Stack(name, whole[name][0], tuple(shape_of(whole[name][1]) or ()), tuple(pieces))
        for name, pieces in parts.items()
        if pieces[0].name != name
    )
    if not stacks:
        return model, None
    _check_places(stacks, [(c.past.name, c.present.name) for c in find_candidates(graph) if not c.reason])
    exported: onnx.ModelProto = gs.export_onnx(graph.toposort())
    del exported.graph.value_info[:]
    exported.ir_version = model.ir_version
    return exported, partial(finish, stacks)


def _refined(old: StackPart, split: Split) -> Iterator[StackPart]:
    if old.name not in split:
        yield old
        return
    axis, names = split[old.name]
    place = [i for i, at in enumerate(old.place) if at is None][axis]
    for number, name in enumerate(names):
        yield StackPart(name, (*old.place[:place], number, *old.place[place + 1 :]))


def _split(graph: gs.Graph, emit: Emitter) -> Split:
    """Split every stacked tensor along one axis, in place; empty: there is none.

    Raises:
        UnsupportedModelError: something reads such a tensor as a whole.
    """
    order = {id(node): number for number, node in enumerate(graph.nodes)}
    inputs = {t.name: r for t in graph.inputs if (r := _read(t, order)) is not None}
    joined = {t.name: j for t in graph.outputs if (j := _joined(t)) is not None}
    written = {out.name: r for r in inputs.values() for out in r.wholes if contains(graph.outputs, out)}
    sizes = {(r.axis, r.count) for r in written.values()} | {(axis, len(parts)) for axis, parts in joined.values()}
    taken = [r for r in inputs.values() if (r.axis, r.count) in sizes]
    alike = {(r.axis, r.count) for r in taken}
    split: Split = {}
    by_tensor: dict[int, list[gs.Tensor]] = {}
    for reads in taken:
        if reads.others and (reads.rank >= _SURELY or reads.writes):
            node = reads.others[0]
            raise UnsupportedModelError(
                f"'{reads.whole.name}' holds several caches, and {node.op} '{node.name}' reads it as a whole; {_ADVICE}"
            )
        if not reads.others:
            split[reads.whole.name] = (reads.axis, _take_input(graph, emit, reads, by_tensor))
    for tensor in list(graph.outputs):
        if tensor.name in written and id(tensor) in by_tensor:
            axis, pieces = written[tensor.name].axis, by_tensor[id(tensor)]
        elif (join := joined.get(tensor.name)) is not None and (join[0], len(join[1])) in alike:
            axis, pieces = join
        else:
            continue
        split[tensor.name] = (axis, _give_outputs(graph, tensor, axis, pieces))
    return split


@dataclass(frozen=True, eq=False)
class _Reads:
    """The reads of places along one axis of an input.

    Attributes:
        wholes: the input, and what it becomes by writes to single places, and by Casts.
        nodes: all that read these, in order.
        others: those of them that read more than a single place.
    """

    whole: gs.Tensor
    axis: int
    count: int
    wholes: list[gs.Tensor]
    nodes: list[gs.Node]
    others: list[gs.Node]

    @property
    def rank(self) -> int:
        """The rank of the input."""
        return len(self.whole.shape)

    @property
    def writes(self) -> bool:
        """True if single places are written."""
        return any(is_op(node, "ScatterND") for node in self.nodes)


def _read(whole: gs.Tensor, order: Mapping[int, int]) -> _Reads | None:
    """The reads of an input that constants choose places of; None: they do not choose all places of one axis.

    `order` has numbers of nodes, by identity.
    """
    if elem_type(whole) not in FLOATS or len(whole.shape or ()) < _LEAST_RANK:
        return None
    wholes, nodes = [whole], []
    for tensor in wholes:
        for node in consumers(tensor):
            nodes.append(node)
            if is_op(node, "Cast") or (is_op(node, "ScatterND") and node.inputs[0] is tensor):
                wholes += node.outputs
    chosen = {id(node): _chosen(node, len(whole.shape)) for node in nodes}
    places = {place for choice in chosen.values() for place in choice}
    axis = next((axis for axis, _ in places), 0)
    count = whole.shape[axis]
    moves = ("Shape", "Cast", "ScatterND")
    others = [n for n in nodes if not chosen[id(n)] and (not is_op(n, *moves) or not contains(wholes, n.inputs[0]))]
    if not places or not isinstance(count, int) or {a for a, _ in places} != {axis}:
        return None
    if len(places) < count and not (others and len(whole.shape) >= _SURELY):
        return None
    return _Reads(whole, axis, count, wholes, sorted(nodes, key=lambda n: order[id(n)]), others)


def _chosen(node: gs.Node, rank: int) -> list[tuple[int, int]]:
    """The axis and the number of each single place that constants choose; empty: they choose none."""
    shape, axis = node.inputs[0].shape or [0] * rank, int(node.attrs.get("axis", 0)) % rank
    if is_op(node, "Split") and len(node.outputs) == shape[axis]:
        return [(axis, place) for place in range(len(node.outputs))]
    first = small_constant(input_or_none(node, 1))
    if first is None:
        return []
    if is_op(node, "Gather") and not first.ndim and isinstance(shape[axis], int):
        return [(axis, int(first) % shape[axis])]
    end, axes = (small_constant(input_or_none(node, i)) for i in (2, 3))
    if is_op(node, "Slice") and end is not None and axes is not None and first.size == 1:
        axis = int(axes[0]) % rank
        places = range(shape[axis])[int(first[0]) : int(end[0])] if isinstance(shape[axis], int) else range(0)
        return [(axis, places[0])] if len(places) == 1 else []
    return []


def _take_input(graph: gs.Graph, emit: Emitter, reads: _Reads, by_tensor: dict[int, list[gs.Tensor]]) -> list[str]:
    """Put an input for each place in the place of one for all; `by_tensor` gets the places of all that it becomes."""
    whole, axis = reads.whole, reads.axis
    rest = [size for a, size in enumerate(whole.shape) if a != axis]
    names = _free_names(graph, whole.name, reads.count)
    pieces: list[gs.Tensor] = [gs.Variable(name, whole.dtype, list(rest)) for name in names]
    graph.inputs = [p for t in graph.inputs for p in (pieces if t is whole else [t])]
    by_tensor[id(whole)] = pieces
    for node in reads.nodes:
        pieces = by_tensor[id(node.inputs[0])]
        if is_op(node, "Cast"):
            by_tensor[id(node.outputs[0])] = [emit.op("Cast", [p], "piece", **node.attrs) for p in pieces]
        elif is_op(node, "ScatterND"):
            by_tensor[id(node.outputs[0])] = _written(emit, node, axis, pieces)
        elif is_op(node, "Shape"):
            replace_uses(node.outputs[0], _shape(emit, node, axis, pieces))
        else:
            for output, (_, place) in zip(node.outputs, _chosen(node, reads.rank), strict=True):
                if is_op(node, "Gather"):
                    replace_uses(output, pieces[place])
                    continue
                for reader in (n for n in consumers(output) if is_op(n, "Squeeze")):
                    replace_uses(reader.outputs[0], pieces[place])
                    reader.inputs.clear()
                if consumers(output):
                    replace_uses(output, emit.op("Unsqueeze", [pieces[place], emit.ints([axis])], "piece"))
    return names


def _written(emit: Emitter, node: gs.Node, axis: int, pieces: Sequence[gs.Tensor]) -> list[gs.Tensor]:
    """The places after a ScatterND that writes rows of one of them, which the index names in a column of its own.

    Raises:
        UnsupportedModelError: no constant says which one it writes.
    """
    _, index, updates = node.inputs
    known, maker = small_constant(index), producer(index)
    columns = maker.inputs if known is None and maker is not None and is_op(maker, "Concat") else []
    number = _uniform(columns[axis]) if axis < len(columns) else None
    rest: list[gs.Tensor] = []
    if known is not None and axis < known.shape[-1]:
        number = _only(known[..., axis])
        rest = [emit.constant(np.delete(known, axis, -1))] if known.shape[-1] > 1 else []
    elif number is not None:
        rest = [column for i, column in enumerate(columns) if i != axis]
    if number is None or not -len(pieces) <= number < len(pieces):
        raise UnsupportedModelError(
            f"ScatterND '{node.name}' computes which one of several caches it writes ('{index.name}'); {_ADVICE}"
        )
    after = list(pieces)
    if not rest:  # all of it
        after[number] = emit.op("Squeeze", [updates, emit.ints([axis])], "piece")
        return after
    left = rest[0] if len(rest) == 1 else emit.op("Concat", rest, "piece_rows", axis=-1)
    after[number] = emit.op("ScatterND", [pieces[number], left, updates], "piece", **node.attrs)
    return after


def _uniform(column: gs.Tensor) -> int | None:
    """The number that all elements of a column are; None where they may differ."""
    while (values := small_constant(column)) is None:
        node = producer(column)
        if node is None or not is_op(node, *_SPREADS):
            return None
        column = node.inputs[0]
    return _only(values)


def _only(values: np.ndarray) -> int | None:
    return int(values.flat[0]) if values.size and (values == values.flat[0]).all() else None


def _shape(emit: Emitter, node: gs.Node, axis: int, pieces: Sequence[gs.Tensor]) -> gs.Tensor:
    """The result of a Shape of the whole."""
    before = emit.op("Shape", [pieces[0]], "piece_shape", INT64, start=0, end=axis)
    after = emit.op("Shape", [pieces[0]], "piece_shape", INT64, start=axis)
    shape: gs.Tensor = emit.op("Concat", [before, emit.ints([len(pieces)]), after], "whole_shape", INT64, axis=0)
    if {"start", "end"} & node.attrs.keys():
        bounds = (node.attrs.get("start", 0), node.attrs.get("end", len(pieces[0].shape) + 1))
        shape = emit.op("Slice", [shape, *(emit.ints([n]) for n in bounds)], "whole_shape", INT64)
    return shape


def _joined(tensor: gs.Tensor) -> tuple[int, list[gs.Tensor]] | None:
    """The axis that an output is stacked along, and what is stacked; None: it is no stack."""
    node, rank = producer(tensor), len(tensor.shape or ())
    if node is None or rank < _LEAST_RANK or elem_type(tensor) not in FLOATS:
        return None
    if is_op(node, "Cast") and not contains([tensor], node.inputs[0]):
        node = producer(node.inputs[0])
    if node is None or not is_op(node, "Concat", "Unsqueeze"):
        return None
    rows = [producer(t) for t in node.inputs] if is_op(node, "Concat") else [node]
    axes = [_added(row, rank) if row is not None and is_op(row, "Unsqueeze") else None for row in rows]
    axis = int(node.attrs["axis"]) % rank if is_op(node, "Concat") else axes[0]
    if axis is None or any(added != axis for added in axes):
        return None
    return axis, [row.inputs[0] for row in rows if row is not None]


def _added(node: gs.Node, rank: int) -> int | None:
    """The one axis that an Unsqueeze adds."""
    axes = small_constant(input_or_none(node, 1))
    return int(axes.flat[0]) % rank if axes is not None and axes.size == 1 else None


def _give_outputs(graph: gs.Graph, whole: gs.Tensor, axis: int, pieces: Sequence[gs.Tensor]) -> list[str]:
    """Put an output for each place in the place of one for all."""
    rest = [size for a, size in enumerate(whole.shape) if a != axis]
    names = _free_names(graph, whole.name, len(pieces))
    outputs: list[gs.Tensor] = []
    for name, piece in zip(names, pieces, strict=True):
        is_cast = elem_type(piece) not in (None, 0, elem_type(whole))
        if is_cast or producer(piece) is None or contains((*graph.outputs, *outputs), piece):
            output = gs.Variable(name, whole.dtype, list(rest))
            op, attrs = ("Cast", {"to": elem_type(whole)}) if is_cast else ("Identity", {})
            graph.nodes.append(gs.Node(op, f"{name}/copy", attrs, [piece], [output]))
            piece = output
        piece.name, piece.dtype, piece.shape = name, whole.dtype, list(rest)
        outputs.append(piece)
    graph.outputs = [p for t in graph.outputs for p in (outputs if t is whole else [t])]
    return names


def _free_names(graph: gs.Graph, whole: str, count: int) -> list[str]:
    """A name for each place, which nothing in the graph has."""
    taken, names = set(graph.tensors()), []
    for number in range(count):
        names.append(free_name(f"{whole}.{number}", taken))
        taken.add(names[-1])
    return names


def finish(stacks: tuple[Stack, ...], plan: CachePlan) -> CachePlan:
    """The plan with the tensors as exported; what changes is said of these."""
    pairs = [(c.past, c.present) for c in plan.caches if c.carried] + [(s.past, s.present) for s in plan.states]
    _check_places(stacks, pairs)  # of operators that hold caches, and of states, too
    return replace(plan, stacks=stacks, changes=tuple(_changes(stacks, plan.changes)))


def _check_places(stacks: Sequence[Stack], pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse a model that gives caches back in another order than that in which it takes them.

    `pairs` are names of caches before and after a step.
    """
    for stack in stacks:
        own = 0 if stack.io == "input" else 1
        numbers = {part.name: number for s in stacks if s.io != stack.io for number, part in enumerate(s.parts)}
        partners = {pair[own]: pair for pair in pairs if pair[1 - own] in numbers}
        ordered = [partners[part.name] for part in stack.parts if part.name in partners]
        for pair, right in zip(ordered, sorted(ordered, key=lambda pair: numbers[pair[1 - own]]), strict=True):
            if pair != right:
                raise UnsupportedModelError(
                    f"the model takes a cache as '{pair[0]}' and gives it back as '{pair[1]}': what it writes for one "
                    "layer, another one would read in the next step. Supported are models that write every cache to "
                    "the place that they read it from: stack the caches in the order of the layers, both in the "
                    "model's inputs and in its outputs"
                )


def _changes(stacks: Sequence[Stack], changes: Sequence[InterfaceChange]) -> Iterator[InterfaceChange]:
    """The changes of each cache, from the tensor in which it lay; then all other changes."""
    ends = {(c.io, c.old.partition(" ")[0]): c for c in changes if c.old}
    parts = {(stack.io, part.name) for stack in stacks for part in stack.parts}
    for stack in stacks:
        for part in stack.parts:
            shape = [str(d) for d, at in zip(stack.shape, part.place, strict=True) if at is None]
            end = ends.get((stack.io, part.name))
            new = f"{part.name} [{', '.join(shape)}]" if end is None else end.new
            why = "one tensor for each cache" if len(stack.parts) > 1 else "sequence by sequence"
            why += f"; {end.why}" if end is not None and end.why else ""
            yield InterfaceChange(stack.io, _at(stack, part), new, why)
    yield from (c for c in changes if (c.io, c.old.partition(" ")[0]) not in parts)


def _at(stack: Stack, part: StackPart) -> str:
    """The place of a cache, such as ``past[0, 1] of [4, 2, B, 8, P, 64]``."""
    places = [":" if at is None else str(at) for at in part.place]
    while places and places[-1] == ":":
        places.pop()
    shape = f"[{', '.join(map(str, stack.shape))}]"
    return f"{stack.name}[{', '.join(places)}] of {shape}" if places else f"{stack.name} {shape}"
