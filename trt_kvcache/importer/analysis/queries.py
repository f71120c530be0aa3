"""Queries of attentions: where their positions lie, and which attentions have the same ones."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import dims, input_or_none, is_op, producer, small_constant

MOST_READERS = 5
"""Attentions over one query: the rewrite scales it by 1, 4, 1/4, 16 and 1/16 for them, which float16 still holds."""


def sequence_axis(tensor: gs.Tensor) -> int:
    """The sequence axis of Q, K or V: 1 of ``[B, S, N*H]``, 2 of ``[B, N, S, H]``."""
    shape = dims(tensor)
    return 1 if shape is not None and len(shape) == 3 else 2


def whole_query(node: gs.Node) -> gs.Tensor:
    """What Q of an attention is a view of, or some of the positions of; some of the heads are a query of their own."""
    tensor = node.inputs[0]
    while (maker := producer(tensor)) is not None:
        if is_op(maker, "Slice"):
            axes = small_constant(input_or_none(maker, 3))
            rank = len(dims(maker.inputs[0]) or ()) or 4
            if axes is None or [int(a) % rank for a in axes] != [sequence_axis(maker.inputs[0])]:
                break
        elif not is_op(maker, "Transpose", "Reshape", "Unsqueeze", "Squeeze"):
            break
        tensor = maker.inputs[0]
    return tensor
