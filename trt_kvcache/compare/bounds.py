"""The sizes of an engine that a recorded decode must respect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """The largest sizes that an engine was built for.

    Attributes:
        batch: most sequences in a step.
        chunk: most tokens of a sequence in a step.
        logits: most positions of a row with logits in a step; None: all.
        positions: most positions of a sequence; None: no limit.
        encoder: a length of the encoder's output that the engine accepts, for models that do not fix this length.
    """

    batch: int
    chunk: int
    logits: int | None = None
    positions: int | None = None
    encoder: int = 6
