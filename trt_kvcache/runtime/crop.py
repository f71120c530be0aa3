"""Checks the lengths that a sequence can be cropped to."""

from __future__ import annotations

from trt_kvcache.errors import CapacityError
from trt_kvcache.importer.plan import CachePlan, CacheUpdate, UpdateMode
from trt_kvcache.runtime.inputs import carried_caches
from trt_kvcache.runtime.slot import Slot

__all__ = ["check_crop"]


def check_crop(plan: CachePlan, slot: int, entry: Slot, length: int) -> None:
    """Refuse a length that the caches cannot go back to.

    Args:
        plan: plan of the model.
        slot: name of the slot.
        entry: state of the slot.
        length: number of tokens to keep.

    Raises:
        CapacityError: a circular cache has lost rows that the sequence would see; or the model keeps state; or tokens
            of one step see each other.
    """
    if plan.states and 0 < length < entry.length:
        name = plan.states[0].past
        raise CapacityError(
            f"slot {slot} cannot be cropped to {length} tokens: the model keeps state ('{name}') that every step "
            "replaces, and what it was at that length is gone; reset the slot, or fork it before it grows"
        )
    if plan.prefill_in_one_step and 0 < length < entry.length:
        raise CapacityError(
            f"slot {slot} cannot be cropped to {length} tokens: tokens of one step see later ones in this model, and "
            "the rows that stay would know those that go; reset the slot, or fork it before it grows"
        )
    for cache in carried_caches(plan):
        if cache.mode is not UpdateMode.CIRCULAR or length >= entry.length:
            continue
        if entry.written > cache.capacity and length < entry.written - 1:
            raise CapacityError(_lost(slot, entry, length, cache))


def _lost(slot: int, entry: Slot, length: int, cache: CacheUpdate) -> str:
    return (
        f"slot {slot} cannot be cropped to {length} tokens: circular cache '{cache.past}' holds the last "
        f"{cache.capacity} of {entry.written}, and what a sequence of {length} sees was overwritten; crop to "
        f"{entry.written - 1} or more, or fork the slot before it grows"
    )
