"""Saved slots: a safetensors file with the tokens and cache contents of slots, and the identity of their model.

Each slot has these tensors:

- ``<slot>/tokens``: int64;
- ``<slot>/<past>``: the cache rows in use, in the engine's layout, or the whole state;
- ``<slot>/<input>``: an input that stays the same in all steps of the sequence;
- from format 2 on, the caller's positions ``<slot>/given_positions`` (int64 ``[planes, K]``), and the caller's
  embeddings of waiting tokens, ``<slot>/given_embeds`` ``[K, H]`` and ``<slot>/given_embeds_at`` (int64 ``[K]``).

A file has the lowest format version that can hold its slots. Format 3 adds the digest of each slot's adapter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from trt_kvcache.arguments import as_path
from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import CacheFileError, OutputError, PromptError, SlotError
from trt_kvcache.files import check_output, open_regular, publish, sync, temporary_file
from trt_kvcache.importer.cache_plan import UpdateMode
from trt_kvcache.runtime.adapters import Adapters
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.cache_rows import CacheRows
from trt_kvcache.runtime.embeddings import embedded_input
from trt_kvcache.runtime.encoders.constants import NO_CONSTANTS, ConstantInputs, Constants
from trt_kvcache.runtime.runner import Array, Runner
from trt_kvcache.runtime.slot import Slot
from trt_kvcache.runtime.token_inputs import Embeds, PositionInput, Positions, read_ids

_FORMAT = "trt_kvcache.cache.1"
_EXTENDED_FORMAT = "trt_kvcache.cache.2"
_ADAPTED_FORMAT = "trt_kvcache.cache.3"
_Listed = TypeVar("_Listed")
_PLAIN = ("float16", "float32", "float64", "bfloat16", "int8", "uint8", "int32", "int64", "bool")


class SavedSlots:
    """An open file of saved slots.

    Attributes:
        slots: the saved slots, without batch rows. A key is the number that a slot had when it was saved.
        adapters: maps a slot that has an adapter to the adapter's digest.
        digest: digest of the file's contents, as saved; None if the file lacks it.
    """

    def __init__(self, file: Any, path: Path, metadata: Mapping[str, str], runner: Runner) -> None:
        self._file, self.path, self._runner = file, path, runner
        self._names = set(file.keys())
        self._digests: dict[str, bytes] = {}  # digest of each tensor that was read, by name
        self.digest = metadata.get("digest")
        self.slots = _slots(self, metadata, runner)
        self.adapters = _listed(path, "adapters", metadata.get("adapters", "{}"), dict[int, str])

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def contents(self, slot: int) -> dict[str, Array]:
        """Return a slot's saved contents by name of the past input. Raises `CacheFileError` if one is wrong."""
        written, arrays = self.slots[slot].written, {}
        for buffer in carried_buffers(self._runner.plan):
            name = f"{slot}/{buffer.past}"
            arrays[buffer.past] = self.read(name, buffer.array_dtype, buffer.row_shape(written))
        return arrays

    def check(self) -> None:
        """Raise `CacheFileError` if the digest of the tensors read so far differs from the one in the file."""
        if self.digest != _digest_of(self._digests, self.slots, self.adapters):
            raise CacheFileError(
                f"{self.path}: the file is damaged, because its contents are not what was saved; save the cache again"
            )

    def read(self, name: str, dtype: np.dtype[Any] | None = None, shape: tuple[int, ...] | None = None) -> Array:
        """Return a copy of a tensor. Raises `CacheFileError` if it is missing, or has a wrong dtype or shape."""
        try:
            data: Array = self._file.get_tensor(name)
        except (SafetensorError, AttributeError, TypeError) as error:  # NumPy lacks some of the format's types
            raise CacheFileError(f"{self.path}: {error}; save the cache again") from error
        if (dtype and data.dtype != _plain_dtype(dtype)) or (shape is not None and data.shape != shape):
            wanted = " ".join(str(part) for part in (dtype, shape and list(shape)) if part is not None)
            raise CacheFileError(
                f"{self.path}: tensor '{name}' is {data.dtype} {list(data.shape)}; expected {wanted}; save the "
                "cache again"
            )
        self._digests[name] = _digest(data)
        return data.view(dtype) if dtype else data


def save_slots(path: str | os.PathLike[str], runner: Runner, slots: dict[int, Slot]) -> str:
    """Write slots to a file, completely or not at all; return its digest. `KVCache.save` lists the errors."""
    final = check_output(path)
    tensors: dict[str, Array] = {}
    for name, slot in slots.items():
        tensors[f"{name}/tokens"] = np.array(slot.tokens, np.int64)
        for constant, array in slot.constants.arrays.items():
            tensors[f"{name}/{constant}"] = np.ascontiguousarray(_plain(np.asarray(array)))
        for past, data in _contents(runner, slot).items():
            tensors[f"{name}/{past}"] = np.ascontiguousarray(_plain(data))
        if slot.positions:
            tensors[f"{name}/given_positions"] = np.ascontiguousarray(slot.positions.array)
        if len(slot.embeds.at):
            tensors[f"{name}/given_embeds_at"] = np.ascontiguousarray(slot.embeds.at)
            tensors[f"{name}/given_embeds"] = np.ascontiguousarray(_plain(slot.embeds.rows))
    digests = {name: _digest(data) for name, data in tensors.items()}
    extended = any(slot.positions or len(slot.embeds.at) for slot in slots.values())
    adapters = {int(name): slot.adapter.digest for name, slot in slots.items() if slot.adapter is not None}
    lengths = {str(name): (slot.length, slot.written) for name, slot in slots.items()}
    digest = _digest_of(digests, slots, adapters)
    metadata = {
        "format": _ADAPTED_FORMAT if adapters else _EXTENDED_FORMAT if extended else _FORMAT,
        "model": runner.identity(),
        "caches": _layout(runner),
        "slots": msgspec.json.encode(lengths).decode(),
        "digest": digest,
    }
    if adapters:
        metadata["adapters"] = msgspec.json.encode(adapters).decode()
    with temporary_file(final) as temporary:
        try:
            save_file(tensors, temporary, metadata)
            with open(temporary, "r+b") as file:
                sync(file)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{final}: cannot be written: {error}") from error
        publish([(temporary, final)])
    return digest


def load_slots(path: str | os.PathLike[str], runner: Runner, rows: CacheRows, adapters: Adapters) -> dict[int, int]:
    """Load all slots of a file into new slots; return the new slot of each. `KVCache.load` lists the errors."""
    with open_slots(path, runner, adapters) as saved:
        if len(saved.slots) > rows.free:
            raise SlotError(
                f"{path} holds {len(saved.slots)} sequence(s), and there is room for {rows.free} of "
                f"{rows.max_sequences or rows.count}; remove sequences first, or open the session with a larger "
                "max_batch or max_sequences"
            )
        names: dict[int, int] = {}
        try:
            for old, slot in saved.slots.items():
                names[old] = rows.take(constants=slot.constants, adapter=slot.adapter)
                entry = rows.with_row(names[old])
                rows.touch(entry.row, slot.written)
                _write(runner, entry.row, saved.contents(old))
                rows.slots[names[old]] = replace(slot.copy(entry.row), used=entry.used)
            saved.check()
        except BaseException:
            for name in names.values():
                rows.drop(name)
            raise
        return names


class FileRows:
    """The cache contents of an offloaded slot, in a file that stays, and that `KVCache.load` can read, too."""

    def __init__(self, path: str | os.PathLike[str], runner: Runner, name: int, slot: Slot) -> None:
        self._digest = save_slots(path, runner, {name: slot})
        self._path, self._runner, self._name = Path(path).absolute(), runner, name

    def fill(self, row: int) -> None:
        """Write the saved contents to a batch row. Raises `CacheFileError` if the file is gone, damaged or replaced."""
        _write(self._runner, row, self.arrays())

    def arrays(self) -> Mapping[str, Array]:
        """Return the saved contents by name of the past input; `fill` lists the errors."""
        with open_slots(self._path, self._runner, None) as saved:
            if saved.digest != self._digest:
                raise CacheFileError(
                    f"{self._path}: another cache was written to this file since slot {self._name} was offloaded to "
                    "it; put the first one back, or remove the slot"
                )
            arrays = saved.contents(self._name)
            saved.check()
            return arrays

    def close(self) -> None:
        """Do nothing: the file belongs to the caller."""


def _write(runner: Runner, row: int, contents: Mapping[str, Array]) -> None:
    for past, data in contents.items():
        runner.write_row(past, row, data)


def _contents(runner: Runner, slot: Slot) -> Mapping[str, Array]:
    if slot.offloaded is not None:
        return slot.offloaded.arrays()
    if slot.row < 0:
        return {b.past: np.zeros(b.row_shape(0), b.array_dtype) for b in carried_buffers(runner.plan)}
    written = {b.past: min(slot.written, b.capacity) for b in carried_buffers(runner.plan)}
    return {past: runner.read_row(past, slot.row, rows) for past, rows in written.items()}


@contextmanager
def open_slots(path: str | os.PathLike[str], runner: Runner, adapters: Adapters | None) -> Iterator[SavedSlots]:
    """Open a file of saved slots for this runner. Raises `CacheFileError` if model or caches differ."""
    path = as_path(path, "path", CacheFileError)
    try:
        open_regular(path).close()  # opening a pipe would block all threads until something writes to it
        file = safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise CacheFileError(f"{path}: this is not a saved cache: {error}") from error
    with file:
        metadata: dict[str, str] = file.metadata() or {}  # type: ignore[no-untyped-call]
        if metadata.get("format") not in (_FORMAT, _EXTENDED_FORMAT, _ADAPTED_FORMAT):
            raise CacheFileError(
                f"{path}: this version cannot read format {metadata.get('format')!r} of saved caches; it reads "
                f"{_FORMAT!r} to {_ADAPTED_FORMAT!r}"
            )
        identity = runner.identity()
        if metadata.get("model") != identity:
            raise CacheFileError(
                f"{path}: this cache was saved with another model ({str(metadata.get('model'))[:16]}..., this one "
                f"is {identity[:16]}...); no other model can use its contents: load it with the model that saved it"
            )
        if metadata.get("caches") != _layout(runner):
            raise CacheFileError(
                f"{path}: this cache was saved from caches of other sizes, layouts or scales of the same model; "
                "open the model with the options (capacity, cache layout, calibration) that it was saved with"
            )
        saved = SavedSlots(file, path, metadata, runner)
        if adapters is not None:
            for name in saved.slots.keys() & saved.adapters.keys():
                digest = saved.adapters[name]
                saved.slots[name].adapter = adapters.with_digest(digest)
                if saved.slots[name].adapter is None:
                    raise CacheFileError(
                        f"{path}: slot {name} was computed with an adapter that is not loaded ({digest[:16]}...); load "
                        "it first, under any name"
                    )
        yield saved


def _listed(path: Path, what: str, text: str, kind: type[_Listed]) -> _Listed:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CacheFileError(f"{path}: its list of {what} cannot be read: {error}") from error


def _slots(file: SavedSlots, metadata: Mapping[str, str], runner: Runner) -> dict[int, Slot]:
    path, slots = file.path, {}
    names = _listed(path, "slots", metadata.get("slots", ""), dict[int, tuple[int, int]])
    rows = [c.capacity for c in runner.plan.caches if c.mode is UpdateMode.LINEAR]
    for name, (length, written) in names.items():
        try:
            tokens = read_ids(file.read(f"{name}/tokens"), runner.vocab)
        except PromptError as error:
            raise CacheFileError(f"{path}: slot {name}: {error}") from None
        if not 0 <= length <= min(written, len(tokens)) or written > min(rows, default=written):
            raise CacheFileError(
                f"{path}: slot {name} has {len(tokens)} tokens, the length {length} and {written} written rows"
                f"{f' in caches of {min(rows)} rows' if rows else ''}, which is a contradiction; save the cache again"
            )
        slots[name] = Slot(-1, tokens, length, written, constants=_constants(file, name, runner))
        _read_inputs(file, slots[name], name, runner)
        if slots[name].positions or embedded_input(runner.plan) is not None:
            slots[name].by_ids = 0  # a file does not say which tokens came as embeddings
    return slots


def _read_inputs(file: SavedSlots, slot: Slot, name: int, runner: Runner) -> None:
    """Read the positions and embeddings that the caller gave for the slot's tokens, if the file has any."""
    if f"{name}/given_positions" in file:
        data = file.read(f"{name}/given_positions")
        planes = PositionInput(runner.plan).planes
        if data.dtype != np.int64 or data.ndim != 2 or len(data) != planes or data.shape[1] > len(slot.tokens):
            raise CacheFileError(
                f"{file.path}: slot {name}: positions are {data.dtype} {list(data.shape)}; expected int64 "
                f"[{planes}, n], with n at most the number of tokens, {len(slot.tokens)}"
            )
        slot.positions = Positions(data)
    if f"{name}/given_embeds" in file:
        tensor = embedded_input(runner.plan)
        at = file.read(f"{name}/given_embeds_at", np.dtype(np.int64))
        rows = file.read(f"{name}/given_embeds", None if tensor is None else array_dtype(tensor.dtype))
        waiting = set(range(slot.length, len(slot.tokens)))
        if tensor is None or rows.shape != (at.size, tensor.shape[-1]) or not waiting >= set(at.ravel().tolist()):
            raise CacheFileError(
                f"{file.path}: slot {name}: embeddings are {list(rows.shape)}, which does not fit "
                f"its {len(waiting)} waiting tokens or the model"
            )
        slot.embeds = Embeds(at, rows)


def _constants(file: SavedSlots, slot: int, runner: Runner) -> Constants:
    inputs = ConstantInputs(runner.plan)
    try:
        arrays = {t.name: file.read(f"{slot}/{t.name}", array_dtype(t.dtype)) for t in inputs.tensors}
        return inputs.read(arrays) if arrays else NO_CONSTANTS
    except PromptError as error:
        raise CacheFileError(f"{file.path}: slot {slot}: {error}") from error


def _digest(data: Array) -> bytes:
    content = data.reshape(-1).view(np.uint8).data
    return blake3(f"{data.shape}".encode(), max_threads=blake3.AUTO).update(content).digest()


def _digest_of(tensors: Mapping[str, bytes], slots: Mapping[int, Slot], adapters: Mapping[int, str]) -> str:
    lengths = [(int(name), slot.length, slot.written) for name, slot in sorted(slots.items())]
    said = [lengths, sorted(adapters.items())] if adapters else [lengths]
    return blake3(msgspec.json.encode([sorted(tensors.items()), *said])).hexdigest()


def _layout(runner: Runner) -> str:
    """Return, as JSON, the facts about the caches that must be equal when a file is saved and when it is loaded."""
    kinds = {c.past: (c.layout.value, c.mode.value) for c in runner.plan.caches}
    carried = [
        (b.past, b.dtype, b.shape[1:], b.axis, *kinds.get(b.past, ("state", ""))) for b in carried_buffers(runner.plan)
    ]
    options = runner.plan.options
    # Quantized caches hold rows after a rotation; `cache_ranges` determines the scales of calibrated caches.
    facts = carried if options.cache_dtype is None else [carried, "rotated", options.cache_ranges]
    return msgspec.json.encode(facts, order="sorted").decode()


def _plain(data: Array) -> Array:
    """Return the array in a dtype of safetensors; small floats become unsigned integers with the same bits."""
    return data.view(_plain_dtype(data.dtype))


def _plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.name in _PLAIN else np.dtype(f"uint{8 * dtype.itemsize}")
