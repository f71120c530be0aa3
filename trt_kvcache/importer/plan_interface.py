"""Changes of a model's interface on the way: plain data of the plan, about the model as exported.

Nothing here imports ONNX or TensorRT.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Dim = int | str
"""A dimension: a fixed size, or the name of a symbol (``"?"`` where the model gives neither)."""


class OriginalRole(str, Enum):
    """The part that an input or output plays in a model whose interface normalization changed."""

    TOKENS = "tokens"
    """Token ids or embeddings ``[B, S, ...]``."""
    POSITIONS = "positions"
    """Position of every new token: ``P + arange(S)``, as ``[S]``, ``[1, S]`` or ``[B, S]``."""
    PADDING_MASK = "padding_mask"
    """Ones for every token of the past and of the update: integer or bool ``[B, P + S]``."""
    PAST_LENGTH = "past_length"
    """Tokens in the cache before the step: ``P``, a scalar or one per row."""
    MASK = "mask"
    """The caller's own mask over every row of a cache: ``[B, 1, S, L]``."""
    GROWING_CACHE = "growing_cache"
    """A cache that is as long as the text: ``P`` rows in, ``P + S`` rows out; or as long as what it keeps of that."""
    FIXED_CACHE = "fixed_cache"
    """A cache of fixed capacity, the same length in and out."""
    CONSTANT = "constant"
    """Given once and only read, such as the output of an encoder or its keys and values."""
    STATE = "state"
    """State of fixed shape that every step replaces."""
    SWITCH = "switch"
    """Chooses between the branches of a merged export, or only the one without a past reads it: all ones."""
    LOGITS = "logits"
    OTHER = "other"


@dataclass(frozen=True)
class InterfaceChange:
    """An input or output of the model as exported that changes or disappears.

    Attributes:
        io: ``"input"`` or ``"output"``.
        old: name and shape in the model as exported, such as ``"attention_mask [batch, P + S]"``; empty: it is new.
        new: name and shape in the rewritten model; empty: it is gone.
        why: what it becomes, or what the caller gives instead.
    """

    io: str
    old: str
    new: str
    why: str


@dataclass(frozen=True)
class OriginalTensor:
    """One input or output of the model as exported, where normalization changed the interface.

    Attributes:
        io: ``"input"`` or ``"output"``.
        shape: as exported; fixed sizes and symbols.
        axes: what each axis is: ``"batch"``, ``"sequence"`` (S), ``"past"`` (P), ``"total"`` (P + S),
            ``"capacity"``, or ``""``.
        kept: rows, at most, of a growing cache of which only the newest ones stay: ``min(P, kept)`` in,
            ``min(P + S, kept)`` out; of a padding mask over it, which has ``min(P, kept) + S`` columns; None: it is as
            long as the text. Where the axis of the past has a fixed size, the cache is shifted: it always has `kept`
            rows, and a mask over it as many columns, those of tokens last.
        on: of a switch: what takes the branch with a past.
    """

    name: str
    io: str
    role: OriginalRole
    dtype: str
    shape: tuple[Dim, ...]
    axes: tuple[str, ...]
    kept: int | None = None
    on: bool = True


@dataclass(frozen=True)
class StateUpdate:
    """State that is no attention cache, replaced as a whole by every step: convolution and linear-attention state.

    Attributes:
        past, present: names of the graph's input and output, of one dtype and shape.
        reason: why past and present need two buffers.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[Dim, ...]
    reason: str
