"""Positions of text and image models (M-RoPE): several planes per token, such as time, height and width."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import Dim

Array = npt.NDArray[Any]


def axes_of_planes(name: str, shape: Sequence[Dim], batches: Collection[Dim]) -> tuple[str, str, str]:
    """The axes of positions of rank 3: ``[K, B, S]``, or ``[B, K, S]``.

    Args:
        name: of the positions.
        shape: their shape.
        batches: symbols and numbers that mean the batch.

    Raises:
        UnsupportedModelError: the shape does not say which axis is which.
    """
    fits = [axis for axis in (0, 1) if shape[axis] in batches and shape[axis] != "?"]
    fits = fits or [axis for axis in (0, 1) if isinstance(shape[1 - axis], int)]
    if len(fits) > 1:
        fits = [axis for axis in fits if shape[axis] == 1][-1:]
    if not fits:
        raise UnsupportedModelError(
            f"the positions '{name}' {list(shape)} have several planes, and the shape does not say which of its axes "
            "is the batch; supported are [planes, batch, length] and [batch, planes, length]: export with a dynamic "
            "batch of the same name as that of the tokens"
        )
    plane = shape[1 - fits[0]]
    other = "" if isinstance(plane, int) else "?"
    return ("batch", other, "sequence") if fits[0] == 0 else (other, "batch", "sequence")


def place_positions(rows: Array, shape: tuple[int, ...], axes: Sequence[str]) -> Array:
    """Arrange positions for a model's input, for proofs and verification.

    With several planes, the first one holds the tokens' positions, and the other planes hold different numbers. So
    results are also valid for image tokens, whose planes differ.

    Args:
        rows: int64 ``[B, S]``.
        shape: of the model's input; a batch of 1 takes the first row.
        axes: meaning of each axis of the shape.
    """
    batch = axes.index("batch") if "batch" in axes else None
    values = rows if batch is not None and shape[batch] == len(rows) else rows[:1]
    sizes = [1] * len(shape)
    sizes[-1] = values.shape[1]
    if batch is not None:
        sizes[batch] = len(values)
    values = values.reshape(sizes)
    for axis, size in enumerate(shape[:-1]):
        if axis != batch:
            values = values // np.arange(1, size + 1).reshape([-1, *[1] * (len(shape) - axis - 1)])
    return np.broadcast_to(values, shape)
