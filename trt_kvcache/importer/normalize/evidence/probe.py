"""Evaluate parts of a model on one sample, lazily.

What a mask looks like, where a scatter writes, how a chain of operators moves data: a sample fixes the shape of every
graph input and the value of some. From these follow the exact shape of every tensor, and the exact value of every one
that no weight and no token reaches: shape arithmetic, positions, masks. Any tensor may be given a value, which then
stands for what its producer would make; so a chain of operators can be fed numbers and its result compared with what it
should be. Operators are evaluated by the `Blueprint` of the model, one by one, only for what is asked.

The layers of a decoder do the same with tensors of the same shapes, and much is the same in every step. So what an
operator makes of the same types and values is made once; of small values, once for all samples:

    layers.0   Transpose(float16 [2, 3, 8, 64])  ->  inferred: float16 [2, 8, 3, 64]
    layers.31  Transpose(float16 [2, 3, 8, 64])  ->  found
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import onnx

from trt_kvcache.importer.normalize.evidence.blueprint import LARGEST, SIZES, Array, Blueprint, Maker, content, is_small

Shape = tuple[int, ...]
_Type = bytes  # an onnx.TypeProto, serialized: hashable, and equal only where all of it is
_Fact = tuple[str, bool]  # a tensor's value, or its type
_Made = TypeVar("_Made")

COUNTS = ("NonZero", "Compress", "Unique")  # the contents of their inputs decide how much they give
FILLED = ("ScatterElements", "ScatterND")  # as large as their first input, whatever is written into it
_KEPT = 1 << 12  # results, at most, that all samples share
_VALUE, _TYPE = True, False


class Probe:
    """The tensors of a model in one sample.

    Args:
        blueprint: the model.
        shapes: shape of every graph input. Not copied.
        values: of graph inputs or any other tensors.
    """

    def __init__(self, blueprint: Blueprint, shapes: Mapping[str, Shape], values: Mapping[str, Array]) -> None:
        self._blueprint = blueprint
        self._shapes = shapes
        self._given = dict(values)
        self._other: Probe | None = None  # with fewer values: knows the same of what comes before these
        self._first = 0
        self._shared: dict[Hashable, Probe] = {}
        self._values: dict[str, Array | None] = dict(values)
        self._types: dict[str, _Type | None] = {}
        # What was made of what, in this sample only: by large values as objects, which live as long as the probe.
        self._evaluated: dict[Hashable, Sequence[Array | None]] = {}
        self._inferred: dict[Hashable, Sequence[_Type | None]] = {}

    @property
    def values(self) -> Mapping[str, Array]:
        """What was given."""
        return self._given

    def given(self, values: Mapping[str, Array]) -> Probe:
        """The same sample with more values."""
        made = Probe(self._blueprint, self._shapes, self._given | dict(values))
        made._other = self
        made._first = min(map(self._blueprint.place, values), default=0)
        return made

    def shared(self, values: Mapping[str, Array]) -> Probe:
        """As `given`, but the same one for the same small values: it stays, with all that is found out from it."""
        key = tuple((name, content(value)) for name, value in values.items())
        if key not in self._shared:
            self._shared[key] = self.given(values)
        return self._shared[key]

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor, or None where an operator is unknown or its shape hangs on weights or tokens."""
        kind = self._type(name)
        return None if kind is None else _shape(kind)

    def elem_type(self, name: str) -> int | None:
        """The ONNX element type of a tensor, or None where it is unknown."""
        kind = self._type(name)
        return None if kind is None else _elem_type(kind)

    def value(self, name: str) -> Array | None:
        """The value of a tensor, or None where weights, tokens or an unknown operator take part in it.

        Not to be changed: it may be the value of other tensors, too.
        """
        if name not in self._values:
            self._find((name, _VALUE))
        return self._values[name]

    def _type(self, name: str) -> _Type | None:
        if name not in self._types:
            self._find((name, _TYPE))
        return self._types[name]

    def _find(self, wanted: _Fact) -> None:
        """Find out a fact, after those that it follows from: without recursion, for chains of any length."""
        pending = [wanted]
        while pending:
            name, is_value = pending[-1]
            known = name in (self._values if is_value else self._types)
            missing = () if known else self._find_value(name) if is_value else self._find_type(name)
            if missing:
                pending += missing
            else:
                pending.pop()

    def _before(self, name: str) -> Probe | None:
        """Who knows the same of a tensor, since nothing that it is made of was given a value behind their back."""
        is_before = self._other is not None and self._blueprint.place(name) < self._first
        return self._other if is_before else None

    def _find_value(self, name: str) -> Sequence[_Fact]:
        """Find out a value, or say what has to be known before."""
        maker, values, types = self._blueprint.maker(name), self._values, self._types
        if (other := self._before(name)) is not None and (value := other.value(name)) is not None:
            values[name] = value
            return ()
        if maker is None:
            values[name] = self._blueprint.constant(name)
            return ()
        if missing := [(n, _VALUE) for n in maker.operands if n and n not in values]:
            return missing
        inputs = [values[n] if n else None for n in maker.operands]
        if any(v is None and n for n, v in zip(maker.operands, inputs, strict=True)):
            values[name] = None
            return ()
        if missing := [(n, _TYPE) for n in maker.likes if n not in types]:
            return missing
        likes = [types[n] for n in maker.likes]
        key = (maker.form, *map(content, inputs), *likes)
        made = self._blueprint.evaluated.get(key) or self._evaluated.get(key)
        if made is None:
            made = self._evaluate(maker, inputs, likes)
            _place(self._blueprint.evaluated, self._evaluated, (*inputs, *made))[key] = made
        values[name] = made[maker.index]
        return ()

    def _evaluate(
        self, maker: Maker, inputs: Sequence[Array | None], likes: Sequence[_Type | None]
    ) -> Sequence[Array | None]:
        if not likes:
            return self._blueprint.evaluate(maker.node, inputs)
        kind = likes[0]
        if kind is None:
            return [None]
        if maker.op == "CastLike":
            wanted = _elem_type(kind)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(wanted) if wanted else None
            return [None if value is None or dtype is None else value.astype(dtype) for value in inputs]
        shape = _shape(kind)
        if shape is None:
            return [None]
        if maker.op == "Size":
            return [np.asarray(int(np.prod(shape)), np.int64)]
        if maker.op == "Shape":
            bounds = {a.name: a.i for a in maker.node.attribute}
            return [np.asarray(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], np.int64)]
        return self._blueprint.evaluate(maker.node, inputs) if int(np.prod(shape)) <= LARGEST else [None]

    def _find_type(self, name: str) -> Sequence[_Fact]:
        """Find out a type, or say what has to be known before."""
        values, types = self._values, self._types
        if (value := values.get(name)) is not None:
            types[name] = _type(onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            return ()
        if (other := self._before(name)) is not None and (kind := other._type(name)) is not None:
            types[name] = kind
            return ()
        maker = self._blueprint.maker(name)
        if maker is None or maker.op in SIZES:
            if name in self._blueprint.producers and name not in values:
                return [(name, _VALUE)]
            types[name] = self._stated(name)
            return ()
        if maker.op in FILLED:
            if (first := maker.inputs[0]) not in types:
                return [(first, _TYPE)]
            types[name] = types[first]
            return ()
        if maker.op in COUNTS and name not in values:
            return [(name, _VALUE)]  # which is the type, too, if it is known
        if missing := [(n, _TYPE) for n in maker.inputs if n and n not in types]:
            return missing
        kinds = [types[n] for n in maker.inputs if n]
        if None in kinds:
            types[name] = None
            return ()
        if missing := [(n, _VALUE) for n in maker.shaped_by if n not in values]:
            return missing
        data = [values[n] for n in maker.shaped_by]
        key = (maker.form, *kinds, *map(content, data))
        made = self._blueprint.inferred.get(key) or self._inferred.get(key)
        if made is None:
            made = self._infer(maker)
            _place(self._blueprint.inferred, self._inferred, data)[key] = made
        types[name] = made[maker.index]
        return ()

    def _infer(self, maker: Maker) -> Sequence[_Type | None]:
        kinds = {n: onnx.TypeProto.FromString(kind) for n in maker.inputs if (kind := self._types.get(n)) is not None}
        data = {n: value for n in maker.shaped_by if (value := self._values[n]) is not None}
        outputs = maker.node.output
        if len(data) < len(set(maker.shaped_by)):
            return [None] * len(outputs)
        found = self._blueprint.infer(maker.node, kinds, data)
        return [found[n].SerializeToString(deterministic=True) if n in found else None for n in outputs]

    def _stated(self, name: str) -> _Type | None:
        """The type of a weight or a graph input."""
        if name in self._blueprint.initializers:
            tensor = self._blueprint.initializers[name]
            return _type(tensor.data_type, tuple(tensor.dims))
        if name in self._shapes:
            return _type(self._blueprint.inputs[name].type.tensor_type.elem_type, self._shapes[name])
        if (tensor := self._blueprint.constant_tensor(name)) is not None:
            return _type(tensor.data_type, tuple(tensor.dims))
        return None


def _place(
    shared: dict[Hashable, _Made], own: dict[Hashable, _Made], values: Iterable[Array | None]
) -> dict[Hashable, _Made]:
    """Where to keep what was made of some values, or is one of them."""
    fits = len(shared) < _KEPT and all(value is None or is_small(value) for value in values)
    return shared if fits else own


@lru_cache(1 << 16)
def _type(elem_type: int, shape: Shape) -> _Type:
    kind: _Type = onnx.helper.make_tensor_type_proto(elem_type, list(shape)).SerializeToString(deterministic=True)
    return kind


@lru_cache(1 << 16)
def _shape(kind: _Type) -> Shape | None:
    tensor = onnx.TypeProto.FromString(kind).tensor_type
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    return tuple(d.dim_value for d in tensor.shape.dim)


def _elem_type(kind: _Type) -> int:
    return int(onnx.TypeProto.FromString(kind).tensor_type.elem_type)
