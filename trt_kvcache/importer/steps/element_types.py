"""Finds and replaces the element types that a model declares in tensors, value infos and attributes."""

from __future__ import annotations

from collections.abc import Container, Iterator

from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, TypeProto

from trt_kvcache.importer.protos import iter_scopes, iter_tensors

_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "softmax_precision", "stash_type"})


def all_types(model: ModelProto) -> set[int]:
    """Return every element type in the model."""
    declared = {kind.tensor_type.elem_type for kind in _declared(model)}
    return declared | {t.data_type for t in iter_tensors(model)} | {a.i for a in _attributes(model)}


def has_bfloat16(model: ModelProto) -> bool:
    """True if a tensor, a declared value or an operator of the model is bfloat16."""
    return TensorProto.BFLOAT16 in all_types(model)


def state_type(model: ModelProto, old: Container[int], new: int) -> None:
    """Replace the element types `old` with `new` in value infos and attributes. Tensors keep their types."""
    for attribute in _attributes(model):
        if attribute.i in old:
            attribute.i = new
    for kind in _declared(model):
        if kind.tensor_type.elem_type in old:
            kind.tensor_type.elem_type = new


def _attributes(model: ModelProto) -> Iterator[AttributeProto]:
    for scope in iter_scopes(model):
        for node in scope.node:
            yield from (a for a in node.attribute if a.name in _ATTRIBUTES and a.type == AttributeProto.INT)


def _declared(model: ModelProto) -> Iterator[TypeProto]:
    for scope in iter_scopes(model):
        values = [*scope.value_info, *([*scope.input, *scope.output] if isinstance(scope, GraphProto) else ())]
        for value in values:
            yield from _nested(value.type)
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.HasField("tp"):
                    yield from _nested(attribute.tp)


def _nested(kind: TypeProto) -> Iterator[TypeProto]:
    yield kind
    for field in ("sequence_type", "optional_type"):
        if kind.HasField(field):
            yield from _nested(getattr(kind, field).elem_type)
