"""Sets the tolerances of the check, and finds the first difference between the outputs of both versions of a region."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from trt_kvcache.importer.check.hashed_graph import Graph
from trt_kvcache.importer.check.region import Region
from trt_kvcache.importer.operators import ROUNDS
from trt_kvcache.importer.protos import FLOATS, Array, dtype_name, elem_type_of, is_op
from trt_kvcache.importer.steps.cache_contents import CacheTensor
from trt_kvcache.importer.steps.drawn_inputs import Step
from trt_kvcache.importer.steps.probe import Term
from trt_kvcache.importer.steps.runnable import NARROW, all_types

_TOLERANCES: dict[int, float] = {TensorProto.FLOAT: 1e-4, TensorProto.FLOAT16: 2e-3, TensorProto.BFLOAT16: 1.5e-2}
"""Tolerances for computation in float32. Constants such as scales still have the precision of the model's type."""
_EXPORTED_TOLERANCE = 2e-2  # for float16 models that run as exported: both sides round in different orders
_ROUNDED_TOLERANCE = 5e-2  # a number close to the middle between two codes may be rounded to either code
_DIGITS = {TensorProto.FLOAT: 24, TensorProto.FLOAT16: 11, TensorProto.BFLOAT16: 8}  # bits of the significand


def tolerances(region: Region, *, wide: bool, caches: bool) -> tuple[float, float]:
    """Return the allowed differences of outputs and of cache rows, divided by the largest number, such as 1e-4.

    Both depend only on the original, so that rounding in the rewritten model cannot enlarge them. `wide`: both versions
    compute in float32. `caches`: the region reads caches.
    """
    original = region.models[0]
    kinds = all_types(original)
    joins = max(_TOLERANCES.get(kind, 1e-4) for kind in kinds | {TensorProto.FLOAT})
    narrow = not kinds.isdisjoint(NARROW)
    rows = joins if narrow else 1e-6
    if narrow and not wide:
        joins = _EXPORTED_TOLERANCE
    elif any(node.op_type in ROUNDS for node in original.graph.node):
        joins = rows = _ROUNDED_TOLERANCE
    if not region.presents and not caches:
        joins *= 4  # operators with weights also round inside
    return joins, rows


def added_rounding(region: Region) -> str:
    """Say where the rewritten region rounds to a narrower type, but the original does not; empty if nowhere.

    Results cannot show this rounding, because the comparison uses float32 or a tolerance. So this function reads the
    graphs: if a path from input to result has no narrowing cast in the original, the rewritten one must have none.
    """
    types = [all_types(model).intersection(NARROW) for model in region.models]
    if added := types[1] - types[0]:
        return f"the rewritten model computes in {dtype_name(min(added))} there, but the original does not"
    if not types[1]:
        return ""
    original, rewritten = (Graph(model) for model in region.models)
    caches = [((name,), (name,)) for name in original.inputs if name in rewritten.inputs]
    wide = [b.names for b in region.boundaries if b.elem_type not in NARROW and b.elem_type in FLOATS]
    wide += [names for names in caches if elem_type_of(original.inputs[names[0][0]]) == TensorProto.FLOAT]
    for names in wide:
        before, after = (_narrowest(graph, own) for graph, own in zip((original, rewritten), names, strict=True))
        for result in (*region.joins, *region.presents):
            if before.get(result, 0) > after.get(result, _DIGITS[TensorProto.FLOAT]):
                return (
                    f"the rewritten model rounds '{names[0][0]}' to a narrower type before '{result}', but the "
                    "original does not"
                )
    return ""


def _narrowest(graph: Graph, sources: Iterable[str]) -> dict[str, int]:
    """Map tensors to the bits of the significand that Casts leave of `sources`, on the most precise path."""
    digits = dict.fromkeys(sources, _DIGITS[TensorProto.FLOAT])
    for node in graph.nodes:
        ways = [digits[name] for name in graph.reads[id(node)] if name in digits]
        if ways and node.op_type not in ("Shape", "Size"):
            types = {a.i for a in node.attribute if a.name == "to"} if is_op(node, "Cast") else set()
            width = min(max(ways), *(_DIGITS[kind] for kind in types & _DIGITS.keys()), _DIGITS[TensorProto.FLOAT])
            digits |= {name: width for name in node.output if name and name not in digits}
    return digits


def cache_differs(
    cache: CacheTensor, step: Step, first: Array, second: Array, rows: Sequence[int], limit: int | None, exact: float
) -> tuple[str, bool]:
    """Describe the first difference of a cache, or "". Also return True if it is in a token from before the step.

    Only `rows` of the batch are compared. The original keeps at most `limit` cache rows of each sequence.
    """
    assert cache.update is not None
    try:
        logical = cache.to_logical(second)
    except ValueError:
        return f"it has shape {list(second.shape)} in the rewritten model, which does not match the plan", False
    a, b = (np.moveaxis(v, cache.update.sequence_axis, 1) for v in (first, logical))
    if a.shape[2:] != b.shape[2:] or len(a) != len(b):
        shapes = f"{list(first.shape)} in the original, {list(logical.shape)} in the rewritten model"
        return f"it has shape {shapes}", False
    for row in rows:
        start = step.starts[row]
        end = start + step.length
        oldest = max(0, end - b.shape[1], end - (limit or end))
        # In a ring of R rows, token t is in row t modulo R.
        x, y = (v[row][np.arange(oldest, end) % v.shape[1]] for v in (a, b))
        at = first_difference(x, y, exact)
        if at is not None:
            token = oldest + at[0]
            return f"sequence {row}, token {token}: {both(x[at], y[at])}", bool(token < start)
    return "", False


def _batch_axis(shape: Sequence[Term]) -> int | None:
    return next((i for i, t in enumerate(shape) if t.batch), None)


def take(values: Array, shape: Sequence[Term], rows: slice, batch: int) -> Array:
    """Return the values of some batch rows of a tensor; the whole tensor if it has no batch axis."""
    axis = _batch_axis(shape)
    if axis is None:
        return values
    size = values.shape[axis] // batch
    return values[(slice(None),) * axis + (slice(rows.start * size, rows.stop * size),)]


def sequence_axis(shape: Sequence[Term]) -> int | None:
    """Return the axis along which the tokens of a step lie; None if the shape has no such axis."""
    return next((i for i, t in enumerate(shape) if t.sequence == 1 and t.factor == 1 and not t.batch), None)


def token(values: Array, shape: Sequence[Term], place: int) -> Array:
    """Return the values of one token of a step; the whole tensor if it has no axis of tokens."""
    axis = sequence_axis(shape)
    return values if axis is None else np.take(values, [place], axis)


def last(values: Array, shape: Sequence[Term], count: int, length: int) -> Array:
    """Return the last `count` of `length` positions of a tensor; the whole tensor if it has no axis of tokens."""
    axes = [i for i, t in enumerate(shape) if t.sequence] + [i for i, n in enumerate(values.shape) if i and n == length]
    if not axes:
        return values
    return np.moveaxis(np.moveaxis(values, axes[0], 0)[-count:], 0, axes[0])


def joined(parts: list[Array], shape: Sequence[Term]) -> Array:
    """Concatenate the results of several runs along the batch."""
    axis = _batch_axis(shape)
    return parts[0] if axis is None or len(parts) == 1 else np.concatenate(parts, axis)


def first_difference(a: Array, b: Array, tolerance: float) -> tuple[int, ...] | None:
    """Return the first index where arrays differ by more than `tolerance` times the largest number of `a`."""
    if a.dtype.kind in "iub" and a.dtype == b.dtype and tolerance < _ROUNDED_TOLERANCE:
        other = np.argwhere(a != b)
        return tuple(int(i) for i in other[0]) if len(other) else None
    if a.dtype == np.float32 == b.dtype and a.shape == b.shape and a.size:  # fast path: most arrays are close
        with np.errstate(invalid="ignore", over="ignore"):
            far, low, high = np.abs(a - b).max(), a.min(), a.max()
        if far <= tolerance * max(-low, high, 1e-3):  # False if a number is not finite
            return None
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    finite = np.isfinite(x)
    scale = float(np.abs(x[finite]).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        far = ~((np.abs(x - y) <= tolerance * max(scale, 1e-3)) | (x == y) | (np.isnan(x) & np.isnan(y)))
    return tuple(int(i) for i in np.argwhere(far)[0]) if far.any() else None


def both(original: Any, rewritten: Any) -> str:
    """Return two differing numbers, of the original and the rewritten model, as a text for a message."""
    return f"{_number(original)} in the original, {_number(rewritten)} in the rewritten model"


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, (float, np.floating)) else str(value)
