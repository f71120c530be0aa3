"""Products that are rounded to 8 bits while they run, as products with weights of 8 bits.

    q, s, z = DynamicQuantizeLinear(x)
    y = Cast(MatMulInteger(q, W, z, w)) * (s * scale)           onnxruntime.quantization.quantize_dynamic
    y = MatMulIntegerToFloat(q, W, s, scale, z, w, bias)        the same, fused by ONNX Runtime
    y = DynamicQuantizeMatMul(x, W, scale, w, bias)             the same, fused further

    becomes

    y = MatMul(x, DequantizeLinear(W, scale, middle)) - ReduceSum(x) * (scale * (w - middle)) + bias

and rows of a quantized table are dequantized before they are gathered, with its zero point in the middle, too; whatever
wrote it. TensorRT has none of the operators above, and takes tables in no other form.
Rounding `x` is an approximation that makes processors faster; its step follows from the largest number in a whole
batch, so that sequences, and rows after their ends, would change each other's numbers. So `x` stays as it is, as
with the `accuracy_level` of MatMulNBits; the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions.quantizers.writer import Writer
from trt_kvcache.importer.operators import INTEGER_PRODUCTS, QUANTIZES, VIEWS
from trt_kvcache.importer.protos import (
    DEFAULT_DOMAINS,
    attribute_graphs,
    constants_of,
    describe,
    int_attribute,
    is_op,
    iter_scopes,
    replace_field,
)
from trt_kvcache.importer.simplify import drop_dead

NOTE = (
    "what products with 8-bit weights read is not rounded to 8 bits, as the original does while it runs "
    "(DynamicQuantizeLinear): numbers are closer to those of the model before it was quantized"
)
_MIDDLES: dict[int, int] = {TensorProto.UINT8: 128, TensorProto.INT8: 0}
_CONTRIB = "com.microsoft"
_NONE = TensorProto(data_type=TensorProto.UINT8, raw_data=b"\0")
_SMALL = 1 << 12  # numbers of a table


def keep_weights_only(model: ModelProto) -> bool:
    """Edit, in place, the products and tables above in a model of opset 13 at least; the rest stays.

    Weights may be stand-ins. Returns True if there were products that are rounded.
    """
    editor = _Editor(model)
    editor.edit(model.graph, {}, {})
    return editor.products > 0


def refuse_integers(model: ModelProto) -> None:
    """Refuse the operators on integers that are left.

    Raises:
        UnsupportedModelError: naming the first.
    """
    nodes = [node for scope in iter_scopes(model) for node in scope.node if _is_integer(node)]
    for node in sorted(nodes, key=lambda node: node.op_type == "DynamicQuantizeLinear"):  # what reads it says more
        raise UnsupportedModelError(
            f"{describe(node)} computes with integers of 8 bits, which TensorRT has no operator for; supported are "
            "MatMulInteger with one weight [K, N], as quantize_dynamic writes it, and weights in DequantizeLinear or "
            "MatMulNBits: quantize products alone (op_types_to_quantize=['MatMul']), weights alone, or in the QDQ "
            "format (quant_format=QuantFormat.QDQ)"
        )


def _is_integer(node: NodeProto) -> bool:
    by_type = node.op_type in (*QUANTIZES, *INTEGER_PRODUCTS) or node.op_type.startswith("QLinear")
    return by_type and node.domain in (*DEFAULT_DOMAINS, _CONTRIB)


@dataclass(frozen=True)
class _Weight:
    """A weight of 8 bits.

    Attributes:
        names: of the weight, its scale and its zero points (empty: these are 0).
        shape: of the scale.
        kind: the ONNX element type of the scale.
        zeros: the zero points.
        middle: the zero point that TensorRT takes, once the weight is signed.
    """

    names: tuple[str, str, str]
    shape: tuple[int, ...]
    kind: int
    zeros: TensorProto | None
    middle: int


class _Editor:
    """Edits the scopes of one model; `products` are its products so far."""

    def __init__(self, model: ModelProto) -> None:
        self._write = Writer(model.graph, "product")
        self._makers: Mapping[str, NodeProto] = {}
        self._weights: Mapping[str, TensorProto] = {}
        self.products = 0

    def edit(self, graph: GraphProto, makers: Mapping[str, NodeProto], weights: Mapping[str, TensorProto]) -> None:
        """A graph and the bodies in it, which may read what `makers` and `weights` have outside."""
        makers = {**makers, **{name: node for node in graph.node for name in node.output}}
        weights = {**weights, **constants_of(graph)}
        nodes: list[NodeProto] = []
        for node in graph.node:
            for body in (body for attribute in node.attribute for body in attribute_graphs(attribute)):
                self.edit(body, makers, weights)
            self._makers, self._weights = makers, weights
            nodes += self._write.taken() if self._replaces(node) else [node]
        replace_field(graph.node, nodes)
        drop_dead(graph)

    def _replaces(self, node: NodeProto) -> bool:
        """Write nodes in the place of a node, if it is one of these."""
        inputs = [*node.input, *[""] * 7]
        if is_op(node, "Mul"):
            return self._spelled(node)
        if is_op(node, "DequantizeLinear"):
            return self._rows(node) or self._small(node)
        if is_op(node, "Gather"):
            return self._taken(node)
        if node.domain == _CONTRIB and node.op_type == "MatMulIntegerToFloat":
            return self._product(node, inputs[:6], inputs[6])
        if node.domain == _CONTRIB and node.op_type == "DynamicQuantizeMatMul":
            return self._weighted(node, inputs[0], self._weight(inputs[1], inputs[2], inputs[3], 2), inputs[4])
        return False

    def _maker(self, name: str, op: str) -> NodeProto | None:
        node = self._makers.get(name)
        return node if node is not None and is_op(node, op) else None

    def _spelled(self, node: NodeProto) -> bool:
        """Mend ``Cast(MatMulInteger(q, W, z, w)) * (s * scale)``."""
        for operand, factor in (node.input, [*node.input][::-1]):
            cast, scales = self._maker(operand, "Cast"), self._maker(factor, "Mul")
            product = self._maker(cast.input[0], "MatMulInteger") if cast is not None else None
            if cast is None or product is None or scales is None or int_attribute(cast, "to") != TensorProto.FLOAT:
                continue
            a, b, zero_a, zero_b = [*product.input, "", ""][:4]
            for scale_a, scale_b in (scales.input, [*scales.input][::-1]):
                if self._product(node, (a, b, scale_a, scale_b, zero_a, zero_b), ""):
                    return True
        return False

    def _product(self, node: NodeProto, operands: Sequence[str], bias: str) -> bool:
        """Mend a product of numbers that are rounded with a weight, or with others that are rounded."""
        a, b, scale_a, scale_b, zero_a, zero_b = operands
        x, y = self._rounded(a, scale_a, zero_a), self._rounded(b, scale_b, zero_b)
        if x is None:
            return False
        if y is None:
            return self._weighted(node, x, self._weight(b, scale_b, zero_b, 2), bias)
        return self._multiplied(node, x, y, "", bias)

    def _rounded(self, quantized: str, scale: str, zero: str) -> str | None:
        """The tensor that DynamicQuantizeLinear rounds to these three; None where it does not."""
        node = self._maker(quantized, "DynamicQuantizeLinear")
        return str(node.input[0]) if node is not None and [*node.output] == [quantized, scale, zero] else None

    def _weight(self, name: str, scale: str, zero: str, rank: int) -> _Weight | None:
        """A weight with one scale and zero point, or with one for each column; None where it is none."""
        tensor, scales, zeros = (self._weights.get(n) for n in (name, scale, zero))
        if tensor is None or scales is None or (zero and zeros is None) or tensor.data_type not in _MIDDLES:
            return None
        shapes = {tuple(t.dims) for t in (scales, zeros) if t is not None}
        columns = {(tensor.dims[1],)} if rank == len(tensor.dims) == 2 else set()
        is_plain = shapes <= {(), (1,)} or shapes == columns
        if len(tensor.dims) != rank or not is_plain:
            return None
        return _Weight((name, scale, zero), tuple(scales.dims), scales.data_type, zeros, _MIDDLES[tensor.data_type])

    def _rows(self, node: NodeProto) -> bool:
        """Mend rows that are gathered from a table, moved perhaps, and then dequantized."""
        moves: list[NodeProto] = []
        gather = self._makers.get(node.input[0])
        while gather is not None and gather.op_type in VIEWS and is_op(gather, gather.op_type):
            moves.insert(0, gather)
            gather = self._makers.get(gather.input[0])
        table = self._weights.get(gather.input[0]) if gather is not None and is_op(gather, "Gather") else None
        if gather is None or table is None:
            return False
        weight = self._weight(gather.input[0], node.input[1], [*node.input, ""][2], len(table.dims))
        if weight is None or weight.shape:
            return False
        steps, floats = [gather, *moves], self._dequantized(weight)
        if shift := self._shift(weight):
            # Of a large table, after the rows are gathered; a small one is a bias of scores, proven as such.
            less = NodeProto(op_type="Sub", input=["", shift])
            steps.insert(0 if math.prod(table.dims) <= _SMALL else len(steps), less)
        for step in steps:
            attributes = {a.name: helper.get_attribute_value(a) for a in step.attribute}
            output = node.output[0] if step is steps[-1] else ""
            floats = self._write.op(step.op_type, [floats, *step.input[1:]], output, **attributes)
        return True

    def _small(self, node: NodeProto) -> bool:
        """Make few numbers, as quantize_static has those of norms, the floats themselves.

        With a zero point, or no weight of a product: TensorRT takes no quantized scalar (1.7.1).
        """
        tensors = [self._weights.get(name) for name in node.input]
        stored = [t for t in tensors if t is not None and t.data_location != TensorProto.EXTERNAL]
        if len(stored) < max(2, len(node.input)) or any(math.prod(t.dims) != 1 for t in stored[1:]):
            return False
        numbers, scale, zero = (numpy_helper.to_array(t).astype(np.float32) for t in (*stored, _NONE)[:3])
        if stored[0].data_type not in _MIDDLES or math.prod(stored[0].dims) > _SMALL:
            return False
        if zero.item() == _MIDDLES[stored[0].data_type] and len(stored[0].dims) > 1:
            return False
        floats = self._write.constant((numbers - zero.item()) * scale.item(), stored[1].data_type)
        self._write.op("Identity", [floats], node.output[0], node.name)
        return True

    def _taken(self, node: NodeProto) -> bool:
        """Mend rows that are taken out of a table after DequantizeLinear, with a zero point."""
        table = self._maker(node.input[0], "DequantizeLinear")
        tensor = self._weights.get(table.input[0]) if table is not None else None
        if table is None or tensor is None:
            return False
        weight = self._weight(table.input[0], table.input[1], [*table.input, ""][2], len(tensor.dims))
        shift = "" if weight is None or weight.shape else self._shift(weight)
        if weight is None or not shift:  # many scales, or around the middle already
            return False
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        rows = self._write.op("Gather", [self._dequantized(weight), node.input[1]], **attributes)
        self._write.op("Sub", [rows, shift], node.output[0], node.name)
        return True

    def _weighted(self, node: NodeProto, x: str, weight: _Weight | None, bias: str) -> bool:
        if weight is None:
            return False
        return self._multiplied(node, x, self._dequantized(weight), self._shift(weight), bias)

    def _multiplied(self, node: NodeProto, x: str, y: str, shift: str, bias: str) -> bool:
        """``MatMul(x, y) - ReduceSum(x) * shift + bias``, of which the last two may be missing."""
        self.products += 1
        result = self._write.op("MatMul", [x, y])
        if shift:
            sums = self._write.op("ReduceSum", [x, self._write.constant(np.array([-1]))], keepdims=1)
            result = self._write.op("Sub", [result, self._write.op("Mul", [sums, shift])])
        if bias:
            self._write.op("Add", [result, bias])
        last = self._write.nodes[-1]
        last.name, last.output[0] = node.name, node.output[0]
        return True

    def _dequantized(self, weight: _Weight) -> str:
        """The weight as floats, with its zero point in the middle."""
        inputs = [*weight.names[:2]]
        if weight.middle:
            inputs.append(self._write.constant(np.full(weight.shape, weight.middle, np.uint8)))
        return self._write.op("DequantizeLinear", inputs, axis=0 if weight.shape in ((), (1,)) else 1)

    def _shift(self, weight: _Weight) -> str:
        """``scale * (zero point - middle)``; empty where that is surely 0."""
        zeros = weight.zeros
        if zeros is not None and zeros.data_location == TensorProto.EXTERNAL:  # its numbers are not at hand
            middle = np.array(weight.middle, np.uint8 if weight.middle else np.int8)
            one = self._write.constant(np.array(1), weight.kind)
            numbers = self._write.op("DequantizeLinear", [weight.names[2], one, self._write.constant(middle)])
        else:
            values = numpy_helper.to_array(zeros).astype(np.float32) if zeros is not None else np.zeros((), np.float32)
            if not (values - weight.middle).any():
                return ""
            numbers = self._write.constant(values - weight.middle, weight.kind)
        return self._write.op("Mul", [weight.names[1], numbers])
