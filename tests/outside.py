"""Models with their numbers in files beside them, as exporters write those of more than 2 GB."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.importer.protos import iter_tensors

SHAPES = 100
"""Bytes of the smallest integers that optimum-onnx puts outside: shapes and axes stay."""


def as_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with Constants in the place of its initializers, as torch's TorchScript exporter writes buffers."""
    made = deepcopy(model)
    nodes = [helper.make_node("Constant", [], [t.name], f"at_{t.name}", value=t) for t in model.graph.initializer]
    del made.graph.node[:], made.graph.initializer[:]
    made.graph.node.extend([*nodes, *model.graph.node])
    return made


def save_outside(model: onnx.ModelProto, path: Path) -> Path:
    """Write a model with all of its floats, and integers from `SHAPES` bytes on, in ``<path>_data``.

    Args:
        model: whose data are inside. Changed.
        path: of the file.
    """
    parts: list[bytes] = []
    for tensor in iter_tensors(model):
        value = numpy_helper.to_array(tensor)
        if value.size < 2 or (value.dtype.kind in "iub" and value.nbytes < SHAPES):
            continue
        raw = numpy_helper.from_array(value).raw_data
        entries = {"location": f"{path.name}_data", "offset": str(sum(map(len, parts))), "length": str(len(raw))}
        parts.append(raw)
        tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
        tensor.data_location = TensorProto.EXTERNAL
        for key, entry in entries.items():
            tensor.external_data.add(key=key, value=entry)
    (path.parent / f"{path.name}_data").write_bytes(b"".join(parts))
    path.write_bytes(model.SerializeToString())
    return path
