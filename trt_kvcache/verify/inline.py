"""Weights inside of a model, moved to a file, so that they lie in memory once at most: engines map files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from onnx import ModelProto, TensorProto, numpy_helper

from trt_kvcache.errors import OutputError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.prepare import detach_weights
from trt_kvcache.importer.protos import byte_size, iter_tensors
from trt_kvcache.verify.twin import Data, refer

_MANY = 64 << 20  # bytes; fewer may lie in memory a few times
_DATA = "weights.data"


@contextmanager
def moved_out(imported: ImportedModel) -> Iterator[tuple[ImportedModel, Path]]:
    """The same models, and the folder of their external data.

    Models with many bytes inside give these away to a temporary folder; models with external data are left alone.

    Raises:
        OutputError: the disk is full.
    """
    folder, size = imported.source.path.parent, sum(byte_size(t) or 0 for t in iter_tensors(imported.source.proto))
    if imported.source.external_files or size < _MANY:
        yield imported, folder
        return
    with TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
        if size > (free := shutil.disk_usage(name).free):
            raise OutputError(
                f"the weights of this model take {size / 1e9:.1f} GB as a file, and {name} has {free / 1e9:.1f} GB "
                "free: set TMPDIR to a folder with room"
            )
        data = Data(Path(name) / _DATA)
        original, rewritten = (_without(model, data) for model in (imported.source.proto, imported.model))
        light = replace(imported, source=replace(imported.source, proto=original), model=rewritten)
        del imported
        yield light, Path(name)


def _without(model: ModelProto, data: Data) -> ModelProto:
    """The model with its large inline weights in a file."""
    light, weights = detach_weights(model)
    for tensor in light.graph.initializer:
        weight = weights.get(tensor.name)
        if weight is None or weight.data_type == TensorProto.STRING:
            continue
        raw = weight.raw_data or numpy_helper.to_array(weight).tobytes()
        place = data.add((weight.name, len(raw), hash(raw)), [raw])
        refer(tensor, weight.data_type, _DATA, place)
    return light
