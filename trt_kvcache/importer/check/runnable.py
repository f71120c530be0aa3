"""Originals in a form that engines on the CPU run, with the same meaning.

Each function returns a copy, or the model itself where there is nothing to do.
"""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.planning.experts import ROUNDING
from trt_kvcache.importer.protos import Scope, is_op, iter_scopes
from trt_kvcache.importer.rewrite.packed import DOMAIN as PACKED_DOMAIN
from trt_kvcache.importer.rewrite.packed import OP as PACKED_OP
from trt_kvcache.importer.rewrite.packed import add_packed_function
from trt_kvcache.importer.rewrite.plugin import add_plugin_functions
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS

_ACCURACY = "accuracy_level"
_MENDED = (1, 32)  # ONNX Runtime, whose experts of float16 count from here on (measured with 1.31.1 and 1.32.0)
_NORMS = (14, 15)  # GroupQueryAttention's q_norm_weight and k_norm_weight


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


def with_plugin_functions(model: ModelProto) -> ModelProto:
    """Nodes of the cache-update plugin, if the model has any, get their meaning as ONNX functions."""
    defined = {(f.domain, f.name) for f in model.functions}
    if all(n.domain != NAMESPACE or n.op_type not in OPERATORS or (n.domain, n.op_type) in defined
           for n in model.graph.node):  # fmt: skip
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    add_plugin_functions(copy)
    return copy


def with_packed_function(model: ModelProto) -> ModelProto:
    """Packed updates, which are TensorRT's own operator, get their meaning as an ONNX function."""
    if not any(node.op_type == PACKED_OP for node in model.graph.node) or model.functions:
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    nodes: list[NodeProto] = []
    for node in copy.graph.node:
        if node.op_type == PACKED_OP:
            node.domain = PACKED_DOMAIN
            if not node.input[2]:  # writes start at row 0
                batch, node.input[2] = f"{node.output[0]}/batch", f"{node.output[0]}/first"
                zeros = helper.make_tensor("zero", TensorProto.INT64, [1], [0])
                nodes += [
                    helper.make_node("Shape", [node.input[0]], [batch], start=0, end=1),
                    helper.make_node("ConstantOfShape", [batch], [node.input[2]], value=zeros),
                ]
        nodes.append(NodeProto.FromString(node.SerializeToString()))
    _set_nodes(copy.graph, nodes)
    add_packed_function(copy)
    return copy


def with_exact_products(model: ModelProto) -> ModelProto:
    """Products with quantized weights as the operator defines them, without rounding the other side.

    MatMulNBits lets ONNX Runtime compute with activations of 8 bits (``accuracy_level=4``, which onnxruntime-genai sets
    for the CPU). That moves logits by percents of their scale, which would hide differences.
    """
    if not any(_rounds(node) for scope in iter_scopes(model) for node in scope.node):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    for scope in iter_scopes(copy):
        for node in scope.node:
            if _rounds(node):
                kept = [a for a in node.attribute if a.name != _ACCURACY]
                del node.attribute[:]
                node.attribute.extend(kept)
    return copy


def spelled_out(original: ModelProto) -> list[str]:
    """Notes for the reader of a report on the way in which the original ran."""
    notes = []
    if any(node.op_type == PACKED_OP for node in original.graph.node):
        notes.append("packed updates, TensorRT's own operator, ran by their definition in ONNX on both sides")
    if any(_rounds(node) for scope in iter_scopes(original) for node in scope.node):
        notes.append(
            f"MatMulNBits of the original ran without its {_ACCURACY}, by which ONNX Runtime would round activations "
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


def _rounds(node: NodeProto) -> bool:
    return node.op_type == "MatMulNBits" and any(a.name == _ACCURACY and a.i for a in node.attribute)


def with_expanded_masks(model: ModelProto) -> ModelProto:
    """Attention masks repeated for every query: ``[..., 1, S_kv]`` becomes ``[..., S_q, S_kv]``.

    ONNX broadcasts masks. ONNX Runtime 1.31.1 refuses those without the axis of the queries, and the reference
    evaluator of ONNX 1.23.2 gives all queries of such a mask the causal frontier of the first.
    """
    if not any(_mask(node) for scope in iter_scopes(model) for node in scope.node):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    for scope in iter_scopes(copy):
        nodes: list[NodeProto] = []
        for i, node in enumerate(scope.node):
            if mask := _mask(node):
                prefix = f"trt_kvcache.verify/{node.output[0]}/{i}"
                names = [f"{prefix}/{part}" for part in ("queries", "one", "shape", "mask")]
                one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
                nodes += [
                    helper.make_node("Shape", [node.input[0]], names[:1], start=-2, end=-1),
                    helper.make_node("Constant", [], names[1:2], value=one),
                    helper.make_node("Concat", names[:2], names[2:3], axis=0),
                    helper.make_node("Expand", [mask, names[2]], names[3:]),
                ]
                node.input[3] = names[3]
            nodes.append(node)
        _set_nodes(scope, [NodeProto.FromString(node.SerializeToString()) for node in nodes])
    return copy


def _mask(node: NodeProto) -> str:
    """The mask input of an Attention node, or an empty string."""
    return node.input[3] if is_op(node, "Attention") and len(node.input) > 3 else ""


def with_norms_in_front(model: ModelProto) -> ModelProto:
    """GroupQueryAttention's norms of queries and keys as nodes before it.

    ONNX Runtime 1.31.1 has them in its CUDA kernel only. They normalize each head before its rotation, as
    onnxruntime-genai writes them where it does not fuse them: SimplifiedLayerNormalization over ``[B, S, heads, head
    size]``. Measured with its exports of one Qwen3 in fp16: the one for CUDA (fused), spelled out like this, and the
    one for DirectML (not fused) give the same bits.
    """
    if not any(_has_norms(node) for scope in iter_scopes(model) for node in scope.node):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    for number, scope in enumerate(iter_scopes(copy)):
        nodes: list[NodeProto] = []
        for i, node in enumerate(scope.node):
            if _has_norms(node):
                nodes += _norms(node, f"trt_kvcache.verify/{number}/{i}")
            nodes.append(NodeProto.FromString(node.SerializeToString()))
        _set_nodes(scope, nodes)
    return copy


def _has_norms(node: NodeProto) -> bool:
    fused = node.op_type == "GroupQueryAttention" and node.domain == "com.microsoft"
    return fused and len(node.input) > _NORMS[1] and all(node.input[i] for i in _NORMS)


def _norms(node: NodeProto, prefix: str) -> list[NodeProto]:
    """The nodes that normalize queries and keys; the operator reads their results, and no weights."""
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    epsilon = attrs.get("qk_norm_epsilon", 1e-6)
    heads = (attrs["num_heads"], attrs["kv_num_heads"], attrs["kv_num_heads"])
    weights = [node.input[i] for i in _NORMS]
    made: list[NodeProto] = []

    def emit(op: str, inputs: list[str], *names: str, **attributes: Any) -> str:
        made.append(helper.make_node(op, inputs, [f"{prefix}/{name}" for name in names], **attributes))
        return str(made[-1].output[0])

    def ints(name: str, *values: int) -> str:
        return emit("Constant", [], name, value=helper.make_tensor(name, TensorProto.INT64, [len(values)], values))

    size = emit("Shape", weights[:1], "size")
    if not node.input[1]:  # packed: [B, S, (heads + 2 * kv_heads) * head size]
        widths = emit("Mul", [size, ints("heads", *heads)], "widths")
        emit("Split", [node.input[0], widths], "query", "key", "value", axis=-1)
        node.input[0], node.input[1], node.input[2] = made[-1].output
    apart = emit("Concat", [ints("any", 0, 0, -1), size], "apart", axis=0)
    merged = ints("merged", 0, 0, -1)
    for place, weight in enumerate(weights):
        rows = emit("Reshape", [node.input[place], apart], f"heads_{place}")
        normal = emit("SimplifiedLayerNormalization", [rows, weight], f"norm_{place}", axis=-1, epsilon=epsilon)
        node.input[place] = emit("Reshape", [normal, merged], f"normed_{place}")
    for i in _NORMS:
        node.input[i] = ""
    return made


def _set_nodes(scope: Scope, nodes: list[NodeProto]) -> None:
    del scope.node[:]
    scope.node.extend(nodes)
