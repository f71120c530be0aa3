"""Describe an attention by running its region in ONNX Runtime on chosen numbers.

    which past belongs to which new rows     numbered rows, found again in the presents
    values, keys                             what the result is linear in; what may be scaled against the queries
    heads, layouts                           numbered values with one key; weights that are the same for a whole head
    weights of keys                          values of 1 in one row
    keys that a query sees, biases           weights where queries and keys are 0
    scale, softcap                           weights against products of queries and keys

Everything here is a guess that the check decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.normalize.evidence.samples import Sample
from trt_kvcache.importer.protos import INTEGERS
from trt_kvcache.importer.sites.cut import MisfitError, Region, SiteError
from trt_kvcache.importer.sites.layout import ATTENTION, Layout, brought, layouts, places
from trt_kvcache.importer.steps.engine import EngineError, OrtEngine
from trt_kvcache.importer.steps.runnable import open_types

Array = npt.NDArray[Any]
Feeds = dict[str, Array]
_BATCHES, _PAST, _NEW = (5, 7, 11), 4, 7
_SMALL = 0.3  # of queries and keys: where a softcap is linear
_FITS = 0.97  # cosine of the weights seen and those expected
_NOTHING = 1e-9  # the weight of a hidden key
_CLOSE = 1e-3
_ITERATIONS, _STEP = 12, 1e-4
_LARGE = 12.0  # scores that a softcap changes
_LONGEST = 1 << 22  # numbers of a cache in a long step


@dataclass(frozen=True, eq=False)
class CacheSeen:
    """A cache of an attention.

    Attributes:
        past, present: names.
        rows: the short tensor with its new rows.
        perm: brings `rows` to the order of axes of the cache.
        axis: of its rows.
        layout: of its other axes.
    """

    past: str
    present: str
    rows: str
    perm: tuple[int, ...]
    axis: int
    layout: Layout = ()

    def renamed(self, names: Mapping[str, str]) -> CacheSeen:
        """The same of other tensors."""
        return replace(self, past=names[self.past], present=names[self.present], rows=names[self.rows])


@dataclass(frozen=True, eq=False)
class AttentionSeen:
    """An attention as it was seen.

    Attributes:
        result, query: short tensors.
        key, value: its caches.
        result_layout, query_layout: of these.
        heads: of keys, and queries for each.
        head_size, value_size: numbers of a head.
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
    heads: tuple[int, int]
    head_size: int
    value_size: int
    scale: float
    softcap: float
    causal: bool
    window: int | None
    wide: bool

    def renamed(self, names: Mapping[str, str]) -> AttentionSeen:
        """The same of other tensors."""
        key, value = self.key.renamed(names), self.value.renamed(names)
        return replace(self, result=names[self.result], query=names[self.query], key=key, value=value)


@dataclass(eq=False)
class Reader:
    """Runs one region.

    Attributes:
        region: what runs.
        step: makes a step of batch, past and new tokens.
        shape: of a text of the region, in a step.
        axes: of the rows of each cache.
        batch: that the model fixes, else 0.
        capacity: the most tokens.
    """

    region: Region
    step: Callable[[int, int, int], Sample]
    shape: Callable[[str, int, int], tuple[int, ...]]
    axes: Mapping[str, int]
    batch: int
    capacity: int
    moved: dict[str, CacheSeen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self._engine = OrtEngine(open_types(self.region.model, wide=True))
        except EngineError as error:
            raise SiteError(f"its region does not load: {error}") from None
        self._rng = np.random.default_rng(0)

    def feeds(self, batch: int, past: int, length: int) -> Feeds:
        """Random numbers for a step, and what lengths and positions say."""
        sample = self.step(batch, past, length)
        made: Feeds = {}
        for name in self.region.texts:
            made[name] = self._random(self.shape(name, batch, length))
        for name in self.region.measured:
            made[name] = self._random(sample.probe.shape(name) or ())
        for name in self.region.inputs:
            value, shape = sample.probe.value(name), sample.probe.shape(name)
            if value is None and shape is None:
                raise SiteError(f"nothing says how large '{name}' is in a step")
            if value is None and name not in self.region.caches and sample.probe.elem_type(name) in INTEGERS:
                raise UnknownError(name)
            made[name] = self._random(shape or ()) if value is None else value
        return made

    def _random(self, shape: tuple[int, ...]) -> Array:
        return self._rng.standard_normal(shape).astype(np.float32)

    def run(self, feeds: Feeds) -> Feeds:
        """All outputs in float64."""
        try:
            return {name: value.astype(np.float64) for name, value in self._engine.run(feeds).items()}
        except EngineError as error:
            raise MisfitError(f"its region does not run: {error}") from None

    def result(self, feeds: Feeds) -> Array:
        """The result of the attention."""
        return self.run(feeds)[self.region.result]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch, past and new tokens of a short step."""
        past = min(_PAST, max(0, self.capacity - 2))
        return self.batch or self._other_batch(), past, max(1, min(_NEW, self.capacity - past))

    def _other_batch(self) -> int:
        shapes = [self.shape(name, 1, 1) for name in self.region.texts]
        taken = {d for shape in shapes for d in shape}
        return next((b for b in _BATCHES if not any(d % b == 0 for d in taken)), _BATCHES[-1])

    # What is written.

    def read_caches(self) -> None:
        """Find each cache's new rows, and how they lie.

        Raises:
            SiteError: a present is not the past with new rows after it.
            FartherError: the new rows are no short tensor of the region, but may be one before it.
        """
        batch, past, length = self.sizes
        numbers = self.feeds(batch, past, length)
        first, ranges = 1, {}
        for name in (*self.region.caches, *self.region.texts):
            count = numbers[name].size
            numbers[name] = np.arange(first, first + count, dtype=np.float32).reshape(numbers[name].shape)
            ranges[name] = (first, first + count)
            first += count
        made = self.run(numbers)
        for present in self.region.presents:
            self._read_cache(present, made[present], numbers, ranges, past)

    def _read_cache(
        self, present: str, whole: Array, numbers: Feeds, ranges: Mapping[str, tuple[int, int]], past: int
    ) -> None:
        cache = next((c for c in self.region.caches if np.isin(numbers[c], whole).all()), None)
        if cache is None:
            raise SiteError(f"'{present}' does not hold all rows of a past")
        axis = self.axes[cache]
        before, after = np.split(whole, [past], axis) if whole.ndim > axis else (whole, whole)
        if before.shape != numbers[cache].shape or not np.array_equal(before, numbers[cache]):
            raise SiteError(f"'{present}' does not begin with the rows of '{cache}'")
        rows = next((t for t in self.region.texts if ranges[t][0] <= after.min() and after.max() < ranges[t][1]), None)
        if rows is None or after.size != numbers[rows].size:
            sources = [t for t in self.region.texts if np.isin(numbers[t], after).any()]
            if sources:
                raise FartherError(sources)
            raise SiteError(f"'{present}' ends with no new rows of '{cache}'")
        for perm in permutations(range(whole.ndim)) if numbers[rows].ndim == whole.ndim else ():
            if np.array_equal(numbers[rows].transpose(perm), after):
                self.moved[cache] = CacheSeen(cache, present, rows, perm, axis)
                return
        raise FartherError([rows])

    def given(self, cache: CacheSeen, feeds: Feeds, whole: Array) -> Feeds:
        """Feeds with these rows, in the layout of the cache, in past and new rows; `whole` broadcasts."""
        past = feeds[cache.past].shape[cache.axis]
        new = feeds[cache.rows].transpose(cache.perm)
        sizes = list(new.shape)
        sizes[cache.axis] += past
        rows = np.broadcast_to(whole, sizes)
        before, after = np.split(rows, [past], cache.axis)
        return {
            **feeds,
            cache.past: np.ascontiguousarray(before, np.float32),
            cache.rows: np.ascontiguousarray(after.transpose(np.argsort(cache.perm)), np.float32),
        }

    # What is computed.

    def read(self) -> AttentionSeen:
        """Describe the attention.

        Raises:
            SiteError: in words what was seen instead.
            FartherError: queries are no single short tensor.
        """
        self.read_caches()
        if len(self.moved) != 2:
            raise SiteError(f"the attention reads {len(self.moved)} caches, and not one of keys and one of values")
        key, value, query = self._roles()
        batch, past, length = self.sizes
        feeds = self.feeds(batch, past, length)
        feeds[query] = feeds[query] * np.float32(_SMALL)
        blank = self._still(feeds, key, query)
        sizes, value_layout, result_layout = self._values(key, value, query)
        value = replace(value, layout=value_layout)
        weights, base = (self._weights(f, value, sizes, result_layout) for f in (feeds, blank))
        heads = (sizes["n"], sizes["g"])
        causal, window = self._visible(base, past, key, value, query)
        key_layout, query_layout, size, scale, products = self._products(feeds, key, query, sizes, weights, base)
        key = replace(key, layout=key_layout)
        scale, softcap = self._softcap(feeds, query, value, sizes, result_layout, base, products, scale, size)
        return AttentionSeen(
            self.region.result, query, key, value, result_layout, query_layout, heads, size, sizes["d"], scale, softcap,
            causal, window, wide=self.region.wide,
        )  # fmt: skip

    def _roles(self) -> tuple[CacheSeen, CacheSeen, str]:
        """The caches of keys and of values, and the queries."""
        rows = {c.rows for c in self.moved.values()}
        queries = [t for t in self.region.texts if t not in rows]
        if len(queries) != 1:
            raise FartherError(queries) if queries else SiteError("no queries go into the attention")
        feeds = self.feeds(*self.sizes)
        plain = self.result(feeds)

        def doubled(cache: CacheSeen) -> bool:
            twice = {n: feeds[n] * np.float32(2) for n in (cache.past, cache.rows)}
            return np.allclose(self.result(feeds | twice), 2 * plain, rtol=1e-3, atol=1e-4 * np.abs(plain).max())

        values = [c for c in self.moved.values() if doubled(c)]
        if len(values) != 1:
            raise SiteError(f"the result is linear in {len(values)} of the caches {sorted(self.moved)}, and not in one")
        key = next(c for c in self.moved.values() if c is not values[0])
        return key, values[0], queries[0]

    def _still(self, feeds: Feeds, key: CacheSeen, query: str) -> Feeds:
        """Feeds with queries and keys of 0."""
        return self.given(key, feeds | {query: feeds[query] * np.float32(0)}, np.zeros(1))

    def _values(self, key: CacheSeen, value: CacheSeen, query: str) -> tuple[dict[str, int], Layout, Layout]:
        """Sizes of heads, and the layouts of values and results: from numbered values and one key."""
        batch, past, length = self.sizes
        feeds = self._still(self.feeds(batch, 0, 1), key, query)
        new = feeds[value.rows].transpose(value.perm)
        numbers = np.arange(1, new.size + 1, dtype=np.float64).reshape(new.shape)
        found = self.result(self.given(value, feeds, numbers))
        if not np.allclose(found, np.rint(found), atol=1e-3):
            raise SiteError("with one key, the result is no row of values")
        source = np.rint(found).astype(int).ravel() - 1
        shape = self.shape(self.region.result, batch, length)
        width = new.size // batch
        weights = self._rows(self.feeds(batch, past, length), value)
        rest = tuple(d for axis, d in enumerate(new.shape) if axis != value.axis)
        best: tuple[dict[str, int], Layout, Layout] | None = None
        for n in (n for n in range(1, width + 1) if width % n == 0):
            groups, left = divmod(prod(shape), batch * length * width)
            if left or not groups:
                break
            sizes = {"b": batch, "n": n, "g": groups, "s": length, "d": width // n}
            one = sizes | {"s": 1}
            for values in layouts(rest, {k: sizes[k] for k in "bnd"}):
                at = places(values, {k: sizes[k] for k in "bnd"})
                wanted = {k: at[k][source] for k in "bnd"} if source.max() < len(at["b"]) else {}
                for results in layouts(shape, sizes):
                    own = places(results, one)
                    if not wanted or not all(np.array_equal(own[k], wanted[k]) for k in "bnd"):
                        continue
                    whole = _arranged(weights, results, sizes)
                    if np.ptp(whole, axis=4).max() < 1e-5 * np.abs(whole).max():
                        best = best or (sizes, values, results)  # the largest heads come first
        if best is None:
            raise SiteError("heads of the result lie in no order that is known")
        return best

    def _rows(self, feeds: Feeds, value: CacheSeen) -> Array:
        """The weight of each key in each number of the result, keys last."""
        total = feeds[value.past].shape[value.axis] + self._new(feeds, value)
        rank = len(value.perm)
        columns = []
        for place in range(total):
            hot = np.zeros([total if a == value.axis else 1 for a in range(rank)])
            hot[tuple(place if a == value.axis else 0 for a in range(rank))] = 1
            columns.append(self.result(self.given(value, feeds, hot)))
        return np.stack(columns, -1)

    def _new(self, feeds: Feeds, cache: CacheSeen) -> int:
        return int(feeds[cache.rows].transpose(cache.perm).shape[cache.axis])

    def _weights(self, feeds: Feeds, value: CacheSeen, sizes: dict[str, int], results: Layout) -> Array:
        """The weights ``[b, n, g, s, keys]``."""
        own = sizes | {"s": self._new(feeds, value)}
        return _arranged(self._rows(feeds, value), results, own)[:, :, :, :, 0]

    def _products(
        self, feeds: Feeds, key: CacheSeen, query: str, sizes: dict[str, int], weights: Array, base: Array
    ) -> tuple[Layout, Layout, int, float, Array]:
        """Layouts of keys and queries, the size of their heads, the scale, and the products: what fits the weights."""
        batch, length = sizes["b"], sizes["s"]
        logits, seen = _logits(weights, base)
        whole = np.concatenate([feeds[key.past], feeds[key.rows].transpose(key.perm)], key.axis)
        whole = np.moveaxis(whole, key.axis, -1)
        rest, total = whole.shape[:-1], whole.shape[-1]
        count = prod(rest) // batch // sizes["n"]
        best: tuple[float, Layout, Layout, int, float, Array] = (0.0, (), (), 0, 0.0, logits)
        for keys in layouts(rest, {"b": batch, "n": sizes["n"], "d": count}):
            own = {"b": batch, "n": sizes["n"], "d": count, "t": total}
            k = brought(whole, (*keys, ("t",)), own, ("b", "n", "d", "t"))
            for queries in layouts(feeds[query].shape, sizes | {"d": count}):
                q = brought(feeds[query], queries, sizes | {"d": count}, ATTENTION)
                made = np.einsum("bngsd,bndt->bngst", q.astype(np.float64), k.astype(np.float64))
                level = _level(np.broadcast_to(made, logits.shape), seen)
                norm = float((level * level).sum()) or 1.0
                scale = float((level * logits).sum()) / norm
                fit = abs(scale) * np.sqrt(norm) / (np.sqrt((logits * logits).sum()) or 1.0)
                if fit > best[0]:
                    best = (float(fit), keys, queries, count, scale, made)
        if best[0] < _FITS:
            raise SiteError(
                f"the weights of keys are no softmax of products of '{query}' and '{key.past}' (closest fit "
                f"{best[0]:.3f}) in a step of {length} tokens"
            )
        return (*best[1:4], _rounded(best[4], best[3]), best[5])

    def _softcap(
        self,
        feeds: Feeds,
        query: str,
        value: CacheSeen,
        sizes: dict[str, int],
        results: Layout,
        base: Array,
        made: Array,
        scale: float,
        size: int,
    ) -> tuple[float, float]:
        """Scale and softcap of scores, from large ones; 0: no softcap. `made` are the products, `scale` is a guess."""
        factor = _LARGE / (np.abs(made * scale).max() or 1.0)
        weights = self._weights(feeds | {query: feeds[query] * np.float32(factor)}, value, sizes, results)
        logits, seen = _logits(weights, base)
        products = made * factor

        def miss(scale: float, cap: float) -> Array:
            scores = products * scale
            return (_level(cap * np.tanh(scores / cap) if cap else scores, seen) - logits).ravel()

        if np.abs(miss(scale, 0.0)).max() < _CLOSE * _LARGE:
            return scale, 0.0
        found = scale, float(min(np.geomspace(0.5, 1000, 100), key=lambda cap: float(np.abs(miss(scale, cap)).max())))
        for fixed in (False, True):  # Gauss-Newton: both, then the softcap beside the scale that models state
            for _ in range(_ITERATIONS):
                off = miss(*found)
                slopes = [(miss(found[0] * (1 + _STEP), found[1]) - off) / _STEP] if not fixed else []
                slopes.append((miss(found[0], found[1] * (1 + _STEP)) - off) / _STEP)
                change = np.linalg.lstsq(np.stack(slopes, -1), -off, rcond=None)[0].clip(-0.3, 0.3)
                found = found[0] * (1.0 if fixed else 1 + float(change[0])), found[1] * (1 + float(change[-1]))
            found = _rounded(found[0], size), found[1]
        if np.abs(miss(*found)).max() > _CLOSE * _LARGE:
            raise SiteError(
                "weights of keys do not follow from products of queries and keys, with or without a softcap"
            )
        return found[0], float(f"{found[1]:.4g}")

    def _visible(self, base: Array, past: int, key: CacheSeen, value: CacheSeen, query: str) -> tuple[bool, int | None]:
        """True for causal attention, and the window."""
        length, total = base.shape[-2:]
        seen = base > _NOTHING
        mask = seen[0, 0, 0]
        if not (seen == mask).all():
            raise SiteError("heads or sequences see different keys where all queries and keys are 0")
        with np.errstate(divide="ignore", invalid="ignore"):
            uneven = np.where(seen, base * seen.sum(-1, keepdims=True), 1)
        if np.abs(uneven - 1).max() > 1e-3:
            raise SiteError("keys that are 0 have different weights: a bias by position, or sinks")
        keys, own = np.arange(total), past + np.arange(length)[:, None]
        window = self._window(key, value, query)
        for causal in (True, False):
            wanted = keys <= own if causal else np.ones_like(mask)
            if window is not None:
                wanted = wanted & (keys > own - window)
            if np.array_equal(mask, wanted):
                return causal, window
        wanted = keys <= own
        query_place, key_place = (int(i) for i in np.argwhere(mask != wanted)[0])
        gives = "gives weight to" if mask[query_place, key_place] else "gives no weight to"
        raise SiteError(f"at {past} tokens, query {query_place} {gives} key {key_place}")

    def _long_past(self, value: CacheSeen) -> int:
        """A past that is longer than any number in the region, if there is room."""
        fits = [n for n in self.region.integers if n < self.capacity - 1]
        width = prod(self.shape(value.rows, 1, 1))
        return min(self.capacity - 1, max(fits, default=0) + 2, max(1, _LONGEST // max(width, 1)))

    def _window(self, key: CacheSeen, value: CacheSeen, query: str) -> int | None:
        """The keys that a query sees after a past that is longer than any number in the region, if it sees not all."""
        past = self._long_past(value)
        feeds = self._still(self.feeds(self.batch or 1, past, 1), key, query)
        total = past + 1
        for cache in (key, value):
            rows = self.run(feeds)[cache.present].shape[cache.axis]
            if rows != total:
                raise SiteError(f"'{cache.present}' has {rows} rows after {total} tokens")
        hot = np.zeros([total if a == value.axis else 1 for a in range(len(value.perm))])
        hot[tuple(-1 if a == value.axis else 0 for a in range(len(value.perm)))] = 1
        share = self.result(self.given(value, feeds, hot)).max()
        seen = round(1 / share) if share > 0 else 0
        return seen if 0 < seen < total else None


class UnknownError(SiteError):
    """An input of whole numbers may be positions, and nothing else says so.

    Attributes:
        name: of the input.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"nothing says what '{name}' holds in a step: name it with --config")
        self.name = name


class FartherError(Exception):
    """A tensor at which a region has to end lies before those at which it does.

    Attributes:
        names: short tensors behind it.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


def _arranged(rows: Array, results: Layout, sizes: dict[str, int]) -> Array:
    """Numbers of a result, with keys last, as ``[b, n, g, s, d, keys]``."""
    own = sizes | {"t": rows.shape[-1]}
    return brought(rows, (*results, ("t",)), own, (*ATTENTION, "t"))


def _level(logits: Array, seen: Array) -> Array:
    """Numbers of which the mean of those that are seen is 0, and 0 where none is seen."""
    counts = np.maximum(seen.sum(-1, keepdims=True), 1)
    means = np.where(seen, logits, 0).sum(-1, keepdims=True) / counts
    return np.where(seen, logits - means, 0)


def _logits(weights: Array, base: Array) -> tuple[Array, Array]:
    """Logarithms of weights against those of products of 0, and where both say something."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logits = np.log(weights) - np.log(base)
    seen = np.isfinite(logits) & (base > _NOTHING) & (weights > _NOTHING)
    return _level(np.where(seen, logits, 0), seen), seen


def _rounded(scale: float, size: int) -> float:
    """The scale that a model states, if it is one that many have."""
    known = (size**-0.5, 1.0, 1.0 / size)
    return next((k for k in known if abs(scale - k) < 1e-4 * k), float(f"{scale:.6g}"))
