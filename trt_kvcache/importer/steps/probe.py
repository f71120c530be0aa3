"""Evaluates tensors of a model in one step, with ONNX's own functions, and only if they are requested.

A step fixes the shape of every graph input, and some values. `Probe` derives the type of each tensor with ONNX shape
inference, and values that do not depend on weights or tokens with ONNX's reference evaluator. A caller may set the
value of any tensor. Equal operators with equal inputs, as in the layers of a decoder, are evaluated only once:

    layers.0   Transpose(float16 [2, 3, 8, 64])  ->  inferred: float16 [2, 8, 3, 64]
    layers.31  Transpose(float16 [2, 3, 8, 64])  ->  found in the results of layer 0

`Kinds` finds shapes as terms such as ``2*B*S`` (batch B, new tokens S), from two steps with different B and S.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference.ops import load_op

from trt_kvcache.importer.protos import Array, dtype_name, elem_type_of, is_op, may_be_bias, names_read, sliced_squares

Shape = tuple[int, ...]

_SMALL = 1 << 12  # bytes; larger values are compared by identity, not by contents
_FEW = 64  # the most elements of a value that may decide a shape
_LARGEST = 1 << 26  # the most elements of a value, because untrusted models run here in the caller's process
_SHARED = 1 << 12  # the most results that all steps share
_SLOW = {"Conv", "ConvTranspose", "Einsum"}  # masks and positions are never computed with these
# the size of their output depends on values, but is at most the size of the input
_COUNTING = {"NonZero", "Compress", "Unique"}
_RANDOM = {"RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike", "Bernoulli", "Multinomial"}
_READABLE = {  # types of masks that are stored as buffers, and of row numbers
    onnx.TensorProto.BOOL, onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.INT32,
    onnx.TensorProto.INT64,
}  # fmt: skip


class _Fact(NamedTuple):
    """Known facts about a tensor.

    Attributes:
        kind: element type and shape as a serialized onnx.TypeProto, which is hashable. None: unknown.
        value: the value; None if it depends on weights, tokens or an unknown operator.
    """

    kind: bytes | None
    value: Array | None = None


_UNKNOWN = _Fact(None)


@dataclass(frozen=True, slots=True)
class Maker:
    """The node that computes a tensor, converted once, because reading a protobuf is slow.

    Attributes:
        place: index of the node in the graph. Makers of its inputs have lower indices.
        op: the node's operator, with its domain unless this is ONNX's own.
        form: a number that nodes with the same operator and attributes share.
        inputs: names of the inputs; an omitted input has an empty name.
    """

    node: onnx.NodeProto
    place: int
    op: str
    form: int
    inputs: tuple[str, ...]


class Blueprint:
    """A model without functions in a form that a `Probe` (values of one step) reads quickly; all probes share it.

    Attributes:
        makers: the node that computes a tensor, by the tensor's name; constants are absent.
        results: facts about a node's outputs; the key: the node's form and facts about its inputs. Steps share them.
    """

    def __init__(self, model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
        self.model = model
        self.opsets = {o.domain if o.domain != "ai.onnx" else "": o.version for o in model.opset_import}
        self.initializers = {t.name: t for t in model.graph.initializer}
        self.inputs = {v.name: v for v in model.graph.input if v.name not in self.initializers}
        self.makers: dict[str, Maker] = {}
        self.results: dict[Hashable, Sequence[_Fact]] = {}
        self._weights = weights
        self._masks = sliced_squares(model.graph)
        self._forms: dict[Hashable, int] = {}
        self._operators: dict[int, Callable[..., Any] | None] = {}
        self._stated: dict[str, _Fact] = {}
        for place, node in enumerate(model.graph.node):
            if is_op(node, "Constant") and (tensor := next((a.t for a in node.attribute if a.name == "value"), None)):
                self.initializers[node.output[0]] = tensor
            else:
                self.makers |= dict.fromkeys(node.output, self._maker(node, place))

    def _maker(self, node: onnx.NodeProto, place: int) -> Maker:
        op = str(node.op_type) if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
        inputs = (*node.input, *sorted(names_read(node).difference(node.input)))  # bodies of If and Loop read, too
        places = tuple(inputs.index(n) if n else -1 for n in inputs)
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in node.attribute))
        form = (op, attributes, places, tuple(map(bool, node.output)))
        return Maker(node, place, op, self._forms.setdefault(form, len(self._forms)), inputs)

    def stated(self, name: str) -> _Fact:
        """Return the type and shape of a constant, and its value if the constant is small or may be a mask."""
        if name not in self._stated:
            tensor = self.initializers[name]
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            may_be_mask = tensor.data_type in _READABLE or may_be_bias(tensor) or name in self._masks
            if external and name in self._weights and may_be_mask:
                tensor, external = self._weights[name], False
            value = None if external else np.asarray(numpy_helper.to_array(tensor))
            self._stated[name] = _Fact(_kind(tensor.data_type, tuple(tensor.dims)), value)
        return self._stated[name]

    def run(self, maker: Maker, facts: Sequence[_Fact | None]) -> Sequence[_Fact]:
        """Derive type, shape and value of a node's outputs from those of its inputs (None: omitted input)."""
        if maker.op == "Range":  # ONNX Runtime accepts [1] instead of a scalar, and exporters rely on this
            facts = [
                _fact(f.value.reshape(())) if f and f.value is not None and f.value.size == 1 else f for f in facts
            ]
        kinds = self._infer(maker, facts)
        values = self._evaluate(maker, facts, kinds)
        return [_Fact(k) if v is None else _fact(v) for k, v in zip(kinds, values, strict=True)]

    def _infer(self, maker: Maker, facts: Sequence[_Fact | None]) -> list[bytes | None]:
        known = {n: f for n, f in zip(maker.inputs, facts, strict=True) if f is not None}
        own = {*maker.node.input}  # without names that only bodies read
        types = {n: onnx.TypeProto.FromString(f.kind or b"") for n, f in known.items() if f.kind or n in own}
        small = {n: v for n, f in known.items() if (v := f.value) is not None and v.ndim <= 1 and v.size <= _FEW}
        data = {n: numpy_helper.from_array(v) for n, v in small.items() if v.dtype.kind in "iuf"}
        node, domain = maker.node, "" if maker.node.domain == "ai.onnx" else maker.node.domain
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opsets.get(domain, 1), domain)
            holds_bodies = any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute)
            opsets = list(self.model.opset_import) if holds_bodies else None
            inferred = onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=opsets)
        except Exception:  # noqa: BLE001 - no schema, or shapes that do not fit: unknown
            inferred = {}
        return [inferred[n].SerializeToString(deterministic=True) if n in inferred else None for n in maker.node.output]

    def _evaluate(
        self, maker: Maker, facts: Sequence[_Fact | None], kinds: Sequence[bytes | None]
    ) -> Sequence[Array | None]:
        values = [None if f is None else f.value for f in facts]
        nothing = [None] * len(kinds)
        if maker.op in ("Shape", "Size"):
            shape = _shape(facts[0].kind) if facts[0] is not None else None
            if shape is None:
                return nothing
            bounds = {a.name: a.i for a in maker.node.attribute}
            part = shape[bounds.get("start", 0) : bounds.get("end", len(shape))]
            return [np.asarray(part if maker.op == "Shape" else prod(shape), np.int64)]
        if maker.op == "CastLike" and kinds[0] is not None and values[0] is not None:
            return [values[0].astype(onnx.helper.tensor_dtype_to_np_dtype(_elem_type(kinds[0])))]
        if any(v is None or v.dtype.kind not in "biufcV" for f, v in zip(facts, values, strict=True) if f is not None):
            return nothing
        shapes = [_shape(kind) for kind, name in zip(kinds, maker.node.output, strict=True) if name]
        is_bounded = all(shape is not None and prod(shape) <= _LARGEST for shape in shapes)
        if maker.op in _SLOW or not (is_bounded or maker.op in _COUNTING):
            return nothing
        if maker.form not in self._operators:
            self._operators[maker.form] = self._operator(maker.node)
        return _run(maker, self._operators[maker.form], values) or nothing

    def _operator(self, node: onnx.NodeProto) -> Callable[..., Any] | None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute) or node.op_type in _RANDOM:
            return None
        try:
            operator = load_op(domain, node.op_type, self.opsets.get(domain, 1))
            settings = {"log": lambda *_: None, "opsets": self.opsets, "verbose": 0, "new_ops": None}
            return cast("Callable[..., Any]", operator(node, settings).run)
        except Exception:  # noqa: BLE001 - no such operator: its values are unknown
            return None


class Probe:
    """Evaluates the tensors of a model in one step, for which `shapes` and some `values` are given by name."""

    def __init__(self, blueprint: Blueprint, shapes: Mapping[str, Shape], values: Mapping[str, Array]) -> None:
        self._blueprint = blueprint
        self._shapes = shapes
        self._values = dict(values)
        self._other: Probe | None = None  # the probe without new values; its facts hold for nodes before theirs
        self._first = 0
        self._facts = {name: _fact(value) for name, value in values.items()}
        # results with large values, by identity; kept as long as the probe
        self._large: dict[Hashable, Sequence[_Fact]] = {}

    def with_values(self, values: Mapping[str, Array]) -> Probe:
        """Return a copy of this probe of one step, in which the tensors in `values` have these values."""
        probe = Probe(self._blueprint, self._shapes, self._values | dict(values))
        probe._other = self
        makers = self._blueprint.makers
        probe._first = min((makers[n].place if n in makers else -1 for n in values), default=0)
        return probe

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor; None if an operator is unknown, or the shape depends on weights or tokens."""
        return _shape(self._fact(name).kind)

    def elem_type(self, name: str) -> int | None:
        """Return the ONNX element type of a tensor; None if unknown."""
        kind = self._fact(name).kind
        return None if kind is None else _elem_type(kind)

    def value(self, name: str) -> Array | None:
        """Return the value of a tensor; None if it depends on weights, tokens or unknown operators.

        The caller must not change the array.
        """
        return self._fact(name).value

    def _fact(self, name: str) -> _Fact:
        """Derive type, shape and value of a tensor and of its producers, in a loop instead of by recursion."""
        pending = [name] if name not in self._facts else []
        while pending:
            name = pending[-1]
            maker = None if name in self._facts else self._blueprint.makers.get(name)
            missing = [n for n in maker.inputs if n and n not in self._facts] if maker is not None else []
            if name in self._facts:
                pending.pop()
            elif maker is None:
                self._facts[name] = self._stated(name)
            elif self._other is not None and maker.place < self._first:
                self._facts[name] = self._other._fact(name)
            elif missing:
                pending += missing
            else:
                for output, fact in zip(maker.node.output, self._make(maker), strict=True):
                    self._facts.setdefault(output, fact)  # keeps a value that the caller gave
        return self._facts[name]

    def _make(self, maker: Maker) -> Sequence[_Fact]:
        facts = [self._facts[n] if n else None for n in maker.inputs]
        key = (maker.form, *(f and _content(f) for f in facts))
        shared = self._blueprint.results
        results = shared.get(key) or self._large.get(key)
        if results is None:
            results = self._blueprint.run(maker, facts)
            is_small = all(f is None or _is_small(f.value) for f in (*facts, *results))
            (shared if is_small and len(shared) < _SHARED else self._large)[key] = results
        return results

    def _stated(self, name: str) -> _Fact:
        if name in self._blueprint.initializers:
            return self._blueprint.stated(name)
        if name in self._shapes:
            return _Fact(_kind(self._blueprint.inputs[name].type.tensor_type.elem_type, self._shapes[name]))
        return _UNKNOWN


def _fact(value: Array) -> _Fact:
    return _Fact(_kind(onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape), value)


def _content(fact: _Fact) -> Hashable:
    """Return a key for `Blueprint.results`: types and small values by contents, large values by identity."""
    value = fact.value
    if value is None:
        return fact.kind
    return (fact.kind, value.tobytes()) if _is_small(value) else id(value)


def _is_small(value: Array | None) -> bool:
    return value is None or (value.nbytes <= _SMALL and not value.dtype.hasobject)


def _run(
    maker: Maker, operator: Callable[..., Any] | None, inputs: Sequence[Array | None]
) -> Sequence[Array | None] | None:
    if operator is None:
        return None
    if maker.op == "Pad":
        inputs = _without_negative_pads(inputs)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results = [None if value is None else np.asarray(value) for value in operator(*inputs)]
    except Exception:  # noqa: BLE001 - an index out of range, a shape that does not fit: the value is unknown
        return None
    count = len(maker.node.output)
    return [*results, *[None] * count][:count]


def _without_negative_pads(inputs: Sequence[Array | None]) -> Sequence[Array | None]:
    """Crop Pad's input by negative pads (of torch.onnx), because ONNX's reference evaluator does not."""
    data, pads, value, axes = (*inputs, *[None] * 4)[:4]
    if data is None or pads is None or pads.min(initial=0) >= 0:
        return inputs
    inside = [slice(None)] * data.ndim
    for axis, begin, end in zip(range(data.ndim) if axes is None else axes, *np.split(pads, 2), strict=True):
        inside[axis] = slice(max(-begin, 0), data.shape[axis] + min(end, 0))
    return [data[tuple(inside)], np.maximum(pads, 0), value, *([] if axes is None else [axes])]


@lru_cache(1 << 16)
def _kind(elem_type: int, shape: Shape) -> bytes:
    kind: bytes = onnx.helper.make_tensor_type_proto(elem_type, list(shape)).SerializeToString(deterministic=True)
    return kind


@lru_cache(1 << 16)
def _shape(kind: bytes | None) -> Shape | None:
    tensor = onnx.TypeProto.FromString(kind or b"").tensor_type
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    return tuple(d.dim_value for d in tensor.shape.dim)


def _elem_type(kind: bytes) -> int:
    return int(onnx.TypeProto.FromString(kind).tensor_type.elem_type)


POINTS = ({"batch": 2, "sequence": 5, "past": 11, "total": 16}, {"batch": 3, "sequence": 7, "past": 13, "total": 20})
"""Sizes of two steps of a decode loop. No size is a product of other sizes."""
ENCODED = 6
"""The size of an axis that does not change during a decode, such as the length of an encoder's text."""
UNKNOWN = 1
"""The size of an axis whose meaning is unknown: 1, because it broadcasts."""

Shapes = Mapping[str, tuple[tuple[int | str, ...], tuple[str, ...]]]
"""Maps each graph input to its dimensions, and to a name in `POINTS` for each axis."""


@dataclass(frozen=True)
class Term:
    """A size of an axis: ``factor * B**batch * S**sequence``, with batch B and new tokens S."""

    factor: int
    batch: int
    sequence: int

    def at(self, batch: int, sequence: int) -> int:
        """Return the size for a batch and a number of new tokens."""
        return int(self.factor * batch**self.batch * sequence**self.sequence)

    def __str__(self) -> str:
        return "*".join([*[str(self.factor)][: self.factor != 1], *"B" * self.batch, *"S" * self.sequence]) or "1"


@dataclass(frozen=True)
class Kind:
    """Element type and shape of a tensor; the shape is None if a size is not a `Term`."""

    elem_type: int
    shape: tuple[Term, ...] | None

    def __str__(self) -> str:
        return f"{dtype_name(self.elem_type)} [{', '.join(map(str, self.shape or ('?',)))}]"


class Kinds:
    """Finds types and shapes of a model's tensors from the axes of its inputs. `batch` is the fixed batch, or None."""

    def __init__(self, model: onnx.ModelProto, shapes: Shapes, batch: int | None) -> None:
        blueprint = Blueprint(model, {})
        fixed = {} if batch is None else {"batch": batch}
        ranked = {n: v for n, v in blueprint.inputs.items() if v.type.tensor_type.HasField("shape")}
        self._probes = [
            Probe(blueprint, {n: _sizes(v, *shapes.get(n, ((), ())), point | fixed) for n, v in ranked.items()}, {})
            for point in POINTS
        ]
        self._stated = {v.name: elem_type_of(v) for v in model.graph.output}
        self._kinds: dict[str, Kind | None] = {}

    def get(self, name: str) -> Kind | None:
        """Return type and shape of a tensor; None if the type is unknown."""
        if name not in self._kinds:
            first, second = (probe.shape(name) for probe in self._probes)
            elem_type = self._probes[0].elem_type(name) or self._stated.get(name)
            self._kinds[name] = None if elem_type is None else Kind(elem_type, terms(first, second))
        return self._kinds[name]


def _sizes(
    value: onnx.ValueInfoProto, dims: tuple[int | str, ...], axes: tuple[str, ...], point: Mapping[str, int]
) -> tuple[int, ...]:
    sizes = []
    for place, dim in enumerate(value.type.tensor_type.shape.dim):
        known = dims[place] if place < len(dims) else "?"
        axis = axes[place] if place < len(axes) else ""
        stated = dim.dim_value if dim.HasField("dim_value") else UNKNOWN if axis == "?" else ENCODED
        sizes.append(known if isinstance(known, int) else point.get(axis, stated))
    return tuple(sizes)


def terms(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[Term, ...] | None:
    """Return a shape as terms of batch and tokens, from its sizes at both `POINTS`; None if a size is no such term."""
    if first is None or second is None or len(first) != len(second):
        return None
    terms = [_term(a, b) for a, b in zip(first, second, strict=True)]
    return None if None in terms else tuple(t for t in terms if t is not None)


@lru_cache(maxsize=1 << 12)
def _term(first: int, second: int) -> Term | None:
    (b, s), (c, t) = ((point["batch"], point["sequence"]) for point in POINTS)
    powers = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2))
    fits = (Term(first // (b**i * s**j), i, j) for i, j in powers if first % (b**i * s**j) == 0)
    return next((term for term in fits if term.at(c, t) == second), None)
