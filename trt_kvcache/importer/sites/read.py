"""Describe an attention by running its region in ONNX Runtime on chosen numbers.

    which past belongs to which new rows     numbered rows, looked up in the presents
    values, keys                             the result is linear in values
    heads, layouts                           numbered values with one key; weights that are the same for a whole head
    weights of keys                          values of 1 in one row
    keys that a query sees                   weights where queries and keys are 0
    scale, softcap                           weights against products of queries and keys

Everything here is a guess that the check decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.normalize.evidence.samples import Sample
from trt_kvcache.importer.protos import INTEGERS
from trt_kvcache.importer.sites.cut import FartherError, MisfitError, Region, SiteError, UnknownError
from trt_kvcache.importer.sites.layout import ATTENTION, Layout, brought, layouts
from trt_kvcache.importer.steps.runnable import open_types
from trt_kvcache.importer.steps.sessions import RunError, UnfusedSession

Array = npt.NDArray[Any]
Feeds = dict[str, Array]
Step = tuple[float, Array, Array]
"""A factor of the queries, the scores that weights then show, ``[b, n, g, s, keys]``, and True where they show one."""
_BATCHES, _PAST, _NEW = (5, 7, 11), 4, 7
_SMALL = 0.3  # times the queries: most softcaps then change little
_LARGE = 12.0  # scores that a softcap changes
_FITS = 0.97  # cosine of the weights seen and those expected
_NOTHING = 1e-9  # the weight of a hidden key
_CLOSE = 1e-3
_ITERATIONS, _STEP = 12, 1e-4
_SOME = 4  # of so many keys, the weights of one say how heads lie
_LONGEST = 1 << 22  # numbers of a cache in a long step


@dataclass(frozen=True, eq=False)
class CacheSeen:
    """A cache of an attention.

    Attributes:
        past, present: names.
        rows: the short tensor with its new rows.
        perm: brings `rows` to the order of axes of the cache.
        axis: of its rows; its other axes are batch, heads and numbers of a head, the last two in one or two axes.
    """

    past: str
    present: str
    rows: str
    perm: tuple[int, ...]
    axis: int


@dataclass(frozen=True, eq=False)
class AttentionSeen:
    """An attention as it was seen.

    Attributes:
        result, query: short tensors.
        key, value: its caches.
        result_layout, query_layout: of these.
        sizes: of heads of keys (n), queries for each (g), and numbers of a head of queries (d) and of values (v).
        scale, softcap: of scores; 0: no softcap.
        causal, window: see `Visibility`.
        wide: keys, scores or weights are float32.
    """

    result: str
    query: str
    key: CacheSeen
    value: CacheSeen
    result_layout: Layout
    query_layout: Layout
    sizes: Mapping[str, int]
    scale: float
    softcap: float
    causal: bool
    window: int | None
    wide: bool

    def renamed(self, names: Mapping[str, str]) -> AttentionSeen:
        """The same of other tensors."""
        key, value = (
            replace(c, past=names[c.past], present=names[c.present], rows=names[c.rows]) for c in (self.key, self.value)
        )
        return replace(self, result=names[self.result], query=names[self.query], key=key, value=value)


class Reader:
    """Runs one region.

    Args:
        region: what runs.
        step: makes a step of batch, past and new tokens.
        axes: of the rows of each cache.
        capacity: the most tokens.
    """

    def __init__(
        self, region: Region, step: Callable[[int, int, int], Sample], axes: Mapping[str, int], capacity: int
    ) -> None:
        self._region, self._step, self._axes, self._capacity = region, step, axes, capacity
        try:
            self._session = UnfusedSession(open_types(region.model, wide=True))
        except RunError as error:
            raise SiteError(f"its region does not load: {error}") from None
        self._rng = np.random.default_rng(0)
        one = step(1, 1, 1).probe
        taken = {d for name in region.texts for d in one.shape(name) or ()}
        batch = next((b for b in _BATCHES if not any(d % b == 0 for d in taken)), _BATCHES[-1])
        past = min(_PAST, max(0, capacity - 2))
        self._sample = step(batch, past, max(1, min(_NEW, capacity - past)))
        self._batch, self._length = self._sample.batch, self._sample.length

    def read(self) -> AttentionSeen:
        """Describe the attention.

        Raises:
            SiteError: in words what was seen instead.
            FartherError: queries or new rows are no single short tensors, but may be some before them.
        """
        region = self._region
        caches = self._moved()
        rows = {c.rows for c in caches}
        queries = [t for t in region.texts if t not in rows]
        if len(caches) != 2:
            raise SiteError(f"the attention reads {len(caches)} caches, and not one of keys and one of values")
        if len(queries) != 1:
            raise FartherError(*queries) if queries else SiteError("no queries go into the attention")
        self._query = queries[0]
        self._key, self._value = self._roles(caches)
        self._sizes, self._results = self._layout()
        base = self._weights(self._still(self._feeds(self._sample)), self._sample)
        causal, window = self._visible(base)
        size, query, scale, softcap = self._scores(base)
        return AttentionSeen(
            region.result, self._query, self._key, self._value, self._results, query,
            {**self._sizes, "d": size, "v": self._sizes["d"]}, scale, softcap, causal, window, region.wide,
        )  # fmt: skip

    def _feeds(self, sample: Sample) -> Feeds:
        """Random numbers for a step, and what lengths and positions say."""
        feeds: Feeds = {}
        for name in (v.name for v in self._region.model.graph.input):
            value, shape = sample.probe.value(name), sample.probe.shape(name)
            if value is None and shape is None:
                raise SiteError(f"nothing says how large '{name}' is in a step")
            if value is None and name in self._region.inputs and sample.probe.elem_type(name) in INTEGERS:
                raise UnknownError(name)
            feeds[name] = self._rng.standard_normal(shape).astype(np.float32) if value is None else value
        return feeds

    def _run(self, feeds: Feeds) -> Feeds:
        """All outputs in float64."""
        try:
            return {name: value.astype(np.float64) for name, value in self._session.run(feeds).items()}
        except RunError as error:
            raise MisfitError(f"its region does not run: {error}") from None

    def _moved(self) -> list[CacheSeen]:
        """Each cache with its new rows, and how these lie."""
        feeds, past = self._feeds(self._sample), self._sample.past
        first = 1
        for name in (*self._region.caches, *self._region.texts):
            size = feeds[name].size
            feeds[name] = np.arange(first, first + size, dtype=np.float32).reshape(feeds[name].shape)
            first += size
        outputs, caches = self._run(feeds), []
        for present in self._region.presents:
            whole = outputs[present]
            pasts = (c for c in self._region.caches if feeds[c].ndim == whole.ndim and np.isin(feeds[c], whole).all())
            if (cache := next(pasts, None)) is None:
                raise SiteError(f"'{present}' does not hold all rows of a past")
            axis = self._axes[cache]
            before, after = np.split(whole, [past], axis)
            if not np.array_equal(before, feeds[cache]):
                raise SiteError(f"'{present}' does not begin with the rows of '{cache}'")
            sources = [t for t in self._region.texts if np.isin(feeds[t], after).any()]
            if not sources:
                raise SiteError(f"'{present}' ends with no new rows of '{cache}'")
            orders = permutations(range(whole.ndim)) if feeds[sources[0]].ndim == whole.ndim else ()
            perm = next((p for p in orders if np.array_equal(feeds[sources[0]].transpose(p), after)), None)
            if perm is None:
                raise FartherError(*sources)
            caches.append(CacheSeen(cache, present, sources[0], perm, axis))
        return caches

    def _roles(self, caches: list[CacheSeen]) -> tuple[CacheSeen, CacheSeen]:
        """The caches of keys and of values."""
        feeds, name = self._feeds(self._sample), self._region.result
        plain = self._run(feeds)[name]
        twice = [self._run(feeds | {n: 2 * feeds[n] for n in (c.past, c.rows)})[name] for c in caches]
        linear = [bool(np.abs(result - 2 * plain).max() < _CLOSE * np.abs(plain).max()) for result in twice]
        if sum(linear) != 1:
            shown = sorted(c.past for c in caches)
            raise SiteError(f"the result is linear in {sum(linear)} of the caches {shown}, and not in one")
        return caches[linear.index(False)], caches[linear.index(True)]

    def _filled(self, feeds: Feeds, cache: CacheSeen, rows: Array) -> Feeds:
        """Feeds with these rows, in the layout of the cache, in past and new rows; they broadcast."""
        past, new = feeds[cache.past], feeds[cache.rows].transpose(cache.perm)
        whole = np.broadcast_to(rows, np.concatenate([past, new], cache.axis).shape).astype(np.float32)
        before, after = np.split(whole, [past.shape[cache.axis]], cache.axis)
        return {**feeds, cache.past: before, cache.rows: after.transpose(np.argsort(cache.perm))}

    def _still(self, feeds: Feeds) -> Feeds:
        """Feeds with queries and keys of 0."""
        return self._filled(feeds | {self._query: 0 * feeds[self._query]}, self._key, np.zeros(1))

    def _shares(self, feeds: Feeds, keys: range) -> Array:
        """The weight of each of these keys in each number of the result, keys last."""
        value, columns = self._value, []
        total = feeds[value.past].shape[value.axis] + feeds[value.rows].transpose(value.perm).shape[value.axis]
        for place in keys:
            hot = (np.arange(total) == place).reshape([-1 if a == value.axis else 1 for a in range(len(value.perm))])
            columns.append(self._run(self._filled(feeds, value, hot))[self._region.result])
        return np.stack(columns, -1)

    def _weights(self, feeds: Feeds, sample: Sample) -> Array:
        """The weights ``[b, n, g, s, keys]``."""
        sizes = self._sizes | {"s": sample.length}
        return _arranged(self._shares(feeds, range(sample.total)), self._results, sizes)[..., 0, :]

    def _layout(self) -> tuple[dict[str, int], Layout]:
        """Sizes of heads, and the layout of results: from numbered values and one key."""
        value, batch = self._value, self._batch
        feeds = self._still(self._feeds(self._step(batch, 0, 1)))
        shape = feeds[value.rows].transpose(value.perm).shape
        numbers = np.arange(1, prod(shape) + 1).reshape(shape)
        result = self._run(self._filled(feeds, value, numbers))[self._region.result]
        shares = self._shares(self._feeds(self._sample), range(0, self._sample.total, _SOME))
        width = numbers.size // batch
        groups = prod(shares.shape[:-1]) // (batch * self._length * width)
        heads = (shape[2 if value.axis == 1 else 1],) if len(shape) == 4 else range(1, width + 1)
        for n in (n for n in heads if width % n == 0):
            sizes = {"b": batch, "n": n, "g": groups, "s": self._length, "d": width // n}
            wanted = numbers.reshape(batch, n, 1, 1, width // n)
            for layout in layouts(shares.shape[:-1], sizes):
                rows = brought(result, layout, sizes | {"s": 1}, ATTENTION)
                uneven = np.ptp(_arranged(shares, layout, sizes), axis=4).max()  # the largest heads come first
                if uneven < 1e-5 * shares.max() and np.abs(rows - wanted).max() < _CLOSE:
                    return sizes, layout
        raise SiteError("with one key, the result is no row of values, or its heads lie in no order that is known")

    def _scores(self, base: Array) -> tuple[int, Layout, float, float]:
        """Size of heads, layout of queries, scale and softcap: what fits the weights of small and of large scores.

        `base` are the weights where queries and keys are 0.
        """
        sample, key, query = self._sample, self._key, self._query
        feeds = self._feeds(sample)

        def scores(factor: float) -> Step:
            weights = self._weights(feeds | {query: feeds[query] * np.float32(factor)}, sample)
            seen = np.minimum(base, weights) > _NOTHING
            logs = (np.log(np.where(seen, w, 1)) for w in (weights, base))
            return factor, _level(next(logs) - next(logs), seen), seen

        few = scores(_SMALL)
        whole = np.concatenate([feeds[key.past], feeds[key.rows].transpose(key.perm)], key.axis)
        size, left = divmod(whole.size, self._batch * self._sizes["n"] * sample.total)
        if left:
            raise SiteError(f"'{key.past}' has not as many heads as '{self._value.past}', which has {self._sizes['n']}")
        keys = np.moveaxis(whole, key.axis, -1).reshape(self._batch, -1, size, sample.total)
        sizes = self._sizes | {"d": size}
        fits = []
        for layout in layouts(feeds[query].shape, sizes):
            queries = brought(feeds[query], layout, sizes, ATTENTION)
            products = np.einsum("bngsd,bndt->bngst", queries, keys, dtype=np.float64)
            level = _level(products, few[2])
            norm = np.sqrt((level * level).sum() * (few[1] * few[1]).sum())
            fits.append((abs((level * few[1]).sum()) / (norm or 1.0), layout, products))
        fit, layout, products = max(fits, key=lambda f: f[0], default=(0.0, (), base))
        if fit < _FITS:
            raise SiteError(
                f"the weights of keys are no softmax of products of '{query}' and '{key.past}' (closest fit {fit:.3f}) "
                f"in a step of {sample.length} tokens"
            )
        scale = _scaled(products, few)
        many = scores(_LARGE / (np.abs(products * scale).max() or 1.0))
        return size, layout, *_fitted(products, (few, many), scale, size)

    def _visible(self, base: Array) -> tuple[bool, int | None]:
        """True for causal attention, and the window; `base` are the weights where queries and keys are 0."""
        sample = self._sample
        seen = base > _NOTHING
        mask = seen[0, 0, 0]
        if not (seen == mask).all():
            raise SiteError("heads or sequences see different keys where all queries and keys are 0")
        if np.abs(base * seen.sum(-1, keepdims=True) - 1)[seen].max(initial=0) > _CLOSE:
            raise SiteError("keys that are 0 have different weights: a bias by position, or sinks")
        window = self._window()
        keys, own = np.arange(sample.total), sample.past + np.arange(sample.length)[:, None]
        within = keys > own - (window or np.inf)
        for causal, wanted in ((False, within), (True, within & (keys <= own))):
            if np.array_equal(mask, wanted) and (self._length > 1 or causal):
                return causal, window
        query_place, key_place = (int(i) for i in np.argwhere(mask != wanted)[0])
        gives = "gives weight to" if mask[query_place, key_place] else "gives no weight to"
        raise SiteError(f"at {sample.past} tokens, query {query_place} {gives} key {key_place}")

    def _window(self) -> int | None:
        """The keys that a query sees after a past that is longer than any number in the region, if it sees not all."""
        fits = [n for n in self._region.integers if n < self._capacity - 1]
        width = self._sizes["n"] * self._sizes["d"]
        sample = self._step(self._batch or 1, min(self._capacity - 1, max(fits, default=0) + 2, _LONGEST // width), 1)
        feeds, total = self._still(self._feeds(sample)), sample.total
        for cache in (self._key, self._value):
            if (rows := self._run(feeds)[cache.present].shape[cache.axis]) != total:
                raise SiteError(f"'{cache.present}' has {rows} rows after {total} tokens")
        share = self._shares(feeds, range(total - 1, total)).max()
        seen = round(1 / share) if share > 0 else 0
        return seen if 0 < seen < total else None


def _arranged(rows: Array, results: Layout, sizes: Mapping[str, int]) -> Array:
    """Numbers of a result, with keys last, as ``[b, n, g, s, d, keys]``."""
    return brought(rows, (*results, ("t",)), {**sizes, "t": rows.shape[-1]}, (*ATTENTION, "t"))


def _level(scores: Array, seen: Array) -> Array:
    """Scores of which the mean of those that are seen is 0, and 0 where none is seen: a softmax tells no more."""
    means = np.where(seen, scores, 0).sum(-1, keepdims=True) / np.maximum(seen.sum(-1, keepdims=True), 1)
    return np.where(seen, scores - means, 0)


def _scaled(products: Array, step: Step) -> float:
    """The scale without a softcap."""
    factor, scores, seen = step
    level = _level(products * factor, seen)
    return float((level * scores).sum() / ((level * level).sum() or 1.0))


def _fitted(products: Array, steps: tuple[Step, Step], scale: float, size: int) -> tuple[float, float]:
    """Scale and softcap; 0: none.

    Args:
        products: of queries and keys.
        steps: with small and with large ones.
        scale: a guess.
        size: of a head.

    Raises:
        SiteError: scores do not follow from products, with or without a softcap.
    """

    def missed(at: Array) -> Array:
        scale, cap = at
        misses = []
        for factor, scores, seen in steps:
            plain = products * factor * scale
            misses.append(_level(plain if np.isinf(cap) else cap * np.tanh(plain / cap), seen) - scores)
        return np.ravel(misses)

    at = np.array([_rounded(_scaled(products, steps[1]), size), np.inf])
    if np.abs(missed(at)).max() > _CLOSE * _LARGE:
        tried = np.stack(np.broadcast_arrays(scale, np.geomspace(0.5, 1000, 100)), -1)
        at = min(tried, key=lambda at: float(np.square(missed(at)).sum()))
        for free in ([0, 1], [1]):  # Gauss-Newton: both, then the softcap beside the scale that models state
            for _ in range(_ITERATIONS):
                off = missed(at)
                slopes = [(missed(at * (1 + _STEP * (np.arange(2) == i))) - off) / _STEP for i in free]
                at[free] *= 1 + np.linalg.lstsq(np.stack(slopes, -1), -off, rcond=None)[0].clip(-0.3, 0.3)
            at[0] = _rounded(at[0], size)
        if np.abs(missed(at)).max() > _CLOSE * _LARGE:
            raise SiteError(
                "weights of keys do not follow from products of queries and keys, with or without a softcap"
            )
    return float(at[0]), 0.0 if np.isinf(at[1]) else float(f"{at[1]:.4g}")


def _rounded(scale: float, size: int) -> float:
    """The scale that a model states, if it is one that many have."""
    known = (size**-0.5, 1.0, 1.0 / size)
    return next((k for k in known if abs(scale - k) < 3e-4 * k), float(f"{scale:.6g}"))
