"""Attention that rounds to 8 bits on its way, as NVIDIA ModelOpt quantizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import concat_graphs
import ml_dtypes
import numpy as np
from concat_graphs import Build, Decoder, decoders, make_decoder
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from corpus import Entry, built

Hook = Callable[[Build, str], str]
INT8, FP8 = np.int8, ml_dtypes.float8_e4m3fn
STEPS = {INT8: 1 / 32, FP8: 1 / 64}
PARTS = ("query", "keys", "scores", "weights", "values")
OPSET = 21


def rounds(kind: Any, scale: float = 0.0, zero: int = 0, then: float = 0.0, **attrs: int) -> Hook:
    """A hook that rounds a tensor; `then`: another scale for DequantizeLinear."""

    def hook(g: Build, tensor: str) -> str:
        dtype = np.float32 if g.decoder.upcast else g.decoder.dtype
        first = scale or STEPS[kind]
        names = [g.constant(first, dtype), g.constant(zero, kind), g.constant(then or first, dtype)]
        small = g.QuantizeLinear(tensor, names[0], names[1], **attrs)
        return g.DequantizeLinear(small, names[2], names[1])

    return hook


def modelopt(
    kind: Any, parts: tuple[str, ...] = PARTS, *, from_sizes: bool = False
) -> Callable[[Build, str, str, str], str]:
    """Attention as ModelOpt's PTQ of ONNX models leaves it: what a product reads is rounded right before it.

    `from_sizes`: with the factor as TorchScript computes it.
    """

    def rounded(g: Build, tensor: str, part: str, step: float = 1.0) -> str:
        return rounds(kind, STEPS[kind] * step)(g, tensor) if part in parts else tensor

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        root = _root(g, query) if from_sizes else g.constant(g.decoder.size**-0.25, g.decoder.dtype)
        turned = g.Transpose(keys, perm=[0, 1, 3, 2])
        query, turned = (g.Mul(tensor, root) for tensor in (query, turned))
        scores = g.MatMul(rounded(g, query, "query"), rounded(g, turned, "keys", 0.75))
        masked = concat_graphs._masked(g, rounded(g, scores, "scores"))
        weights = g.Softmax(masked, axis=-1)
        weights = rounded(g, weights, "weights", 0.25)
        return g.MatMul(weights, rounded(g, values, "values"))

    return attend


def _root(g: Build, query: str) -> str:
    """The fourth root of one by the size of a head."""
    ends = [g.constant([n]) for n in (-1, np.iinfo(np.int64).max)]
    size = g.Slice(g.Shape(query), *ends)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(g.decoder.dtype))
    root = g.Sqrt(g.Cast(size, to=kind))
    return g.Sqrt(g.Div(g.constant([1.0], g.decoder.dtype), root))


def per_channel(g: Build, tensor: str) -> str:
    """Scales along the size of a head are the same for all rows."""
    scales = g.constant(np.linspace(0.02, 0.05, g.decoder.size), np.float32)
    zeros = g.constant(np.zeros(g.decoder.size), INT8)
    small = g.QuantizeLinear(tensor, scales, zeros, axis=3)
    return g.DequantizeLinear(small, scales, zeros, axis=3)


def dynamic(g: Build, tensor: str) -> str:
    scale = g.Div(g.ReduceMax(tensor, keepdims=0), g.constant(127, np.float32))
    small = g.QuantizeLinear(tensor, scale, g.constant(0, INT8))
    return g.DequantizeLinear(small, scale, g.constant(0, INT8))


FORMS: dict[str, dict[str, Any]] = {
    **{f"{n}, {r}": {"attend": modelopt(k), "repeat": r, "kv_heads": 1 if r == "none" else 2, "layers": 2}
       for n, k in (("int8", INT8), ("float8", FP8)) for r in ("none", "gather")},
    "int8, float16": {"attend": modelopt(INT8), "dtype": np.float16, "size": 16},
    "float8, keys and values": {"attend": modelopt(FP8, ("keys", "values")), "dtype": np.float16, "size": 16},
    "a factor of sizes": {"attend": modelopt(INT8, from_sizes=True)},
    "bsnd": {"attend": modelopt(INT8), "layout": "bsnd"},
    "flat": {"attend": modelopt(INT8), "layout": "flat"},
    "int8, caches alone": {"keys": rounds(INT8), "values": rounds(INT8)},
    "float8, caches alone": {"keys": rounds(FP8), "values": rounds(FP8)},
    "a scale for each channel": {"keys": per_channel, "values": per_channel},
    "after the mask": {"masked": rounds(INT8)},
    "two scales": {"scores": rounds(INT8, then=0.5)},
    "a zero point": {"weights": rounds(np.uint8, 1 / 255, zero=3)},
    "keys without saturation": {"keys": rounds(FP8, 0.1, saturate=0)},
    "scales of a step": {"keys": dynamic},
}  # fmt: skip


def _node(model: ModelProto, output: str) -> tuple[int, NodeProto]:
    return next((i, n) for i, n in enumerate(model.graph.node) if n.output[0] == output)


def rounded_as_a_whole(kind: Any, dtype: Any = np.float32, scale: float = 0.0625, cast: bool = False) -> ModelProto:
    """ModelOpt rounds the very output where attention reads it without repeating heads.

    With this scale no number lies so near the middle of two steps that float16 decides which one it becomes.
    """
    model = make_decoder(Decoder(kv_heads=4, dtype=dtype, opset=OPSET))
    concat = next(n for n in model.graph.node if n.output[0] == "present.0.value")
    concat.output[0] = "joined"
    number = numpy_helper.from_array(np.asarray(scale, dtype), "s")
    zero = helper.make_tensor("z", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), [], b"\0", raw=True)
    model.graph.initializer.extend([number, zero])
    last = "rounded" if cast else "present.0.value"
    more = [
        helper.make_node("QuantizeLinear", ["joined", "s", "z"], ["small"], name="rounds"),
        helper.make_node("DequantizeLinear", ["small", "s", "z"], [last]),
    ]
    if cast:
        more.append(helper.make_node("Cast", [last], ["present.0.value"], to=number.data_type))
    place = list(model.graph.node).index(concat) + 1
    for node in reversed(more):
        model.graph.node.insert(place, node)
    return model


def read_as_it_is() -> ModelProto:
    model = rounded_as_a_whole(INT8)
    next(n for n in model.graph.node if "present.0.value" in n.input).input[1] = "joined"
    return model


def rounded_by_concat() -> ModelProto:
    """As onnxruntime's quantize_static leaves it unless products alone are quantized: each with a scale of its own."""
    model = rounded_as_a_whole(INT8)
    for i in range(2):
        place, concat = _node(model, "joined")
        model.graph.initializer.append(numpy_helper.from_array(np.float32(0.03 + i / 100), f"s{i}"))
        tensor, concat.input[i] = concat.input[i], f"r{i}"
        model.graph.node.insert(place, helper.make_node("DequantizeLinear", [f"q{i}", f"s{i}", "z"], [f"r{i}"]))
        model.graph.node.insert(place, helper.make_node("QuantizeLinear", [tensor, f"s{i}", "z"], [f"q{i}"]))
    return model


def rounded_before_the_write() -> ModelProto:
    model = make_decoder(Decoder(opset=OPSET))
    place, concat = _node(model, "present.0.key")
    model.graph.initializer.append(helper.make_tensor("s", TensorProto.FLOAT, [], [0.05]))
    model.graph.initializer.append(helper.make_tensor("z", TensorProto.INT8, [], [0]))
    tensor, concat.input[1] = concat.input[1], "rounded"
    model.graph.node.insert(place, helper.make_node("DequantizeLinear", ["small", "s", "z"], ["rounded"]))
    model.graph.node.insert(place, helper.make_node("QuantizeLinear", [tensor, "s", "z"], ["small"]))
    return model


def as_written_from_torch(model: ModelProto) -> ModelProto:
    """Float8 operators as exports from torch have them: in NVIDIA's domain, the weight's as ONNX's by name alone."""
    zeros = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT8E4M3FN}
    for number, node in enumerate(n for n in model.graph.node if "quantizelinear" in n.op_type.lower()):
        node.domain = "trt"
        if number % 4 < 2:
            node.op_type = f"TRT_FP8{node.op_type}"
            del node.input[2:]
        assert all(name in zeros for name in node.input[2:])
    model.opset_import.add(domain="trt", version=1)
    return model


def in_nvidia_s_domain(opset: int = OPSET) -> ModelProto:
    model = as_written_from_torch(make_decoder(Decoder(attend=modelopt(FP8), opset=OPSET)))
    model.opset_import[0].version = opset
    return model


def entries() -> Iterator[Entry]:
    kinds = {"int8": INT8, "float8": FP8}
    yield from decoders("rounded", {n: Decoder(attend=modelopt(k), opset=OPSET) for n, k in kinds.items()})
    yield from decoders("rounded", {n: Decoder(opset=OPSET, **how) for n, how in FORMS.items()})
    wholes: dict[str, tuple[Any, ...]] = {
        "int8": (INT8,), "float8": (FP8,), "float16": (INT8, np.float16), "cast": (INT8, np.float16, 0.0625, True),
        "changes each time": (FP8, np.float16, 1e-7),
    }  # fmt: skip
    models = {f"whole, {n}": (lambda how=how: rounded_as_a_whole(*how)) for n, how in wholes.items()}
    models |= {"whole, read as it is": read_as_it_is, "whole, by concat": rounded_by_concat}
    models |= {"before the write": rounded_before_the_write, "nvidia": in_nvidia_s_domain}
    models |= {"nvidia, opset 18": lambda: in_nvidia_s_domain(18)}
    yield from built("rounded", models, capacity=24)
