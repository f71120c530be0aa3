"""The part of a proof that is not stored: empty caches, constants and embeddings, which a seed gives on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.importer.plan import CachePlan, Role, TensorRole
from trt_kvcache.importer.steps.contents import CacheTensor, all_contents, find_caches, find_states
from trt_kvcache.importer.steps.inputs import draw_constants

Array = npt.NDArray[Any]


def draws_digest(seed: int) -> str:
    """BLAKE3 (hex) of numbers drawn in all ways that are used here: NumPy may change what a seed gives."""
    rng, digest = np.random.default_rng([seed, 3]), blake3()
    floats = rng.uniform(-1, 1, 64), rng.random(64, np.float32), rng.normal(0, 1, 64)
    for drawn in (*floats, rng.integers(-9, 9, 64), rng.integers(-9, 9, 64, np.int8)):
        digest.update(np.ascontiguousarray(drawn).tobytes())
    return digest.hexdigest()


def copies(rows: Array, capacity: int, length: int, start: int) -> None:
    """Let a cache row of the batch hold `start` tokens, of which all but the first `length` are copies of those.

    Args:
        rows: ``[N, ...]``: the rows of the cache, or those of a text that the original holds whole; changed in place.
        capacity: of the cache.
        length: tokens that it holds.
        start: see above.
    """
    tokens = np.arange(max(start - capacity, 0), start)
    places = tokens % capacity
    sources = places % min(length, capacity)
    if len(rows) == capacity:
        rows[places] = rows[sources]
    else:  # of a ring, the newest token of each place
        rows[tokens] = rows[length - 1 - (length - 1 - sources) % capacity]


class Contents:
    """Draws what is not stored in a proof.

    Attributes:
        caches: of a plan, by name of the past.

    Args:
        plan: of the rewritten model.
        seed: of all that is drawn.
        garbage: see `Facts.garbage`.
        encoder: see `Facts.encoder`.
    """

    def __init__(self, plan: CachePlan, seed: int, garbage: float, encoder: int) -> None:
        self.caches: dict[str, CacheTensor] = {c.role.name: c for c in (*find_caches(plan), *find_states(plan))}
        self._plan, self._seed, self._garbage, self._encoder = plan, seed, garbage, encoder

    def first(self, episode: int, starts: Sequence[int]) -> Iterator[tuple[str, Array]]:
        """Contents ``[R, *physical_shape[1:]]`` of each cache, drawn as `Verification` does: tokens, then garbage."""
        for name, values in all_contents(self.caches, self._seed, starts, self._garbage, episode):
            cache = self.caches[name]
            yield name, cache.to_physical(values).astype(array_dtype(cache.role.dtype), copy=False)

    def constants(self, rows: int) -> dict[str, Array]:
        """The inputs that each row is given once, ``[R, ...]`` by name of the input, in its dtype."""
        drawn = draw_constants(self._plan, rows, self._seed, twin=True, length=self._encoder)
        dtypes = {t.name: t.dtype for t in self._plan.tensors if t.io == "input" and t.role is Role.CONSTANT}
        return {name: drawn[name].astype(array_dtype(dtype)) for name, dtype in dtypes.items()}

    def embeds(self, step: int, shape: Sequence[int]) -> Array:
        """The embeddings of the tokens of the step with this number: float64 of this shape."""
        return np.random.default_rng([self._seed, step, 2]).normal(0, 0.5, tuple(shape))


def embedded(plan: CachePlan) -> TensorRole | None:
    """The input of embeddings, of a model that takes these."""
    tokens = plan.tensor(Role.TOKENS)
    return tokens if tokens is not None and tokens.embedded else None
