"""`HashRunner` for a model that takes embeddings and three positions per token: what it holds is a hash of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from runtime.hash_runner import VOCAB, HashRunner, next_token

from trt_kvcache.importer.plan import CachePlan, Role, TensorRole, UpdateMode
from trt_kvcache.runtime.runner import StepBatch

WIDTH = 2
TABLE = np.stack([(np.arange(VOCAB) * 5 + 3) % 101, np.arange(VOCAB)], axis=1).astype(np.float32)
"""Embeddings of the token ids: the first number is what counts."""


def rows(numbers: Sequence[int]) -> NDArray[np.float64]:
    """Embeddings with these numbers; what stands beside them counts for nothing."""
    return np.stack([np.array(numbers, np.float64), np.full(len(numbers), -7.0)], axis=1)


def code(number: int, place: Sequence[int]) -> int:
    """What a cache row holds of a token: a hash of its embedding and its positions."""
    time, height, width = place
    return number + 211 * ((time * 7 + height * 11 + width * 13) % 1009)


class EmbeddedRunner(HashRunner):
    """See the module."""

    def __init__(
        self, kinds: Sequence[tuple[str, int]] = (("linear", 64),), max_batch: int = 4, max_chunk: int = 8,
        *, per_row: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(kinds, max_batch, max_chunk, per_row=per_row)
        self.plan = embedded_plan(self.plan, per_row=per_row)
        self._per_row = per_row
        self.given: list[StepBatch] = []
        self.written: list[NDArray[np.int64]] = []  # the positions of each step

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        assert batch.embeds is not None
        assert batch.embeds.shape == (batch.rows, batch.length, WIDTH)
        assert batch.embeds.dtype == np.float32
        self.given.append(batch)
        places = batch.positions
        if places is None:
            places = np.add.outer(batch.starts, np.arange(batch.length))[:, None]
        places = np.broadcast_to(places, (batch.rows, 3, batch.length))
        self.written.append(places)
        assert self._per_row or (places == places[0]).all(), "the model takes one row of positions for all"
        codes = [
            [code(int(e[0]), p) for e, p in zip(row, place.T.tolist(), strict=True)]
            for row, place in zip(batch.embeds, places, strict=True)
        ]
        return super().step(replace(batch, tokens=np.array(codes, np.int64)))


def embedded_plan(plan: CachePlan, *, per_row: bool) -> CachePlan:
    """With `inputs_embeds` for token ids, and three planes of positions, for each row or for all of them."""
    kept = [t for t in plan.tensors if t.role not in (Role.TOKENS, Role.POSITIONS)]
    embeds = TensorRole(
        "inputs_embeds", "input", Role.TOKENS, "float", ("batch", "seq", WIDTH), "test", ("batch", "sequence", "")
    )
    shape, axes = ((3, "batch", "seq"), ("", "batch", "sequence")) if per_row else ((3, 1, "seq"), ("", "", "sequence"))
    places = TensorRole("position_ids", "input", Role.POSITIONS, "int64", shape, "test", axes)
    return replace(plan, tensors=(embeds, places, *kept))


@dataclass
class Alone:
    """What a sequence holds and gives, from what it was given alone.

    Attributes:
        windows: of the caches.
        plain: the model takes ids, and holds them.
        codes: of its tokens.
        places: their positions.
        most: tokens that it ever had.
    """

    windows: list[int | None]
    plain: bool = False
    codes: list[int] = field(default_factory=list)
    places: list[tuple[int, ...]] = field(default_factory=list)
    most: int = 0

    @classmethod
    def of(cls, runner: HashRunner) -> Alone:
        """An empty one."""
        windows = [None if c.mode is UpdateMode.LINEAR else c.capacity for c in runner.plan.caches]
        return cls(windows, not isinstance(runner, EmbeddedRunner))

    def copy(self) -> Alone:
        return replace(self, codes=list(self.codes), places=list(self.places))

    def cut(self, length: int) -> None:
        del self.codes[length:], self.places[length:]

    def extend(self, numbers: Sequence[float], places: Sequence[Sequence[int]] | None = None) -> None:
        """Take tokens, as the first numbers of their embeddings, and their positions if they have any."""
        for i, number in enumerate(numbers):
            after = max((max(place) for place in self.places), default=-1) + 1
            self.places.append(tuple(places[i]) if places is not None else (after,) * 3)
            self.codes.append(int(number) if self.plain else code(int(number), self.places[-1]))
        self.most = max(self.most, len(self.codes))

    def take(self, tokens: Sequence[int]) -> None:
        """Take tokens by their ids."""
        self.extend(tokens if self.plain else TABLE[list(tokens), 0])

    def next(self) -> int:
        """The token that the model chooses now."""
        return sum(next_token(self.codes, window) for window in self.windows) % VOCAB

    def continued(self, count: int) -> list[int]:
        """The next tokens, without the changes."""
        ahead, tokens = self.copy(), []
        for _ in range(count):
            tokens.append(ahead.next())
            ahead.take(tokens[-1:])
        return tokens
