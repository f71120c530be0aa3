"""Models that ONNX Runtime runs otherwise than TensorRT does, or not at all."""

from __future__ import annotations

import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.planning.experts import ROUNDING
from trt_kvcache.importer.protos import TENSORRT_UPDATE, Scope, iter_scopes
from trt_kvcache.importer.steps.runnable import ACCURACY, rounds

_MENDED = (1, 32)  # ONNX Runtime, whose experts of float16 count from here on (measured with 1.31.1 and 1.32.0)


def check_runnable(rewritten: ModelProto) -> None:
    """Refuses rewritten models with nodes that only TensorRT knows.

    Raises:
        UnsupportedModelError: see above.
    """
    defined = {(f.domain, f.name) for f in rewritten.functions}
    nodes = [
        n.name
        for n in rewritten.graph.node
        if (n.domain.startswith("trt") or n.op_type.startswith("TRT_")) and (n.domain, n.op_type) not in defined
    ]
    if nodes:
        raise UnsupportedModelError(
            f"verification runs on ONNX Runtime, which has no operator for {', '.join(nodes[:3])}"
            f"{f' and {len(nodes) - 3} more' if len(nodes) > 3 else ''} (plugin nodes exist only in TensorRT); verify "
            "the same model with another --fallback or --target, which differs in these nodes only"
        )


def spelled_out(original: ModelProto) -> list[str]:
    """Notes for the reader of a report on the way in which the original ran."""
    notes = []
    if any(node.op_type == TENSORRT_UPDATE for node in original.graph.node):
        notes.append("packed updates, TensorRT's own operator, ran by their definition in ONNX on both sides")
    if any(rounds(node) for scope in iter_scopes(original) for node in scope.node):
        notes.append(
            f"MatMulNBits of the original ran without its {ACCURACY}, by which ONNX Runtime would round activations "
            "to 8 bits: neither the rewritten model nor an engine rounds them"
        )
    if any(node.op_type == "QMoE" for scope in iter_scopes(original) for node in scope.node):
        notes.append(f"experts of the original (QMoE) ran with activations of float32: {ROUNDING}=fp32")
    broken = tuple(int(part) for part in ort.__version__.split(".")[:2]) < _MENDED
    if broken and any(_vanishes(node, scope) for scope in iter_scopes(original) for node in scope.node):
        notes.append(
            f"ONNX Runtime {ort.__version__} computes products of zero for experts (MoE) of float16 without "
            "normalize_routing_weights: what they give cannot be compared here; 1.32 does it right"
        )
    return notes


def _vanishes(node: NodeProto, scope: Scope) -> bool:
    halves = {t.name for t in getattr(scope, "initializer", ()) if t.data_type == TensorProto.FLOAT16}
    normalized = any(a.name == "normalize_routing_weights" and a.i == 1 for a in node.attribute)
    return node.op_type == "MoE" and not normalized and node.input[2] in halves
