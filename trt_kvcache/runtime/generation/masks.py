"""Masks of tokens: one bit for each token of the vocabulary, 1 where the token may come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import SessionError, TrtKvCacheError

__all__ = ["Grammar", "Mask", "Masks", "TokenMask", "all_tokens", "ask_mask", "keep_allowed", "pack_masks", "words"]

Mask = npt.NDArray[np.int32]

TokenMask = Callable[[npt.NDArray[np.int64]], Mask]
"""The tokens that may come next in one sequence.

It takes the new tokens of the sequence so far, int64 ``[N]``, without the prompt, and gives int32 ``[ceil(V / 32)]``:
token `t` may come next where bit ``t % 32`` (0 is the lowest) of number ``t // 32`` is 1. Tokens beyond a shorter mask
may not. It has to be a function of these tokens alone: guesses of prompt lookup or a draft model come and go, so that a
call may have fewer tokens than the one before.
"""


Masks = Callable[[int], Mask]
"""The masks of a step: from the numbers of a mask, `W`, to int32 ``[R, keep, W]``."""


class Grammar(Protocol):
    """The texts that a sequence may become; `trt_kvcache.Grammars` compiles such."""

    def start(self) -> TokenMask:
        """Return the mask of a sequence that begins: each has its own."""
        ...


def words(vocab: int) -> int:
    """Numbers of a mask."""
    return -(-vocab // 32)


def all_tokens(shape: tuple[int, ...]) -> Mask:
    """Masks ``[..., words]`` that allow everything."""
    return np.full(shape, -1, np.int32)


def ask_mask(mask: TokenMask, new_tokens: npt.NDArray[np.int64], most: int) -> Mask:
    """Return what a mask says, at most `most` numbers of it.

    Raises:
        SessionError: it failed, or gave no mask.
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
    """Masks ``[..., words]`` of the tokens ``[..., V]`` that are true."""
    masks = np.zeros((*allowed.shape[:-1], 4 * words(allowed.shape[-1])), np.uint8)
    packed = np.packbits(allowed, axis=-1, bitorder="little")
    masks[..., : packed.shape[-1]] = packed
    return masks.view(np.int32)


def keep_allowed(scores: npt.NDArray[np.float32], mask: Mask) -> npt.NDArray[np.float32]:
    """Scores ``[V]`` with ``-inf`` where the mask has no bit."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: scores.size]
    allowed = np.full_like(scores, -np.inf)
    np.copyto(allowed[: bits.size], scores[: bits.size], where=bits.astype(bool))
    return allowed
