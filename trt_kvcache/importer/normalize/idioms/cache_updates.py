"""Cache updates, found by structure: the region of nodes between a past and its present.

    past [B, N, L, D] -- Transpose(2, 0, 1, 3) --.
    start -- Add(Range(S)) -- Unsqueeze [S, 1] -- ScatterND -- Transpose(1, 2, 0, 3) -> present
    new [B, N, S, D] -- Transpose(2, 0, 1, 3) ---'

    becomes

    present = TensorScatter(past, new, write_indices, axis=2)

The region goes back from an output through operators that move numbers, to an input that may be a cache. Its last
operator names the idiom: Concat, ScatterND, ScatterElements, Where, or a sum of products ("one-hot"). One tensor comes
into it from elsewhere, the new rows. What the region does with them is seen by running it: `read_updates`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import (
    contains,
    dims,
    dtype_name,
    elem_type,
    input_or_none,
    is_op,
    producer,
    small_constant,
)
from trt_kvcache.importer.normalize.candidate import Candidate, may_be_cache
from trt_kvcache.importer.normalize.evidence.reach import deciding
from trt_kvcache.importer.normalize.views import cache_axis, is_view, trace_back

__all__ = ["NEW_ROWS", "Candidate", "find_candidates"]

NEW_ROWS = "Concat, new rows returned"

_SCATTERS = ("ScatterND", "ScatterElements")
_BLENDS = ("Add", "Sub", "Mul", "Where")
_CUTS = ("Slice", "Gather", "Split", "Pad")
_FLOAT, _FLOAT16, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
_NARROWER: dict[int | None, tuple[int, ...]] = {_FLOAT: (_FLOAT16, _BFLOAT16), _FLOAT16: (_BFLOAT16,)}
_DEEPEST = 4  # products and sums between a past and its present: residual streams are longer
_LOST = "write with index_copy, index_put or a slice instead of narrow().copy_(), and return what is written"
_ROLLING = "keep rows where they are and write at the position, or at the position modulo the capacity"
_GIVE_BACK = "give back what is joined with the past, or Concat(past, new) as a whole"


@dataclass(eq=False)
class _Region:
    """The nodes on paths from a past to a present.

    Attributes:
        pasts: graph inputs that may be caches; the first is the past.
        nodes: in order of execution.
        entering: what else these nodes move.
        index: the operands that say where to.
    """

    pasts: list[gs.Tensor] = field(default_factory=list)
    nodes: list[gs.Node] = field(default_factory=list)
    entering: list[gs.Tensor] = field(default_factory=list)
    index: list[gs.Tensor] = field(default_factory=list)

    def has(self, *ops: str) -> bool:
        """True if one of these operators is in it."""
        return any(is_op(node, *ops) for node in self.nodes)

    @property
    def writer(self) -> gs.Node | None:
        """The last node that does more than to rearrange or to cut."""
        return next((n for n in reversed(self.nodes) if not _is_passed(n)), None)

    @property
    def operand(self) -> gs.Tensor:
        """The past as the first such node reads it."""
        tensor = self.pasts[0]
        for node in self.nodes:
            if contains(_moved(node), tensor):
                if not _is_passed(node):
                    break
                tensor = node.outputs[0]
        return tensor


def find_candidates(graph: gs.Graph) -> tuple[Candidate, ...]:
    """Find what looks like a cache update.

    Returns:
        One for each graph output that a cache reaches, in their order, then updates that reach no output. Those that
        are already seen not to be possible in place carry the reason.

    Raises:
        UnsupportedModelError: a cache is held in the model, where no caller can reach it.
    """
    found = [c for output in graph.outputs if (c := _find(graph, output)) is not None]
    found = [replace(c, reason=c.reason or _other_type(c)) for c in found if not _is_constant(c, found)]
    found += _find_new_rows(graph, found)
    found += _find_lost(graph, found)
    return tuple(c if c.reason else replace(c, reason=_two_results(c, found)) for c in found)


def _two_results(candidate: Candidate, found: Sequence[Candidate]) -> str:
    results = [f"'{c.present.name}'" for c in found if c.past is candidate.past]
    return f"it has two results, {' and '.join(results[:2])}" if len(results) > 1 else ""


def _other_type(candidate: Candidate) -> str:
    """The reason why a cache cannot be kept in the type that is written; "" if it can.

    Converters leave float32 caches around operators of float16 (``keep_io_types``), and float16 ones before operators
    of bfloat16 (ModelOpt's AutoCast): what such a cache gives back are numbers of the narrower type.
    """
    if candidate.node is None:
        return ""
    past, kept, present = (elem_type(t) for t in (candidate.past, candidate.node.outputs[0], candidate.present))
    if past == kept == present or (kept in _NARROWER.get(past, ()) and present in (past, kept)):
        return ""
    return (
        f"it comes as {dtype_name(candidate.past)} and goes as {dtype_name(candidate.present)} "
        f"('{candidate.present.name}'), and {candidate.node.op} '{candidate.node.name}' writes "
        f"{dtype_name(candidate.node.outputs[0])}: convert the model again, caches in the type of its attention"
    )


def _is_passed(node: gs.Node) -> bool:
    return is_view(node) or is_op(node, "Slice", "Expand")


def _moved(node: gs.Node) -> list[gs.Tensor]:
    """The operands whose numbers a node moves to its output."""
    if is_view(node) or is_op(node, "Expand", *_CUTS):
        places: Sequence[int] = (0,)
    elif is_op(node, *_SCATTERS):
        places = (0, 2)
    elif is_op(node, "Where"):
        places = (1, 2)
    else:
        places = range(len(node.inputs)) if is_op(node, "Concat", *_BLENDS) else ()
    return [node.inputs[i] for i in places if i < len(node.inputs) and not node.inputs[i].is_empty()]


def _region(present: gs.Tensor, is_past: Callable[[gs.Tensor], bool]) -> _Region:
    """The region of a tensor, from all inputs that may be the past."""
    region = _Region()
    known: dict[tuple[int, int], bool] = {}

    def reaches(tensor: gs.Tensor, blends: int) -> bool:
        if is_past(tensor):
            region.pasts += [] if contains(region.pasts, tensor) else [tensor]
            return True
        node, key = producer(tensor), (id(tensor), blends)
        if node is None or blends > _DEEPEST or key in known:
            return known.get(key, False)
        moved = _moved(node)
        found = [reaches(operand, blends + is_op(node, *_BLENDS)) for operand in moved]
        known[key] = any(found)
        if any(found) and not any(node is other for other in region.nodes):
            region.nodes.append(node)
            region.entering += [t for t, is_on_path in zip(moved, found, strict=True) if not is_on_path]
            region.index += [t for t in node.inputs if not t.is_empty() and not contains(moved, t)]
        return any(found)

    reaches(present, 0)
    return region


def _find(graph: gs.Graph, present: gs.Tensor) -> Candidate | None:
    """The update of which an output is the result."""
    rank = len(present.shape) if present.shape is not None else None
    if rank is not None and rank < 3:
        return None
    region = _region(present, lambda tensor: may_be_cache(graph, tensor))
    pasts = [t for t in region.pasts if rank in (None, len(t.shape))]
    if not pasts:
        return None
    past = pasts[0]
    if len(region.pasts) > 1:
        region = _region(present, lambda tensor: tensor is past)
    return _describe(region, present)


def _describe(region: _Region, present: gs.Tensor) -> Candidate | None:
    """The update that a region makes; None: it makes none."""
    past, node = region.pasts[0], region.writer
    if node is None and not region.has("Slice"):
        reason = f"it comes out as it went in, as '{present.name}', and the exporter has lost the write"
        writer = region.nodes[0] if region.nodes else None
        return Candidate("unchanged", past, present, writer, reason=reason, advice=_LOST)
    updates, masks = _blended(region) if region.has(*_BLENDS) else (region.entering, [])
    if region.has(*_BLENDS) and (not masks or not updates):
        return None
    if len(updates) > 1 and not masks:
        updates = [t for t in updates if not deciding(t).computable]
    views = trace_back(region.operand, cut=True)[1]
    axis = None if node is None else _guess_axis(region, node, views, updates)
    found = Candidate("rolling", past, present, node or region.nodes[-1], axis=axis, region=tuple(region.nodes),
                      views=views, updates=tuple(updates), masks=tuple(masks))  # fmt: skip
    if node is None or _is_rolling(region, node, axis):
        mover = next((n for n in reversed(region.nodes) if is_op(n, *_CUTS)), None)
        joint = next((n for n in region.nodes if is_op(n, "Concat")), None)
        if joint is not None and mover is not None and len(updates) == 1:
            axis = _guess_axis(region, joint, views, updates)
            if (rows := _length(past, axis)) is not None:
                return replace(found, idiom="shift", axis=axis, growing=True, kept=rows, shifted=True, advice=_ROLLING)
        if mover is not None:
            reason = f"{mover.op} '{mover.name}' moves its rows in every step"
        elif is_op(node, "Concat"):
            reason = f"its axis {axis} has a fixed size, so that a step's result is no input of the next"
        else:
            reason = f"it is written more than once ({', '.join(n.name for n in region.nodes if is_op(n, *_SCATTERS))})"
        return replace(found, reason=reason, advice=_ROLLING)
    reason = "" if len(updates) == 1 else f"it takes new rows from {len(updates)} tensors"
    if is_op(node, "Concat"):
        idiom = "Concat, Slice" if region.has("Slice") else "Concat"
        return replace(found, idiom=idiom, growing=True, reason=reason)
    decided = deciding(*region.index, *masks)
    if dependent := decided.data_dependent():
        reason = f"its positions depend on data: {dependent}"
    idiom = "one-hot" if is_op(node, "Add", "Sub") else str(node.op)
    return replace(found, idiom=idiom, positions=() if reason else decided.positions, reason=reason)


def _is_rolling(region: _Region, node: gs.Node, axis: int | None) -> bool:
    """True if rows are taken out of a past before new ones come to it, as far as the structure says."""
    if region.has("Gather", "Split", "Pad"):
        return True
    if is_op(node, "Concat"):
        return _length(region.pasts[0], axis) is not None
    data = node.inputs[0] if is_op(node, *_SCATTERS) else region.operand
    return trace_back(data)[0] is not region.pasts[0]


def _length(past: gs.Tensor, axis: int | None) -> int | None:
    """Rows of a past that always has as many."""
    length = (dims(past) or ())[axis] if axis is not None else "?"
    return length if isinstance(length, int) else None


def _blended(region: _Region) -> tuple[list[gs.Tensor], list[gs.Tensor]]:
    """The new rows and the masks that choose between past and new ones; no masks: nothing is chosen."""
    updates: list[gs.Tensor] = []
    masks: list[gs.Tensor] = []
    for tensor in region.entering:
        if deciding(tensor).computable:
            masks.append(tensor)
            continue
        node = producer(tensor)
        if node is not None and is_op(node, "Mul", "Where") and not is_op(region.nodes[-1], "Where"):
            computable = [t for t in node.inputs if deciding(t).computable]
            others = [t for t in node.inputs if not contains(computable, t)]
            if computable and len(others) == 1:
                masks += computable
                tensor = others[0]
        updates += [] if contains(updates, tensor) else [tensor]
    masks += region.index
    chosen = deciding(*(t for n in region.nodes if is_op(n, "Mul", "Where") for t in n.inputs if contains(masks, t)))
    return updates, masks if chosen.computable and (chosen.inputs or chosen.shapes) else []


def _guess_axis(region: _Region, node: gs.Node, views: Sequence[gs.Node], updates: Sequence[gs.Tensor]) -> int | None:
    """The sequence axis: the one that an operator names, or along which past and new rows have other lengths."""
    past = region.pasts[0]
    if is_op(node, "Concat", "ScatterElements"):
        return cache_axis(past, views, int(node.attrs.get("axis", 0)))
    index = next((n.inputs[1].shape for n in region.nodes if is_op(n, "ScatterND")), None)
    if index and index[-1] == 1:
        return cache_axis(past, views, 0)
    cut = next((small_constant(input_or_none(n, 3)) for n in region.nodes if is_op(n, "Slice")), None)
    if cut is not None and cut.size == 1:
        return cache_axis(past, views, int(cut[0]))
    old, new = dims(region.operand) or (), dims(updates[0]) or () if updates else ()
    longer = [axis for axis, (a, b) in enumerate(zip(old, new, strict=False)) if a != b and axis]
    columns = [producer(trace_back(t)[0]) for t in region.index]
    if len(columns) == 1 and columns[0] is not None and is_op(columns[0], "Concat"):
        longer = [axis for axis, tensor in enumerate(columns[0].inputs) if deciding(tensor).inputs]
    return cache_axis(past, views, longer[0]) if len(longer) == 1 else None


def _is_constant(candidate: Candidate, found: Sequence[Candidate]) -> bool:
    """True if an unchanged input is no cache to write.

    Keys and values of an encoder come beside caches of another shape; hidden states have three axes and come alone.
    """
    if candidate.idiom != "unchanged":
        return False
    shape = dims(candidate.past) or ()
    written = [dims(c.past) for c in found if c.idiom != "unchanged"]
    alike = [c for c in found if c.idiom == "unchanged" and len(c.past.shape) == len(shape)]
    return shape not in written if written else len(shape) == 3 and len(alike) == 1


def _find_new_rows(graph: gs.Graph, found: Sequence[Candidate]) -> list[Candidate]:
    """Caches that grow by Concat, and of which an output gives the new rows only.

    If there are some, those of the same rank as well of which no output gives anything back: with the reason.
    """
    taken = {id(c.past) for c in found}
    used = {id(t) for c in found for t in (c.present, c.node)}
    more: list[Candidate] = []
    lost: list[Candidate] = []
    for node in graph.nodes:
        if not is_op(node, "Concat") or len(node.inputs) != 2 or id(node) in used:
            continue
        past, views = trace_back(node.inputs[0])
        axis = cache_axis(past, views, int(node.attrs["axis"])) if may_be_cache(graph, past) else 0
        if axis == 0 or id(past) in taken:
            continue
        rows = node.inputs[1]
        source = trace_back(rows)[0]
        given = [t for t in graph.outputs if id(t) not in used and trace_back(t)[0] is source]
        candidate = Candidate(NEW_ROWS, past, (given or node.outputs)[0], node, axis=axis, growing=True, views=views,
                              region=(*views, node), updates=(rows,), rows_only=True,
                              room=_length(past, axis))  # fmt: skip
        if given:
            more.append(candidate)
            used.add(id(given[0]))
            taken.add(id(past))
        else:
            reason = (
                f"no output gives its new rows '{rows.name}' as they are joined with the past, nor the whole (outputs: "
                f"{', '.join(t.name for t in graph.outputs)})"
            )
            lost.append(replace(candidate, reason=reason, advice=_GIVE_BACK))
    ranks = {len(c.past.shape) for c in more}
    return more + [c for c in lost if len(c.past.shape) in ranks and id(c.past) not in taken]


def _find_lost(graph: gs.Graph, found: Sequence[Candidate]) -> list[Candidate]:
    """Scatters into caches that come from no input, or go to no output.

    Raises:
        UnsupportedModelError: into a constant.
    """
    known = {id(node) for c in found for node in c.region}
    lost: list[Candidate] = []
    for node in graph.nodes:
        if not is_op(node, *_SCATTERS) or id(node) in known or len(node.inputs) < 3:
            continue
        past = trace_back(node.inputs[0])[0]
        if isinstance(past, gs.Constant) and len(past.shape) >= 3 and not deciding(node.inputs[2]).computable:
            index = deciding(node.inputs[1])
            if index.positions and not index.data_dependent():
                raise UnsupportedModelError(
                    f"{node.op} '{node.name}' writes to '{past.name}', a cache that the model holds in itself: it "
                    "starts anew in every step. Supported are caches that are inputs and outputs: export the model "
                    "with the cache as an argument and a result of its forward function"
                )
        if may_be_cache(graph, past) and len(past.shape) >= 4 and not any(c.past is past for c in (*found, *lost)):
            reason = "the result is no output of the model, so that the new rows are lost"
            lost.append(Candidate(node.op, past, node.outputs[0], node, reason=reason))
    return lost
