"""The sizes of an engine that a recorded decode must respect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """The largest sizes that an engine was built for.

    Attributes:
        batch: largest number of sequences in a step.
        chunk: largest number of tokens of a sequence in a step.
        logits: the most positions per row whose logits a step returns; None: all.
        positions: largest number of positions of a sequence; None: no limit.
        encoder: a length of the encoder's output that the engine accepts, for models that do not fix this length.
    """

    batch: int
    chunk: int
    logits: int | None = None
    positions: int | None = None
    encoder: int = 6
