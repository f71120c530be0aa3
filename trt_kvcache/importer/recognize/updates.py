"""Find out how a step writes a cache: run it on numbered rows, and look these up in the present."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.recognize.cut import Region
from trt_kvcache.importer.recognize.records import Cache, FartherError, RecognizeError
from trt_kvcache.importer.recognize.samples import Sample
from trt_kvcache.importer.recognize.step import Array, Feeds, Runner


def read_updates(
    runner: Runner,
    region: Region,
    caches: dict[str, Cache],
    tensors: dict[str, gs.Tensor],
    sample: Sample,
    beyond: Sample | None,
) -> list[Cache]:
    """Run a step of a region, and return its caches with the updates that were seen.

    Args:
        runner: of the region.
        region: writes them.
        caches: guesses, by name of a past.
        tensors: of the graph, by name.
        sample: a step of several tokens after others.
        beyond: a step that begins two rows after the last row of a fixed cache; None: no test for circular caches.

    Raises:
        RecognizeError: a cache has no supported update; the message says what was seen.
        FartherError: the new rows are no single short tensor; a tensor before it may be.
    """
    feeds, first = runner.feeds(sample), 1
    for name in (*region.caches, *region.texts):
        feeds[name] = np.arange(first, first + feeds[name].size, dtype=np.float32).reshape(feeds[name].shape)
        first += feeds[name].size
    outputs = runner.run(feeds)
    found = []
    for past, present in zip(region.caches, region.presents, strict=True):
        try:
            cache, new = _written(caches[past], feeds[past], outputs[present], sample)
        except RecognizeError:
            rows = outputs[present].shape[caches[past].axis]
            spread = [t for t in region.texts if rows in feeds[t].shape]  # new rows, and 0 in all others
            if spread:
                raise FartherError(*spread) from None
            raise
        sources = [t for t in region.texts if np.isin(feeds[t], new).any()]
        if not sources:
            raise RecognizeError(f"'{present}' gets no new rows of '{past}'")
        orders = permutations(range(new.ndim)) if feeds[sources[0]].ndim == new.ndim else ()
        rows = new.shape[cache.axis]  # fewer than new ones, where the cache keeps no more
        turned = ((p, feeds[sources[0]].transpose(p)) for p in orders)
        whole = ((p, laid) for p, laid in turned if laid.shape[cache.axis] == sample.length)
        perm = next((p for p, laid in whole if np.array_equal(_last(laid, cache.axis, rows), new)), None)
        if perm is None or len(sources) > 1:
            raise FartherError(*sources)
        found.append(replace(cache, update=tensors[sources[0]], perm=perm))
    fixed = [c for c in found if not c.growing]
    if fixed and beyond is not None and _wraps(runner, region, fixed[0], beyond):
        found = [c if c.growing else replace(c, circular=True) for c in found]
    return found


def _written(cache: Cache, before: Array, whole: Array, sample: Sample) -> tuple[Cache, Array]:
    """Find the kind of a cache, and its new rows in the cache's layout."""
    length, axis, past = sample.length, cache.axis, cache.past.name
    if cache.growing and not cache.shifted and cache.kept == whole.shape[axis] <= length:
        return cache, whole
    if before.shape[axis] != whole.shape[axis] or cache.kept == whole.shape[axis]:
        old = whole.shape[axis] - length
        same = old <= before.shape[axis] and np.array_equal(_rows(whole, axis, 0, old), _rows(before, axis, -old, None))
        if old < 0 or (old and not same):
            raise RecognizeError(f"'{cache.present.name}' does not hold the rows of '{past}' before the new ones")
        return replace(cache, growing=True), _rows(whole, axis, old, None)
    if before.shape != whole.shape:
        raise RecognizeError(f"'{cache.present.name}' {list(whole.shape)} is not as large as '{past}'")
    axes = sorted(range(1, whole.ndim), key=lambda a: a != axis)
    for a in axes:
        old = whole.shape[a] - length
        if old > 0 and np.array_equal(_rows(whole, a, 0, old), _rows(before, a, length, None)):
            kept = whole.shape[a]
            return replace(cache, axis=a, growing=True, shifted=True, kept=kept), _rows(whole, a, old, None)
    changed = np.argwhere(whole != before)
    if not len(changed):
        raise RecognizeError(f"'{cache.present.name}' comes back as '{past}' went in")
    rows = list(range(sample.past, sample.total))
    for a in axes:
        if rows == sorted({*changed[:, a]}) and len(rows) < whole.shape[a]:
            fixed = replace(cache, axis=a, growing=False, shifted=False, kept=None, circular=False)
            return fixed, np.take(whole, rows, a)
    seen = sorted({*map(int, changed[:, axis])})
    raise RecognizeError(
        f"a step of {length} tokens after {sample.past} changes rows {seen[:9]} of '{past}' {list(whole.shape)}; "
        f"supported are rows {rows[0]} to {rows[-1]} along one axis"
    )


def _wraps(runner: Runner, region: Region, cache: Cache, beyond: Sample) -> bool:
    """True if a step that begins after the last row writes from the first row on."""
    name, axis = str(cache.past.name), cache.axis
    try:
        feeds: Feeds = runner.feeds(beyond)
        whole = runner.run(feeds)[str(cache.present.name)]
    except RecognizeError:
        return False
    if whole.shape != feeds[name].shape:  # written by slices, which grow beyond the last row
        return False
    changed = np.argwhere(whole != feeds[name])[:, axis]
    rows = np.arange(beyond.past, beyond.total) % whole.shape[axis]
    return beyond.past >= whole.shape[axis] and {*changed} == {*rows}


def _last(values: Array, axis: int, count: int) -> Array:
    return _rows(values, axis, max(0, values.shape[axis] - count), None)


def _rows(values: Array, axis: int, start: int, end: int | None) -> Array:
    place = [slice(None)] * values.ndim
    place[axis] = slice(start, end)
    return values[tuple(place)]
