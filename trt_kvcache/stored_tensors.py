"""Reads safetensors files (https://huggingface.co/docs/safetensors) in NumPy, including bfloat16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError
from trt_kvcache.files import open_regular

FLOATS = {"F16": np.dtype(np.float16), "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""Supported types of weights, by their names in the format."""

_HEADER = 100_000_000  # most bytes of the header, from the format's definition


class StoredTensors:
    """The floating-point tensors of one safetensors file, with the shapes of all tensors by name.

    With `mapped`, the file is mapped instead of read; if a mapped file becomes shorter, the process crashes. Raises
    `OptionError` if the file cannot be read, or is cut short.
    """

    def __init__(self, path: Path, *, mapped: bool) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                size = path.stat().st_size
                length = int.from_bytes(file.read(8), "little")
                if not 1 < length <= min(_HEADER, size - 8):
                    raise OptionError(f"{path}: not a safetensors file, or truncated: {size} bytes")
                header = json.loads(file.read(length))
            self._data: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
            if size > 8 + length:
                read = partial(np.memmap, mode="r") if mapped else np.fromfile
                self._data = read(path, np.uint8, offset=8 + length)
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise OptionError(f"{path}: cannot be read as safetensors: {error}") from None
        self._entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        try:
            for name, entry in header.items():
                if name != "__metadata__":
                    start, stop = map(int, entry["data_offsets"])
                    self._entries[str(name)] = str(entry["dtype"]), tuple(map(int, entry["shape"])), start, stop
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise OptionError(f"{path}: its header is not that of a safetensors file") from None
        for name, (_, _, start, stop) in self._entries.items():
            if not 0 <= start <= stop <= self._data.size:
                raise OptionError(
                    f"{path}: cut short: tensor '{name}' ends at byte {stop} of the data, and there are "
                    f"{self._data.size}; copy the file again"
                )
        self.shapes = {name: shape for name, (_, shape, _, _) in self._entries.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return a view of a tensor; raise `OptionError` if its type is not in `FLOATS` or its size does not fit."""
        kind, shape, start, stop = self._entries[name]
        dtype = FLOATS.get(kind)
        if dtype is None:
            raise OptionError(f"{self.path}: tensor '{name}' is {kind}; supported are {', '.join(FLOATS)}")
        if min(shape, default=1) < 0 or prod(shape) * dtype.itemsize != stop - start:
            raise OptionError(
                f"{self.path}: tensor '{name}' {list(shape)} has {stop - start} bytes; copy the file again"
            )
        return np.frombuffer(self._data[start:stop], dtype).reshape(shape)
