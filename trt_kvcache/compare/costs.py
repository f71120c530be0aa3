"""Counts the bytes that a decode step must read and write: weights and cache rows.

If an engine does not fit into its GPU's L2 cache, a step takes at least these bytes divided by the memory bandwidth.
Tensors between layers are left out: they are small and mostly stay inside fused kernels.
``tests/compare/test_costs.py`` compares the counts with TensorRT's networks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import CachePlan, cache_bytes

GPUS = {
    "H200": 4800.0, "H100": 3350.0, "A100": 2039.0, "L40S": 864.0, "L4": 300.0, "RTX 5090": 1792.0, "RTX 4090": 1008.0,
}  # fmt: skip
"""Memory bandwidth in GB/s (10**9 bytes), from NVIDIA's data sheets; H200 and H100 as SXM, A100 as SXM 80GB."""

_FEW = 1024


@dataclass(frozen=True)
class StepCost:
    """The bytes that a step of one token per sequence reads and writes.

    Attributes:
        tokens: tokens of each sequence, including the new one.
        weights: bytes of weights, read once for all sequences.
        rows: bytes of cache rows that are read.
        written: bytes of cache rows that are written; all rows of a cache that is not updated in place.
        states: bytes of states, read and written.
    """

    tokens: int
    batch: int
    weights: int
    rows: int
    written: int
    states: int

    @property
    def total(self) -> int:
        """All bytes that the step reads and writes."""
        return self.weights + self.rows + self.written + self.states

    @property
    def share(self) -> float:
        """The weights' share of all bytes of the step, from 0 to 1."""
        return self.weights / self.total

    def limit(self, bandwidth: float) -> float:
        """Return the most tokens per second, summed over all sequences, for a memory bandwidth in GB/s."""
        return self.batch * bandwidth * 1e9 / self.total


def step_cost(plan: CachePlan, tokens: int, batch: int = 1) -> StepCost | None:
    """Return the bytes of a step after which each sequence has `tokens` tokens; None if `plan.weights` is unknown."""
    if plan.weights <= 0:
        return None
    fixed = next((c.logical_shape[0] for c in plan.caches if isinstance(c.logical_shape[0], int)), batch)
    rows = written = 0
    for cache in plan.caches:
        row = cache_bytes(cache, batch) // max(cache.capacity, 1)
        readers = [node.keys for node in plan.attention if cache.past in node.caches] or ["span"]
        for keys in readers:
            in_use = keys == "mask" or (keys == "span" and plan.spans)
            rows += row * (min(tokens, cache.capacity) if in_use else cache.capacity)
        written += row
        if not cache.in_place:  # a step writes the whole cache anew
            rows, written = rows + row * cache.capacity, written + row * (cache.capacity - 1)
    caches = sum(cache_bytes(c, batch) * (1 if c.in_place else 2) for c in plan.caches if c.carried)
    states = plan.cache_bytes(batch) - caches  # two buffers: one is read, the other written
    return StepCost(tokens, int(fixed), plan.weights, rows, written, states)


def usual_tokens(plan: CachePlan) -> tuple[int, ...]:
    """Return the sequence lengths, in tokens, for which costs are shown: a short one, and the capacity."""
    longest = max((cache.capacity for cache in plan.caches), default=1)
    return (_FEW, longest) if longest > _FEW else (longest,)


def read_bandwidth(text: str) -> float:
    """Read a memory bandwidth in GB/s: a number, or a GPU's name in `GPUS`. Raises `OptionError` for other texts."""
    named = {_plain(name): rate for name, rate in GPUS.items()}
    try:
        number = named.get(_plain(text)) or float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise OptionError(f"--bandwidth {text!r} is neither a number of GB/s such as 3350 nor one of {', '.join(GPUS)}")
    return number


def _plain(name: str) -> str:
    return "".join(name.upper().split()).removeprefix("NVIDIA").removeprefix("GEFORCE")
