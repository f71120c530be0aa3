"""Replaces fused operators of ONNX Runtime with bodies: standard operators of opset 23 that compute the same.

Later stages know only ONNX's operators. `_OPERATORS` names each operator's inputs and outputs, and the function that
returns its body (ONNX text, see `body`). Operators without a body stay. Semantics:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.

Measured: bodies give the same bits as ONNX Runtime's kernels, except that its float16 kernels compute Gelu, and sums
before a normalization, in float32 (one unit in the last place of float16). TensorRT for RTX 1.7.1 crashes (SIGFPE) at a
RotaryEmbedding with a 3-D input and without num_heads, so the body states num_heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import ModelProto, NodeProto

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.graph import NAME_PREFIX
from trt_kvcache.importer.lower import fused_attention, matmul_nbits, moe
from trt_kvcache.importer.lower.body import AGAIN, SHAPES, Call, Tensors, UnknownShapeError
from trt_kvcache.importer.protos import DEFAULT_DOMAINS, is_op, replace_field, shape_of


def simplified_layer_norm(call: Call) -> str:
    """Return ONNX text for SimplifiedLayerNormalization (RMS). The result has the type of the scale."""
    _refuse_statistics(call, "inverse")
    attributes = f"axis = {call.integer('axis', -1)}, stash_type = {call.integer('stash_type', 1)}"
    return f"""
        x = CastLike (x, scale)
        y = RMSNormalization <{attributes}, epsilon = {call.number("epsilon", 1e-5)}> (x, scale)
    """


def skip_layer_norm(call: Call) -> str:
    """Return ONNX text for SkipLayerNormalization or its RMS variant: a normalization of a sum."""
    _refuse_statistics(call, "mean", "inverse")
    is_rms = call.node.op_type == "SkipSimplifiedLayerNormalization"
    operator, operands = ("RMSNormalization", "sum, scale") if is_rms else ("LayerNormalization", "sum, scale, shift")
    return f"""
        sum = Add (x, skip)
        {call.when("bias", "sum = Add (sum, bias)")}
        y = {operator} <axis = -1, epsilon = {call.number("epsilon", 1e-12)}> ({operands})
    """


def _refuse_statistics(call: Call, *outputs: str) -> None:
    """Refuse a normalization whose mean or deviation another node reads. Only training needs these outputs."""
    read = [name for name in outputs if call.is_read(name)]
    if read:
        call.refuse(
            f"has the output '{read[0]}', which another node reads; only the normalized result may be read",
            "export the model for inference",
        )


_GATES = ("none", "silu", "swish")


def gelu(call: Call) -> str:
    """Return ONNX text for a Gelu of ``x + bias``, with erf; for FastGelu, with tanh."""
    approximate = "tanh" if call.node.op_type == "FastGelu" else "none"
    return f"""
        {call.when("bias", "x = Add (x, bias)")}
        y = Gelu <approximate = "{approximate}"> (x)
    """


def quick_gelu(call: Call) -> str:
    """Return ONNX text for QuickGelu: ``x * Sigmoid(alpha * x)``."""
    return f"""
        {scaled("gate", "x", call.number("alpha", 1.702))}
        gate = Sigmoid (gate)
        y = Mul (x, gate)
    """


def fused_matmul(call: Call) -> str:
    """Return ONNX text for FusedMatMul: ``alpha * A @ B``, with A or B transposed if attributes say so."""
    return f"""
        {_transposed(call, "a", "A")}
        {_transposed(call, "b", "B")}
        product = MatMul (a, b)
        {scaled("y", "product", call.number("alpha", 1.0))}
    """


def causal_conv_with_state(call: Call) -> str:
    """Return ONNX text for CausalConvWithState: a convolution over past and new rows. The newest rows are the state."""
    shape, activation = call.shape("weight") or (), call.string("activation", "none")
    channels, width = (*shape[::2], "?", "?")[:2]
    plain = (
        not call.integer("state_window") and call.integer("ndim", 1) == 1 and len(shape) == 3 and activation in _GATES
    )
    if not (plain and call.has("past") and isinstance(channels, int) and isinstance(width, int) and width > 1):
        call.refuse(
            f"has a weight {list(shape)}, the activation '{activation}' and {'a' if call.has('past') else 'no'} past; "
            "the importer supports one axis of time, a fixed weight [channels, 1, k] with k > 1, a past, no "
            f"state_window, and one of the activations {', '.join(_GATES)}",
            "export the convolution without fusion",
        )
    gated = activation != "none"
    return f"""
        rows = Concat <axis = 2> (past, x)
        y = Conv <group = {channels}, kernel_shape = [{width}]> (rows, weight, bias)
        {"gate = Sigmoid (y)" if gated else ""}
        {"y = Mul (y, gate)" if gated else ""}
        present = Slice (rows, [{1 - int(width)}], [{2**62}], [2])
    """


def scaled(result: str, name: str, factor: float) -> str:
    """Return ONNX text for ``result = name * factor``."""
    if factor == 1:
        return f"{result} = Identity ({name})"
    return f"""
        factor = CastLike ({factor}, {name})
        {result} = Mul ({name}, factor)
    """


def _transposed(call: Call, name: str, letter: str) -> str:
    """Return ONNX text that swaps and moves an operand's axes as FusedMatMul's attributes say."""
    swap, batch = call.integer(f"trans{letter}"), call.integer(f"transBatch{letter}")
    if not swap and not batch:
        return ""
    perm = list(range(len(call.known_shape(name))))
    if batch and len(perm) > 2:
        perm = [*perm[1:-1], 0, perm[-1]]
    if swap and len(perm) > 1:
        perm[-2:] = perm[:-3:-1]
    return f"{name} = Transpose <perm = {perm}> ({name})" if perm != sorted(perm) else ""


_PLANES = 3


def rotary_embedding(call: Call) -> str:
    """Return ONNX text for RotaryEmbedding, with a position for each token or only for the first token."""
    _check(call)
    positions = ""
    if len(call.known_shape("positions")) < 2:
        axis = len(call.known_shape("x")) - 2
        positions = f"""
            batch = Shape <start = 0, end = 1> (x)
            length = Shape <start = {axis}, end = {axis + 1}> (x)
            count = Squeeze (length)
            steps = Range (0, count, 1)
            positions = Add (positions, steps)
            shape = Concat <axis = 0> (batch, length)
            positions = Expand (positions, shape)
        """
    return f"""
        {positions}
        y = RotaryEmbedding <{_attributes(call, call.known_shape("x"))}> (x, cos, sin, positions)
    """


def mrotary_embedding(call: Call) -> str:
    """Return ONNX text for MRotaryEmbedding, with positions ``[3, B, S]`` for time, height and width."""
    _check(call)
    sections = [int(n) for n in call.attributes.get("mrope_section", [])]
    layout, positions = call.integer("mrope_layout"), call.shape("positions") or (_PLANES,)
    if len(sections) != _PLANES or min(sections) < 0 or layout not in (0, 1) or positions[0] != _PLANES:
        call.refuse(
            f"has mrope_section={sections}, mrope_layout={layout} and positions {list(positions)}; the importer "
            "supports sections of three planes, one after the other (layout 0) or interleaved (layout 1)",
            AGAIN,
        )
    if sum(sections) != call.width("cos"):
        call.refuse(
            f"has sections of {sum(sections)} columns, but cos and sin caches of {call.width('cos')} columns", AGAIN
        )
    owners = np.repeat(np.arange(_PLANES), sections)
    if layout == 1:
        owners = np.zeros(sum(sections), np.int64)
        for plane in (1, 2):
            owners[plane : 3 * sections[plane] : 3] = plane
    call.constant("height", owners == 1)
    call.constant("width", owners == 2)
    return f"""
        {_by_plane("cos")}
        {_by_plane("sin")}
        y = RotaryEmbedding <{_attributes(call, call.known_shape("x"))}> (x, cos, sin)
    """


def _attributes(call: Call, x: Sequence[int | str]) -> str:
    """Return the attributes of ONNX's RotaryEmbedding for a tensor of shape `x`, as ONNX text."""
    part, heads, width = call.integer("rotary_embedding_dim"), call.integer("num_heads"), 2 * call.width("cos")
    stated = f"interleaved = {call.integer('interleaved')}"
    if len(x) == 4:  # 4-D inputs need no num_heads; rotating whole heads needs no attribute
        return stated if part in (0, x[-1]) else f"{stated}, rotary_embedding_dim = {part}"
    if not heads:
        if not isinstance(x[-1], int) or width < 1 or x[-1] % width:
            raise InvalidModelError(
                f"{call.label()} rotates rows of {x[-1]} values, which is no multiple of the head size {width} of "
                "its cos and sin caches"
            )
        heads = x[-1] // width
    return f"{stated}, rotary_embedding_dim = {part}, num_heads = {heads}"


def _by_plane(table: str) -> str:
    return f"""
        rows = Gather ({table}, positions)
        time = Gather (rows, 0)
        other = Gather (rows, 1)
        time = Where (height, other, time)
        other = Gather (rows, 2)
        {table} = Where (width, other, time)
    """


def _check(call: Call) -> None:
    if call.integer("is_packed_batching"):
        call.refuse("has is_packed_batching=1; the importer supports only one row per sequence", AGAIN)
    if call.number("scale", 1.0) != 1:
        call.refuse(
            f"has scale={call.number('scale')}, which ONNX Runtime's own kernel ignores; the importer supports only 1",
            "fold the scale into the cos and sin caches",
        )
    shape = call.shape("x")
    if shape is not None and len(shape) not in (3, 4):
        call.refuse(f"rotates '{call.name('x')}' {list(shape)}; the importer supports ranks 3 and 4", SHAPES)


CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

Writer = Callable[[Call], str | None]
_OPERATORS: dict[str, tuple[str, Writer]] = {
    "SimplifiedLayerNormalization": ("x, scale -> y, inverse", simplified_layer_norm),
    "SkipSimplifiedLayerNormalization": ("x, skip, scale, bias -> y, mean, inverse, sum", skip_layer_norm),
    "SkipLayerNormalization": ("x, skip, scale, shift, bias -> y, mean, inverse, sum", skip_layer_norm),
    "RotaryEmbedding": ("x, positions, cos, sin -> y", rotary_embedding),
    "MRotaryEmbedding": ("x, positions, cos, sin -> y", mrotary_embedding),
    "Gelu": ("x -> y", gelu),
    "FastGelu": ("x, bias -> y", gelu),
    "BiasGelu": ("x, bias -> y", gelu),
    "QuickGelu": ("x -> y", quick_gelu),
    "FusedMatMul": ("a, b -> y", fused_matmul),
    "CausalConvWithState": ("x, weight, bias, past -> y, present", causal_conv_with_state),
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
    "SimplifiedLayerNormalization": ("x, scale -> y, inverse", simplified_layer_norm),  # in ONNX's own domain, too
}  # fmt: skip

_CACHES = (
    "the importer supports GroupQueryAttention and MultiHeadAttention: export or optimize the model for one of these"
)
_WEIGHTS = (
    "computes with quantized weights in a format of ONNX Runtime that TensorRT does not have; the importer supports "
    "float weights, MatMulNBits and DequantizeLinear: export the model without this quantization"
)
_FUSED = "is a fusion of ONNX Runtime's optimizer for other models; save the model with basic optimization only"
_REFUSED = {
    "EmbedLayerNormalization": _FUSED,
    "FusedGemm": _FUSED,
    "MatMulBnb4": _WEIGHTS,
    "MatMulInteger16": _WEIGHTS,
    "DecoderMaskedMultiHeadAttention": f"keeps its keys in one shared, reordered buffer; {_CACHES}",
    "DecoderMaskedSelfAttention": f"keeps its keys in one shared, reordered buffer; {_CACHES}",
    "PackedMultiHeadAttention": f"packs all sequences of a batch into one; {_CACHES}",
    "PagedAttention": f"keeps its cache in pages; {_CACHES}",
    "SparseAttention": f"attends only to some blocks of its cache; {_CACHES}",
}


def lower(model: ModelProto) -> ModelProto:
    """Replace ONNX Runtime's operators in `_OPERATORS` with standard ones. Return the model with inferred shapes."""
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
    """Replace nodes, in place. Return True if one was replaced, and a message for each node of still unknown shape."""
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
        replace_field(model.graph.node, nodes)
    return changed, waiting


def _operator(node: NodeProto) -> tuple[str, Writer] | None:
    """Return the signature of a node's operator, and the function that returns its ONNX text; None: keep the node."""
    if node.domain in DEFAULT_DOMAINS:
        return _OF_ONNX.get(node.op_type)
    if node.domain != CONTRIB:
        return None
    if node.op_type in _REFUSED:
        raise UnsupportedModelError(f"{node.domain}::{node.op_type} '{node.name}' {_REFUSED[node.op_type]}")
    return _OPERATORS.get(node.op_type)


def _complete(model: ModelProto) -> None:
    """Simplify, in place, CastLike nodes of known types, and those Shape nodes that the importer added."""
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
    """If a Shape returns one symbolic size, let it read a model input of this size, so that layers share the Shape."""
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
