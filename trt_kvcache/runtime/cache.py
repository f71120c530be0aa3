"""The caches of a session as one object: which slot holds which tokens in which row, and every way to change that.

A *slot* is a sequence's stable name; a *row* is its place in the batch of every cache buffer, which may change. What a
slot holds is a list of token ids, of which the first `length` are in the cache; the rest waits to be written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trt_kvcache.errors import CapacityError, OptionError, SlotError
from trt_kvcache.given import given_list, given_whole, is_whole, shown
from trt_kvcache.importer.plan import UpdateMode
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.crop import check_crop
from trt_kvcache.runtime.encoders.constants import ConstantInputs, Constants
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.inputs import carried_caches
from trt_kvcache.runtime.limits import SequenceLimits
from trt_kvcache.runtime.rows import Rows
from trt_kvcache.runtime.runner import Array, Runner
from trt_kvcache.runtime.slot import Slot
from trt_kvcache.runtime.tokens import read_ids


class KVCache:
    """Caches of fixed capacity and the sequences in them. All methods may be called from several threads.

    Rows that hold no sequence may hold anything finite, but never what a former sequence left: a row is zeroed before
    it is given to another sequence, because one NaN in a masked row would poison attention (0 * NaN is NaN).

    Args:
        runner: owns the buffers.
        guard: of the session.

    Attributes:
        limits: how long a sequence may become.
    """

    def __init__(self, runner: Runner, guard: Guard | None = None) -> None:
        self._runner = runner
        self._guard = guard or Guard()
        self._caches = carried_caches(runner.plan)
        self._rings = sorted({c.capacity for c in self._caches if c.mode is UpdateMode.CIRCULAR})
        self.limits = SequenceLimits(runner)
        self._constants = ConstantInputs(runner.plan, runner.home)
        self._slots: dict[int, Slot] = {}
        self._next = 0
        self._rows = Rows(runner)

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots in use, oldest first."""
        with self._guard.lock, self._guard.open:
            return tuple(self._slots)

    def __contains__(self, slot: int) -> bool:
        """Whether a slot is in use."""
        return is_whole(slot) and slot in self._slots

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens in the cache by slot."""
        with self._guard.lock, self._guard.open:
            return {name: slot.length for name, slot in self._slots.items()}

    @property
    def free(self) -> int:
        """Sequences that still find a row."""
        with self._guard.lock, self._guard.open:
            return self._runner.max_batch - len(self._slots)

    @property
    def rows(self) -> int:
        """Of every buffer: most sequences at a time."""
        return self._runner.max_batch

    @property
    def capacity(self) -> int | None:
        """Most tokens of one sequence; None where nothing bounds them: circular caches keep the last ones.

        The rows of the smallest linear cache, or of the model's position table where that is shorter: a sequence that
        was given positions may need fewer of these than it has tokens.
        """
        return self.limits.capacity

    @property
    def window(self) -> int | None:
        """Rows of the smallest circular cache: the sliding window; None where all caches are linear."""
        return min(self._rings, default=None)

    @property
    def bytes(self) -> int:
        """Of all buffers of caches and state."""
        return self._runner.plan.cache_bytes(self._runner.max_batch)

    def tokens(self, slot: int) -> list[int]:
        """Token ids of a slot, those that are not in the cache yet included."""
        with self._guard.lock, self._guard.open:
            return list(self.slot(slot).tokens)

    def room(self, slot: int) -> int | None:
        """Tokens that still fit behind those of a slot; None where nothing bounds them."""
        with self._guard.lock, self._guard.open:
            return self.limits.room(self.slot(slot))

    def largest_update(self, slot: int) -> int:
        """Most tokens that one step may write to a slot with the same result as one by one.

        A circular cache of `capacity` rows takes several at once only up to its end: after that each new token
        overwrites one that the tokens before it in the same update still see.
        """
        with self._guard.lock, self._guard.open:
            length, limit = self.slot(slot).length, self._runner.max_chunk
            for rows in self._rings:
                limit = min(limit, rows - length if length < rows else 1)
            return limit

    def view(self, name: str) -> Any:
        """The whole buffer of one cache ``[max_batch, *physical shape]`` without a copy, for debugging.

        A NumPy array on the CPU, an object with ``__dlpack__`` on a GPU (of a bfloat16 or float8 cache with its bits as
        unsigned integers). Row numbers are `Slot.row`.

        Raises:
            OptionError: there is no such cache.
        """
        with self._guard.lock, self._guard.open:
            names = [b.past for b in carried_buffers(self._runner.plan)]
            if not isinstance(name, str) or name not in names:
                raise OptionError(f"no cache {shown(name)}; caches are {', '.join(names)}")
            return self._runner.view(name)

    def slot(self, slot: int) -> Slot:
        """The bookkeeping of a slot.

        Raises:
            SlotError: it is not in use.
        """
        found = self._slots.get(slot) if is_whole(slot) else None
        if found is None:
            used = ", ".join(map(str, self._slots)) or "none"
            raise SlotError(
                f"slot {shown(slot)} is not in use (in use: {used}); slots end when their sequence is removed"
            )
        return found

    def idle(self, slot: int) -> Slot:
        """The bookkeeping of a slot that may be changed.

        Raises:
            SlotError: it is not in use, or the decode loop continues it.
        """
        found = self.slot(slot)
        if found.running:
            raise SlotError(f"slot {slot} is generating; wait for its end, or remove it, before you change its cache")
        return found

    def acquire(self, tokens: Iterable[int] = (), constants: Mapping[str, Array] | Constants | None = None) -> int:
        """A new slot in a zeroed row. The tokens wait: nothing is written yet.

        Args:
            tokens: ids.
            constants: of a model that is given something once per sequence: an array ``[1, ...]`` for each input.

        Raises:
            SlotError: every row holds a sequence.
            PromptError: `tokens` are no ids of the model's, or `constants` are not what it takes.
        """
        taken: list[int] = []
        try:
            return self.take(taken, tokens, constants)
        except BaseException:
            self.give_back(taken)
            raise

    def read_constants(self, given: Mapping[str, Array] | Constants | None) -> Constants:
        """Check what a sequence is given beside its text.

        Raises:
            PromptError: it is not what the model takes.
        """
        return self._constants.read(given)

    def release(self, slot: int) -> None:
        """Give up a slot and its row.

        Raises:
            SlotError: see `idle`.
        """
        with self._guard.lock, self._guard.open:
            self.idle(slot)
            del self._slots[slot]

    def reset(self, slot: int) -> None:
        """Empty a slot: no tokens, and zeros in its row of every cache. Its constants stay.

        Raises:
            SlotError: see `idle`.
        """
        with self._guard.lock, self._guard.idle:
            found = self.idle(slot)
            self._slots[slot] = Slot(found.row, constants=found.constants)
            self._rows.clean(found.row, 0)

    def fork(self, source: int) -> int:
        """A new slot with the same tokens and the same cache contents: sequences that share a prefix compute it once.

        Raises:
            SlotError: see `slot` and `acquire`.
        """
        taken: list[int] = []
        try:
            with self._guard.lock, self._guard.idle:
                found, row = self.slot(source), self._free_row()
                self._rows.copy(found.row, row)
                return self._name(found.copy(row), taken)
        except BaseException:
            self.give_back(taken)
            raise

    def crop(self, slot: int, length: int) -> None:
        """Forget all tokens from `length` on, those that wait included; rows that held them are zeroed.

        The others keep the positions that they were given: what follows stands behind these.

        Raises:
            SlotError: see `idle`.
            OptionError: `length` is no whole number.
            CapacityError: `length` is more than the slot holds; or a circular cache no longer has what the sequence
                would see at that length; or the model keeps state, which knows the present length only.
        """
        with self._guard.lock, self._guard.idle:
            found, length = self.idle(slot), given_whole(length, "length", " of tokens")
            if not 0 <= length <= len(found.tokens):
                raise CapacityError(f"slot {slot} has {len(found.tokens)} tokens; it cannot be cropped to {length}")
            check_crop(self._runner.plan, slot, found, length)
            self._forget(found, length)  # first: what an interrupt leaves of the tokens waits to be written again
            found.cut(length)

    def reorder(self, indices: Sequence[int], slots: Sequence[int] | None = None) -> None:
        """Give each slot the contents that another one has now: the step between two steps of a beam search.

        Rows are renamed where that is enough; only what several slots continue is copied.

        Args:
            indices: the k-th slot gets the contents of ``slots[indices[k]]``.
            slots: those concerned; None: all, in the order of `slots`.

        Raises:
            SlotError: see `idle`.
            OptionError: not one index per slot, or an index out of range, or a slot twice.
        """
        with self._guard.lock, self._guard.idle:
            names = list(self._slots) if slots is None else given_list(slots, "slots", "slots", SlotError)
            held = [self.idle(name) for name in names]
            indices = given_list(indices, "indices", "numbers", OptionError)
            if not all(is_whole(i) for i in indices):
                raise OptionError(f"indices is {shown(indices)}; give whole numbers")
            if len(indices) != len(names) or len(set(names)) != len(names):
                raise OptionError(
                    f"reorder takes one index for each of {len(names)} different slots, not {len(indices)}"
                )
            if any(not 0 <= i < len(names) for i in indices):
                raise OptionError(f"reorder takes indices 0 to {len(names) - 1}, not {list(indices)}")
            dropped = sorted(set(range(len(names))) - set(indices))
            lost = {names[i] for i in dropped}
            before, after = self._slots, {}
            # Of what is written over, an interrupt leaves nothing rather than something else.
            self._slots = {name: slot for name, slot in before.items() if name not in lost}
            taken: set[int] = set()
            for name, index in zip(names, indices, strict=True):
                source, row = held[index], held[index].row
                if index in taken:
                    row = held[dropped.pop()].row
                    self._rows.copy(source.row, row)
                taken.add(index)
                after[name] = source.copy(row)
            self._slots = {name: after.get(name, slot) for name, slot in before.items()}

    def move(self, slot: int, row: int) -> None:
        """Move a slot to a row that no slot uses.

        Raises:
            SlotError: see `slot`; or the row is in use or does not exist.
        """
        with self._guard.lock, self._guard.idle:
            found = self.slot(slot)
            if is_whole(row) and found.row == row:
                return
            if (
                not is_whole(row)
                or not 0 <= row < self._runner.max_batch
                or any(s.row == row for s in self._slots.values())
            ):
                raise SlotError(
                    f"row {shown(row)} is in use, or not one of the {self._runner.max_batch} rows; move to a free one"
                )
            self._rows.copy(found.row, row)
            found.row = int(row)

    def compact(self) -> None:
        """Move slots so that n of them lie in rows 0 to n - 1, and a step over all of them is one row range."""
        with self._guard.lock, self._guard.idle:
            count = len(self._slots)
            if all(slot.row < count for slot in self._slots.values()):
                return
            holes = sorted(set(range(count)) - {s.row for s in self._slots.values()})
            for name, slot in self._slots.items():
                if slot.row >= count:
                    self.move(name, holes.pop(0))

    # --- what the loop says

    def drop(self, slot: int, length: int) -> None:
        """`crop` without its checks, for a slot that runs: one that an interrupt leaves with fewer tokens is torn."""
        found = self._slots[slot]
        found.cut(length)
        self._forget(found, length)

    def _forget(self, found: Slot, length: int) -> None:
        """Drop the cache rows of a slot from `length` on."""
        if length >= found.length:
            return
        found.length = length
        # Rows of a circular cache that has wrapped stay: the next token overwrites the only one that is stale.
        if not any(found.written > rows for rows in self._rings):
            found.written = length
        self._rows.cut(found.row, length, found.written)

    def note_written(self, slot: int, tokens: int) -> None:
        """The runner has written this many of the slot's waiting tokens."""
        found = self._slots[slot]
        found.length += tokens
        found.written = max(found.written, found.length)
        found.embeds = found.embeds.within(found.length)
        self._rows.touch(found.row, found.length)

    def note_touched(self, slot: int, stop: int) -> None:
        """A step will write rows up to `stop`: should it fail half-way, they are zeroed before they are reused."""
        self._rows.touch(self._slots[slot].row, stop)

    # --- files

    def save(self, path: str | os.PathLike[str], slots: Sequence[int] | None = None) -> None:
        """Write slots with their tokens and cache contents to a safetensors file, whole or not at all.

        Args:
            path: of the file.
            slots: to save; None: all.

        Raises:
            SlotError: see `slot`.
            OutputError: the file cannot be written.
            SessionError: the model's files are gone, or have changed since the session was opened.
        """
        from trt_kvcache.runtime.cache_file import save_slots

        with self._guard.lock, self._guard.idle:
            which = list(self._slots) if slots is None else given_list(slots, "slots", "slots", SlotError)
            chosen = {name: self.slot(name) for name in which}
            save_slots(path, self._runner, chosen)

    def load(self, path: str | os.PathLike[str]) -> dict[int, int]:
        """Bring saved slots back, into new slots.

        Returns:
            The new slot of each saved one.

        Raises:
            CacheFileError: the file is unreadable or damaged, or was saved with another model or other caches.
            SlotError: there are fewer free rows than saved slots. Nothing was loaded.
        """
        from trt_kvcache.runtime.cache_file import open_slots

        taken: list[int] = []
        try:
            with self._guard.lock, self._guard.idle, open_slots(path, self._runner) as saved:
                if len(saved.slots) > self.free:
                    raise SlotError(
                        f"{path} holds {len(saved.slots)} sequence(s), and {self.free} of {self._runner.max_batch} "
                        "rows are free; remove sequences first, or open the session with a larger max_batch"
                    )
                for old, slot in saved.slots.items():
                    name = self.take(taken, constants=slot.constants)
                    row = self._slots[name].row
                    self._rows.touch(row, slot.written)
                    saved.read(old, row)
                    self._slots[name] = slot.copy(row)
                saved.check()
                return dict(zip(saved.slots, taken, strict=True))
        except BaseException:
            self.give_back(taken)
            raise

    # --- slots that nobody knows yet

    def take(
        self, taken: list[int], tokens: Iterable[int] = (), constants: Mapping[str, Array] | Constants | None = None
    ) -> int:
        """`acquire` for a caller that gives back what is in `taken`, should an interrupt come before he knows the name.

        Args:
            taken: gets the name before there is a slot of it.
            tokens: see `acquire`.
            constants: see `acquire`.

        Raises:
            See `acquire`.
        """
        with self._guard.lock, self._guard.idle:
            ids = read_ids(tokens, self._runner.vocab)
            given = self.read_constants(constants)
            row = self._free_row()
            self._rows.clean(row, 0)
            return self._name(Slot(row, ids, constants=given), taken)

    def give_back(self, taken: Sequence[int]) -> None:
        """Give up those of these slots that there are. A step that continues one ends it."""
        if taken:
            with self._guard.lock:
                for name in taken:
                    self._slots.pop(name, None)

    def _name(self, slot: Slot, taken: list[int]) -> int:
        name = self._next
        self._next += 1
        taken.append(name)
        self._slots[name] = slot
        return name

    def _free_row(self) -> int:
        return self._rows.free({slot.row for slot in self._slots.values()})
