"""One sequence in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from trt_kvcache.runtime.constants import NO_CONSTANTS, Constants

__all__ = ["Slot"]


@dataclass
class Slot:
    """One sequence in the cache.

    Attributes:
        row: of every cache buffer.
        tokens: all token ids; the first `length` are in the cache.
        length: tokens in the cache, in total: circular caches hold the last of them.
        written: the longest that the sequence has been since it was last cropped: how far a circular cache has been
            overwritten.
        running: the decode loop continues it: only the loop may change it.
        constants: what it was given beside its text.
    """

    row: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    written: int = 0
    running: bool = False
    constants: Constants = NO_CONSTANTS

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.tokens) - self.length

    def copy(self, row: int) -> Slot:
        """The same sequence in another row, which nobody continues yet."""
        return Slot(row, list(self.tokens), self.length, self.written, constants=self.constants)
