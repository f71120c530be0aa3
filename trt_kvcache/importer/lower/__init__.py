"""Operators that ONNX Runtime fuses become function bodies in standard operators of opset 23.

`_OPERATORS` says what each operator takes and gives, and who writes its body; see `body` for the form. Bodies are
written before anything is recognized, so that all later stations know ONNX's operators alone.

Measured against ONNX Runtime's own kernels: equal bit for bit, except for sums before a normalization and for Gelu,
which its fp16 kernels keep in fp32 (one unit in the last place of fp16).

Operators of other domains, and other ones of ONNX Runtime, stay as they are. Semantics:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import ModelProto, NodeProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import NAME_PREFIX
from trt_kvcache.importer.lower import fused_attention, matmul_nbits, moe, norms, products, rotary_embedding
from trt_kvcache.importer.lower.body import SHAPES, Call, Tensors, UnknownShapeError
from trt_kvcache.importer.protos import DEFAULT_DOMAINS, is_op, shape_of

__all__ = ["lower"]

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

_NORM = "SimplifiedLayerNormalization"
"""An operator of ONNX Runtime in ONNX's own domain."""

Writer = Callable[[Call], str | None]
_OPERATORS: dict[str, tuple[str, Writer]] = {
    "SimplifiedLayerNormalization": ("x, scale -> y, inverse", norms.simplified_layer_norm),
    "SkipSimplifiedLayerNormalization": ("x, skip, scale, bias -> y, mean, inverse, sum", norms.skip_layer_norm),
    "SkipLayerNormalization": ("x, skip, scale, shift, bias -> y, mean, inverse, sum", norms.skip_layer_norm),
    "EmbedLayerNormalization": ("ids, segments, words, positions, kinds, scale, shift, mask, places -> y, lengths, sum",
                                norms.embed_layer_norm),
    "RotaryEmbedding": ("x, positions, cos, sin -> y", rotary_embedding.rotary_embedding),
    "MRotaryEmbedding": ("x, positions, cos, sin -> y", rotary_embedding.mrotary_embedding),
    "Gelu": ("x -> y", products.gelu),
    "FastGelu": ("x, bias -> y", products.gelu),
    "BiasGelu": ("x, bias -> y", products.gelu),
    "QuickGelu": ("x -> y", products.quick_gelu),
    "FusedMatMul": ("a, b -> y", products.fused_matmul),
    "FusedGemm": ("a, b, c -> y", products.fused_gemm),
    "CausalConvWithState": ("x, weight, bias, past -> y, present", products.causal_conv_with_state),
    "MatMulNBits": ("a, b, scales, zero_points, g_idx, bias -> y", matmul_nbits.matmul_nbits),
    "GatherBlockQuantized": ("table, ids, scales, zero_points -> y", matmul_nbits.gather_block_quantized),
    "MoE": ("x, logits, fc1, bias1, fc2, bias2, fc3, bias3 -> y", moe.moe),
    "QMoE": ("x, logits, fc1, scales1, bias1, fc2, scales2, bias2, fc3, scales3, bias3, zero_points1, zero_points2 -> "
             "y", moe.moe),
    "GroupQueryAttention": ("query, key, value, past_key, past_value, seqlens, total, cos, sin, positions, bias, sinks,"
                            "key_scale, value_scale, query_norm, key_norm -> y, present_key, present_value, scores",
                            fused_attention.group_query_attention),
    "MultiHeadAttention": ("query, key, value, bias, padding, score_bias, past_key, past_value, shared, beams -> "
                           "y, present_key, present_value, scores", fused_attention.multi_head_attention),
    "Attention": ("x, weight, bias, padding, past, score_bias, shared -> y, present", fused_attention.attention),
}  # fmt: skip
_OF_ONNX: dict[str, tuple[str, Writer]] = {
    "Attention": ("query, key, value, mask, past_key, past_value, lengths -> "
                  "y, present_key, present_value, scores", fused_attention.onnx_attention),
    "MatMul": ("a, weight -> y", matmul_nbits.matmul),
    _NORM: _OPERATORS[_NORM],
}  # fmt: skip

_CACHES = "supported are GroupQueryAttention and MultiHeadAttention: export or optimize the model for these"
_WEIGHTS = (
    "computes on quantized weights in ONNX Runtime's own format, which TensorRT has no operator for; supported are "
    "float weights, MatMulNBits and DequantizeLinear: export unquantized"
)
_REFUSED = {
    "MatMulBnb4": _WEIGHTS,
    "MatMulInteger16": _WEIGHTS,
    "DecoderMaskedMultiHeadAttention": f"keeps its keys in one shared, reordered buffer; {_CACHES}",
    "DecoderMaskedSelfAttention": f"keeps its keys in one shared, reordered buffer; {_CACHES}",
    "PackedMultiHeadAttention": f"packs the sequences of a batch into one; {_CACHES}",
    "PagedAttention": f"keeps its cache in pages; {_CACHES}",
    "SparseAttention": f"attends blocks of its cache; {_CACHES}",
}


def lower(model: ModelProto) -> ModelProto:
    """Replace every operator that has a body, and infer shapes.

    Args:
        model: flat, of opset 23 at least, with inferred shapes. Changed.

    Returns:
        A model with the shapes of all bodies; the same object where there was nothing to do.

    Raises:
        UnsupportedModelError: an operator asks for something that its body does not cover.
    """
    while True:
        changed, waiting = _lower(model)
        if not changed and waiting:
            raise UnsupportedModelError(f"{waiting[0]}: {SHAPES}")
        if not changed:
            return model
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        _complete(model)
        if not waiting:
            return model


def _lower(model: ModelProto) -> tuple[bool, list[str]]:
    """Write, in place, the bodies that can be written; returns if there were any, and why others have to wait."""
    if not any(map(_operator, model.graph.node)):
        return False, []
    tensors, waiting = Tensors(model), list[str]()
    nodes: list[NodeProto] = []
    changed = False
    for node in model.graph.node:
        operator, body = _operator(node), [node]
        if operator is not None:
            call = Call(tensors, node, operator[0])
            try:
                text = operator[1](call)
                if text is not None:
                    body, changed = list(call.nodes(text)), True
            except UnknownShapeError as error:
                waiting.append(str(error))
        nodes += body
    if changed:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return changed, waiting


def _operator(node: NodeProto) -> tuple[str, Writer] | None:
    """Signature and writer of a node's operator; None: it stays."""
    if node.domain in DEFAULT_DOMAINS:
        return _OF_ONNX.get(node.op_type)
    if node.domain != CONTRIB:
        return None
    if node.op_type in _REFUSED:
        raise UnsupportedModelError(f"{node.domain}::{node.op_type} '{node.name}' {_REFUSED[node.op_type]}")
    return _OPERATORS.get(node.op_type)


def _complete(model: ModelProto) -> None:
    """Write, in place, types and sizes that bodies left open."""
    tensors = Tensors(model)
    for node in model.graph.node:
        if is_op(node, "Shape") and node.output[0].startswith(NAME_PREFIX):
            _measure_input(node, tensors)
        kinds = [tensors.dtypes.get(name, 0) for name in node.input] if is_op(node, "CastLike") else []
        if kinds and all(kinds):
            del node.input[1:]
            node.op_type = "Identity" if kinds[0] == kinds[1] else "Cast"
            if node.op_type == "Cast":
                node.attribute.append(onnx.helper.make_attribute("to", kinds[1]))


def _measure_input(node: NodeProto, tensors: Tensors) -> None:
    """Let a Shape of one symbol, in place, read the first input of the model with that symbol: layers share it."""
    start, end = (next((a.i for a in node.attribute if a.name == name), None) for name in ("start", "end"))
    shape = tensors.shapes.get(node.input[0]) or ()
    if start is None or end != start + 1 or not start < len(shape) or shape[start] == "?":
        return
    for value in tensors.graph.input:
        axes = shape_of(value) or ()
        if isinstance(shape[start], str) and shape[start] in axes:
            axis = axes.index(shape[start])
            node.input[0] = value.name
            del node.attribute[:]
            node.attribute.extend(onnx.helper.make_attribute(n, axis + i) for i, n in enumerate(("start", "end")))
            return
