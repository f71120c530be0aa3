"""Activations, matrix products and convolutions with what ONNX Runtime fuses into them."""

from __future__ import annotations

from trt_kvcache.importer.lower.body import Call

_ACTIVATIONS: dict[str, dict[str, str]] = {
    "Relu": {}, "Sigmoid": {}, "Tanh": {}, "LeakyRelu": {"activation_alpha": "alpha"},
}  # fmt: skip
_GATES = ("none", "silu", "swish")


def gelu(call: Call) -> str:
    """``Gelu(x + bias)`` with erf; of FastGelu, with tanh."""
    approximate = "tanh" if call.node.op_type == "FastGelu" else "none"
    return f"""
        {call.when("bias", "x = Add (x, bias)")}
        y = Gelu <approximate = "{approximate}"> (x)
    """


def quick_gelu(call: Call) -> str:
    """``x * Sigmoid(alpha * x)``."""
    return f"""
        {scaled("gate", "x", call.number("alpha", 1.702))}
        gate = Sigmoid (gate)
        y = Mul (x, gate)
    """


def fused_matmul(call: Call) -> str:
    """``alpha * A @ B``, of operands that are transposed first if asked."""
    return f"""
        {_transposed(call, "a", "A")}
        {_transposed(call, "b", "B")}
        product = MatMul (a, b)
        {scaled("y", "product", call.number("alpha", 1.0))}
    """


def fused_gemm(call: Call) -> str:
    """``activation(Gemm(a, b, c))``."""
    activation = call.string("activation")
    settings = {name for name in call.attributes if name.startswith("activation_")}
    if activation not in _ACTIVATIONS or settings - set(_ACTIVATIONS[activation]):
        call.refuse(
            f"has the activation '{activation}' with {', '.join(sorted(settings)) or 'no settings'}; supported are "
            f"{', '.join(_ACTIVATIONS)}",
            "save the model with basic optimization",
        )
    known = [f"{name} = {call.number(name, 1.0)}" for name in ("alpha", "beta")]
    known += [f"{name} = {call.integer(name)}" for name in ("transA", "transB")]
    names = _ACTIVATIONS[activation]
    stated = ", ".join(f"{names[name]} = {call.number(name)}" for name in sorted(settings))
    return f"""
        sum = Gemm <{", ".join(known)}> (a, b, c)
        y = {activation} {f"<{stated}>" if stated else ""} (sum)
    """


def causal_conv_with_state(call: Call) -> str:
    """A convolution over the rows of the state and the new ones; the newest rows are the next state."""
    shape, activation = call.shape("weight") or (), call.string("activation", "none")
    channels, width = (*shape[::2], "?", "?")[:2]
    plain = (
        not call.integer("state_window") and call.integer("ndim", 1) == 1 and len(shape) == 3 and activation in _GATES
    )
    if not (plain and call.has("past") and isinstance(channels, int) and isinstance(width, int) and width > 1):
        call.refuse(
            f"has a weight {list(shape)}, the activation '{activation}' and {'a' if call.has('past') else 'no'} past; "
            "supported is one axis of time, a fixed weight [channels, 1, k] of k > 1, a past, no state_window, and an "
            f"activation of {', '.join(_GATES)}",
            "export the convolution unfused",
        )
    gated = activation != "none"
    return f"""
        rows = Concat <axis = 2> (past, x)
        y = Conv <group = {channels}, kernel_shape = [{width}]> (rows, weight, bias)
        {"gate = Sigmoid (y)" if gated else ""}
        {"y = Mul (y, gate)" if gated else ""}
        present = Slice (rows, [{1 - int(width)}], [{2**62}], [2])
    """


def scaled(result: str, name: str, factor: float) -> str:
    """Lines that give `name` times a number as `result`."""
    if factor == 1:
        return f"{result} = Identity ({name})"
    return f"""
        factor = CastLike ({factor}, {name})
        {result} = Mul ({name}, factor)
    """


def _transposed(call: Call, name: str, letter: str) -> str:
    """The last two axes swapped, the first axis after the other batch axes. Vectors stay (measured)."""
    swap, batch = call.integer(f"trans{letter}"), call.integer(f"transBatch{letter}")
    if not swap and not batch:
        return ""
    perm = list(range(len(call.known_shape(name))))
    if batch and len(perm) > 2:
        perm = [*perm[1:-1], 0, perm[-1]]
    if swap and len(perm) > 1:
        perm[-2:] = perm[:-3:-1]
    return f"{name} = Transpose <perm = {perm}> ({name})" if perm != sorted(perm) else ""
