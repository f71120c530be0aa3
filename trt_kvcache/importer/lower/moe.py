"""Replaces MoE and QMoE by standard operators: tokens are sorted by chosen experts into blocks of equal size.

    scores, chosen = TopK(logits [T, E], k)          MoE without normalize_routing_weights: TopK(Softmax(logits), k),
    shares = Softmax(scores)                         and then shares = scores
    y = sum over the k chosen experts e of share * (fc2[e] @ activation(fc1[e] @ x + bias1[e]) + bias2[e])

    swiglu: columns 2 i and 2 i + 1 of fc1 are gate and linear part of column i
            g = min(gate, limit); g * Sigmoid(alpha * g) * (clip(linear, -limit, limit) + beta)
    gelu:   tanh, not erf

    QMoE:   fc[e] = (numbers - zero_points) * scales, for each row or each block of columns; numbers have 4 bits (the
            lower half of a byte first) or 8 bits; the default zero point is the middle, 8 or 128

T tokens choose k of E experts each: P = T * k pairs. They fill n = min(P, E + E // 2) blocks of b = min(T, P // (E // 2
+ 1) + 1) rows; each block belongs to one expert:

    expert 0: [t0 t3 t4] [t7 -- --]      expert 2: [t1 t3 --]      ...      unused: [-- -- --]

    rows    = Gather(x, tokens [n * b])            [n, b, H]: unfilled places repeat the first token
    result  = rows @ Gather(weights, experts [n])  two batched products
    y       = sum over k of shares * Gather(result, places [T, k])

n blocks suffice. If b = T, each of the E experts needs at most one block, as none has more than T pairs. If b < T, an
expert with c pairs needs Ceil(c / b), so all need up to P // b + E, and P // b <= E // 2. If n = P, each pair has one.

A step of one token reads the weights of k experts; larger steps read each weight at most 1.5 times, and compute at most
three times the needed products. n and b never decrease when T grows, because TensorRT for RTX 1.7.1 reserves memory for
the largest shapes. Weights gathered for each pair would be P copies of an expert (102 GB in a layer of gpt-oss-20b,
float16, 512 tokens). Computing all experts for all tokens would take E / k times the products.

Scores and shares are float32, as in ONNX Runtime's kernels. Quantized weights become DequantizeLinear with a scale of
1, then a Gather of the chosen experts, to which scales and zero points are applied. TensorRT for RTX 1.7.1 fuses this
into one kernel, which reads only the chosen experts. It refuses 8-bit weights with negative scales in DequantizeLinear;
a scale of 1 avoids this. Values of weights are never read.

Routing, activations, and the order of columns and bits are measured on ONNX Runtime 1.31.1 (CPU). QMoE always computes
shares as with normalize_routing_weights. Options that the CPU kernels lack or ignore (fc3, swiglu_fusion of 0 or 2, the
sparse mixer) are refused, because no reference could show that the result is right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnx import TensorProto

from trt_kvcache.importer.lower.body import AGAIN, SHAPES, Call
from trt_kvcache.importer.lower.matmul_nbits import NUMBERS, middle, zero_points
from trt_kvcache.importer.protos import FLOATS, Shape

_ACTIVATIONS = {
    "relu": "Relu (inner)", "gelu": 'Gelu <approximate = "tanh"> (inner)', "silu": "Mul (inner, gate)",
    "identity": "Identity (inner)", "swiglu": "Mul (gated, linear)",
}  # fmt: skip
_PLAIN: Mapping[str, tuple[object, ...]] = {  # attributes, with the values that are the same as the default
    "use_sparse_mixer": (0,),
    "quant_type": ("int",),
    "weights_prepacked": (-1, 0),
}
_READ = frozenset(
    {
        "k", "activation_type", "activation_alpha", "activation_beta", "swiglu_fusion", "swiglu_limit",
        "normalize_routing_weights", "expert_weight_bits", "fc1_expert_weight_bits", "fc2_expert_weight_bits",
        "fc3_expert_weight_bits", "block_size",
        "accuracy_level",  # lets ONNX Runtime round activations to 8 bits; ignored, as in MatMulNBits
    }
)  # fmt: skip
_UNFUSED = "export the experts without fusion, for example with mobius-onnx"
_RAW = "export the model for the CPU (onnxruntime-genai: -e cpu, or for CUDA qmoe_weights_prepacked=0)"
_INTEGERS = "export the model with integer weights (onnxruntime-genai: moe_quant_type=int4 or int8)"
_ADVICE = {"weights_prepacked": _RAW, "quant_type": _INTEGERS}


def moe(call: Call) -> str:
    """Return ONNX text for MoE or QMoE, the mixtures of experts of ONNX Runtime."""
    _check(call)
    quantized = call.node.op_type == "QMoE"
    own = "scales" if quantized else "fc"
    first, second = (call.shape(f"{own}{number}") or () for number in (1, 2))
    sizes = (*first, *second)
    if {len(first), len(second)} - ({2, 3} if quantized else {3}) or not all(isinstance(d, int) for d in sizes):
        call.refuse(
            f"has '{call.name(own + '1')}' {list(first)} and '{call.name(own + '2')}' {list(second)}, of unknown "
            "sizes or wrong rank",
            SHAPES,
        )
    parts = 2 if call.string("activation_type") == "swiglu" else 1
    experts, hidden, inner = int(first[0]), int(second[1]), int(first[1]) // parts
    k = call.integer("k", 1)
    if not 0 < k <= experts:
        call.refuse(f"chooses {k} of {experts} experts; it must choose at least 1 and at most all", _UNFUSED)
    logits = call.shape("logits") or ("?", experts)
    if len(logits) != 2 or logits[1] not in (experts, "?"):
        call.refuse(f"reads '{call.name('logits')}' {list(logits)}; the logits must be [T, {experts}]", AGAIN)
    normalized = quantized or call.integer("normalize_routing_weights") == 1
    return f"""
        rows = Reshape (x, [-1, {hidden}])
        {_route(k, experts, normalized)}
        rows = Gather (rows, row_tokens)
        shape = Concat <axis = 0> (block_count, block_rows, [{hidden}])
        rows = Reshape (rows, shape)
        {_linear(call, 1, (experts, parts * inner, hidden), "rows", "inner")}
        {_activated(call)}
        {_linear(call, 2, (experts, hidden, inner), "inner", "rows")}
        rows = Reshape (rows, [-1, {hidden}])
        own = Gather (rows, places)
        own = Cast <to = 1> (own)
        own = Mul (own, shares)
        total = ReduceSum <keepdims = 0> (own, [1])
        total = CastLike (total, {own}2)
        shape = Shape (x)
        y = Reshape (total, shape)
    """


def _route(k: int, experts: int, normalized: bool) -> str:
    """Return ONNX text that chooses experts, and fills n blocks of b rows with tokens.

    It sets shares, float32 ``[T, k, 1]``; places (rows of the blocks) ``[T, k]``; row_tokens (a token for each row)
    ``[n * b]``; block_experts ``[n]``; block_count, n as ``[1]``; and block_rows, b as ``[1]``.
    """
    spare = experts // 2
    return f"""
        scores = Cast <to = 1> (logits)
        {"" if normalized else "scores = Softmax <axis = -1> (scores)"}
        shares, chosen = TopK <axis = -1> (scores, [{k}])
        {"shares = Softmax <axis = -1> (shares)" if normalized else ""}
        shares = Unsqueeze (shares, [-1])

        tokens = Shape <start = 0, end = 1> (logits)
        pairs = Mul (tokens, [{k}])
        block_rows = Div (pairs, [{spare + 1}])
        block_rows = Add (block_rows, [1])
        block_rows = Min (block_rows, tokens)
        block_count = Min (pairs, [{experts + spare}])

        listed = Reshape (chosen, [-1, 1])
        hot = Equal (listed, [{", ".join(map(str, range(experts)))}])
        hot = Cast <to = 1> (hot)
        running = CumSum (hot, 0)
        counts = ReduceSum <keepdims = 0> (hot, [0])
        size = Cast <to = 1> (block_rows)
        needed = Div (counts, size)
        needed = Ceil (needed)
        ends = CumSum (needed, 0)
        begins = Sub (ends, needed)
        begins = Mul (begins, size)
        counted = Add (running, begins)
        counted = Mul (counted, hot)
        places = ReduceSum <keepdims = 0> (counted, [1])
        places = Sub (places, 1.0)
        places = Cast <to = 7> (places)

        count = Squeeze (pairs, [0])
        pair_tokens = Range (0, count, 1)
        pair_tokens = Div (pair_tokens, [{k}])
        row_count = Mul (block_count, block_rows)
        row_tokens = Expand ([0], row_count)
        row_tokens = ScatterElements <axis = 0> (row_tokens, places, pair_tokens)
        shape = Shape (chosen)
        places = Reshape (places, shape)

        count = Squeeze (block_count, [0])
        block = Range (0, count, 1)
        block = Cast <to = 1> (block)
        block = Unsqueeze (block, [-1])
        passed = LessOrEqual (ends, block)
        passed = Cast <to = 1> (passed)
        block_experts = ReduceSum <keepdims = 0> (passed, [1])
        block_experts = Min (block_experts, {float(experts - 1)})
        block_experts = Cast <to = 7> (block_experts)
    """


def _linear(call: Call, number: int, shape: tuple[int, int, int], x: str, result: str) -> str:
    """Return ONNX text for one linear layer of the experts: ``result [n, b, rows] = x @ weights + bias``."""
    bias = f"bias{number}"
    shapes = {bias: call.shape(bias)}
    expected: dict[str, Shape] = {bias: shape[:2]}
    if call.node.op_type == "QMoE":
        weight = _dequantized(call, number, shape)
    else:
        weight = f"weight = Gather (fc{number}, block_experts)"
        shapes[f"fc{number}"], expected[f"fc{number}"] = call.shape(f"fc{number}"), shape
    _check_shapes(call, shapes, expected)
    return f"""
        {weight}
        weight = Transpose <perm = [0, 2, 1]> (weight)
        {result} = MatMul ({x}, weight)
        {call.when(bias, f"bias = Gather ({bias}, block_experts)")}
        {call.when(bias, "bias = Unsqueeze (bias, [1])")}
        {call.when(bias, f"{result} = Add ({result}, bias)")}
    """


def _dequantized(call: Call, number: int, shape: tuple[int, int, int]) -> str:
    """Return ONNX text that gathers an expert for each of n blocks, dequantized: ``weight [n, rows, columns]``."""
    experts, rows, columns = shape
    bits, block = call.integer("expert_weight_bits", 4), call.integer("block_size")
    width = block or columns
    blocks = -(-columns // width)
    filled = blocks * width - columns
    fc, scales, zeros = f"fc{number}", f"scales{number}", f"zero_points{number}"
    by_row = (experts, rows, blocks) if block else (experts, rows)
    expected: dict[str, Shape] = {fc: (experts, rows, columns * bits // 8), scales: by_row}
    outer, count = ((experts, rows), blocks) if block else ((experts,), rows)
    if call.has(zeros):
        expected[zeros] = (*outer, -(-count * bits // 8))
    _check_shapes(call, {name: call.shape(name) for name in expected}, expected)
    if columns * bits % 8:
        call.refuse(f"has rows of {columns} numbers of {bits} bits; a row must fill whole bytes", _RAW)
    call.view(f"numbers{number}", fc, shape, (TensorProto.UINT8,), NUMBERS[bits])
    call.view(scales, scales, (experts, rows, blocks), FLOATS)
    call.constant("middle", middle(bits, ()))
    shift = ""
    if call.has(zeros):
        shift = f"""
            {zero_points(call, zeros, bits, (*outer, count), scales)}
            {"" if block else f"{zeros} = Unsqueeze ({zeros}, [-1])"}
            zeros = Gather ({zeros}, block_experts)
            zeros = Unsqueeze (zeros, [-1])
            weight = Sub (weight, zeros)
        """
    return f"""
        one = CastLike (1.0, {scales})
        weight = DequantizeLinear (numbers{number}, one, middle)
        weight = Gather (weight, block_experts)
        {f"weight = Pad (weight, [0, {filled}], , [-1])" if filled else ""}
        weight = Reshape (weight, [-1, {rows}, {blocks}, {width}])
        {shift}
        factors = Gather ({scales}, block_experts)
        factors = Unsqueeze (factors, [-1])
        weight = Mul (weight, factors)
        weight = Reshape (weight, [-1, {rows}, {columns + filled}])
        {f"weight = Slice (weight, [0], [{columns}], [2])" if filled else ""}
    """


def _activated(call: Call) -> str:
    name = call.string("activation_type", "relu")
    alpha, beta = call.number("activation_alpha", 1.0), call.number("activation_beta")
    limit = call.number("swiglu_limit", math.inf)
    halves = clipped = ""
    if name == "swiglu":
        halves = f"""
            linear = Slice (inner, [1], [{2**62}], [-1], [2])
            inner = Slice (inner, [0], [{2**62}], [-1], [2])
        """
        clipped = f"""
            top = CastLike ({limit}, inner)
            bottom = CastLike ({-limit}, inner)
            inner = Min (inner, top)
            linear = Clip (linear, bottom, top)
        """
    return f"""
        {halves}
        {clipped if limit < math.inf else ""}
        {f"beta = CastLike ({beta}, inner)" if beta and halves else ""}
        {"linear = Add (linear, beta)" if beta and halves else ""}
        alpha = CastLike ({alpha if halves else 1.0}, inner)
        gate = {"Mul (inner, alpha)" if halves and alpha != 1 else "Identity (inner)"}
        gate = Sigmoid (gate)
        gated = Mul (inner, gate)
        inner = {_ACTIVATIONS[name]}
    """


def _check(call: Call) -> None:
    """Refuse attributes and inputs that ONNX Runtime's CPU kernels ignore or do not support."""
    for name, value in call.attributes.items():
        value = value.decode() if isinstance(value, bytes) else value
        if name not in _READ and value not in _PLAIN.get(name, ()):
            known = _PLAIN.get(name, ("no such attribute",))
            what = f"has {name}={value!r}; the importer supports {' or '.join(map(str, known))}"
            call.refuse(what, _ADVICE.get(name, _UNFUSED))
    quantized = call.node.op_type == "QMoE"
    for name in ("fc3", "scales3", "bias3") if quantized else ("fc3", "bias3"):
        if call.has(name):
            what = f"has {name} ('{call.name(name)}'); the importer supports only fc1 and fc2"
            call.refuse(f"{what}, where fc1 interleaves gate and linear columns of gated activations", _UNFUSED)
    needed = ["x", "logits", "fc1", "fc2", *(["scales1", "scales2"] if quantized else [])]
    if not all(map(call.has, needed)):
        call.refuse(f"does not have all of the inputs {', '.join(needed)}; the operator needs them", AGAIN)
    name, fusion = call.string("activation_type", "relu"), call.integer("swiglu_fusion")
    if name not in _ACTIVATIONS or fusion != (name == "swiglu"):
        what = (
            f"has the activation '{name}' with swiglu_fusion={fusion}; the importer supports {', '.join(_ACTIVATIONS)}"
        )
        call.refuse(f"{what}; swiglu only with swiglu_fusion=1 (interleaved)", _UNFUSED)
    if call.number("swiglu_limit", math.inf) < 0:
        call.refuse(f"has swiglu_limit={call.number('swiglu_limit')}; the limit must not be negative", _UNFUSED)
    bits = [call.integer("expert_weight_bits", 4)]
    bits += [call.integer(f"fc{number}_expert_weight_bits", bits[0]) for number in (1, 2, 3)]
    if quantized and (bits[0] not in NUMBERS or len(set(bits)) > 1):
        what = f"has experts of {bits[0]} bits (fc1, fc2, fc3: {', '.join(map(str, bits[1:]))})"
        call.refuse(f"{what}; all must have 4, or all 8 bits", _INTEGERS)


def _check_shapes(call: Call, shapes: Mapping[str, Shape | None], expected: Mapping[str, Shape]) -> None:
    for name, shape in shapes.items():
        if call.has(name) and shape not in (None, expected[name]):
            what = f"has {name} '{call.name(name)}' {list(shape or ())}; its shape must be {list(expected[name])}"
            call.refuse(what, _RAW)
