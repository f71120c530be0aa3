"""Measures the effect of an engine's rounding on a model, and derives from it how much an engine may differ.

An engine rounds results of products, norms and weight lookups to its own type, and sums in another order than ONNX
Runtime. To imitate this, each node's result y is multiplied by a random number a (one for each node), rounded by r, and
divided by a. So a number changes even if the engine's type can hold it exactly:

    y  ->  r(a y) / a,  1 < a < 2,  r(p) = c - (c - p),  c = (2^s + 1) p

Of a float32's 24 bits, r keeps 24 - s (Dekker 1971). TensorRT computes float32 products in TF32 (10 bits, as float16).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import astuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.compare.decode import DRAWN
from trt_kvcache.compare.differences import Share
from trt_kvcache.importer.cache_plan import CacheDtype
from trt_kvcache.importer.protos import copied, replace_field
from trt_kvcache.importer.steps.runnable import all_types

UNITS = {"float32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative rounding error, by the type that an engine rounds to: half the distance of numbers next to 1."""

MEASURED = 2
"""Measure with this multiple of an engine's rounding error, because the effect may grow faster than the error."""

_TIMES = Share(5.0, 2.5)  # allowed difference, as a multiple of the measured effect of rounding
_LEAST = Share(8.0, 5.0)  # least allowed difference, in units of rounding
_CODES = Share(2.5, 1.5)  # least allowed difference, in steps between codes: rounding may choose the next code
_STEPS = {None: 127, CacheDtype.INT8: 127, CacheDtype.INT4: 7, CacheDtype.FP8: 8}
"""Number of steps between 0 and the largest code, by type of the caches."""

_MOST_ROWS = 3
_FAINT = 25.0  # units of rounding; after random cache contents, outputs that need more are not compared
_SHOWS = 0.3  # share of an output's scale; a larger allowed difference could not show a fault
_SPREAD = 4.0  # largest result of `uneven`; a key cache of Gemma 3 in bfloat16 has a factor of 6.3
Shares = dict[str, dict[str, Share]]

# significant bits of the type that imitates the rounding; float16 is computed in float32
_BITS: dict[int, int] = {TensorProto.FLOAT: 24, TensorProto.FLOAT16: 24, TensorProto.DOUBLE: 53}
_ROUNDED = frozenset({
    "MatMul", "Gemm", "Conv", "MatMulNBits", "FusedMatMul", "Gather", "LayerNormalization", "RMSNormalization",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
})  # fmt: skip
_MOVES = ("Transpose", "DequantizeLinear", "Identity", "Reshape", "Unsqueeze")  # between a weight and its user


def rounding_dtype(model: ModelProto) -> str:
    """Return the narrowest floating-point type in a model. The model's engine rounds to this type."""
    types = all_types(model)
    return "bfloat16" if TensorProto.BFLOAT16 in types else "float16" if TensorProto.FLOAT16 in types else "float32"


def with_rounding(model: ModelProto, unit: float, seed: int) -> ModelProto:
    """Return a copy of a float32 model that rounds results by at most the relative error `unit`, a power of two."""
    moved = copied(model)
    graph, rng = moved.graph, np.random.default_rng(seed)
    weights = {t.name: t for t in graph.initializer}
    makes = {name: node for node in graph.node for name in node.output}
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        dtype = _dtype(node, weights, makes) if node.op_type in _ROUNDED and node.output[0] else None
        if dtype is None:
            continue
        name, exact, scale = node.output[0], f"trt_kvcache.proof/{node.output[0]}", rng.uniform(1.1, 1.9)
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
    replace_field(graph.node, nodes)
    return moved


def _dtype(node: NodeProto, weights: Mapping[str, TensorProto], makes: Mapping[str, NodeProto]) -> int | None:
    """Return the type of the weight (or of its scales) that a node computes with; None if the node reads no weight."""
    read = node.input if node.op_type.endswith("Normalization") else node.input[:2]
    for name in node.input[2:3] if node.op_type == "MatMulNBits" else read:
        while name not in weights and name in makes and makes[name].op_type in _MOVES:
            name = makes[name].input[1 if makes[name].op_type == "DequantizeLinear" else 0]
        if name in weights and weights[name].data_type in _BITS:
            return int(weights[name].data_type)
    return None


def allowed(
    rounding: Mapping[str, Mapping[str, Share]], unit: float, rows: int, coded: Collection[str],
    dtype: CacheDtype | None,
) -> Shares:  # fmt: skip
    """Return the differences that an engine may have, by part of the decode and output.

    Outputs whose allowed difference is so large that no fault would exceed it are left out. `rounding` has the largest
    difference that rounding by `unit` (relative) caused in any of `rows` batch rows. `coded` outputs hold codes
    (quantized numbers) of the type `dtype`.
    """
    spread = uneven(rounding)
    few = min(math.sqrt(max(_MOST_ROWS / rows, 1)), spread)  # with few samples, the largest measured effect is smaller
    # models that amplify rounding need a larger allowance: 1.12 times as large (SmolLM2 in float16)
    few *= 1 + (spread - 1) / 6
    shares: Shares = {part: {} for part in rounding}
    for part, outputs in rounding.items():
        for name, own in outputs.items():
            least, step = (_CODES, 1 / _STEPS[dtype]) if name in coded else (_LEAST, unit)
            share = own.most(_usual(rounding, name)).times(_TIMES, few).most(least.times(Share(step, step)))
            if share.typical <= (_FAINT * unit if part == DRAWN else _SHOWS):
                shares[part][name] = share
    return shares


def uneven(rounding: Mapping[str, Mapping[str, Share]]) -> float:
    """Return by which factor (1 to 4) rounding affects some parts of the decode more than others."""
    ratios = [1.0]
    for name in {name for outputs in rounding.values() for name in outputs}:
        typical = [outputs[name].typical for part, outputs in rounding.items() if name in outputs and part != DRAWN]
        if min(typical, default=0) and math.isfinite(max(typical)):
            ratios.append(max(typical) / min(typical))
    return min(max(ratios), _SPREAD)


def _usual(rounding: Mapping[str, Mapping[str, Share]], name: str) -> Share:
    """Return half of the typical effect of rounding on an output (root mean square over the decode's parts).

    The full effect would hide faults in the parts in which a trained model amplifies rounding less.
    """
    own = [outputs[name] for part, outputs in rounding.items() if name in outputs and part != DRAWN]
    known = [share for share in own if math.isfinite(share.largest)]
    squares = np.square([astuple(share) for share in known or [Share(0, 0)]])
    return Share(*map(float, np.sqrt(squares.mean(0)) / 2))
