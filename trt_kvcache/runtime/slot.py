"""One sequence in the cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from trt_kvcache.runtime.adapters import Adapter
from trt_kvcache.runtime.encoders.constants import NO_CONSTANTS, Constants
from trt_kvcache.runtime.offload import Offloaded
from trt_kvcache.runtime.token_inputs import IN_ORDER, NO_EMBEDS, Array, Embeds, Indices, Positions

__all__ = ["Slot"]


@dataclass
class Slot:
    """One sequence in the cache. Its text changes by a new object, which the cache stores at once.

    Attributes:
        row: of every cache buffer; -1: it has none now.
        tokens: all token ids; the first `length` are in the cache.
        length: tokens in the cache, in total: circular caches hold the last of them.
        written: the longest that the sequence has been since it was last cropped: how far a circular cache has been
            overwritten.
        running: the decode loop continues it: only the loop may change it.
        constants: its inputs beside the text.
        adapter: that its text is computed with; None: none.
        embeds: of tokens that wait and came as embeddings.
        positions: where its tokens stand.
        offloaded: what the cache held, of a slot without a row; None where it held nothing.
        used: grows with each use: the lowest was used longest ago.
        by_ids: so many of its first tokens came as ids alone, and stand in order; None: all.
        remembered: so many of its first tokens went to the prefix cache, or came from there.
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
    offloaded: Offloaded | None = None
    used: int = 0
    by_ids: int | None = None
    remembered: int = 0

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.tokens) - self.length

    @property
    def next_position(self) -> int:
        """The position of a token after the last one."""
        return self.positions.after(len(self.tokens))

    def appended(self, tokens: Iterable[int], embeds: Array | None = None, positions: Indices | None = None) -> Slot:
        """The same with tokens that wait after the others.

        Args:
            tokens: ids.
            embeds: ``[S, H]`` in the model's dtype: what is written for them; None: what the session makes of the ids.
            positions: int64 ``[planes, S]``; None: they follow.
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
        """The same with its first tokens alone. What the caches hold stays."""
        return replace(
            self,
            tokens=self.tokens[:length],
            embeds=self.embeds.within(0, length),
            positions=self.positions.first(length),
            remembered=min(self.remembered, length),
            by_ids=None if self.by_ids is None or self.by_ids >= length else self.by_ids,
        )

    def copy(self, row: int) -> Slot:
        """The same sequence in another row, which nobody continues yet."""
        return replace(self, row=row, tokens=list(self.tokens), running=False, offloaded=None)
