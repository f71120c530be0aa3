"""One axis of every tensor that holds several caches.

Caches are stacked along an axis if constants choose single places of it. Outputs that are stacked of such caches are
taken apart as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions.stacked_caches.operators import RULES, read_pieces
from trt_kvcache.importer.extensions.stacked_caches.pieces import Array, Pieces, UnsplittableError
from trt_kvcache.importer.extensions.stacked_caches.uses import Uses, find_uses
from trt_kvcache.importer.graph import (
    FLOATS,
    INT32,
    INT64,
    consumers,
    contains,
    dims,
    elem_type,
    is_op,
    producer,
    replace_uses,
    small_constant,
)
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.probe import Probe
from trt_kvcache.importer.normalize.idioms.writes import find_candidates
from trt_kvcache.importer.plan import Dim

__all__ = ["Level", "batch_of"]

_LEAST_RANK = 4
_ADVICE = (
    "supported are tensors of which every layer reads and writes its own part, chosen by a constant index (past[i], or "
    "unbind and stack), and heads of one cache that come back in their order: export them so, or with one input and "
    "one output for each cache"
)


def batch_of(graph: gs.Graph) -> Dim:
    """The batch, as the new tokens have it."""
    ids = [t for t in graph.inputs if elem_type(t) in (INT32, INT64) and len(t.shape or ()) == 2]
    embedded = [t for t in graph.inputs if elem_type(t) in FLOATS and len(t.shape or ()) == 3]
    return next((shape[0] for t in (*ids, *embedded) if (shape := dims(t))), "?")


class Level:
    """One axis of every stacked tensor.

    Args:
        graph: edited.
        model: the same, not edited.
        weights: the detached weights.
    """

    def __init__(self, graph: gs.Graph, model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
        self._graph = graph
        probe = Probe(Blueprint(model, weights), {}, {})
        known = set(graph.tensors())

        def value(tensor: gs.Tensor) -> Array | None:
            return probe.value(tensor.name) if tensor.name in known else small_constant(tensor)

        self._inputs = [t for t in graph.inputs if elem_type(t) in FLOATS and t.shape is not None]
        self._outputs = [t for t in graph.outputs if elem_type(t) in FLOATS and t.shape is not None]
        self._pieces = Pieces(graph, value, RULES)
        self._taken = known

    def split(self) -> dict[str, tuple[int, list[str]]]:
        """Take apart, and say what became of which tensor: the axis, and the names.

        Raises:
            UnsupportedModelError: it cannot be done.
        """
        large = [t for t in self._inputs if len(t.shape) >= _LEAST_RANK]
        uses, pieces = find_uses(self._pieces, large), self._pieces
        if not uses.chosen and not any(pieces.leads(t, a) for t in self._outputs for a in range(len(t.shape))):
            return {}
        candidates = find_candidates(self._graph)
        taken = self._stacked_inputs(uses, candidates)
        whole = {c.past.name for c in candidates if not c.reason}  # with an output of its own
        others = [t for t in self._inputs if len(t.shape) > 2 and (t.name in taken or t.name not in whole)]
        kinds = [_kind(t, self._axes(t, uses) if t.name in taken else ()) for t in others]
        pieces.follow((t, taken[t.name]) for t in self._inputs if t.name in taken)
        try:
            for name, place in taken.items():
                if reader := uses.whole.get((name, place)):
                    said = f"{reader.op} '{reader.name}' reads it as a whole"
                    raise UnsplittableError(f"'{name}' holds several caches, and {said}")
            made = {t.name: self._take_input(t, taken[t.name]) for t in self._inputs if t.name in taken}
            read_pieces(pieces)
            for tensor in self._outputs:
                if (axis := self._output_axis(tensor, kinds)) is not None:
                    made[tensor.name] = self._take_output(tensor, axis)
        except (UnsplittableError, IndexError) as error:
            raise UnsupportedModelError(f"{error}; {_ADVICE}") from None
        self._graph.cleanup(remove_unused_graph_inputs=False)
        _join_once(self._graph)
        for tensor in self._inputs:
            if tensor.name in taken and (left := consumers(tensor)):
                raise UnsupportedModelError(
                    f"'{tensor.name}' holds several caches, and {left[0].op} '{left[0].name}' reads it as a whole; "
                    + _ADVICE
                )
        return made

    def _axes(self, tensor: gs.Tensor, uses: Uses) -> list[int]:
        return [a for a in range(len(tensor.shape)) if (tensor.name, a) in uses.chosen]

    def _stacked_inputs(self, uses: Uses, candidates: Sequence[Candidate]) -> dict[str, int]:
        """The inputs that hold several caches, and an axis of each that these lie along."""
        whole = {c.past.name for c in candidates if not c.reason}
        outputs = [_kind(t, ()).core for t in self._outputs]
        taken: dict[str, int] = {}
        read: dict[str, int] = {}
        for tensor in self._inputs:
            chosen = self._axes(tensor, uses)
            axes = [a for a in chosen if self._is_layers(tensor, a, tensor.name in whole)]
            if axes:
                core = _kind(tensor, chosen).core
                is_written = any(core <= sizes for sizes in outputs)
                (taken if is_written else read)[tensor.name] = axes[0]
        shapes = {t.name: t.shape for t in self._inputs}
        alike = {(axis, shapes[name][axis]) for name, axis in taken.items()}
        # Tensors that are only read, such as the keys of an encoder for every layer: with the caches, or not at all.
        more = {n: a for n, a in read.items() if (a, shapes[n][a]) in alike and (n, a) not in uses.whole}
        return {**taken, **more}

    def _is_layers(self, tensor: gs.Tensor, axis: int, is_cache: bool) -> bool:
        """True if caches may lie along an axis; `is_cache`: the tensor looks like one of them as it is."""
        if tensor.shape[axis] != 1 or axis > 0:
            return not is_cache
        batch = batch_of(self._graph)  # which an axis of one place, in front, may be
        return batch != 1 and (batch != "?" or len(tensor.shape) > _LEAST_RANK)

    def _take_input(self, tensor: gs.Tensor, axis: int) -> tuple[int, list[str]]:
        rest = [d for a, d in enumerate(tensor.shape) if a != axis]
        pieces = [gs.Variable(self._name(f"{tensor.name}.{i}"), tensor.dtype, rest) for i in range(tensor.shape[axis])]
        self._graph.inputs = [p for t in self._graph.inputs for p in (pieces if t is tensor else [t])]
        self._pieces.stack(tensor, axis, pieces)
        return axis, [p.name for p in pieces]

    def _output_axis(self, tensor: gs.Tensor, kinds: Sequence[_Kind]) -> int | None:
        """The axis that an output was stacked along, of caches like those that go in; None: it was not."""
        rank, at = len(tensor.shape), self._pieces
        if held := [a for a in range(rank) if at.is_held(tensor, a)]:
            return held[0]
        sizes = _kind(tensor, ()).core
        if not any(kind.dtype == elem_type(tensor) and kind.rank < rank and kind.core <= sizes for kind in kinds):
            return None
        return next((axis for axis in range(rank) if at.leads(tensor, axis)), None)

    def _take_output(self, tensor: gs.Tensor, axis: int) -> tuple[int, list[str]]:
        graph, rest = self._graph, [d for a, d in enumerate(tensor.shape) if a != axis]
        outputs: list[gs.Tensor] = []
        for number, piece in enumerate(self._pieces.all(tensor, axis)):
            name = self._name(f"{tensor.name}.{number}")
            if producer(piece) is None or contains((*graph.outputs, *outputs), piece):
                copy = gs.Variable(name, tensor.dtype, rest)
                graph.nodes.append(gs.Node("Identity", f"{name}/copy", {}, [piece], [copy]))
                piece = copy
            piece.name, piece.dtype, piece.shape = name, tensor.dtype, rest
            outputs.append(piece)
        graph.outputs = [p for t in graph.outputs for p in (outputs if t is tensor else [t])]
        return axis, [p.name for p in outputs]

    def _name(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _join_once(graph: gs.Graph) -> None:
    """Make the same cache once, where attention reads past and new rows, and the whole tensor is joined on its own."""
    made: dict[object, gs.Node] = {}
    for node in [n for n in graph.nodes if is_op(n, "Concat")]:
        rank = len(node.inputs[0].shape or ())
        if not rank or not any(contains(graph.inputs, t) for t in node.inputs):
            continue
        key = (int(node.attrs["axis"]) % rank, *map(id, node.inputs))
        other = made.setdefault(key, node)
        kept, gone = (node, other) if contains(graph.outputs, node.outputs[0]) else (other, node)
        if kept is not gone and not contains(graph.outputs, gone.outputs[0]):
            replace_uses(gone.outputs[0], kept.outputs[0])
            gone.outputs.clear()
            made[key] = kept


class _Kind(NamedTuple):
    """The element type, the fixed sizes and the rank that all caches of one kind have in common."""

    dtype: int | None
    core: Counter[int]
    rank: int


def _kind(tensor: gs.Tensor, axes: Collection[int]) -> _Kind:
    """The kind of the caches that lie along some axes of a tensor."""
    core = Counter(d for a, d in enumerate(tensor.shape) if a not in axes and isinstance(d, int))
    return _Kind(elem_type(tensor), core, len(tensor.shape) - len(axes))
