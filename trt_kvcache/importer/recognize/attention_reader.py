"""Describes an attention by running its part of the model in ONNX Runtime with chosen input values.

    what is found                     how
    new rows of each cache            rows with unique numbers, found again in the presents (`region_steps`)
    which cache holds values          the result is linear in the values, not in the keys
    heads, layouts, softmax sinks     a step with one key, whose values are unique numbers
    attention weights of keys         a step whose values are all 0, except for one number in one row
    visible keys, biases              attention weights while queries and keys are 0
    scale, softcap                    a comparison of attention weights with products of queries and keys

Every result is a guess; a later comparison with the original accepts or refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import elem_type, producer
from trt_kvcache.importer.interface.exported_interface import Interface
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.recognize.records import (
    ATTENTION,
    AdvisedError,
    Attention,
    Cache,
    ComputedError,
    FartherError,
    Layout,
    Mask,
    RecognizeError,
    brought,
    layouts,
)
from trt_kvcache.importer.recognize.region_steps import Runner, read_updates
from trt_kvcache.importer.recognize.regions import Region
from trt_kvcache.importer.recognize.sample_steps import Sample, Samples
from trt_kvcache.importer.steps.original_interface import Feeds

Scores = tuple[float, Array, Array]
"""The factor of the queries; scores ``[b, n, g, s, keys]``; a mask of this shape, True for visible keys."""
_BATCHES, _PAST, _NEW = (5, 7, 11), 4, 7
_SMALL = (0.3, 0.02)  # factors of the queries: they make scores so small that most softcaps hardly change them
_LARGE = 12.0  # the largest score of a step that shows a softcap
_FITS = 0.97  # least cosine of measured and expected scores
_NOTHING = 1e-25  # the weight of a hidden key
_CLOSE = 1e-3
_EXACT = 1e-5
_ITERATIONS, _STEP = 12, 1e-4
_SOME = 4  # every fourth key is enough to see the layout of heads
_LONGEST = 1 << 22  # the most numbers of a cache in a long step
_MOST_RUNS = 1024  # the most runs of a long step that reads a bias


class Reader:
    """Describes one attention by running its region (the part of the model that computes the attention).

    `caches` maps the name of each past to the guessed cache. `samples` makes short steps; `far` makes steps that reach
    up to the capacity. Raises `RecognizeError` if ONNX Runtime cannot load the region.
    """

    def __init__(
        self,
        region: Region,
        caches: Mapping[str, Cache],
        tensors: Mapping[str, gs.Tensor],
        interface: Interface,
        samples: Samples,
        far: Samples,
    ) -> None:
        self._region, self._tensors, self._step, self._far = region, tensors, samples.step, far
        self._runner = Runner(region, caches, interface)
        self._caches = caches
        self._sample = reading_step(region, caches, samples)

    def read(self) -> Attention:
        """Run the part of the model and describe its attention. Raises `FartherError` if the part is too small."""
        region, sample = self._region, self._sample
        if region.computed:
            return self._described([self._computed(name) for name in region.computed], region.texts[0])
        if len(region.caches) != 2:
            raise RecognizeError(
                f"'{region.result}' reads {len(region.caches)} caches; it must read one of keys and one of values"
            )
        found = read_updates(self._runner, region, dict(self._caches), dict(self._tensors), sample, None)
        found = [replace(c, circular=self._caches[str(c.past.name)].circular) for c in found]
        rows = {c.update.name for c in found if c.update is not None}
        queries = [t for t in region.texts if t not in rows]
        if len(queries) > 1:  # the operator of another layer may write the cache, with other queries
            feeds = self._runner.feeds(sample)
            plain = self._run(feeds)
            queries = [t for t in queries if not np.array_equal(plain, self._run(feeds | {t: 2 * feeds[t]}))]
        if not queries:
            raise RecognizeError(f"no input of '{region.result}' could be its queries")
        if len(queries) > 1:
            raise FartherError(*queries)
        return self._described(found, queries[0])

    def _computed(self, name: str) -> Cache:
        """Return a `Cache` that stands for keys or values that the model computes from caches."""
        shape, tensor = self._sample.probe.shape(name) or (), self._tensors[name]
        axis = next((a for a in (2, 3) if len(shape) == 4 and shape[a] == self._sample.total), None)
        if axis is None:
            raise RecognizeError(f"'{name}' {list(shape)} is computed from caches; its shape must be [B, H, rows, D]")
        return Cache(tensor, tensor, axis, growing=True, perm=(0, 1, 2, 3))

    def _described(self, found: list[Cache], query: str) -> Attention:
        region, sample = self._region, self._sample
        self._query = query
        if len(found) != 2:
            raise RecognizeError(
                f"'{region.result}' reads {len(found)} tensors that are computed from caches; expected 2, keys "
                "and values"
            )
        self._key, self._value = self._roles(found)
        self._sinks: Array | None = None
        self._sizes, self._results = self._layout()
        base = self._weights(self._still(sample), sample)
        mask = self._mask(base)
        size, query_layout, scale, softcap = self._scores(base)
        result, queries_in = self._tensors[region.result], self._tensors[self._query]
        node = producer(result)
        return Attention(
            name="" if node is None else str(node.name),
            query=queries_in,
            result=result,
            query_layout=query_layout,
            result_layout=self._results,
            key=self._key,
            value=self._value,
            sizes={**self._sizes, "d": size, "v": self._sizes["d"]},
            scale=scale,
            softcap=softcap,
            mask=mask,
            sinks=self._sinks,
            query_type=elem_type(queries_in) or 0,
            result_type=elem_type(result) or 0,
            wide=self._key.past.name in region.wide,
            wide_weights=region.wide_weights,
        )

    def _run(self, feeds: Feeds) -> Array:
        return self._runner.run(feeds)[self._region.result]

    def _roles(self, caches: list[Cache]) -> tuple[Cache, Cache]:
        """Find which cache holds keys and which holds values: the result of an attention is linear in the values."""
        feeds = self._runner.feeds(self._sample)
        plain, linear = self._run(feeds), []
        for cache in caches:
            names = {str(cache.past.name), _update(cache)}
            twice = self._run(feeds | {n: 2 * feeds[n] for n in names})
            linear.append(bool(np.abs(twice - 2 * plain).max() < _CLOSE * np.abs(plain).max()))
        if not any(linear) and not self._region.computed:
            raise ComputedError(self._query, caches)
        if sum(linear) != 1:
            shown = sorted(str(c.past.name) for c in caches)
            raise RecognizeError(
                f"'{self._region.result}' is linear in {sum(linear)} of the caches {shown}; it must be linear in the "
                "values only"
            )
        return caches[linear.index(False)], caches[linear.index(True)]

    def _keys(self, sample: Sample) -> int:
        return self._runner.held(self._value, sample) + sample.length

    def _filled(self, feeds: Feeds, cache: Cache, rows: Array, sample: Sample) -> Feeds:
        new = feeds[_update(cache)].transpose(cache.perm)
        if cache.update is None:
            return {**feeds, _update(cache): np.broadcast_to(rows, new.shape).astype(np.float32)}
        shape, held = list(new.shape), self._runner.held(cache, sample)
        shape[cache.axis] += held
        whole = np.broadcast_to(rows, shape).astype(np.float32)
        before, after = np.split(whole, [held], cache.axis)
        past = self._runner.past(cache, sample, before)
        return {**feeds, str(cache.past.name): past, _update(cache): after.transpose(np.argsort(cache.perm))}

    def _still(self, sample: Sample) -> Feeds:
        feeds = self._runner.feeds(sample)
        return self._filled(feeds | {self._query: 0 * feeds[self._query]}, self._key, np.zeros(1), sample)

    def _shares(self, feeds: Feeds, keys: range, sample: Sample) -> Array:
        """Return the attention weight of each key in `keys` (last axis), for each number of the result (other axes)."""
        value, columns = self._value, []
        for place in keys:
            hot = np.arange(self._keys(sample)) == place
            hot = hot.reshape([-1 if a == value.axis else 1 for a in range(len(value.perm))])
            columns.append(self._run(self._filled(feeds, value, hot, sample)))
        return np.stack(columns, -1)

    def _weights(self, feeds: Feeds, sample: Sample, keys: range | None = None) -> Array:
        """Measure attention weights ``[b, n, g, s, keys]``. One run measures as many keys as the head size."""
        value, size, heads = self._value, self._sizes["d"], self._sizes["n"]
        keys = range(self._keys(sample)) if keys is None else keys
        sizes, found = self._sizes | {"b": sample.batch, "s": sample.length}, []
        for first in range(keys.start, keys.stop, size):
            count = min(size, keys.stop - first)
            hot = np.zeros((self._keys(sample), size), np.float32)
            hot[range(first, first + count), range(count)] = 1
            rows = _laid(np.broadcast_to(hot, (1, heads, *hot.shape)), value)
            result = self._run(self._filled(feeds, value, rows, sample))
            found.append(brought(result, self._results, sizes, ATTENTION)[..., :count])
        return np.concatenate(found, -1)

    def _layout(self) -> tuple[dict[str, int], Layout]:
        """Run a step with one key and numbered values, to find the sizes of heads, the layout of results, and sinks."""
        value, batch = self._value, self._sample.batch
        one = self._step(batch, 0, 1)
        feeds = self._still(one)
        shape = feeds[_update(value)].transpose(value.perm).shape
        numbers = np.arange(1, prod(shape) + 1).reshape(shape)
        result, ones = (self._run(self._filled(feeds, value, rows, one)) for rows in (numbers, np.ones(1)))
        shares = self._shares(self._runner.feeds(self._sample), range(0, self._keys(self._sample), _SOME), self._sample)
        width = numbers.size // batch // one.length
        groups = prod(shares.shape[:-1]) // (batch * self._sample.length * width)
        heads = (shape[2 if value.axis == 1 else 1],) if len(shape) == 4 else range(1, width + 1)
        for n in (n for n in heads if width % n == 0):
            sizes = {"b": batch, "n": n, "g": groups, "s": self._sample.length, "d": width // n}
            wanted = _by_head(numbers, value, n)[:, :, None, :1]
            for layout in layouts(shares.shape[:-1], sizes):
                rows, share = (
                    brought(r, layout, sizes | {"s": one.length}, ATTENTION)[:, :, :, :1] for r in (result, ones)
                )
                # `layouts` yields the layout with the largest heads first
                by_key = (*layout, ("t",)), {**sizes, "t": shares.shape[-1]}, (*ATTENTION, "t")
                uneven = np.ptp(brought(shares, *by_key), axis=4).max()
                near = np.abs(rows - wanted * share).max() < _CLOSE * max(1e-6, share.max())
                if near and uneven < _EXACT * shares.max() and share.min() > 0:
                    self._read_sinks(share[:, :, :, 0, 0])
                    return sizes, layout
        raise RecognizeError(
            f"with one key, '{self._region.result}' should be a row of '{value.past.name}' but is not, or its heads "
            "are in an unknown order"
        )

    def _read_sinks(self, share: Array) -> None:
        """Read sinks (extra logits of the softmax) from the weights ``[b, n, g]`` of a single key with score 0."""
        if share.min() < 1 - _EXACT:
            sinks = np.log(np.maximum(1 / share - 1, 1e-12))
            if np.ptp(sinks, axis=0).max() > _CLOSE:
                raise RecognizeError(
                    f"the attention weights of '{self._region.result}' add up to less than 1, and the rest "
                    "differs between sequences; a sink must be the same for all sequences"
                )
            self._sinks = sinks[0].ravel().astype(np.float32)

    def _scores(self, base: Array) -> tuple[int, Layout, float, float]:
        """Find head size, query layout, scale and softcap. `base`: the attention weights for queries and keys of 0."""
        sample, key, query = self._sample, self._key, self._query
        feeds = self._runner.feeds(sample)

        def scores(factor: float) -> Scores:
            weights = self._weights(feeds | {query: feeds[query] * np.float32(factor)}, sample)
            seen = np.minimum(base, weights) > _NOTHING
            logs = (np.log(np.where(seen, w, 1)) for w in (weights, base))
            return factor, _level(next(logs) - next(logs), seen), seen

        whole = feeds[_update(key)].transpose(key.perm)
        if key.update is not None:
            whole = np.concatenate([self._runner.rows(key, sample, feeds[str(key.past.name)]), whole], key.axis)
        size, left = divmod(whole.size, sample.batch * self._sizes["n"] * self._keys(sample))
        if left or (whole.ndim == 4 and whole.shape[2 if key.axis == 1 else 1] != self._sizes["n"]):
            raise RecognizeError(
                f"keys '{key.past.name}' and values '{self._value.past.name}' have different numbers of heads; "
                "an attention must have as many heads of keys as of values"
            )
        keys = _by_head(whole, key, self._sizes["n"])
        sizes = self._sizes | {"d": size}
        best = 0.0
        for factor in _SMALL:
            few = scores(factor)
            for layout in layouts(feeds[query].shape, sizes):
                queries = brought(feeds[query], layout, sizes, ATTENTION)
                products = np.einsum("bngsd,bntd->bngst", queries, keys, dtype=np.float64)
                level = _level(products, few[2])
                norm = np.sqrt((level * level).sum() * (few[1] * few[1]).sum())
                fit = float(abs((level * few[1]).sum()) / (norm or 1.0))
                if fit > best:
                    best, found = fit, (few, layout, products)
            if best >= _FITS:
                break
        else:
            raise RecognizeError(
                f"the attention weights are not a softmax of the products of '{query}' and '{key.past.name}' (closest "
                f"fit {best:.3f}) in a step of {sample.length} tokens. It may also be an attention that the importer "
                "does not support: query heads in another order than key heads, or queries that see only one key"
            )
        few, layout, products = found
        scale = _scaled(products, few)
        many = scores(_LARGE / (np.abs(products * scale).max() or 1.0))
        return size, layout, *_fitted(products, (few, many), scale, size)

    def _mask(self, base: Array) -> Mask:
        """Derive the mask and the biases from `base`, the attention weights of a step in which all scores are 0."""
        sample, seen = self._sample, base > _NOTHING
        tokens = np.arange(sample.total - self._keys(sample), sample.total)
        own = sample.past + np.arange(sample.length)[:, None]
        if self._runner.masks:
            return self._own(seen, tokens <= own)
        shown = seen[0, 0, 0]
        if not (seen == shown).all():
            raise RecognizeError(f"different heads or sequences of '{self._region.result}' see different keys")
        mask = self._biased(base, Mask())
        if self._key.circular and not self._sees_lengths():
            raise RecognizeError(
                f"the cache '{self._key.past.name}' is circular, but when it is full, queries do not see exactly "
                "the rows up to their own. For a circular cache, the mask must be an input [B, 1, S, L] of the model"
            )
        if self._key.shifted:
            return replace(mask, causal=False, bounded=False)
        window = self._window() if mask.slopes is None and mask.bias is None else None
        within = tokens > own - (window or np.inf)
        for causal, wanted in ((False, within), (True, within & (tokens <= own))):
            if np.array_equal(shown, wanted) and (sample.length > 1 or causal):
                return replace(mask, causal=causal, window=window)
        query, key = (int(i) for i in np.argwhere(shown != wanted)[0])
        gives = "gives weight to" if shown[query, key] else "gives no weight to"
        raise RecognizeError(
            f"in a step after {sample.past} tokens, query {query} of '{self._region.result}' {gives} key {key}, "
            "which no supported mask does"
        )

    def _own(self, seen: Array, causal: Array) -> Mask:
        """Return the mask of an attention that reads a mask input. `seen` is True for the keys that the query sees.

        `causal` is False for keys after the query.
        """
        sample, name = self._sample, self._runner.masks[0]
        shown = self._runner.shown(name, sample)
        shown = shown.reshape((1,) * (4 - shown.ndim) + shown.shape)
        wanted = shown[..., self._runner.columns(self._key, sample, shown.shape[-1])][:, :, None]
        own = self._tensors[name]
        if np.array_equal(seen, np.broadcast_to(wanted, seen.shape)):
            return Mask(causal=False, own=own, bounded=False)
        if np.array_equal(seen, wanted & causal):
            return Mask(causal=True, own=own)
        raise RecognizeError(f"the queries of '{self._region.result}' see other keys than the mask '{name}' shows")

    def _sees_lengths(self) -> bool:
        """True if lengths count as rows even in a full circular cache: query i sees the first L - S + i + 1 rows."""
        rows = self._far.capacity
        sample = self._far.step(self._sample.batch, rows + 2, min(2, rows))
        seen = self._weights(self._still(sample), sample)[..., -rows:] > _NOTHING
        counted = (
            np.arange(sample.total - rows, sample.total) % rows
            <= rows - sample.length + np.arange(sample.length)[:, None]
        )
        return np.array_equal(seen, np.broadcast_to(counted, seen.shape))

    def _biased(self, base: Array, mask: Mask) -> Mask:
        """Add slopes, or a bias for each distance, to the mask, if keys with equal scores have different weights."""
        sample, seen = self._sample, base > _NOTHING
        shares = base / np.maximum(base.sum(-1, keepdims=True), _NOTHING)
        if np.abs(shares * seen.sum(-1, keepdims=True) - 1)[seen].max(initial=0) <= _CLOSE:
            return mask
        first = sample.total - self._keys(sample)
        logs = np.log(np.where(seen, base, 1)).reshape(sample.batch, -1, *base.shape[3:])[0]
        last = sample.total - 1 - first
        by_distance = logs[:, -1, last::-1] - logs[:, -1, last:]
        for query in range(sample.length):
            keys = np.arange(sample.past - first + query + 1)
            wanted = logs[:, query, keys[-1]][:, None] + by_distance[:, keys[-1] - keys]
            if np.abs(np.where(seen[0, 0, 0, query, keys], logs[:, query, keys] - wanted, 0)).max() > _CLOSE:
                raise RecognizeError(
                    f"with queries and keys of 0, the weights of keys in '{self._region.result}' depend on more than "
                    "the head and the distance from query to key"
                )
        if self._sinks is not None or not seen[..., -1, :].all():
            raise RecognizeError(
                f"'{self._region.result}' has a bias that depends on the distance, and also sinks or a window; "
                "the importer supports such a bias only without sinks and without a window"
            )
        far = by_distance.shape[1] - 1
        slopes = -by_distance[:, far] / far
        if np.abs(by_distance + slopes[:, None] * np.arange(far + 1)).max() < _CLOSE:
            return replace(mask, slopes=np.array([float(f"{s:.6g}") for s in slopes], np.float32))
        return replace(mask, bias=self._bias())

    def _bias(self) -> Array:
        """Return the numbers added to the scores for each distance, float32 ``[L, H]``, the farthest key first."""
        capacity, most = self._far.capacity, _MOST_RUNS * self._sizes["d"]
        if capacity > most:
            raise AdvisedError(
                f"'{self._region.result}' has a bias that depends on the distance; the importer can read it for "
                f"at most {most} tokens: give --capacity {most} or less"
            )
        length = self._step(1, 0, 1).length
        sample = self._far.step(1, capacity - length, length)
        weights = self._weights(self._still(sample), sample)[0, :, :, -1]
        if weights.min() <= _NOTHING:
            raise RecognizeError(
                f"the bias of '{self._region.result}' that depends on the distance hides keys; use a window instead"
            )
        logs = np.log(weights).reshape(self._sizes["n"] * self._sizes["g"], -1)
        return (logs - logs[:, -1:]).T.astype(np.float32)

    def _window(self) -> int | None:
        """Return the window: how many keys a query sees after a past longer than any number in the model; None: all."""
        capacity, kept, length = self._far.capacity, self._key.window_rows, self._step(1, 0, 1).length
        fits = max((n for n in (*self._region.integers, kept or 0) if n <= capacity), default=0)
        most = _LONGEST // (self._sizes["n"] * self._sizes["d"])
        sample = self._far.step(self._sample.batch, max(0, min(capacity - length, fits + 2, most)), 1)
        total = self._keys(sample)
        share = self._weights(self._still(sample), sample, range(total - 1, total))[..., -1, :]
        logits = 0 if self._sinks is None else np.exp(self._sinks[0])
        share = share[0, 0, 0, 0]
        seen = round(float(1 / share - logits)) if share > 0 else 0
        if 0 < seen < total:
            return seen
        return total if kept is not None and sample.past > kept and length == 1 else None


def reading_step(region: Region, caches: Mapping[str, Cache], samples: Samples) -> Sample:
    """Return a step whose batch size divides no other size of an attention's inputs, to identify the batch axis."""
    shifted = [c.window_rows for n in region.caches if (c := caches[n]).shifted and c.window_rows is not None]
    step, capacity = samples.step, min(samples.capacity, *shifted, samples.capacity)
    one = step(1, 1, 1).probe
    taken = {d for name in region.texts for d in one.shape(name) or ()}
    batch = next((b for b in _BATCHES if not any(d % b == 0 for d in taken)), _BATCHES[-1])
    past = min(_PAST, max(0, capacity - 2))
    return step(batch, past, max(1, min(_NEW, capacity - past)))


def _update(cache: Cache) -> str:
    """Return the name of the tensor with a cache's new rows or, for computed keys or values, with all rows."""
    return str((cache.past if cache.update is None else cache.update).name)


def _by_head(rows: Array, cache: Cache, heads: int) -> Array:
    if rows.ndim == 4:
        return np.moveaxis(rows, cache.axis, 2)
    return rows.reshape(*rows.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _laid(rows: Array, cache: Cache) -> Array:
    if len(cache.perm) == 4:
        return np.moveaxis(rows, 2, cache.axis)
    moved = rows.transpose(0, 2, 1, 3)
    return moved.reshape(*moved.shape[:2], -1)


def _level(scores: Array, seen: Array) -> Array:
    """Shift scores so that visible keys have the mean 0; softmax stays the same. Hidden keys become 0."""
    means = np.where(seen, scores, 0).sum(-1, keepdims=True) / np.maximum(seen.sum(-1, keepdims=True), 1)
    return np.where(seen, scores - means, 0)


def _scaled(products: Array, step: Scores) -> float:
    factor, scores, seen = step
    level = _level(products * factor, seen)
    return float((level * scores).sum() / ((level * level).sum() or 1.0))


def _fitted(products: Array, steps: tuple[Scores, Scores], scale: float, size: int) -> tuple[float, float]:
    """Return the scale and the softcap (0: none) that explain the scores of small and of large products."""

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
        for free in ([0, 1], [1]):  # Gauss-Newton: fit both; then fit the softcap with the rounded scale
            for _ in range(_ITERATIONS):
                off = missed(at)
                slopes = [(missed(at * (1 + _STEP * (np.arange(2) == i))) - off) / _STEP for i in free]
                at[free] *= 1 + np.linalg.lstsq(np.stack(slopes, -1), -off, rcond=None)[0].clip(-0.3, 0.3)
            at[0] = _rounded(at[0], size)
        if np.abs(missed(at)).max() > _CLOSE * _LARGE:
            raise RecognizeError(
                "the attention weights are not a softmax of scaled products of queries and keys, with or without a "
                "softcap"
            )
    return float(at[0]), 0.0 if np.isinf(at[1]) else float(f"{at[1]:.4g}")


def _rounded(scale: float, size: int) -> float:
    """Round a measured scale to a common value (such as 1/sqrt(D)) if this is close, else to six digits."""
    known = (size**-0.5, 1.0, 1.0 / size)
    return next((k for k in known if abs(scale - k) < 3e-4 * k), float(f"{scale:.6g}"))
