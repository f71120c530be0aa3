"""Logits of the last positions of a step only: the value that they are computed from is sliced where it is narrowest.

    attention -> Add -> norm -> MLP -> Add -> norm -> MatMul -> softcap -> logits [B, S, V]
                  |                                                |
                  `- the narrowest value here: x [B, S, H] becomes x[:, S - K :]

A prefill needs the logits of one position, and V is 128,256 where H is 2,048: computed for all of them, they take from
7 to 60 % of its products, counted in weights, and gigabytes.

The tail is walked from the output back, as long as each operator works on each position by itself and nobody outside
of the tail reads what is in it. The check runs what is sliced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import (
    consumers,
    contains,
    dims,
    free_name,
    input_or_none,
    inputs_behind,
    is_op,
    small_constant,
)
from trt_kvcache.importer.operators import NORMS
from trt_kvcache.importer.plan import InterfaceChange, LogitPositions, LogitsSpan, PlanOptions, Role, TensorRole

__all__ = ["change_of", "plan_logits", "role_of", "with_span"]

_NAME = "logits_span"
_ELEMENTWISE = (
    "Abs", "Add", "And", "Cast", "Clip", "Cos", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu",
    "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log",
    "Max", "Min", "Mish", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin",
    "Softplus", "Sqrt", "Sub", "Swish", "Tanh", "Where",
)  # fmt: skip
_ALONG_AXIS = ("Split", "Softmax", "LogSoftmax", *NORMS)
_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare", "ReduceL2")
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_TO_END = (1 << 31) - 1  # where a Slice that takes all to the end ends, at least

Behind = Mapping[str, frozenset[str]]
"""The graph inputs behind each tensor, by name."""


class _MixedError(Exception):
    """The reason that the tail ends here."""


@dataclass(frozen=True, eq=False)
class _Neck:
    """One tensor that all of the tail is computed from, the axis of its positions, and who reads it in the tail."""

    tensor: gs.Tensor
    axis: int
    readers: tuple[gs.Node, ...]
    width: int


def plan_logits(graph: gs.Graph, roles: Sequence[TensorRole], options: PlanOptions) -> tuple[LogitsSpan | None, str]:
    """The place where logits of all positions are sliced to the last ones in a sorted graph, or why they are not.

    None and nothing to say: nobody asks for it, or the model gives logits of one position anyway.
    """
    logits = _only(roles, Role.LOGITS, "output")
    tokens = _only(roles, Role.TOKENS, "input")
    if options.logits is LogitPositions.ALL or logits is None or not _several(logits, tokens):
        return None, ""
    if "tokens" in logits.axes:
        return None, _note(logits, "the tokens of all sequences are packed in one axis")
    output = next(t for t in graph.outputs if t.name == logits.name)
    neck = _find_neck(graph, output, 1)
    if isinstance(neck, str):
        return None, _note(logits, neck)
    taken = {str(name) for name in graph.tensors()} | {str(d) for r in roles for d in r.shape}
    name = free_name(_NAME, taken)
    readers = tuple(str(node.name) for node in neck.readers)
    return LogitsSpan(name, name, logits.name, str(neck.tensor.name), neck.axis, readers), ""


def _only(roles: Sequence[TensorRole], role: Role, io: str) -> TensorRole | None:
    matches = [r for r in roles if r.role is role and r.io == io]
    return matches[0] if len(matches) == 1 else None


def _several(logits: TensorRole, tokens: TensorRole | None) -> bool:
    """True if logits are of every token of steps that may have several."""
    if "tokens" in logits.axes:
        return True
    if len(logits.shape) != 3 or tokens is None or len(tokens.shape) < 2:
        return False
    return logits.axes[1] == "sequence" or (logits.shape[1] == tokens.shape[1] != 1 and logits.axes[1] == "")


def _note(logits: TensorRole, why: str) -> str:
    return f"'{logits.name}' stays as exported, of all positions of a step: {why}"


def role_of(span: LogitsSpan) -> TensorRole:
    """The added input."""
    return TensorRole(span.name, "input", Role.SPAN, "int64", (span.symbol,), "added", ("kept",))


def with_span(role: TensorRole, span: LogitsSpan | None) -> TensorRole:
    """The role of an output of the rewritten model."""
    if span is None or role.name != span.output or role.io != "output":
        return role
    return replace(role, shape=(role.shape[0], span.symbol, role.shape[2]), axes=(role.axes[0], "kept", role.axes[2]))


def change_of(role: TensorRole, span: LogitsSpan) -> InterfaceChange:
    """The change for the caller; `role`: of the logits as exported."""
    names = {"batch": "B", "sequence": "S"}
    old = [names.get(a, str(d)) for d, a in zip(role.shape, role.axes, strict=True)]
    new = [old[0], span.symbol, old[2]]
    why = f"of the last positions, as many as {span.name} is long; --logits all keeps them"
    return InterfaceChange("output", f"{role.name} [{', '.join(old)}]", f"{role.name} [{', '.join(new)}]", why)


def _find_neck(graph: gs.Graph, output: gs.Tensor, axis: int) -> _Neck | str:
    """The narrowest value in the tail of an output, the first of several; or why there is none narrower than it."""
    sources = inputs_behind(graph)
    best, least = None, _width(output, axis)
    why = "all of the model works on each position by itself"
    front = {id(output): (output, axis)}  # what is left to walk, and the axis of its positions
    slots: dict[int, list[tuple[gs.Node, int]]] = {id(output): []}  # who reads it in the tail, as which input
    try:
        for node in reversed(graph.nodes):
            outputs = [t for t in node.outputs if id(t) in front]
            if not outputs:
                continue
            for tensor in (t for t in node.outputs if consumers(t) or contains(graph.outputs, t)):
                _check_closed(graph, tensor, output, slots.get(id(tensor), []))
            inputs = _inputs_by_position(node, front[id(outputs[0])][1], sources)
            for tensor in outputs:
                del front[id(tensor)]
            for index, place in inputs.items():
                tensor = node.inputs[index]
                if front.setdefault(id(tensor), (tensor, place))[1] != place:
                    raise _MixedError(f"'{tensor.name}' is read along two of its axes")
                slots.setdefault(id(tensor), []).append((node, index))
            candidate = _single(front, slots)
            if candidate is not None and candidate.width <= least and (best is not None or candidate.width < least):
                best, least = candidate, candidate.width
    except _MixedError as error:
        why = str(error)
    return why if best is None else best


def _check_closed(graph: gs.Graph, tensor: gs.Tensor, output: gs.Tensor, slots: list[tuple[gs.Node, int]]) -> None:
    """Refuse a tensor that somebody outside of the tail reads, too."""
    if tensor is not output and contains(graph.outputs, tensor):
        raise _MixedError(f"'{tensor.name}' is an output of its own")
    if others := [node for node in consumers(tensor) if all(node is not reader for reader, _ in slots)]:
        raise _MixedError(f"{others[0].op} '{others[0].name}' reads '{tensor.name}', too")
    if len(slots) != sum(t is tensor for node in consumers(tensor) for t in node.inputs):
        raise _MixedError(f"'{tensor.name}' is read as a whole, too")


def _single(front: Mapping[int, tuple[gs.Tensor, int]], slots: Mapping[int, list[tuple[gs.Node, int]]]) -> _Neck | None:
    """The only tensor that holds the positions of the tail so far; none where a reader takes all of it as well."""
    if len(front) != 1:
        return None
    tensor, axis = next(iter(front.values()))
    readers = {id(node): node for node, _ in slots[id(tensor)]}
    width = _width(tensor, axis)
    whole = sum(t is tensor for node in readers.values() for t in node.inputs) != len(slots[id(tensor)])
    return None if whole or not isinstance(width, int) else _Neck(tensor, axis, tuple(readers.values()), width)


def _width(tensor: gs.Tensor, axis: int) -> int | float:
    """Numbers for each position; infinite where the batch is not the only other size that is open."""
    shape = list(dims(tensor) or ())
    if shape and not isinstance(shape[-1], int):  # a product with weights knows
        weights = [dims(n.inputs[1]) or () for n in consumers(tensor) if is_op(n, "MatMul") and n.inputs[0] is tensor]
        shape[-1] = next((d[-2] for d in weights if len(d) == 2), "?")
    sizes = [d for i, d in enumerate(shape) if i not in (0, axis)]
    return prod(d for d in sizes if isinstance(d, int)) if all(isinstance(d, int) for d in sizes) else float("inf")


def _inputs_by_position(node: gs.Node, axis: int, sources: Behind) -> dict[int, int]:
    """The inputs of a node that hold the positions of its outputs' `axis`, by index, and the axis of each there.

    The other inputs are the same for all positions, or are read as a whole.
    """
    rank = _rank(node.outputs[0])
    if is_op(node, *_REDUCTIONS):
        axes, rank = _axes(node), _rank(node.inputs[0])
        remaining = range(rank) if int(node.attrs.get("keepdims", 1)) else [i for i in range(rank) if i not in axes]
        _check_off(node, remaining[axis], axes)
        return {0: remaining[axis]}
    if is_op(node, "Transpose"):
        return {0: int((node.attrs.get("perm") or list(reversed(range(rank))))[axis])}
    if is_op(node, "Reshape"):
        return _reshaped(node, axis)
    if is_op(node, *_QUANTIZERS):  # one scale, or one for each entry of another axis
        scale = dims(node.inputs[1])
        along = int(node.attrs.get("axis", 1)) % rank
        if scale is None or (prod(1 if d == 1 else 2 for d in scale) > 1 and (len(scale) != 1 or along == axis)):
            raise _MixedError(f"{node.op} '{node.name}' has a scale for each position")
        return {0: axis}
    if is_op(node, "MatMul"):
        left, right = (_rank(t) for t in node.inputs)
        if left < 2 or right < 2:
            raise _MixedError(f"MatMul '{node.name}' is with a vector")
        if axis >= rank - 2:
            return {0: left - 2} if axis == rank - 2 else {1: right - 1}
    elif is_op(node, "Slice") or is_op(node, *_ALONG_AXIS):
        _check_off(node, axis, _axes(node))
        if not is_op(node, *NORMS):
            return {0: axis}
    elif not is_op(node, *_ELEMENTWISE):
        raise _MixedError(f"{node.op} '{node.name}' is not known to work on each position by itself")
    return _broadcast(node, axis, sources)


def _broadcast(node: gs.Node, axis: int, sources: Behind) -> dict[int, int]:
    """By the rules of broadcasting; constants are the same for all positions."""
    rank = _rank(node.outputs[0])
    places: dict[int, int] = {}
    for index, tensor in enumerate(node.inputs):
        if tensor.is_empty() or (place := axis - rank + _rank(tensor)) < 0:
            continue
        if sources.get(str(tensor.name)):
            places[index] = place
        elif (dims(tensor) or ())[place] != 1:
            raise _MixedError(f"{node.op} '{node.name}' does to each position something else, by '{tensor.name}'")
    return places


def _reshaped(node: gs.Node, axis: int) -> dict[int, int]:
    """The axes before the positions stay, and so does how many numbers each position has."""
    before, shape = dims(node.inputs[0]) or (), small_constant(node.inputs[1])
    if shape is None or int(node.attrs.get("allowzero", 0)):
        raise _MixedError(f"Reshape '{node.name}' is to a shape that is computed")
    sizes = [int(n) for n in shape]
    rest, new = before[axis + 1 :], sizes[axis + 1 :]
    numbers = [d for d in rest if isinstance(d, int)]
    same = len(numbers) == len(rest) and min(new, default=1) > 0 and prod(numbers) == prod(new)
    leading = len(before) > axis and not any(sizes[:axis])
    if not leading or not (sizes[axis] == 0 or (sizes[axis] == -1 and same)):
        raise _MixedError(f"Reshape '{node.name}' does not keep positions apart")
    return {0: axis}


def _axes(node: gs.Node) -> list[int]:
    """The axes of its first input that a node works along; those that a Slice leaves whole do not count.

    Raises:
        _MixedError: they are not known.
    """
    rank = _rank(node.inputs[0])
    if is_op(node, *_ALONG_AXIS):
        axis = int(node.attrs.get("axis", 0 if is_op(node, "Split") else -1)) % rank
        return list(range(axis, rank)) if is_op(node, *NORMS) else [axis]
    starts, ends, axes, steps = (small_constant(input_or_none(node, i)) for i in range(1, 5))
    if is_op(node, *_REDUCTIONS):
        axes = np.asarray(node.attrs["axes"]) if "axes" in node.attrs else starts
        if axes is None:
            raise _MixedError(f"{node.op} '{node.name}' is over axes that are not known")
        return [int(a) % rank for a in axes.reshape(-1)]
    if axes is None:
        raise _MixedError(f"Slice '{node.name}' is along axes that are not known")
    steps = np.ones_like(axes) if len(node.inputs) < 5 else steps
    if starts is None or ends is None or steps is None:
        return [int(a) % rank for a in axes]
    bounds = zip(axes, starts, ends, steps, strict=True)
    return [int(a) % rank for a, start, end, step in bounds if start != 0 or end < _TO_END or step != 1]


def _rank(tensor: gs.Tensor) -> int:
    shape = dims(tensor)
    if shape is None:
        raise _MixedError(f"nothing says the rank of '{tensor.name}'")
    return len(shape)


def _check_off(node: gs.Node, axis: int, along: Sequence[int]) -> None:
    if axis in along:
        raise _MixedError(f"{node.op} '{node.name}' is along the positions")
