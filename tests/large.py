"""Models of real sizes at no cost: small ones, in which sizes become large, and whose weights are holes in a file."""

import math
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from trt_kvcache.importer.protos import byte_size

_SMALL = 4096  # numbers in an initializer that keeps its contents


def write_large(
    model: onnx.ModelProto, sizes: Mapping[int, int], folder: Path, *, block: int = 0, inside: bool = False
) -> Path:
    """Write a model with other sizes, whose large weights are external and zero; returns its path.

    Args:
        model: a small model, which nothing but the shapes of its initializers, inputs and outputs ties to these sizes.
        sizes: large ones for small ones.
        folder: to write to.
        block: products become MatMulNBits of 4 bits, in blocks of so many columns.
        inside: weights are zeros in the model's own file.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value"):
                dim.dim_value = sizes.get(dim.dim_value, dim.dim_value)
    del graph.value_info[:]
    end = 0
    for tensor in graph.initializer:
        shape = [sizes.get(d, d) for d in tensor.dims]
        if tensor.data_type not in (TensorProto.INT64, TensorProto.BOOL) and shape != list(tensor.dims):
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=shape))
            if math.prod(shape) <= _SMALL:
                tensor.raw_data = bytes(byte_size(tensor) or 0)
    if block:
        _quantize(made, block)
    for tensor in graph.initializer:
        if tensor.HasField("raw_data") or len(tensor.ListFields()) > 3:  # name, type and shape, and contents
            continue
        size = byte_size(tensor) or 0
        if inside:
            tensor.raw_data = bytes(size)
            continue
        tensor.data_location = TensorProto.EXTERNAL
        for key, entry in (("location", "weights.bin"), ("offset", end), ("length", size)):
            tensor.external_data.add(key=key, value=str(entry))
        end += -(-size // 4096) * 4096
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(end)
    onnx.save(made, folder / "model.onnx")
    return folder / "model.onnx"


def _quantize(model: onnx.ModelProto, block: int) -> None:
    weights = {t.name: t for t in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    added: list[TensorProto] = []
    for node in model.graph.node:
        weight = weights.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None or len(weight.dims) != 2 or weight.HasField("raw_data"):
            nodes.append(node)
            continue
        columns, rows = weight.dims
        blocks = columns // block
        shapes = {"b": (TensorProto.UINT8, (rows, blocks, block // 2)), "scales": (weight.data_type, (rows, blocks)),
                  "zero_points": (TensorProto.UINT8, (rows, -(-blocks // 2)))}  # fmt: skip
        names = [f"{weight.name}/{part}" for part in shapes]
        if names[0] not in weights:
            added += [
                TensorProto(name=n, data_type=k, dims=s) for n, (k, s) in zip(names, shapes.values(), strict=True)
            ]
            weights |= {t.name: t for t in added}
        attributes = {"K": columns, "N": rows, "bits": 4, "block_size": block}
        nodes.append(
            helper.make_node("MatMulNBits", [node.input[0], *names], node.output, domain="com.microsoft", **attributes)
        )
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(added)
    read = {name for node in nodes for name in node.input}
    kept = [t for t in model.graph.initializer if t.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    if not any(entry.domain == "com.microsoft" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
