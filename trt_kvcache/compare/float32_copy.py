"""Copies a model so that it computes in float32 instead of float16 and bfloat16.

Structure, masks, indices and layouts stay the same. In float32, small faults become visible that the rounding of a
narrow type would hide. ONNX Runtime has no kernels for bfloat16 on the CPU, and converts products in float16.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Hashable, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, external_data_helper, helper, numpy_helper

from trt_kvcache.errors import OutputError
from trt_kvcache.importer.protos import byte_size, copied, iter_scopes, iter_tensors
from trt_kvcache.importer.steps.element_types import all_types, state_type

__all__ = ["NARROW", "Float32Copies", "float32_copy"]

NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_DATA = "float32.data"
_BLOCK = 1 << 20  # bytes read at a time
_SMALL = 1024  # bytes; smaller tensors stay in the model, where shape inference reads them


class Float32Copies:
    """Copies of models that share weights: each weight is converted once, into one file.

    Args:
        folder: an existing folder for the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[Hashable, tuple[int, int]] = {}

    def copy(
        self, model: ModelProto, source: Path, replaced: Mapping[str, bytes | bytearray] | None = None,
        types: Collection[int] = NARROW,
    ) -> tuple[ModelProto, Path]:  # fmt: skip
        """Return a copy and the folder of its external data.

        If the model already computes in float32, return the model itself.

        Args:
            model: any model.
            source: folder of its external data.
            replaced: bytes of weights by name, used instead of those in their files.
            types: types that become float32. For a rewritten model, give the types of the model as exported: other
                narrow types round on purpose.

        Raises:
            OutputError: the data do not fit onto the disk.
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
                key = key, narrow
                if key not in self._written:
                    data.write(bytes(-data.tell() % 4096))  # whole pages, so that ONNX Runtime can map them
                    offset, dtype = data.tell(), helper.tensor_dtype_to_np_dtype(tensor.data_type)
                    for block in blocks:
                        data.write(np.frombuffer(block, dtype).astype(np.float32).data if narrow else block)
                    self._written[key] = offset, data.tell() - offset
                kind = TensorProto.FLOAT if narrow else tensor.data_type
                moved = TensorProto(
                    name=tensor.name, dims=tensor.dims, data_type=kind, data_location=TensorProto.EXTERNAL
                )
                place = self._written[key]
                for entry, value in (("location", _DATA), ("offset", str(place[0])), ("length", str(place[1]))):
                    moved.external_data.add(key=entry, value=value)
                tensor.CopyFrom(moved)
        return copy, self._folder


def float32_copy(
    model: ModelProto, source: Path, folder: Path, replaced: Mapping[str, bytes | bytearray] | None = None
) -> tuple[ModelProto, Path]:
    """Return one copy, whose data go to `folder`; see `Float32Copies.copy`."""
    return Float32Copies(folder).copy(model, source, replaced)


def _blocks(
    tensor: TensorProto, source: Path, replaced: Mapping[str, bytes | bytearray]
) -> tuple[Hashable, Iterator[bytes | bytearray]]:
    """Return a key that identifies the bytes of a tensor, and an iterator over these bytes."""
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
        while length > 0:
            block = file.read(min(length, _BLOCK))
            yield block
            length -= len(block)
