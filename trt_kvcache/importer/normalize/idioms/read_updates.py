"""Cache updates, read by running them: past and new rows get numbers, and present shows where these go.

Present has to be past and new rows joined, or the newest R of these, or the past with the new rows after P rows (modulo
L, if the cache is circular). Only the region of an update runs (`cache_updates`), in a few short steps, with a past
that is cut short if it is long. What the update does at other lengths is for the check to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import consumers, contains, dims, dtype_name, elem_type, is_op
from trt_kvcache.importer.normalize.candidate import FOR_GOOD, Candidate, ExportedUpdate, refusal
from trt_kvcache.importer.normalize.evidence.probe import Array, Blueprint, Shape
from trt_kvcache.importer.normalize.evidence.reach import deciding
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Write
from trt_kvcache.importer.normalize.idioms.update_runs import (
    LARGEST,
    GuessedSteps,
    Perm,
    Run,
    few_or_all,
    has_free_rows,
    order_of,
    run_update,
    typed,
    value_of,
)
from trt_kvcache.importer.normalize.unknown import why_unknown
from trt_kvcache.importer.normalize.views import is_float_cast, trace_back

__all__ = ["check_sizes", "read_updates"]

_STEPS = ((2, 5, 3), (3, 9, 1), (2, 11, 2), (2, 1, 1), (2, 3, 2), (2, 0, 1))  # batch, past, new tokens
_TRIED = 3  # of them
_FAR = 64  # tokens beyond twice the capacity
_FLOAT, _FLOAT16, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
_NARROWER: dict[int | None, tuple[int, ...]] = {_FLOAT: (_FLOAT16, _BFLOAT16), _FLOAT16: (_BFLOAT16,)}
_NEWEST = "cut the cache to a number of its newest rows that is the same in every step, Concat(past, new)[:, :, -R:]"
_GIVE_BACK = "give back what is joined with the past, or Concat(past, new) as a whole"
_LOST = "write with index_copy, index_put or a slice instead of narrow().copy_(), and return what is written"
_ROLLING = "keep rows where they are and write at the position, or at the position modulo the capacity"


def read_updates(candidates: Sequence[Candidate], blueprint: Blueprint, capacity: int) -> tuple[Write | Candidate, ...]:
    """Read what `find_candidates` has found, and leave out what is no update.

    Args:
        candidates: of the model.
        blueprint: the model, with all shapes that are known.
        capacity: tokens per sequence, as far as it is known.

    Returns:
        A `Write` for each that can be done in place, and else a `Candidate` with the reason.
    """
    steps = GuessedSteps(blueprint, candidates)
    updates = {c: r for c in candidates if (r := _Reader(c, steps, capacity).read()) is not None}
    updates = {c: r for c, r in updates.items() if not _is_constant(r, tuple(updates.values()))}
    return tuple(_alone(r, c, tuple(updates)) for c, r in updates.items())


def _alone(read: Write | Candidate, candidate: Candidate, candidates: Sequence[Candidate]) -> Write | Candidate:
    """The same, or the reason why it cannot be kept although it was read."""
    results = [f"'{c.present.name}'" for c in candidates if c.past is candidate.past]
    if len(results) > 1:
        reason, advice = f"it has two results, {' and '.join(results[:2])}", "leave out all of them but one"
    else:
        reason, advice = _other_type(candidate), "convert the model again, caches in the type of its attention"
    return replace(candidate, reason=reason, advice=advice) if reason and isinstance(read, Write) else read


def _other_type(candidate: Candidate) -> str:
    """The reason why a cache cannot be kept in the type that is written; "" if it can.

    Converters leave float32 caches around operators of float16 (``keep_io_types``), and float16 ones before operators
    of bfloat16 (ModelOpt's AutoCast): what such a cache gives back are numbers of the narrower type.
    """
    written = candidate.node.outputs[0]
    past, target, present = map(elem_type, (candidate.past, written, candidate.present))
    if past == target == present or (target in _NARROWER.get(past, ()) and present in (past, target)):
        return ""
    return (
        f"it comes as {dtype_name(candidate.past)} and goes as {dtype_name(candidate.present)} "
        f"('{candidate.present.name}'), and {candidate.node.op} '{candidate.node.name}' writes {dtype_name(written)}"
    )


def _is_constant(candidate: ExportedUpdate, updates: Sequence[ExportedUpdate]) -> bool:
    """True if an unchanged input is no cache to write.

    Keys and values of an encoder come beside caches of another shape; hidden states have three axes and come alone.
    """
    if candidate.idiom != "unchanged":
        return False
    shape = dims(candidate.past) or ()
    written = [dims(c.past) for c in updates if c.idiom != "unchanged"]
    alike = [c for c in updates if c.idiom == "unchanged" and len(c.past.shape) == len(shape)]
    return shape not in written if written else len(shape) == 3 and len(alike) == 1


class _Reader:
    """Reads one update."""

    def __init__(self, candidate: Candidate, steps: GuessedSteps, capacity: int) -> None:
        self._candidate, self._steps, self._capacity = candidate, steps, capacity
        self._sources = deciding(*candidate.where)
        self._is_placed = has_free_rows(candidate) and bool(self._sources.inputs)

    def read(self) -> Write | Candidate | None:
        """The update, or the reason why it cannot be done in place; None: it is none."""
        candidate = self._candidate
        if len(candidate.rows) != 1:
            return self._without_rows()
        reason = f"the new rows in '{candidate.rows[0].name}' do not have one axis for each axis of the cache"
        sizes, others = (Counter(dims(t) or ()) for t in (candidate.past, candidate.whole))
        refused = replace(candidate, reason=reason) if (sizes - others).total() < 2 else None
        for update in candidate.updates:
            runs = list(self._runs(update))
            if not runs:
                continue
            if candidate.reason:
                survives = runs[0].survives
                refused = candidate if survives or (survives is None and not candidate.rows_only) else None
                continue
            refused = None
            for kind in self._kinds(runs[0]):
                axes = range(1, runs[0].past.ndim) if kind.axis is None else [kind.axis]
                orders = () if kind.reason else product(axes, permutations(range(runs[0].past.ndim)))
                for axis, perm in orders:
                    if all(_is_written(kind, run, axis, perm) for run in runs):
                        return self._write(kind, update, runs[0], axis, perm)
                is_for_good = not kind.positions and (kind.shifted or not kind.growing)
                advice = _ROLLING if runs[0].moves else FOR_GOOD if is_for_good else ""
                refused = kind if kind.reason else replace(kind, reason=_describe(kind, runs), advice=advice)
                if not self._sources.inputs and runs[0].survives is False:
                    refused = None
        return refused

    def _without_rows(self) -> Candidate | None:
        """An update that brings nothing new, or too much."""
        candidate, step = self._candidate, self._steps.step(*_STEPS[0])
        shapes = [step.shape(t) for t in (candidate.past, *candidate.rows)]
        if any(shape is None or prod(shape) > LARGEST for shape in shapes):
            return None
        run = run_update(candidate, step, candidate.rows, [shape or () for shape in shapes])
        if run.whole is None or not run.survives:
            return None
        orders = permutations(range(run.past.ndim))
        if any(np.array_equal(run.whole.ravel(), run.past.transpose(order).ravel()) for order in orders):
            reason = f"it comes out as it went in, as '{candidate.present.name}', and the exporter has lost the write"
            return replace(candidate, idiom="unchanged", reason=reason, advice=_LOST)
        return replace(candidate, advice=_ROLLING)

    def _runs(self, update: gs.Tensor) -> Iterator[Run]:
        """The update in the first steps for which its cache has room."""
        tried = 0
        for step in (self._steps.step(*sizes) for sizes in _STEPS):
            past, new = step.shape(self._candidate.past), step.shape(update)
            if past is None or new is None or len(past) != len(new) or tried >= (_TRIED if step.past else 1):
                return
            axis = _differing_axis(past, new) if self._is_placed else None
            if axis is not None and step.past + prod(new) * past[axis] // prod(past) > past[axis]:
                continue
            runs = (run_update(self._candidate, step, [update], sizes) for sizes in few_or_all(past, new, axis))
            run = None
            for run in runs:
                if run.whole is not None:
                    break
            if run is not None:
                tried += 1
                yield run

    def _kinds(self, run: Run) -> Iterator[Candidate]:
        """The updates that it may be by the sizes of past and present."""
        candidate, past = self._candidate, run.past.shape
        whole = run.step.shape(candidate.present) if run.whole is None else run.whole.shape
        if whole is None:
            yield candidate
        elif whole == past and has_free_rows(candidate):
            dependent = self._sources.data_dependent() if self._sources.inputs else None
            reason = f"its positions depend on data: {dependent}" if dependent else ""
            yield replace(candidate, positions=() if reason else self._sources.positions, reason=reason)
            if not self._sources.inputs:
                yield replace(candidate, idiom="shift", growing=True, shifted=True)
        elif len(whole) == len(past):
            axis = _differing_axis(past, run.new.shape if whole == past else whole)
            if axis is None or (candidate.rows_only and prod(whole) != run.past.size + run.new.size):
                return
            rows = (dims(candidate.past) or ())[axis]
            kind = replace(candidate, axis=axis, growing=True, fixed_rows=rows if isinstance(rows, int) else None)
            if kind.fixed_rows is not None and not kind.rows_only:
                reason = f"its axis {axis} has a fixed size, so that a step's result is no input of the next"
                kind = replace(kind, fixed_rows=None, reason=reason, advice=_ROLLING)
            yield kind if kind.reason or kind.rows_only else self._newest(kind, whole[axis] - past[axis])

    def _newest(self, kind: Candidate, added: int) -> Candidate:
        """A growing cache with the number of rows that it keeps, from the size that it has after a long past."""
        step, rows, axis = self._steps.step(1, 2 * self._capacity + _FAR, _STEPS[0][2]), kind.rows[0], kind.axis or 0
        past, new = step.shape(kind.past), step.shape(rows)
        if past is None or new is None:
            return kind
        left = step.probe.with_values({rows.name: typed(np.zeros(new), rows)}).shape(kind.present.name)
        if left is not None and left[axis] < past[axis]:
            return replace(kind, idiom=f"{kind.idiom}, Slice", kept=left[axis])
        if left is None and added * prod(past) != prod(new) * past[axis]:
            return replace(kind, reason="which rows are left cannot be computed from lengths", advice=_NEWEST)
        return kind

    def _write(self, kind: Candidate, update: gs.Tensor, run: Run, axis: int, perm: Perm) -> Write:
        whole = _wanted(replace(kind, kept=None), run, axis, perm)
        assert whole is not None
        front = whole.take(np.arange(run.step.past + run.new.shape[perm[axis]]), axis, mode="clip")
        plain = tuple(range(whole.ndim))
        seen = list(_seen(kind, run))
        region = [(t, order_of(v, whole)) for t, v in seen if any(contains(n.outputs, t) for n in kind.region)]
        return Write(
            kind.idiom,
            kind.past,
            kind.present,
            update,
            kind.node.name,
            axis=axis,
            growing=kind.growing,
            positions=kind.positions,
            kept=run.past.shape[axis] if kind.shifted else kind.kept,
            fixed_rows=kind.fixed_rows,
            shifted=kind.shifted,
            perm=None if perm == plain else perm,
            circular=kind.shifted or (not kind.growing and self._is_circular(kind, update, axis, perm, run)),
            aliases=tuple(t for t, v in seen if np.array_equal(v, whole) and t is not kind.present),
            turned=tuple((t, order) for t, order in region if order not in (None, plain)),
            fronts=() if kind.growing else tuple(t for t, v in seen if np.array_equal(v, front)),
            new_rows=self._new_rows(update, perm, run) if kind.rows_only else None,
        )

    def _is_circular(self, kind: Candidate, update: gs.Tensor, axis: int, perm: Perm, run: Run) -> bool:
        """True if rows beyond the capacity go to the first ones: a linear cache has nothing to write there."""
        named = (dims(kind.past) or ())[axis]
        rows = named if isinstance(named, int) else run.past.shape[axis]
        for step in (self._steps.step(2, rows + 3, 1), self._steps.step(1, 3 * rows, 2)):
            past, new = list(run.past.shape), list(run.new.shape)
            sizes = step.shape(update) or new
            past[0] = new[perm[0]] = step.batch
            new[perm[axis]] = sizes[perm[axis]]
            beyond = run_update(kind, step, [update], [tuple(past), tuple(new)])
            if not any(_is_written(kind, beyond, axis, perm, ring) for ring in {rows, past[axis]}):
                return False
        return True

    def _new_rows(self, update: gs.Tensor, perm: Perm, run: Run) -> Perm:
        """The axes of the cache in the order in which they lie in an output of new rows, which may merge some."""
        candidate = self._candidate
        source = trace_back(candidate.rows[0])
        shape = run.step.shape(source) or ()
        probe = run.step.probe.with_values({source.name: np.arange(prod(shape)).reshape(shape)})
        numbers, rows = probe.value(candidate.present.name), probe.value(update.name)
        if numbers is not None and rows is not None:
            for order in permutations(perm):
                if np.array_equal(numbers.reshape(-1), rows.transpose(order).reshape(-1)):
                    return tuple(perm.index(axis) for axis in order)
        why = f"the output '{candidate.present.name}' has other numbers than the new rows '{update.name}'"
        raise refusal(candidate, why, _GIVE_BACK)


def _differing_axis(one: Shape, other: Shape) -> int | None:
    """The axis of a shape whose size alone another one does not have, in whatever order; None: nothing says it."""
    places = [axis for axis, sizes in enumerate(zip(one, other, strict=True)) if len({*sizes}) > 1]
    sizes = list((Counter(one) - Counter(other)).elements())
    if len(places) != 1 and len(sizes) == 1 and one.count(sizes[0]) == 1:
        places = [one.index(sizes[0])]
    return places[0] if len(places) == 1 else None


def _is_written(kind: Candidate, run: Run, axis: int, perm: Perm, ring: int = 0) -> bool:
    wanted = _wanted(kind, run, axis, perm, ring)
    return wanted is not None and run.whole is not None and np.array_equal(run.whole, wanted)


def _wanted(kind: Candidate, run: Run, axis: int, perm: Perm, ring: int = 0) -> Array | None:
    """The present that a right update makes; None if the new rows do not fit.

    Args:
        kind: the update.
        run: of it.
        axis: the sequence axis.
        perm: of the new rows.
        ring: the length of a circular cache; 0: it is linear.
    """
    rows, sizes = run.new.transpose(perm), run.past.shape
    if rows.shape != (*sizes[:axis], rows.shape[axis], *sizes[axis + 1 :]):
        return None
    if kind.growing:
        whole = np.concatenate([run.past, rows], axis)
        count = sizes[axis] if kind.shifted else kind.kept or whole.shape[axis]
        return whole.take(np.arange(max(0, whole.shape[axis] - count), whole.shape[axis]), axis)
    places = run.step.past + np.arange(rows.shape[axis])
    places = places % ring if ring else places
    if places.max() >= sizes[axis]:
        return None
    whole = run.past.copy()
    np.moveaxis(whole, axis, 0)[places] = np.moveaxis(rows, axis, 0)
    return whole


def _seen(kind: Candidate, run: Run) -> Iterator[tuple[gs.Tensor, Array]]:
    """Tensors of the region, and views of them, that attention may read as the cache, with their numbers."""
    tensors = [t for node in kind.region for t in node.outputs]
    seen = {t.name for t in tensors}
    for tensor in tensors:
        value = value_of(run.probe, tensor)
        if value is not None and elem_type(tensor) == elem_type(kind.rows[0]):
            yield tensor, value
        for node in consumers(tensor):
            if node.outputs[0].name not in seen and (is_op(node, "Identity", "Transpose") or is_float_cast(node)):
                seen.add(node.outputs[0].name)
                tensors.append(node.outputs[0])


def check_sizes(writes: Sequence[Write], samples: Samples) -> None:
    """Refuse updates whose sizes are not those of a step of the model.

    Raises:
        UnsupportedModelError: naming them.
    """
    for write, step in product(writes, [s for s in samples.plain if s.past][:2]):
        past, new = (step.probe.shape(t.name) for t in (write.past, write.update))
        if past is None or past[0] != step.batch:
            raise refusal(write, f"its first axis, '{write.past.shape[0]}', is not the batch")
        if new is None:
            raise refusal(write, *why_unknown(write.update, step))
        if new[write.axis if write.perm is None else write.perm[write.axis]] != step.length:
            rows = f"{step.length} rows of {list(past)}"
            raise refusal(write, f"'{write.update.name}' {list(new)} is not as large as {rows}")


def _other_order(run: Run, axis: int) -> list[int] | None:
    """The order in which a present has the axes of a past, whose rows come first in it; None: it is another change."""
    if (whole := run.whole) is None or whole.ndim != run.past.ndim:
        return None
    for order in permutations(range(run.past.ndim)):
        turned = whole.transpose(np.argsort(order))
        rows = turned.take(np.arange(run.past.shape[axis]), axis, mode="clip")
        if order != tuple(range(run.past.ndim)) and np.array_equal(rows, run.past):
            return list(order)
    return None


def _describe(kind: Candidate, runs: Sequence[Run]) -> str:
    """An update that does not write S rows after P rows, in words."""
    update, present = kind.rows[0].name, kind.present.name
    run = next((run for run in runs if run.whole is None), runs[0])
    axis = kind.axis if kind.axis is not None else _differing_axis(run.past.shape, run.new.shape) or 0
    whole, length = run.whole, run.new.size // prod(d for i, d in enumerate(run.past.shape) if i != axis)
    if whole is None:
        when = f"in a step of {length} tokens after {run.step.past}"
        return f"which rows it writes {when} cannot be computed from positions and lengths"
    if not run.survives:
        return f"'{present}' has numbers that are neither those of past nor those of new rows"
    if order := _other_order(run, axis):
        return f"'{present}' {list(whole.shape)} has the axes of the past {list(run.past.shape)} in the order {order}"
    places = ", ".join(map(str, np.unique(np.isin(whole, run.new).nonzero()[axis])[:8]))
    rows = f"rows {places}" if places else "no rows"
    count = whole.shape[axis] - run.past.shape[axis] or length
    written = whole.take(np.arange(run.step.past, run.step.past + count), axis, mode="clip")
    if count == length and np.array_equal(np.sort(written, None), np.sort(run.new, None)):
        rows = f"{rows}, in another order,"
    return (
        f"it writes {rows} of axis {axis} when {run.step.past} rows hold tokens and {length} are new, and makes "
        f"'{present}' {list(whole.shape)}, which is not the past {list(run.past.shape)} with all of '{update}' there"
    )
