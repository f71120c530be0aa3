"""Finds the first layer of a rewritten model whose result differs from the model as exported.

Both models have many tensors of equal names. A rewrite may use a name for other contents (such as a mask of another
form), so such a tensor may differ and still be right. Then tensors computed from it agree; tensors computed from a
wrong one do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, ValueInfoProto

from trt_kvcache.compare.parsed import share_between
from trt_kvcache.importer.protos import copied

__all__ = ["first_layer", "inner_names", "marked"]

Array = npt.NDArray[Any]


def inner_names(model: ModelProto) -> list[str]:
    """Return the names of tensors that nodes of a model compute, in their order, without its outputs."""
    outputs = {o.name for o in model.graph.output}
    return [name for node in model.graph.node for name in node.output if name and name not in outputs]


def marked(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """Return a copy of a model with these inner tensors among its outputs."""
    copy = copied(model)
    copy.graph.output.extend(ValueInfoProto(name=name) for name in names)
    return copy


def first_layer(
    model: ModelProto, wanted: Mapping[str, Array], had: Mapping[str, Array], place: tuple[int, int], batch: int,
    allowed: float,
) -> str:  # fmt: skip
    """Describe the first node of a rewritten model whose result differs.

    Args:
        model: the rewritten model.
        wanted: tensors of the model as exported, for one text, by name.
        had: tensors of the rewritten model, by name.
        place: index of the text in the rewritten model's step, and the number of texts there.
        batch: how many equal copies of the text the model as exported holds.
        allowed: the largest difference that counts as equal, as a share of a tensor's largest number.

    Returns:
        The end of a message; empty if no tensor of both models can be compared and differs.
    """
    differs = {
        name: share_between(*pair) > allowed
        for name, values in wanted.items()
        if name in had and (pair := _of_text(values, batch, had[name], place)) is not None
    }
    # by name: differing tensors that it depends on, with no compared tensor in between
    suspects: dict[str, frozenset[str]] = {}
    right: set[str] = set()
    for node in model.graph.node:
        before = frozenset[str]().union(*(suspects.get(name, ()) for name in node.input))
        for name in node.output:
            suspects[name] = frozenset([name]) if differs.get(name) else frozenset() if name in differs else before
            right |= before if differs.get(name) is False else set()
    for node in model.graph.node:
        for name in node.output:
            if differs.get(name) and name not in right:
                return f"; the first layer that differs is '{node.name}' ({node.op_type}), which gives '{name}'"
    return ""


def _of_text(values: Array, batch: int, others: Array, place: tuple[int, int]) -> tuple[Array, Array] | None:
    """Return the parts of both tensors that belong to the text; None if they cannot be compared."""
    at, rows = place
    if values.dtype.kind != "f" or others.dtype.kind != "f" or not values.ndim or values.ndim != others.ndim:
        return None
    if len(values) % batch == 0 and len(others) % rows == 0:  # [rows, ...], or [rows * tokens, ...]
        one, other = values[: len(values) // batch], np.array_split(others, rows)[at]
        if one.size and one.shape == other.shape:
            return one, other
    return (values, others) if values.size and values.shape == others.shape else None
