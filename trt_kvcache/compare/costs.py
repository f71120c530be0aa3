"""What a decode step has to read and write, counted in bytes: no time, but a limit to it.

A step of one token has to read the weights and the rows of the caches that attention sees, and to write a row. What
goes from layer to layer is small, and mostly stays inside of fused kernels: it is left out. So an engine that is larger
than the caches of its GPU is never faster than the bytes that are counted here by the bandwidth of its memory.
``tests/compare/test_costs.py`` compares with TensorRT's own networks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import CachePlan, CacheUpdate, cache_bytes

__all__ = ["GPUS", "StepCost", "read_bandwidth", "step_cost", "usual_tokens"]

GPUS = {
    "H200": 4800.0, "H100": 3350.0, "A100": 2039.0, "L40S": 864.0, "L4": 300.0, "RTX 5090": 1792.0, "RTX 4090": 1008.0,
}  # fmt: skip
"""Bandwidth of the memory in GB/s (10**9 bytes), from NVIDIA's data sheets: of H200 and H100 SXM, A100 SXM 80GB."""

_FEW = 1024


@dataclass(frozen=True)
class StepCost:
    """The bytes of a step of one token.

    Attributes:
        tokens: of each sequence, with the new one.
        batch: sequences.
        weights: bytes of them, read once for all sequences.
        rows: bytes of rows of caches that are read.
        written: bytes of rows of caches that are written. What is not updated in place is read and written whole.
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
        """Bytes of the step."""
        return self.weights + self.rows + self.written + self.states

    @property
    def share(self) -> float:
        """Share of the weights."""
        return self.weights / self.total

    def limit(self, bandwidth: float) -> float:
        """The most tokens per second of all sequences that a memory of `bandwidth` GB/s allows."""
        return self.batch * bandwidth * 1e9 / self.total


def step_cost(plan: CachePlan, tokens: int, batch: int = 1) -> StepCost | None:
    """The bytes of a step of one token; None where the weights were not counted.

    Args:
        plan: of the model.
        tokens: of each sequence, with the new one; at most what the caches hold counts.
        batch: sequences; a fixed batch size in the model wins.
    """
    if plan.weights <= 0:
        return None
    fixed = next((c.logical_shape[0] for c in plan.caches if isinstance(c.logical_shape[0], int)), batch)
    rows = written = 0
    for cache in plan.caches:
        row = cache_bytes(cache, batch) // max(cache.capacity, 1)
        readers = [node.keys for node in plan.attention if cache.past in node.caches] or ["span"]
        rows += sum(row * _rows(cache, tokens, keys, spans=bool(plan.spans)) for keys in readers)
        written += row
        if not cache.in_place:  # the update is a copy
            rows, written = rows + row * cache.capacity, written + row * (cache.capacity - 1)
    caches = sum(cache_bytes(c, batch) * (1 if c.in_place else 2) for c in plan.caches if c.carried)
    states = plan.cache_bytes(batch) - caches  # two buffers: one is read, the other written
    return StepCost(tokens, int(fixed), plan.weights, rows, written, states)


def _rows(cache: CacheUpdate, tokens: int, keys: str, *, spans: bool) -> int:
    """Rows that one attention reads."""
    in_use = keys == "mask" or (keys == "span" and spans)
    return min(tokens, cache.capacity) if in_use else cache.capacity


def usual_tokens(plan: CachePlan) -> tuple[int, ...]:
    """Lengths of a text at which a step is worth knowing: a short one, and the longest that caches hold."""
    longest = max((cache.capacity for cache in plan.caches), default=1)
    return (_FEW, longest) if longest > _FEW else (longest,)


def read_bandwidth(text: str) -> float:
    """GB/s of a text: a number, or the name of a GPU of `GPUS`.

    Raises:
        OptionError: it is neither.
    """
    named = {_plain(name): rate for name, rate in GPUS.items()}
    if (rate := named.get(_plain(text))) is not None:
        return rate
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise OptionError(f"--bandwidth {text!r} is neither a number of GB/s such as 3350 nor one of {', '.join(GPUS)}")
    return number


def _plain(name: str) -> str:
    return "".join(name.upper().split()).removeprefix("NVIDIA").removeprefix("GEFORCE")
