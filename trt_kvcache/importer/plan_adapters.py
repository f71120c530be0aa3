"""The places at which adapters (LoRA) act, as a plan says them: plain data.

Nothing here imports ONNX or TensorRT.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterPart:
    """Columns ``start .. stop - 1`` of a product, which one module of the checkpoint makes."""

    module: str
    start: int
    stop: int


@dataclass(frozen=True)
class AdapterProduct:
    """A product ``y = x W`` of the model, to which ``(x A[slot]) B[slot]`` is added.

    Attributes:
        a: name of the input A ``[slots + 1, inputs, rank]``.
        b: name of the input B ``[slots + 1, rank, outputs]``.
        dtype: of both.
        rank: of all parts together: each has `AdapterPlan.rank` columns at least.
        parts: modules, of which an adapter may change any: one, or several that were fused.
        whole: name of the fused module, which an adapter may change as well; None: there is one part.
        found_by: what said which module it is.
    """

    a: str
    b: str
    dtype: str
    rank: int
    inputs: int
    outputs: int
    parts: tuple[AdapterPart, ...]
    whole: str | None
    found_by: str


@dataclass(frozen=True)
class AdapterPlan:
    """The adapters that a model takes as inputs.

    Attributes:
        rank: of the largest adapter.
        slots: adapters at a time, in slots 1 to `slots`. Slot 0 holds zeros: the model itself.
        index: name of the int64 input ``[B]``, the slot of each sequence.
        products: that adapters change.
    """

    rank: int
    slots: int
    index: str
    products: tuple[AdapterProduct, ...]
