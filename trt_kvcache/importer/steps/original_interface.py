"""Translates between the interfaces of an exported model and of its rewritten form.

So code that runs the rewritten model can also run the original:

    cache [B, N, L, D], write_indices [B]   ->   past [1, N, P, D] for each row, P its write index
    tokens [B, S]                           ->   tokens [1, S], positions P .. P + S - 1, padding mask: P + S ones
    present [1, N, P + S, D] for each row   ->   cache [B, N, L, D] with rows 0 .. P + S - 1 replaced
    shifted cache of W rows, masks over W   <->  the newest rows at the end; masks that hide the rows before them
    past that has the newest rows only      <->  the same rows of the cache; its other rows are unchanged
    float32 cache that the model casts      <->  cache of the type to which the model casts it

A growing past has one length for all rows of a batch, so each row runs separately. If the model was exported for a
fixed batch larger than one, all rows run together, and must start at the same position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, OriginalRole, OriginalTensor, Role, UpdateMode
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.steps.cache_contents import find_caches, numpy_dtype, size_of
from trt_kvcache.importer.steps.drawn_inputs import rows_together
from trt_kvcache.input_values import from_lengths, place

Feeds = dict[str, Array]

_CACHES = (OriginalRole.GROWING_CACHE, OriginalRole.FIXED_CACHE)
COUNTED = {
    OriginalRole.POSITIONS: Role.POSITIONS,
    OriginalRole.PAST_LENGTH: None,
    OriginalRole.PADDING_MASK: None,
    OriginalRole.MASK: Role.MASK,
}
"""Roles of original inputs whose values follow from lengths.

Each is mapped to the role that the rewritten model's input of this name has if its values are the same. If the input
has another role, only its shape is used.
"""


class OriginalInterface:
    """Translates one step between the interfaces of the original and of the rewritten model.

    Raises `UnsupportedModelError` if the plan does not say at which rows a step writes.

    Attributes:
        together: the number of rows in one run of the original; None: each row runs separately.
        ragged: True if the original's inputs can give each sequence of a batch its own length.
        past_rows: the most rows of each past input that keeps only its newest rows, by name.
    """

    def __init__(self, plan: CachePlan) -> None:
        self._plan = plan
        self._inputs = [t for t in plan.original if t.io == "input"]
        names = {t.name for t in plan.tensors if t.io == "output"}
        # The rewritten model does not have the other outputs, such as counters.
        self._outputs = [
            t for t in plan.original if t.io == "output" and (t.role is not OriginalRole.OTHER or t.name in names)
        ]
        self._past_of = {c.output: c.role.name for c in find_caches(plan)}
        self._axes = {t.name: t.axes for t in plan.tensors if t.io == "input"}
        self.past_rows = {
            t.name: t.window_rows for t in self._inputs if t.window_rows is not None and t.role in _CACHES
        }
        self._circular = {c.past for c in plan.caches if c.mode is UpdateMode.CIRCULAR}
        starts = plan.tensor(Role.WRITE_INDICES)
        tokens = next((t for t in self._inputs if t.role is OriginalRole.TOKENS), None)
        if starts is None or tokens is None:
            raise UnsupportedModelError(
                "cannot tell at which position a step of the original starts: the rewritten model must have exactly "
                "one input for write indices, and the original one for tokens"
            )
        self._starts = starts.name
        self._counted = (tokens.name, tokens.axes.index("sequence") if "sequence" in tokens.axes else 1)
        roles = {t.name: t.role for t in plan.tensors if t.io == "input"}
        self._same = {
            t.name for t in self._inputs if t.name in roles and roles[t.name] is COUNTED.get(t.role, roles[t.name])
        }
        self.together = rows_together(plan.original)
        self.ragged = all(_is_of_rows(t, t.name in self._same) for t in self._inputs)

    def _length(self, feeds: Mapping[str, Array]) -> int:
        name, axis = self._counted
        return int(feeds[name].shape[axis])

    def groups(self, feeds: Mapping[str, Array], *, together: bool = False) -> list[tuple[slice, int]]:
        """Return groups of batch rows that the original runs together, each with its number of past tokens.

        `together`: make the groups as large as the original allows.
        """
        starts = [int(n) for n in np.atleast_1d(feeds[self._starts])]
        if together and (self.ragged or len(set(starts)) == 1):
            return [(slice(0, len(starts)), max(starts))]
        if self.together is None:
            return [(slice(row, row + 1), past) for row, past in enumerate(starts)]
        if len(set(starts)) > 1:
            raise OptionError(
                f"the model was exported for {self.together} rows that start at the same position, but these rows "
                f"start at {starts}"
            )
        return [(slice(0, len(starts)), starts[0])]

    def feeds(self, feeds: Mapping[str, Array], rows: slice, past: int, without: Collection[str] = ()) -> Feeds:
        """Return the original's inputs, except `without`, for some batch rows with `past` tokens before the step.

        `feeds` are the rewritten model's inputs by name, with caches in their logical shape.
        """
        length = self._length(feeds)
        sizes = {"batch": rows.stop - rows.start, "sequence": length, "past": past, "total": past + length}
        return {t.name: self._input(t, feeds, rows, sizes) for t in self._inputs if t.name not in without}

    def _any_size(self, dim: int | str, axis: str, feeds: Mapping[str, Array], sizes: Mapping[str, int]) -> int:
        """Return the size of an axis: fixed, given by its meaning, given by its symbol in another input, or 1."""
        if isinstance(dim, int) or axis in sizes:
            return dim if isinstance(dim, int) else sizes[axis]
        known = (t for t in self._inputs if t.name in self._same and len(t.shape) == feeds[t.name].ndim)
        return next((int(feeds[t.name].shape[t.shape.index(dim)]) for t in known if dim in t.shape), 1)

    def _input(
        self, tensor: OriginalTensor, feeds: Mapping[str, Array], rows: slice, sizes: Mapping[str, int]
    ) -> Array:
        dtype = numpy_dtype(tensor.dtype)
        if tensor.role in _CACHES:
            return self._past(tensor, feeds, rows, sizes["past"])
        if tensor.role is OriginalRole.SWITCH:
            dims = [size_of(d) or sizes.get(a, 1) for d, a in zip(tensor.shape, tensor.axes, strict=True)]
            return np.full(dims, tensor.on, dtype)
        if tensor.name in self._same and feeds[tensor.name].ndim == len(tensor.shape):
            axes = self._axes[tensor.name] if "batch" in self._axes[tensor.name] else tensor.axes
            taken = _take(feeds[tensor.name], axes, rows)
            # the rewritten model's mask covers the whole capacity
            if tensor.role is OriginalRole.MASK and tensor.axes[-1] == "total":
                taken = np.ascontiguousarray(taken[..., : sizes["total"]])
            return taken.astype(dtype)
        if tensor.role not in COUNTED:  # the rewrite dropped this input, which the model only returned
            return np.zeros(
                [self._any_size(d, a, feeds, sizes) for d, a in zip(tensor.shape, tensor.axes, strict=True)], dtype
            )
        shape = self._shape(tensor, sizes)
        past, length = sizes["past"], sizes["sequence"]
        starts = np.atleast_1d(feeds[self._starts])[rows]
        starts = starts[:1] if (starts == past).all() else starts
        same = {OriginalRole.POSITIONS: Role.POSITIONS, OriginalRole.PAST_LENGTH: Role.WRITE_INDICES}
        if tensor.role in same and (known := from_lengths(same[tensor.role], starts, length, starts)):
            return place(known, shape, tensor.axes).astype(dtype)
        # If the past keeps only the newest rows, the last column of a mask belongs to the newest token.
        places = np.arange(shape[-1]) + (0 if tensor.window_rows is None else past + length - shape[-1])
        if tensor.role is OriginalRole.PADDING_MASK:
            return np.broadcast_to((places >= 0) & (places < past + length), shape).astype(dtype)
        visible = (places >= 0) & (places <= past + np.arange(length)[:, None])
        allowed = np.broadcast_to(visible, shape)
        return np.where(allowed, 0, np.finfo(dtype).min).astype(dtype) if dtype.kind == "f" else allowed.astype(dtype)

    def _past(self, tensor: OriginalTensor, feeds: Mapping[str, Array], rows: slice, past: int) -> Array:
        if tensor.name not in feeds:
            raise UnsupportedModelError(
                f"the original has a cache input '{tensor.name}', but the rewritten model does not"
            )
        whole, dtype = feeds[tensor.name][rows], numpy_dtype(tensor.dtype)
        if tensor.role is OriginalRole.FIXED_CACHE:
            return _cast(whole, dtype)
        axis = tensor.axes.index("past")
        first = 0 if tensor.window_rows is None else max(0, past - tensor.window_rows)
        values = _cast(whole[(slice(None),) * axis + (slice(first, past),)], dtype)
        size = tensor.shape[axis]
        if isinstance(size, int):  # in a shifted cache of fixed length, rows without a token come first
            values = np.pad(values, [(size - values.shape[a], 0) if a == axis else (0, 0) for a in range(values.ndim)])
        return np.ascontiguousarray(values)

    def _shape(self, tensor: OriginalTensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
        capacity = max(c.capacity for c in self._plan.caches)
        known = {**sizes, "capacity": self._plan.options.capacity or capacity}
        if tensor.window_rows is not None:
            known["total"] = min(sizes["past"], tensor.window_rows) + sizes["sequence"]
        shape = []
        for at, (dim, axis) in enumerate(zip(tensor.shape, tensor.axes, strict=True)):
            size = size_of(dim)
            size = known.get(axis) if size is None else size
            if size is None:
                raise OptionError(f"cannot tell how long axis {at} of the original's input '{tensor.name}' is")
            shape.append(size)
        return tuple(shape)

    def outputs(self, feeds: Mapping[str, Array], ran: Iterable[tuple[slice, int, Mapping[str, Array]]]) -> Feeds:
        """Make the rewritten model's outputs from runs of the original: `ran` has batch rows, past tokens, outputs."""
        runs, results = list(ran), Feeds()
        for tensor in self._outputs:
            name, axes = tensor.name, tensor.axes
            if tensor.role in _CACHES and name in self._past_of:
                # Rows after the tokens have no meaning. Operators that write a new cache may leave any numbers there.
                results[name] = feeds[self._past_of[name]].copy()
                for rows, before, outputs in runs:
                    self._place(tensor, results[name], outputs[name], rows, before + self._length(feeds))
                continue
            values = [outputs[name] for _, _, outputs in runs]
            if len({np.delete(v.shape, axes.index("batch")).tobytes() for v in values if "batch" in axes}) > 1:
                raise UnsupportedModelError(
                    f"the original's output '{name}' depends in shape on the length of each sequence (here "
                    f"{' and '.join(sorted({str(list(v.shape)) for v in values}))}), but the rewritten model has one "
                    "length for all sequences. Outputs must not show how many tokens a cache holds: export without "
                    "this output"
                )
            results[name] = np.concatenate(values, axes.index("batch")) if "batch" in axes else values[0]
        return results

    def _place(self, tensor: OriginalTensor, present: Array, values: Array, rows: slice, tokens: int) -> None:
        """Copy cache rows with tokens from the original to the rewritten model; copy a circular cache whole."""
        past = self._past_of[tensor.name]
        places = [i for i, a in enumerate(tensor.axes) if a in ("past", "total", "capacity")]
        axis = places[0] if places else next(c.sequence_axis for c in self._plan.caches if c.past == past)
        source, target = np.moveaxis(values, axis, 0), np.moveaxis(present[rows], axis, 0)
        if tensor.window_rows is not None:
            source = source[-tokens:]
        elif past not in self._circular:
            source = source[:tokens]
        first = 0 if tensor.window_rows is None else tokens - len(source)
        target[first : first + len(source)] = source


def _cast(cache: Array, dtype: np.dtype[Any]) -> Array:
    """Cast a cache to its type in the original. Numbers beyond the range of float16 become the largest float16."""
    if dtype == np.float16 and cache.dtype == np.float32:
        largest = np.finfo(dtype).max
        cache = cache.clip(-largest, largest)
    return cache.astype(dtype, copy=False)


def _is_of_rows(tensor: OriginalTensor, is_same: bool) -> bool:
    """True if an input can give each sequence of one run its own length."""
    if tensor.role not in COUNTED:
        return tensor.role is not OriginalRole.GROWING_CACHE
    open_axes = [a for d, a in zip(tensor.shape, tensor.axes, strict=True) if size_of(d) is None]
    return "batch" in open_axes and (is_same or tensor.role in (OriginalRole.POSITIONS, OriginalRole.PAST_LENGTH))


def _take(values: Array, axes: Sequence[str], rows: slice) -> Array:
    if "batch" not in axes or values.shape[axes.index("batch")] == 1:
        return values
    return values[(slice(None),) * axes.index("batch") + (rows,)]
