"""Steps of a decode in which an update is read, before anything is known of inputs but their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import dims
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.evidence.probe import Blueprint, Probe, Shape
from trt_kvcache.importer.normalize.evidence.reach import deciding
from trt_kvcache.importer.plan import Dim
from trt_kvcache.importer.protos import shape_of

ROWS = 32
"""Rows of a past that may have more than there are tokens, if nothing says how many."""


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
        symbols: dict[Dim, int] = {stated[name][0]: batch for name in self._may_have_free_rows}
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
    """True if a past may have more rows than there are tokens."""
    return not candidate.rows_only and dims(candidate.past) == dims(candidate.present)
