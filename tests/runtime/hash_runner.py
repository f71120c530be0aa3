"""Runners without a model: the next token is a hash of what the cache rows hold, so that any cache error shows.

Each cache row holds the token that was written there and its position. The token after a sequence is a hash of all
pairs that the sequence may see. A row that was lost, moved to the wrong place, left stale or not zeroed gives another
token. Like the real runners' engines they drop what they may not write, but say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import sample_plans
from numpy.typing import NDArray

from trt_kvcache.errors import SessionError
from trt_kvcache.importer.cache_plan import CachePlan, Role, StateUpdate, TensorRole, UpdateMode
from trt_kvcache.runtime.runner import Array, HostBytes, HostMemory, StepBatch

VOCAB = 97


def plan(kinds: Sequence[tuple[str, int]], *, per_row: bool = True) -> CachePlan:
    """One cache for each mode and capacity; the rows of a model that is not `per_row` share one write index."""
    base = sample_plans.sample_plan(1)
    caches = tuple(
        replace(
            base.caches[0], past=f"cache.{i}", present=f"updated_cache.{i}", dtype="float", capacity=rows,
            mode=UpdateMode(mode), logical_shape=("batch", rows, 2), physical_shape=("batch", 1, rows, 2),
        )
        for i, (mode, rows) in enumerate(kinds)
    )  # fmt: skip
    tensors = [t for t in base.tensors if "cache" not in t.name]
    if not per_row:
        tensors = [replace(t, shape=(1,), axes=("",)) if t.name == "write_indices" else t for t in tensors]
    return replace(base, caches=caches, tensors=tuple(tensors), attention=(), masks=(), spans=())


def with_state(plan: CachePlan) -> CachePlan:
    """A plan of a model that keeps state as well."""
    return replace(plan, states=(StateUpdate("past_state", "state", "float", ("batch", 4), "test"),))


def with_encoder(plan: CachePlan) -> CachePlan:
    """A plan of a model that is given something beside each text."""
    axes = ("batch", "encoder", "")
    given = TensorRole("encoder_output", "input", Role.CONSTANT, "float", ("batch", "source", 4), "test", axes)
    return replace(plan, tensors=(*plan.tensors, given))


def next_token(tokens: Sequence[int], window: int | None) -> int:
    """The logits after `tokens`, from the tokens alone."""
    total = 17
    first = 0 if window is None else max(0, len(tokens) - window)
    for position in range(first, len(tokens)):
        total = (total * 31 + (tokens[position] + 1) * (position + 1)) % 1000003
    return total % VOCAB


class HashRunner:
    """See the module. With several caches, the token is the sum of what each of them says.

    Attributes:
        steps: every batch that was run.
        host: bytes of host memory that are held.
        fail: tokens whose presence in a step makes it fail before anything is written.
    """

    max_positions: int | None = None
    home = None
    name = "hash"
    vocab = VOCAB

    def __init__(
        self, kinds: Sequence[tuple[str, int]] = (("linear", 64),), max_batch: int = 4, max_chunk: int = 8,
        *, per_row: bool = True, max_logits: int | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan(kinds, per_row=per_row)
        self.max_batch, self.max_chunk, self.max_logits = max_batch, max_chunk, max_logits
        self.buffers = {
            c.past: np.full((max_batch, 1, c.capacity, 2), 0, np.float32) for c in self.plan.caches
        }  # fmt: skip
        self.steps: list[StepBatch] = []
        self.fail: set[int] = set()
        self.host: dict[int, int] = {}
        self.closed = False
        self.model = "00"

    def identity(self) -> str:
        return self.model

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        assert not self.closed
        assert 1 <= batch.length <= self.max_chunk
        assert batch.keep <= (self.max_logits or self.max_chunk)
        assert batch.first_row >= 0
        assert batch.first_row + batch.rows <= self.max_batch
        if self.fail & set(batch.tokens.ravel().tolist()):
            raise SessionError("the step failed on purpose")
        self.steps.append(batch)
        logits = np.zeros((batch.rows, batch.keep, VOCAB), np.float32)
        for r in range(batch.rows):
            row, start = batch.first_row + r, int(batch.starts[r])
            for cache in self.plan.caches:
                self._check(cache.mode, cache.capacity, start, batch.length)
                for i in range(batch.length):
                    self.buffers[cache.past][row, 0, (start + i) % cache.capacity] = batch.tokens[r, i], start + i + 1
            for k in range(batch.keep):
                length = start + batch.length - batch.keep + k + 1
                logits[r, k, sum(self._read(row, length)) % VOCAB] = 1
        return logits

    def _check(self, mode: UpdateMode, capacity: int, start: int, length: int) -> None:
        if mode is UpdateMode.LINEAR:
            assert start + length <= capacity, "TensorRT would drop this write"
        else:
            assert length == 1 or start + length <= capacity, "an update overwrites what its own tokens see"

    def _read(self, row: int, length: int) -> list[int]:
        """Each cache's part of the logits of a sequence of `length` tokens."""
        found = []
        for cache in self.plan.caches:
            total = 17
            for position in range(max(0, length - cache.capacity), length):
                token, held = self.buffers[cache.past][row, 0, position % cache.capacity]
                total = (total * 31 + (int(token) + 1) * int(held)) % 1000003
            # One NaN anywhere in the row poisons attention, visible or not.
            found.append(total if np.isfinite(self.buffers[cache.past][row]).all() else 0)
        return [t % VOCAB for t in found]

    def copy_rows(self, source: int, target: int, tokens: int) -> None:
        for buffer in self.buffers.values():
            buffer[target, :, :tokens] = buffer[source, :, :tokens]

    def zero_rows(self, row: int, start: int, stop: int) -> None:
        for buffer in self.buffers.values():
            buffer[row, :, start:stop] = 0

    def read_row(self, name: str, row: int, tokens: int) -> Array:
        return self.buffers[name][row, :, :tokens].copy()

    def write_row(self, name: str, row: int, data: Array) -> None:
        self.buffers[name][row, :, : data.shape[1]] = data

    def host_memory(self, size: int) -> HostMemory:
        data = np.full(size, 0xFF, np.uint8)
        self.host[id(data)] = size
        return HostMemory(data, lambda: self.host.pop(id(data), None))

    def pack_rows(self, row: int, start: int, stop: int, into: HostBytes) -> None:
        for rows, data in self._packed(row, start, stop, into):
            data[...] = rows

    def unpack_rows(self, row: int, start: int, stop: int, data: HostBytes) -> None:
        for rows, held in self._packed(row, start, stop, data):
            rows[...] = held

    def _packed(self, row: int, start: int, stop: int, data: HostBytes) -> Iterator[tuple[Array, Array]]:
        at = 0
        for buffer in self.buffers.values():
            rows = buffer[row, :, start:stop]
            yield rows, data[at : at + rows.nbytes].view(np.float32).reshape(rows.shape)
            at += rows.nbytes
        assert at <= data.nbytes

    def view(self, name: str) -> Array:
        return self.buffers[name]

    def close(self) -> None:
        self.closed = True


def continued(runner: HashRunner, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens after a prompt, from the tokens alone."""
    tokens = list(prompt)
    windows = [None if c.mode is UpdateMode.LINEAR else c.capacity for c in runner.plan.caches]
    for _ in range(count):
        tokens.append(sum(next_token(tokens, w) for w in windows) % VOCAB)
    return tokens[len(prompt) :]


# `HashRunner` for a model that takes embeddings and three positions per token: what it holds is a hash of both.


WIDTH = 2
TABLE = np.stack([(np.arange(VOCAB) * 5 + 3) % 101, np.arange(VOCAB)], axis=1).astype(np.float32)
"""Embeddings of the token ids: the first number is what counts."""


def rows(numbers: Sequence[int]) -> NDArray[np.float64]:
    """Embeddings with these numbers; what stands beside them counts for nothing."""
    return np.stack([np.array(numbers, np.float64), np.full(len(numbers), -7.0)], axis=1)


def code(number: int, place: Sequence[int]) -> int:
    """A token's row of a cache: a hash of its embedding and its positions."""
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
    """A sequence's rows and logits, from its tokens alone.

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
        windows = [None if c.mode is UpdateMode.LINEAR else c.capacity for c in runner.plan.caches]
        return cls(windows, not isinstance(runner, EmbeddedRunner))

    def __len__(self) -> int:
        return len(self.codes)

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
        self.extend(tokens if self.plain else TABLE[list(tokens), 0])

    def next(self) -> int:
        """The token that the model chooses now."""
        return sum(next_token(self.codes, window) for window in self.windows) % VOCAB

    def chosen(self, token: int) -> None:
        """Check what a session says comes next."""
        assert token == self.next()

    def scored(self, logits: NDArray[np.float32]) -> None:
        """Check the scores that a session gives."""
        self.chosen(int(logits.argmax()))

    def continued(self, count: int) -> list[int]:
        """The next tokens, without the changes."""
        ahead, tokens = self.copy(), []
        for _ in range(count):
            tokens.append(ahead.next())
            ahead.take(tokens[-1:])
        return tokens
