"""Saved slots: a safetensors file with tokens, cache contents and the identity of the model that they belong to.

Tensors are ``<slot>/tokens`` (int64) and ``<slot>/<past>``: the cache rows in use, in the engine's layout, or
state as a whole, and ``<slot>/<input>``: what the sequence was given once. Format 2 adds, for slots that have any, what
they were given for their tokens: ``<slot>/given_positions`` (int64 ``[planes, K]``), ``<slot>/given_embeds``
``[K, H]`` and ``<slot>/given_embeds_at`` (int64 ``[K]``) of those that wait. Without any, a file is of format 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from trt_kvcache.errors import CacheFileError, OutputError, PromptError
from trt_kvcache.files import check_output, publish, sync, temporary_file
from trt_kvcache.importer.plan import UpdateMode
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.dtypes import array_dtype
from trt_kvcache.runtime.embeddings import embedded_input
from trt_kvcache.runtime.encoders.constants import NO_CONSTANTS, ConstantInputs, Constants
from trt_kvcache.runtime.given import Embeds, Positions
from trt_kvcache.runtime.positions import PositionInput
from trt_kvcache.runtime.runner import Array, Runner
from trt_kvcache.runtime.slot import Slot
from trt_kvcache.runtime.tokens import read_ids

__all__ = ["SavedSlots", "open_slots", "save_slots"]

_FORMAT = "trt_kvcache.cache.1"
_GIVEN_FORMAT = "trt_kvcache.cache.2"
_PLAIN = ("float16", "float32", "float64", "bfloat16", "int8", "uint8", "int32", "int64", "bool")


@dataclass(frozen=True)
class SavedSlots:
    """An open file.

    Attributes:
        slots: by their former names; their rows mean nothing.
    """

    slots: dict[int, Slot]
    _file: Any
    _runner: Runner
    _path: Path

    def read(self, slot: int, row: int) -> None:
        """Write the saved contents of a slot to a row of every cache.

        Raises:
            CacheFileError: a tensor is missing or has another shape.
        """
        for buffer in carried_buffers(self._runner.plan):
            name, dtype = f"{slot}/{buffer.past}", buffer.array_dtype
            shape = buffer.row_shape(self.slots[slot].written)
            data = _tensor(self._file, name, self._path)
            if data.shape != shape or data.dtype.itemsize != dtype.itemsize:
                raise CacheFileError(
                    f"{self._path}: tensor '{name}' is {data.dtype} {list(data.shape)}, where {dtype} {list(shape)} "
                    "belongs; save the cache again"
                )
            self._runner.write_row(buffer.past, row, data.view(dtype))


def save_slots(path: str | os.PathLike[str], runner: Runner, slots: dict[int, Slot]) -> None:
    """Write slots to a file, all or nothing; see `KVCache.save`."""
    final = check_output(path)
    tensors: dict[str, Array] = {}
    for name, slot in slots.items():
        tensors[f"{name}/tokens"] = np.array(slot.tokens, np.int64)
        for constant, array in slot.constants.arrays.items():
            tensors[f"{name}/{constant}"] = np.ascontiguousarray(_plain(np.asarray(array)))
        for buffer in carried_buffers(runner.plan):
            data = runner.read_row(buffer.past, slot.row, min(slot.written, buffer.capacity))
            tensors[f"{name}/{buffer.past}"] = np.ascontiguousarray(_plain(data))
        if slot.positions:
            tensors[f"{name}/given_positions"] = np.ascontiguousarray(slot.positions.given)
        if len(slot.embeds.at):
            tensors[f"{name}/given_embeds_at"] = np.ascontiguousarray(slot.embeds.at)
            tensors[f"{name}/given_embeds"] = np.ascontiguousarray(_plain(slot.embeds.rows))
    given = any(slot.positions or len(slot.embeds.at) for slot in slots.values())
    lengths = {str(name): (slot.length, slot.written) for name, slot in slots.items()}
    metadata = {
        "format": _GIVEN_FORMAT if given else _FORMAT,
        "model": runner.identity(),
        "caches": _layout(runner),
        "slots": msgspec.json.encode(lengths).decode(),
    }
    with temporary_file(final) as temporary:
        try:
            save_file(tensors, temporary, metadata)
            with open(temporary, "r+b") as file:
                sync(file)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{final}: cannot be written: {error}") from error
        publish([(temporary, final)])


@contextmanager
def open_slots(path: str | os.PathLike[str], runner: Runner) -> Iterator[SavedSlots]:
    """Open a file for this runner's model.

    Raises:
        CacheFileError: it is unreadable, or of another model, or of caches of another kind.
    """
    path = Path(path)
    try:
        file = safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise CacheFileError(f"{path}: not a saved cache: {error}") from error
    with file:
        metadata: dict[str, str] = file.metadata() or {}  # type: ignore[no-untyped-call]
        if metadata.get("format") not in (_FORMAT, _GIVEN_FORMAT):
            raise CacheFileError(
                f"{path}: not a cache that this version saved (format {metadata.get('format')!r}, known are "
                f"{_FORMAT!r} and {_GIVEN_FORMAT!r})"
            )
        identity = runner.identity()
        if metadata.get("model") != identity:
            raise CacheFileError(
                f"{path}: saved with another model ({str(metadata.get('model'))[:16]}..., this one is "
                f"{identity[:16]}...); cache contents mean nothing to any other model: load it with that one"
            )
        if metadata.get("caches") != _layout(runner):
            raise CacheFileError(
                f"{path}: saved from caches of other sizes or layouts of the same model; open the model with the "
                "options (capacity, cache layout) that it was saved with"
            )
        yield SavedSlots(_slots(file, metadata, path, runner), file, runner, path)


def _slots(file: Any, metadata: dict[str, str], path: Path, runner: Runner) -> dict[int, Slot]:
    try:
        lengths = msgspec.json.decode(metadata.get("slots", ""), type=dict[str, tuple[int, int]])
        names = {int(name): pair for name, pair in lengths.items()}
    except (msgspec.MsgspecError, ValueError) as error:
        raise CacheFileError(f"{path}: its list of slots cannot be read: {error}") from error
    slots = {}
    rows = [c.capacity for c in runner.plan.caches if c.mode is UpdateMode.LINEAR]
    for name, (length, written) in names.items():
        try:
            tokens = read_ids(_tensor(file, f"{name}/tokens", path), runner.vocab)
        except PromptError as error:
            raise CacheFileError(f"{path}: slot {name}: {error}") from None
        if not 0 <= length <= min(written, len(tokens)) or written > min(rows, default=written):
            raise CacheFileError(
                f"{path}: slot {name} has {len(tokens)} tokens and claims {length}, {written}"
                f"{f' in caches of {min(rows)} rows' if rows else ''}; save the cache again"
            )
        slots[name] = Slot(-1, tokens, length, written, constants=_constants(file, name, path, runner))
        _read_given(file, slots[name], name, path, runner)
    return slots


def _read_given(file: Any, slot: Slot, name: int, path: Path, runner: Runner) -> None:
    """Positions and embeddings of the slot's tokens, where the file has any."""
    stored = set(file.keys())
    if f"{name}/given_positions" in stored:
        given = _tensor(file, f"{name}/given_positions", path)
        planes = PositionInput(runner.plan).planes
        if given.dtype != np.int64 or given.ndim != 2 or len(given) != planes or given.shape[1] > len(slot.tokens):
            raise CacheFileError(f"{path}: slot {name}: positions {given.dtype} {list(given.shape)} of {planes} planes")
        slot.positions = Positions(given)
    if f"{name}/given_embeds" in stored:
        tensor = embedded_input(runner.plan)
        at, rows = (_tensor(file, f"{name}/given_embeds{part}", path) for part in ("_at", ""))
        waiting = set(range(slot.length, len(slot.tokens)))
        if tensor is None or rows.shape != (len(at), tensor.shape[-1]) or not waiting >= set(at.tolist()):
            raise CacheFileError(f"{path}: slot {name}: embeddings {list(rows.shape)} of {len(waiting)} tokens")
        slot.embeds = Embeds(at, rows.view(array_dtype(tensor.dtype)))


def _constants(file: Any, slot: int, path: Path, runner: Runner) -> Constants:
    inputs = ConstantInputs(runner.plan)
    try:
        arrays = {t.name: _tensor(file, f"{slot}/{t.name}", path).view(array_dtype(t.dtype)) for t in inputs.tensors}
        return inputs.read(arrays) if arrays else NO_CONSTANTS
    except (PromptError, ValueError) as error:
        raise CacheFileError(f"{path}: slot {slot}: {error}") from error


def _tensor(file: Any, name: str, path: Path) -> Array:
    try:
        data: Array = file.get_tensor(name)
    except SafetensorError as error:
        raise CacheFileError(f"{path}: {error}; save the cache again") from error
    return data


def _layout(runner: Runner) -> str:
    """What must agree for the bytes of one session to mean the same in another."""
    kinds = {c.past: (c.layout.value, c.mode.value) for c in runner.plan.caches}
    carried = [
        (b.past, b.dtype, b.shape[1:], b.axis, *kinds.get(b.past, ("state", ""))) for b in carried_buffers(runner.plan)
    ]
    return msgspec.json.encode(carried).decode()


def _plain(data: Array) -> Array:
    """In a dtype that the format has for NumPy; small floats travel as bytes."""
    return data if data.dtype.name in _PLAIN else data.view(f"uint{8 * data.dtype.itemsize}")
