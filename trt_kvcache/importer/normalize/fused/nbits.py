"""Write ONNX Runtime's operators on quantized weights in DequantizeLinear, weights and scales as they are.

    MatMulNBits(A [.., K], B uint8, scales, zero_points, bias)
        W = DequantizeLinear(uint4 [N, K], scales [N, K / block], zero point 8, axis=1, block_size=block)
        y = MatMul(A, Transpose(W)) - MatMul(sums of A over each block, Transpose((zero_points - 8) * scales)) + bias

    GatherBlockQuantized(table uint8 [V, H / 2], or uint4 or int4 [V, H], ids, scales, zero_points)
        words = Gather(int32 [V, H / 8], ids)      eight numbers of 4 bits each (four of 8), by integer division
        y = (numbers - zero_points) * Gather(scales, ids)

TensorRT's parser takes blocks of signed weights with a zero point of 0 only (measured on TensorRT for RTX 1.7.1: other
zero points are "not supported", and uint4 initializers fail to import), and keeps their 4 bits in the engine. So
weights get their middle as zero point here, `signed` moves it to 0 for TensorRT, and what zero points add to that is a
product of its own, as small as the scales. With 8 bits all is the same with uint8 and a middle of 128.

A table is gathered as words, because DequantizeLinear before a Gather would dequantize all of it in every step.

Weights, scales and zero points are never read: their bytes get another type and shape.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md; the order of bits, what absent
zero points mean and how rows of them are padded, measured on ONNX Runtime 1.31.1.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.importers.onnx_importer import OnnxImporter
from onnx_graphsurgeon.ir.tensor import LazyValues

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import (
    FLOATS,
    INT32,
    Emitter,
    dims,
    dtype_name,
    elem_type,
    input_or_none,
    is_op,
    producer,
)
from trt_kvcache.importer.quantized.reinterpret import reinterpret

_UINT8 = int(onnx.TensorProto.UINT8)
_UINT4, _INT4 = int(onnx.TensorProto.UINT4), int(onnx.TensorProto.INT4)
_TYPES = {4: _UINT4, 8: _UINT8}
_TABLES = (_UINT8, _UINT4, _INT4)
_WORD = 32  # bits of an int32, as which tables are gathered
_UNQUANTIZED = "export with another quantization, or unquantized"


def lower_matmul_nbits(emitter: Emitter, node: gs.Node) -> list[gs.Tensor]:
    """MatMul with a dequantized weight.

    The attribute `accuracy_level`, which lets ONNX Runtime round `A` to 8 bits, is left out: the product is exact.

    Raises:
        UnsupportedModelError: other than 4 or 8 bits, a weight in the layout of one GPU, columns in another order
            (`g_idx`), or weights that the graph computes.
    """
    bits = int(node.attrs.get("bits", 4))
    columns, rows, block = (int(node.attrs.get(name, 0)) for name in ("K", "N", "block_size"))
    if min(columns, rows, block) < 1 or len(node.inputs) < 3:
        raise refusal(node, "lacks one of K, N, block_size, or an input; the operator demands them", "export it again")
    blocks = -(-columns // block)
    if bits not in _TYPES:
        raise refusal(node, f"has weights of {bits} bits; supported are {' and '.join(map(str, _TYPES))}", _UNQUANTIZED)
    if int(node.attrs.get("weight_prepacked", 0)):
        what = "has its weight in the layout of one kind of GPU; supported is the layout of the operator's definition"
        raise refusal(node, what, "export without prepacking (onnxruntime-genai: matmulnbits_weights_prepacked=0)")
    if input_or_none(node, 4) is not None:
        what = "gives every column of its weight a group of its own choice (g_idx); supported are blocks in order"
        raise refusal(node, what, "quantize without reordering activations (GPTQ: desc_act=false)")
    weight = view(emitter, node, 1, _TYPES[bits], (rows, blocks * block), (_UINT8,))
    scales = view(emitter, node, 2, None, (rows, blocks), FLOATS)
    x = _padded(emitter, node.inputs[0], blocks * block - columns)
    kind = elem_type(scales)
    inputs = [weight, scales, middle(emitter, bits, (rows, blocks))]
    dense = emitter.op("DequantizeLinear", inputs, "weight", kind, axis=1, block_size=block)
    result = emitter.op("MatMul", [x, _transposed(emitter, dense)], "matmul", kind)
    zeros = _zero_points(emitter, node, 3, bits, scales)
    if zeros is not None:
        shift = _transposed(emitter, emitter.op("Mul", [zeros, scales], "weight_shift", kind))
        shape = dims(node.inputs[0])
        if shape is None:
            raise refusal(node, f"reads '{x.name}', whose rank is not in the model", "export it with shapes")
        sums = block_sums(emitter, x, len(shape), blocks, block)
        result = emitter.op("Sub", [result, emitter.op("MatMul", [sums, shift], "matmul_shift", kind)], "matmul", kind)
    bias = input_or_none(node, 5)
    return [result if bias is None else emitter.op("Add", [result, bias], "matmul_bias", kind)]


def lower_gather_nbits(emitter: Emitter, node: gs.Node) -> list[gs.Tensor]:
    """Rows of a table of 4 or 8 bits, dequantized: an embedding, which may share its bytes with a MatMulNBits.

    Raises:
        UnsupportedModelError: anything but rows ``[V, H]`` of 4 or 8 bits, with blocks along the row and whole words.
    """
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 128))
    axes = int(node.attrs.get("gather_axis", 0)), int(node.attrs.get("quantize_axis", 1))
    if len(node.inputs) < 3:
        raise refusal(node, "lacks an input; the operator demands a table, indices and scales", "export it again")
    stored, shape = elem_type(_weight(node, 0, _TABLES)), dims(_weight(node, 2, FLOATS)) or ()
    rows, blocks = (d if isinstance(d, int) else 0 for d in shape) if len(shape) == 2 else (0, 0)
    width, rank = blocks * block, len(dims(node.inputs[1]) or ())
    held, count = (rows, width * bits // 8 if stored == _UINT8 else width), _WORD // bits if bits in _TYPES else 0
    plain = (bits == 4 or stored == _UINT8) and axes in ((0, 1), (0, -1)) and rank and rows
    plain = plain and count and width % count == 0
    if not plain or dims(node.inputs[0]) not in (None, held):
        what = f"has {bits} bits, axes {axes} and scales {list(shape)} for blocks of {block}; supported are rows [V, H]"
        raise refusal(node, f"{what} of 4 bits, or 8 in uint8, in whole blocks and words of {_WORD} bits", _UNQUANTIZED)
    table = view(emitter, node, 0, INT32, (rows, width // count), _TABLES)
    scales = view(emitter, node, 2, None, (rows, blocks), FLOATS)
    kind, ids = int(elem_type(scales) or 0), node.inputs[1]
    numbers = _apart(emitter, emitter.op("Gather", [table, ids], "words"), bits)
    if stored == _INT4:  # two's complement
        above = emitter.op("Div", [numbers, _int32(emitter, 8)], "numbers")
        numbers = emitter.op("Sub", [numbers, emitter.op("Mul", [above, _int32(emitter, 16)], "numbers")], "numbers")
    numbers = emitter.op("Cast", [numbers], "numbers", kind, to=kind)
    outer = [0] * rank
    numbers = emitter.op("Reshape", [numbers, emitter.ints([*outer, blocks, block])], "numbers")
    zeros = _zero_points(emitter, node, 3, bits, scales)
    if stored == _UINT8 or (stored == _UINT4 and zeros is not None):  # a uint4 table without zero points starts at 0
        numbers = emitter.op("Sub", [numbers, emitter.scalar(2 ** (bits - 1), kind)], "numbers")
    if zeros is not None:
        numbers = emitter.op("Sub", [numbers, _column(emitter, emitter.op("Gather", [zeros, ids], "zeros"))], "numbers")
    factors = _column(emitter, emitter.op("Gather", [scales, ids], "scales"))
    product = emitter.op("Mul", [numbers, factors], "rows")
    return [emitter.op("Reshape", [product, emitter.ints([*outer, width])], "rows")]


def _apart(emitter: Emitter, words: gs.Tensor, bits: int) -> gs.Tensor:
    """The numbers of so many bits in each int32, the lowest first, on a new last axis.

    Division of numbers that are not negative alone, because engines round quotients of negative ones differently.
    """
    negative = emitter.op("Less", [words, _int32(emitter, 0)], "words_negative", int(onnx.TensorProto.BOOL))
    lower = emitter.op("Sub", [words, _int32(emitter, -(2**31))], "words_lower")  # without the highest bit
    lower = emitter.op("Where", [negative, lower, words], "words_lower", INT32)
    count, base = _WORD // bits, 2**bits
    shifted = emitter.op("Div", [_column(emitter, lower), _int32(emitter, *(base**i for i in range(count)))], "words")
    step = _int32(emitter, base)
    above = emitter.op("Mul", [emitter.op("Div", [shifted, step], "words"), step], "words")
    numbers = emitter.op("Sub", [shifted, above], "numbers")
    highest = emitter.op("Cast", [negative], "words_highest", INT32, to=INT32)
    bit = _int32(emitter, *[0] * (count - 1), base // 2)
    highest = emitter.op("Mul", [_column(emitter, highest), bit], "words_highest")
    return emitter.op("Add", [numbers, highest], "numbers")


def _zero_points(emitter: Emitter, node: gs.Node, index: int, bits: int, scales: gs.Tensor) -> gs.Tensor | None:
    """Zero points ``[rows, blocks]`` as floats: unsigned ones less the middle, signed ones as they are; None: none."""
    tensor = input_or_none(node, index)
    if tensor is None:
        return None
    rows, blocks = (int(d) for d in scales.shape)
    stored, kind = elem_type(tensor), int(elem_type(scales) or 0)
    if stored not in (_UINT8, _UINT4, _INT4):
        given = view(emitter, node, index, None, (rows, blocks), (kind,))
        return emitter.op("Sub", [given, emitter.scalar(2 ** (bits - 1), kind)], "zero_points", kind)
    count = -(-blocks * bits // 8) * 8 // bits if stored == _UINT8 else blocks  # in uint8, a row begins with a byte
    data_type = _TYPES[bits] if stored == _UINT8 else stored
    inputs = [view(emitter, node, index, data_type, (rows, count), (stored,)), emitter.scalar(1, kind)]
    if stored != _INT4:
        inputs.append(middle(emitter, bits, ()))
    zeros = emitter.op("DequantizeLinear", inputs, "zero_points", kind)
    if count == blocks:
        return zeros
    return emitter.op("Slice", [zeros, *(emitter.ints([i]) for i in (0, blocks, 1))], "zero_points", kind)


def block_sums(emitter: Emitter, x: gs.Tensor, rank: int, blocks: int, block: int) -> gs.Tensor:
    """``[.., blocks]``: the sums of `x` over the columns of each block; once for all weights that read `x`."""

    def make() -> gs.Tensor:
        apart = emitter.op("Reshape", [x, emitter.ints([*[0] * (rank - 1), blocks, block])], "blocks")
        return emitter.op("ReduceSum", [apart, emitter.ints([-1])], "block_sums", keepdims=0)

    made: gs.Tensor = emitter.once(("block sums", x.name, block), make)
    return made


def _padded(emitter: Emitter, x: gs.Tensor, count: int) -> gs.Tensor:
    """`x` with zeros for the columns that only fill the last block."""
    if not count:
        return x
    inputs = [x, emitter.ints([0, count]), gs.Variable.empty(), emitter.ints([-1])]
    padded: gs.Tensor = emitter.once(("padded", x.name, count), lambda: emitter.op("Pad", inputs, "padded"))
    return padded


def middle(emitter: Emitter, bits: int, shape: tuple[int, ...]) -> gs.Tensor:
    """Zero points in the middle of what so many bits hold."""
    count = math.prod(shape)
    byte = 0x88 if bits == 4 else 0x80
    data = bytearray([byte]) * -(-count * bits // 8)
    if count * bits % 8:
        data[-1] &= 0x0F
    return emitter.tensor(onnx.TensorProto(data_type=_TYPES[bits], dims=shape, raw_data=bytes(data)))


def _weight(node: gs.Node, index: int, types: Collection[int]) -> gs.Constant:
    """The weight of the model that an input is, or is a Reshape of.

    Raises:
        UnsupportedModelError: it is no weight, or of none of `types`.
    """
    tensor = node.inputs[index]
    while (maker := producer(tensor)) is not None and is_op(maker, "Reshape", "Identity"):
        tensor = maker.inputs[0]
    if isinstance(tensor, gs.Constant) and isinstance(tensor._values, LazyValues) and elem_type(tensor) in types:
        return tensor
    names = ", ".join(onnx.TensorProto.DataType.Name(t).lower() for t in sorted(types))
    what = (
        f"has the {dtype_name(tensor)} '{tensor.name}' as input {index}; supported is a weight of the model, of {names}"
    )
    raise refusal(node, what, _UNQUANTIZED)


def view(
    emitter: Emitter, node: gs.Node, index: int, data_type: int | None, shape: tuple[int, ...], types: Collection[int]
) -> gs.Tensor:
    """The weight that an input is, read as another type and shape; None: of its own type.

    Raises:
        UnsupportedModelError: see `_weight`; or it is of another size.
    """
    tensor = _weight(node, index, types)
    kind = int(elem_type(tensor) or 0) if data_type is None else data_type

    def make() -> gs.Tensor:
        try:
            proto = reinterpret(tensor._values.tensor, emitter.name(tensor.name), kind, shape)
        except ValueError as error:
            what = f"has the weight '{tensor.name}' {list(tensor.shape)} as input {index} ({error})"
            raise refusal(node, what, "export it again") from None
        return OnnxImporter.import_tensor(proto)

    made: gs.Tensor = emitter.once(("view", tensor.name, kind, shape), make)
    return made


def _transposed(emitter: Emitter, tensor: gs.Tensor) -> gs.Tensor:
    return emitter.op("Transpose", [tensor], "weight_columns", perm=[1, 0])


def _column(emitter: Emitter, tensor: gs.Tensor) -> gs.Tensor:
    return emitter.op("Unsqueeze", [tensor, emitter.ints([-1])], "column")


def _int32(emitter: Emitter, *values: int) -> gs.Tensor:
    proto = onnx.helper.make_tensor("", INT32, [len(values)] if len(values) > 1 else [], values)
    return emitter.tensor(proto)


def refusal(node: gs.Node, what: str, advice: str) -> UnsupportedModelError:
    """The error of a node of ONNX Runtime's own domain: what it has, what is supported, and what to do."""
    return UnsupportedModelError(f"{node.domain}::{node.op} '{node.name}' {what}: {advice}")
