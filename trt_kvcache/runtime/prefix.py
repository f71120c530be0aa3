"""The prefix cache: keeps cache rows of earlier sequences in host memory, for new ones that begin in the same way.

Rows are kept in blocks of tokens. A block is found by a hash of all tokens up to its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from blake3 import blake3

from trt_kvcache.arguments import as_whole
from trt_kvcache.errors import OptionError, SessionError
from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.machine import free_memory
from trt_kvcache.runtime.buffers import carried_buffers, why_no_return
from trt_kvcache.runtime.encoders.constants import ConstantInputs
from trt_kvcache.runtime.runner import HostBytes, Runner

BLOCK = 32
"""Number of tokens in a block: their cache rows are stored, found and dropped together."""


@dataclass
class PrefixStats:
    """Counts of a prefix cache.

    Attributes:
        lookups: sequences that were looked up at their start.
        hits: sequences whose first tokens were found.
        saved_tokens: tokens that were found; their cache rows were copied, not computed.
        blocks: blocks in the cache now, of `BLOCK` tokens each.
        dropped: blocks that were replaced.
    """

    lookups: int = 0
    hits: int = 0
    saved_tokens: int = 0
    blocks: int = 0
    dropped: int = 0


class PrefixCache:
    """Copies of the cache rows of earlier sequences. A new block replaces the least recently used one.

    Blocks of one sequence are replaced from its end, because a block is useless without earlier blocks. `size` is in
    bytes of host memory, page-locked if the caches lie on a GPU.

    Raises:
        OptionError: `size` is not a number of bytes, or is less than one block; or rows of this model cannot be reused.
        SessionError: too little memory is free.
    """

    def __init__(self, runner: Runner, size: int) -> None:
        size = as_whole(size, "prefix_cache", " of bytes")
        _check(runner.plan)
        self._runner = runner
        self._size = sum(buffer.range_bytes(0, BLOCK) for buffer in carried_buffers(runner.plan))
        count, free = size // self._size, free_memory()
        if count < 1:
            raise OptionError(
                f"prefix_cache is {size} bytes, but a block of {BLOCK} tokens takes {self._size}; give at least "
                "that (better: enough for several prompts), or leave prefix_cache out"
            )
        if size > free:
            raise SessionError(
                f"prefix_cache is {size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB of host memory are free; give less"
            )
        self._data = runner.host_memory(count * self._size).data
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(count))
        self.stats = PrefixStats()

    def find(self, tokens: Sequence[int], most: int, adapter: bytes = b"") -> list[bytes]:
        """Return the names (hashes) of the stored blocks for a sequence's first tokens, at most `most` tokens."""
        blocks = list(takewhile(self._places.__contains__, _names(tokens, most // BLOCK, adapter)))
        self._use(blocks)
        self.stats.lookups += 1
        self.stats.hits += bool(blocks)
        self.stats.saved_tokens += len(blocks) * BLOCK
        return blocks

    def fill(self, row: int, blocks: Sequence[bytes]) -> None:
        """Write the cache rows of `blocks`, which `find` returned, to the start of a batch row in every cache."""
        for at, name in enumerate(blocks):
            self._runner.unpack_rows(row, at * BLOCK, (at + 1) * BLOCK, self._part(self._places[name]))

    def add(self, row: int, tokens: Sequence[int], blocks: int, adapter: bytes = b"") -> None:
        """Copy a sequence's first blocks from a batch row of every cache, unless the prefix cache has them already."""
        names = _names(tokens, blocks, adapter)
        for at, name in enumerate(names):
            if name in self._places:
                continue
            place = self._place(set(names))
            if place is None:
                break
            try:
                self._runner.pack_rows(row, at * BLOCK, (at + 1) * BLOCK, self._part(place))
                self._places[name] = place
            except BaseException:
                self._free.append(place)
                raise
        self._use(names)
        self.stats.blocks = len(self._places)

    def _use(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            if name in self._places:
                self._places.move_to_end(name)

    def _place(self, keep: Container[bytes]) -> int | None:
        """Return the index of memory for a new block; None if this would replace a block in `keep`."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._places))
        if oldest in keep:
            return None
        self.stats.dropped += 1
        return self._places.pop(oldest)

    def _part(self, place: int) -> HostBytes:
        return self._data[place * self._size : (place + 1) * self._size]


def _names(tokens: Sequence[int], blocks: int, adapter: bytes) -> list[bytes]:
    """Return the names of the first `blocks` blocks: digests of the adapter and of all tokens up to the block's end."""
    names, name = [], adapter
    for block in np.array(tokens[: blocks * BLOCK], np.int64).reshape(blocks, BLOCK):
        name = blake3(name + block.tobytes()).digest()
        names.append(name)
    return names


def _check(plan: CachePlan) -> None:
    """Raise `OptionError` if a token's cache row depends on more than this and earlier token ids, or changes later."""
    why = why_no_return(plan, rings=True)
    if not why and (constants := ConstantInputs(plan).tensors):
        why = f"each row also depends on an input other than the tokens ('{constants[0].name}')"
    if why:
        raise OptionError(f"prefix_cache cannot reuse rows of this model: {why}; leave it out")
