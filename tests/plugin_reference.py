"""A reference of the plugin's operators, refusals and wraps included; and inputs for them."""

import numpy as np
from harness import Feeds
from kernel_cases import quantize_linear, refused
from reference import tensor_scatter

from trt_kvcache.importer.cache_plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.operators import Operator

CAPACITY = 6


def reference(operator: Operator, feeds: Feeds) -> Feeds:
    """The result of an operator, sequence by sequence."""
    packed = operator.form is UpdateForm.PACKED_NHD
    length, bounds = feeds["update_0"].shape[0 if packed else 2], feeds["lengths"] if packed else None
    presents = {}
    for i in range(operator.caches):
        present, update = feeds[f"cache_{i}"].copy(), feeds[f"update_{i}"]
        presents[f"present_{i}"] = present
        if operator.quantized:
            scale = feeds[f"scale_{i}"].reshape((-1, 1) if packed else (-1, 1, 1))
            update = quantize_linear(update, scale, "int8").view(np.int8)
        for b, first in enumerate(feeds["write_indices"]):
            start, end = (0, length) if bounds is None else map(int, bounds[b : b + 2])
            if refused(int(first), start, end, length, present.shape[2], operator.mode):
                continue
            rows = update[start:end].swapaxes(0, 1)[None] if packed else update[b : b + 1]
            present[b : b + 1] = tensor_scatter(present[b : b + 1], rows, [first], 2, operator.mode.value)
        if bounds is not None and (np.diff(bounds) < 0).any():
            presents[f"present_{i}"] = feeds[f"cache_{i}"]
    return presents


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
