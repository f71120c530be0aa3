"""Measures rounding: the original model, with results of products and norms rounded as an engine rounds them.

An engine rounds the result of a product, a norm or a lookup of a weight to its own type, and in another order than ONNX
Runtime. Here results are rounded to as many bits as that type has, on a different grid for each node, so that numbers
of that type change, too:

    y  ->  r(a y) / a,  1 < a < 2,  r(p) = c - (c - p),  c = (2^s + 1) p

This leaves 24 - s of the 24 bits of a float32 (Dekker 1971), for every shape of y. TensorRT computes float32 products
with TF32, which has 10 bits, like float16.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.importer.protos import iter_tensors

UNITS = {"float32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance between the numbers next to 1, by the type that an engine rounds to: the largest rounding error."""

# bits of the type that is rounded
_BITS: dict[int, int] = {TensorProto.FLOAT: 24, TensorProto.FLOAT16: 24, TensorProto.DOUBLE: 53}
_ROUNDED = frozenset({
    "MatMul", "Gemm", "Conv", "MatMulNBits", "FusedMatMul", "Gather", "LayerNormalization", "RMSNormalization",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
})  # fmt: skip
_PREFIX = "trt_kvcache.proof/"


def rounding_dtype(model: ModelProto, *, twin: bool) -> str:
    """Return the type that an engine of a model rounds to."""
    if twin:
        return "bfloat16"
    return "float16" if any(t.data_type == TensorProto.FLOAT16 for t in iter_tensors(model)) else "float32"


def with_rounding(model: ModelProto, unit: float, seed: int) -> ModelProto:
    """Return a copy whose numbers are rounded, each by at most `unit` of itself; `unit` is a power of two."""
    moved = ModelProto()
    moved.CopyFrom(model)
    graph, rng = moved.graph, np.random.default_rng(seed)
    weights = {t.name: t for t in graph.initializer}
    makes = {name: node for node in graph.node for name in node.output}
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        dtype = _dtype(node, weights, makes) if node.op_type in _ROUNDED and node.output[0] else None
        if dtype is None:
            continue
        name, exact, scale = node.output[0], f"{_PREFIX}{node.output[0]}", rng.uniform(1.1, 1.9)
        node.output[0] = exact
        wide = TensorProto.DOUBLE if dtype == TensorProto.DOUBLE else TensorProto.FLOAT
        factors = {"scale": scale, "split": 2.0 ** (_BITS[dtype] + int(np.log2(unit))) + 1, "back": 1 / scale}
        for part, factor in factors.items():
            graph.initializer.append(helper.make_tensor(f"{exact}/{part}", wide, [], [factor]))
        nodes.append(helper.make_node("Cast", [exact], [f"{exact}/y"], f"{exact}/y", to=wide))
        for op, one, other, result in (
            ("Mul", "y", "scale", "p"), ("Mul", "p", "split", "c"), ("Sub", "c", "p", "rest"),
            ("Sub", "c", "rest", "rounded"), ("Mul", "rounded", "back", "moved"),
        ):  # fmt: skip
            names = [f"{exact}/{part}" for part in (one, other)]
            nodes.append(helper.make_node(op, names, [f"{exact}/{result}"], f"{exact}/{result}"))
        nodes.append(helper.make_node("Cast", [f"{exact}/moved"], [name], f"{exact}/back", to=dtype))
    new_nodes = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(new_nodes)
    return moved


def _dtype(node: NodeProto, weights: Mapping[str, TensorProto], makes: Mapping[str, NodeProto]) -> int | None:
    """Return the type of a node's result that is computed from a weight; None if the node reads no weight."""
    read = node.input if node.op_type.endswith("Normalization") else node.input[:2]
    for name in node.input[2:3] if node.op_type == "MatMulNBits" else read:
        tensor = _followed(name, weights, makes)
        if tensor is not None and tensor.data_type in _BITS:
            return int(tensor.data_type)
    return None


def _followed(name: str, weights: Mapping[str, TensorProto], makes: Mapping[str, NodeProto]) -> TensorProto | None:
    """Return the weight behind nodes that only move it; for quantized weights, the scales. None if there is none."""
    while name not in weights:
        node = makes.get(name)
        if node is None or node.op_type not in ("Transpose", "DequantizeLinear", "Identity", "Reshape", "Unsqueeze"):
            return None
        name = node.input[1 if node.op_type == "DequantizeLinear" else 0]
    return weights[name]
