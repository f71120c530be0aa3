"""Names for axes of fixed size. A plan names only dynamic axes; the runtime fills both kinds by name."""

from __future__ import annotations

from dataclasses import replace

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import CachePlan, Dim, Role, TensorRole

__all__ = ["axes_with_planes", "fixed_length", "fixed_rows", "named_axes"]

_ORDER = {
    Role.TOKENS: ("batch", "sequence"),
    Role.POSITIONS: ("batch", "sequence"),
    Role.WRITE_INDICES: ("batch",),
    Role.VALID_LENGTHS: ("batch",),
    Role.ADAPTER: ("batch",),
    Role.LOGITS: ("batch", "sequence"),
}
"""The axes of a tensor, in order; a tensor with fewer axes lacks the first or the last."""


def fixed_rows(plan: CachePlan) -> int | None:
    """Return the batch size that the model's caches, states and constants are fixed at, or None.

    Raises:
        UnsupportedModelError: they are fixed at different sizes.
    """
    carried = [*(c.physical_shape for c in plan.caches if c.carried), *(s.shape for s in plan.states)]
    shapes = [*carried, *(t.shape for t in plan.tensors if t.role is Role.CONSTANT and t.io == "input")]
    sizes = sorted({shape[0] for shape in shapes if shape and isinstance(shape[0], int)})
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"the model's caches, states and constants have batches of {' and '.join(map(str, sizes))}; export all "
            "with one batch size, or a dynamic one"
        )
    return sizes[0] if sizes else None


def fixed_length(plan: CachePlan) -> int | None:
    """Return the number of tokens per row and step that the model's updates are fixed at, or None."""
    lengths = {c.update_length for c in plan.caches if c.carried and isinstance(c.update_length, int)}
    return min(lengths, default=None)


def named_axes(tensor: TensorRole, plan: CachePlan) -> TensorRole:
    """Return the tensor with names for axes that are fixed at the plan's batch or update length, if it is not 1."""
    sizes: dict[str, Dim | None] = {"batch": fixed_rows(plan), "sequence": fixed_length(plan)}
    axes, rank = list(tensor.axes), len(tensor.shape)
    indexed = rank - 1 if tensor.embedded else rank  # the last axis of embeddings is their width
    if tensor.role is Role.MASK:  # [B, 1, S, L], [B, S, L] or [B, L]
        places = {"batch": 0} | ({"sequence": rank - 2} if rank > 2 else {})
    else:
        places = {name: i for i, name in enumerate(_ORDER.get(tensor.role, ())[:indexed])}
        if indexed == 1 and tensor.role in (Role.TOKENS, Role.POSITIONS) and tensor.shape[0] == sizes["sequence"]:
            places = {"sequence": 0}
        elif rank == 3 and tensor.role is Role.POSITIONS:  # [planes, B, S]; the plan names the batch
            places = {"sequence": 2}
        elif rank == 2 and tensor.role is Role.LOGITS:
            places = {"batch": 0}
    for name, axis in places.items():
        if axis < rank and not axes[axis] and tensor.shape[axis] == sizes[name] != 1:
            axes[axis] = name
    return replace(tensor, axes=tuple(axes))


def axes_with_planes(tensor: TensorRole) -> tuple[str, ...]:
    """Return the axes of positions ``[planes, B, S]`` or ``[B, planes, S]``, with the planes' axis named."""
    fixed = [i for i, axis in enumerate(tensor.axes[:-1]) if not axis]
    planes = max(fixed, key=lambda i: int(tensor.shape[i]))  # the batch may be fixed at 1
    return tuple("planes" if i == planes else axis for i, axis in enumerate(tensor.axes))
