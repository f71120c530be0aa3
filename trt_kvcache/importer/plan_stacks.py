"""Several caches in one tensor of the model as exported: plain data of the plan.

Nothing here imports ONNX or TensorRT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trt_kvcache.importer.plan_interface import Dim


@dataclass(frozen=True)
class StackPart:
    """One of several caches that lie in one tensor of the model as exported.

    Attributes:
        name: of the input or output that holds it alone.
        place: where it lies: an index for each axis of the tensor that caches are stacked along, None for its own axes.
        order: its own axes as exported, in the order in which it has them here; None: the same.
    """

    name: str
    place: tuple[int | None, ...]
    order: tuple[int, ...] | None = None

    @property
    def index(self) -> tuple[int | slice, ...]:
        """What chooses it of the whole."""
        return tuple(slice(None) if i is None else i for i in self.place)


@dataclass(frozen=True)
class Stack:
    """An input or output of the model as exported that holds several caches, of which each has its own here.

    Or one cache, with its axes in another order.

    Attributes:
        io: ``"input"`` or ``"output"``.
        shape: as exported.
        parts: all that it holds.
    """

    name: str
    io: str
    shape: tuple[Dim, ...]
    parts: tuple[StackPart, ...]

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape can be taken apart."""
        fixed = [at is not None for at in self.parts[0].place]
        return len(shape) == len(fixed) and all(
            n == d for n, d, is_fixed in zip(shape, self.shape, fixed, strict=True) if is_fixed
        )

    def parted(self, whole: Any) -> dict[str, Any]:
        """What an array as exported holds: views of it, by the names of the parts."""
        made = {part.name: whole[part.index] for part in self.parts}
        return {p.name: made[p.name] if p.order is None else made[p.name].transpose(p.order) for p in self.parts}
