"""Products quantized in blocks as NVIDIA ModelOpt 0.47 writes them: NVFP4 and MXFP8, weights and what they multiply."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from concat_graphs import Decoder, make_decoder
from onnx import NodeProto, TensorProto, helper, numpy_helper

from corpus import Entry, built

Array = np.ndarray[Any, Any]
FORMS = ("nvfp4", "mxfp8")
FP4, FP8 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn


def in_blocks(model: onnx.ModelProto, form: str, *, plain: bool = False) -> onnx.ModelProto:
    """The model with every product with a weight ``[K, N]`` quantized.

    Args:
        model: of opset 23 for nvfp4. Not changed.
        form: of `FORMS`.
        plain: what it comes to without rounding activations: the quantized weights as floats.
    """
    made = deepcopy(model)
    weights = {t.name: t for t in made.graph.initializer}
    nodes: list[NodeProto] = []
    for node in made.graph.node:
        weight = weights.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is not None:
            values = numpy_helper.to_array(weight).T
            form_of = _nvfp4 if form == "nvfp4" else _mxfp8
            tensors, before, floats = form_of(values, weight.name, str(node.input[0]), weight.data_type)
            if plain:
                weight.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(floats.T), weight.name))
            else:
                made.graph.initializer.remove(weight)
                made.graph.initializer.extend(tensors)
                turned = helper.make_node("Transpose", [f"{weight.name}_wide"], [weight.name], perm=[1, 0])
                nodes += [*before, turned]
                node.input[0] = f"{weight.name}_x"
        nodes.append(node)
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    if not plain:
        made.opset_import.add(domain="trt", version=1)
    return made


def _nvfp4(values: Array, name: str, x: str, kind: int) -> tuple[list[TensorProto], list[NodeProto], Array]:
    blocks = values.astype(np.float32).reshape(values.shape[0], -1, 16)
    whole = np.abs(blocks).max() / 6 / 448
    scales = (np.abs(blocks).max(-1) / 6 / whole).astype(FP8)
    wide = scales.astype(np.float32) * np.float32(whole)
    numbers = (blocks / wide[..., None]).astype(FP4)
    floats = (numbers.astype(np.float32) * wide[..., None]).reshape(values.shape).astype(values.dtype)
    bits = numbers.reshape(-1).view(np.uint8)
    tensors = [
        _raw(f"{name}_f4", TensorProto.FLOAT4E2M1, values.shape, bits[::2] | bits[1::2] << 4),
        _raw(f"{name}_f8", TensorProto.FLOAT8E4M3FN, scales.shape, scales.view(np.uint8)),
        numpy_helper.from_array(np.float32(whole), f"{name}_whole"),
        numpy_helper.from_array(np.float32(0.01), f"{name}_step"),
    ]
    n = f"{name}_"
    sizes = {"axis": -1, "block_size": 16}
    nodes = [
        helper.make_node("DequantizeLinear", [f"{n}f8", f"{n}whole"], [f"{n}scales"]),
        helper.make_node("DequantizeLinear", [f"{n}f4", f"{n}scales"], [f"{n}floats"], **sizes),
        helper.make_node("Cast", [f"{n}floats"], [f"{n}wide"], to=kind),
        helper.make_node(
            "TRT_FP4DynamicQuantize", [x, f"{n}step"], [f"{n}q", f"{n}s"], f"{n}dynamic", domain="trt", scale_type=17,
            **sizes,
        ),
        helper.make_node("DequantizeLinear", [f"{n}s", f"{n}step"], [f"{n}s32"]),
        helper.make_node("DequantizeLinear", [f"{n}q", f"{n}s32"], [f"{n}x32"], **sizes),
        helper.make_node("Cast", [f"{n}x32"], [f"{n}x"], to=kind),
    ]  # fmt: skip
    return tensors, nodes, floats


def _mxfp8(values: Array, name: str, x: str, kind: int) -> tuple[list[TensorProto], list[NodeProto], Array]:
    blocks = values.astype(np.float32).reshape(values.shape[0], -1, 32)
    exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 448))
    wide = np.exp2(exponents).astype(np.float32)
    numbers = (blocks / wide[..., None]).astype(FP8)
    floats = (numbers.astype(np.float32) * wide[..., None]).reshape(values.shape).astype(values.dtype)
    n = f"{name}_"
    tensors = [
        _raw(f"{n}f8", TensorProto.FLOAT8E4M3FN, values.shape, numbers.view(np.uint8)),
        _raw(f"{n}e8", TensorProto.UINT8, exponents.shape, (exponents + 127).astype(np.uint8)),
    ]
    sizes: dict[str, Any] = {"axis": -1, "block_size": 32, "domain": "trt"}
    dequantize = "TRT_MXFP8DequantizeLinear"
    nodes = [
        helper.make_node(dequantize, [f"{n}f8", f"{n}e8"], [f"{n}wide"], f"{n}weight", output_dtype=kind, **sizes),
        helper.make_node("TRT_MXFP8DynamicQuantize", [x], [f"{n}q", f"{n}s"], f"{n}dynamic", output_dtype=17, **sizes),
        helper.make_node(dequantize, [f"{n}q", f"{n}s"], [f"{n}x"], f"{n}back", output_dtype=kind, **sizes),
    ]
    return tensors, nodes, floats


def _raw(name: str, kind: int, shape: tuple[int, ...], data: Array) -> TensorProto:
    return helper.make_tensor(name, kind, shape, np.ascontiguousarray(data).tobytes(), raw=True)


def entries() -> Iterator[Entry]:
    plain = Decoder(heads=8, size=8, opset=23)
    models = {form: (lambda form=form: in_blocks(make_decoder(plain), form)) for form in FORMS}
    yield from built("blocks", models, capacity=24)
