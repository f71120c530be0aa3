"""What the plugin's operators do, in a few lines of numpy, refusals and wraps included; and inputs for them."""

from __future__ import annotations

import itertools

import numpy as np
from harness import Array, Feeds

from trt_kvcache.importer.plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.operators import Operator

CAPACITY = 6


def reference(operator: Operator, feeds: Feeds) -> Feeds:
    """What an operator does, token by token."""
    packed, circular = operator.form is UpdateForm.PACKED_NHD, operator.mode is UpdateMode.CIRCULAR
    batch, _, capacity, _ = feeds["cache_0"].shape
    presents = [feeds[f"cache_{i}"].copy() for i in range(operator.caches)]
    updates = [quantized(feeds, i) if operator.quantized else feeds[f"update_{i}"] for i in range(operator.caches)]
    length = feeds["update_0"].shape[0 if packed else 2]
    bounds = feeds["lengths"] if packed else None
    ascending = bounds is None or bool((np.diff(bounds) >= 0).all())
    for b in range(batch):
        start, end = (0, length) if bounds is None else (bounds[b], bounds[b + 1])
        first, count = int(feeds["write_indices"][b]), int(end) - int(start)
        fits = circular or count == 0 or (first >= 0 and first + count <= capacity)
        if not (ascending and 0 <= start <= end <= length and fits):
            continue
        for t, (update, present) in itertools.product(range(count), zip(updates, presents, strict=True)):
            token = update[start + t] if packed else update[b, :, start + t]
            present[b, :, (first + t) % capacity if circular else first + t] = token
    return {f"present_{i}": p for i, p in enumerate(presents)}


def quantized(feeds: Feeds, i: int) -> Array:
    """QuantizeLinear in float32: rounded half to even, saturated."""
    scale = feeds[f"scale_{i}"]
    aligned = scale.reshape(-1, *([1] * 2)) if feeds[f"update_{i}"].ndim == 4 else scale.reshape(-1, 1)
    return np.clip(np.rint(feeds[f"update_{i}"].astype(np.float32) / aligned), -128, 127).astype(np.int8)


def feeds_of(operator: Operator, rng: np.random.Generator, trial: int) -> Feeds:
    """Inputs of batch 3, 2 heads; write indices and lengths in range, then beyond, then anything."""
    batch, heads, capacity, length = 3, 2, CAPACITY, int(rng.integers(1, 2 * CAPACITY))
    packed, circular = operator.form is UpdateForm.PACKED_NHD, operator.mode is UpdateMode.CIRCULAR
    source = np.float16 if operator.quantized else np.int8
    index = (np.int32, np.int64)[trial % 2]
    feeds: Feeds = {}
    for i in range(operator.caches):
        size = (4, 2)[i]
        shape = (length, heads, size) if packed else (batch, heads, length, size)
        feeds[f"cache_{i}"] = rng.integers(-100, 100, (batch, heads, capacity, size)).astype(np.int8)
        feeds[f"update_{i}"] = (rng.standard_normal(shape) * 60).astype(source)
        feeds[f"scale_{i}"] = rng.uniform(0.2, 2, (1, heads)[trial % 2]).astype(np.float32)
    reach = 3 * capacity if circular else max(1, capacity - length + 1)
    feeds["write_indices"] = rng.integers(0, reach, batch).astype(index)
    feeds["lengths"] = np.sort(rng.integers(0, length + 1, batch + 1)).astype(index)
    if trial % 3 == 1:
        feeds["write_indices"] = rng.integers(-2, 2 * capacity, batch).astype(index)
    if trial % 3 == 2:
        feeds["lengths"] = rng.integers(-1, length + 2, batch + 1).astype(index)
    return {name: feeds[name] for name in operator.inputs}
