"""Attention that rounds to 8 bits on its way, as NVIDIA ModelOpt quantizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import concat_graphs
import ml_dtypes
import numpy as np
from concat_graphs import TYPES, Build, Decoder, decoders, joined, make_decoder
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from corpus import Entry, built
from trt_kvcache.importer.protos import replace_field

Hook = Callable[[Build, str], str]
INT8, FP8 = np.int8, ml_dtypes.float8_e4m3fn
STEPS = {INT8: 1 / 32, FP8: 1 / 64}
PARTS = ("query", "keys", "scores", "weights", "values")
OPSET = 21
GIVEN = (("scale", 0.02, np.float32), ("zero", 0, INT8))


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


def rounded_as_a_whole(
    kind: Any, dtype: Any = np.float32, scale: float = 0.0625, *, cast: bool = False, read: bool = True,
    parts: bool = False,
) -> Decoder:  # fmt: skip
    """ModelOpt rounds the very output where attention reads it without repeating heads.

    With this scale no number lies so near the middle of two steps that float16 decides which one it becomes.

    Args:
        read: attention reads what is rounded.
        parts: what Concat joins is rounded before, each with a scale of its own: as onnxruntime's quantize_static
            leaves it unless products alone are quantized.
    """

    def write(g: Build, past: str, new: str, present: str) -> str:
        if not g.part:
            return joined(g, past, new, present)
        if parts:
            past, new = rounds(kind, 0.03)(g, past), rounds(kind, 0.04)(g, new)
        whole, number, zero = joined(g, past, new), g.constant(scale, dtype), g.constant(0, kind)
        small = g.QuantizeLinear(whole, number, zero)
        last = g.DequantizeLinear(small, number, zero, out="" if cast else present)
        if cast:
            g.Cast(last, out=present, to=TYPES[dtype])
        return present if read else whole

    return Decoder(kv_heads=4, dtype=dtype, opset=OPSET, write=write)


def before_the_write(g: Build, past: str, new: str, present: str) -> str:
    return joined(g, past, new if g.part else rounds(INT8, 0.05)(g, new), present)


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


def held_in_int8(by_row: bool) -> ModelProto:
    """Caches of int8: new rows are quantized before they are joined, or the whole is."""
    model = make_decoder(Decoder(opset=OPSET))
    graph, nodes = model.graph, list[NodeProto]()
    graph.initializer.extend(numpy_helper.from_array(np.array(v, k), n) for n, v, k in GIVEN)
    for node in graph.node:
        nodes.append(node)
        if node.op_type != "Concat" or not node.output[0].startswith("present"):
            continue
        present, (past, new) = node.output[0], node.input
        wide = f"{present}/wide"
        if by_row:
            nodes.insert(-1, helper.make_node("QuantizeLinear", [new, "scale", "zero"], [f"{new}/few"]))
            nodes.append(helper.make_node("DequantizeLinear", [present, "scale", "zero"], [wide]))
            node.input[1] = f"{new}/few"
        else:
            nodes.insert(-1, helper.make_node("DequantizeLinear", [past, "scale", "zero"], [f"{past}/wide"]))
            nodes.append(helper.make_node("QuantizeLinear", [wide, "scale", "zero"], [present]))
            node.input[0], node.output[0] = f"{past}/wide", wide
        for other in (n for n in graph.node if n is not node):
            other.input[:] = [wide if name == present else name for name in other.input]
    replace_field(graph.node, nodes)
    for value in (*graph.input, *graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.elem_type = TensorProto.INT8
    return model


def entries() -> Iterator[Entry]:
    kinds = {"int8": INT8, "float8": FP8}
    yield from decoders("rounded", {n: Decoder(attend=modelopt(k), opset=OPSET) for n, k in kinds.items()})
    yield from decoders("rounded", {n: Decoder(opset=OPSET, **how) for n, how in FORMS.items()})
    wholes = {
        "int8": rounded_as_a_whole(INT8), "float8": rounded_as_a_whole(FP8),
        "float16": rounded_as_a_whole(INT8, np.float16), "cast": rounded_as_a_whole(INT8, np.float16, cast=True),
        "changes each time": rounded_as_a_whole(FP8, np.float16, 1e-7),
        "read as it is": rounded_as_a_whole(INT8, read=False), "by concat": rounded_as_a_whole(INT8, parts=True),
    }  # fmt: skip
    yield from decoders("rounded", {f"whole, {name}": how for name, how in wholes.items()})
    yield from decoders("rounded", {"before the write": Decoder(opset=OPSET, write=before_the_write)})
    nvidia = {"nvidia": in_nvidia_s_domain, "nvidia, opset 18": lambda: in_nvidia_s_domain(18)}
    yield from built("rounded", nvidia, capacity=24)
    held = {f"held in int8, {'rows' if n else 'whole'}": partial(held_in_int8, n) for n in (True, False)}
    yield from built("rounded", held, capacity=24)
