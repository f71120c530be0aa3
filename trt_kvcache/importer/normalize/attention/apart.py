"""Scores of past and new tokens that are computed apart: refused by name.

The search for caches sees a past that something else reads than its update, which says little.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import is_op, producer
from trt_kvcache.importer.normalize.candidate import may_be_cache

_MOVES = (
    "Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Tile", "Slice", "Gather", "Mul",
    "Div",
)  # fmt: skip
_ELEMENTWISE = ("Add", "Sub", "Where", "Tanh", "Neg", "Max", "Min")


def refuse_apart(graph: gs.Graph) -> None:
    """Refuse a model that joins scores of what a cache holds with those of new tokens.

    Raises:
        UnsupportedModelError: naming where.
    """
    for node in graph.nodes:
        if not is_op(node, "Concat") or len(node.inputs) != 2:
            continue
        products = [_product(t) for t in node.inputs]
        pasts = [_moved_from(p.inputs[1]) for p in products if p is not None]
        if len(pasts) < len(products):
            continue
        caches = [t for t in pasts if may_be_cache(graph, t)]
        if len(caches) == 1:
            raise UnsupportedModelError(
                f"'{node.name}' joins scores of the past '{caches[0].name}' with scores of the new tokens, which are "
                "computed apart; supported are keys, and values, that are joined before they are multiplied "
                "(Q @ Concat(past, new))"
            )


def _product(scores: gs.Tensor) -> gs.Node | None:
    """What makes scores, behind what caps and masks them."""
    pending, seen = [scores], set[int]()
    while pending:
        node = producer(_moved_from(pending.pop(0)))
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if is_op(node, "MatMul", "Einsum"):
            return node
        if is_op(node, *_ELEMENTWISE):
            pending += node.inputs
    return None


def _moved_from(tensor: gs.Tensor) -> gs.Tensor:
    """What a tensor is moved, repeated or scaled from."""
    while (node := producer(tensor)) is not None and is_op(node, *_MOVES):
        tensor = node.inputs[0]
    return tensor
