"""Replaces products with weights of 4 or 8 bits, and lookups in tables of 4 or 8 bits, with ONNX's own operators.

    MatMulNBits(a [.., K], b uint8, scales, zero_points, bias)
        w = DequantizeLinear(uint4 [N, K], scales [N, K / block], zero point 8, axis=1, block_size=block)
        y = MatMul(a, Transpose(w)) - MatMul(sums of a over each block, Transpose((zero_points - 8) * scales)) + bias

    MatMul(x, DequantizeLinear(uint4 W [K, N], scales [K / block, N], zero_points, axis=0, block_size=block))
        the same without Transpose; onnxruntime-genai exports this for TensorRT for RTX with ``is_symmetric=false``

    GatherBlockQuantized(table uint8 [V, H / 2], or uint4 or int4 [V, H], ids, scales, zero_points)
        words = Gather(int32 [V, H / 8], ids)      integer division separates 8 numbers of 4 bits (or 4 of 8) in each
        y = (numbers - zero_points) * Gather(scales, ids)

TensorRT's parser accepts weights in blocks only if they are signed, with the zero point 0 (measured on TensorRT for RTX
1.7.1: other zero points are "not supported", and uint4 initializers fail to import). So the zero point becomes the
middle of the range (8, or 128 for 8 bits), which `signed_weights` later moves to 0. A second product, with a matrix as
small as the scales, corrects the result for other zero points. A table is gathered as words, because DequantizeLinear
before a Gather would dequantize the whole table in every step.

Weights are never read. Their bytes only get another type and shape. `accuracy_level`, which lets ONNX Runtime
round `a` to 8 bits, is ignored. Measured on ONNX Runtime 1.31.1: the order of bits, the meaning of absent zero
points, and the padding of rows of zero points.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from trt_kvcache.importer.graph import NAME_PREFIX
from trt_kvcache.importer.lower.body import AGAIN, Call
from trt_kvcache.importer.protos import FLOATS, is_op

NUMBERS: dict[int, int] = {4: TensorProto.UINT4, 8: TensorProto.UINT8}
_UINT8, _UINT4, _INT4 = TensorProto.UINT8, TensorProto.UINT4, TensorProto.INT4
_TABLES = (_UINT8, _UINT4, _INT4)
_WORD = 32  # bits of an int32, the type in which tables are gathered
_UNQUANTIZED = "export the model with another quantization, or unquantized"


def matmul_nbits(call: Call) -> str:
    """Return ONNX text for MatMulNBits: a MatMul with a dequantized weight."""
    bits = call.integer("bits", 4)
    columns, rows, block = (call.integer(name) for name in ("K", "N", "block_size"))
    if min(columns, rows, block) < 1 or not call.has("scales"):
        call.refuse("has no K, N, block_size or scales; the operator needs all of them", AGAIN)
    if bits not in NUMBERS:
        call.refuse(
            f"has weights of {bits} bits; the importer supports {' and '.join(map(str, NUMBERS))}", _UNQUANTIZED
        )
    if call.integer("weight_prepacked"):
        what = (
            "has its weight in the layout of one kind of GPU; the importer supports only the layout of the "
            "operator's definition"
        )
        call.refuse(what, "export without prepacking (onnxruntime-genai: matmulnbits_weights_prepacked=0)")
    if call.has("g_idx"):
        what = (
            "assigns columns of its weight to groups in any order (g_idx); the importer supports only blocks in order"
        )
        call.refuse(what, "quantize without reordering activations (GPTQ: desc_act=false)")
    blocks = -(-columns // block)
    call.view("weight", "b", (rows, blocks * block), (_UINT8,), NUMBERS[bits])
    call.view("scales", "scales", (rows, blocks), FLOATS)
    call.constant("middle", middle(bits, (rows, blocks)))
    filled = blocks * block - columns
    return f"""
        {f"a = Pad (a, [0, {filled}], , [-1])" if filled else ""}
        weight = DequantizeLinear <axis = 1, block_size = {block}> (weight, scales, middle)
        weight = Transpose <perm = [1, 0]> (weight)
        y = MatMul (a, weight)
        {_shift(call, bits, (rows, blocks), block)}
        {call.when("bias", "y = Add (y, bias)")}
    """


def matmul(call: Call) -> str | None:
    """Return ONNX text for a MatMul by uint4 or uint8 weights ``[K, N]``, in blocks along K; None for other MatMuls."""
    node = call.maker("weight")
    if node is None or not is_op(node, "DequantizeLinear"):
        return None
    for local, name in zip(("numbers", "scales", "zero_points"), node.input, strict=False):
        call.bind(local, name)
    attributes = {a.name: a.i for a in node.attribute}
    axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
    shape, scales = (call.shape(name) or () if call.is_weight(name) else () for name in ("numbers", "scales"))
    bits = next((bits for bits, kind in NUMBERS.items() if kind == call.dtype("numbers")), 0)
    done = call.has("zero_points") and call.name("zero_points").startswith(NAME_PREFIX)
    if done or not bits or axis not in (0, -2) or block < 1 or len(shape) != 2 or len(scales) != 2:
        return None
    blocks, columns = map(int, scales)
    if shape[0] != blocks * block or (call.has("zero_points") and not call.is_weight("zero_points")):
        return None
    call.constant("middle", middle(bits, (blocks, columns)))
    return f"""
        weight = DequantizeLinear <axis = 0, block_size = {block}> (numbers, scales, middle)
        y = MatMul (a, weight)
        {_shift(call, bits, (blocks, columns), block, axis=0)}
    """


def _shift(call: Call, bits: int, shape: tuple[int, int], block: int, axis: int = 1) -> str:
    """Return ONNX text that corrects `y` for zero points other than the middle. The weight has blocks along `axis`."""
    if not call.has("zero_points") and axis:
        return ""
    zeros = f"zero_points = CastLike ({-float(2 ** (bits - 1))}, scales)"
    outer = [0] * (len(call.known_shape("a")) - 1)
    return f"""
        {zero_points(call, "zero_points", bits, shape) if call.has("zero_points") else zeros}
        shift = Mul (zero_points, scales)
        {"shift = Transpose <perm = [1, 0]> (shift)" if axis else ""}
        blocks = Reshape (a, {[*outer, shape[axis], block]})
        sums = ReduceSum <keepdims = 0> (blocks, [-1])
        less = MatMul (sums, shift)
        y = Sub (y, less)
    """


def gather_block_quantized(call: Call) -> str:
    """Return ONNX text for GatherBlockQuantized. The table may also be a weight of MatMulNBits."""
    bits, block = call.integer("bits", 4), call.integer("block_size", 128)
    axes = call.integer("gather_axis"), call.integer("quantize_axis", 1)
    stored = call.weight("table", _TABLES)
    rows, blocks = (*call.weight("scales", FLOATS).dims, 0, 0)[:2]
    width, count = blocks * block, _WORD // bits if bits in NUMBERS else 0
    packed = width * bits // 8 if stored.data_type == _UINT8 else width
    plain = (bits == 4 or stored.data_type == _UINT8) and axes in ((0, 1), (0, -1)) and count and rows
    if not plain or width % count or call.shape("table") != (rows, packed):
        call.refuse(
            f"has {bits} bits, axes {axes} and scales {[rows, blocks]} for blocks of {block}; the importer supports "
            f"rows [V, H] of 4 bits, or 8 bits in uint8, that consist of whole blocks and whole words of {_WORD} bits",
            _UNQUANTIZED,
        )
    call.view("words", "table", (rows, width // count), _TABLES, TensorProto.INT32)
    call.view("scales", "scales", (rows, blocks), FLOATS)
    outer, base = [0] * len(call.known_shape("ids")), 2**bits
    for name, number in (("zero", 0), ("lowest", -(2**31)), ("base", base), ("half", base // 2)):
        call.constant(name, np.array(number, np.int32))
    call.constant("powers", np.array([base**i for i in range(count)], np.int32))
    call.constant("highest", np.array([0] * (count - 1) + [base // 2], np.int32))
    # Only non-negative numbers are divided, because engines round negative quotients in another way.
    lines = """
        words = Gather (words, ids)
        words = Unsqueeze (words, [-1])
        negative = Less (words, zero)
        lower = Sub (words, lowest)
        lower = Where (negative, lower, words)
        shifted = Div (lower, powers)
        above = Div (shifted, base)
        above = Mul (above, base)
        numbers = Sub (shifted, above)
        bit = Cast <to = 6> (negative)
        bit = Mul (bit, highest)
        numbers = Add (numbers, bit)
    """
    if stored.data_type == _INT4:  # turns two's complement into an unsigned number
        lines += """
            above = Div (numbers, half)
            above = Mul (above, base)
            numbers = Sub (numbers, above)
        """
    zeros = ""
    if call.has("zero_points"):
        zeros = f"""
            {zero_points(call, "zero_points", bits, (rows, blocks))}
            zeros = Gather (zero_points, ids)
            zeros = Unsqueeze (zeros, [-1])
            numbers = Sub (numbers, zeros)
        """
    # A uint4 table without zero points starts at 0.
    around = base // 2 if stored.data_type == _UINT8 or (stored.data_type == _UINT4 and zeros) else 0
    return f"""
        {lines}
        numbers = CastLike (numbers, scales)
        numbers = Reshape (numbers, {[*outer, blocks, block]})
        middle = CastLike ({float(around)}, scales)
        {"numbers = Sub (numbers, middle)" if around else ""}
        {zeros}
        factors = Gather (scales, ids)
        factors = Unsqueeze (factors, [-1])
        numbers = Mul (numbers, factors)
        y = Reshape (numbers, {[*outer, blocks * block]})
    """


def zero_points(call: Call, name: str, bits: int, shape: tuple[int, ...], scales: str = "scales") -> str:
    """Return ONNX text that sets `name` to zero points minus the middle of their range, in the type of the scales."""
    stored = call.dtype(name)
    if stored not in _TABLES:
        call.view(name, name, shape, FLOATS)
        return f"""
            middle = CastLike ({float(2 ** (bits - 1))}, {name})
            {name} = Sub ({name}, middle)
        """
    width = shape[-1]
    padded = -(-width * bits // 8) * 8 // bits if stored == _UINT8 else width
    call.view(name, name, (*shape[:-1], padded), (stored,), NUMBERS[bits] if stored == _UINT8 else None)
    call.constant("middle_number", middle(bits, ()))
    around = ", middle_number" if stored != _INT4 else ""
    trimmed = f"{name} = Slice ({name}, [0], [{width}], [{len(shape) - 1}])"
    return f"""
        one = CastLike (1.0, {scales})
        {name} = DequantizeLinear ({name}, one{around})
        {trimmed if padded != width else ""}
    """


def middle(bits: int, shape: tuple[int, ...]) -> TensorProto:
    """Return a tensor of zero points at the middle of the range of unsigned numbers with `bits` bits."""
    count = math.prod(shape)
    data = bytearray([0x88 if bits == 4 else 0x80]) * -(-count * bits // 8)
    if count * bits % 8:
        data[-1] &= 0x0F
    return TensorProto(data_type=NUMBERS[bits], dims=shape, raw_data=bytes(data))
