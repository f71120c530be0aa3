"""Caches that a model takes and gives in a wider type than it keeps them in: `keep_io_types` of float16 converters.

    past (float32) - Cast -> float16 --.
                                        Concat -> float16 - Cast -> present (float32)
    new (float16) ---------------------'

    becomes

    past (float16) --.
                      Concat -> present (float16)
    new (float16) ---'

What such a cache gives back are float16 numbers, whatever it was given, and as float16 numbers it is read: nothing
changes but the bytes that the caller keeps. Casts around an operator that holds its caches go away in the same manner.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import consumers, contains, elem_type, input_or_none, is_op, producer, replace_uses
from trt_kvcache.importer.normalize.candidate import may_be_cache
from trt_kvcache.importer.normalize.views import trace_back
from trt_kvcache.importer.protos import dtype_name

_WIDE = onnx.TensorProto.FLOAT
_NARROW = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
# The inputs of the operators that write caches where these come in.
_PASTS = {
    "Concat": (0, 1), "ScatterND": (0,), "ScatterElements": (0,), "Attention": (4, 5), "GroupQueryAttention": (3, 4),
    "MultiHeadAttention": (6, 7),
}  # fmt: skip


def narrow_caches(graph: gs.Graph) -> dict[str, str]:
    """Take, in place, the Casts away between caches and the operators that write them.

    Args:
        graph: the model as exported.

    Returns:
        The dtypes as exported of the inputs and outputs that have another one now, by name.

    Raises:
        UnsupportedModelError: something else reads such a cache in its wide type.
    """
    found = [(present, pasts) for present in graph.outputs if (pasts := _pasts(graph, present))]
    inputs = {past.name: past for _, pasts in found for past in pasts}
    for past in inputs.values():
        casts = [node for node in consumers(past) if not is_op(node, "Shape")]
        kind = next(node.attrs["to"] for node in casts if _is_narrowing(node))
        _refuse_readers(past, kind, [node for node in casts if not _is_narrowing(node) or node.attrs["to"] != kind])
        past.dtype = kind
        for cast in casts:
            replace_uses(cast.outputs[0], past)
    for present, pasts in found:
        kind = pasts[0].dtype
        _refuse_readers(present, kind, [node for node in consumers(present) if not is_op(node, "Cast", "Shape")])
        cast = producer(present)
        assert cast is not None
        narrow, writer = cast.inputs[0], producer(cast.inputs[0])
        assert writer is not None
        if contains(graph.outputs, narrow):
            continue  # the same cache is given twice, which is refused where it is proven
        cast.outputs.clear()
        replace_uses(narrow, present)
        writer.outputs[writer.outputs.index(narrow)] = present
        present.dtype = kind
    graph.cleanup()
    return dict.fromkeys([*inputs, *(present.name for present, _ in found)], dtype_name(_WIDE))


def _pasts(graph: gs.Graph, present: gs.Tensor) -> list[gs.Tensor]:
    """The wide inputs that the operator behind a wide output reads as narrow ones; none where it writes no cache."""
    cast = producer(present)
    if cast is None or not is_op(cast, "Cast") or elem_type(present) != _WIDE:
        return []
    writer = producer(trace_back(cast.inputs[0])[0])
    places = () if writer is None else _PASTS.get(writer.op, ())
    operands = [tensor for place in places if (tensor := input_or_none(writer, place)) is not None]
    casts = [producer(trace_back(tensor)[0]) for tensor in operands]
    pasts = [node.inputs[0] for node in casts if node is not None and _is_narrowing(node)]
    return [past for past in pasts if may_be_cache(graph, past)]


def _is_narrowing(node: gs.Node) -> bool:
    return is_op(node, "Cast") and node.attrs.get("to") in _NARROW and elem_type(node.inputs[0]) == _WIDE


def _refuse_readers(cache: gs.Tensor, kind: int, readers: Sequence[gs.Node]) -> None:
    if readers:
        raise UnsupportedModelError(
            f"{readers[0].op} '{readers[0].name}' reads the cache '{cache.name}' as float, and what writes it computes "
            f"in {dtype_name(kind)}, as converters leave it with keep_io_types; supported are such caches that "
            "everything reads in the type that they are computed in: convert the model again with keep_io_types=False"
        )
