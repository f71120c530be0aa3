"""Gives the bytes of a weight another name, element type and shape; makes stand-ins (tensors without data).

    uint8 [N, K / 2]    ->    uint4 [N, K]    or    int32 [N, K / 8]

External data and detached weights (`prepare.detach_weights`) are not copied; only references to them are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import numpy_helper

from trt_kvcache.importer.protos import byte_size

STAND_IN = "trt_kvcache:detached"
_OF = "trt_kvcache:of"


def stand_in(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a tensor without data, as a placeholder for a tensor whose data are elsewhere."""
    empty = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    empty.data_location = onnx.TensorProto.EXTERNAL
    empty.external_data.add(key="location", value=STAND_IN)
    return empty


def storage(tensor: onnx.TensorProto) -> str | None:
    """Return a text that identifies the stored data of a tensor; None if the tensor contains its data."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = {e.key: e.value for e in tensor.external_data}
    if entries.get("location") == STAND_IN:
        return f"{STAND_IN} {entries.get(_OF, tensor.name)}"
    return f"{entries.get('location')} {entries.get('offset', 0)}"


def detached(tensor: onnx.TensorProto, weights: Mapping[str, onnx.TensorProto]) -> onnx.TensorProto | None:
    """Return the tensor whose placeholder this is, with the placeholder's type and shape; None for other tensors."""
    entries = {e.key: e.value for e in tensor.external_data}
    if entries.get("location") != STAND_IN:
        return None
    if _OF not in entries:
        return weights[tensor.name]
    return reinterpret(weights[entries[_OF]], tensor.name, tensor.data_type, tensor.dims)


def reinterpret(tensor: onnx.TensorProto, name: str, data_type: int, shape: Sequence[int]) -> onnx.TensorProto:
    """Return a tensor with the same bytes as `tensor` (little-endian, as in ONNX), but another type and shape."""
    view = onnx.TensorProto(name=name, data_type=data_type, dims=shape)
    if byte_size(view) != byte_size(tensor):
        raise ValueError(f"{byte_size(tensor)} bytes cannot be {list(shape)} of type {data_type}")
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        view.raw_data = raw_bytes(tensor)
        return view
    view.data_location = onnx.TensorProto.EXTERNAL
    view.external_data.extend(tensor.external_data)
    keys = {e.key: e.value for e in tensor.external_data}
    if keys.get("location") == STAND_IN and _OF not in keys:
        view.external_data.add(key=_OF, value=tensor.name)
    return view


def raw_bytes(tensor: onnx.TensorProto) -> bytes:
    """Return the data of an inline tensor in ONNX's raw form. Some exporters store data in the typed fields."""
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)
