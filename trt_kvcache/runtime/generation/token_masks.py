"""Masks of tokens: one bit for each token of the vocabulary, 1 if the token may come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import SessionError, TrtKvCacheError

Mask = npt.NDArray[np.int32]

TokenMask = Callable[[npt.NDArray[np.int64]], Mask]
"""Returns the tokens that may come next in one sequence, from its new tokens so far (int64 ``[N]``, no prompt).

The result is int32 ``[ceil(V / 32)]``: token `t` may come next if bit ``t % 32`` (0 is the lowest) of number ``t //
32`` is 1. Tokens beyond the end of a shorter mask are forbidden. The result must depend on these tokens alone: guesses
may be taken back, so a call may have fewer tokens than the one before.
"""


Masks = Callable[[int], Mask]
"""A function that returns the bit masks of a step, int32 ``[R, keep, W]``. Its argument W is the length of a mask."""


class Grammar(Protocol):
    """Limits the texts that a sequence can have. `trt_kvcache.Grammars` compiles grammars."""

    def start(self) -> TokenMask:
        """Return the mask function of a new sequence. Each sequence needs a separate mask function."""


def words(vocab: int) -> int:
    """Return the number of int32 words in a mask with one bit for each of `vocab` tokens."""
    return -(-vocab // 32)


def all_tokens(shape: tuple[int, ...]) -> Mask:
    """Return masks ``[..., words]`` that allow every token."""
    return np.full(shape, -1, np.int32)


def ask_mask(mask: TokenMask, new_tokens: npt.NDArray[np.int64], most: int) -> Mask:
    """Call a mask function with the new tokens of a sequence, and return its mask.

    Raises `SessionError` if the function failed, or did not return int32 with at most `most` words.
    """
    shown = new_tokens.view()
    shown.flags.writeable = False
    try:
        bits = np.asarray(mask(shown))
    except TrtKvCacheError:
        raise
    except Exception as error:
        raise SessionError(f"the token mask failed: {type(error).__name__}: {error}") from error
    if bits.dtype != np.int32 or bits.ndim != 1 or bits.size > most:
        kind = f"{bits.dtype} {list(bits.shape)}"
        raise SessionError(f"the token mask is {kind}; it has to be int32 [{most}], a bit for each token")
    return bits


def pack_masks(allowed: npt.NDArray[np.bool_]) -> Mask:
    """Convert booleans ``[..., V]``, True for allowed tokens, to bit masks ``[..., words]``."""
    masks = np.zeros((*allowed.shape[:-1], 4 * words(allowed.shape[-1])), np.uint8)
    packed = np.packbits(allowed, axis=-1, bitorder="little")
    masks[..., : packed.shape[-1]] = packed
    return masks.view(np.int32)


def keep_allowed(scores: npt.NDArray[np.float32], mask: Mask) -> npt.NDArray[np.float32]:
    """Return scores ``[V]`` with ``-inf`` for tokens that the mask forbids."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: scores.size]
    allowed = np.full_like(scores, -np.inf)
    np.copyto(allowed[: bits.size], scores[: bits.size], where=bits.astype(bool))
    return allowed
