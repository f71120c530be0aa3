"""Rounding by onnxruntime's quantize_static that TensorRT has no operator for, in arithmetic with the same numbers.

    QuantizeLinear(x, scale, zero)      ->    Clip(Round(x / scale) + zero, lowest, highest)
    DequantizeLinear(q, scale, zero)    ->    (q - zero) * scale
    DequantizeLinear(int32 bias, scale) ->    Cast(bias) * scale

TensorRT for RTX 1.7.1 parses no zero points but 0, and no 16 bits; of uint8 it makes int8 without a word, so that all
above 127 would be clipped. Rounding to uint8 around 128 becomes rounding to int8 around 0, which is the same. Biases of
int32 it refuses (DequantizeLinear's input "must have type FP8, FP4, Int4, Int8, or UInt8").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions.quantizers.writer import Writer
from trt_kvcache.importer.files.links import held
from trt_kvcache.importer.protos import (
    all_nodes,
    constants_of,
    describe,
    dtype_name,
    int_attribute,
    is_op,
    nested_scopes,
    readers_of,
    replace_field,
)
from trt_kvcache.importer.simplify import drop_dead
from trt_kvcache.importer.weights import is_stand_in

__all__ = ["note_roundings", "spell_biases", "spell_roundings"]

_LIMITS: dict[int, tuple[int, int]] = {
    TensorProto.UINT8: (0, 255), TensorProto.INT8: (-128, 127), TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (-32768, 32767), TensorProto.UINT4: (0, 15), TensorProto.INT4: (-8, 7),
}  # fmt: skip
_TAKEN = (TensorProto.INT8, TensorProto.INT4)  # around 0
_MIDDLE = 128
_ADVICE = "quantize activations symmetrically to int8 (onnxruntime: ActivationSymmetric, QuantType.QInt8)"

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class _Numbers:
    """The numbers that a node rounds with.

    Attributes:
        scale: float32.
        wide: the ONNX element type of the scale, which is that of the numbers that are rounded.
        zeros: as they are stored; float32 0 where there are none.
    """

    scale: Array
    wide: int
    zeros: Array


@dataclass(frozen=True, eq=False)
class _Rounding:
    """A QuantizeLinear that TensorRT does not do, and all that reads it.

    Attributes:
        kind: the ONNX element type that is rounded to.
        readers: DequantizeLinear, each with its numbers.
    """

    node: NodeProto
    kind: int
    numbers: _Numbers
    readers: Sequence[tuple[NodeProto, _Numbers]]

    @property
    def each(self) -> tuple[tuple[NodeProto, _Numbers], ...]:
        return ((self.node, self.numbers), *self.readers)

    @property
    def is_signed(self) -> bool:
        """True if int8 does the same."""
        return self.kind == TensorProto.UINT8 and all(np.all(n.zeros == _MIDDLE) for _, n in self.each)


def note_roundings(model: ModelProto, folder: Path) -> tuple[str, ...]:
    """A note on what `spell_roundings` will spell; none on what it will refuse, which the CPU runs."""
    try:
        count = sum(not rounding.is_signed for rounding in _roundings(model, folder))
    except UnsupportedModelError:
        return ()
    if not count:
        return ()
    return (
        f"{count} QuantizeLinear round to 16 bits, to uint8 or around another number than 0, which TensorRT has no "
        "operator for: an engine rounds by arithmetic there, the same, and multiplies floats; for products of 8 bits "
        f"{_ADVICE}",
    )


def spell_roundings(model: ModelProto, folder: Path) -> None:
    """Edit, in place, rounding that TensorRT does not do; functions, which say what plugins do, stay.

    Raises:
        UnsupportedModelError: something else than DequantizeLinear reads what is rounded so, or there are many scales.
    """
    write, spelled = Writer(model.graph, "rounding"), dict[int, list[NodeProto]]()
    roundings = list(_roundings(model, folder))  # as long as it holds the nodes, they keep their ids
    for rounding in roundings:
        if rounding.is_signed:
            for node, numbers in rounding.each:
                node.input[2] = write.constant(np.zeros(numbers.zeros.shape, np.int8))
            attributes = [a for a in rounding.node.attribute if a.name != "output_dtype"]
            replace_field(rounding.node.attribute, attributes)
            continue
        spelled[id(rounding.node)] = _quantized(rounding, write)
        spelled |= {id(node): _dequantized(node, numbers, write) for node, numbers in rounding.readers}
    for scope in nested_scopes(model.graph):
        replace_field(scope.node, [other for node in scope.node for other in spelled.get(id(node), [node])])
    drop_dead(model.graph)  # zero points: TensorRT reads all initializers, those of 16 bits too


def spell_biases(graph: GraphProto) -> bool:
    """Edit, in place, what dequantizes weights of int32, by the definition of DequantizeLinear; whether there was any.

    In float32: numbers that their scales bring into the range of float16 are themselves beyond it.
    """
    weights = {t.name: t for t in graph.initializer}
    nodes: list[NodeProto] = []
    for node in graph.node:
        bias, scale = (weights.get(name) for name in [*node.input, "", ""][:2])
        if bias is None or scale is None or not is_op(node, "DequantizeLinear") or not _is_bias(bias, scale):
            nodes.append(node)
            continue
        wide, factor, product = (f"{node.output[0]}/{part}" for part in ("wide", "factor", "product"))
        nodes += [
            helper.make_node("Cast", [bias.name], [wide], wide, to=TensorProto.FLOAT),
            helper.make_node("Cast", [scale.name], [factor], factor, to=TensorProto.FLOAT),
            helper.make_node("Mul", [wide, factor], [product], product),
            helper.make_node("Cast", [product], node.output, node.name, to=scale.data_type),
        ]
    if len(nodes) == len(graph.node):
        return False
    replace_field(graph.node, nodes)
    return True


def _is_bias(bias: TensorProto, scale: TensorProto) -> bool:
    """True for int32 with one scale, or with one for each number."""
    return bias.data_type == TensorProto.INT32 and len(bias.dims) < 2 and math.prod(scale.dims) in (1, *bias.dims)


def _roundings(model: ModelProto, folder: Path) -> Iterator[_Rounding]:
    scopes = [scope for scope in nested_scopes(model.graph) if isinstance(scope, GraphProto)]
    tensors = {name: tensor for scope in scopes for name, tensor in constants_of(scope).items()}
    readers = readers_of(all_nodes(model.graph))
    outputs = {value.name for scope in scopes for value in scope.output}
    for node in all_nodes(model.graph):
        if not is_op(node, "QuantizeLinear"):
            continue
        name, after = node.output[0], readers.get(node.output[0], [])
        zero = tensors.get(node.input[2]) if len(node.input) > 2 else None
        kind = int(zero.data_type) if zero is not None else int_attribute(node, "output_dtype") or TensorProto.UINT8
        is_pair = name not in outputs and all(is_op(n, "DequantizeLinear") and name not in n.input[1:] for n in after)
        each = [_numbers(n, tensors, folder) for n in (node, *(after if is_pair else ()))]
        numbers = [entry for entry in each if entry is not None]
        if kind not in _LIMITS or len(numbers) < len(each) or (zero is None and len(node.input) > 2):
            continue  # TensorRT takes it, or wants constants and says so
        if kind in _TAKEN and not any(np.any(entry.zeros) for entry in numbers):
            continue
        rounding = _Rounding(node, kind, numbers[0], list(zip(after, numbers[1:], strict=False)))
        is_one = all(n.size == 1 for entry in numbers for n in (entry.scale, entry.zeros))
        if not is_pair or not (rounding.is_signed or is_one):
            what = "with a scale for each channel" if is_pair else "and something else than DequantizeLinear reads it"
            raise UnsupportedModelError(
                f"{describe(node)} rounds to {dtype_name(kind)}, {what}; TensorRT rounds to int8 around 0, and "
                f"supported beside that is one scale, and DequantizeLinear after it: {_ADVICE}"
            )
        yield rounding


def _numbers(node: NodeProto, tensors: Mapping[str, TensorProto], folder: Path) -> _Numbers | None:
    """Scale and zero point of a node; None where they are no constants, or not at hand."""
    names = [name for name in node.input[1:3] if name]
    known = [tensor for name in names if (tensor := tensors.get(name)) is not None and not is_stand_in(tensor)]
    if not known or len(known) < len(names):
        return None
    values = [np.asarray(numpy_helper.to_array(held(tensor, folder))) for tensor in known]
    return _Numbers(
        values[0].astype(np.float32), known[0].data_type, values[1] if len(values) > 1 else np.zeros((), np.float32)
    )


def _quantized(rounding: _Rounding, write: Writer) -> list[NodeProto]:
    """Rounded numbers stay in float32, which holds all of 16 bits."""
    node, zero = rounding.node, rounding.numbers.zeros.astype(np.float32).reshape(())
    value = write.op("Cast", [node.input[0]], to=TensorProto.FLOAT)
    value = write.op("Div", [value, write.constant(rounding.numbers.scale.reshape(()))])
    value = write.op("Round", [value])
    if zero:
        value = write.op("Add", [value, write.constant(zero)])
    limits = [write.constant(np.array(limit, np.float32)) for limit in _LIMITS[rounding.kind]]
    write.op("Clip", [value, *limits], node.output[0])
    return write.taken()


def _dequantized(node: NodeProto, numbers: _Numbers, write: Writer) -> list[NodeProto]:
    value, zero = node.input[0], numbers.zeros.astype(np.float32).reshape(())
    if zero:
        value = write.op("Sub", [value, write.constant(zero)])
    value = write.op("Mul", [value, write.constant(numbers.scale.reshape(()))])
    write.op("Cast", [value], node.output[0], to=int_attribute(node, "output_dtype") or numbers.wide)
    return write.taken()
