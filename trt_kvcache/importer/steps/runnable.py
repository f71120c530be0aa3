"""Converts models to operators and types that run on the CPU. Only `state_type` changes its argument."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from trt_kvcache.dtypes import PLAIN
from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.importer.protos import copied, is_op, iter_scopes, iter_tensors, replace_field

ACCURACY = "accuracy_level"
_MOVED = (
    TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2FNUZ, TensorProto.FLOAT4E2M1,
)  # fmt: skip
NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_NORMS = (14, 15)  # GroupQueryAttention's q_norm_weight and k_norm_weight


def with_exact_products(model: ModelProto) -> ModelProto:
    """Make a model multiply by quantized weights as the operator is defined, without rounding activations.

    MatMulNBits lets ONNX Runtime round activations to 8 bits (``accuracy_level=4``, which onnxruntime-genai sets for
    the CPU). This changes logits by some percent of their scale, which would hide differences.
    """

    def edit(node: NodeProto, _: str) -> list[NodeProto]:
        replace_field(node.attribute, [a for a in node.attribute if a.name != ACCURACY])
        return []

    return _edited(model, rounds, edit)


def _edited(
    model: ModelProto, wanted: Callable[[NodeProto], bool], edit: Callable[[NodeProto, str], list[NodeProto]]
) -> ModelProto:
    if not any(wanted(node) for scope in iter_scopes(model) for node in scope.node):
        return model
    copy = copied(model)
    for number, scope in enumerate(iter_scopes(copy)):
        nodes: list[NodeProto] = []
        for i, node in enumerate(scope.node):
            nodes += edit(node, f"trt_kvcache.verify/{number}/{i}") if wanted(node) else []
            nodes.append(node)
        replace_field(scope.node, nodes)
    return copy


def rounds(node: NodeProto) -> bool:
    """True if ONNX Runtime may round a node's activations to 8 bits (MatMulNBits, QMoE); see `exact_experts`."""
    return node.op_type == "QMoE" or (
        node.op_type == "MatMulNBits" and any(a.name == ACCURACY and a.i for a in node.attribute)
    )


def with_expanded_masks(model: ModelProto) -> ModelProto:
    """Repeat attention masks for every query: ``[..., 1, S_kv]`` becomes ``[..., S_q, S_kv]``.

    ONNX Runtime 1.31.1 refuses masks without an axis of queries, which ONNX broadcasts. With such a mask, the reference
    evaluator of ONNX 1.23.2 wrongly hides the same keys from all queries as from the first one.
    """

    def edit(node: NodeProto, prefix: str) -> list[NodeProto]:
        names = [f"{prefix}/{part}" for part in ("queries", "one", "shape", "mask")]
        nodes = [
            helper.make_node("Shape", [node.input[0]], names[:1], start=-2, end=-1),
            helper.make_node("Constant", [], names[1:2], value_ints=[1]),
            helper.make_node("Concat", names[:2], names[2:3], axis=0),
            helper.make_node("Expand", [node.input[3], names[2]], names[3:]),
        ]
        node.input[3] = names[3]
        return nodes

    return _edited(model, lambda n: is_op(n, "Attention") and len(n.input) > 3 and bool(n.input[3]), edit)


def with_norms_in_front(model: ModelProto) -> ModelProto:
    """Move the norms of queries and keys from GroupQueryAttention to nodes in front of this operator.

    Only the CUDA kernel of ONNX Runtime 1.31.1 supports norms inside. The new nodes normalize each head before its
    rotation, as onnxruntime-genai's exports without fusion do: SimplifiedLayerNormalization over ``[B, S, heads, head
    size]``. Measured with the same Qwen3 in fp16: the export for CUDA (fused) with these nodes, and the export for
    DirectML (not fused), give the same bits.
    """
    return _edited(model, _has_norms, _norms)


def _has_norms(node: NodeProto) -> bool:
    fused = node.op_type == "GroupQueryAttention" and node.domain == "com.microsoft"
    return fused and len(node.input) > _NORMS[1] and all(node.input[i] for i in _NORMS)


def _norms(node: NodeProto, prefix: str) -> list[NodeProto]:
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    epsilon = attrs.get("qk_norm_epsilon", 1e-6)
    heads = (attrs["num_heads"], attrs["kv_num_heads"], attrs["kv_num_heads"])
    weights = [node.input[i] for i in _NORMS]
    nodes: list[NodeProto] = []

    def emit(op: str, inputs: list[str], *names: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [f"{prefix}/{name}" for name in names], **attributes))
        return str(nodes[-1].output[0])

    def ints(name: str, *values: int) -> str:
        return emit("Constant", [], name, value_ints=values)

    size = emit("Shape", weights[:1], "size")
    if not node.input[1]:  # packed: [B, S, (heads + 2 * kv_heads) * head size]
        widths = emit("Mul", [size, ints("heads", *heads)], "widths")
        emit("Split", [node.input[0], widths], "query", "key", "value", axis=-1)
        node.input[0], node.input[1], node.input[2] = nodes[-1].output
    by_head = emit("Concat", [ints("any", 0, 0, -1), size], "apart", axis=0)
    merged = ints("merged", 0, 0, -1)
    for place, weight in enumerate(weights):
        rows = emit("Reshape", [node.input[place], by_head], f"heads_{place}")
        normal = emit("SimplifiedLayerNormalization", [rows, weight], f"norm_{place}", axis=-1, epsilon=epsilon)
        node.input[place] = emit("Reshape", [normal, merged], f"normed_{place}")
    for i in _NORMS:
        node.input[i] = ""
    return nodes


def runnable(original: ModelProto) -> ModelProto:
    """Return the exported model with operators that ONNX Runtime can run on the CPU."""
    return with_expanded_masks(with_norms_in_front(with_exact_products(original)))


def as_bytes(plan: CachePlan) -> CachePlan:
    """Return the plan with int8 instead of types that NumPy or ONNX Runtime lacks. Models only move such values."""

    def known(dtype: str) -> str:
        return dtype if dtype in (*PLAIN, "bfloat16") else "int8"

    tensors = tuple(replace(t, dtype=known(t.dtype)) for t in plan.tensors)
    caches = tuple(replace(c, dtype=known(c.dtype)) for c in plan.caches)
    original = tuple(replace(t, dtype=known(t.dtype)) for t in plan.original)
    return replace(plan, tensors=tensors, caches=caches, original=original)


def open_types(model: ModelProto, *, wide: bool) -> ModelProto:
    """Return the model in float32 instead of float16 and bfloat16, so that rounding hides no difference.

    Types of caches that operators only move become int8, as in `as_bytes`; QuantizeLinear with zero point 0 writes
    int8, too. If `wide` is False, float16 stays, and bfloat16, which ONNX Runtime cannot compute, becomes float16.
    """
    copy = copied(model)
    moved = [value for value in copy.graph.input if value.type.tensor_type.elem_type in _MOVED]
    for value in moved:
        value.type.tensor_type.elem_type = TensorProto.INT8
    points = {name for node in copy.graph.node if is_op(node, "QuantizeLinear") for name in node.input[2:]}
    for tensor in copy.graph.initializer if moved else ():
        zero = tensor.name in points and not any(tensor.raw_data) and not any(tensor.int32_data)
        if zero and tensor.data_type in _MOVED:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(tensor.dims, np.int8), tensor.name))
    for a in (a for node in copy.graph.node for a in node.attribute if moved):
        if a.name == "output_dtype" and a.i in _MOVED:
            a.i = TensorProto.INT8
    old, new = (NARROW, TensorProto.FLOAT) if wide else (NARROW[1:], TensorProto.FLOAT16)
    state_type(copy, old, new)
    for tensor in iter_tensors(copy):
        if tensor.data_type in old:
            with np.errstate(over="ignore"):  # the lowest number of bfloat16 is -inf in float16
                values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(new))
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return copy


def is_narrow(models: Iterable[ModelProto]) -> bool:
    """True if one of the models has a float16 or bfloat16 input, whose values are rounded before the model runs."""
    fed = {v.type.tensor_type.elem_type for model in models for v in model.graph.input}
    return bool(fed & set(NARROW))


def is_half(models: Iterable[ModelProto]) -> bool:
    """True if the models use float16 and no bfloat16, so that ONNX Runtime can run them in their own types."""
    types = {kind for model in models for kind in all_types(model)}
    return TensorProto.FLOAT16 in types and TensorProto.BFLOAT16 not in types


_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "softmax_precision", "stash_type"})


def all_types(model: ModelProto) -> set[int]:
    """Return every element type in the model."""
    declared = {kind.tensor_type.elem_type for kind in _declared(model)}
    return declared | {t.data_type for t in iter_tensors(model)} | {a.i for a in _attributes(model)}


def has_bfloat16(model: ModelProto) -> bool:
    """True if a tensor, a declared value or an operator of the model is bfloat16."""
    return TensorProto.BFLOAT16 in all_types(model)


def state_type(model: ModelProto, old: Container[int], new: int) -> None:
    """Replace the element types `old` with `new` in value infos and attributes. Tensors keep their types."""
    for attribute in _attributes(model):
        if attribute.i in old:
            attribute.i = new
    for kind in _declared(model):
        if kind.tensor_type.elem_type in old:
            kind.tensor_type.elem_type = new


def _attributes(model: ModelProto) -> Iterator[AttributeProto]:
    for scope in iter_scopes(model):
        for node in scope.node:
            yield from (a for a in node.attribute if a.name in _ATTRIBUTES and a.type == AttributeProto.INT)


def _declared(model: ModelProto) -> Iterator[TypeProto]:
    for scope in iter_scopes(model):
        values = [*scope.value_info, *([*scope.input, *scope.output] if isinstance(scope, GraphProto) else ())]
        for value in values:
            yield from _nested(value.type)
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.HasField("tp"):
                    yield from _nested(attribute.tp)


def _nested(kind: TypeProto) -> Iterator[TypeProto]:
    yield kind
    for field in ("sequence_type", "optional_type"):
        if kind.HasField(field):
            yield from _nested(getattr(kind, field).elem_type)
