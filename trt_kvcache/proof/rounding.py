"""Rounding, measured: the original with what its products and norms give moved by as much as the engine rounds it.

Each weight that a product, a norm or a lookup reads ends in numbers that an engine rounds to its own type. A factor
near 1 for each of them stands for that, so that weights stay in their files. TensorRT computes products of float32 with
TF32, of 10 bits, as float16 has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer.protos import iter_tensors

UNITS = {"float32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance of the numbers next to 1, by the type that an engine rounds to: what rounding changes at most."""

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_ROUNDED = frozenset({
    "MatMul", "Gemm", "Conv", "MatMulNBits", "FusedMatMul", "Gather", "LayerNormalization", "RMSNormalization",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
})  # fmt: skip
_PREFIX = "trt_kvcache.proof/"


def rounding_dtype(model: ModelProto, *, twin: bool) -> str:
    """The type that an engine of a model rounds to."""
    if twin:
        return "bfloat16"
    return "float16" if any(t.data_type == TensorProto.FLOAT16 for t in iter_tensors(model)) else "float32"


def with_rounding(model: ModelProto, unit: float, seed: int) -> ModelProto:
    """A copy whose numbers are moved at random, each by at most `unit` of itself."""
    moved = ModelProto()
    moved.CopyFrom(model)
    graph, rng = moved.graph, np.random.default_rng(seed)
    weights = {t.name: t for t in graph.initializer}
    makes = {name: node for node in graph.node for name in node.output}
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        read = _weight(node, weights, makes) if node.op_type in _ROUNDED else None
        if read is None or not node.output[0]:
            continue
        dtype, width = read
        name, exact = node.output[0], f"{_PREFIX}{node.output[0]}"
        factors = (1 + rng.uniform(-unit, unit, width)).astype(helper.tensor_dtype_to_np_dtype(dtype))
        graph.initializer.append(numpy_helper.from_array(factors, f"{exact}/factors"))
        node.output[0] = exact
        nodes.append(helper.make_node("Mul", [exact, f"{exact}/factors"], [name], f"{exact}/rounded"))
    made = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(made)
    return moved


def _weight(
    node: NodeProto, weights: Mapping[str, TensorProto], makes: Mapping[str, NodeProto]
) -> tuple[int, tuple[int, ...]] | None:
    """Type of what a node gives, and the length of its last axis where it is known; None: it reads no weight."""
    places = range(len(node.input)) if node.op_type.endswith("Normalization") else (0, 1)
    for name in (node.input[place] for place in places if place < len(node.input)):
        tensor = _followed(name, weights, makes)
        if tensor is None or tensor.data_type not in _FLOATS:
            continue
        plain = name in weights and len(tensor.dims) in (1, 2) and node.op_type not in ("Conv", "MatMulNBits")
        last = 0 if _attribute(node, "transB") else -1
        return tensor.data_type, (tensor.dims[last],) if plain else ()
    scales = node.input[2] if node.op_type == "MatMulNBits" else ""
    if scales in weights and weights[scales].data_type in _FLOATS:
        return weights[scales].data_type, (_attribute(node, "N"),)
    return None


def _followed(name: str, weights: Mapping[str, TensorProto], makes: Mapping[str, NodeProto]) -> TensorProto | None:
    """The weight that a tensor is made of without computing, of quantized ones the scales."""
    while name not in weights:
        node = makes.get(name)
        if node is None or node.op_type not in ("Transpose", "DequantizeLinear", "Identity", "Reshape", "Unsqueeze"):
            return None
        name = node.input[1 if node.op_type == "DequantizeLinear" else 0]
    return weights[name]


def _attribute(node: NodeProto, name: str) -> int:
    found: Any = next((a for a in node.attribute if a.name == name and a.type == AttributeProto.INT), None)
    return 0 if found is None else int(found.i)
