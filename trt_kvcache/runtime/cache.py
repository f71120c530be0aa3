"""The caches of a session as one object: which slot holds which tokens in which row, and every change of that.

A *slot* is a sequence's stable name. A *row* is its place in the batch of every cache buffer; it may change. A slot
holds a list of token ids. The first `length` of them are in the cache; the others wait to be written.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trt_kvcache.arguments import as_list, as_whole, is_whole, shown
from trt_kvcache.errors import CapacityError, OptionError, SlotError
from trt_kvcache.importer.plan import UpdateMode
from trt_kvcache.messages import human_bytes
from trt_kvcache.page import Html, table, tag
from trt_kvcache.runtime.adapters import Adapter, Adapters
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.crop import check_crop
from trt_kvcache.runtime.encoders.constants import ConstantInputs, Constants
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.inputs import carried_caches
from trt_kvcache.runtime.limits import SequenceLimits, largest_update
from trt_kvcache.runtime.offload import FileRows, HostRows
from trt_kvcache.runtime.prefix import BLOCK, PrefixCache, PrefixStats
from trt_kvcache.runtime.rows import Rows
from trt_kvcache.runtime.runner import Array, Runner
from trt_kvcache.runtime.slot import Slot
from trt_kvcache.runtime.token_ids import read_ids


class KVCache:
    """Caches of fixed capacity, and the sequences in them. Several threads may call all methods.

    A row without a sequence holds finite values, but never values of a former sequence: a row is zeroed before another
    sequence gets it, because one NaN in a masked row would poison attention (0 * NaN is NaN).

    A slot that was offloaded has no row; it gets one before it is used. If no row is free and the cache has more
    sequences than rows, the least recently used slot is offloaded, slots that do not run first.

    Args:
        runner: owns the buffers.
        guard: the lock of the session.
        prefix_cache: bytes for rows that sequences with the same beginning share; None: no prefix cache.
        adapters: adapters of the session; None: no adapters.
        max_sequences: most slots; slots that do not run give up their rows to others. None: as many as rows; slots that
            were offloaded do not count.

    Attributes:
        limits: the longest lengths of sequences.
        adapters: adapters of the session.

    Raises:
        OptionError, SessionError: see `PrefixCache`.
    """

    def __init__(
        self,
        runner: Runner,
        guard: Guard | None = None,
        *,
        max_sequences: int | None = None,
        prefix_cache: int | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._runner, self._max_sequences = runner, max_sequences
        self._guard = guard or Guard()
        self.adapters = adapters or Adapters(runner.plan, self._guard)
        self._caches = carried_caches(runner.plan)
        self._rings = sorted({c.capacity for c in self._caches if c.mode is UpdateMode.CIRCULAR})
        self.limits = SequenceLimits(runner)
        self._constants = ConstantInputs(runner.plan, runner.home)
        self._slots: dict[int, Slot] = {}
        self._next = self._clock = 0
        self._rows = Rows(runner)
        self._prefixes = None if prefix_cache is None else PrefixCache(runner, prefix_cache)

    def __repr__(self) -> str:
        limit = f"capacity {self.capacity}" if self.capacity is not None else f"window {self.window}"
        return f"<KVCache: {len(self._slots)} of {self.rows} rows in use, {limit}, {human_bytes(self.bytes)}>"

    def _repr_html_(self) -> Html:
        rows = [(name, slot.row, slot.length) for name, slot in self._slots.items()]
        return tag("div", tag("p", repr(self)[1:-1]), table(("slot", "row", "tokens"), rows))

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots in use, oldest first."""
        with self._guard.lock, self._guard.open:
            return tuple(self._slots)

    def __contains__(self, slot: object) -> bool:
        """True if a slot is in use."""
        return is_whole(slot) and slot in self._slots

    @property
    def lengths(self) -> dict[int, int]:
        """Number of tokens in the cache, by slot."""
        with self._guard.lock, self._guard.open:
            return {name: slot.length for name, slot in self._slots.items()}

    @property
    def free(self) -> int:
        """Number of slots that can still be acquired."""
        with self._guard.lock, self._guard.open:
            if self._max_sequences is not None:
                return self._max_sequences - len(self._slots)
            waiting = sum(slot.row < 0 and slot.running for slot in self._slots.values())
            return max(0, self._runner.max_batch - len(self._used()) - waiting)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Slots that have no row now."""
        with self._guard.lock, self._guard.open:
            return tuple(name for name, slot in self._slots.items() if slot.row < 0)

    @property
    def max_sequences(self) -> int:
        """Most slots at a time: `rows`, unless slots that do not run give up their rows."""
        return self._max_sequences or self.rows

    @property
    def rows(self) -> int:
        """Number of rows of every buffer: most sequences in a step."""
        return self._runner.max_batch

    @property
    def capacity(self) -> int | None:
        """Most tokens of one sequence; None if nothing limits them: circular caches keep the last tokens.

        The limit is the smallest linear cache, or the model's position table if it is shorter. A sequence that brings
        its own positions may need fewer positions than it has tokens.
        """
        return self.limits.capacity

    @property
    def window(self) -> int | None:
        """Rows of the smallest circular cache: the sliding window; None if all caches are linear."""
        return min(self._rings, default=None)

    @property
    def bytes(self) -> int:
        """Bytes of all buffers of caches and state."""
        return self._runner.plan.cache_bytes(self._runner.max_batch)

    @property
    def prefix_stats(self) -> PrefixStats | None:
        """Counts of the prefix cache so far; None without a prefix cache."""
        with self._guard.lock, self._guard.open:
            return None if self._prefixes is None else replace(self._prefixes.stats)

    def tokens(self, slot: int) -> list[int]:
        """Return the token ids of a slot, including tokens that are not in the cache yet."""
        with self._guard.lock, self._guard.open:
            return list(self.slot(slot).tokens)

    def free_tokens(self, slot: int) -> int | None:
        """Return how many tokens still fit after the tokens of a slot; None if nothing limits them."""
        with self._guard.lock, self._guard.open:
            return self.limits.free_tokens(self.slot(slot))

    def largest_update(self, slot: int) -> int:
        """Return the most tokens that one step may write to a slot with the same result as one by one."""
        with self._guard.lock, self._guard.open:
            return largest_update(self._runner, self.slot(slot).length)

    def view(self, name: str) -> Any:
        """Return the whole buffer of one cache ``[max_batch, *physical shape]`` without a copy, for debugging.

        The buffer is a NumPy array on the CPU and an object with ``__dlpack__`` on a GPU. On a GPU, a bfloat16 or
        float8 cache comes as unsigned integers with the same bits. `Slot.row` is the index of a slot's row.

        Raises:
            OptionError: there is no such cache.
        """
        with self._guard.lock, self._guard.open:
            names = [b.past for b in carried_buffers(self._runner.plan)]
            if not isinstance(name, str) or name not in names:
                raise OptionError(f"no cache {shown(name)}; caches are {', '.join(names)}")
            return self._runner.view(name)

    def slot(self, slot: int) -> Slot:
        """Return the state of a slot.

        Raises:
            SlotError: the slot is not in use.
        """
        entry = self._slots.get(slot) if is_whole(slot) else None
        if entry is None:
            used = ", ".join(map(str, self._slots)) or "none"
            raise SlotError(
                f"slot {shown(slot)} is not in use (in use: {used}); slots end when their sequence is removed"
            )
        return entry

    def idle(self, slot: int) -> Slot:
        """Return the state of a slot that may be changed.

        Raises:
            SlotError: the slot is not in use, or the decode loop continues it.
        """
        entry = self.slot(slot)
        if entry.running:
            raise SlotError(f"slot {slot} is generating; wait for its end, or remove it, before you change its cache")
        return entry

    def acquire(
        self,
        tokens: Iterable[int] = (),
        constants: Mapping[str, Array] | Constants | None = None,
        adapter: str | Adapter | None = None,
    ) -> int:
        """Return a new slot. Its row is zeroed. Its tokens wait: nothing is written yet.

        Args:
            tokens: token ids.
            constants: inputs that a sequence has once, for a model with such inputs: an array ``[1, ...]`` for each.
            adapter: name of the adapter that computes the sequence; None: no adapter.

        Raises:
            SlotError: no slot is `free`.
            PromptError: `tokens` are not token ids of the model, or `constants` do not fit the model's inputs.
            OptionError: there is no such adapter.
        """
        taken: list[int] = []
        try:
            return self.take(taken, tokens, constants, adapter)
        except BaseException:
            self.give_back(taken)
            raise

    def read_constants(self, constants: Mapping[str, Array] | Constants | None) -> Constants:
        """Check the constants of a sequence: its inputs beside the tokens.

        Raises:
            PromptError: they do not fit the model's inputs.
        """
        return self._constants.read(constants)

    def release(self, slot: int) -> None:
        """Free a slot and its row.

        Raises:
            SlotError: see `idle`.
        """
        with self._guard.lock, self._guard.open:
            self.idle(slot)
            self._drop(slot)

    def reset(self, slot: int) -> None:
        """Empty a slot: no tokens, and zeros in its row of every cache. Its constants and its adapter stay.

        Raises:
            SlotError: see `idle`.
        """
        with self._guard.lock, self._guard.idle:
            entry = self.idle(slot)
            self._slots[slot] = Slot(entry.row, constants=entry.constants, adapter=entry.adapter, used=entry.used)
            if entry.row >= 0:
                self._rows.clean(entry.row, 0)
            _close(entry)

    def fork(self, source: int) -> int:
        """Return a new slot with the same tokens and cache contents: sequences that share a prefix compute it once.

        Raises:
            SlotError: see `slot` and `acquire`.
        """
        taken: list[int] = []
        try:
            with self._guard.lock, self._guard.idle:
                self.slot(source)
                self._check_free()
                row = self._free_row()
                entry = self.slot(source)  # the slot that was offloaded for the row may be the source
                if entry.row >= 0:
                    self._rows.copy(entry.row, row)
                else:
                    self._fill(entry, row)
                return self._name(entry.copy(row), taken)
        except BaseException:
            self.give_back(taken)
            raise

    def crop(self, slot: int, length: int) -> None:
        """Forget all tokens from `length` on, including tokens that wait; their cache rows are zeroed.

        The other tokens keep their positions; new tokens follow them.

        Raises:
            SlotError: see `idle`.
            OptionError: `length` is not a whole number.
            CapacityError: `length` is more than the slot holds; or a circular cache has lost rows that the sequence
                would see at that length; or the model keeps state, which cannot go back.
        """
        with self._guard.lock, self._guard.idle:
            entry, length = self.idle(slot), as_whole(length, "length", " of tokens")
            if not 0 <= length <= len(entry.tokens):
                raise CapacityError(f"slot {slot} has {len(entry.tokens)} tokens; it cannot be cropped to {length}")
            check_crop(self._runner.plan, slot, entry, length)
            if length >= entry.length:
                self._slots[slot] = entry.truncated(length)
                return
            entry = self._with_row(slot)
            written = self._written(entry, length)
            self._slots[slot] = replace(entry.truncated(length), length=length, written=written)
            self._rows.truncate(entry.row, length, written)

    def reorder(self, indices: Sequence[int], slots: Sequence[int] | None = None) -> None:
        """Give each slot the present contents of another slot, as beam search does between two steps.

        Rows are renamed where possible; a row is copied only if several slots continue it.

        Args:
            indices: the k-th slot gets the contents of ``slots[indices[k]]``.
            slots: the slots to reorder; None: all slots, in the order of the property `slots`.

        Raises:
            SlotError: see `idle`.
            OptionError: not one index per slot, or an index out of range, or a slot twice.
        """
        with self._guard.lock, self._guard.idle:
            names = list(self._slots) if slots is None else as_list(slots, "slots", "slots", SlotError)
            for name in names:
                self.idle(name)
            indices = as_list(indices, "indices", "numbers", OptionError)
            if not all(is_whole(i) for i in indices):
                raise OptionError(f"indices is {shown(indices)}; give whole numbers")
            if len(indices) != len(names) or len(set(names)) != len(names):
                raise OptionError(
                    f"reorder takes one index for each of {len(names)} different slots, not {len(indices)}"
                )
            if any(not 0 <= i < len(names) for i in indices):
                raise OptionError(f"reorder takes indices 0 to {len(names) - 1}, not {list(indices)}")
            entries = [self._with_row(name, names) for name in names]
            dropped = sorted(set(range(len(names))) - set(indices))
            lost = {names[i] for i in dropped}
            before, after = self._slots, {}
            # Slots whose rows are overwritten go first: after an interrupt they are missing, not wrong.
            self._slots = {name: slot for name, slot in before.items() if name not in lost}
            taken: set[int] = set()
            for name, index in zip(names, indices, strict=True):
                source, row = entries[index], entries[index].row
                if index in taken:
                    row = entries[dropped.pop()].row
                    self._rows.copy(source.row, row)
                taken.add(index)
                after[name] = replace(source.copy(row), used=self._tick())
            self._slots = {name: after.get(name, slot) for name, slot in before.items()}

    def move(self, slot: int, row: int) -> None:
        """Move a slot to a row that no slot uses.

        Raises:
            SlotError: see `slot`; or the row is in use or does not exist.
        """
        with self._guard.lock, self._guard.idle:
            entry = self._with_row(slot)
            if is_whole(row) and entry.row == row:
                return
            if (
                not is_whole(row)
                or not 0 <= row < self._runner.max_batch
                or any(s.row == row for s in self._slots.values())
            ):
                raise SlotError(
                    f"row {shown(row)} is in use, or not one of the {self._runner.max_batch} rows; move to a free one"
                )
            self._rows.copy(entry.row, row)
            entry.row = int(row)

    def compact(self) -> None:
        """Move n slots to rows 0 to n - 1, so that a step over all of them is one row range."""
        with self._guard.lock, self._guard.idle:
            used = self._used()
            count = len(used)
            holes = sorted(set(range(count)) - used)
            for name, slot in self._slots.items() if holes else ():
                if slot.row >= count:
                    self.move(name, holes.pop(0))

    # --- called by the decode loop

    def put(self, slot: int, entry: Slot) -> None:
        """Replace the state of a slot. All of its text changes at once: an interrupt cannot leave half of a change."""
        self._slots[slot] = entry

    def note_written(self, slot: int, tokens: int, guesses: int = 0) -> None:
        """Note that the runner has written `tokens` of the slot's waiting tokens, and then `guesses` guesses."""
        entry = self._slots[slot]
        length = entry.length + tokens
        self._slots[slot] = replace(
            entry,
            length=length,
            written=max(entry.written, length + guesses),
            embeds=entry.embeds.within(length),
            used=self._tick(),
        )

    def note_chosen(self, slot: int, tokens: Sequence[int], rejected: int, after: Sequence[int]) -> None:
        """Append chosen tokens: first accepted guesses, which are written already, then tokens that wait.

        The rows of the `rejected` guesses are zeroed.
        """
        entry = self._slots[slot]
        length = entry.length + len(tokens)
        written = self._written(entry, length) if rejected else entry.written
        if rejected:
            self._rows.truncate(entry.row, length, written)
        if tokens:
            self._slots[slot] = replace(entry, tokens=[*entry.tokens, *tokens, *after], length=length, written=written)
        else:
            entry.written = written
            entry.tokens.extend(after)  # a copy would cost more for longer texts

    def _written(self, entry: Slot, length: int) -> int:
        """Return how many tokens count as written once a slot goes back to `length`.

        Rows of a circular cache that has wrapped stay: the next token overwrites the only stale row.
        """
        return entry.written if any(entry.written > rows for rows in self._rings) else length

    def note_touched(self, slot: int, stop: int) -> None:
        """Note that a step will write rows up to `stop`. If the step fails, they are zeroed before they are reused."""
        self._rows.touch(self._slots[slot].row, stop)

    def recall(self, slot: int, keep: int = 1) -> None:
        """Copy the first tokens of an unwritten slot from the prefix cache, as many as it has.

        Args:
            slot: a slot that has a row.
            keep: number of last tokens whose logits are needed; the model computes these tokens, and at least one.
        """
        entry = self._slots[slot]
        if self._prefixes is None or entry.length or not entry.pending:
            return
        most = max(0, len(entry.tokens) - max(keep, 1))
        most = most if entry.by_ids is None else min(most, entry.by_ids)
        blocks = self._prefixes.find(entry.tokens, most, _digest(entry))
        length = len(blocks) * BLOCK
        self._rows.touch(entry.row, length)
        self._prefixes.fill(entry.row, blocks)
        written = max(entry.written, length)
        self._slots[slot] = replace(entry, length=length, written=written, remembered=length)

    def remember(self, slot: int) -> None:
        """Copy the rows of a slot to the prefix cache, if they are new and fill a block."""
        entry = self._slots[slot]
        if self._prefixes is None or entry.row < 0:
            return
        length = entry.length if entry.by_ids is None else min(entry.length, entry.by_ids)
        if length // BLOCK > entry.remembered // BLOCK:
            self._prefixes.add(entry.row, entry.tokens, length // BLOCK, _digest(entry))
            entry.remembered = length

    # --- files

    def save(self, path: str | os.PathLike[str], slots: Sequence[int] | None = None) -> None:
        """Write slots with their tokens and cache contents to a safetensors file, completely or not at all.

        Args:
            path: path of the file.
            slots: the slots to save; None: all.

        Raises:
            SlotError: see `slot`.
            OutputError: the file cannot be written.
            SessionError: the model's files are gone, or have changed since the session was opened.
        """
        from trt_kvcache.runtime.cache_file import save_slots

        with self._guard.lock, self._guard.idle:
            which = list(self._slots) if slots is None else as_list(slots, "slots", "slots", SlotError)
            chosen = {name: self.slot(name) for name in which}
            save_slots(path, self._runner, chosen)

    def load(self, path: str | os.PathLike[str]) -> dict[int, int]:
        """Load saved slots into new slots.

        Returns:
            The new slot of each saved slot.

        Raises:
            CacheFileError: the file is unreadable or damaged, or was saved with another model or other caches.
            SlotError: there are fewer free rows than saved slots. Nothing was loaded.
        """
        from trt_kvcache.runtime.cache_file import open_slots

        taken: list[int] = []
        try:
            with self._guard.lock, self._guard.idle, open_slots(path, self._runner, self.adapters) as saved:
                if len(saved.slots) > self.free:
                    raise SlotError(
                        f"{path} holds {len(saved.slots)} sequence(s), and there is room for {self.free} of "
                        f"{self.max_sequences}; remove sequences first, or open the session with a larger max_batch or "
                        "max_sequences"
                    )
                for old, slot in saved.slots.items():
                    name = self.take(taken, constants=slot.constants, adapter=slot.adapter)
                    row = self._with_row(name).row
                    self._rows.touch(row, slot.written)
                    saved.read(old, row)
                    self._slots[name] = replace(slot.copy(row), used=self._tick())
                saved.check()
                return dict(zip(saved.slots, taken, strict=True))
        except BaseException:
            self.give_back(taken)
            raise

    # --- new slots whose names the caller may not have yet

    def take(
        self,
        taken: list[int],
        tokens: Iterable[int] = (),
        constants: Mapping[str, Array] | Constants | None = None,
        adapter: str | Adapter | None = None,
        *,
        queue: bool = False,
    ) -> int:
        """`acquire`, safe against interrupts: `taken` has the slot before the call returns; pass it to `give_back`.

        Args:
            taken: gets the name before the slot exists.
            tokens: see `acquire`.
            constants: see `acquire`.
            adapter: see `acquire`; an `Adapter` object, which may have been unloaded since.
            queue: the slot may get its row later, if sequences run in all rows and nothing limits their number.

        Raises:
            SlotError, PromptError, OptionError: see `acquire`.
        """
        with self._guard.lock, self._guard.idle:
            loaded = adapter if isinstance(adapter, Adapter) else self.adapters.find(adapter)
            ids = read_ids(tokens, self._runner.vocab)
            checked = self.read_constants(constants)
            row = self._rows.free(self._used())
            ahead = queue and any(slot.row < 0 and slot.running for slot in self._slots.values())
            may_wait = self._is_run() or (ahead and row is not None)
            if not (queue and self._max_sequences is None and may_wait):
                self._check_free()
            row = None if ahead else row  # other slots wait and come first
            if row is not None:
                self._rows.clean(row, 0)
            return self._name(Slot(-1 if row is None else row, ids, constants=checked, adapter=loaded), taken)

    def give_back(self, taken: Sequence[int]) -> None:
        """Free those of the slots that exist. A step that continues one of them ends its sequence."""
        if taken:
            with self._guard.lock:
                for name in taken:
                    self._drop(name)

    def _name(self, slot: Slot, taken: list[int]) -> int:
        name = self._next
        self._next += 1
        taken.append(name)
        slot.used = self._tick()
        self._slots[name] = slot
        return name

    def _drop(self, name: int) -> None:
        slot = self._slots.pop(name, None)
        if slot is not None:
            _close(slot)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # --- rows

    def offload(self, slot: int, path: str | os.PathLike[str] | None = None) -> None:
        """Move the cache contents of a slot to host memory or to a file, and free its row; the slot stays.

        Host memory is page-locked if the caches lie on a GPU. `load` can read such a file, too; the file stays when the
        slot is restored. A slot that is offloaded already moves to the file if a path is given.

        Raises:
            SlotError: see `idle`.
            SessionError: too little memory is free.
            OutputError: the file cannot be written. In all cases, nothing has changed.
        """
        with self._guard.lock, self._guard.idle:
            entry = self.idle(slot)
            if path is None and entry.row < 0:
                return
            offloaded = self._host(entry) if path is None else FileRows(path, self._runner, slot, entry)
            self._slots[slot] = replace(entry, row=-1, offloaded=offloaded)
            _close(entry)

    def restore(self, slot: int) -> None:
        """Bring an offloaded slot back to a row. Methods that need the row restore the slot, too.

        Raises:
            SlotError: see `slot`; or no row can be freed.
            CacheFileError: the file is gone or damaged, or holds something else. The slot stays offloaded.
        """
        with self._guard.lock, self._guard.idle:
            self._with_row(slot)

    def give_row(self, slot: int) -> bool:
        """Give a slot a row, if need be by offloading a slot that does not run. Return False if it must wait.

        Raises:
            SlotError: see `slot`; or all rows hold sequences that do not run, and no row will become free.
        """
        with self._guard.lock, self._guard.idle:
            if self.slot(slot).row < 0:
                idle = any(s.row >= 0 and not s.running for s in self._slots.values())
                may_wait = self._is_run() if self._max_sequences is None else not idle
                if may_wait and self._rows.free(self._used()) is None:
                    return False
                self._with_row(slot)
            return True

    def _is_run(self) -> bool:
        """Return True if a sequence runs in a row: the row will become free."""
        return any(slot.row >= 0 and slot.running for slot in self._slots.values())

    def seat_together(self, slots: Sequence[int]) -> None:
        """Give each of these slots a row; other slots may lose theirs.

        Raises:
            SlotError: there are not enough rows.
        """
        with self._guard.lock, self._guard.idle:
            for slot in slots:
                self._with_row(slot, slots)

    def _with_row(self, slot: int, keep: Collection[int] = ()) -> Slot:
        """Return a slot that has a row; offload another slot if need be, but none in `keep`."""
        entry = self.slot(slot)
        if entry.row < 0:
            row = self._free_row(keep)
            self._fill(entry, row)
            self._slots[slot] = replace(entry, row=row, offloaded=None, used=self._tick())
            _close(entry)
        return self._slots[slot]

    def _fill(self, entry: Slot, row: int) -> None:
        """Write the contents of a slot without a row to a row, and zeros after them."""
        self._rows.clean(row, entry.written)
        self._rows.touch(row, entry.written)
        if entry.offloaded is not None:
            entry.offloaded.fill(row)

    def _free_row(self, keep: Collection[int] = ()) -> int:
        """Return a row that no slot has; offload a slot if need be."""
        row = self._rows.free(self._used())
        if row is not None:
            return row
        others = {name: slot for name, slot in self._slots.items() if slot.row >= 0 and name not in keep}
        if self._max_sequences is None or not others:
            raise SlotError(_full(self._runner.max_batch))
        name, entry = min(others.items(), key=lambda item: (item[1].running, item[1].used))
        self._slots[name] = replace(entry, row=-1, offloaded=self._host(entry))
        return entry.row

    def _host(self, entry: Slot) -> HostRows | None:
        return HostRows(self._runner, entry.row, entry.written) if entry.written else None

    def _used(self) -> set[int]:
        return {slot.row for slot in self._slots.values() if slot.row >= 0}

    def _check_free(self) -> None:
        if self.free > 0:
            return
        if self._max_sequences is None:
            raise SlotError(_full(self._runner.max_batch))
        raise SlotError(
            f"there are {len(self._slots)} sequences, and max_sequences is {self._max_sequences}; remove one, or open "
            "the session with a larger max_sequences"
        )


def _digest(slot: Slot) -> bytes:
    """Return a digest of the slot's adapter: its cache rows depend on tokens and adapter."""
    return b"" if slot.adapter is None else bytes.fromhex(slot.adapter.digest)


def _close(slot: Slot) -> None:
    """Free the offloaded contents of a slot that has a row again, or is gone."""
    if slot.offloaded is not None:
        slot.offloaded.close()


def _full(rows: int) -> str:
    return (
        f"all {rows} rows hold a sequence; remove or offload one, or open the session with a larger max_batch, or with "
        "max_sequences"
    )
