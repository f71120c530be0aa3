"""Runs a region (part of a model with caches) in one step. The form of a cache says which row belongs to which token.

    growing    past [.., P, ..]: token t in row t; if the cache keeps only K rows, they are the newest K tokens
    fixed      past [.., L, ..]: token t in row t; if the cache is circular, in row t mod L
    shifted    past [.., L, ..]: the newest token in the last row

`read_updates` finds how a step writes a cache: it gives rows unique numbers, runs the step, and looks for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.cpu import RunError, UnfusedSession
from trt_kvcache.importer.cache_plan import OriginalRole
from trt_kvcache.importer.interface.exported_interface import Interface
from trt_kvcache.importer.protos import INTEGERS, Array
from trt_kvcache.importer.recognize.records import Cache, FartherError, RecognizeError, UnknownError
from trt_kvcache.importer.recognize.regions import Region
from trt_kvcache.importer.recognize.sample_steps import Sample
from trt_kvcache.importer.steps.original_interface import Feeds
from trt_kvcache.importer.steps.runnable import open_types

_HIDES = -30000.0  # hides a key in an additive mask
_MISFIT = re.compile(
    r"running (\w+) node\. Name:'([^']*)'.*Attempting to broadcast an axis by a dimension other than 1\. (\d+) by (\d+)"
)
"""ONNX Runtime's message about sizes that cannot broadcast (1.31 and 1.32)."""


class Runner:
    """Runs a region, the part of a model that writes caches or attends to them, in float32.

    `caches` has all caches, by name of the past; `rng` makes all random numbers. Raises `RecognizeError` if ONNX
    Runtime cannot load the region.
    """

    def __init__(self, region: Region, caches: Mapping[str, Cache], interface: Interface) -> None:
        self._region, self._caches, self._interface = region, caches, interface
        try:
            self._session = UnfusedSession(open_types(region.model, wide=True))
        except RunError as error:
            raise RecognizeError(
                f"ONNX Runtime does not load the part of the model that computes '{self._name}': {error}"
            ) from None
        self._names = [v.name for v in region.model.graph.input]
        self.rng = np.random.default_rng(0)

    @property
    def _name(self) -> str:
        return self._region.result or self._region.presents[0]

    @property
    def masks(self) -> list[str]:
        """Return the names of the mask inputs that this part of the model reads."""
        inputs = self._interface.inputs
        return [n for n in self._region.inputs if inputs[n].role is OriginalRole.MASK]

    def feeds(self, sample: Sample) -> Feeds:
        """Make the inputs of a step: from `sample` if known there, else random, with 0 in rows without a token."""
        feeds: Feeds = {}
        for name in self._names:
            value, shape = sample.probe.value(name), sample.probe.shape(name)
            if value is None and shape is None:
                raise RecognizeError(f"cannot tell the shape of '{name}' in a step")
            if value is None and name in self._region.inputs and sample.probe.elem_type(name) in INTEGERS:
                raise UnknownError(name)
            feeds[name] = self.rng.standard_normal(shape).astype(np.float32) if value is None else value
            if name in self._caches:
                feeds[name] = self.past(self._caches[name], sample, self.rows(self._caches[name], sample, feeds[name]))
        for name in self.masks:
            shown = self.shown(name, sample)
            feeds[name] = shown if feeds[name].dtype == bool else np.where(shown, 0, _HIDES).astype(feeds[name].dtype)
        return feeds

    def run(self, feeds: Feeds) -> Feeds:
        """Run this part of the model, and return all outputs in float64. Raises `RecognizeError` if it does not run."""
        try:
            return {name: value.astype(np.float64) for name, value in self._session.run(feeds).items()}
        except RunError as error:
            if misfit := _MISFIT.search(str(error)):
                op, name, one, other = misfit.groups()
                raise RecognizeError(
                    f"{op} '{name}' gets sizes {one} and {other}, which do not fit each other, in a step of several "
                    "tokens after earlier tokens; if one of them is a mask, export it so that it covers all tokens of "
                    "the text"
                ) from None
            raise RecognizeError(
                f"ONNX Runtime cannot run the part of the model that computes '{self._name}': {error}"
            ) from None

    def held(self, cache: Cache, sample: Sample) -> int:
        """Return the number of tokens in the past of a cache before a step."""
        if cache.growing and not cache.shifted:
            return sample.rows_in_cache(cache.window_rows)
        return min(sample.past, self._size(cache, sample))

    def rows(self, cache: Cache, sample: Sample, past: Array) -> Array:
        """Return the rows of a past cache that belong to tokens, the oldest token first."""
        return np.take(past, self._places(cache, sample), cache.axis)

    def past(self, cache: Cache, sample: Sample, rows: Array) -> Array:
        """Return a past cache with `rows` at the positions of their tokens, and 0 in all other rows."""
        shape = list(rows.shape)
        shape[cache.axis] = self._size(cache, sample)
        past = np.zeros(shape, np.float32)
        place: list[Any] = [slice(None)] * past.ndim
        place[cache.axis] = self._places(cache, sample)
        past[tuple(place)] = rows
        return past

    def columns(self, cache: Cache, sample: Sample, width: int) -> Array:
        """Return which columns of a mask with `width` columns belong to tokens, the oldest token first."""
        keys = self.held(cache, sample) + sample.length
        if width == keys:
            return np.arange(keys)
        if width < keys:
            raise RecognizeError(f"a mask has {width} columns, but there are {keys} keys")
        return width - keys + np.arange(keys) if cache.shifted else np.arange(sample.total - keys, sample.total) % width

    def shown(self, mask: str, sample: Sample) -> Array:
        """Return a random bool value for a mask input. It shows some tokens, and hides all rows without a token."""
        shown = np.zeros_like(sample.own[mask])
        caches = [self._caches[n] for n in self._region.caches]
        if not caches:
            return sample.own[mask]
        columns = self.columns(caches[0], sample, shown.shape[-1])
        shown[..., columns] = sample.own[mask][..., columns]
        shown[..., columns[1:2]] = False
        shown[..., columns[:1]] = True
        return shown

    def _size(self, cache: Cache, sample: Sample) -> int:
        shape = sample.probe.shape(cache.past.name)
        if shape is None:
            raise RecognizeError(f"cannot tell the shape of '{cache.past.name}' in a step")
        return shape[cache.axis]

    def _places(self, cache: Cache, sample: Sample) -> Array:
        held, size = self.held(cache, sample), self._size(cache, sample)
        if cache.shifted:
            return np.arange(size - held, size)
        return np.arange(held) if cache.growing else np.arange(sample.past - held, sample.past) % size


def read_updates(
    runner: Runner,
    region: Region,
    caches: dict[str, Cache],
    tensors: dict[str, gs.Tensor],
    sample: Sample,
    beyond: Sample | None,
) -> list[Cache]:
    """Run one step of a region (part of the model), and return its caches with the tensors of their new rows.

    `sample` is a step of several tokens after earlier ones; `beyond` is a step that starts two tokens beyond the end of
    a fixed cache (None: do not test for circular caches). Raises `RecognizeError` if a cache's update is unsupported,
    and `FartherError` if the new rows are in several tensors (a larger part of the model may have them in one).
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
            # these tensors have all rows of the cache; only the new rows are not 0
            spread = [t for t in region.texts if rows in feeds[t].shape]
            if spread:
                raise FartherError(*spread) from None
            raise
        sources = [t for t in region.texts if np.isin(feeds[t], new).any()]
        if not sources:
            raise RecognizeError(f"'{present}' should hold new rows of the cache '{past}', but holds none")
        orders = permutations(range(new.ndim)) if feeds[sources[0]].ndim == new.ndim else ()
        rows = new.shape[cache.axis]  # fewer than S if the cache keeps fewer rows
        turned = ((p, feeds[sources[0]].transpose(p)) for p in orders)
        whole = ((p, laid) for p, laid in turned if laid.shape[cache.axis] == sample.length)
        first_new = sample.length - rows
        perm = next((p for p, laid in whole if np.array_equal(_rows(laid, cache.axis, first_new, None), new)), None)
        if perm is None or len(sources) > 1:
            raise FartherError(*sources)
        found.append(replace(cache, update=tensors[sources[0]], perm=perm))
    fixed = [c for c in found if not c.growing]
    if fixed and beyond is not None and _wraps(runner, region, fixed[0], beyond):
        found = [c if c.growing else replace(c, circular=True) for c in found]
    return found


def _written(cache: Cache, before: Array, whole: Array, sample: Sample) -> tuple[Cache, Array]:
    """Find the rows that a step wrote into a present (`whole`). Return the cache, corrected by them, and the rows."""
    length, axis, past = sample.length, cache.axis, cache.past.name
    if cache.growing and not cache.shifted and cache.window_rows == whole.shape[axis] <= length:
        return cache, whole
    if before.shape[axis] != whole.shape[axis] or cache.window_rows == whole.shape[axis]:
        old = whole.shape[axis] - length
        same = old <= before.shape[axis] and np.array_equal(_rows(whole, axis, 0, old), _rows(before, axis, -old, None))
        if old < 0 or (old and not same):
            raise RecognizeError(f"'{cache.present.name}' does not hold the rows of '{past}' followed by the new rows")
        return replace(cache, growing=True), _rows(whole, axis, old, None)
    if before.shape != whole.shape:
        raise RecognizeError(
            f"'{cache.present.name}' {list(whole.shape)} and '{past}' {list(before.shape)} must have the same shape"
        )
    axes = sorted(range(1, whole.ndim), key=lambda a: a != axis)
    for a in axes:
        old = whole.shape[a] - length
        if old > 0 and np.array_equal(_rows(whole, a, 0, old), _rows(before, a, length, None)):
            kept = whole.shape[a]
            return replace(cache, axis=a, growing=True, shifted=True, window_rows=kept), _rows(whole, a, old, None)
    changed = np.argwhere(whole != before)
    if not len(changed):
        raise RecognizeError(f"'{cache.present.name}' is the same as '{past}': the step writes no new rows")
    rows = list(range(sample.past, sample.total))
    for a in axes:
        if rows == sorted({*changed[:, a]}) and len(rows) < whole.shape[a]:
            fixed = replace(cache, axis=a, growing=False, shifted=False, window_rows=None, circular=False)
            return fixed, np.take(whole, rows, a)
    seen = sorted({*map(int, changed[:, axis])})
    raise RecognizeError(
        f"a step of {length} tokens after {sample.past} tokens changes rows {seen[:9]} of '{past}' "
        f"{list(whole.shape)}; it must change rows {rows[0]} to {rows[-1]} along one axis"
    )


def _wraps(runner: Runner, region: Region, cache: Cache, beyond: Sample) -> bool:
    """True if an attention treats a cache as circular: after the last row, a step continues at the first row."""
    name, axis = str(cache.past.name), cache.axis
    try:
        feeds = runner.feeds(beyond)
        whole = runner.run(feeds)[str(cache.present.name)]
    except RecognizeError:
        return False
    if whole.shape != feeds[name].shape:  # the model appends slices, so the cache became longer
        return False
    changed = np.argwhere(whole != feeds[name])[:, axis]
    rows = np.arange(beyond.past, beyond.total) % whole.shape[axis]
    return beyond.past >= whole.shape[axis] and {*changed} == {*rows}


def _rows(values: Array, axis: int, start: int, end: int | None) -> Array:
    place = [slice(None)] * values.ndim
    place[axis] = slice(start, end)
    return values[tuple(place)]
