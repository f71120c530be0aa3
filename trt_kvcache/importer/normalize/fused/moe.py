"""Write ONNX Runtime's mixtures of experts (MoE, QMoE) in standard operators; see `expert_blocks` for their form.

    scores, chosen = TopK(logits [T, E], k)          without normalize_routing_weights, MoE: TopK(Softmax(logits), k)
    shares = Softmax(scores)                         so, the scores themselves
    y = sum over the k chosen experts e of share * (fc2[e] @ activation(fc1[e] @ x + bias1[e]) + bias2[e])

    swiglu: columns 2 i and 2 i + 1 of fc1 are gate and linear part of column i
            g = min(gate, limit); g * Sigmoid(alpha * g) * (clip(linear, -limit, limit) + beta)
    gelu:   tanh, not erf

    QMoE:   fc[e] = (numbers - zero_points) * scales, of 4 bits (the lower half of a byte first) or 8, for each row, or
            each block of columns; without zero points the middle, 8 or 128

Scores and shares are float32, as in ONNX Runtime's kernels. Quantized weights become DequantizeLinear with a scale of 1
and a Gather of the chosen experts; scales and zero points are applied to what is gathered. TensorRT for RTX 1.7.1 makes
one kernel of all that: it reads the bits of the chosen experts alone, and keeps 4 (or 8) bits for each weight in the
engine. A scale of 1 also serves 8-bit weights with scales that are negative, which it refuses. Weights, scales and zero
points are never read.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md; routing, activations, the order
of columns and bits, and what is ignored, measured on ONNX Runtime 1.31.1 (CPU). QMoE has the shares of
normalize_routing_weights always. What its kernels for the CPU lack or ignore (fc3, swiglu_fusion of 0 or 2, the sparse
mixer) is refused: nothing here could say whether it is right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import FLOATS, Emitter, dims, dtype_name, elem_type, input_or_none
from trt_kvcache.importer.normalize.fused.expert_blocks import Routing, in_blocks, route, weighted_sum
from trt_kvcache.importer.normalize.fused.nbits import middle, refusal, view

_UINT8 = int(onnx.TensorProto.UINT8)
_NUMBERS = {4: int(onnx.TensorProto.UINT4), 8: _UINT8}
_ACTIVATIONS = ("relu", "gelu", "silu", "identity", "swiglu")
_END = 2**62
_INPUTS = {
    "MoE": ("x", "logits", "fc1", "bias1", "fc2", "bias2"),
    "QMoE": (
        "x", "logits", "fc1", "scales1", "bias1", "fc2", "scales2", "bias2", "fc3", "scales3", "bias3",
        "zero_points1", "zero_points2",
    ),
}  # fmt: skip
_PLAIN: Mapping[str, tuple[object, ...]] = {  # attributes that have one meaning here
    "use_sparse_mixer": (0,),
    "quant_type": ("int",),
    "weights_prepacked": (-1, 0),
}
_READ = frozenset(
    {
        "k", "activation_type", "activation_alpha", "activation_beta", "swiglu_fusion", "swiglu_limit",
        "normalize_routing_weights", "expert_weight_bits", "fc1_expert_weight_bits", "fc2_expert_weight_bits",
        "fc3_expert_weight_bits", "block_size",
        "accuracy_level",  # lets ONNX Runtime round activations to 8 bits; left out, as in MatMulNBits
    }
)  # fmt: skip
_AGAIN = "export the experts unfused, such as with mobius-onnx"
_RAW = "export for the CPU (onnxruntime-genai: -e cpu, or for CUDA qmoe_weights_prepacked=0)"
_INTEGERS = "export with integers (onnxruntime-genai: moe_quant_type=int4 or int8)"
_ADVICE = {"weights_prepacked": _RAW, "quant_type": _INTEGERS}


@dataclass(frozen=True)
class _Linear:
    """A linear layer of each expert: ``[E, rows, columns]``.

    Attributes:
        block: columns of a scale; 0: weights are floats.
    """

    number: int
    shape: tuple[int, int, int]
    bits: int = 0
    block: int = 0


def lower_moe(emitter: Emitter, node: gs.Node) -> list[gs.Tensor]:
    """The mixture in standard operators, for MoE and QMoE.

    Raises:
        UnsupportedModelError: the node asks for what ONNX Runtime's kernels for the CPU do not have, or ignore; weights
            are not those of the operator's definition.
    """
    given, activation = _given(node), _activation(node)
    layers = _layers(node, given)
    experts, hidden = layers[0].shape[0], layers[0].shape[2]
    k = int(node.attrs.get("k", 1))
    if not 0 < k <= experts:
        raise refusal(node, f"chooses {k} of {experts} experts; supported is 1 to all", _AGAIN)
    kind = int(elem_type(given["scales1" if node.op == "QMoE" else "fc1"]) or 0)
    _check_tokens(node, given, experts, kind)
    normalized = node.op == "QMoE" or int(node.attrs.get("normalize_routing_weights", 0)) == 1
    x = emitter.op("Reshape", [given["x"], emitter.ints([-1, hidden])], "moe_tokens", kind)
    routing = route(emitter, given["logits"], k, experts, normalized)
    rows = in_blocks(emitter, x, hidden, routing)
    inner = _activated(emitter, node, activation, _linear(emitter, node, given, layers[0], rows, routing), kind)
    result = _linear(emitter, node, given, layers[1], inner, routing)
    total = weighted_sum(emitter, result, hidden, routing, kind)
    shape = emitter.op("Shape", [given["x"]], "moe_shape", int(onnx.TensorProto.INT64))
    return [emitter.op("Reshape", [total, shape], "moe", kind)]


def _check_tokens(node: gs.Node, given: Mapping[str, gs.Tensor], experts: int, kind: int) -> None:
    """Refuse tokens and logits of other ranks and types than ONNX Runtime takes."""
    scales = given["scales1" if node.op == "QMoE" else "fc1"]
    if kind not in FLOATS:
        raise refusal(node, f"has '{scales.name}' of {dtype_name(scales)}; supported are floats", "export it again")
    for name, ranks in (("x", (2, 3)), ("logits", (2,))):
        tensor, shape = given[name], dims(given[name])
        fits = shape is None or (
            len(shape) in ranks and (name == "x" or shape[1] == experts or isinstance(shape[1], str))
        )
        if not fits or elem_type(tensor) not in (None, 0, kind):
            what = f"reads '{tensor.name}' of {dtype_name(tensor)} {list(shape or ())}"
            expected = f"{'tokens [T, H] or [B, S, H]' if name == 'x' else f'logits [T, {experts}]'} of the type of"
            raise refusal(node, f"{what}; supported are {expected} '{scales.name}'", "export it again")


def _given(node: gs.Node) -> dict[str, gs.Tensor]:
    """The inputs by what they are.

    Raises:
        UnsupportedModelError: there are others than those that are supported, or attributes that change their meaning.
    """
    for name, value in node.attrs.items():
        value = value.decode() if isinstance(value, bytes) else value
        if name not in _READ and value not in _PLAIN.get(name, ()):
            known = _PLAIN.get(name, ("no such attribute",))
            what = f"has {name}={value!r}; supported is {' or '.join(map(str, known))}"
            raise refusal(node, what, _ADVICE.get(name, _AGAIN))
    names = _INPUTS[node.op]
    for index in range(len(node.inputs)):
        tensor = input_or_none(node, index)
        if tensor is not None and (index >= len(names) or "3" in names[index]):
            what = f"has an input {index} ('{tensor.name}'), such as fc3, weights of the router or scales of FP4"
            raise refusal(node, f"{what}; supported are fc1 and fc2, for gated activations interleaved in fc1", _AGAIN)
    found = {name: input_or_none(node, index) for index, name in enumerate(names)}
    given = {name: tensor for name, tensor in found.items() if tensor is not None}
    needed = [name for name in names if name[-1:] not in "3" and not name.startswith(("bias", "zero_points"))]
    if any(name not in given for name in needed):
        raise refusal(node, f"lacks one of {', '.join(needed)}; the operator demands them", "export it again")
    return given


def _activation(node: gs.Node) -> str:
    value = node.attrs.get("activation_type", "relu")
    name = value.decode() if isinstance(value, bytes) else str(value)
    fusion = int(node.attrs.get("swiglu_fusion", 0))
    if name not in _ACTIVATIONS or fusion != (name == "swiglu"):
        what = f"has the activation '{name}' with swiglu_fusion={fusion}"
        plain = ", ".join(_ACTIVATIONS[:-1])
        raise refusal(node, f"{what}; supported are {plain}, and swiglu with swiglu_fusion=1 (interleaved)", _AGAIN)
    if float(node.attrs.get("swiglu_limit", math.inf)) < 0:
        raise refusal(node, f"has swiglu_limit={node.attrs['swiglu_limit']}; supported are limits from 0", _AGAIN)
    return name


def _layers(node: gs.Node, given: Mapping[str, gs.Tensor]) -> tuple[_Linear, _Linear]:
    """Sizes of both linear layers, from their weights; of quantized ones, from their scales.

    Raises:
        UnsupportedModelError: they do not fit each other, or lie in another order than the operator defines.
    """
    quantized = node.op == "QMoE"
    sized = [given[("scales" if quantized else "fc") + i] for i in "12"]
    shapes = [dims(t) or () for t in sized]
    if not all(len(s) in ((2, 3) if quantized else (3,)) and all(isinstance(d, int) for d in s) for s in shapes):
        raise refusal(node, f"has '{sized[0].name}' {list(shapes[0])} and '{sized[1].name}' {list(shapes[1])}",
                      "export it with shapes")  # fmt: skip
    experts, hidden, parts = int(shapes[0][0]), int(shapes[1][1]), 1 + int(node.attrs.get("swiglu_fusion", 0))
    inner = int(shapes[0][1]) // parts
    full = ((experts, parts * inner, hidden), (experts, hidden, inner))
    bits, block = (int(node.attrs.get(n, d)) for n, d in (("expert_weight_bits", 4), ("block_size", 0)))
    own = {n: node.attrs.get(f"fc{n}_expert_weight_bits", bits) for n in (1, 2, 3)}
    if not quantized:
        bits = block = 0
    elif bits not in _NUMBERS or set(own.values()) != {bits}:
        what = f"has experts of {bits} bits (fc1, fc2, fc3: {', '.join(map(str, own.values()))})"
        raise refusal(node, f"{what}; supported are 4 or 8 in all", _INTEGERS)
    made = []
    for number, (e, rows, columns) in enumerate(full, 1):
        width = block or columns
        blocks = -(-columns // width)
        expected = {f"fc{number}": (e, rows, columns * bits // 8 if quantized else columns), f"bias{number}": (e, rows)}
        if quantized:
            expected[f"scales{number}"] = (e, rows, blocks) if block else (e, rows)
        for name, shape in expected.items():
            found = dims(given[name]) if name in given else shape
            if found not in (None, shape) or (name.startswith("fc") and columns * bits % 8):
                what = f"has {name} '{given[name].name}' {list(found or ())}, for {e} experts of {columns} columns"
                raise refusal(node, f"{what}; supported is {list(shape)}, rows of whole bytes as defined", _RAW)
        made.append(_Linear(number, (e, rows, columns), bits, width if quantized else 0))
    return made[0], made[1]


def _linear(
    emitter: Emitter, node: gs.Node, given: Mapping[str, gs.Tensor], layer: _Linear, x: gs.Tensor, routing: Routing
) -> gs.Tensor:
    """``x [n, b, columns] -> [n, b, rows]``, each block with its own expert."""
    kind = int(elem_type(x) or 0)
    weight = _weights(emitter, node, given, layer, routing.experts)
    turned = emitter.op("Transpose", [weight], "moe_columns", kind, perm=[0, 2, 1])
    result = emitter.op("MatMul", [x, turned], "moe_matmul", kind)
    bias = given.get(f"bias{layer.number}")
    if bias is None:
        return result
    chosen = emitter.op("Gather", [bias, routing.experts], "moe_bias", kind)
    row = emitter.op("Unsqueeze", [chosen, emitter.ints([1])], "moe_bias", kind)
    return emitter.op("Add", [result, row], "moe_biased", kind)


def _weights(
    emitter: Emitter, node: gs.Node, given: Mapping[str, gs.Tensor], layer: _Linear, experts: gs.Tensor
) -> gs.Tensor:
    """The weights ``[n, rows, columns]`` of the experts `experts` ``[n]``."""
    number, (count, rows, columns) = layer.number, layer.shape
    if not layer.bits:
        return emitter.op("Gather", [given[f"fc{number}"], experts], "moe_weight")
    place = _INPUTS["QMoE"].index
    blocks = -(-columns // layer.block)
    scales = view(emitter, node, place(f"scales{number}"), None, (count, rows, blocks), FLOATS)
    kind = int(elem_type(scales) or 0)
    numbers = view(emitter, node, place(f"fc{number}"), _NUMBERS[layer.bits], layer.shape, (_UINT8,))
    whole = [emitter.scalar(1, kind), middle(emitter, layer.bits, ())]
    dense = emitter.op("DequantizeLinear", [numbers, *whole], "moe_numbers", kind)
    chosen = emitter.op("Gather", [dense, experts], "moe_numbers", kind)
    filled = blocks * layer.block - columns
    if filled:
        pads = [emitter.ints([0, filled]), gs.Variable.empty(), emitter.ints([-1])]
        chosen = emitter.op("Pad", [chosen, *pads], "moe_padded", kind)
    apart = emitter.op("Reshape", [chosen, emitter.ints([-1, rows, blocks, layer.block])], "moe_blocks", kind)
    zeros = _zero_points(emitter, node, given, layer, whole)
    if zeros is not None:
        apart = emitter.op("Sub", [apart, _column(emitter, zeros, experts)], "moe_blocks", kind)
    scaled = emitter.op("Mul", [apart, _column(emitter, scales, experts)], "moe_scaled", kind)
    weight = emitter.op("Reshape", [scaled, emitter.ints([-1, rows, columns + filled])], "moe_weight", kind)
    if not filled:
        return weight
    ends = [emitter.ints([i]) for i in (0, columns, 2)]
    return emitter.op("Slice", [weight, *ends], "moe_weight", kind)


def _zero_points(
    emitter: Emitter, node: gs.Node, given: Mapping[str, gs.Tensor], layer: _Linear, whole: list[gs.Tensor]
) -> gs.Tensor | None:
    """Zero points ``[E, rows, blocks]`` as floats, less the middle; None: none. Each row of them begins with a byte."""
    name = f"zero_points{layer.number}"
    if name not in given:
        return None
    kind, (count, rows, columns) = int(elem_type(whole[0]) or 0), layer.shape
    blocks = -(-columns // layer.block)
    by_row = int(node.attrs.get("block_size", 0)) == 0  # then they lie along the rows
    outer, width = ((count,), rows) if by_row else ((count, rows), blocks)
    padded = -(-width * layer.bits // 8) * 8 // layer.bits
    found = dims(given[name])
    if found not in (None, (*outer, padded * layer.bits // 8)):
        what = f"has {name} '{given[name].name}' {list(found or ())}"
        raise refusal(node, f"{what}; supported is {[*outer, padded * layer.bits // 8]}", "export it again")
    place = _INPUTS["QMoE"].index(name)
    numbers = view(emitter, node, place, _NUMBERS[layer.bits], (*outer, padded), (_UINT8,))
    zeros = emitter.op("DequantizeLinear", [numbers, *whole], "moe_zero_points", kind)
    if padded != width:
        ends = [emitter.ints([i]) for i in (0, width, len(outer))]
        zeros = emitter.op("Slice", [zeros, *ends], "moe_zero_points", kind)
    if by_row:
        zeros = emitter.op("Unsqueeze", [zeros, emitter.ints([-1])], "moe_zero_points", kind)
    return zeros


def _column(emitter: Emitter, values: gs.Tensor, experts: gs.Tensor) -> gs.Tensor:
    """``[E, rows, blocks] -> [n, rows, blocks, 1]``."""
    chosen = emitter.op("Gather", [values, experts], "moe_factors")
    return emitter.op("Unsqueeze", [chosen, emitter.ints([-1])], "moe_factors")


def _activated(emitter: Emitter, node: gs.Node, activation: str, x: gs.Tensor, kind: int) -> gs.Tensor:
    if activation == "identity":
        return x
    if activation == "relu":
        return emitter.op("Relu", [x], "moe_relu", kind)
    if activation == "gelu":
        return emitter.op("Gelu", [x], "moe_gelu", kind, approximate="tanh")
    if activation == "silu":
        return _gated(emitter, x, 1, kind)
    settings: dict[str, float] = {
        name: float(node.attrs.get(name, default))
        for name, default in (("activation_alpha", 1), ("activation_beta", 0), ("swiglu_limit", math.inf))
    }
    ends = [emitter.ints([n]) for n in (_END, -1, 2)]
    gate, linear = (emitter.op("Slice", [x, emitter.ints([i]), *ends], "moe_half", kind) for i in (0, 1))
    limit = settings["swiglu_limit"]
    if limit < math.inf:
        top, bottom = emitter.scalar(limit, kind), emitter.scalar(-limit, kind)
        gate = emitter.op("Min", [gate, top], "moe_gate", kind)
        linear = emitter.op("Clip", [linear, bottom, top], "moe_linear", kind)
    if settings["activation_beta"]:
        linear = emitter.op("Add", [linear, emitter.scalar(settings["activation_beta"], kind)], "moe_linear", kind)
    return emitter.op("Mul", [_gated(emitter, gate, settings["activation_alpha"], kind), linear], "moe_inner", kind)


def _gated(emitter: Emitter, x: gs.Tensor, alpha: float, kind: int) -> gs.Tensor:
    """``x * Sigmoid(alpha * x)``."""
    scaled = x if alpha == 1 else emitter.op("Mul", [x, emitter.scalar(alpha, kind)], "moe_alpha", kind)
    return emitter.op("Mul", [x, emitter.op("Sigmoid", [scaled], "moe_sigmoid", kind)], "moe_gated", kind)
