"""Operators that work on each position of a sequence by itself, backwards: where their inputs hold the positions.

    y [B, S, V] = MatMul(x [B, S, H], weights [H, V])      positions at axis 1 of y: at axis 1 of x
    y [B, S, H] = Div(x [B, S, H], size [B, S, 1])         at axis 1 of both
    y [B, S, V] = Add(x [B, S, V], bias [V])               at axis 1 of x; the bias is the same for all

If the inputs that hold positions are cut to some of them, the outputs are those of these positions, unchanged: this is
known operator by operator, for every length. Only ranks, and the shapes of constants, are taken from shape inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import dims, input_or_none, is_op, small_constant

__all__ = ["MixedError", "inputs_by_position"]

_ELEMENTWISE = (
    "Abs", "Add", "And", "Cast", "Ceil", "Celu", "Clip", "Cos", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp",
    "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu",
    "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tanh", "Where",
)  # fmt: skip
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_SOFTMAXES = ("Softmax", "LogSoftmax")
_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare", "ReduceL2")
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_TO_END = (1 << 31) - 1  # where a Slice that cuts nothing off ends, at least


class MixedError(Exception):
    """Why an operator is not known to work on each position by itself."""


def inputs_by_position(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    """The inputs of a node that hold the positions which its outputs hold at `axis`, and the axis of each there.

    Args:
        node: of a graph.
        axis: not negative.
        behind: graph inputs behind each tensor, by name; see `inputs_behind`.

    Returns:
        By index of the input. The others are the same for all positions, or are read as a whole.

    Raises:
        MixedError: it mixes positions, or is no operator that is known here.
    """
    rules = (
        (_ELEMENTWISE, _elementwise), (_NORMS, _norm), (("MatMul",), _product), (_SOFTMAXES, _softmax),
        (_REDUCTIONS, _reduced), (_QUANTIZERS, _quantized), (("Concat",), _beside), (("Split", "Gather"), _part),
        (("Slice",), _slice), (("Transpose",), _transposed), (("Reshape",), _reshaped),
    )  # fmt: skip
    for operators, rule in rules:
        if is_op(node, *operators):
            return rule(node, axis, behind)
    raise MixedError(f"{node.op} '{node.name}' is not known to work on each position by itself")


def _rank(tensor: gs.Tensor) -> int:
    shape = dims(tensor)
    if shape is None:
        raise MixedError(f"nothing says the rank of '{tensor.name}'")
    return len(shape)


def _elementwise(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    """By the rules of broadcasting."""
    rank = _rank(node.outputs[0])
    found: dict[int, int] = {}
    for index, tensor in enumerate(node.inputs):
        if tensor.is_empty():
            continue
        place = axis - rank + _rank(tensor)
        if place < 0:
            continue
        size = (dims(tensor) or ())[place]
        if behind.get(str(tensor.name)):
            found[index] = place
        elif size != 1:
            raise MixedError(f"{node.op} '{node.name}' does to each position something else, by '{tensor.name}'")
    return found


def _norm(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    """Scale and bias broadcast to what is normalized."""
    _check_off(node, axis, range(int(node.attrs.get("axis", -1)) % _rank(node.outputs[0]), _rank(node.outputs[0])))
    return _elementwise(node, axis, behind)


def _product(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    """The rows of the left side, the columns of the right one, or products beside each other."""
    left, right = (_rank(t) for t in node.inputs)
    rank = _rank(node.outputs[0])
    if left < 2 or right < 2:
        raise MixedError(f"MatMul '{node.name}' is with a vector")
    if axis == rank - 2:
        return {0: left - 2}
    if axis == rank - 1:
        return {1: right - 1}
    return _elementwise(node, axis, behind)


def _softmax(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    last = _rank(node.outputs[0]) - 1
    if node.attrs.get("axis") not in (-1, last):  # other axes and defaults before opset 13
        raise MixedError(f"{node.op} '{node.name}' does not say that it is over the last axis alone")
    _check_off(node, axis, [last])
    return {0: axis}


def _reduced(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    operand, rank = small_constant(input_or_none(node, 1)), _rank(node.inputs[0])
    axes = node.attrs.get("axes") if operand is None else operand.reshape(-1).tolist()
    if not axes:
        raise MixedError(f"{node.op} '{node.name}' is over axes that are not known")
    along = [int(a) % rank for a in axes]
    kept = range(rank) if int(node.attrs.get("keepdims", 1)) else [i for i in range(rank) if i not in along]
    _check_off(node, kept[axis], along)
    return {0: kept[axis]}


def _quantized(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    """With one scale, or one for each entry of another axis."""
    scale = dims(node.inputs[1])
    one = scale is not None and all(d == 1 for d in scale)
    along = int(node.attrs.get("axis", 1)) % _rank(node.outputs[0])
    if not one and (scale is None or len(scale) != 1 or along == axis):
        raise MixedError(f"{node.op} '{node.name}' has a scale for each position")
    return {0: axis}


def _beside(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    _check_off(node, axis, [int(node.attrs["axis"]) % _rank(node.outputs[0])])
    return _elementwise(node, axis, behind)


def _part(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    """Some entries of another axis."""
    along = int(node.attrs.get("axis", 0)) % _rank(node.inputs[0])
    if is_op(node, "Gather") and axis >= along:  # further axes come from the indices
        raise MixedError(f"Gather '{node.name}' picks positions")
    _check_off(node, axis, [along])
    return {0: axis}


def _slice(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    """Some entries of other axes, and all positions."""
    starts, ends, axes, steps = (small_constant(input_or_none(node, i)) for i in range(1, 5))
    rank = _rank(node.inputs[0])
    if axes is None:
        raise MixedError(f"Slice '{node.name}' is along axes that are not known")
    for i, along in enumerate(axes):
        whole = starts is not None and ends is not None and starts[i] == 0 and ends[i] >= _TO_END
        if int(along) % rank == axis and not (
            whole and (len(node.inputs) < 5 or (steps is not None and steps[i] == 1))
        ):
            raise MixedError(f"Slice '{node.name}' picks positions")
    return {0: axis}


def _transposed(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    rank = _rank(node.inputs[0])
    return {0: int((node.attrs.get("perm") or list(reversed(range(rank))))[axis])}


def _reshaped(node: gs.Node, axis: int, behind: Mapping[str, frozenset[str]]) -> dict[int, int]:
    """What stands before the positions stays, and so does how many numbers each of them has."""
    before, shape = dims(node.inputs[0]) or (), small_constant(node.inputs[1])
    if shape is None or int(node.attrs.get("allowzero", 0)):
        raise MixedError(f"Reshape '{node.name}' is to a shape that is computed")
    sizes = [int(n) for n in shape]
    rest, made = before[axis + 1 :], sizes[axis + 1 :]
    numbers = [d for d in rest if isinstance(d, int)]
    same = len(numbers) == len(rest) and min(made, default=1) > 0 and prod(numbers) == prod(made)
    kept = len(before) > axis and not any(sizes[:axis])
    if not kept or not (sizes[axis] == 0 or (sizes[axis] == -1 and same)):
        raise MixedError(f"Reshape '{node.name}' does not keep positions apart")
    return {0: axis}


def _check_off(node: gs.Node, axis: int, along: range | list[int]) -> None:
    if axis in along:
        raise MixedError(f"{node.op} '{node.name}' is along the positions")
