"""Operators along the sequences of a batch: refused, since who shares a batch must not change a text.

    Slice(x, 1, end, axis 0), Slice(x, 0, 1, axis 0) -> Concat         a roll: each sequence has the next one's

Where positions alone decide, `independence` compares numbers. Behind weights and tokens there are none, but shapes: an
axis that is longer by two with two sequences more counts sequences. No operator that mixes what stands along an axis
may do so along that one. Where it is merged with another axis, as where tokens go to experts, some only count or pick
tokens, and may. Operators that are not known here may do anything: this finds what mixes sequences, and is no proof
that nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import onnx

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize.evidence.probe import Probe

BATCHES = (5, 7)


@dataclass(frozen=True, eq=False)
class _Step:
    """The same step of both batches."""

    few: Probe
    many: Probe

    def axes(self, name: str) -> set[int]:
        """The axes of a tensor that count sequences."""
        few, many = self.few.shape(name) if name else None, self.many.shape(name) if name else None
        if few is None or many is None or len(few) != len(many):
            return set()
        return {i for i, (a, b) in enumerate(zip(few, many, strict=True)) if b - a == BATCHES[1] - BATCHES[0]}

    def merged(self, name: str) -> set[int]:
        """The axes of a tensor that sequences are part of, and those that count them."""
        few, many = self.few.shape(name) or (), self.many.shape(name) or ()
        found = {i for i, (a, b) in enumerate(zip(few, many, strict=False)) if a * BATCHES[1] == b * BATCHES[0] > 0}
        return found | self.axes(name)

    def rank(self, name: str) -> int:
        return len(self.few.shape(name) or ())

    def numbers(self, node: onnx.NodeProto, index: int) -> list[int] | None:
        """The values of an input; None where there is none, or it is not known."""
        value = self.few.value(node.input[index]) if len(node.input) > index and node.input[index] else None
        return None if value is None else [int(n) for n in value.reshape(-1)]


def check_batch_axis(model: onnx.ModelProto, few: Probe, many: Probe) -> None:
    """Refuse a model in which an operator mixes the sequences of a batch, as far as that is seen.

    Args:
        model: flat, of opset 18 at least.
        few: evaluates it in a step of as many sequences as `BATCHES` says first.
        many: evaluates the same step of as many as it says last.

    Raises:
        UnsupportedModelError: naming the operator.
    """
    step = _Step(few, many)
    for node in model.graph.node:
        rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if rule is None or not step.merged(node.input[0]) | step.merged(node.input[min(1, len(node.input) - 1)]):
            continue
        if rule(node, step) and few.value(node.output[0]) is None:
            raise UnsupportedModelError(
                f"{node.op_type} '{node.name or node.output[0]}' is along the sequences of a batch: "
                f"'{node.input[0]}' is {list(few.shape(node.input[0]) or ())} with {BATCHES[0]} sequences, and "
                f"{list(many.shape(node.input[0]) or ())} with {BATCHES[1]}; supported are sequences that do not "
                "depend on each other: export with a batch of 1"
            )


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _along(default: int, *, merged: bool = False) -> Callable[[onnx.NodeProto, _Step], bool]:
    """Along the axis that an attribute says."""

    def mixes(node: onnx.NodeProto, step: _Step) -> bool:
        name = node.input[0]
        axes = step.merged(name) if merged else step.axes(name)
        return _attribute(node, "axis", default) % max(step.rank(name), 1) in axes

    return mixes


def _norm(node: onnx.NodeProto, step: _Step) -> bool:
    rank = step.rank(node.input[0])
    return bool(step.merged(node.input[0]) & set(range(_attribute(node, "axis", -1) % max(rank, 1), rank)))


def _summed(node: onnx.NodeProto, step: _Step) -> bool:
    axis = step.numbers(node, 1)
    return axis is not None and axis[0] % max(step.rank(node.input[0]), 1) in step.axes(node.input[0])


def _reduced(node: onnx.NodeProto, step: _Step) -> bool:
    """Over the axes of an input; none are all. Quantizers ask for the largest number of all."""
    axes, rank = step.numbers(node, 1), step.rank(node.input[0])
    if not axes:
        over_all = not _attribute(node, "noop_with_empty_axes", 0) and node.op_type not in ("ReduceMax", "ReduceMin")
        return over_all and bool(step.axes(node.input[0]))
    return any(axis % max(rank, 1) in step.axes(node.input[0]) for axis in axes)


def _gathered(node: onnx.NodeProto, step: _Step) -> bool:
    indices = step.numbers(node, 1)
    return indices is not None and indices != list(range(BATCHES[0])) and _along(0)(node, step)


def _sliced(node: onnx.NodeProto, step: _Step) -> bool:
    """Some of the sequences, or backwards; of what they are part of, not as many of each."""
    before, after = (step.few.shape(name) for name in (node.input[0], node.output[0]))
    axes, kept = step.merged(node.input[0]), step.merged(node.output[0])
    if before is None or after is None:
        return False
    sizes = step.numbers(node, 4) or []
    backwards = [n for n, by in zip(step.numbers(node, 3) or range(len(sizes)), sizes, strict=False) if by < 0]
    own = step.axes(node.input[0])
    cut = any(before[i] != after[i] and (i in own or i not in kept) for i in axes)
    return cut or any(along % len(before) in axes for along in backwards)


def _product(node: onnx.NodeProto, step: _Step) -> bool:
    left, right = node.input[:2]
    return step.rank(left) - 1 in step.axes(left) or max(step.rank(right) - 2, 0) in step.axes(right)


def _gemm(node: onnx.NodeProto, step: _Step) -> bool:
    left, right = node.input[:2]
    summed = 0 if _attribute(node, "transA", 0) else 1, 1 if _attribute(node, "transB", 0) else 0
    return summed[0] in step.axes(left) or summed[1] in step.axes(right)


def _reshaped(node: onnx.NodeProto, step: _Step) -> bool:
    """To where other numbers are those of a sequence."""
    before, after = (
        {prod((step.few.shape(name) or ())[:axis]) for axis in step.axes(name)}
        for name in (node.input[0], node.output[0])
    )
    return bool(before and after) and not before & after


def _first(node: onnx.NodeProto, step: _Step) -> bool:
    """Along all axes but the first one."""
    return any(step.axes(name) - {0} for name in node.input[:3])


_RULES: Mapping[str, Callable[[onnx.NodeProto, _Step], bool]] = {
    **dict.fromkeys(("Softmax", "LogSoftmax"), _along(-1, merged=True)),
    **dict.fromkeys(("Hardmax", "TopK"), _along(-1)),
    **dict.fromkeys(("ArgMax", "ArgMin", "GatherElements", "Split"), _along(0)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _norm),
    **dict.fromkeys(
        ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceProd",
         "ReduceLogSumExp"), _reduced,
    ),
    **dict.fromkeys(("Conv", "ConvTranspose", "Attention"), _first),
    "CumSum": _summed, "Gather": _gathered, "Slice": _sliced, "MatMul": _product, "MatMulInteger": _product,
    "Gemm": _gemm, "Reshape": _reshaped,
}  # fmt: skip
