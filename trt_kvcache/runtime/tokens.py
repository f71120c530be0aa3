"""Token ids as callers give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trt_kvcache.arguments import shown
from trt_kvcache.errors import PromptError

__all__ = ["common_length", "read_ids"]


def read_ids(tokens: object, vocab: int) -> list[int]:
    """Check ids, of which there may be none: what looks them up takes a negative one from the end, or reads anywhere.

    Args:
        tokens: flat.
        vocab: the model knows 0 to ``vocab - 1``.

    Raises:
        PromptError: they are no flat list of integers, or the model does not know one.
    """
    if isinstance(tokens, Iterable) and not (hasattr(tokens, "__array__") or isinstance(tokens, (Sequence, Mapping))):
        tokens = list(tokens)
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise PromptError("a prompt is a nested list; token ids are a flat list of integers") from None
    if array.size == 0:
        return []
    huge = array.dtype.kind == "O" and all(isinstance(token, int) for token in array.flat)  # for any type of NumPy's
    if array.ndim != 1 or not (array.dtype.kind in "iu" or huge):
        raise PromptError(f"a prompt is {array.dtype} {list(array.shape)}; token ids are a flat list of whole numbers")
    wrong = array[(array < 0) | (array >= vocab)]
    if wrong.size:
        raise PromptError(f"token id {shown(int(wrong[0]))} is out of range; the model has 0 to {vocab - 1}")
    ids: list[int] = array.tolist()
    return ids


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that two texts begin with alike; lists are compared in pieces, not token by token."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same
