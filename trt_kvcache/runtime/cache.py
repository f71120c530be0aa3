"""The KV caches of a session, as its callers use them: acquire, copy, crop, save and offload sequences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trt_kvcache.arguments import as_list, as_whole, is_whole, shown
from trt_kvcache.errors import CapacityError, OptionError, SlotError
from trt_kvcache.messages import human_bytes
from trt_kvcache.page import Html, table, tag
from trt_kvcache.runtime.adapters import Adapters
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.cache_rows import CacheRows
from trt_kvcache.runtime.encoders.constants import ConstantInputs, Constants
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.prefix import PrefixStats
from trt_kvcache.runtime.runner import Array, Runner
from trt_kvcache.runtime.slot import Slot
from trt_kvcache.runtime.token_inputs import read_ids


class KVCache:
    """The KV caches of a session, of fixed capacity, and the sequences in them. Any thread may call any method.

    A *slot* is the number that names a sequence. A slot has a batch row in every cache buffer, unless it was offloaded.
    """

    def __init__(self, runner: Runner, rows: CacheRows, guard: Guard, adapters: Adapters) -> None:
        self._runner, self._rows, self._guard, self._adapters = runner, rows, guard, adapters
        self._constants = ConstantInputs(runner.plan, runner.home)

    def __repr__(self) -> str:
        limit = f"capacity {self.capacity}" if self.capacity is not None else f"window {self.window}"
        return f"<KVCache: {len(self._rows.slots)} of {self.rows} rows in use, {limit}, {human_bytes(self.bytes)}>"

    def _repr_html_(self) -> Html:
        rows = [(name, slot.row, slot.length) for name, slot in self._rows.slots.items()]
        return tag("div", tag("p", repr(self)[1:-1]), table(("slot", "row", "tokens"), rows))

    @property
    def slots(self) -> tuple[int, ...]:
        """The sequences in the cache, by slot number, oldest first."""
        with self._guard.lock, self._guard.open:
            return tuple(self._rows.slots)

    def __contains__(self, slot: object) -> bool:
        """True if this number is the slot of a sequence in the cache."""
        return slot in self._rows

    @property
    def lengths(self) -> dict[int, int]:
        """A mapping from each slot to the number of the sequence's tokens that are in the cache."""
        with self._guard.lock, self._guard.open:
            return {name: slot.length for name, slot in self._rows.slots.items()}

    @property
    def free(self) -> int:
        """Number of sequences that can still be added."""
        with self._guard.lock, self._guard.open:
            return self._rows.free

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Slots of sequences without a batch row: their cache contents were moved to host memory or to a file."""
        with self._guard.lock, self._guard.open:
            return tuple(name for name, slot in self._rows.slots.items() if slot.row < 0)

    @property
    def max_sequences(self) -> int:
        """Most sequences at a time. It exceeds `rows` only if sequences that are not generating may be offloaded."""
        return self._rows.max_sequences or self.rows

    @property
    def rows(self) -> int:
        """Number of batch rows of every cache buffer: the most sequences in a step."""
        return self._rows.count

    @property
    def capacity(self) -> int | None:
        """Most tokens of one sequence; None if there is no limit, because all caches are circular.

        The smallest linear cache or the model's position table sets the limit. If the caller gives positions, several
        tokens may share one; then the table allows more tokens than this.
        """
        return self._rows.capacity

    @property
    def window(self) -> int | None:
        """Number of cache rows in the smallest circular cache: the sliding window. None if all caches are linear."""
        return min(self._rows.rings, default=None)

    @property
    def bytes(self) -> int:
        """Bytes of all buffers of caches and state."""
        return self._runner.plan.cache_bytes(self.rows)

    @property
    def prefix_stats(self) -> PrefixStats | None:
        """Counts of the prefix cache, such as hits; None without a prefix cache."""
        with self._guard.lock, self._guard.open:
            return None if self._rows.prefixes is None else replace(self._rows.prefixes.stats)

    def tokens(self, slot: int) -> list[int]:
        """Return the token ids of a slot's sequence, including tokens that are not in the cache yet."""
        with self._guard.lock, self._guard.open:
            return list(self._rows.slot(slot).tokens)

    def free_tokens(self, slot: int) -> int | None:
        """Return how many more tokens a slot's sequence may get before the cache is full; None if there is no limit."""
        with self._guard.lock, self._guard.open:
            return self._rows.free_tokens(slot)

    def slot(self, slot: int) -> Slot:
        """Return a sequence's batch row and other state, for debugging. `SlotError` if the slot is not in use."""
        return self._rows.slot(slot)

    def view(self, name: str) -> Any:
        """Return the whole buffer of one cache ``[max_batch, *physical shape]`` without a copy, for debugging.

        On the CPU, the buffer is a NumPy array. On a GPU, it is an object with ``__dlpack__``; a bfloat16 or float8
        cache comes as unsigned integers with the same bits. `Slot.row` is the index of a slot's batch row. Raises
        `OptionError` if there is no such cache.
        """
        with self._guard.lock, self._guard.open:
            names = [b.past for b in carried_buffers(self._runner.plan)]
            if not isinstance(name, str) or name not in names:
                raise OptionError(f"no cache {shown(name)}; caches are {', '.join(names)}")
            return self._runner.view(name)

    def acquire(
        self,
        tokens: Iterable[int] = (),
        constants: Mapping[str, Array] | Constants | None = None,
        adapter: str | None = None,
    ) -> int:
        """Add a sequence with a zeroed batch row; return its slot. The tokens are not written to the cache yet.

        Args:
            tokens: token ids.
            constants: inputs that stay the same in all steps of a sequence, such as an encoder's results: arrays ``[1,
                ...]`` by input name.
            adapter: name of the sequence's adapter; None: no adapter.

        Raises:
            SlotError: no slot is `free`.
            PromptError: `tokens` are not token ids of the model, or `constants` do not fit the model's inputs.
            OptionError: there is no such adapter.
        """
        with self._guard.lock, self._guard.idle:
            ids = read_ids(tokens, self._runner.vocab)
            return self._rows.take(ids, self.read_constants(constants), self._adapters.find(adapter))

    def read_constants(self, constants: Mapping[str, Array] | Constants | None) -> Constants:
        """Check and return a sequence's constants (see `acquire`). `PromptError` if they do not fit the model."""
        return self._constants.read(constants)

    def release(self, slot: int) -> None:
        """Remove a sequence, and free its batch row. Raises `SlotError` if its slot is not in use, or is generating."""
        with self._guard.lock, self._guard.open:
            self._rows.idle(slot)
            self._rows.drop(slot)

    def reset(self, slot: int) -> None:
        """Empty a sequence: remove its tokens, and zero its batch row in every cache. Its constants and adapter stay.

        Raises `SlotError` if the slot is not in use, or is generating.
        """
        with self._guard.lock, self._guard.idle:
            self._rows.idle(slot)
            self._rows.reset(slot)

    def fork(self, source: int) -> int:
        """Copy a sequence, so that a common prefix is computed only once. Return the slot of the copy.

        Raises `SlotError` if the slot is not in use, or no slot is free.
        """
        with self._guard.lock, self._guard.idle:
            return self._rows.copy(source)

    def crop(self, slot: int, length: int) -> None:
        """Shorten a sequence to its first `length` tokens. The cache rows of the other tokens are zeroed.

        The next tokens of the sequence get the positions from `length` on.

        Raises:
            SlotError: the slot is not in use, or is generating.
            OptionError: `length` is not a whole number.
            CapacityError: `length` is larger than the number of tokens; or a circular cache has lost rows that the
                sequence would see at that length; or the model has state, of which only the newest is kept.
        """
        with self._guard.lock, self._guard.idle:
            entry, length = self._rows.idle(slot), as_whole(length, "length", " of tokens")
            if not 0 <= length <= len(entry.tokens):
                raise CapacityError(f"slot {slot} has {len(entry.tokens)} tokens; it cannot be cropped to {length}")
            self._rows.crop(slot, length)

    def reorder(self, indices: Sequence[int], slots: Sequence[int] | None = None) -> None:
        """Give each sequence the contents that another one has before the call, as beam search does between two steps.

        Args:
            indices: the k-th slot gets the contents of ``slots[indices[k]]``.
            slots: the slots to reorder; None: all slots, in the order of the property `slots`.

        Raises:
            SlotError: a slot is not in use, or is generating.
            OptionError: the number of indices is wrong, an index is out of range, or a slot occurs twice.
        """
        with self._guard.lock, self._guard.idle:
            names = list(self._rows.slots) if slots is None else as_list(slots, "slots", "slots", SlotError)
            for name in names:
                self._rows.idle(name)
            indices = as_list(indices, "indices", "numbers", OptionError)
            if not all(is_whole(i) for i in indices):
                raise OptionError(f"indices is {shown(indices)}; give whole numbers")
            if len(indices) != len(names) or len(set(names)) != len(names):
                wanted = f"one index for each of {len(names)} different slots"
                raise OptionError(f"reorder takes {wanted}, not {len(indices)}")
            if any(not 0 <= i < len(names) for i in indices):
                raise OptionError(f"reorder takes indices 0 to {len(names) - 1}, not {list(indices)}")
            self._rows.reorder(indices, names)

    def move(self, slot: int, row: int) -> None:
        """Move a sequence to a free batch row. Raises `SlotError` if its slot is not in use, or the row is not free."""
        with self._guard.lock, self._guard.idle:
            row = as_whole(row, "row", error=SlotError)
            if self._rows.with_row(slot).row != row:
                if not 0 <= row < self.rows or any(s.row == row for s in self._rows.slots.values()):
                    raise SlotError(f"row {row} is in use, or not one of the {self.rows} rows; move to a free one")
                self._rows.move(slot, row)

    def compact(self) -> None:
        """Move the n sequences with batch rows to rows 0 to n - 1, because one step computes only neighboring rows."""
        with self._guard.lock, self._guard.idle:
            self._rows.compact()

    def save(self, path: str | os.PathLike[str], slots: Sequence[int] | None = None) -> None:
        """Write sequences (None: all) and their cache contents to a safetensors file, completely or not at all.

        Raises:
            SlotError: a slot is not in use.
            OutputError: the file cannot be written.
            SessionError: the model's files are gone, or have changed since the session was opened.
        """
        from trt_kvcache.runtime.cache_file import save_slots

        with self._guard.lock, self._guard.idle:
            which = list(self._rows.slots) if slots is None else as_list(slots, "slots", "slots", SlotError)
            save_slots(path, self._runner, {name: self._rows.slot(name) for name in which})

    def load(self, path: str | os.PathLike[str]) -> dict[int, int]:
        """Load all sequences of a saved file; return the new slot for each saved slot. After an error, none is loaded.

        Raises `CacheFileError` if the file is damaged, or of another model or other caches; `SlotError` if it has more
        slots than batch rows are free.
        """
        from trt_kvcache.runtime.cache_file import load_slots

        with self._guard.lock, self._guard.idle:
            return load_slots(path, self._runner, self._rows, self._adapters)

    def offload(self, slot: int, path: str | os.PathLike[str] | None = None) -> None:
        """Move a sequence's cache contents to host memory, or to a file if `path` is given, and free its batch row.

        The sequence keeps its slot. Host memory is page-locked if the caches lie on a GPU. `load` can read the file,
        too; `restore` does not remove the file. After an error, nothing has changed.

        Raises:
            SlotError: the slot is not in use, or is generating.
            SessionError: too little memory is free.
            OutputError: the file cannot be written.
        """
        from trt_kvcache.runtime.cache_file import FileRows

        with self._guard.lock, self._guard.idle:
            entry = self._rows.idle(slot)
            if path is None and entry.row < 0:
                return
            contents = self._rows.host_copy(entry) if path is None else FileRows(path, self._runner, slot, entry)
            self._rows.slots[slot] = replace(entry, row=-1, offloaded=contents)
            entry.close()

    def restore(self, slot: int) -> None:
        """Move an offloaded sequence back to a batch row. Methods that need the row do this themselves.

        Raises:
            SlotError: the slot is not in use; or no batch row can be freed.
            CacheFileError: the file is gone or damaged, or has other contents. The sequence stays offloaded.
        """
        with self._guard.lock, self._guard.idle:
            self._rows.with_row(slot)
