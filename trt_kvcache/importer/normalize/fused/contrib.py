"""Write ONNX Runtime's fused operators (domain ``com.microsoft``) in standard operators of opset 23.

    SimplifiedLayerNormalization(x, g)                 RMSNormalization(x, g)
    SkipSimplifiedLayerNormalization(x, skip, g, b)    s = x + skip + b; RMSNormalization(s, g); s
    SkipLayerNormalization(x, skip, g, beta, b)        s = x + skip + b; LayerNormalization(s, g, beta); s
    EmbedLayerNormalization(ids, .., position_ids)     s = sum of Gather; LayerNormalization(s, g, beta); s
    RotaryEmbedding(x, position_ids, cos, sin)         RotaryEmbedding(x, cos, sin, position_ids), see `rotary`
    MRotaryEmbedding(x, position_ids, cos, sin)        RotaryEmbedding(x, c, s), see `rotary`
    Gelu, FastGelu, BiasGelu                           Gelu(x + b), exact or tanh
    QuickGelu(x)                                       x * Sigmoid(alpha * x)
    FusedMatMul(a, b)                                  MatMul(Transpose(a), Transpose(b)) * alpha
    FusedGemm(a, b, c)                                 activation(Gemm(a, b, c))
    CausalConvWithState(x, w, b, past)                 s = Concat(past, x); Conv(s, w, b); the last rows of s
    MatMulNBits, GatherBlockQuantized                  DequantizeLinear and MatMul, see `nbits`
    MoE, QMoE                                          TopK, Gather and MatMul, see `moe`

Measured against ONNX Runtime's own kernels: equal bit for bit, except for sums before a normalization and for Gelu,
which its fp16 kernels keep in fp32 (one unit in the last place of fp16).

Other operators on quantized weights are refused: TensorRT knows these in the QuantizeLinear/DequantizeLinear form only.
Operators that hold a cache have a stage of their own; any other operator stays as it is.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import (
    ONNX_DOMAINS,
    Emitter,
    consumers,
    contains,
    dims,
    elem_type,
    input_or_none,
    replace_uses,
)
from trt_kvcache.importer.normalize.fused.moe import lower_moe
from trt_kvcache.importer.normalize.fused.nbits import lower_gather_nbits, lower_matmul_nbits
from trt_kvcache.importer.normalize.fused.rotary import lower_planes, lower_rotary

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

FLOAT = int(onnx.TensorProto.FLOAT)

_ACTIVATIONS: dict[str, dict[str, str]] = {
    "Relu": {},
    "Sigmoid": {},
    "Tanh": {},
    "LeakyRelu": {"activation_alpha": "alpha"},
}
_GATES = ("none", "silu", "swish")
_END = 2**62
_REFUSED = {
    "MatMulBnb4": "export unquantized",
    "MatMulInteger16": "export unquantized",
}


def lower_contrib(graph: gs.Graph) -> None:
    """Replace, in place, the fused operators that have an exact form in standard operators.

    What is emitted needs opset 23: raise the model first (`opset.raise_opset` leaves these operators alone).

    Args:
        graph: edited in place.

    Raises:
        UnsupportedModelError: a fused operator asks for what standard operators cannot express, or is quantized.
    """
    emitter = Emitter(graph)
    lowered: set[int] = set()
    for node in list(graph.nodes):
        fused = node.domain == CONTRIB
        if fused and node.op in _REFUSED:
            raise UnsupportedModelError(
                f"{_label(node)} computes on quantized weights in ONNX Runtime's own format, which TensorRT has no "
                f"operator for; supported are float weights, MatMulNBits and DequantizeLinear: {_REFUSED[node.op]}"
            )
        lowering = _LOWERINGS.get(node.op) if fused else None
        if node.op == "SimplifiedLayerNormalization" and (fused or node.domain in ONNX_DOMAINS):
            lowering = _simplified_norm
        if lowering is not None:
            outputs = list(node.outputs)
            results = lowering(emitter, node)
            node.outputs.clear()
            node.inputs.clear()  # it is no reader any more: of caches, readers are looked at
            for result, output in zip(results, outputs, strict=False):
                if result is not None:
                    become(result, output)
            lowered.add(id(node))
    if lowered:
        graph.nodes[:] = [node for node in graph.nodes if id(node) not in lowered]
        graph.toposort()


def become(result: gs.Tensor, output: gs.Tensor) -> None:
    """Let the emitted tensor `result` take the place and the name of the model's tensor `output`, which has no maker.

    Empty outputs (which the model leaves out) are passed over.
    """
    if output.is_empty():
        return
    output.dtype = output.dtype if elem_type(output) else result.dtype
    maker = result.inputs[0]
    replace_uses(result, output)
    maker.outputs = [output if t is result else t for t in maker.outputs]


def scalar_like(emitter: Emitter, value: float, like: gs.Tensor) -> gs.Tensor:
    """A scalar constant of the element type of `like`, even where the model does not state that type."""
    dtype = elem_type(like)
    if dtype:
        return emitter.scalar(value, dtype)
    return emitter.op("CastLike", [emitter.scalar(value, FLOAT), like], "scalar")


def used(graph: gs.Graph, node: gs.Node, index: int) -> bool:
    """Whether anything reads output `index` of a node."""
    if index >= len(node.outputs) or node.outputs[index].is_empty():
        return False
    tensor = node.outputs[index]
    return bool(consumers(tensor)) or contains(graph.outputs, tensor)


def _label(node: gs.Node) -> str:
    return f"{node.domain or 'ai.onnx'}::{node.op} '{node.name}'"


Results = Sequence[gs.Tensor | None]


def _simplified_norm(emitter: Emitter, node: gs.Node) -> Results:
    x, scale = node.inputs[:2]
    axis, epsilon = int(node.attrs.get("axis", -1)), float(node.attrs.get("epsilon", 1e-5))
    stash = int(node.attrs.get("stash_type", FLOAT))
    mixed = elem_type(scale) not in (None, 0, elem_type(x)) and elem_type(x)
    if mixed:  # the result has the scale's type; one type for both is what every RMSNormalization kernel takes
        x = emitter.op("Cast", [x], "norm_in", elem_type(scale), to=elem_type(scale))
    y = _rms_norm(emitter, x, scale, axis, epsilon, stash)
    if not used(emitter.graph, node, 1):
        return [y]
    return [y, _inverse_rms(emitter, node.inputs[0], axis, epsilon)]


def _rms_norm(emitter: Emitter, x: gs.Tensor, scale: gs.Tensor, axis: int, epsilon: float, stash: int) -> gs.Tensor:
    y = emitter.op("RMSNormalization", [x, scale], "norm", axis=axis, epsilon=epsilon, stash_type=stash)
    y.shape = x.shape
    return y


def _inverse_rms(emitter: Emitter, x: gs.Tensor, axis: int, epsilon: float) -> gs.Tensor:
    """``1 / sqrt(mean(x^2) + epsilon)`` in fp32 over `axis` and all behind it."""
    shape = dims(x)
    if axis >= 0 and shape is None:
        raise UnsupportedModelError(f"the rank of '{x.name}' is not in the model: export it with shapes")
    axes = list(range(axis if axis < 0 else axis - len(shape or ()), 0))
    wide = emitter.op("Cast", [x], "norm_wide", FLOAT, to=FLOAT)
    square = emitter.op("Mul", [wide, wide], "norm_square", FLOAT)
    mean = emitter.op("ReduceMean", [square, emitter.ints(axes)], "norm_mean", FLOAT, keepdims=1)
    shifted = emitter.op("Add", [mean, emitter.scalar(epsilon, FLOAT)], "norm_mean", FLOAT)
    return emitter.op("Reciprocal", [emitter.op("Sqrt", [shifted], "norm_root", FLOAT)], "norm_inverse", FLOAT)


def _residual(emitter: Emitter, node: gs.Node, bias_index: int) -> gs.Tensor:
    """Sum of input, skip and bias; a skip of lower rank or batch 1 broadcasts in the operator as in Add."""
    result = emitter.op("Add", node.inputs[:2], "residual")
    result.shape = node.inputs[0].shape
    bias = input_or_none(node, bias_index)
    if bias is not None:
        result = emitter.op("Add", [result, bias], "residual_bias")
        result.shape = node.inputs[0].shape
    return result


def _skip_simplified_norm(emitter: Emitter, node: gs.Node) -> Results:
    if used(emitter.graph, node, 1):
        raise UnsupportedModelError(
            f"the output 'mean' of {_label(node)} is read, which no kernel defines (RMS normalization has no mean): "
            "export for inference"
        )
    total = _residual(emitter, node, 3)
    epsilon = float(node.attrs.get("epsilon", 1e-12))
    y = _rms_norm(emitter, total, node.inputs[2], -1, epsilon, FLOAT)
    inverse = _inverse_rms(emitter, total, -1, epsilon) if used(emitter.graph, node, 2) else None
    return [y, None, inverse, total]


def _skip_norm(emitter: Emitter, node: gs.Node) -> Results:
    total = _residual(emitter, node, 4)
    beta = input_or_none(node, 3)
    inputs = [total, node.inputs[2]] + ([beta] if beta is not None else [])
    epsilon = float(node.attrs.get("epsilon", 1e-12))
    y = emitter.op("LayerNormalization", inputs, "norm", axis=-1, epsilon=epsilon, stash_type=FLOAT)
    y.shape = total.shape
    results: list[gs.Tensor | None] = [y, None, None, total]
    if used(emitter.graph, node, 1) or used(emitter.graph, node, 2):
        for index, name in ((1, "norm_mean"), (2, "norm_inverse")):
            results[index] = gs.Variable(emitter.name(name), dtype=FLOAT)
            y.inputs[0].outputs.append(results[index])
    return results


def _embed_norm(emitter: Emitter, node: gs.Node) -> Results:
    ids, segments, words, positions, kinds = (input_or_none(node, index) for index in range(5))
    gamma, beta, mask, places = (input_or_none(node, index) for index in range(5, 9))
    if mask is not None or used(emitter.graph, node, 1) or places is None or (segments is None) != (kinds is None):
        raise UnsupportedModelError(
            f"{_label(node)} has {'no position_ids' if places is None else 'a mask'}; supported are token ids, "
            "position_ids and, both or none, segments, without a mask: leave embeddings out of the optimization "
            "(FusionOptions.enable_embed_layer_norm = False)"
        )
    total = emitter.op("Gather", [words, ids], "embedding", axis=0)
    total = emitter.op("Add", [total, emitter.op("Gather", [positions, places], "embedding", axis=0)], "embedding")
    if segments is not None:
        total = emitter.op("Add", [total, emitter.op("Gather", [kinds, segments], "embedding", axis=0)], "embedding")
    epsilon = float(node.attrs.get("epsilon", 1e-12))
    inputs = [total, gamma, beta]
    y = emitter.op("LayerNormalization", inputs, "norm", axis=-1, epsilon=epsilon, stash_type=FLOAT)
    return [y, None, total]


def _gelu(emitter: Emitter, node: gs.Node, approximate: str) -> Results:
    x, bias = node.inputs[0], input_or_none(node, 1)
    if bias is not None:
        x = emitter.op("Add", [x, bias], "gelu_bias")
        x.shape = node.inputs[0].shape
    return [emitter.op("Gelu", [x], "gelu", approximate=approximate)]


def _exact_gelu(emitter: Emitter, node: gs.Node) -> Results:
    return _gelu(emitter, node, "none")


def _fast_gelu(emitter: Emitter, node: gs.Node) -> Results:
    return _gelu(emitter, node, "tanh")


def _quick_gelu(emitter: Emitter, node: gs.Node) -> Results:
    x = scaled = node.inputs[0]
    alpha = float(node.attrs.get("alpha", 1.702))
    if alpha != 1:
        scaled = emitter.op("Mul", [x, scalar_like(emitter, alpha, x)], "quick_gelu")
    gate = emitter.op("Sigmoid", [scaled], "quick_gelu", elem_type(x))
    return [emitter.op("Mul", [x, gate], "quick_gelu")]


def _fused_matmul(emitter: Emitter, node: gs.Node) -> Results:
    a = _matmul_operand(emitter, node, 0, "A")
    b = _matmul_operand(emitter, node, 1, "B")
    result = emitter.op("MatMul", [a, b], "matmul")
    alpha = float(node.attrs.get("alpha", 1.0))
    return [emitter.op("Mul", [result, scalar_like(emitter, alpha, a)], "matmul_scaled") if alpha != 1 else result]


def _matmul_operand(emitter: Emitter, node: gs.Node, index: int, letter: str) -> gs.Tensor:
    """One side of a FusedMatMul as MatMul takes it. Vectors are never transposed (measured)."""
    tensor = node.inputs[index]
    swap, batch = bool(node.attrs.get(f"trans{letter}", 0)), bool(node.attrs.get(f"transBatch{letter}", 0))
    if not swap and not batch:
        return tensor
    shape = dims(tensor)
    if shape is None:
        raise UnsupportedModelError(
            f"{_label(node)} transposes '{tensor.name}', whose rank is not in the model: export it with shapes"
        )
    perm = list(range(len(shape)))
    if batch and len(perm) > 2:  # the first axis goes behind the batch axes
        perm = [*perm[1:-1], 0, perm[-1]]
    if swap and len(perm) > 1:
        perm[-2:] = perm[:-3:-1]
    if perm == sorted(perm):
        return tensor
    moved = emitter.op("Transpose", [tensor], "matmul_operand", perm=perm)
    moved.shape = [None if shape[axis] == "?" else shape[axis] for axis in perm]
    return moved


def _fused_gemm(emitter: Emitter, node: gs.Node) -> Results:
    known = {name: node.attrs[name] for name in ("alpha", "beta", "transA", "transB") if name in node.attrs}
    result = emitter.op("Gemm", list(node.inputs), "gemm", **known)
    activation = str(node.attrs.get("activation", ""))
    settings = {name for name in node.attrs if name.startswith("activation_")}
    if activation not in _ACTIVATIONS or settings - set(_ACTIVATIONS[activation]):
        raise UnsupportedModelError(
            f"{_label(node)} has the activation '{activation}' with {', '.join(sorted(settings)) or 'no settings'}; "
            f"supported are {', '.join(_ACTIVATIONS)}: save the model with basic optimization"
        )
    names = _ACTIVATIONS[activation]
    attrs: dict[str, Any] = {names[name]: float(node.attrs[name]) for name in sorted(settings)}
    return [emitter.op(activation, [result], "gemm_activation", **attrs)]


def _causal_conv(emitter: Emitter, node: gs.Node) -> Results:
    x, weight, past = node.inputs[0], node.inputs[1], input_or_none(node, 3)
    shape, activation = dims(weight), str(node.attrs.get("activation", "none"))
    sizes = [d for d in (shape or ())[::2] if isinstance(d, int)]
    plain = not int(node.attrs.get("state_window", 0)) and int(node.attrs.get("ndim", 1)) == 1
    if (
        past is None
        or len(shape or ()) != 3
        or len(sizes) != 2
        or sizes[1] < 2
        or not plain
        or activation not in _GATES
    ):
        raise UnsupportedModelError(
            f"{_label(node)} has a weight {list(shape or ())}, the activation '{activation}' and "
            f"{'a' if past is not None else 'no'} past; supported is one axis of time, a fixed weight [channels, 1, k] "
            f"of k > 1, a past, no state_window, and an activation of {', '.join(_GATES)}"
        )
    channels, width = sizes
    rows = emitter.op("Concat", [past, x], "conv_rows", axis=2)
    bias = input_or_none(node, 2)
    inputs = [rows, weight] + ([bias] if bias is not None else [])
    result = emitter.op("Conv", inputs, "conv", group=channels, kernel_shape=[width])
    if activation != "none":
        gate = emitter.op("Sigmoid", [result], "conv_gate")
        result = emitter.op("Mul", [result, gate], "conv_gated")
    if not used(emitter.graph, node, 1):
        return [result]
    ends = [emitter.ints([1 - width]), emitter.ints([_END]), emitter.ints([2])]
    return [result, emitter.op("Slice", [rows, *ends], "conv_state")]


def _rotary(emitter: Emitter, node: gs.Node) -> Results:
    return [lower_rotary(emitter, node)]


def _planes(emitter: Emitter, node: gs.Node) -> Results:
    return [lower_planes(emitter, node)]


_LOWERINGS: dict[str, Callable[[Emitter, gs.Node], Results]] = {
    "SkipSimplifiedLayerNormalization": _skip_simplified_norm,
    "SkipLayerNormalization": _skip_norm,
    "EmbedLayerNormalization": _embed_norm,
    "RotaryEmbedding": _rotary,
    "MRotaryEmbedding": _planes,
    "Gelu": _exact_gelu,
    "FastGelu": _fast_gelu,
    "BiasGelu": _exact_gelu,
    "QuickGelu": _quick_gelu,
    "FusedMatMul": _fused_matmul,
    "FusedGemm": _fused_gemm,
    "CausalConvWithState": _causal_conv,
    "MatMulNBits": lower_matmul_nbits,
    "GatherBlockQuantized": lower_gather_nbits,
    "MoE": lower_moe,
    "QMoE": lower_moe,
}
