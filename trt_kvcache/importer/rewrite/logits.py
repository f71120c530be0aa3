"""Logits of the last positions only: the value that they are computed from is cut before the tail.

    x [B, S, H] -- Slice(S - K, S) -- [B, K, H] -- norm, MatMul, ... -- logits [B, K, V]

K is the shape of an added input, as the span is (`trt_kvcache.importer.rewrite.spans`).
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT64, Emitter, dims
from trt_kvcache.importer.plan import CachePlan


def cut_logits(graph: gs.Graph, emitter: Emitter, plan: CachePlan) -> None:
    """Add the plan's logits span to the graph, and cut to it what the logits are computed from."""
    span = plan.logits_span
    if span is None:
        return
    count = gs.Variable(span.name, dtype=np.int64, shape=[span.symbol])
    graph.inputs.append(count)
    tensor = graph.tensors()[span.tensor]
    axis = span.axis
    length = emitter.op("Shape", [tensor], "positions", INT64, start=axis, end=axis + 1)
    kept = emitter.op("Shape", [count], "kept", INT64)
    first = emitter.op("Max", [emitter.op("Sub", [length, kept], "dropped", INT64), emitter.ints([0])], "first", INT64)
    last = emitter.op("Slice", [tensor, first, length, emitter.ints([axis])], "last_positions")
    last.shape = [span.symbol if i == axis else None if d == "?" else d for i, d in enumerate(dims(tensor) or ())]
    for node in [node for node in graph.nodes if node.name in span.readers]:
        node.inputs = [last if t is tensor else t for t in node.inputs]
