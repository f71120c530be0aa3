"""The float32 twin of a model of 16-bit numbers.

Every bfloat16 (or float16) tensor, cast and declaration becomes float32; nothing else changes. What the twin cannot
show is the rounding of 16 bits; structure, masks, indices and layouts are the same. ONNX Runtime has no bfloat16
kernels for MatMul, Add or Softmax on the CPU; of float16 models the twin shows what their rounding hides
(`trt_kvcache.verify.rounding`).
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, TypeProto, external_data_helper, numpy_helper

from trt_kvcache.errors import OutputError
from trt_kvcache.importer.protos import byte_size, iter_scopes, iter_tensors

_DATA = "float32-twin.data"
_BLOCK = 1 << 25  # bytes read at a time
_SMALL = 1024  # bytes; smaller tensors stay in the proto, where shape inference can read them
_DTYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "softmax_precision", "stash_type"})


def has_bfloat16(model: ModelProto) -> bool:
    """Whether any tensor, declared value or operator of the model is bfloat16."""
    return (
        any(t.data_type == TensorProto.BFLOAT16 for t in iter_tensors(model))
        or any(t.tensor_type.elem_type == TensorProto.BFLOAT16 for t in _types(model))
        or any(True for _ in _dtype_attributes(model, TensorProto.BFLOAT16))
    )


class Data:
    """A file of weights, each written once.

    Args:
        path: where it is or will be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: dict[Hashable, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._written)

    def add(self, key: Hashable, blocks: Iterable[bytes]) -> tuple[int, int]:
        """Where a tensor lies, offset and length; its bytes are written if `key` is new."""
        if key not in self._written:
            with self._path.open("ab") as data:
                data.write(bytes(-data.tell() % 4096))  # page-aligned, so that ONNX Runtime maps it
                offset = data.tell()
                data.writelines(blocks)
                self._written[key] = offset, data.tell() - offset
        return self._written[key]


def refer(tensor: TensorProto, dtype: int, location: str, place: tuple[int, int]) -> None:
    """Makes a tensor of another type, perhaps, whose data lie elsewhere.

    Args:
        tensor: keeps its name and its shape.
        dtype: its new type.
        location: file, relative to the model's folder.
        place: offset and length.
    """
    made = TensorProto(name=tensor.name, dims=tensor.dims, data_type=dtype, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", str(place[0])), ("length", str(place[1]))):
        made.external_data.add(key=key, value=value)
    tensor.CopyFrom(made)


class TwinFolder:
    """Makes twins of models that share their weights; each weight is converted once, block by block, into one file.

    Args:
        folder: an existing folder that takes the file.
        source: folder of the models' external data.
        dtype: what becomes float32: ``TensorProto.BFLOAT16`` or ``TensorProto.FLOAT16``; float32 stays.
        moved: moves each large enough weight of this type, if not bfloat16, at random, by no more than its rounding
            has: 2**-11 of it, or 2**-24.
    """

    def __init__(
        self, folder: Path, source: Path, dtype: int = TensorProto.BFLOAT16, moved: np.random.Generator | None = None
    ) -> None:
        self.folder = folder
        self._source = source
        self._dtype = dtype
        self._moved = moved
        self._data = Data(folder / _DATA)

    def twin(self, model: ModelProto) -> ModelProto:
        """The float32 twin; its external data are in `folder`.

        Raises:
            OutputError: the folder has no room for the float32 weights.
        """
        twin = ModelProto()
        twin.CopyFrom(model)
        self._check_room(twin)
        for attribute in _dtype_attributes(twin, self._dtype):
            attribute.i = TensorProto.FLOAT
        for kind in _types(twin):
            if kind.tensor_type.elem_type == self._dtype:
                kind.tensor_type.elem_type = TensorProto.FLOAT
        initializers = {t.name for s in iter_scopes(twin) if isinstance(s, GraphProto) for t in s.initializer}
        for tensor in iter_tensors(twin):
            self._convert(tensor, tensor.name in initializers)
        return twin

    def _check_room(self, model: ModelProto) -> None:
        needed = 2 * sum(byte_size(t) or 0 for t in iter_tensors(model)) if not self._data else 0
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            name = "bfloat16" if self._dtype == TensorProto.BFLOAT16 else "float16"
            raise OutputError(
                f"the float32 twin of this {name} model takes up to {needed / 1e9:.1f} GB, and {self.folder} has "
                f"{free / 1e9:.1f} GB free: set TMPDIR to a folder with room"
            )

    def _convert(self, tensor: TensorProto, initializer: bool) -> None:
        external = tensor.data_location == TensorProto.EXTERNAL
        half = tensor.data_type == self._dtype
        if not external and not half:
            return
        if not external and (not initializer or (byte_size(tensor) or 0) <= _SMALL):
            values = numpy_helper.to_array(tensor).astype(np.float32)
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(values, name))
            return
        key, blocks = self._blocks(tensor, external)
        place = self._data.add(key, map(self._widened, blocks) if half else blocks)
        refer(tensor, TensorProto.FLOAT if half else tensor.data_type, _DATA, place)

    def _widened(self, block: bytes) -> bytes:
        if self._dtype == TensorProto.BFLOAT16:
            return (np.frombuffer(block, "<u2").astype("<u4") << 16).tobytes()  # the upper half of a float32
        half = self._dtype == TensorProto.FLOAT16
        values = np.frombuffer(block, "<f2" if half else "<f4").astype("<f4")
        if self._moved is not None:
            part = 2**-11 if half else 2**-24
            values = (values * (1 + self._moved.uniform(-part, part, values.shape))).astype("<f4")
        return values.tobytes()

    def _blocks(self, tensor: TensorProto, external: bool) -> tuple[tuple[object, ...], Iterator[bytes]]:
        """What identifies the tensor's bytes, and the bytes."""
        if not external:
            raw = numpy_helper.to_array(tensor).tobytes()
            return (tensor.name, len(raw), hash(raw)), iter([raw])
        info = external_data_helper.ExternalDataInfo(tensor)
        offset, length = info.offset or 0, byte_size(tensor) or 0
        return (info.location, offset, length), _read(self._source / info.location, offset, length)


def _read(path: Path, offset: int, length: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while length > 0:
            block = file.read(min(length, _BLOCK))
            yield block
            length -= len(block)


def _dtype_attributes(model: ModelProto, dtype: int) -> Iterator[AttributeProto]:
    """Every attribute that asks for a type."""
    for scope in iter_scopes(model):
        for node in scope.node:
            for attribute in node.attribute:
                if (
                    attribute.name in _DTYPE_ATTRIBUTES
                    and attribute.type == AttributeProto.INT
                    and attribute.i == dtype
                ):
                    yield attribute


def _types(model: ModelProto) -> Iterator[TypeProto]:
    """Every type declared anywhere in the model that can hold an element type."""
    for scope in iter_scopes(model):
        infos = list(scope.value_info)
        if isinstance(scope, GraphProto):
            infos += [*scope.input, *scope.output]
        for info in infos:
            yield from _nested(info.type)
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.HasField("tp"):
                    yield from _nested(attribute.tp)


def _nested(kind: TypeProto) -> Iterator[TypeProto]:
    yield kind
    for field in ("sequence_type", "optional_type"):
        if kind.HasField(field):
            yield from _nested(getattr(kind, field).elem_type)
