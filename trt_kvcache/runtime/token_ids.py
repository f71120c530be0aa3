"""Checks token ids from callers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trt_kvcache.arguments import shown
from trt_kvcache.errors import PromptError


def read_ids(tokens: object, vocab: int) -> list[int]:
    """Check token ids and return them as a list: a model may read wrong memory for an id that it does not have.

    Args:
        tokens: a flat list of ids, possibly empty.
        vocab: size of the vocabulary: ids are 0 to ``vocab - 1``.

    Raises:
        PromptError: `tokens` is not a flat list of integers, or the model does not know an id.
    """
    if isinstance(tokens, Iterable) and not (hasattr(tokens, "__array__") or isinstance(tokens, (Sequence, Mapping))):
        tokens = list(tokens)
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise PromptError("a prompt is a nested list; token ids are a flat list of whole numbers") from None
    if array.size == 0:
        return []
    # too large for NumPy's integers
    huge = array.dtype.kind == "O" and all(isinstance(token, int) for token in array.flat)
    if array.ndim != 1 or not (array.dtype.kind in "iu" or huge):
        raise PromptError(f"a prompt is {array.dtype} {list(array.shape)}; token ids are a flat list of whole numbers")
    wrong = array[(array < 0) | (array >= vocab)]
    if wrong.size:
        raise PromptError(f"token id {shown(int(wrong[0]))} is out of range; the model has 0 to {vocab - 1}")
    ids: list[int] = array.tolist()
    return ids


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two texts. Slices are compared: faster than single tokens."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same
