"""Say which inputs and outputs of a model as exported change, old to new."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from trt_kvcache.importer.plan import InterfaceChange, OriginalRole, OriginalTensor
from trt_kvcache.importer.protos import dtype_name, elem_type_of, shape_of

_WHY = {
    OriginalRole.PADDING_MASK: "masks follow from write_indices and nonpad_kv_seqlen; do not pad on the left",
    OriginalRole.PAST_LENGTH: "write_indices says, per sequence, how many tokens the cache holds",
    OriginalRole.POSITIONS: "new tokens are at write_indices, write_indices + 1, ...",
    OriginalRole.MASK: "masks follow from write_indices and nonpad_kv_seqlen",
}
_WHY_SHIFTED = "a query sees the tokens that a cache holds up to its own, which write_indices says"
_COLUMNS = "a column is a row of the cache: those of new tokens begin at write_indices, not after all rows of the past"
PASSED_ON = "an input unchanged"
_ADDED = {
    "write_indices": "tokens in the cache before this step: the row of the first new token, per sequence",
    "nonpad_kv_seqlen": "write_indices + number of new tokens, per sequence",
}


def find_changes(
    exported: Sequence[OriginalTensor], model: onnx.ModelProto, counts: set[str], copies: set[str]
) -> tuple[InterfaceChange, ...]:
    """Compare the interface of a model as exported with that of its canonical form.

    Args:
        exported: inputs and outputs of the model as exported.
        model: the canonical form.
        counts: outputs that were dropped because they count tokens.
        copies: outputs that were dropped because they are an input unchanged.
    """
    changes: list[InterfaceChange] = []
    circular, known = _circular(model), {t.name for t in exported}
    rows = next((t.fixed_rows for t in exported if t.role is OriginalRole.GROWING_CACHE and t.io == "input"), None)
    for io, values in (("input", model.graph.input), ("output", model.graph.output)):
        current = {v.name: v for v in values}
        for tensor in (t for t in exported if t.io == io):
            if tensor.name not in current:
                why = _WHY.get(tensor.role, "nothing reads it")
                if tensor.kept is not None and tensor.role is OriginalRole.MASK:
                    why = _WHY_SHIFTED
                if tensor.name in copies:
                    why = PASSED_ON
                if tensor.name in counts:
                    why = "the caller counts tokens itself"
                changes.append(InterfaceChange(io, _old(tensor, rows), "", why))
                continue
            shape, dtype = shape_of(current[tensor.name]) or (), dtype_name(elem_type_of(current[tensor.name]))
            if tensor.rows_only:
                new = _text(tensor.name, [shape[0] if isinstance(shape[0], int) else "B", *shape[1:]])
                changes.append(
                    InterfaceChange("output", _old(tensor), new, "the whole cache, updated in place: copy no rows")
                )
            elif tensor.role is OriginalRole.MASK and rows is not None:
                changes.append(InterfaceChange(io, _old(tensor, rows), _text(tensor.name, shape), _COLUMNS))
            elif tensor.role is OriginalRole.GROWING_CACHE:
                changes.append(_bounded(io, tensor, shape, tensor.name in circular))
            if dtype != tensor.dtype:
                old, new = f"{tensor.name} {tensor.dtype}", f"{tensor.name} {dtype}"
                changes.append(InterfaceChange(io, old, new, f"the model reads and writes it as {dtype}"))
        added = {name: value for name, value in current.items() if name not in known}
        for name, value in added.items():
            new = _text(name, shape_of(value) or ())
            changes.append(InterfaceChange(io, "", new, _ADDED.get(name.rstrip("_"), "")))
    return tuple(changes)


def _old(tensor: OriginalTensor, rows: int | None = None) -> str:
    names = {"batch": "B", "sequence": "S", "past": "P", "total": "P + S", "capacity": "L"}
    if rows is not None:
        names["total"] = f"{rows} + S"
    if tensor.io == "output" and tensor.role is OriginalRole.GROWING_CACHE:
        names["past"] = "P + S"
    if tensor.kept is not None:
        names |= {"past": f"min({names['past']}, {tensor.kept})", "total": f"min(P, {tensor.kept}) + S"}
    dims = (
        names.get(a, str(d)) if not isinstance(d, int) else str(d)
        for a, d in zip(tensor.axes, tensor.shape, strict=True)
    )
    return _text(tensor.name, dims)


def _circular(model: onnx.ModelProto) -> set[str]:
    """Names of the caches that are circular buffers, before and after their update."""
    updates = [n for n in model.graph.node if n.op_type == "TensorScatter"]
    windows = [n for n in updates if any(a.name == "mode" and a.s == b"circular" for a in n.attribute)]
    return {name for n in windows for name in (n.input[0], n.output[0])}


def _bounded(io: str, tensor: OriginalTensor, shape: tuple[int | str, ...], circular: bool) -> InterfaceChange:
    """A growing cache and its buffer: as long as the capacity, or as a window."""
    axis = tensor.axes.index("past") if circular and "past" in tensor.axes else None
    rows = str(shape[axis]) if axis is not None and axis < len(shape) else "L"
    what = "a circular buffer of a window" if circular else "a buffer of fixed capacity L"
    if axis is not None and tensor.kept is not None and isinstance(tensor.shape[axis], int):
        rows = str(tensor.kept)
        what = f"token t lies in row t mod {rows}, and no row moves"
    names = {"batch": "B", "past": rows}
    dims = [
        str(d) if isinstance(d, int) and a != "past" else names.get(a, str(d))
        for a, d in zip(tensor.axes, tensor.shape, strict=True)
    ]
    if tensor.order is not None:
        dims = [dims[tensor.order.index(axis)] for axis in range(len(dims))]
        what += ", in another layout"
    return InterfaceChange(io, _old(tensor), _text(tensor.name, dims), f"{what}, updated in place")


def _text(name: str, dims: Iterable[int | str]) -> str:
    return f"{name} [{', '.join(map(str, dims))}]"
