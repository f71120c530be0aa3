"""Copies a model so that it computes in float32 instead of float16 and bfloat16.

Float32 shows small faults that narrow rounding would hide. Also, ONNX Runtime has no bfloat16 kernels on the CPU, and
computes float16 products in float32.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, external_data_helper, helper, numpy_helper

from trt_kvcache.errors import OutputError
from trt_kvcache.importer.protos import byte_size, copied, iter_scopes, iter_tensors
from trt_kvcache.importer.steps.runnable import all_types, state_type

NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_DATA = "float32.data"
_BLOCK = 1 << 20  # bytes read at a time
_COLUMNS = 64  # columns of a matrix that are transposed at a time
_SMALL = 1024  # bytes; smaller tensors stay in the model, where shape inference reads them


class Float32Copies:
    """Makes float32 copies of models that share weights. A weight is converted once, into one file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[Hashable, tuple[int, int]] = {}

    def copy(
        self, model: ModelProto, source: Path, replaced: Mapping[str, bytes | bytearray] | None = None,
        types: Collection[int] = NARROW,
    ) -> tuple[ModelProto, Path]:  # fmt: skip
        """Return a model's float32 copy, and the folder of its data. Return `model` and `source` if nothing changes.

        `source` is the folder of the model's external data; `replaced` are bytes to use instead of those in the files.
        `types` become float32. For a rewritten model, give the types of the exported model: the rewrite uses other
        narrow types to round on purpose. Raises `OutputError` if the data do not fit onto the disk.
        """
        replaced = replaced or {}
        if not replaced and not all_types(model) & {*types}:
            return model, source
        copy, path = copied(model), self._folder / _DATA
        needed = 0 if self._written else 2 * sum(byte_size(t) or 0 for t in iter_tensors(copy))
        if needed > (free := shutil.disk_usage(self._folder).free):
            raise OutputError(
                f"the float32 copy of this model takes up to {needed / 1e9:.1f} GB, and {self._folder} has "
                f"{free / 1e9:.1f} GB free: set TMPDIR to a folder with room"
            )
        state_type(copy, types, TensorProto.FLOAT)
        initializers = {t.name for s in iter_scopes(copy) if isinstance(s, GraphProto) for t in s.initializer}
        with path.open("ab") as data:
            for tensor in iter_tensors(copy):
                external, narrow = tensor.data_location == TensorProto.EXTERNAL, tensor.data_type in types
                if not external and not narrow:
                    continue
                if not external and (tensor.name not in initializers or (byte_size(tensor) or 0) <= _SMALL):
                    tensor.CopyFrom(
                        numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
                    )
                    continue
                key, blocks = _blocks(tensor, source, replaced)
                dtype, kind = helper.tensor_dtype_to_np_dtype(tensor.data_type), tensor.data_type
                wide = (np.frombuffer(block, dtype).astype(np.float32).data for block in blocks)
                moved = TensorProto(name=tensor.name, dims=tensor.dims, data_type=TensorProto.FLOAT if narrow else kind)
                tensor.CopyFrom(self._in_file(moved, (key, narrow), data, wide if narrow else blocks))
            self._transpose(copy.graph, data)
        return copy, self._folder

    def _transpose(self, graph: GraphProto, data: BinaryIO) -> None:
        """Store the transposes of weight matrices, so that sessions need not compute them."""
        moved = [t for t in graph.initializer if t.data_location == TensorProto.EXTERNAL and len(t.dims) == 2]
        matrices = {
            t.name: t for t in moved if all(t.dims) and t.data_type == TensorProto.FLOAT
        }  # other types may be packed
        for node in [n for n in graph.node if n.op_type == "Transpose" and n.input[0] in matrices]:
            if node.attribute and [*node.attribute[0].ints] != [1, 0]:
                continue
            matrix = matrices[node.input[0]]
            (rows, columns), offset = matrix.dims, external_data_helper.ExternalDataInfo(matrix).offset or 0
            data.flush()
            read = np.memmap(data.name, np.float32, "r", offset, (rows, columns))
            parts = (read[:, at : at + _COLUMNS].T.tobytes() for at in range(0, columns, _COLUMNS))
            turned = TensorProto(name=node.output[0], dims=(columns, rows), data_type=matrix.data_type)
            graph.initializer.append(self._in_file(turned, (offset, "transposed"), data, parts))
            graph.node.remove(node)

    def _in_file(self, moved: TensorProto, key: Hashable, data: BinaryIO, blocks: Iterable[Any]) -> TensorProto:
        """Let a tensor refer to the `blocks` of bytes in `data`; write them unless `key` was written before."""
        if key not in self._written:
            data.write(bytes(-data.tell() % 4096))  # whole pages, so that ONNX Runtime can map them
            offset = data.tell()
            data.writelines(blocks)
            self._written[key] = offset, data.tell() - offset
        moved.data_location = TensorProto.EXTERNAL
        offset, length = self._written[key]
        for entry, value in (("location", _DATA), ("offset", str(offset)), ("length", str(length))):
            moved.external_data.add(key=entry, value=value)
        return moved


def _blocks(
    tensor: TensorProto, source: Path, replaced: Mapping[str, bytes | bytearray]
) -> tuple[Hashable, Iterator[bytes | bytearray]]:
    """Return a key that is equal for equal bytes of a tensor, and an iterator over these bytes."""
    if tensor.name in replaced:
        return (tensor.name,), iter([replaced[tensor.name]])
    if tensor.data_location != TensorProto.EXTERNAL:
        raw = numpy_helper.to_array(tensor).tobytes()
        return (tensor.name, len(raw), hash(raw)), iter([raw])
    info = external_data_helper.ExternalDataInfo(tensor)
    offset, length = info.offset or 0, byte_size(tensor) or 0
    return (source, info.location, offset, length), _read(source / info.location, offset, length)


def _read(path: Path, offset: int, length: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        for at in range(0, length, _BLOCK):
            yield file.read(min(length - at, _BLOCK))
