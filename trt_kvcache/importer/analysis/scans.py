"""What stands before a Scan: TensorRT builds less there.

Measured on TensorRT for RTX 1.7.1, where the number of steps of the Scan is dynamic: an IAttention that the Scan
depends on kills the builder (SIGSEGV), and repeats fail (see `rewrite.repeats`). Attention in plain operators builds
there, and IAttention does behind every Scan, beside it, and before one of a fixed number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import dims, is_op, producer


def nodes_before_scans(graph: gs.Graph) -> Iterator[gs.Node]:
    """Every node that a Scan of the main graph over a dynamic number of steps depends on."""
    pending = [node for node in graph.nodes if is_op(node, "Scan") and not _is_fixed(node)]
    seen: set[int] = set()
    while pending:
        for tensor in pending.pop().inputs:
            maker = producer(tensor)
            if maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                pending.append(maker)
                yield maker


def _is_fixed(scan: gs.Node) -> bool:
    """Whether the model says how many steps a Scan makes."""
    count = int(scan.attrs["num_scan_inputs"])
    axes = scan.attrs.get("scan_input_axes") or [0] * count
    for tensor, axis in zip(scan.inputs[-count:], axes, strict=True):
        shape = dims(tensor)
        if shape is not None and isinstance(shape[axis], int):
            return True
    return False
