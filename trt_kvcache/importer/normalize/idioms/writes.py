"""Find the cache updates of a model as exported, and prove them.

    past (graph input) -- views -- node that writes -- views -- present (graph output)

A view is an operator that only rearranges: Transpose, Reshape, Squeeze, Unsqueeze, Identity, a Cast to the same type.
What the node that writes does is shown by its idiom: `concat`, `scatter`, `select`. Here is what all have in common:
the past comes back in the layout in which it came, nothing else reads it, and, for caches that are small enough, the
whole update is run on numbers and compared with the definition of TensorScatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import consumers, contains, dims, elem_type, is_op, producer
from trt_kvcache.importer.normalize.candidate import Candidate, Geometry, Proof, may_be_cache, richest
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.reach import reach
from trt_kvcache.importer.normalize.evidence.samples import Sample
from trt_kvcache.importer.normalize.findings import Write
from trt_kvcache.importer.normalize.idioms import concat, scatter, select
from trt_kvcache.importer.normalize.idioms.kept import is_cut, prove_cut
from trt_kvcache.importer.normalize.idioms.new_rows import find_new_rows, prove_new_rows
from trt_kvcache.importer.normalize.views import (
    axis_order,
    is_view,
    layout_after,
    own_layout,
    static_layout,
    step,
    trace_back,
)

__all__ = ["Candidate", "find_candidates", "prove"]

_SCATTERS = ("ScatterND", "ScatterElements")
_MOVES = ("Slice", "Concat", "Gather", "Split", "Pad")
_LOST = "write with index_copy, index_put or a slice instead of narrow().copy_(), and return what is written"
_ROLLING = "keep rows where they are and write at the position, or at the position modulo the capacity"
_REPLAYED = 1 << 16  # elements of a cache, at most, to run its update as a whole


def find_candidates(graph: gs.Graph) -> tuple[Candidate, ...]:
    """What looks like a cache update, by structure alone.

    Args:
        graph: the model. Not changed.

    Returns:
        One for each graph output that a cache reaches, in their order, then updates that reach no output. Those that
        are already seen not to be provable carry the reason, with which `prove` refuses them.

    Raises:
        UnsupportedModelError: a cache is held in the model, where no caller can reach it.
    """
    found = [c for output in graph.outputs if (c := _find(graph, output)) is not None]
    found = [c for c in found if not _is_constant(c, found)]
    found += find_new_rows(graph, found)
    found += _unreachable(graph, found)
    found = [c if c.reason else replace(c, reason=_second_use(graph, c, found)) for c in found]
    return tuple(found)


def _find(graph: gs.Graph, present: gs.Tensor) -> Candidate | None:
    source, after = trace_back(present)
    if may_be_cache(graph, source):
        node = after[0] if after else None
        reason = f"it comes out as it went in, as '{present.name}', and the exporter has lost the write"
        return Candidate("unchanged", source, present, node, views=after, reason=reason, advice=_LOST)
    node = producer(source)
    if node is None or len(present.shape or (0, 0, 0)) < 3:
        return None
    if is_op(node, *_SCATTERS):
        past, views = trace_back(node.inputs[0])
        if may_be_cache(graph, past):
            return replace(scatter.describe(node, past, present, views), after=after)
    elif is_op(node, "Concat", "Slice"):
        if (candidate := _joined(graph, present)) is not None:
            return candidate
    elif is_op(node, "Where", "Add", "Sub"):
        return select.find(graph, node, present, after)
    return _moved(graph, node, present)


def _joined(graph: gs.Graph, present: gs.Tensor) -> Candidate | None:
    """A cache that grows by Concat, cut to its newest rows or not; one of fixed size only moves its rows."""
    source, after = trace_back(present, cut=True)
    node = producer(source)
    found = None if node is None or not is_op(node, "Concat") else concat.find(graph, node, present, after)
    return None if found is not None and is_cut(found) and found.reason else found


def _is_constant(candidate: Candidate, found: Sequence[Candidate]) -> bool:
    """Whether an unchanged input is no cache to write.

    Keys and values of an encoder come beside caches of another shape; hidden states have three axes and come alone.
    """
    if candidate.idiom != "unchanged":
        return False
    shape = dims(candidate.past) or ()
    written = [dims(c.past) for c in found if c.idiom != "unchanged"]
    alike = [c for c in found if c.idiom == "unchanged" and len(c.past.shape) == len(shape)]
    return shape not in written if written else len(shape) == 3 and len(alike) == 1


def _moved(graph: gs.Graph, node: gs.Node, present: gs.Tensor) -> Candidate | None:
    """A cache whose rows move, or that is written more than once, before it comes out."""
    seen: set[int] = set()
    stack, moves = [node], []
    while stack:
        current = stack.pop()
        if id(current) in seen or not is_op(current, *_SCATTERS, *_MOVES):
            continue
        seen.add(id(current))
        moves.append(current)
        operands = current.inputs if is_op(current, "Concat") else current.inputs[:1]
        for operand in operands:
            source, views = trace_back(operand)
            if may_be_cache(graph, source) and len(source.shape) == len(present.shape or source.shape):
                return Candidate(
                    "rolling", source, present, node, views=views, reason=_why_moved(moves), advice=_ROLLING
                )
            if (before := producer(source)) is not None:
                stack.append(before)
    return None


def _why_moved(moves: Sequence[gs.Node]) -> str:
    scatters = [n for n in moves if is_op(n, *_SCATTERS)]
    movers = [n for n in moves if not is_op(n, *_SCATTERS)]
    if len(scatters) > 1 or not movers:
        return f"it is written more than once ({', '.join(n.name for n in scatters)})"
    mover = next((n for n in movers if not is_op(n, "Concat")), movers[0])
    return f"{mover.op} '{mover.name}' moves its rows in every step"


def _unreachable(graph: gs.Graph, found: Sequence[Candidate]) -> list[Candidate]:
    """Scatters into caches that come from no input, or go to no output.

    Raises:
        UnsupportedModelError: into a constant.
    """
    known = {id(c.node) for c in found}
    more = []
    for node in graph.nodes:
        if not is_op(node, *_SCATTERS) or id(node) in known or len(node.inputs) < 3:
            continue
        past, views = trace_back(node.inputs[0])
        if isinstance(past, gs.Constant) and len(past.shape) >= 3 and not reach(node.inputs[2]).computable:
            index = reach(node.inputs[1])
            if index.positions and not index.data_dependent():
                raise UnsupportedModelError(
                    f"{node.op} '{node.name}' writes to '{past.name}', a cache that the model holds in itself: it "
                    "starts anew in every step. Supported are caches that are inputs and outputs: export the model "
                    "with the cache as an argument and a result of its forward function"
                )
        if may_be_cache(graph, past) and len(past.shape) >= 4 and not any(c.past is past for c in found):
            candidate = scatter.describe(node, past, node.outputs[0], views)
            reason = candidate.reason or "the result is no output of the model, so that the new rows are lost"
            more.append(replace(candidate, reason=reason))
    return more


def _second_use(graph: gs.Graph, candidate: Candidate, found: Sequence[Candidate]) -> str:
    """Why a past that something else reads as well cannot be updated in place; "" where nothing does."""
    for other in found:
        if other is not candidate and other.past is candidate.past:
            return f"it has two results, '{candidate.present.name}' and '{other.present.name}'"
    own = {id(n) for n in (candidate.node, *candidate.inner, *candidate.views)}
    stack = [candidate.past]
    while stack:
        tensor = stack.pop()
        for node in consumers(tensor):
            if is_view(node) or _is_only_cut(graph, node):
                stack.extend(node.outputs)
            elif id(node) not in own and not is_op(node, "Shape", "Size"):
                return f"{node.op} '{node.name}' reads its past as well"
    return ""


def _is_only_cut(graph: gs.Graph, node: gs.Node) -> bool:
    """Whether a node cuts rows out, of which others may want the shape only."""
    return is_op(node, "Slice") and not contains(graph.outputs, node.outputs[0])


def prove(graph: gs.Graph, candidate: Candidate, probes: Sequence[Sample]) -> Write:
    """Show that a candidate is a cache update.

    Args:
        graph: the model. Not changed.
        candidate: from `find_candidates` on the same graph.
        probes: samples of a step, also some beyond the capacity.

    Returns:
        The update.

    Raises:
        UnsupportedModelError: naming what was found.
    """
    if candidate.reason:
        raise candidate.refusal(candidate.reason)
    steps = [s for s in probes if not (s.wrapped and candidate.growing)]
    geometries = _geometries(candidate, steps)
    plain = [g for g in geometries if not g.step.wrapped]
    idiom = concat if candidate.growing else scatter if candidate.idiom in _SCATTERS else select
    proof = idiom.prove(candidate, geometries)
    if is_cut(candidate):
        prove_cut(candidate, geometries)
    new_rows = prove_new_rows(candidate, proof, plain) if candidate.rows_only else None
    if new_rows is None:
        _check_return(candidate, proof, richest(plain))
    for geometry in plain:
        _replay(candidate, proof, geometry)
    assert candidate.node is not None
    return Write(
        candidate.idiom,
        candidate.past,
        candidate.present,
        proof.update,
        proof.perm,
        proof.axis,
        candidate.growing,
        proof.circular,
        candidate.node.name,
        candidate.positions,
        _aliases(candidate, richest(plain)),
        candidate.kept,
        _fronts(candidate),
        new_rows,
        candidate.room,
    )


def _geometries(candidate: Candidate, steps: Sequence[Sample]) -> list[Geometry]:
    rank = len(candidate.past.shape)
    layout = own_layout(rank)
    geometries = []
    for s in steps:
        sizes = s.probe.shape(candidate.past.name)
        if sizes is None or sizes[0] != s.batch:
            raise candidate.refusal(f"its first axis, '{(candidate.past.shape)[0]}', is not the batch")
        geometries.append(Geometry(s, sizes, layout))
    plain = [g for g in geometries if not g.step.wrapped]
    if not plain:
        raise candidate.refusal("no sample shows what it does")
    best = richest(plain)
    laid = layout_after(candidate.views, layout, best.sizes, best.step.probe)
    if laid is None:
        raise candidate.refusal(f"the operators from it to '{candidate.operand.name}' split one of its axes")
    return [replace(g, layout=laid) for g in geometries]


def _check_return(candidate: Candidate, proof: Proof, geometry: Geometry) -> None:
    """Show that present has the axis order of past."""
    sizes = list(geometry.sizes)
    sizes[proof.axis] += geometry.step.length if candidate.growing else 0
    if candidate.kept is not None:
        sizes[proof.axis] = min(sizes[proof.axis], candidate.kept)
    layout = layout_after(candidate.after, geometry.layout, tuple(sizes), geometry.step.probe)
    order = None if layout is None else axis_order(layout, tuple(sizes))
    if order != tuple(range(len(sizes))):
        raise candidate.refusal(f"'{candidate.present.name}' has another layout than '{candidate.past.name}'")


def _replay(candidate: Candidate, proof: Proof, geometry: Geometry) -> None:
    """Run the update on random numbers and compare with what TensorScatter, or Concat, makes of them."""
    if prod(geometry.sizes) > _REPLAYED:
        return
    start, length = geometry.step.past, geometry.step.length
    rng = np.random.default_rng(start)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type(candidate.past) or onnx.TensorProto.FLOAT)
    past = rng.integers(-100, 100, geometry.sizes).astype(dtype)
    rows = rng.integers(-100, 100, geometry.with_rows(proof.axis)).astype(dtype)
    perm = proof.perm or tuple(range(rows.ndim))
    given = {candidate.past.name: past, proof.update.name: rows.transpose(np.argsort(perm))}
    if candidate.growing:
        wanted = np.concatenate([past, rows], proof.axis)
        first = 0 if candidate.kept is None else max(0, wanted.shape[proof.axis] - candidate.kept)
        wanted = wanted[(slice(None),) * proof.axis + (slice(first, None),)]
    else:
        wanted = past.copy()
        wanted[(slice(None),) * proof.axis + (slice(start, start + length),)] = rows
    whole = candidate.present
    if candidate.rows_only:
        assert candidate.node is not None
        whole, wanted = candidate.node.outputs[0], _laid(wanted, geometry)
    present = geometry.step.probe.given(given).value(whole.name)
    if present is None and not past.size:
        return  # -1 in a Reshape stands for nothing definite where the past is empty
    if present is None or not np.array_equal(present, wanted):
        raise candidate.refusal(
            f"in a step of {length} tokens behind {start} it does not give what TensorScatter gives"
        )


def _laid(cache: Array, geometry: Geometry) -> Array:
    """A cache as the writing node has it."""
    order = [axis for group in geometry.layout for axis in group]
    shape = [prod(cache.shape[axis] for axis in group) for group in geometry.layout]
    laid: Array = cache.transpose([*order, *(a for a in range(cache.ndim) if a not in order)]).reshape(shape)
    return laid


def _fronts(candidate: Candidate) -> tuple[gs.Tensor, ...]:
    """The rows in use, where they have the layout of present."""
    rank = len(candidate.past.shape)
    is_alike = static_layout(candidate.views, rank) == own_layout(rank)
    return () if candidate.front is None or not is_alike else (candidate.front.tensor,)


def _aliases(candidate: Candidate, geometry: Geometry) -> tuple[gs.Tensor, ...]:
    """Tensors with the contents and the layout of present, other than present; as they are before they are cut."""
    assert candidate.node is not None
    written = candidate.node.outputs[0]
    rank = len(geometry.sizes)
    static = static_layout(candidate.views, rank)
    stack = [] if is_cut(candidate) or candidate.rows_only else [(candidate.present, own_layout(rank))]
    stack += [(written, static)] if static is not None else []
    seen: set[int] = set()
    found: list[gs.Tensor] = []
    while stack:
        tensor, layout = stack.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if layout == own_layout(rank) and tensor is not candidate.present:
            found.append(tensor)
        for node in consumers(tensor):
            if is_view(node) and is_op(node, "Identity", "Transpose", "Cast"):
                stack.append((node.outputs[0], step(node, layout, geometry.sizes, geometry.step.probe) or layout))
        before = producer(tensor)
        if tensor is not written and before is not None and is_op(before, "Identity"):
            stack.append((before.inputs[0], layout))
    return tuple(t for t in found if not contains((candidate.past,), t))
