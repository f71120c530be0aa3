"""Runs of a cache update in steps of a decode, before anything is known of inputs but their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import FLOATS, dims, elem_type
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.evidence.probe import Array, Blueprint, Probe, Shape
from trt_kvcache.importer.normalize.evidence.reach import deciding
from trt_kvcache.importer.plan import Dim
from trt_kvcache.importer.protos import shape_of

Perm = tuple[int, ...]

ROWS = 32
"""Rows of a past that may have more than there are tokens, if nothing says how many, or if it is cut."""

LARGEST = 1 << 22
"""Elements of a past that is not cut."""

_SMALL = 1 << 16  # elements of a past; a larger one is cut to few rows, heads or channels, if the update runs so
_MOST = 30  # of the numbers in a past


@dataclass(frozen=True, eq=False)
class Step:
    """A step of which the probe knows shapes, and where its tokens go.

    Attributes:
        batch, past, length: sequences, tokens before it, and new ones, where the model leaves them open.
        symbols: the sizes of open dimensions.
        lengths: those of them that are new tokens.
    """

    batch: int
    past: int
    length: int
    probe: Probe
    symbols: dict[Dim, int]
    lengths: set[Dim]

    def shape(self, tensor: gs.Tensor) -> Shape | None:
        """The shape of a tensor; guessed where a mask keeps it from being known."""
        named = dims(tensor)
        unknown = [a for a, d in enumerate(named or ()) if isinstance(d, str) and d not in self.symbols]
        is_plain = sum(map(bool, unknown)) == 1 and self.lengths.isdisjoint(named or ())
        if named is None or (unknown and not is_plain):
            known = self.probe.shape(tensor.name)
            if named is None or (known is not None and 0 not in known):
                return known
        guessed = ((d, self.length if axis else self.batch) for axis, d in enumerate(named))
        return tuple(d if isinstance(d, int) else self.symbols.get(d, size) for d, size in guessed)


class GuessedSteps:
    """Makes steps of one model, for its possible cache updates."""

    def __init__(self, blueprint: Blueprint, candidates: Sequence[Candidate]) -> None:
        self._blueprint = blueprint
        self._positions = {name for c in candidates for name in deciding(*c.where).positions}
        self._named: set[Dim] = {d for c in candidates for t in c.updates for d in dims(t) or () if isinstance(d, str)}
        self._may_have_free_rows = {str(c.past.name): has_free_rows(c) for c in candidates}
        self.step = cache(self._step)

    def _step(self, batch: int, past: int, length: int) -> Step:
        """A step of these sizes; the model's own where it fixes them."""
        inputs = sorted(self._blueprint.inputs.items(), key=lambda item: item[0] not in self._may_have_free_rows)
        stated = {name: shape_of(value) or () for name, value in inputs}
        first = next(iter(stated.values()))[0]
        batch = first if isinstance(first, int) else batch
        symbols: dict[Dim, int] = {d: batch for name in self._may_have_free_rows if (d := stated[name][0]) != "?"}
        lengths: set[Dim] = {d for shape in stated.values() for d in shape if d in self._named} - symbols.keys()
        symbols |= dict.fromkeys(lengths, length)
        shapes: dict[str, Shape] = {}
        values = {}
        for name, shape in stated.items():
            size = past + length if lengths else length  # what is neither rows nor new tokens is as long as a mask
            if name in self._may_have_free_rows:
                size = ROWS if self._may_have_free_rows[name] else past
            elif name in self._positions:
                size = length
            known = ((d, size if axis or len(shape) == 1 else batch) for axis, d in enumerate(shape))
            shapes[name] = tuple(
                d if isinstance(d, int) else s if d == "?" else symbols.setdefault(d, s) for d, s in known
            )
            if name in self._positions:
                kind = self._blueprint.inputs[name].type.tensor_type.elem_type
                by_token = len(shape) > 1 or (len(shape) == 1 and shape[0] != first)
                places = past + np.arange(shapes[name][-1]) if by_token else past
                dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
                values[name] = np.broadcast_to(places, shapes[name]).astype(dtype)
        return Step(batch, past, length, Probe(self._blueprint, shapes, values), symbols, lengths)


def has_free_rows(candidate: Candidate) -> bool:
    """True if a past may have more rows than there are tokens.

    TorchScript's exporter gives the batch of each output a name of its own.
    """
    past, present = (dims(t) or ("",) for t in (candidate.past, candidate.present))
    batches = isinstance(past[0], str) and isinstance(present[0], str)
    return not candidate.rows_only and past[1:] == present[1:] and (batches or past == present)


@dataclass(frozen=True, eq=False)
class Run:
    """An update in a step.

    Attributes:
        step: the step.
        past, new: the numbers that it was given.
        probe: the step with these.
        whole: what it makes of them, in the order of axes of the past; None: that cannot be computed.
    """

    step: Step
    past: Array
    new: Array
    probe: Probe
    whole: Array | None

    @property
    def survives(self) -> bool | None:
        """True if numbers of the past are left, and nothing but such and new ones; None: nothing says it."""
        if self.whole is None:
            return None
        is_old, is_new = np.isin(self.whole, self.past), np.isin(self.whole, self.new)
        return bool(is_old.any() and (is_old | is_new).all())

    @property
    def moves(self) -> bool:
        """True if numbers of the past are at other places than before."""
        if self.whole is None or self.whole.shape != self.past.shape:
            return False
        return bool((np.isin(self.whole, self.past) & (self.whole != self.past)).any())


def few_or_all(past: Shape, new: Shape, axis: int | None) -> Iterator[tuple[Shape, Shape]]:
    """Shapes of past and new rows to try: if they are large, first with few rows, then with two heads and channels.

    `axis` is that of the rows, if a past may have few of them.
    """
    if prod(past) > _SMALL and axis is not None:
        yield (*past[:axis], min(past[axis], ROWS), *past[axis + 1 :]), new
        sizes = (past[0], past[axis], *(Counter(new) - Counter(past)))
        past, new = (tuple(d if d in sizes else min(d, 2) for d in shape) for shape in (past, new))
    if prod(past) <= LARGEST:
        yield past, new


def run_update(candidate: Candidate, step: Step, rows: Sequence[gs.Tensor], shapes: Sequence[Shape]) -> Run:
    """An update in a step, with a past and new rows of these shapes."""
    past, *new = (_numbers(shape, is_new=place > 0) for place, shape in enumerate(shapes))
    tensors = (candidate.past, *rows)
    probe = step.probe.with_values({t.name: typed(v, t) for t, v in zip(tensors, (past, *new), strict=True)})
    whole = value_of(probe, candidate.whole)
    if candidate.rows_only and whole is not None:  # it may be joined in another order
        joined = (value_of(probe, t) for t in candidate.node.inputs if t is not candidate.rows[0])
        orders = [order for v in joined if v is not None and (order := order_of(v, past)) is not None]
        whole = whole.transpose(np.argsort(orders[0])) if orders else whole
    together = np.concatenate([np.zeros(0), *(v.ravel() for v in new)])
    return Run(step, past, new[0] if len(new) == 1 else together, probe, whole)


def _numbers(shape: Shape, *, is_new: bool) -> Array:
    """Fourths that all types of caches have and no integers are, others for new rows than for a past."""
    numbers: Array = np.random.default_rng(is_new).integers(-_MOST, _MOST, shape) + (0.75 if is_new else 0.25)
    return numbers


def typed(numbers: Array, tensor: gs.Tensor) -> Array:
    """Numbers in the type of a tensor, if that is floating-point and has them all."""
    kind = elem_type(tensor)
    return numbers.astype(onnx.helper.tensor_dtype_to_np_dtype(kind)) if kind in FLOATS else numbers


def value_of(probe: Probe, tensor: gs.Tensor) -> Array | None:
    """The numbers of a tensor as float64; None: nothing says them."""
    value = probe.value(tensor.name)
    return None if value is None else value.astype(np.float64)


def order_of(value: Array, whole: Array) -> Perm | None:
    """The order in which the axes of `whole` lie in `value`; None: these are other numbers."""
    if value.size != whole.size or value.ndim != whole.ndim:
        return None
    return next((o for o in permutations(range(whole.ndim)) if np.array_equal(value, whole.transpose(o))), None)
