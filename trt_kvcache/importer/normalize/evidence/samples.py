"""Samples of a decode step of a model as exported: a shape and a value for each of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.interface.mrope import place_positions
from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.probe import Probe, Shape
from trt_kvcache.importer.plan import OriginalRole, OriginalTensor

Array = npt.NDArray[Any]

_LONG = 512  # new tokens, at most, of the longest update: masks have that squared
_OTHER_SIZE = 6  # of axes that nothing explains, such as the length of an encoder's output
_SMALL = ((2, 5, 3), (1, 0, 4), (3, 9, 1), (2, 11, 2), (1, 1, 1))  # batch, past, new tokens
_HIDDEN_SHARE = 0.3
_VALUED = (OriginalRole.POSITIONS, OriginalRole.PAST_LENGTH, OriginalRole.PADDING_MASK, OriginalRole.MASK)
_LEARNING = ((2, 1), (5, 1), (2, 3), (7, 2), (9, 4), (4, 6))  # past, new tokens
_LEAST = ((0, 1), (1, 1), (0, 2))
_AROUND = ((-1, 1), (0, 2), (1, 1), (2, 3), (5, 2), (-2, 5))  # past beyond the rows that a cache keeps, new tokens


@dataclass(frozen=True)
class Sample:
    """One decode step of the model as exported.

    Attributes:
        batch, past, length, capacity: B, P, S and L.
        probe: evaluates the model in this step.
        own: the caller's own masks, by name, as what they let a query see, bool.
        wrapped: P is beyond the capacity, which only circular caches stand.
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
        """P + S."""
        return self.past + self.length

    def held(self, kept: int | None) -> int:
        """Rows of a past that grows, and keeps so many at most."""
        return self.past if kept is None else min(self.past, kept)


class Samples:
    """Samples of one model.

    Attributes:
        plain: steps in which every token is visible; the last one ends at the capacity.
        wrapped: steps beyond the capacity, for caches that may be circular.
        twins: two steps that differ in nothing but the past, unless the caches of the model have room for one only.
        blueprint: the model.
        capacity: tokens per sequence.
        fixed_length: S where the model fixes it, else 0.
        fixed_batch: whether the model fixes B.
        kept: how many rows caches keep that are cut to the newest ones; without those that keep the capacity.
    """

    def __init__(self, blueprint: Blueprint, interface: Interface, capacity: int) -> None:
        self.blueprint = blueprint
        self.capacity = capacity
        self._interface = interface
        self._room = interface.room
        self._valued = interface.of(*_VALUED)
        self._rng = np.random.default_rng(0)
        self._sizes = {a: d for t in interface.of(OriginalRole.TOKENS) for a, d in zip(t.axes, t.shape, strict=True)}
        self._dtypes = {
            t.name: onnx.helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, t.dtype.upper()))
            for t in interface.inputs.values()
        }
        self.fixed_length = next((d for a, d in self._sizes.items() if a == "sequence" and isinstance(d, int)), 0)
        self.fixed_batch = isinstance(self._sizes.get("batch"), int)
        fixed_length = self.fixed_length
        self.kept = tuple(sorted({t.kept for t in interface.inputs.values() if t.kept and t.kept < capacity}))
        around = [(2, k + d, s) for k in self.kept for d, s in _AROUND if k + d >= 0]
        sizes = [s for s in (*_SMALL, *around) if s[1] + (fixed_length or s[2]) <= capacity] or [(1, 0, 1)]
        last = fixed_length or min(2, capacity)
        if all(batch == 1 for batch, _, _ in sizes):  # little room: sequences may depend on each other all the same
            sizes += [(2, past, last) for past in sorted({0, max(0, capacity - last)})]
        # The last two differ in nothing but the past, from none to all that there is room for.
        ends = [(1, 0, fixed_length or min(capacity, _LONG)), (1, 0, last), (1, max(0, capacity - last), last)]
        self.plain = self._unique([self.step(*s) for s in (*sizes, *ends)])
        length = fixed_length or min(3, max(1, capacity // 2))
        fixed = bool(interface.of(OriginalRole.FIXED_CACHE))
        bounded = fixed or self._room is not None  # a past that grows knows no capacity
        room = max(0, capacity - length) if bounded else 9
        self.twins = (self.step(2, min(5, room // 2), length), self.step(2, min(9, room), length))
        beyond = ((2, capacity + 3, 1), (1, 3 * capacity, 2), (1, capacity - 1, 2))
        self.wrapped = self._unique([self.step(*s, wrapped=True) for s in beyond]) if fixed else ()

    @property
    def all(self) -> tuple[Sample, ...]:
        """Plain and wrapped ones."""
        return (*self.plain, *self.wrapped)

    @property
    def few(self) -> tuple[Sample, Sample]:
        """The two steps that guesses are made on: a short one, and the last one before the capacity."""
        return self.plain[0], self.plain[-1]

    @cached_property
    def learning(self) -> tuple[Sample, ...]:
        """Steps of one sequence, and of several P and S, that show how shapes grow with both."""
        fitting: list[tuple[int, int]] = []
        around = [(k + d, s) for k in self.kept for d, s in _AROUND if k + d >= 0]
        for sizes in ((*_LEARNING, *around, *_LEAST[: 2 * bool(around)]), _LEAST):
            if len({p for p, _ in fitting}) < 2 or not (self.fixed_length or len({s for _, s in fitting}) > 1):
                steps = dict.fromkeys((p, self.fixed_length or s) for p, s in sizes)
                fitting = [(p, s) for p, s in steps if p + s <= self.capacity]
        return tuple(self.step(1, p, s) for p, s in fitting or [(0, self.fixed_length or 1)])

    def _unique(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        seen: dict[tuple[int, int, int], Sample] = {}
        for sample in samples:
            seen.setdefault((sample.batch, sample.past, sample.length), sample)
        return tuple(seen.values())

    def step(
        self,
        batch: int,
        past: int,
        length: int,
        *,
        wrapped: bool = False,
        other: int = _OTHER_SIZE,
    ) -> Sample:
        """A step of these sizes; the model's own where it fixes them. `other`: of axes that nothing explains."""
        batch = int(b) if isinstance(b := self._sizes.get("batch"), int) else batch
        length = int(s) if isinstance(s := self._sizes.get("sequence"), int) else length
        sizes = {"batch": batch, "sequence": length, "past": past, "capacity": self.capacity}
        shapes = _Shapes(self._interface.inputs, sizes, self._room, other)
        values: dict[str, Array] = {}
        own: dict[str, Array] = {}
        for tensor in self._valued:
            held, shape = shapes.held(tensor), shapes[tensor.name]
            dtype = self._dtypes[tensor.name]
            if tensor.role is OriginalRole.POSITIONS:
                _check_positions(tensor, shape, batch, length)
                rows = np.broadcast_to(past + np.arange(length), (batch, length))
                values[tensor.name] = place_positions(rows, shape, tensor.axes).astype(dtype)
            elif tensor.role is OriginalRole.PAST_LENGTH:
                values[tensor.name] = np.full(shape, past, dtype)
            elif tensor.role is OriginalRole.PADDING_MASK:
                _check_padding(tensor, shape, batch)
                visible = np.zeros(shape)
                if self._room is not None:  # tokens first, then rows that hold nothing, then the new tokens
                    visible[:, :past] = visible[:, held:] = 1
                else:
                    visible[:, : held + length] = 1
                values[tensor.name] = visible.astype(dtype)
            elif tensor.role is OriginalRole.MASK:
                own[tensor.name] = self._rng.random(shape) >= _HIDDEN_SHARE
                own[tensor.name][..., 0] = True
                if own[tensor.name].all() and shape[-1] > 1:  # it would not show what is done with its numbers
                    own[tensor.name][..., -1] = False
                values[tensor.name] = (
                    np.where(own[tensor.name], 0, -256 * self._rng.integers(128, 256, shape)).astype(dtype)
                    if np.issubdtype(np.dtype(dtype), np.floating)
                    else own[tensor.name].astype(dtype)
                )
        probe = Probe(self.blueprint, shapes, values)
        return Sample(batch, past, length, self.capacity, probe, own, wrapped)


@dataclass(frozen=True, eq=False)
class _Shapes(Mapping[str, Shape]):
    """The shapes of a step's inputs, each made when asked for: deep models have many caches, and steps are many.

    Attributes:
        inputs: of the model.
        sizes: of the axes, by what they are.
        room: rows of a past that always has as many.
        other: size of axes that nothing explains.
    """

    inputs: Mapping[str, OriginalTensor]
    sizes: Mapping[str, int]
    room: int | None
    other: int

    def __getitem__(self, name: str) -> Shape:
        tensor = self.inputs[name]
        held = self.held(tensor)
        known = {**self.sizes, "past": held, "total": held + self.sizes["sequence"]}
        axes = zip(tensor.shape, tensor.axes, strict=True)
        return tuple(d if isinstance(d, int) else known.get(a, self.other) for d, a in axes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)

    def held(self, tensor: OriginalTensor) -> int:
        """Rows of the past that a tensor belongs to."""
        if self.room is not None:
            return self.room
        return self.sizes["past"] if tensor.kept is None else min(self.sizes["past"], tensor.kept)


def _check_positions(tensor: OriginalTensor, shape: Shape, batch: int, length: int) -> None:
    """Refuse positions that are not one for each token, per row or for all rows.

    Raises:
        UnsupportedModelError: naming them.
    """
    rows = [size for size, axis in zip(shape, tensor.axes, strict=True) if axis == "batch"]
    if shape[-1] != length:
        raise UnsupportedModelError(
            f"the positions '{tensor.name}' {list(tensor.shape)} are {shape[-1]} for a step of {length} "
            "tokens; supported is one for each token: export tokens and positions with the same length"
        )
    if any(size not in (1, batch) for size in rows):
        raise UnsupportedModelError(
            f"the positions '{tensor.name}' {list(tensor.shape)} have {rows[0]} rows for a batch of {batch}; supported "
            "is a row for each sequence, or one for all: export tokens and positions with the same batch"
        )


def _check_padding(tensor: OriginalTensor, shape: Shape, batch: int) -> None:
    """Refuse a padding mask that has no row for each sequence.

    Raises:
        UnsupportedModelError: naming it.
    """
    if shape[0] != batch:
        raise UnsupportedModelError(
            f"the padding mask '{tensor.name}' {list(tensor.shape)} has {shape[0]} rows for a batch of {batch}; "
            "supported is a row for each sequence: export tokens and mask with the same batch"
        )
