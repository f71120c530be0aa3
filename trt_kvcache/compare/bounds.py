"""What an engine is built for, as far as a decode has to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """The most that an engine was built for.

    Attributes:
        logits: positions of a row with logits in a step; None: all.
        positions: of a sequence; None: any.
        encoder: length of an encoder's output that it takes, where that is open.
    """

    batch: int
    chunk: int
    logits: int | None = None
    positions: int | None = None
    encoder: int = 6
