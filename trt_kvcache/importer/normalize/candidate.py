"""What the search for cache updates hands to the proof, and what the proofs of all idioms share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import BOOL, INT32, INT64, contains, elem_type, input_or_none, is_op, producer
from trt_kvcache.importer.normalize.evidence.samples import Sample
from trt_kvcache.importer.normalize.idioms.fronts import Front
from trt_kvcache.importer.normalize.views import Layout, Shape, axis_order, is_view, shape_of, step_back

_ADVICE = (
    "export the model with Concat(past, new), or with index_copy, index_put or a slice at write position + 0 .. S - 1"
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """What looks like a cache update.

    Attributes:
        idiom: the operator that writes, or ``"Concat, Slice"``, ``"Concat, new rows returned"``, ``"one-hot"``,
            ``"rolling"``, ``"unchanged"``.
        past: the graph input.
        present: the graph output.
        node: the node that writes; None: nothing does.
        axis: the sequence axis of the cache, as far as it is known without shapes.
        growing: present has more rows than past.
        positions: integer graph inputs whose values decide which rows are written.
        views: the nodes from past to the operand of `node`, in order.
        after: the nodes from the output of `node` to present, in order.
        updates: operands of `node` that may be the new rows.
        index: tensors that decide which rows are written.
        inner: the nodes between the operand and the output of `node`, `node` included, where these are several.
        kept: the newest rows that are left of a cache that grows, at most; None: all.
        rows_only: present holds the new rows only, in whatever layout.
        front: the rows in use, where these are taken out, written into, and put back by `node`: `index` and `updates`
            are those of the write into them, then those of `node`; `index` ends with what decides which rows they are.
        room: rows of a past that always has as many, whether they hold tokens or not; None: as many as hold tokens.
        reason: why it cannot be proven, where the search already sees that; "" otherwise.
        advice: what to do about `reason`.
    """

    idiom: str
    past: gs.Tensor
    present: gs.Tensor
    node: gs.Node | None
    axis: int | None = None
    growing: bool = False
    positions: tuple[str, ...] = ()
    views: tuple[gs.Node, ...] = ()
    after: tuple[gs.Node, ...] = ()
    updates: tuple[gs.Tensor, ...] = ()
    index: tuple[gs.Tensor, ...] = ()
    inner: tuple[gs.Node, ...] = ()
    kept: int | None = None
    rows_only: bool = False
    front: Front | None = None
    room: int | None = None
    reason: str = ""
    advice: str = ""

    @property
    def operand(self) -> gs.Tensor:
        """The past as `node` reads it."""
        return self.views[-1].outputs[0] if self.views else self.past

    def refusal(self, why: str, advice: str = "") -> UnsupportedModelError:
        """The error that says what is wrong with this update."""
        how = "" if self.node is None else f" by {self.node.op} '{self.node.name}'"
        advice = advice or self.advice or _ADVICE
        return UnsupportedModelError(
            f"the update of the cache '{self.past.name}'{how} cannot be done in place: {why}. Supported are updates "
            f"that write the S new rows of a step behind the P rows that the cache holds; {advice}"
        )


@dataclass(frozen=True)
class Geometry:
    """The past in one sample.

    Attributes:
        step: the sample.
        sizes: of the axes of the past.
        layout: of the past as the writing node reads it.
    """

    step: Sample
    sizes: Shape
    layout: Layout

    @property
    def operand_shape(self) -> Shape:
        """The shape of the past as the writing node reads it."""
        return shape_of(self.layout, self.sizes)

    def with_rows(self, axis: int) -> Shape:
        """The sizes with S rows on the sequence axis: those of an update."""
        return tuple(self.step.length if a == axis else size for a, size in enumerate(self.sizes))


def richest(geometries: Sequence[Geometry]) -> Geometry:
    """The sample in which the fewest axes have size 1, so that layouts are least ambiguous."""

    def key(geometry: Geometry) -> tuple[int, int]:
        ones = sum(size < 2 for size in (*geometry.sizes, geometry.step.length))
        return (-ones, geometry.step.length)

    return max(geometries, key=key)


def nearest_update(
    candidate: Candidate, update: gs.Tensor, layout: Layout, axis: int, geometries: Sequence[Geometry]
) -> tuple[gs.Tensor, tuple[int, ...] | None]:
    """The tensor nearest to the projection that holds the update with one axis for each of the cache's.

    Args:
        candidate: for messages.
        update: the operand of the writing node.
        layout: its layout in the richest of `geometries`.
        axis: the sequence axis of the cache.
        geometries: the samples.

    Returns:
        The tensor, and the permutation that brings it to the axis order of the cache; None: it has that order.
    """
    geometry = richest(geometries)
    sizes = geometry.with_rows(axis)
    found: tuple[gs.Tensor, tuple[int, ...]] | None = None
    tensor, known = update, layout
    while True:
        order = axis_order(known, sizes)
        if order is not None and _keeps_shape(tensor, order, axis, geometries, tensor is update):
            found = (tensor, order)
        node = producer(tensor)
        if node is None or not (is_view(node) or is_op(node, "Expand")) or input_or_none(node, 0) is None:
            break
        before = step_back(node, known, sizes, geometry.step.probe)
        if before is None:
            break
        tensor, known = node.inputs[0], before
    if found is None:
        raise candidate.refusal(f"the new rows in '{update.name}' do not have one axis for each axis of the cache")
    tensor, order = found
    perm = tuple(order.index(a) for a in range(len(order)))
    _check_path(candidate, tensor, order, update, layout, axis, geometries)
    return tensor, None if perm == tuple(range(len(perm))) else perm


def _keeps_shape(
    tensor: gs.Tensor, order: tuple[int, ...], axis: int, geometries: Sequence[Geometry], given: bool
) -> bool:
    """Whether a tensor has the shape that its layout says in every sample."""
    for geometry in geometries:
        sizes = geometry.with_rows(axis)
        shape = geometry.step.probe.shape(tensor.name)
        if shape != tuple(sizes[a] for a in order) and not (shape is None and given):
            return False
    return True


def _check_path(
    candidate: Candidate,
    tensor: gs.Tensor,
    order: tuple[int, ...],
    update: gs.Tensor,
    layout: Layout,
    axis: int,
    geometries: Sequence[Geometry],
) -> None:
    """Show by numbers that the chain from `tensor` to the operand `update` moves every element to its place."""
    if tensor is update:
        return
    axes = [a for group in layout for a in group]
    rest = [a for a in range(len(order)) if a not in axes]
    for geometry in geometries:
        sizes = geometry.with_rows(axis)
        content = np.arange(int(np.prod(sizes)), dtype=np.float64).reshape(sizes)
        moved = geometry.step.probe.given({tensor.name: content.transpose(order)}).value(update.name)
        wanted = content.transpose((*axes, *rest)).reshape(-1)
        if moved is None or not np.array_equal(moved.reshape(-1), wanted.astype(moved.dtype)):
            raise candidate.refusal(f"the operators from '{tensor.name}' to '{update.name}' do not keep the new rows")


@dataclass(frozen=True)
class Proof:
    """A proven update.

    Attributes:
        axis: the sequence axis of the cache.
        update: the new rows.
        perm: brings `update` to the axis order of the cache; None: it has that order.
        circular: rows wrap around the capacity.
    """

    axis: int
    update: gs.Tensor
    perm: tuple[int, ...] | None
    circular: bool = False


def may_be_cache(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """Whether `tensor` is an input of the graph that could hold keys or values: no mask, no indices."""
    if isinstance(tensor, gs.Constant) or not contains(graph.inputs, tensor):
        return False
    return len(tensor.shape or ()) >= 3 and elem_type(tensor) not in (BOOL, INT32, INT64)
