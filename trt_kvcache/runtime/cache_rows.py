"""Keeps track of the batch row of each sequence, and of how far each batch row is written.

A *slot* is the number that names a sequence. Its batch row, the place in every cache buffer, may change. The first
`length` tokens of a slot are in the cache; the other tokens wait to be written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from trt_kvcache.arguments import is_whole, shown
from trt_kvcache.errors import CapacityError, SlotError
from trt_kvcache.importer.cache_plan import UpdateMode
from trt_kvcache.runtime.adapters import Adapter
from trt_kvcache.runtime.buffers import carried_caches, linear_capacity, why_no_return
from trt_kvcache.runtime.encoders.constants import NO_CONSTANTS, Constants
from trt_kvcache.runtime.prefix import BLOCK, PrefixCache
from trt_kvcache.runtime.runner import Runner
from trt_kvcache.runtime.slot import HostRows, Slot, sequence_capacity


class CacheRows:
    """The sequences in caches of fixed capacity, and their batch rows. Callers must hold the lock of the session.

    A row is zeroed before another sequence gets it, because one NaN in a masked row would make the whole result of
    attention NaN (0 * NaN is NaN). If no row is free and the cache has more sequences than rows, the least recently
    used slot is offloaded; slots that do not generate are offloaded first.

    Args:
        runner: owns the buffers.
        max_sequences: most sequences; idle ones may lose their batch rows to others. None: one sequence per batch row,
            not counting sequences that the caller offloaded.
        prefix_cache: bytes of the prefix cache (`PrefixCache` lists its errors); None: no prefix cache.

    Attributes:
        slots: the state of each slot, oldest first.
        capacity: most tokens of a sequence; None if there is no limit.
    """

    def __init__(self, runner: Runner, *, max_sequences: int | None = None, prefix_cache: int | None = None) -> None:
        self._runner, self.max_sequences = runner, max_sequences
        self._caches = carried_caches(runner.plan)
        self._most, self.capacity = linear_capacity(runner.plan), sequence_capacity(runner)
        self.rings = sorted({c.capacity for c in self._caches if c.mode is UpdateMode.CIRCULAR})
        self.slots: dict[int, Slot] = {}
        self.prefixes = None if prefix_cache is None else PrefixCache(runner, prefix_cache)
        self._dirty = [0] * runner.max_batch  # for each batch row: from this cache row on, all are zero
        self._next = self._clock = 0

    @property
    def count(self) -> int:
        """Number of batch rows in every buffer."""
        return self._runner.max_batch

    @property
    def free(self) -> int:
        """Number of sequences that can be added now."""
        if self.max_sequences is not None:
            return self.max_sequences - len(self.slots)
        waiting = sum(slot.row < 0 and slot.running for slot in self.slots.values())
        return max(0, self.count - len(self._used()) - waiting)

    def __contains__(self, slot: object) -> bool:
        """True if a slot is in use."""
        return is_whole(slot) and slot in self.slots

    def slot(self, slot: int) -> Slot:
        """Return the state of a slot. Raises `SlotError` if the slot is not in use."""
        if slot not in self:
            used = ", ".join(map(str, self.slots)) or "none"
            raise SlotError(
                f"slot {shown(slot)} is not in use (in use: {used}); slots end when their sequence is removed"
            )
        return self.slots[slot]

    def idle(self, slot: int) -> Slot:
        """Return the state of a slot to be changed. Raises `SlotError` if the slot is not in use, or is generating."""
        entry = self.slot(slot)
        if entry.running:
            raise SlotError(f"slot {slot} is generating; wait until it ends, or remove it, before you change its cache")
        return entry

    # --- slots

    def take(
        self,
        tokens: Sequence[int] = (),
        constants: Constants = NO_CONSTANTS,
        adapter: Adapter | None = None,
        *,
        queue: bool = False,
    ) -> int:
        """Return a new slot with a zeroed batch row. Raises `SlotError` if no slot is `free`.

        With `queue`, if `max_sequences` is None and sequences run in all rows, the slot gets its batch row later.
        """
        row = self._first_free()
        ahead = queue and any(slot.row < 0 and slot.running for slot in self.slots.values())
        may_wait = self._is_run() or (ahead and row is not None)
        if not (queue and self.max_sequences is None and may_wait):
            self._check_free()
        if row is None or ahead:  # other slots have waited longer
            row = -1
        else:
            self._clean(row, 0)
        return self._name(Slot(row, list(tokens), constants=constants, adapter=adapter))

    def copy(self, source: int) -> int:
        """Return a new slot with the contents of `source`. Raises `SlotError` if `source` or a free slot is missing."""
        self.slot(source)
        self._check_free()
        row = self._free_row()
        entry = self.slot(source)  # `source` may itself be the slot that was offloaded to free the row
        if entry.row >= 0:
            self._copy(entry.row, row)
        else:
            self._fill(entry, row)
        return self._name(entry.copy(row))

    def drop(self, slot: int) -> None:
        """Remove a sequence, and free its batch row. Do nothing if the slot is not in use."""
        entry = self.slots.pop(slot, None)
        if entry is not None:
            entry.close()

    def reset(self, slot: int) -> None:
        """Empty a sequence: remove its tokens, and zero its batch row. Its constants and its adapter stay."""
        entry = self.slot(slot)
        self.slots[slot] = Slot(entry.row, constants=entry.constants, adapter=entry.adapter, used=entry.used)
        if entry.row >= 0:
            self._clean(entry.row, 0)
        entry.close()

    def crop(self, slot: int, length: int) -> None:
        """Shorten a slot to its first `length` tokens. The cache rows of the other tokens are zeroed.

        Raises `CapacityError` if the model's caches or state cannot go back to this length.
        """
        entry = self.slot(slot)
        if 0 < length < entry.length and (why := why_no_return(self._runner.plan, rings=False)):
            raise CapacityError(
                f"slot {slot} cannot be cropped to {length} tokens: {why}, and its contents at that length are gone; "
                "reset the slot, or fork it before it grows"
            )
        for cache in self._caches:
            wrapped = cache.mode is UpdateMode.CIRCULAR and entry.written > cache.capacity
            if wrapped and length < min(entry.length, entry.written - 1):
                raise CapacityError(
                    f"slot {slot} cannot be cropped to {length} tokens: circular cache '{cache.past}' holds only the "
                    f"last {cache.capacity} of {entry.written} tokens, and rows that a sequence of {length} tokens "
                    f"reads were overwritten; crop to {entry.written - 1} or more, or fork the slot before it grows"
                )
        if length >= entry.length:
            self.slots[slot] = entry.truncated(length)
            return
        entry = self.with_row(slot)
        written = self._written(entry, length)
        self.slots[slot] = replace(entry.truncated(length), length=length, written=written)
        self._truncate(entry.row, length, written)

    def reorder(self, indices: Sequence[int], names: Sequence[int]) -> None:
        """Give slot ``names[k]`` the old contents of slot ``names[indices[k]]``, with as few copies as possible."""
        entries = [self.with_row(name, names) for name in names]
        dropped = sorted(set(range(len(names))) - set(indices))
        taken: set[int] = set()
        for name, index in zip(names, indices, strict=True):
            source, row = entries[index], entries[index].row
            if index in taken:
                row = entries[dropped.pop()].row
                self._copy(source.row, row)
            taken.add(index)
            self.slots[name] = replace(source.copy(row), used=self._tick())

    def _name(self, slot: Slot) -> int:
        name = self._next
        self._next += 1
        slot.used = self._tick()
        self.slots[name] = slot
        return name

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _check_free(self) -> None:
        if self.free > 0:
            return
        if self.max_sequences is None:
            raise SlotError(_full(self.count))
        raise SlotError(
            f"there are {len(self.slots)} sequences, and max_sequences is {self.max_sequences}; remove one, or open "
            "the session with a larger max_sequences"
        )

    # --- tokens that the decode loop writes

    def largest_update(self, slot: int) -> int:
        """Return the most tokens that one step may write to a slot without other results than in single steps."""
        return self._largest_update(self.slot(slot).length)

    def _largest_update(self, length: int) -> int:
        """Return the most tokens that one step may write to a sequence of `length` tokens.

        In a full circular cache, each new token overwrites a row that earlier tokens of the same step still see.
        """
        return min([self._runner.max_chunk, *(rows - length if length < rows else 1 for rows in self.rings)])

    def free_tokens(self, slot: int) -> int | None:
        """Return how many more tokens a slot may get before the cache is full; None if there is no limit."""
        return self.free_after(self.slot(slot))

    def free_after(self, slot: Slot) -> int | None:
        """Like `free_tokens`, but for the state of a slot; negative if the slot already has too many tokens."""
        used = (self._most, len(slot.tokens)), (self._runner.max_positions, slot.next_position)
        return min((bound - count for bound, count in used if bound is not None), default=None)

    def check(self, slot: Slot, what: str) -> None:
        """Raise `CapacityError` if a sequence is too long for the caches, the positions or a step; `what` names it."""
        free, count, runner = self.free_after(slot), len(slot.tokens), self._runner
        if runner.plan.prefill_in_one_step and slot.pending > (most := self._largest_update(slot.length)):
            raise CapacityError(
                f"{what} has {slot.pending} tokens to write, all in one step, because tokens of one step see each "
                f"other in this model; a step takes at most {most} here: shorten it, or allow longer steps (max_chunk)"
            )
        if free is None or free >= 0:
            return
        if slot.positions and (self._most is None or count <= self._most):
            raise CapacityError(
                f"{what} has positions up to {slot.next_position - 1}, but the model has {runner.max_positions} "
                "positions, counted from 0; give smaller positions, or use a model with more"
            )
        raise CapacityError(
            f"{what} has {count} tokens, but a sequence may have at most {self.capacity}; shorten it, or use a "
            "model with a larger capacity"
        )

    def note_touched(self, slot: int, stop: int) -> None:
        """Record that a step will write cache rows of a slot below index `stop`, which must be zeroed later."""
        self.touch(self.slots[slot].row, stop)

    def note_written(self, slot: int, tokens: int, guesses: int = 0) -> None:
        """Record that a step wrote the next `tokens` tokens of a slot to the cache, and then `guesses` guesses."""
        entry = self.slots[slot]
        length = entry.length + tokens
        written, embeds = max(entry.written, length + guesses), entry.embeds.within(length)
        self.slots[slot] = replace(entry, length=length, written=written, embeds=embeds, used=self._tick())

    def note_chosen(self, slot: int, tokens: Sequence[int], rejected: int, after: Sequence[int]) -> None:
        """Append chosen tokens to a slot, and zero the cache rows of the last step's `rejected` guesses.

        `tokens` are correct guesses, already in the cache. `after` has the last chosen token, not yet in the cache.
        """
        entry = self.slots[slot]
        length = entry.length + len(tokens)
        written = self._written(entry, length) if rejected else entry.written
        if tokens:
            self.slots[slot] = replace(entry, tokens=[*entry.tokens, *tokens, *after], length=length, written=written)
        else:
            entry.written = written
            entry.tokens.extend(after)  # in place: copying a long text would cost more
        if rejected:
            self._truncate(entry.row, length, written)

    def recall(self, slot: int, keep: int = 1) -> None:
        """Fill an empty slot with the cache rows of its first tokens, as far as the prefix cache has them.

        The last `keep` tokens (at least one) are not copied: the model must compute them for their logits.
        """
        entry = self.slots[slot]
        if self.prefixes is None or entry.length or not entry.pending:
            return
        most = max(0, len(entry.tokens) - max(keep, 1))
        most = most if entry.by_ids is None else min(most, entry.by_ids)
        blocks = self.prefixes.find(entry.tokens, most, _digest(entry))
        length = len(blocks) * BLOCK
        self.touch(entry.row, length)
        self.prefixes.fill(entry.row, blocks)
        written = max(entry.written, length)
        self.slots[slot] = replace(entry, length=length, written=written, remembered=length)

    def remember(self, slot: int) -> None:
        """Copy a slot's cache rows to the prefix cache, if they fill at least one more block than the last time."""
        entry = self.slots[slot]
        if self.prefixes is None or entry.row < 0:
            return
        length = entry.length if entry.by_ids is None else min(entry.length, entry.by_ids)
        if length // BLOCK > entry.remembered // BLOCK:
            self.prefixes.add(entry.row, entry.tokens, length // BLOCK, _digest(entry))
            entry.remembered = length

    # --- rows

    def give_row(self, slot: int) -> bool:
        """Give a slot a batch row; offload another slot if needed. Return False if the slot must wait.

        Raises `SlotError` if the slot is not in use, or no row will become free.
        """
        if self.slot(slot).row < 0:
            idle = any(s.row >= 0 and not s.running for s in self.slots.values())
            may_wait = self._is_run() if self.max_sequences is None else not idle
            if may_wait and self._first_free() is None:
                return False
            self.with_row(slot)
        return True

    def with_row(self, slot: int, keep: Collection[int] = ()) -> Slot:
        """Give a slot a batch row if it has none; return its state. A slot in `keep` is not offloaded for this.

        Raises `SlotError` if no batch row can be freed, `CacheFileError` if the slot's file is gone or damaged.
        """
        entry = self.slot(slot)
        if entry.row < 0:
            row = self._free_row(keep)
            self._fill(entry, row)
            self.slots[slot] = replace(entry, row=row, offloaded=None, used=self._tick())
            entry.close()
        return self.slots[slot]

    def host_copy(self, entry: Slot) -> HostRows | None:
        """Copy a slot's cache contents to host memory; None if it has none. `SessionError` if memory is short."""
        return HostRows(self._runner, entry.row, entry.written) if entry.written else None

    def move(self, slot: int, row: int) -> None:
        """Move a sequence to a batch row that is not in use."""
        entry = self.with_row(slot)
        self._copy(entry.row, row)
        entry.row = row

    def compact(self) -> None:
        """Move the n sequences with batch rows to rows 0 to n - 1, because one step computes only neighboring rows."""
        used = self._used()
        holes = sorted(set(range(len(used))) - used)
        for name, slot in self.slots.items() if holes else ():
            if slot.row >= len(used):
                self.move(name, holes.pop(0))

    def touch(self, row: int, stop: int) -> None:
        """Record that the cache rows of a batch row below index `stop` may hold values other than zero."""
        self._dirty[row] = max(self._dirty[row], stop)

    def _written(self, entry: Slot, length: int) -> int:
        """Return how many tokens count as written after a slot went back to `length` tokens.

        For a circular cache that has wrapped, all tokens still count, because they have overwritten earlier rows.
        """
        return entry.written if any(entry.written > rows for rows in self.rings) else length

    def _clean(self, row: int, start: int) -> None:
        if self._dirty[row] > start:
            self._runner.zero_rows(row, start, self._dirty[row])
            self._dirty[row] = start

    def _truncate(self, row: int, length: int, written: int) -> None:
        """Zero the cache rows of a batch row from `length` on, except rows of circular caches that are still needed."""
        self._runner.zero_rows(row, length, self._dirty[row])
        self._dirty[row] = max(length, written)

    def _copy(self, source: int, row: int) -> None:
        length = self._dirty[source]
        self._clean(row, length)
        self.touch(row, length)
        self._runner.copy_rows(source, row, length)

    def _fill(self, entry: Slot, row: int) -> None:
        """Write the contents of an offloaded or new slot to a batch row, and zero the cache rows after them."""
        self._clean(row, entry.written)
        self.touch(row, entry.written)
        if entry.offloaded is not None:
            entry.offloaded.fill(row)

    def _used(self) -> set[int]:
        return {slot.row for slot in self.slots.values() if slot.row >= 0}

    def _is_run(self) -> bool:
        """Return True if a running sequence has a batch row, which becomes free at its end."""
        return any(slot.row >= 0 and slot.running for slot in self.slots.values())

    def _first_free(self) -> int | None:
        used = self._used()
        return next((row for row in range(self.count) if row not in used), None)

    def _free_row(self, keep: Collection[int] = ()) -> int:
        row = self._first_free()
        if row is not None:
            return row
        others = {name: slot for name, slot in self.slots.items() if slot.row >= 0 and name not in keep}
        if self.max_sequences is None or not others:
            raise SlotError(_full(self.count))
        name, entry = min(others.items(), key=lambda item: (item[1].running, item[1].used))
        self.slots[name] = replace(entry, row=-1, offloaded=self.host_copy(entry))
        return entry.row


def _digest(slot: Slot) -> bytes:
    """Return the digest of a slot's adapter. The prefix cache finds rows by this digest and the tokens."""
    return b"" if slot.adapter is None else bytes.fromhex(slot.adapter.digest)


def _full(rows: int) -> str:
    return (
        f"all {rows} rows hold a sequence; remove or offload one, or open the session with a larger max_batch, or with "
        "max_sequences"
    )
