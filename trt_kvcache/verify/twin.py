"""The twin of a model in a wider type: float32 for bfloat16 and float16, float64 for float32.

Every tensor, cast and declaration of the one type becomes the other; nothing else changes. What the twin cannot show is
the rounding of the narrow type; structure, masks, indices and layouts are the same. ONNX Runtime has no bfloat16
kernels for MatMul, Add or Softmax on the CPU; of float16 and float32 models the twin shows what their rounding hides
(`trt_kvcache.verify.rounding`).
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, external_data_helper, helper, numpy_helper

from trt_kvcache.errors import OutputError
from trt_kvcache.importer.protos import byte_size, iter_scopes, iter_tensors
from trt_kvcache.importer.steps.element_types import state_type
from trt_kvcache.verify.widenable import dequantize_narrow, widenable

_DATA = "twin.data"
_BLOCK = 1 << 20  # bytes read at a time
_SMALL = 1024  # bytes; smaller tensors stay in the proto, where shape inference can read them


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

    def add(self, key: Hashable, blocks: Iterable[bytes | memoryview]) -> tuple[int, int]:
        """The place of a tensor, offset and length; its bytes are written if `key` is new."""
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
    reference = TensorProto(name=tensor.name, dims=tensor.dims, data_type=dtype, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", str(place[0])), ("length", str(place[1]))):
        reference.external_data.add(key=key, value=value)
    tensor.CopyFrom(reference)


class TwinFolder:
    """Makes twins of models that share their weights; each weight is converted once, block by block, into one file.

    Attributes:
        folder: of the twins' external data.
        dtype: what becomes `wide`.
        wide: the type of the twins.

    Args:
        folder: an existing folder that takes the file.
        source: folder of the models' external data.
        dtype: what becomes `wide`: ``TensorProto.BFLOAT16``, ``TensorProto.FLOAT16`` or ``TensorProto.FLOAT``.
        moved: moves each large enough weight of this type, if not bfloat16, at random, by no more than its rounding
            has: 2**-11 of it, or 2**-24.
        wide: ``TensorProto.FLOAT`` or ``TensorProto.DOUBLE``; what is of this type already stays.
    """

    def __init__(
        self, folder: Path, source: Path, dtype: int = TensorProto.BFLOAT16, moved: np.random.Generator | None = None,
        wide: int = TensorProto.FLOAT,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.dtype = dtype
        self.wide = wide
        self._source = source
        self._moved = moved
        self._data = Data(folder / _DATA)

    def twin(self, model: ModelProto) -> ModelProto:
        """The twin; its external data are in `folder`.

        Raises:
            OutputError: the wider weights do not fit into the folder.
        """
        twin = ModelProto()
        twin.CopyFrom(widenable(model) if self.wide == TensorProto.DOUBLE else model)
        self._check_disk(twin)
        state_type(twin, (self.dtype,), self.wide)
        if self.wide == TensorProto.DOUBLE:
            dequantize_narrow(twin, self.dtype)
        initializers = {t.name for s in iter_scopes(twin) if isinstance(s, GraphProto) for t in s.initializer}
        for tensor in iter_tensors(twin):
            self._convert(tensor, tensor.name in initializers)
        return twin

    def _check_disk(self, model: ModelProto) -> None:
        needed = 2 * sum(byte_size(t) or 0 for t in iter_tensors(model)) if not self._data else 0
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OutputError(
                f"the {numpy_name(self.wide)} twin of this {numpy_name(self.dtype)} model takes up to "
                f"{needed / 1e9:.1f} GB, and {self.folder} has "
                f"{free / 1e9:.1f} GB free: set TMPDIR to a folder with room"
            )

    def _convert(self, tensor: TensorProto, initializer: bool) -> None:
        external = tensor.data_location == TensorProto.EXTERNAL
        half = tensor.data_type == self.dtype
        if not external and not half:
            return
        if not external and (not initializer or (byte_size(tensor) or 0) <= _SMALL):
            values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(self.wide))
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(values, name))
            return
        key, blocks = self._blocks(tensor, external)
        place = self._data.add(key, map(self._widened, blocks) if half else blocks)
        refer(tensor, self.wide if half else tensor.data_type, _DATA, place)

    def _widened(self, block: bytes) -> memoryview:
        wide = "<f8" if self.wide == TensorProto.DOUBLE else "<f4"
        values = np.frombuffer(block, helper.tensor_dtype_to_np_dtype(self.dtype)).astype(wide)
        if self._moved is not None and self.dtype != TensorProto.BFLOAT16:
            part = 2**-11 if self.dtype == TensorProto.FLOAT16 else 2**-24
            values = (values * (1 + self._moved.uniform(-part, part, values.shape))).astype(wide)
        return values.data

    def _blocks(self, tensor: TensorProto, external: bool) -> tuple[tuple[object, ...], Iterator[bytes]]:
        """An identity of the tensor's bytes, and the bytes."""
        if not external:
            raw = numpy_helper.to_array(tensor).tobytes()
            return (tensor.name, len(raw), hash(raw)), iter([raw])
        info = external_data_helper.ExternalDataInfo(tensor)
        offset, length = info.offset or 0, byte_size(tensor) or 0
        return (info.location, offset, length), _read(self._source / info.location, offset, length)


def numpy_name(dtype: int) -> str:
    """NumPy's name of an element type, such as ``"float32"``."""
    return str(helper.tensor_dtype_to_np_dtype(dtype).name)


def _read(path: Path, offset: int, length: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while length > 0:
            block = file.read(min(length, _BLOCK))
            yield block
            length -= len(block)
