"""Operators of TensorRT that quantize in blocks (`modelopt`), for ONNX Runtime on the CPU.

    weights of float4       numbers  -> their doubles in int8, by a table of 16; scales  -> half of them
    weights of MXFP8        y        -> DequantizeLinear(numbers, 2 ** (exponents - 127))
    what a step computes    y        -> x, in the type of y

ONNX Runtime 1.31.1 does not support float4, and only TensorRT runs TensorRT's operators. Weights are exact. Numbers
that a step computes are not rounded in either model: scales depend on the numbers of each block, so that the smallest
difference would move many numbers by up to a quarter.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, shape_inference

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions.quantizers.modelopt import MX_DEQUANTIZE, is_block_operator
from trt_kvcache.importer.extensions.quantizers.writer import Writer
from trt_kvcache.importer.protos import copied, elem_type_of, is_op, opset_version, replace_field
from trt_kvcache.importer.simplify import raise_opset
from trt_kvcache.importer.weights import reinterpret

_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # float4, by its bits
_BIAS = 127  # of exponents
_BLOCK = 32  # of MXFP8
_BLOCKS_OPSET = 21  # of DequantizeLinear with blocks


def block_steps(model: ModelProto) -> int:
    """The number of operators that quantize while a step runs."""
    return sum(is_block_operator(node) and node.op_type != MX_DEQUANTIZE for node in model.graph.node)


def with_plain_blocks(model: ModelProto) -> ModelProto:
    """Copy the model and replace its block operators for ONNX Runtime.

    Raises:
        UnsupportedModelError: the operators stand in another form than ModelOpt writes.
    """
    if (opset_version(model) or 0) < _BLOCKS_OPSET:
        model = raise_opset(model)
    inferred = shape_inference.infer_shapes(model)
    _Editor(inferred).edit()
    return inferred


class _Editor:
    """Edits one model in place."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._weights = {t.name: t for t in model.graph.initializer}
        self._types = {v.name: elem_type_of(v) for v in (*model.graph.value_info, *model.graph.output)}
        self._write = Writer(model.graph, "blocks")
        self._plain: dict[str, str] = {}  # numbers, and their sources
        self._gone: set[str] = set()  # what only scales of numbers that are not rounded go through
        self._scaled: dict[str, str] = {}  # doubles of weights and halves of scales, by their names

    def edit(self) -> None:
        for node in self._graph.node:
            self._replace(copied(node))
        lost = sorted(self._gone & {value.name for value in self._graph.output})
        if lost:
            raise UnsupportedModelError(
                f"'{lost[0]}' is computed from the scales of numbers that TensorRT quantizes in blocks; verification "
                "knows these where they are dequantized again, as ModelOpt writes it"
            )
        del self._graph.value_info[:]
        replace_field(self._graph.node, self._write.nodes)

    def _replace(self, node: NodeProto) -> None:
        first = node.input[0] if node.input else ""
        is_blocks = is_block_operator(node)
        is_dequantizing = is_op(node, "DequantizeLinear") or (is_blocks and node.op_type == MX_DEQUANTIZE)
        if is_blocks and not is_dequantizing:
            self._plain[node.output[0]] = first
            self._gone |= {*node.output}
        elif is_dequantizing and first in self._plain:
            self._write.op("Cast", [self._plain[first]], node.output[0], to=self._types.get(node.output[0]) or 1)
        elif self._gone & {*node.input}:
            self._gone |= {*node.output}
        elif is_blocks:
            self._exponents(node)
        else:
            weight = self._weights.get(first) if is_dequantizing else None
            if weight is not None and weight.data_type == TensorProto.FLOAT4E2M1:
                node.input[0], node.input[1] = self._doubles(weight), self._halved(node.input[1])
            self._write.nodes.append(node)

    def _exponents(self, node: NodeProto) -> None:
        """Dequantize a weight that has exponents instead of scales."""
        write, result = self._write, node.output[0]
        wide = write.op("Cast", node.input[1:2], to=TensorProto.FLOAT)
        power = write.op("Sub", [wide, write.constant(np.float32(_BIAS))])
        scales = write.op("Pow", [write.constant(np.float32(2)), power])
        sizes = {"axis": -1, "block_size": _BLOCK} | {a.name: a.i for a in node.attribute if a.name != "output_dtype"}
        floats = write.op("DequantizeLinear", [node.input[0], scales], **sizes)
        write.op("Cast", [floats], result, to=self._types.get(result) or TensorProto.FLOAT)

    def _doubles(self, weight: TensorProto) -> str:
        """Convert a float4 weight to its doubled numbers in int8."""
        write, name = self._write, weight.name
        if name not in self._scaled:
            bits = reinterpret(weight, write.name("bits"), TensorProto.UINT4, weight.dims)
            self._graph.initializer.append(bits)
            index = write.op("Cast", [bits.name], to=TensorProto.INT32)
            self._scaled[name] = write.op("Gather", [write.constant(_DOUBLED), index])
        return self._scaled[name]

    def _halved(self, scales: str) -> str:
        if scales not in self._scaled:
            half = self._write.op("CastLike", [self._write.constant(np.float32(0.5)), scales])
            self._scaled[scales] = self._write.op("Mul", [scales, half])
        return self._scaled[scales]
