"""Cache updates, read by running them: past gets even numbers, new rows odd ones, and present shows where these go.

Present has to be the past with the new rows after P rows (modulo L, if the cache is circular), past and new rows
joined, or the newest R of these. Only the region of the update runs (`cache_updates`), in a few short steps, with a
past that is cut short if it is long. What the update does at other lengths is for the check to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import consumers, elem_type, is_op, producer
from trt_kvcache.importer.normalize.candidate import FOR_GOOD, Candidate
from trt_kvcache.importer.normalize.evidence.probe import Array, Probe, Shape
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Write
from trt_kvcache.importer.normalize.unknown import why_unknown
from trt_kvcache.importer.normalize.views import is_view, static_layout, trace_back

__all__ = ["find_kept", "read_update"]

_STEPS = 3
_SMALL = 1 << 16  # elements of a past; a larger one is cut to few rows, heads or channels, if the update runs so
_ROWS = 32
_MOST = 60  # of such numbers, halved: all types of caches have them
_LARGEST = 1 << 22  # elements of a past that is not cut
_FAR = 64  # tokens beyond twice the capacity
_CUT = "cut the cache to a number of its newest rows that is the same in every step, Concat(past, new)[:, :, -R:]"

Perm = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Run:
    """An update in a step.

    Attributes:
        step: the sample.
        past, new: the numbers that it was given.
        probe: the sample with these.
        whole: what it makes of them; None: that cannot be computed.
    """

    step: Sample
    past: Array
    new: Array
    probe: Probe
    whole: Array | None


def read_update(candidate: Candidate, samples: Samples) -> Write:
    """Read a cache update that `find_candidates` has found.

    Raises:
        UnsupportedModelError: naming what it does instead.
    """
    if candidate.reason:
        raise candidate.refusal(candidate.reason)
    assert candidate.node is not None
    steps = [s for s in samples.plain if s.past][:_STEPS] or list(samples.plain[:1])
    for update in _sources(candidate):
        runs = [run for s in steps if (run := _run(candidate, update, s)) is not None]
        found = _placed(candidate, runs) if len(runs) == len(steps) else None
        if found is not None:
            axis, perm = found
            break
    else:
        raise _refusal(candidate, runs, steps)
    run = runs[0]
    whole = _wanted(candidate, run, axis, perm, cut=candidate.shifted)
    assert whole is not None
    rows = (slice(None),) * axis + (slice(run.step.total),)
    return Write(
        candidate.idiom,
        candidate.past,
        candidate.present,
        update,
        candidate.node.name,
        axis=axis,
        growing=candidate.growing,
        positions=candidate.positions,
        kept=candidate.kept,
        room=candidate.room,
        shifted=candidate.shifted,
        perm=None if perm == tuple(range(len(perm))) else perm,
        circular=candidate.shifted
        or (not candidate.growing and _is_circular(candidate, update, axis, perm, run, samples.wrapped)),
        aliases=tuple(_same(candidate, run, whole)),
        turned=tuple(_turned(candidate, run, whole)),
        fronts=() if candidate.growing else tuple(_same(candidate, run, whole[rows])),
        new_rows=_order(candidate, update, perm, run) if candidate.rows_only else None,
    )


def _sources(candidate: Candidate) -> list[gs.Tensor]:
    """Tensors that may be the new rows, from the projection on; the last one comes into the region."""
    found = [candidate.updates[0]]
    while (node := producer(found[0])) is not None and (is_view(node) or is_op(node, "Expand")):
        if elem_type(node.inputs[0]) != elem_type(found[0]):
            break
        found.insert(0, node.inputs[0])
    return found


def _run(candidate: Candidate, update: gs.Tensor, step: Sample) -> _Run | None:
    """The update in a step, if the new rows are as many as those of a cache."""
    sizes, shape = step.probe.shape(candidate.past.name), step.probe.shape(update.name)
    if sizes is None or sizes[0] != step.batch:
        raise candidate.refusal(f"its first axis, '{candidate.past.shape[0]}', is not the batch")
    if shape is None or len(shape) != len(sizes):
        return None
    run = None
    for shapes in _tries(candidate, sizes, shape, step):
        run = _given(candidate, update, step, *shapes)
        if run.whole is not None:
            break
    return run


def _tries(candidate: Candidate, past: Shape, new: Shape, step: Sample) -> Iterator[tuple[Shape, Shape]]:
    """Shapes of past and new rows to try: if they are large, first with few rows, then with two heads and channels."""
    axis = candidate.axis
    if prod(past) > _SMALL and axis is not None and not candidate.growing:
        rows = min(past[axis], max(_ROWS, step.total))
        yield (*past[:axis], rows, *past[axis + 1 :]), new
        kept = (step.batch, step.length, past[axis])
        few = [tuple(d if d in kept else min(d, 2) for d in shape) for shape in (past, new)]
        past, new = few
    if prod(past) <= _LARGEST:
        yield past, new


def _given(candidate: Candidate, update: gs.Tensor, step: Sample, sizes: Shape, shape: Shape) -> _Run:
    rng = np.random.default_rng(0)
    past = 2.0 * rng.integers(-_MOST, _MOST, sizes)
    new = 2.0 * rng.integers(-_MOST, _MOST, shape) + 1
    kind, rows = elem_type(update) or 0, new
    if kind not in (0, elem_type(candidate.past)):  # the past is cast to it, and operators ask for one type
        rows = new.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    probe = step.probe.given({candidate.past.name: past, update.name: rows})
    masks = [(mask.name, probe.value(mask.name)) for mask in candidate.masks]
    wide = {n: v.astype(np.float64) for n, v in masks if v is not None and v.dtype.kind not in "biu"}
    probe = probe.given(wide) if wide else probe
    whole, layout = probe.value(candidate.whole.name), static_layout(candidate.views, past.ndim)
    if candidate.rows_only and whole is not None and layout is not None:
        whole = whole.transpose(np.argsort(layout))
    return _Run(step, past, new, probe, whole)


def _placed(candidate: Candidate, runs: Sequence[_Run]) -> tuple[int, Perm] | None:
    """The sequence axis, and how new rows are permuted to the axis order of the cache."""
    rank = runs[0].past.ndim
    axes = range(1, rank) if candidate.axis is None else [candidate.axis % rank]
    for axis in axes:
        for perm in permutations(range(rank)):
            if all(_is_written(candidate, run, axis, perm, 0) for run in runs):
                return axis, perm
    return None


def _is_written(candidate: Candidate, run: _Run, axis: int, perm: Perm, ring: int) -> bool:
    wanted = _wanted(candidate, run, axis, perm, ring)
    return wanted is not None and run.whole is not None and np.array_equal(run.whole, wanted)


def _wanted(candidate: Candidate, run: _Run, axis: int, perm: Perm, ring: int = 0, cut: bool = True) -> Array | None:
    """The present that a right update makes; None if the new rows do not fit.

    Args:
        candidate: the update.
        run: of it.
        axis: the sequence axis.
        perm: of the new rows.
        ring: the length of a circular cache; 0: it is linear.
        cut: whether only the rows that are kept are wanted.
    """
    rows = run.new.transpose(perm)
    sizes = list(run.past.shape)
    sizes[axis] = run.step.length
    if rows.shape != tuple(sizes):
        return None
    if candidate.growing:
        whole = np.concatenate([run.past, rows], axis)
        first = max(0, whole.shape[axis] - candidate.kept) if candidate.kept and cut else 0
        return whole[(slice(None),) * axis + (slice(first, None),)]
    places = run.step.past + np.arange(run.step.length)
    if ring:
        places %= ring
    if places.max() >= run.past.shape[axis]:
        return None
    whole = run.past.copy()
    whole[(slice(None),) * axis + (places,)] = rows
    return whole


def _is_circular(
    candidate: Candidate, update: gs.Tensor, axis: int, perm: Perm, run: _Run, wrapped: Sequence[Sample]
) -> bool:
    """True if rows beyond the capacity go to the first ones: a linear cache has nothing to write there."""
    found = []
    for step in wrapped:
        past, new = list(run.past.shape), list(run.new.shape)
        past[0] = new[perm[0]] = step.batch
        new[perm[axis]] = step.length
        if step.past >= step.capacity:
            beyond = _given(candidate, update, step, tuple(past), tuple(new))
            rings = {step.capacity, past[axis]}
            found.append(any(_is_written(candidate, beyond, axis, perm, ring) for ring in rings))
    return bool(found) and all(found)


def _same(candidate: Candidate, run: _Run, wanted: Array) -> Iterator[gs.Tensor]:
    """Tensors of the region, and views of them, that are the whole cache, or its rows in use, in its layout."""
    pending = [t for node in candidate.region for t in node.outputs]
    seen = {candidate.past.name} if candidate.rows_only else {candidate.past.name, candidate.present.name}
    pending += [] if candidate.rows_only or (candidate.kept and not candidate.shifted) else [candidate.present]
    while pending:
        tensor = pending.pop(0)
        value = run.probe.value(tensor.name)
        is_whole = value is not None and np.array_equal(value, wanted)
        if tensor.name not in seen and is_whole and elem_type(tensor) == elem_type(candidate.updates[0]):
            yield tensor
        seen.add(tensor.name)
        for node in consumers(tensor):
            is_turned = is_view(node) and is_op(node, "Identity", "Transpose", "Cast")
            if is_turned and node.outputs[0].name not in seen:
                pending.append(node.outputs[0])


def _turned(candidate: Candidate, run: _Run, wanted: Array) -> Iterator[tuple[gs.Tensor, Perm]]:
    """Tensors of the region that are the whole cache in another order of axes, and that order."""
    for tensor in (t for node in candidate.region for t in node.outputs):
        value = run.probe.value(tensor.name)
        if value is None or value.ndim != wanted.ndim or np.array_equal(value, wanted):
            continue
        orders = permutations(range(wanted.ndim))
        found = next((perm for perm in orders if np.array_equal(value, wanted.transpose(perm))), None)
        if found is not None:
            yield tensor, found


def _order(candidate: Candidate, update: gs.Tensor, perm: Perm, run: _Run) -> Perm:
    """The axes of the cache in the order in which they lie in an output of new rows, which may merge some."""
    source = trace_back(candidate.updates[0])[0]
    shape = run.step.probe.shape(source.name) or ()
    probe = run.step.probe.given({source.name: np.arange(prod(shape)).reshape(shape)})
    given, rows = probe.value(candidate.present.name), probe.value(update.name)
    if given is not None and rows is not None:
        for order in permutations(perm):
            if np.array_equal(given.reshape(-1), rows.transpose(order).reshape(-1)):
                return tuple(perm.index(axis) for axis in order)
    why = f"the output '{candidate.present.name}' has other numbers than the new rows '{update.name}'"
    raise candidate.refusal(why, "give back what is joined with the past, or Concat(past, new) as a whole")


def _refusal(candidate: Candidate, runs: Sequence[_Run], steps: Sequence[Sample]) -> UnsupportedModelError:
    """The nearest miss."""
    update = candidate.updates[0]
    unknown = next((step for step in steps if step.probe.shape(update.name) is None), None)
    if unknown is not None:
        return candidate.refusal(*why_unknown(update, unknown))
    if not runs:
        return candidate.refusal(f"the new rows in '{update.name}' do not have one axis for each axis of the cache")
    if candidate.shifted:
        mover = next(n for n in reversed(candidate.region) if is_op(n, "Slice", "Gather", "Split", "Pad"))
        return candidate.refusal(
            f"{mover.op} '{mover.name}' moves its rows in every step, by another number than that of the new rows, or "
            "these do not come last"
        )
    advice = "" if candidate.growing or candidate.positions or candidate.masks else FOR_GOOD
    return candidate.refusal(_describe(candidate, runs), advice)


def _describe(candidate: Candidate, runs: Sequence[_Run]) -> str:
    """An update that does not write S rows after P rows, in words."""
    update, present, axis = candidate.updates[0].name, candidate.present.name, candidate.axis or 0
    run = next((run for run in runs if run.whole is None), runs[0])
    step, whole = run.step, run.whole
    if run.new.size * run.past.shape[axis] != run.past.size * step.length:
        return f"'{update}' {list(run.new.shape)} is not as large as {step.length} rows of {list(run.past.shape)}"
    if whole is None:
        when = f"in a step of {step.length} tokens after {step.past}"
        return f"which rows it writes {when} cannot be computed from positions and lengths"
    is_new, is_old = np.isin(whole, run.new), np.isin(whole, run.past)  # odd and even
    if not (is_new | is_old).all():
        return f"'{present}' has numbers that are neither those of past nor those of new rows"
    places = ", ".join(map(str, np.unique(is_new.nonzero()[axis])[:8]))
    rows = f"rows {places}" if places else "no rows"
    return (
        f"it writes {rows} of axis {axis} when {step.past} rows hold tokens and {step.length} are new, and makes "
        f"'{present}' {list(whole.shape)}, which is not the past {list(run.past.shape)} with all of '{update}' there"
    )


def find_kept(candidates: Sequence[Candidate], samples: Samples) -> tuple[Candidate, ...]:
    """Say how many rows each cache keeps that is cut to the newest ones, from a step after a past that is longer.

    Raises:
        UnsupportedModelError: the rows are not the newest ones, or cannot be computed.
    """
    return tuple(replace(c, kept=_kept(c, samples)) if c.is_cut and not c.reason else c for c in candidates)


def _kept(candidate: Candidate, samples: Samples) -> int | None:
    node, axis, past = candidate.node, candidate.axis, 2 * samples.capacity + _FAR
    assert node is not None
    named = " and ".join(f"Slice '{n.name}'" for n in candidate.region if is_op(n, "Slice"))
    step = samples.step(1, past, samples.fixed_length or 3)
    given = {
        candidate.past.name: np.arange(past).reshape(
            [past if a == axis else 1 for a in range(len(candidate.past.shape))]
        )
    }
    operand = next(t for t in node.inputs if t is not candidate.updates[0])
    shape = list(step.probe.given(given).shape(operand.name) or ())
    if shape:
        shape[int(node.attrs["axis"])] = step.length
        given[candidate.updates[0].name] = np.arange(past, step.total).reshape(shape)
    rows = step.probe.given(given).value(candidate.present.name)
    if rows is None:
        raise candidate.refusal(f"which rows {named} leaves cannot be computed from lengths", _CUT)
    if not rows.size or not np.array_equal(rows.reshape(-1), np.arange(step.total - rows.size, step.total)):
        raise candidate.refusal(f"{named} does not leave the newest rows", _CUT)
    return None if rows.size == step.total else rows.size
