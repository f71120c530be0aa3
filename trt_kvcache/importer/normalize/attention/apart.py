"""Scores of past and new tokens that are computed apart, as some exports for NPUs have them: refused by name.

    Concat(Q @ past K, Q @ new K) -- Softmax -- its first columns @ past V + the others @ new V

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


def refuse_apart(graph: gs.Graph) -> None:
    """Refuse a model that joins scores of what a cache holds with those of new tokens.

    Raises:
        UnsupportedModelError: naming where.
    """
    for node in graph.nodes:
        if not is_op(node, "Concat") or len(node.inputs) != 2:
            continue
        products = [_source(t) for t in node.inputs]
        if not all(t.inputs and is_op(t.inputs[0], "MatMul") for t in products):
            continue
        pasts = [_source(t.inputs[0].inputs[1]) for t in products]
        caches = [t for t in pasts if may_be_cache(graph, t)]
        if len(caches) == 1:
            raise UnsupportedModelError(
                f"'{node.name}' joins scores of the past '{caches[0].name}' with scores of the new tokens, which are "
                "computed apart; supported are scores over both at once: join keys, and values, before they are "
                "multiplied (Q @ Concat(past, new)), and do not split what the softmax gives"
            )


def _source(tensor: gs.Tensor) -> gs.Tensor:
    """What a tensor is moved or scaled from."""
    while (node := producer(tensor)) is not None and is_op(node, *_MOVES):
        tensor = node.inputs[0]
    return tensor
