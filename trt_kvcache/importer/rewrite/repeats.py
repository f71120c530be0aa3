"""Repeats in front of a Scan, as copies side by side.

    Tile(x, [1, 1, n, 1, 1]), Expand(x, [1, 1, n, 1, 1])   ->   Concat(x, ..., x), n times

Gated delta nets, as mobius-onnx exports Qwen3-Next and Qwen3.5, scan the tokens of an update, with keys and queries
that Tile repeats for every head. Measured on TensorRT for RTX 1.7.1: where a Scan over a dynamic number of tokens
depends on a Tile, or on an Expand by constants, building fails with ``value.h:884: CHECK(is_const()) failed``. With
Concat the same graph builds; so do repeats beside or after a Scan, and any of them with a fixed number of tokens.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, dims, is_op, small_constant
from trt_kvcache.importer.planning.attention import nodes_before_scans


def copy_repeats(graph: gs.Graph, emitter: Emitter) -> None:
    """Write repeats by constants that a Scan over a dynamic number of steps depends on as Concat."""
    for node in list(nodes_before_scans(graph)):
        counts = _counts(node)
        if counts is None:
            continue
        data = node.inputs[0]
        *first, last = [axis for axis, count in enumerate(counts) if count > 1] or [0]
        for axis in first:
            data = emitter.op("Concat", [data] * counts[axis], "repeated", axis=axis)
        node.op, node.attrs, node.inputs = "Concat", {"axis": last}, [data] * counts[last]


def _counts(node: gs.Node) -> list[int] | None:
    """The repeats of a Tile or Expand along each axis of its input; None where constants do not say it."""
    if not is_op(node, "Tile", "Expand"):
        return None
    repeats = small_constant(node.inputs[1])
    if repeats is None or not len(repeats) or (repeats < 1).any():
        return None
    counts = [int(n) for n in repeats]
    if is_op(node, "Tile"):
        return counts
    shape = dims(node.inputs[0]) or ()
    if len(shape) != len(counts) or any(n > 1 and size not in (1, n) for n, size in zip(counts, shape, strict=True)):
        return None
    return [n if size == 1 else 1 for n, size in zip(counts, shape, strict=True)]
