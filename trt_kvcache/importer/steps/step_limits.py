"""Describes steps of a decode loop, and the limits that a model puts on steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import CachePlan, OriginalRole, OriginalTensor, Role, UpdateMode
from trt_kvcache.importer.steps.cache_contents import size_of

_ANY_LENGTH = 1 << 20  # tokens of an update, if no cache limits it


@dataclass(frozen=True)
class Step:
    """One step: `length` tokens per row, written from `starts`; `valid` tokens per row count afterwards."""

    length: int
    starts: tuple[int, ...]
    valid: tuple[int, ...]

    def __str__(self) -> str:
        """Return the lengths of the step as text."""
        return f"{self.length} tokens from {list(self.starts)}, valid {list(self.valid)}"


@dataclass(frozen=True)
class Limits:
    """The steps that a model allows.

    Attributes:
        batch: number of rows.
        length: the fixed number of tokens of an update, or None.
        longest: most tokens of an update.
        linear: capacity of the shortest linear cache, or None.
        circular: capacities of the circular caches.
        no_straddle: capacities of the circular caches whose contract forbids updates across the wrap.
        indexed: steps write rows at write indices; if False, always from row 0.
        ragged: rows may start at different places.
        lengths: the model has an input for valid lengths.
        fixed_batch: the model fixes the batch at `batch`.
    """

    batch: int
    length: int | None
    longest: int
    linear: int | None
    circular: tuple[int, ...]
    no_straddle: tuple[int, ...]
    indexed: bool
    ragged: bool
    lengths: bool
    fixed_batch: bool = False


def read_limits(plan: CachePlan, batch: int) -> Limits:
    """Return the limits of a model's steps.

    Raises:
        OptionError: a circular cache is shorter than the model's fixed update.
    """
    fixed_batches = {c.logical_shape[0] for c in plan.caches if isinstance(c.logical_shape[0], int)}
    together = rows_together(plan.original)
    batch = together or min(fixed_batches, default=batch)
    fixed_lengths = {c.update_length for c in plan.caches if isinstance(c.update_length, int)}
    fixed_lengths |= {d for t in plan.original for d, axis in zip(t.shape, t.axes, strict=True)
                      if t.role is OriginalRole.TOKENS and axis == "sequence" and isinstance(d, int)}  # fmt: skip
    too_short = [c for c in plan.caches if c.contract and c.capacity < max(fixed_lengths, default=1)]
    if too_short:
        raise OptionError(
            f"cache '{too_short[0].past}' holds {too_short[0].capacity} rows, and the model's updates are fixed at "
            f"{max(fixed_lengths)} tokens: none fits without straddling the wrap; plan with --fallback functional"
        )
    contracts = [c.contract for c in plan.caches if c.contract is not None]
    bounds = [c.max_update_length for c in contracts if c.max_update_length is not None]
    roles = {Role.WRITE_INDICES, Role.VALID_LENGTHS}
    if plan.original:  # the model as exported runs row by row, with its own positions and masks for each row
        roles |= {Role.POSITIONS, Role.MASK}
    driven = [t for t in plan.tensors if t.io == "input" and t.role in roles]
    return Limits(
        batch=batch,
        length=min(fixed_lengths, default=None),
        longest=min([c.capacity for c in plan.caches] + bounds, default=_ANY_LENGTH),
        linear=min((c.capacity for c in plan.caches if c.mode is UpdateMode.LINEAR), default=None),
        circular=tuple(sorted({c.capacity for c in plan.caches if c.mode is UpdateMode.CIRCULAR})),
        no_straddle=tuple(sorted({c.capacity for c in plan.caches if c.contract and c.contract.no_straddle})),
        indexed=any(c.write_indices is not None for c in plan.caches),
        ragged=together is None and all("batch" in t.axes or batch in t.shape for t in driven),
        lengths=any(t.role is Role.VALID_LENGTHS for t in driven),
        fixed_batch=bool(fixed_batches) or together is not None,
    )


def rows_together(original: Iterable[OriginalTensor]) -> int | None:
    """Return how many rows of one length a run of the exported model takes; None: one row per run, for any batch."""
    batches = {
        n
        for t in original
        for a, d in zip(t.axes, t.shape, strict=True)
        if t.io == "input" and a == "batch" and (n := size_of(d))
    }
    return max(batches) if max(batches, default=1) > 1 else None
