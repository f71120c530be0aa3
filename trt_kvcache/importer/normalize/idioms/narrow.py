"""Caches that a model takes, or takes and gives, in another type than it keeps them in, as converters leave them.

    past (float32) - Cast -> float16 --.
                                        Concat -> float16 - Cast -> present (float32)
    new (float16) ---------------------'

    becomes

    past (float16) --.
                      Concat -> present (float16)
    new (float16) ---'

What such a cache gives back are float16 numbers, whatever it was given, and as float16 numbers it is read: nothing
changes but the bytes that the caller keeps. Casts around an operator that holds its caches go away in the same manner.

That is how ``keep_io_types`` leaves them. Converters to bfloat16 may also leave a float16 past in front of a bfloat16
present (ModelOpt's AutoCast from opset 22 on): what float16 holds passes it unchanged, and what it does not hold would
have become infinite on its way from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import protos
from trt_kvcache.importer.graph import (
    consumers,
    contains,
    dtype_name,
    elem_type,
    input_or_none,
    is_op,
    producer,
    replace_uses,
)
from trt_kvcache.importer.normalize.candidate import may_be_cache
from trt_kvcache.importer.normalize.views import trace_back

_FLOAT, _FLOAT16, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
# What caches may be taken as, and the types in which they may be kept then.
_NARROWER: dict[int | None, set[int]] = {_FLOAT: {_FLOAT16, _BFLOAT16}, _FLOAT16: {_BFLOAT16}}
# The inputs of the operators that write caches where these come in.
_PASTS = {
    "Concat": (0, 1), "ScatterND": (0,), "ScatterElements": (0,), "Attention": (4, 5), "Where": (1, 2),
}  # fmt: skip


def narrow_caches(graph: gs.Graph) -> dict[str, str]:
    """Take, in place, the Casts away between caches and the operators that write them.

    Args:
        graph: the model as exported.

    Returns:
        The dtypes as exported of the inputs and outputs that have another one now, by name.

    Raises:
        UnsupportedModelError: something else reads such a cache in its wide type, or it comes in a type that holds
            less than the one it goes in.
    """
    found = [(present, pasts) for present in graph.outputs if (pasts := _pasts(graph, present))]
    inputs = {past.name: past for _, pasts in found for past in pasts}
    exported = {name: dtype_name(past) for name, past in inputs.items()}
    for past in inputs.values():
        casts = [node for node in consumers(past) if not is_op(node, "Shape")]
        kind = next(node.attrs["to"] for node in casts if _is_narrowing(node))
        _refuse_readers(past, kind, [node for node in casts if not _is_narrowing(node) or node.attrs["to"] != kind])
        past.dtype = kind
        for cast in casts:
            replace_uses(cast.outputs[0], past)
    for present, pasts in found:
        kind = pasts[0].dtype
        if elem_type(present) == kind:
            continue  # only what was taken had another type
        _refuse_readers(present, kind, [node for node in consumers(present) if not is_op(node, "Cast", "Shape")])
        cast = producer(present)
        assert cast is not None
        narrow, writer = cast.inputs[0], producer(cast.inputs[0])
        assert writer is not None
        if contains(graph.outputs, narrow):
            continue  # the same cache is given twice, which is refused where it is proven
        exported[present.name] = dtype_name(present)
        cast.outputs.clear()
        replace_uses(narrow, present)
        writer.outputs[writer.outputs.index(narrow)] = present
        present.dtype = kind
    graph.cleanup()
    return exported


def _pasts(graph: gs.Graph, present: gs.Tensor) -> list[gs.Tensor]:
    """The inputs that the operator behind an output reads in the type it is kept in; none where it writes no cache."""
    back = producer(present)
    if back is not None and is_op(back, "Cast"):
        casts = _casts(graph, back.inputs[0])
        return [c.inputs[0] for c in casts if _is_narrowing(c) and elem_type(c.inputs[0]) == elem_type(present)]
    casts = [cast for cast in _casts(graph, present) if cast.attrs["to"] == elem_type(present)]
    for cast in casts:
        if not _is_narrowing(cast):
            _refuse_types(cast.inputs[0], present)
    return [cast.inputs[0] for cast in casts]


def _casts(graph: gs.Graph, written: gs.Tensor) -> list[gs.Node]:
    """The Casts between inputs that may be caches and the operator that writes caches to a tensor."""
    writer = producer(trace_back(written)[0])
    places = () if writer is None else _PASTS.get(writer.op, ())
    operands = [tensor for place in places if (tensor := input_or_none(writer, place)) is not None]
    casts = [producer(trace_back(tensor)[0]) for tensor in operands]
    return [node for node in casts if node is not None and is_op(node, "Cast") and may_be_cache(graph, node.inputs[0])]


def _is_narrowing(node: gs.Node) -> bool:
    return is_op(node, "Cast") and node.attrs.get("to") in _NARROWER.get(elem_type(node.inputs[0]), ())


def _refuse_readers(cache: gs.Tensor, kind: int, readers: Sequence[gs.Node]) -> None:
    if readers:
        raise UnsupportedModelError(
            f"{readers[0].op} '{readers[0].name}' reads the cache '{cache.name}' as {dtype_name(cache)}, and what "
            f"writes it computes in {protos.dtype_name(kind)}, as converters leave it with keep_io_types; supported "
            "are such caches that everything reads in the type that they are computed in: convert the model again with "
            "keep_io_types=False"
        )


def _refuse_types(past: gs.Tensor, present: gs.Tensor) -> NoReturn:
    raise UnsupportedModelError(
        f"the cache '{past.name}' comes as {dtype_name(past)} and goes as {dtype_name(present)} "
        f"('{present.name}'), which does not hold the same numbers; supported are caches of one type, and those that "
        "come in a type that holds more: convert the model again, caches in the type of its attention"
    )
