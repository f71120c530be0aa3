"""The start of a step of a proof: cache contents, constants and embeddings, which a seed gives on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from trt_kvcache.importer.plan import CachePlan, Role, TensorRole, UpdateMode
from trt_kvcache.importer.steps.contents import CacheTensor, find_caches, find_states, first_contents, ring_window
from trt_kvcache.importer.steps.inputs import draw_constants
from trt_kvcache.runtime.dtypes import array_dtype

Array = npt.NDArray[Any]


def draws_digest(seed: int) -> str:
    """BLAKE3 (hex) of numbers drawn in all ways that are used here: NumPy may change what a seed gives."""
    rng, digest = np.random.default_rng([seed, 3]), blake3()
    for drawn in (rng.uniform(-1, 1, 64), rng.choice([-1.0, 1.0], 64), rng.normal(0, 1, 64), rng.integers(-9, 9, 64)):
        digest.update(np.ascontiguousarray(drawn).tobytes())
    return digest.hexdigest()


class Contents:
    """Draws what is not stored in a proof.

    Attributes:
        caches: of a plan, by name of the past.

    Args:
        plan: of the rewritten model.
        texts: see `Facts.texts`.
        seed: of all that is drawn.
        garbage: see `Facts.garbage`.
        encoder: see `Facts.encoder`.
    """

    def __init__(self, plan: CachePlan, texts: Mapping[str, int], seed: int, garbage: float, encoder: int) -> None:
        self.caches: dict[str, CacheTensor] = {c.role.name: c for c in (*find_caches(plan), *find_states(plan))}
        self._numbers = {name: number for number, name in enumerate(self.caches)}
        self._plan, self._texts, self._seed, self._garbage = plan, texts, seed, garbage
        self._encoder = encoder

    def physical(self, name: str, episode: int, starts: Sequence[int]) -> Array:
        """Contents ``[R, *physical_shape[1:]]`` of a cache before an episode, the same as the original had."""
        cache, number = self.caches[name], self._numbers[name]
        rng = np.random.default_rng([self._seed, episode, number])
        values = first_contents(self._held(cache), starts, self._garbage, rng, twin=True)
        if name in self._texts:
            rng = np.random.default_rng([self._seed, episode, number, 1])
            values = ring_window(values, cache, starts, self._garbage, rng, twin=True)
        return cache.to_physical(values).astype(array_dtype(cache.role.dtype), copy=False)

    def _held(self, cache: CacheTensor) -> CacheTensor:
        """The cache with as many rows as the original has."""
        rows, update = self._texts.get(cache.role.name), cache.update
        if rows is None or update is None:
            return cache
        shape = list(update.logical_shape)
        shape[update.sequence_axis] = rows
        held = replace(update, mode=UpdateMode.LINEAR, capacity=rows, logical_shape=tuple(shape))
        return replace(cache, update=held)

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
