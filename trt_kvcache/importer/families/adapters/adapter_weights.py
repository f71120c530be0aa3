"""Finds the module of a checkpoint for each MatMul: compares weights, or reads names that exporters keep.

A weight ``[inputs, outputs]`` is one or several transposed tensors ``[outputs, inputs]`` of the checkpoint. The first
numbers of a column find a tensor; then only its first and last block are compared, to read little of the checkpoint.

    weights    model.layers.0.self_attn.q_proj.weight_t, model.layers.0.attn.qkv_proj.MatMul.weight
    nodes      /model/layers.0/self_attn/q_proj/MatMul
    metadata   torch's exporter writes the path of modules at each node
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.weights import detached
from trt_kvcache.lora import module_key
from trt_kvcache.stored_tensors import StoredTensors

_FEW = 16  # this many first numbers of a column are the key of a tensor
_CORNER = 64  # the most rows and columns of a block that is compared
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class _Tensor:
    """A weight of the checkpoint. If `turned`, its file has it as ``[inputs, outputs]``, like transformers' Conv1D."""

    module: str
    file: StoredTensors
    name: str
    turned: bool

    def array(self) -> Array:
        """Read the tensor as ``[inputs, outputs]``."""
        data = self.file.read(self.name)
        return data if self.turned else data.T


class Contents:
    """The weights of a checkpoint folder with ``.safetensors`` files, searched by their numbers.

    Raises `OptionError` if the folder has no such files, or if a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise OptionError(
                f"{folder}: not a checkpoint: it has no .safetensors file; give a folder with .safetensors "
                "files to --checkpoint"
            )
        self.name = folder.name or str(folder)
        self._tensors = [*_tensors(files)]
        self._index: dict[np.dtype[Any], dict[bytes, list[_Tensor]]] = {}

    @classmethod
    def beside(cls, checkpoint: str | None, folder: Path) -> Contents | None:
        """Open `checkpoint`, or the checkpoint in the model's folder if `checkpoint` is None; None if not found."""
        if checkpoint is not None:
            return cls(Path(checkpoint))
        is_checkpoint = any(folder.glob("*.safetensors")) and (folder / "config.json").is_file()
        return cls(folder) if is_checkpoint else None

    def parts_of(
        self, tensor: TensorProto, turned: bool, folder: Path, weights: Mapping[str, TensorProto]
    ) -> list[tuple[str, int, int]]:
        """Return the modules that are joined in a weight: name, first column and end column (exclusive) of each."""
        if tensor.data_type not in _FLOATS or len(tensor.dims) != 2:
            return []
        data = _array(tensor, folder, weights)
        data = data.T if turned else data
        outputs = data.shape[1]
        index = self._by_beginning(data.dtype)
        parts: list[tuple[str, int, int]] = []
        at = 0
        while at < outputs:
            fitting = [t for t in index.get(_key(data[:_FEW, at]), ()) if _fits(data, at, t)]
            if len(fitting) != 1:
                return []
            stop = at + fitting[0].array().shape[1]
            parts.append((fitting[0].module, at, stop))
            at = stop
        return parts

    def _by_beginning(self, dtype: np.dtype[Any]) -> dict[bytes, list[_Tensor]]:
        """Return a map from first numbers, cast to `dtype`, to the tensors that begin with these numbers."""
        if dtype not in self._index:
            index: dict[bytes, list[_Tensor]] = {}
            for tensor in self._tensors:
                index.setdefault(_key(_cast(tensor.array()[:_FEW, 0], dtype)), []).append(tensor)
            self._index[dtype] = index
        return self._index[dtype]


def _tensors(files: list[Path]) -> Iterator[_Tensor]:
    for file in (StoredTensors(path, mapped=True) for path in files):
        for name, shape in file.shapes.items():
            module, _, kind = name.rpartition(".")
            key = module_key(module)
            if kind == "weight" and len(shape) == 2 and min(shape) > 1 and key is not None and len(key) > 1:
                yield _Tensor(module, file, name, False)
                yield _Tensor(module, file, name, True)


def _fits(data: Array, at: int, tensor: _Tensor) -> bool:
    """True if a tensor's first and last blocks equal the same blocks of the weight `data`, from column `at` on."""
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
    tensor = detached(tensor, weights) or tensor
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    return np.memmap(folder / entries["location"], dtype, "r", int(entries.get("offset") or 0), shape)


_SCOPES = "pkg.torch.onnx.name_scopes"
_NO_MODULE = re.compile(
    r"(?:q?weight\w*|MatMul\w*|Gemm\w*|output_\d+|kernel|linear|matmul|addmm|t|[a-z]+_\d+|node_\w+|Transpose\w*|u?int\d+\[.*)?"
)
"""Matches last parts of a name that tell only how a product is computed, not to which module it belongs."""


@dataclass(frozen=True)
class ModuleNames:
    """Finds the module (such as ``q_proj``) of a MatMul from names in the exported model."""

    scopes: Mapping[str, str]

    def of(self, weight: str, node: str) -> tuple[str, str] | None:
        """Return the module (such as ``q_proj``) that a MatMul belongs to, and the evidence for it; None if unknown."""
        for name, by in ((weight, "its weight's name"), (node, "its node's name")):
            if (module := _module(name)) is not None:
                return module, by
        return (self.scopes[node], "torch's metadata") if node in self.scopes else None


def module_names(source: ModelProto) -> ModuleNames:
    """Read module names from an exported model."""
    scopes = {}
    for node in source.graph.node:
        text = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
        if text and (module := _in_scopes(text)) is not None:
            scopes[node.name] = module
    return ModuleNames(scopes)


def _module(name: str) -> str | None:
    """Extract the name of a module from the name of a weight or a node; None if the name contains no module."""
    parts = [part for part in re.split(r"[./]+", name.removeprefix("trt_kvcache/")) if part]
    while parts and _NO_MODULE.fullmatch(parts[-1]):
        parts.pop()
    layered = any(part.isdecimal() for part in parts[1:-1])
    return ".".join(parts) if layered or parts[-1:] == ["lm_head"] else None


def _in_scopes(text: str) -> str | None:
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    names = [scope for scope in scopes if isinstance(scope, str)] if isinstance(scopes, list) else []
    return next((module for name in reversed(names[:-1]) if (module := _module(name)) is not None), None)
