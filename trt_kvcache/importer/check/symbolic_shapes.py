"""Finds tensor shapes as terms such as ``2*B*S`` (batch B, new tokens S), from two steps with different B and S."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import onnx

from trt_kvcache.importer.protos import dtype_name, elem_type_of
from trt_kvcache.importer.steps.probe import Blueprint, Probe

POINTS = ({"batch": 2, "sequence": 5, "past": 11, "total": 16}, {"batch": 3, "sequence": 7, "past": 13, "total": 20})
"""Sizes of two steps of a decode loop. No size is a product of other sizes."""
ENCODED = 6
"""The size of an axis that does not change during a decode, such as the length of an encoder's text."""
UNKNOWN = 1
"""The size of an axis whose meaning is unknown: 1, because it broadcasts."""

Shapes = Mapping[str, tuple[tuple[int | str, ...], tuple[str, ...]]]
"""Maps each graph input to its dimensions, and to a name in `POINTS` for each axis."""


@dataclass(frozen=True)
class Term:
    """A size of an axis: ``factor * B**batch * S**sequence``, with batch B and new tokens S."""

    factor: int
    batch: int
    sequence: int

    def at(self, batch: int, sequence: int) -> int:
        """Return the size for a batch and a number of new tokens."""
        return int(self.factor * batch**self.batch * sequence**self.sequence)

    def __str__(self) -> str:
        return "*".join([*[str(self.factor)][: self.factor != 1], *"B" * self.batch, *"S" * self.sequence]) or "1"


@dataclass(frozen=True)
class Kind:
    """Element type and shape of a tensor; the shape is None if a size is not a `Term`."""

    elem_type: int
    shape: tuple[Term, ...] | None

    def __str__(self) -> str:
        return f"{dtype_name(self.elem_type)} [{', '.join(map(str, self.shape or ('?',)))}]"


class Kinds:
    """Types and shapes of a model's tensors, from the axes of its inputs. `batch` is the fixed batch, or None."""

    def __init__(self, model: onnx.ModelProto, shapes: Shapes, batch: int | None) -> None:
        blueprint = Blueprint(model, {})
        fixed = {} if batch is None else {"batch": batch}
        ranked = {n: v for n, v in blueprint.inputs.items() if v.type.tensor_type.HasField("shape")}
        self._probes = [
            Probe(blueprint, {n: _sizes(v, *shapes.get(n, ((), ())), point | fixed) for n, v in ranked.items()}, {})
            for point in POINTS
        ]
        self._stated = {v.name: elem_type_of(v) for v in model.graph.output}
        self._kinds: dict[str, Kind | None] = {}

    def get(self, name: str) -> Kind | None:
        """Return type and shape of a tensor, if known."""
        if name not in self._kinds:
            first, second = (probe.shape(name) for probe in self._probes)
            elem_type = self._probes[0].elem_type(name) or self._stated.get(name)
            self._kinds[name] = None if elem_type is None else Kind(elem_type, terms(first, second))
        return self._kinds[name]


def _sizes(
    value: onnx.ValueInfoProto, dims: tuple[int | str, ...], axes: tuple[str, ...], point: Mapping[str, int]
) -> tuple[int, ...]:
    sizes = []
    for place, dim in enumerate(value.type.tensor_type.shape.dim):
        known = dims[place] if place < len(dims) else "?"
        axis = axes[place] if place < len(axes) else ""
        stated = dim.dim_value if dim.HasField("dim_value") else UNKNOWN if axis == "?" else ENCODED
        sizes.append(known if isinstance(known, int) else point.get(axis, stated))
    return tuple(sizes)


def terms(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[Term, ...] | None:
    """Return a shape as terms, from its sizes at both `POINTS`; None if a size has no term."""
    if first is None or second is None or len(first) != len(second):
        return None
    terms = [_term(a, b) for a, b in zip(first, second, strict=True)]
    return None if None in terms else tuple(t for t in terms if t is not None)


@lru_cache(maxsize=1 << 12)
def _term(first: int, second: int) -> Term | None:
    (b, s), (c, t) = ((point["batch"], point["sequence"]) for point in POINTS)
    powers = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2))
    fits = (Term(first // (b**i * s**j), i, j) for i, j in powers if first % (b**i * s**j) == 0)
    return next((term for term in fits if term.at(c, t) == second), None)
