"""Along which axes the readers of a tensor choose single places of it, by constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import consumers, dims, input_or_none, is_op

Value = Callable[[gs.Tensor], npt.NDArray[Any] | None]
_Axes = tuple[int | None, ...]  # of the whole, for each axis of what is made of it

_SAME = ("Identity", "Cast", "ScatterND", "ScatterElements", "Where", "Add", "Sub", "Mul", "Div")


@dataclass(frozen=True)
class Use:
    """How a tensor is read.

    Attributes:
        axes: fixed ones, of which single places are chosen: as often as there are places, at least. (A model that takes
            the last row of one cache apart chooses a single one, too.)
        closed: nothing reads it otherwise.
    """

    axes: frozenset[int]
    closed: bool


def find_use(whole: gs.Tensor, value: Value) -> Use:
    """Follow a tensor to what reads it.

    Args:
        whole: an input of the graph.
        value: of a tensor, where constants alone decide it.
    """
    found: Counter[int] = Counter()
    closed = True
    stack: list[tuple[gs.Tensor, _Axes, bool]] = [(whole, tuple(range(len(whole.shape))), False)]
    seen: set[int] = set()
    while stack:
        tensor, axes, is_part = stack.pop()
        if id(tensor) in seen or not any(a is not None for a in axes):
            continue
        seen.add(id(tensor))
        for node in consumers(tensor):
            if is_op(node, "Shape"):
                continue
            step = _follow(node, tensor, axes, value)
            if step is None:
                closed = closed and is_part
                continue
            chosen = {a for a in step[0] if isinstance(whole.shape[a], int)}
            found.update({a: len(node.outputs) for a in chosen})
            stack += [(output, left, is_part or bool(chosen)) for output, left in step[1]]
    return Use(frozenset(a for a, count in found.items() if count >= whole.shape[a]), closed)


def _follow(
    node: gs.Node, tensor: gs.Tensor, axes: _Axes, value: Value
) -> tuple[set[int], list[tuple[gs.Tensor, _Axes]]] | None:
    """The axes of which a node chooses single places, and what it makes; None where it is no such operator."""
    if is_op(node, "Gather") and node.inputs[0] is tensor:
        return _gather(node, axes, value)
    if is_op(node, "Slice") and node.inputs[0] is tensor:
        return _slice(node, axes, value)
    if is_op(node, "Split"):
        axis = int(node.attrs.get("axis", 0)) % len(axes)
        size = (dims(tensor) or ("?",) * len(axes))[axis]
        single = size == len(node.outputs) > 1
        return _known({axes[axis]} if single else set()), [(output, axes) for output in node.outputs]
    if is_op(node, "Squeeze", "Unsqueeze"):
        return _squeeze(node, axes, value)
    if is_op(node, "Transpose"):
        perm = node.attrs.get("perm") or list(reversed(range(len(axes))))
        if len(perm) != len(axes):
            return None
        return set(), [(node.outputs[0], tuple(axes[p] for p in perm))]
    if is_op(node, "Reshape") and node.inputs[0] is tensor:
        return set(), [(node.outputs[0], _reshaped(dims(tensor) or (), dims(node.outputs[0]) or (), axes))]
    if is_op(node, "Concat"):
        axis = int(node.attrs["axis"]) % len(axes)
        return set(), [(node.outputs[0], tuple(None if a == axis else own for a, own in enumerate(axes)))]
    if is_op(node, *_SAME) and len(dims(node.outputs[0]) or axes) == len(axes):
        return set(), [(node.outputs[0], axes)]
    return None


def _gather(node: gs.Node, axes: _Axes, value: Value) -> tuple[set[int], list[tuple[gs.Tensor, _Axes]]] | None:
    axis = int(node.attrs.get("axis", 0)) % len(axes)
    index = node.inputs[1]
    known = value(index)
    rank = known.ndim if known is not None else len(index.shape) if index.shape is not None else None
    if rank is None or (known is None and rank):
        return None
    single = rank == 0 or (known is not None and known.size == 1)
    made = (*axes[:axis], *([axes[axis] if rank == 1 else None] * rank), *axes[axis + 1 :])
    return _known({axes[axis]} if single else set()), [(node.outputs[0], made)]


def _slice(node: gs.Node, axes: _Axes, value: Value) -> tuple[set[int], list[tuple[gs.Tensor, _Axes]]]:
    given = input_or_none(node, 3)
    along = None if given is None else value(given)
    before, after = dims(node.inputs[0]) or (), dims(node.outputs[0]) or ()
    cut = range(len(axes)) if along is None else [int(a) % len(axes) for a in along]
    single = {axes[a] for a in cut if a < len(before) and a < len(after) and before[a] != after[a] == 1}
    return _known(single), [(node.outputs[0], axes)]


def _squeeze(node: gs.Node, axes: _Axes, value: Value) -> tuple[set[int], list[tuple[gs.Tensor, _Axes]]] | None:
    given = input_or_none(node, 1)
    known = node.attrs.get("axes") if given is None else value(given)
    if known is None:
        return None
    if is_op(node, "Squeeze"):
        gone = {int(a) % len(axes) for a in np.asarray(known).reshape(-1)}
        left = tuple(own for a, own in enumerate(axes) if a not in gone)
        return _known({axes[a] for a in gone}), [(node.outputs[0], left)]
    rank = len(axes) + np.asarray(known).size
    added = {int(a) % rank for a in np.asarray(known).reshape(-1)}
    rest = iter(axes)
    return set(), [(node.outputs[0], tuple(None if a in added else next(rest) for a in range(rank)))]


def _reshaped(before: tuple[int | str, ...], after: tuple[int | str, ...], axes: _Axes) -> _Axes:
    """Axes behind a Reshape, up to the first that it changes, which may have become two."""
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b or a == "?"), len(after))
    made = list(axes[:same])
    pair = [d for d in after[same : same + 2] if isinstance(d, int)]
    if same < len(axes) and len(pair) > 1 and before[same] == pair[0] * pair[1]:
        made += [axes[same]] * 2
    return (*made, *[None] * (len(after) - len(made)))


def _known(axes: set[int | None]) -> set[int]:
    return {a for a in axes if a is not None}
