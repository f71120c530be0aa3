"""Describe how inputs and outputs of a model change from export to canonical form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from trt_kvcache.importer.plan import InterfaceChange, OriginalRole, OriginalTensor
from trt_kvcache.importer.protos import dtype_name, elem_type_of, shape_of

PASSED_ON = "an input unchanged"
_WHY = {
    OriginalRole.PADDING_MASK: "masks follow from write_indices and nonpad_kv_seqlen; do not pad on the left",
    OriginalRole.PAST_LENGTH: "write_indices says, per sequence, how many tokens the cache holds",
    OriginalRole.POSITIONS: "new tokens are at write_indices, write_indices + 1, ...",
    OriginalRole.MASK: "masks follow from write_indices and nonpad_kv_seqlen",
}
_ADDED = {
    "write_indices": "tokens in the cache before this step: the row of the first new token, per sequence",
    "nonpad_kv_seqlen": "write_indices + number of new tokens, per sequence",
}
_SIZES = {"batch": "B", "sequence": "S", "past": "P", "total": "P + S", "capacity": "L"}


def find_changes(
    exported: Sequence[OriginalTensor], model: onnx.ModelProto, counts: set[str], copies: set[str]
) -> tuple[InterfaceChange, ...]:
    """Compare the interface of a model as exported with that of its canonical form.

    Args:
        exported: inputs and outputs of the model as exported.
        model: the canonical form.
        counts: outputs that were dropped because they count tokens.
        copies: outputs that were dropped because they return an input unchanged.
    """
    changes: list[InterfaceChange] = []
    known = {t.name for t in exported}
    for io, values in (("input", model.graph.input), ("output", model.graph.output)):
        current = {v.name: v for v in values}
        for tensor in (t for t in exported if t.io == io):
            old = _text(tensor.name, _dims(tensor))
            if tensor.name not in current:
                why = _WHY.get(tensor.role, "nothing reads it")
                why = PASSED_ON if tensor.name in copies else why
                why = "the caller counts tokens itself" if tensor.name in counts else why
                changes.append(InterfaceChange(io, old, "", why))
                continue
            shape, dtype = shape_of(current[tensor.name]) or (), dtype_name(elem_type_of(current[tensor.name]))
            if tensor.role is OriginalRole.GROWING_CACHE:
                new = _text(tensor.name, ["B" if i == 0 and isinstance(d, str) else d for i, d in enumerate(shape)])
                changes.append(InterfaceChange(io, old, new, "a buffer of fixed capacity, updated in place"))
            if dtype != tensor.dtype:
                old, new = f"{tensor.name} {tensor.dtype}", f"{tensor.name} {dtype}"
                changes.append(InterfaceChange(io, old, new, f"the model reads and writes it as {dtype}"))
        added = {name: value for name, value in current.items() if name not in known}
        for name, value in added.items():
            new = _text(name, shape_of(value) or ())
            changes.append(InterfaceChange(io, "", new, _ADDED.get(name.rstrip("_"), "")))
    return tuple(changes)


def _dims(tensor: OriginalTensor) -> Iterable[int | str]:
    """The sizes of an exported tensor; symbols are named by their meaning."""
    is_present = tensor.io == "output" and tensor.role is OriginalRole.GROWING_CACHE
    names = {**_SIZES, "past": "P + S"} if is_present else _SIZES
    return [d if isinstance(d, int) else names.get(a, d) for a, d in zip(tensor.axes, tensor.shape, strict=True)]


def _text(name: str, dims: Iterable[int | str]) -> str:
    return f"{name} [{', '.join(map(str, dims))}]"
