"""One tensor whose row j of sequence b is made of row j of sequence b of caches, of j itself, and of constants.

latents [B, 1, T, 512] -- MatMul(weight) -> Reshape -> [B, T, H, 256] -- Transpose -> [B, H, T, 256]
batch at 0, rows at 2                                  rows at 1                      rows at 2
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from trt_kvcache.importer.extensions.latent_attention.positions import PositionRows, Taking
from trt_kvcache.importer.normalize.findings import Write

MOVES = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Slice", "Gather")
"""Operators that only move and repeat what a row holds."""
Axes = tuple[int, ...]
"""Of the batch, unless all sequences are alike, and of the rows."""


@dataclass(frozen=True, eq=False)
class RowFunction:
    """One tensor made of caches row by row.

    Attributes:
        tensor: as exported.
        axes: of the batch and of the rows; of the rows alone where they are made of positions and constants.
        writes: of the caches behind it.
        node: what makes it; None: it is a cache, or `rows`.
        shape: what the operand says that gives `tensor` its shape: 0 and -1 as Reshape has them; None: there is none.
        is_moved: it is one cache, moved, repeated and scaled.
        is_new: rows are those of the new tokens, not of all.
        rows: what it holds of each position, where that is not made of anything else; None: it is.
        taking: how it takes the new tokens' rows of those of all; None: it does something else.
        inputs: of `node`, as exported.
    """

    tensor: gs.Tensor
    axes: Axes
    writes: tuple[Write, ...]
    node: gs.Node | None = None
    shape: tuple[int, ...] | None = None
    is_moved: bool = True
    is_new: bool = False
    rows: PositionRows | None = None
    taking: Taking | None = None
    inputs: tuple[gs.Tensor, ...] = ()
