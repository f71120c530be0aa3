"""Serializes a model, one weight after the other.

Protobuf merges messages that are written one after the other. So this module first writes the graph without large
weights, then one more ``graph { initializer }`` for each weight. For 0.5 GB, this takes 0.75 to 1.5 s instead of 1.6 to
3.6 s (protobuf's upb, two cores of a shared machine), because no buffer grows by copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from trt_kvcache.importer.prepare import detach_weights
from trt_kvcache.importer.protos import replace_field

_GRAPH, _INITIALIZER = b"\x3a", b"\x2a"
"""Tags of ``ModelProto.graph`` (7) and ``GraphProto.initializer`` (5), both length-delimited (onnx.proto)."""


def serialize_model(model: onnx.ModelProto) -> bytes:
    """Return a model as protobuf bytes, in which large weights are the last initializers."""
    shell, weights = detach_weights(model)
    replace_field(shell.graph.initializer, [t for t in shell.graph.initializer if t.name not in weights])
    return b"".join([shell.SerializeToString(), *_parts(weights.values())])


def _parts(tensors: Iterable[onnx.TensorProto]) -> Iterator[bytes]:
    for tensor in tensors:
        data = tensor.SerializeToString()
        initializer = _INITIALIZER + _varint(len(data))
        yield _GRAPH + _varint(len(initializer) + len(data)) + initializer
        yield data


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
