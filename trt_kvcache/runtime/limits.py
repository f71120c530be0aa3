"""Computes how many tokens a sequence may have, and how many a step may write."""

from __future__ import annotations

from trt_kvcache.errors import CapacityError
from trt_kvcache.importer.plan import UpdateMode
from trt_kvcache.runtime.runner import Runner
from trt_kvcache.runtime.slot import Slot
from trt_kvcache.runtime.step_inputs import carried_caches, linear_capacity


def largest_update(runner: Runner, length: int) -> int:
    """Return the most tokens that one step may write after `length` others with the same result as one by one.

    A circular cache takes several tokens at once only until it is full. Afterwards each new token overwrites a row that
    earlier tokens of the same update still see.
    """
    limit = runner.max_chunk
    for cache in carried_caches(runner.plan):
        if cache.mode is UpdateMode.CIRCULAR:
            limit = min(limit, cache.capacity - length if length < cache.capacity else 1)
    return limit


class SequenceLimits:
    """Limits of a sequence: rows of the smallest linear cache, and of the position table if one is known.

    Args:
        runner: runner of the model.
    """

    def __init__(self, runner: Runner) -> None:
        self._rows, self._positions = linear_capacity(runner.plan), runner.max_positions
        self._runner = runner

    @property
    def capacity(self) -> int | None:
        """Most tokens of a sequence with consecutive positions; None if nothing limits them."""
        return min((bound for bound in (self._rows, self._positions) if bound is not None), default=None)

    def free_tokens(self, slot: Slot) -> int | None:
        """Return how many tokens still fit after those of a slot; None if nothing limits them."""
        used = (self._rows, len(slot.tokens)), (self._positions, slot.next_position)
        return min((bound - count for bound, count in used if bound is not None), default=None)

    def check(self, slot: Slot, what: str) -> None:
        """Refuse a sequence that is too long, or has positions that the model does not have.

        Args:
            slot: a slot with the sequence.
            what: name of the sequence in messages.

        Raises:
            CapacityError: the sequence is too long; or its waiting tokens need one step together, and a step takes
                fewer.
        """
        free_tokens, count = self.free_tokens(slot), len(slot.tokens)
        if self._runner.plan.prefill_in_one_step and slot.pending > (most := largest_update(self._runner, slot.length)):
            raise CapacityError(
                f"{what} has {slot.pending} tokens to write, and tokens of one step see each other in this model, "
                f"so they must come in one step, which takes at most {most} here; shorten it, or allow more "
                "(max_chunk)"
            )
        if free_tokens is None or free_tokens >= 0:
            return
        if slot.positions and (self._rows is None or count <= self._rows):
            raise CapacityError(
                f"{what} stands at positions up to {slot.next_position - 1}, and the model knows {self._positions}, "
                "from 0 on; give smaller ones, or use a model with more"
            )
        raise CapacityError(
            f"{what} has {count} tokens, and a sequence may have {self.capacity}; shorten it, or use a model with a "
            "larger capacity"
        )
