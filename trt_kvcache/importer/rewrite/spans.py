"""Inputs whose shape carries how many cache rows a step reads.

An added input ``attention_span`` int64 ``[span]`` holds 0, 1, ... span - 1. The span is its *shape*, so it reaches the
Slice nodes as a shape tensor without a copy from the device, a CUDA graph captured for one span stays valid for every
step of that span, and the contents are one constant buffer that serves every span.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.plan import CachePlan, Role


def add_spans(graph: gs.Graph, plan: CachePlan) -> None:
    """Add the plan's span inputs to the graph."""
    for span in plan.spans:
        graph.inputs.append(gs.Variable(span.name, dtype=np.int64, shape=[span.symbol]))


def relax_masks(graph: gs.Graph, plan: CachePlan) -> None:
    """Let mask inputs be shorter than the cache where the plan says so: ONNX pads a short mask with "masked"."""
    shapes = {t.name: t.shape for t in plan.tensors if t.io == "input" and t.role is Role.MASK}
    for tensor in graph.inputs:
        if tensor.name in shapes:
            tensor.shape = [None if d == "?" else d for d in shapes[tensor.name]]
