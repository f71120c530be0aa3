"""Several caches in one tensor of the model as exported: plain data of the plan.

Nothing here imports ONNX or TensorRT.
"""

from __future__ import annotations

from dataclasses import dataclass

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
