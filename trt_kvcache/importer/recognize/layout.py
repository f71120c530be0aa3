"""Layouts: the axes of a tensor as products of the sizes of an attention.

The sizes are the batch ``b``, the heads of keys ``n``, the queries that read one of them ``g``, the new tokens ``s``,
and the numbers of a head ``d``. A layout names, for each axis of a tensor, the sizes that it consists of:

    [B, S, H * D]  is  ((b,), (s,), (n, g, d))        [B * N, P, D]  without its rows is  ((b, n), (d,))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
Layout = tuple[tuple[str, ...], ...]
ATTENTION = ("b", "n", "g", "s", "d")
"""The order of queries and results of an attention, ``[B, H, S, D]``."""


def order_of(layout: Layout) -> tuple[str, ...]:
    """The sizes in the order of the axes."""
    return tuple(size for axis in layout for size in axis)


def layouts(shape: Sequence[int], sizes: Mapping[str, int]) -> Iterator[Layout]:
    """Yield every layout that fits a shape. Sizes of 1 appear in no layout."""
    names = [name for name, size in sizes.items() if size != 1]
    if prod(shape) != prod(sizes.values()):
        return
    for order in permutations(names):
        rest, layout = list(order), []
        for dim in shape:
            axis: list[str] = []
            while prod(sizes[n] for n in axis) < dim and rest:
                axis.append(rest.pop(0))
            if prod(sizes[n] for n in axis) != dim:
                break
            layout.append(tuple(axis))
        else:
            yield tuple(layout)


def brought(values: Array, layout: Layout, sizes: Mapping[str, int], order: Sequence[str]) -> Array:
    """Reshape and transpose a tensor to one axis per size in `order`. A size that the layout lacks becomes 1."""
    own = order_of(layout)
    axes = values.reshape([sizes[n] for n in own])
    axes = axes.transpose([own.index(n) for n in order if n in own])
    result: Array = axes.reshape([sizes[n] if n in own else 1 for n in order])
    return result
