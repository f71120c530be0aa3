"""Makes sample steps to recognize caches with: a shape and a value for each input of the exported model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import OriginalRole, OriginalTensor
from trt_kvcache.importer.interface.exported_interface import Interface
from trt_kvcache.importer.interface.role_evidence import place_positions
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.steps.probe import Blueprint, Probe, Shape

_LONG = 512  # the most new tokens of a step: the size of masks grows with the square
_OTHER_SIZE = 6  # size of axes of unknown meaning, such as the length of an encoder's output
_FEW_SIZES = ((2, 5, 3), (1, 0, 4), (3, 9, 1), (2, 11, 2), (1, 1, 1))  # batch, past, new tokens
_HIDDEN_SHARE = 0.3  # of the keys, in random masks
_MOST = 1 << 28  # the most numbers that an input may have
_VALUED = (OriginalRole.POSITIONS, OriginalRole.PAST_LENGTH, OriginalRole.PADDING_MASK, OriginalRole.MASK)


@dataclass(frozen=True)
class Sample:
    """One decode step of the model as exported.

    Attributes:
        batch, past, length, capacity: sequences B, past tokens P, new tokens S, and capacity L.
        probe: evaluates tensors of the model in this step.
        own: a bool array for each mask input, by name: True for keys that a query sees.
        wrapped: True if P is larger than the capacity, which only circular caches support.
    """

    batch: int
    past: int
    length: int
    capacity: int
    probe: Probe
    own: Mapping[str, Array]
    wrapped: bool = False

    @property
    def total(self) -> int:
        """P + S, the number of tokens after the step."""
        return self.past + self.length

    def rows_in_cache(self, kept: int | None) -> int:
        """Return the rows in a growing cache before the step, if it keeps only its newest `kept` rows (None: all)."""
        return self.past if kept is None else min(self.past, kept)


class Samples:
    """Makes sample steps of one model.

    Attributes:
        plain: steps in which every query sees all tokens up to its own; after the last step, the capacity is full.
        few: the first and the last of `plain`; guesses use these two only.
        wrapped: steps beyond the capacity, for caches that may be circular.
        twins: two steps that differ only in P; two equal steps if the caches allow only one P.
        blueprint: the model, prepared for computing single tensors without weights.
        interface: the inputs and outputs of the model.
        capacity: tokens per sequence.
        fixed_length: S if the model has a fixed S, else 0.
    """

    def __init__(self, blueprint: Blueprint, interface: Interface, capacity: int) -> None:
        self.blueprint = blueprint
        self.capacity = capacity
        self.interface = interface
        self._rng = np.random.default_rng(0)
        self._sizes = {a: d for t in interface.of(OriginalRole.TOKENS) for a, d in zip(t.axes, t.shape, strict=True)}
        fixed = self.fixed_length = d if isinstance(d := self._sizes.get("sequence"), int) else 0
        small = [s for s in _FEW_SIZES if s[1] + (fixed or s[2]) <= capacity] or [(1, 0, 1)]
        last = fixed or min(2, capacity)
        # The last two steps differ only in the past: no tokens, and as many as fit.
        ends = [(1, 0, fixed or min(capacity, _LONG)), (1, 0, last), (1, max(0, capacity - last), last)]
        self.plain = tuple({(s.batch, s.past, s.length): s for s in (self.step(*s) for s in (*small, *ends))}.values())
        self.few = self.plain[0], self.plain[-1]
        length = fixed or min(3, max(1, capacity // 2))
        has_ends = bool(interface.of(OriginalRole.FIXED_CACHE))  # a growing past has no capacity
        longest = max(0, capacity - length) if has_ends else 9
        self.twins = self.step(2, min(5, longest // 2), length), self.step(2, min(9, longest), length)
        beyond = ((2, capacity + 3, 1), (1, 3 * capacity, 2), (1, capacity - 1, 2)) if has_ends else ()
        self.wrapped = tuple(self.step(*s, wrapped=True) for s in beyond)

    def step(
        self, batch: int, past: int, length: int, *, wrapped: bool = False, other: int | None = _OTHER_SIZE
    ) -> Sample:
        """Make a sample step of these sizes, unless the model fixes them; `other` is for axes of unknown meaning."""
        batch, length = (d if isinstance(d := self._sizes.get(a), int) else size for a, size in
                         (("batch", batch), ("sequence", length)))  # fmt: skip
        shapes: dict[str, Shape] = {}
        values: dict[str, Array] = {}
        own: dict[str, Array] = {}
        for tensor in self.interface.inputs.values():
            in_cache = past if tensor.window_rows is None else min(past, tensor.window_rows)
            total = in_cache + length
            sizes = {
                "batch": batch, "sequence": length, "capacity": self.capacity, "past": in_cache, "total": total,
            }  # fmt: skip
            axes = list(zip(tensor.shape, tensor.axes, strict=True))
            if other is None and not all(isinstance(d, int) or a in sizes for d, a in axes):
                continue
            known = (d if isinstance(d, int) else sizes.get(a, other or 0) for d, a in axes)
            shapes[tensor.name] = shape = tuple(known)
            if tensor.role not in _VALUED:
                continue
            _check_sizes(tensor, shape, batch, length)
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, tensor.dtype.upper())))
            if tensor.role is OriginalRole.POSITIONS:
                rows = np.broadcast_to(past + np.arange(length), (batch, length))
                value = place_positions(rows, shape, tensor.axes)
            elif tensor.role is OriginalRole.PAST_LENGTH:
                value = np.full(shape, past)
            elif tensor.role is OriginalRole.PADDING_MASK:
                value = np.zeros(shape)
                value[:, :total] = 1
            else:
                own[tensor.name] = value = self._mask(shape)
                if np.issubdtype(dtype, np.floating):
                    value = np.where(value, 0, -256 * self._rng.integers(128, 256, shape))
            values[tensor.name] = value.astype(dtype)
        return Sample(batch, past, length, self.capacity, Probe(self.blueprint, shapes, values), own, wrapped)

    def _mask(self, shape: Shape) -> Array:
        seen: Array = self._rng.random(shape) >= _HIDDEN_SHARE
        seen[..., 0] = True
        if seen.all() and shape[-1] > 1:  # a mask that hides nothing would not show how the model uses it
            seen[..., -1] = False
        return seen


def _check_sizes(tensor: OriginalTensor, shape: Shape, batch: int, length: int) -> None:
    """Refuse an input that is too large, or lacks one position for each token or one row for each sequence."""
    shown = f"the {tensor.role.value.replace('_', ' ')} '{tensor.name}' {list(tensor.shape)}"
    if math.prod(shape) > _MOST:
        raise UnsupportedModelError(
            f"{shown} has {math.prod(shape)} numbers in one step; the importer supports at most {_MOST}: export the "
            "model with smaller sizes"
        )
    rows = [size for size, axis in zip(shape, tensor.axes, strict=True) if axis == "batch"]
    if tensor.role is OriginalRole.POSITIONS and shape[-1] != length:
        raise UnsupportedModelError(
            f"{shown} has {shape[-1]} positions for a step of {length} tokens; it must have one for each token: export "
            "tokens and positions with the same length"
        )
    alike = (batch,) if tensor.role is OriginalRole.PADDING_MASK else (1, batch)
    if tensor.role in (OriginalRole.POSITIONS, OriginalRole.PADDING_MASK) and any(size not in alike for size in rows):
        raise UnsupportedModelError(
            f"{shown} has {rows[0]} rows for a batch of {batch}; it must have one row for each sequence: export it "
            "with the same batch as the tokens"
        )
