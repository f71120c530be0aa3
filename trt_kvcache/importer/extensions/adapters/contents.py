"""The modules of a checkpoint that products are, from their weights.

A weight ``[inputs, outputs]`` is one tensor of the checkpoint ``[outputs, inputs]`` turned, or several of them side by
side. The first numbers of a column find a tensor, and corners of both are compared then: all tensors of a checkpoint
together are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.weights import detached
from trt_kvcache.lora import module_key
from trt_kvcache.stored_tensors import StoredTensors

__all__ = ["Contents"]

Array = npt.NDArray[Any]
_FEW = 16  # numbers that find a tensor
_CORNER = 64
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class _Tensor:
    """A weight of the checkpoint.

    Attributes:
        turned: it is stored as ``[inputs, outputs]``, as Conv1D of transformers has it.
    """

    module: str
    file: StoredTensors
    name: str
    turned: bool

    def array(self) -> Array:
        """As ``[inputs, outputs]``."""
        data = self.file.read(self.name)
        return data if self.turned else data.T


class Contents:
    """The weights of a checkpoint.

    Args:
        folder: with ``.safetensors`` files.

    Raises:
        OptionError: it has none, or they cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise OptionError(f"{folder}: no checkpoint: there is no .safetensors file; give its folder (--checkpoint)")
        self.name = folder.name or str(folder)
        self._tensors = [*_tensors(files)]
        self._index: dict[np.dtype[Any], dict[bytes, list[_Tensor]]] = {}

    @classmethod
    def beside(cls, given: str | None, folder: Path) -> Contents | None:
        """Those of the checkpoint that was given, or that lies in the folder of the model."""
        if given is not None:
            return cls(Path(given))
        found = any(folder.glob("*.safetensors")) and (folder / "config.json").is_file()
        return cls(folder) if found else None

    def parts_of(
        self, tensor: TensorProto, turned: bool, folder: Path, weights: Mapping[str, TensorProto]
    ) -> list[tuple[str, int, int]]:
        """The modules that a weight holds side by side: name, first column, and the one after the last.

        Args:
            tensor: of the model.
            turned: it is ``[outputs, inputs]``.
            folder: of external data.
            weights: that stand-ins stand for.
        """
        if tensor.data_type not in _FLOATS or len(tensor.dims) != 2:
            return []
        data = _array(tensor, folder, weights)
        data = data.T if turned else data
        outputs = data.shape[1]
        index = self._by_beginning(data.dtype)
        found: list[tuple[str, int, int]] = []
        at = 0
        while at < outputs:
            fitting = [t for t in index.get(_key(data[:_FEW, at]), ()) if _fits(data, at, t)]
            if len(fitting) != 1:
                return []
            stop = at + fitting[0].array().shape[1]
            found.append((fitting[0].module, at, stop))
            at = stop
        return found

    def _by_beginning(self, dtype: np.dtype[Any]) -> dict[bytes, list[_Tensor]]:
        """The tensors by their first numbers in this type."""
        if dtype not in self._index:
            made: dict[bytes, list[_Tensor]] = {}
            for tensor in self._tensors:
                made.setdefault(_key(_cast(tensor.array()[:_FEW, 0], dtype)), []).append(tensor)
            self._index[dtype] = made
        return self._index[dtype]


def _tensors(files: list[Path]) -> Iterator[_Tensor]:
    for file in map(StoredTensors, files):
        for name, shape in file.shapes.items():
            module, _, kind = name.rpartition(".")
            key = module_key(module)
            if kind == "weight" and len(shape) == 2 and min(shape) > 1 and key is not None and len(key) > 1:
                yield _Tensor(module, file, name, False)
                yield _Tensor(module, file, name, True)


def _fits(data: Array, at: int, tensor: _Tensor) -> bool:
    """Two corners are equal, of columns that begin at `at`."""
    wanted = tensor.array()
    stop = at + wanted.shape[1]
    if wanted.shape[0] != data.shape[0] or stop > data.shape[1]:
        return False
    n, m = (min(size, _CORNER) for size in wanted.shape)
    first = data[:n, at : at + m], wanted[:n, :m]
    last = data[-n:, stop - m : stop], wanted[-n:, -m:]
    return all(np.array_equal(a, _cast(b, data.dtype)) for a, b in (first, last))


def _cast(values: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def _key(values: Array) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def _array(tensor: TensorProto, folder: Path, weights: Mapping[str, TensorProto]) -> Array:
    """The numbers of a weight, where they lie if that is a file."""
    tensor = detached(tensor, weights) or tensor
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    return np.memmap(folder / entries["location"], dtype, "r", int(entries.get("offset") or 0), shape)
