"""One sequence in the cache: tokens, positions, batch row, and its cache contents if they were offloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trt_kvcache.errors import SessionError
from trt_kvcache.machine import free_memory
from trt_kvcache.runtime.adapters import Adapter
from trt_kvcache.runtime.buffers import carried_buffers, linear_capacity
from trt_kvcache.runtime.encoders.constants import NO_CONSTANTS, Constants
from trt_kvcache.runtime.runner import Runner
from trt_kvcache.runtime.token_inputs import IN_ORDER, NO_EMBEDS, Array, Embeds, Indices, Positions

if TYPE_CHECKING:
    from trt_kvcache.runtime.cache_file import FileRows


class HostRows:
    """The cache contents of an offloaded slot in host memory, page-locked if the caches lie on a GPU.

    Raises `SessionError` if too little memory is free.
    """

    def __init__(self, runner: Runner, row: int, tokens: int) -> None:
        self._runner, self._tokens = runner, tokens
        self._buffers = carried_buffers(runner.plan)
        size, free = sum(buffer.range_bytes(0, tokens) for buffer in self._buffers), free_memory()
        if size > free:
            raise SessionError(
                f"to offload {tokens} tokens takes {size / 1e9:.3f} GB of host memory, but only {free / 1e9:.3f} GB "
                "are free; offload to a file (cache.offload(slot, path)), or remove sequences"
            )
        self._memory = runner.host_memory(size)
        runner.pack_rows(row, 0, tokens, self._memory.data)

    def fill(self, row: int) -> None:
        """Write the saved contents to a batch row of every cache."""
        self._runner.unpack_rows(row, 0, self._tokens, self._memory.data)

    def arrays(self) -> Mapping[str, Array]:
        """Return the saved contents by name of the past input, in the shapes that `Runner.read_row` returns."""
        arrays, start = {}, 0
        for buffer in self._buffers:
            stop = start + buffer.range_bytes(0, self._tokens)
            flat = self._memory.data[start:stop].view(buffer.array_dtype)
            arrays[buffer.past] = flat.reshape(buffer.row_shape(self._tokens))
            start = stop
        return arrays

    def close(self) -> None:
        """Free the memory. Calling it again does nothing."""
        self._memory.close()


@dataclass
class Slot:
    """The state of one sequence in the cache. To change its tokens, the cache stores a new object.

    Attributes:
        row: batch row in every cache buffer; -1: the slot has no row now.
        tokens: all token ids; the first `length` are in the cache.
        length: total number of tokens in the cache; circular caches hold the last of them.
        written: the largest length since the last crop; it shows how far a circular cache was overwritten.
        running: True while the decode loop continues the sequence; then only the loop may change the slot.
        constants: inputs of the sequence other than its tokens, the same in all steps.
        embeds: the caller's embeddings of tokens that are not in the cache yet.
        offloaded: cache contents of a slot without a row; None if the slot is not offloaded or has no contents.
        used: time of the last use; the slot with the lowest value was used least recently.
        by_ids: number of first tokens for which the caller gave ids alone, no embeddings or positions; None: all.
        remembered: number of first tokens that were copied to or from the prefix cache.
    """

    row: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    written: int = 0
    running: bool = False
    constants: Constants = NO_CONSTANTS
    adapter: Adapter | None = None
    embeds: Embeds = NO_EMBEDS
    positions: Positions = IN_ORDER
    offloaded: HostRows | FileRows | None = None
    used: int = 0
    by_ids: int | None = None
    remembered: int = 0

    @property
    def pending(self) -> int:
        """Number of tokens that are not in the cache yet."""
        return len(self.tokens) - self.length

    @property
    def next_position(self) -> int:
        """The position of the next token."""
        return self.positions.after(len(self.tokens))

    def appended(self, tokens: Iterable[int], embeds: Array | None = None, positions: Indices | None = None) -> Slot:
        """Return a copy with more tokens, which are not in the cache yet.

        `embeds` ``[S, H]`` replace the tokens' embeddings; None: they are looked up. `positions` are int64 ``[planes,
        S]`` (planes: positions per token); None: the next positions.
        """
        start, by_ids = len(self.tokens), self.by_ids
        if by_ids is None and not (embeds is None and positions is None):
            by_ids = start
        return replace(
            self,
            tokens=[*self.tokens, *tokens],
            embeds=self.embeds if embeds is None else self.embeds.followed(start, embeds),
            positions=self.positions if positions is None else self.positions.followed(start, positions),
            by_ids=by_ids,
        )

    def truncated(self, length: int) -> Slot:
        """Return a copy with only the first `length` tokens. Cache contents do not change."""
        return replace(
            self,
            tokens=self.tokens[:length],
            embeds=self.embeds.within(0, length),
            positions=self.positions.first(length),
            remembered=min(self.remembered, length),
            by_ids=None if self.by_ids is None or self.by_ids >= length else self.by_ids,
        )

    def copy(self, row: int) -> Slot:
        """Return a copy of the sequence for another batch row; the copy is not generating yet."""
        return replace(self, row=row, tokens=list(self.tokens), running=False, offloaded=None)

    def close(self) -> None:
        """Free the offloaded contents, after the sequence got a batch row again or was removed."""
        if self.offloaded is not None:
            self.offloaded.close()


def sequence_capacity(runner: Runner) -> int | None:
    """Return the most tokens of a sequence with consecutive positions; None if there is no limit."""
    return min((n for n in (linear_capacity(runner.plan), runner.max_positions) if n is not None), default=None)
