"""What operators do to a tensor that holds several caches, said of each cache by itself.

    past [L, B, N, P, H] -- Gather(1, axis=0) -> [B, N, P, H]           becomes     past.1
    past [L, B, N, P, H] -- Transpose(0, 1, 3, 2, 4)                    becomes     L x Transpose(0, 2, 1, 3)
    past -- ScatterND([1, b, n, row], new) -> Gather(1)                 becomes     ScatterND(past.1, [b, n, row], new)

Every rule is an identity: it holds whatever the caches are and wherever the operator stands. What no rule says of an
operator is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import is_op
from trt_kvcache.importer.stacks import moves, writes
from trt_kvcache.importer.stacks.pieces import Pieces, UnsplittableError

__all__ = ["split_readers"]

_RULES: dict[str, Callable[[Pieces, gs.Node], None]] = {
    "Gather": moves.on_gather, "Slice": moves.on_slice, "Split": moves.on_split, "Squeeze": moves.on_squeeze,
    "Unsqueeze": moves.on_unsqueeze, "Transpose": moves.on_transpose, "Reshape": moves.on_reshape,
    "Shape": moves.on_shape, "Concat": writes.on_concat, "ScatterND": writes.on_scatter_nd,
    "ScatterElements": writes.on_scatter_elements,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Where", "Identity", "Cast"), writes.on_broadcast),
}  # fmt: skip


def split_readers(pieces: Pieces) -> None:
    """Let what reads stacked tensors read their pieces.

    Args:
        pieces: knows those of the graph's inputs; then of everything that is made of them as a whole.

    Raises:
        UnsplittableError: naming the operator that cannot be said of each by itself.
    """
    for node in list(pieces.graph.nodes):
        name = pieces.origin(node)
        if name is None:
            continue
        rule = _RULES.get(node.op) if is_op(node, node.op) else None
        try:
            if rule is None:
                raise UnsplittableError(f"{node.op} '{node.name}' reads it as a whole")
            rule(pieces, node)
        except (UnsplittableError, IndexError) as error:
            raise UnsplittableError(f"'{name}' holds several caches, and {error}") from None
