"""Reads sources, the inputs of an encoder: checks them, converts types, and adds missing masks (all ones)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache.errors import PromptError
from trt_kvcache.importer.cache_plan import Dim

Array = np.ndarray[Any, np.dtype[Any]]
Source = str | Sequence[int] | Mapping[str, Any]
"""The input of an encoder: a text, its token ids, or arrays by the names of the encoder's inputs."""

_MASK = "mask"
IDS = "input_ids"


@dataclass(frozen=True)
class SourceInput:
    """One input of an encoder. Where the shapes of inputs have the same symbolic size, their sizes are equal."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"'{self.name}' ({self.dtype} {self.sizes})"

    @property
    def sizes(self) -> str:
        """The input's shape for one sequence, as text: ``"[1, 80, frames]"``."""
        return f"[{', '.join(str(d) for d in (1, *self.shape[1:]))}]"


class SourceReader:
    """Checks what a caller gives an encoder for one sequence, and converts it to the encoder's inputs."""

    def __init__(self, path: Path, inputs: Sequence[SourceInput]) -> None:
        self._path = path
        self._inputs = {i.name: i for i in inputs}

    def read(self, source: Sequence[int] | Mapping[str, Any]) -> dict[str, Array]:
        """Check a source, and return the encoder's inputs by name.

        `source` is token ids ``[S]``; or arrays by input name, ``[1, ...]`` or without the first axis. Raises
        `PromptError` if an input is missing, unknown, or of another dtype or shape than the encoder takes.
        """
        values = source if isinstance(source, Mapping) else {IDS: source}
        if unknown := [name for name in values if name not in self._inputs]:
            raise PromptError(f"{unknown[0]!r} is not an input of the encoder {self._path}, which takes {self._takes}")
        feed = {name: _checked(self._inputs[name], value) for name, value in values.items()}
        sizes = self._sizes(feed)
        for name, value in self._inputs.items():
            if name in feed:
                continue
            shape = [1, *(sizes.get(d) if isinstance(d, str) else d for d in value.shape[1:])]
            if _MASK not in name or None in shape:
                raise PromptError(f"the encoder {self._path} takes {self._takes}; '{name}' is missing")
            feed[name] = np.ones(shape, value.dtype)
        return feed

    def mask(self, feed: Mapping[str, Array], length: int) -> Array:
        """Return the decoder's mask ``[1, length]`` for an encoder's output of `length` positions; 1: visible.

        This is the mask in `feed` (the encoder's inputs) or, if it is missing or all ones, a mask of ones. Raises
        `PromptError` if the mask in `feed` has zeros, but another length.
        """
        masks = [array for name, array in feed.items() if _MASK in name]
        fitting = [array for array in masks if array.shape == (1, length)]
        if not fitting and not all(array.all() for array in masks):
            raise PromptError(
                f"the encoder returns {length} positions, but its mask is {list(masks[0].shape)} and not all ones, "
                "so it is unknown which positions the decoder should see; leave the masked parts out of the "
                "source, or give the decoder's inputs as constants"
            )
        return fitting[0] if fitting else np.ones((1, length), np.int64)

    def _sizes(self, feed: Mapping[str, Array]) -> dict[Dim, int]:
        """Return the size of each symbolic axis. Refuse inputs that disagree: ONNX Runtime would broadcast a 1."""
        sizes: dict[Dim, int] = {}
        first: dict[Dim, str] = {}
        for name, array in feed.items():
            for symbol, size in zip(self._inputs[name].shape[1:], array.shape[1:], strict=True):
                if isinstance(symbol, str) and sizes.setdefault(symbol, size) != size:
                    raise PromptError(
                        f"'{name}' is {list(array.shape)}, but its size '{symbol}' is {sizes[symbol]} in "
                        f"'{first[symbol]}'; the encoder {self._path} takes {self._takes}"
                    )
                first.setdefault(symbol, name)
        return sizes

    @property
    def _takes(self) -> str:
        return ", ".join(map(str, self._inputs.values()))


def _checked(value: SourceInput, data: Any) -> Array:
    try:
        array = np.asarray(data)
    except ValueError:
        raise PromptError(f"'{value.name}' is a list of lists of different lengths; give one source") from None
    array = array[np.newaxis] if array.ndim == len(value.shape) - 1 else array
    wanted = (1, *value.shape[1:])
    fits = array.ndim == len(wanted) and all(
        size == want if isinstance(want, int) else size >= 1 for size, want in zip(array.shape, wanted, strict=True)
    )
    if not fits or not np.can_cast(array.dtype, value.dtype, "same_kind"):
        actual = f"{array.dtype} {list(np.shape(data))}" if np.shape(data) != (0,) else "empty"
        raise PromptError(
            f"'{value.name}' is {actual}, but the encoder takes {value.dtype} {value.sizes} for each sequence"
        )
    return np.ascontiguousarray(array, value.dtype)
