"""Finds shapes of tensors as terms in the batch B and the new tokens S, by two inferences with numbers for B and S."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from trt_kvcache.errors import InvalidModelError
from trt_kvcache.importer.protos import copied, dtype_name, part_of, replace_field
from trt_kvcache.importer.steps.sessions import RunError, open_session

POINTS = ({"batch": 2, "sequence": 5, "past": 11, "total": 16}, {"batch": 3, "sequence": 7, "past": 13, "total": 20})
"""Two sets of sizes of a decode loop; no size is a product of other sizes."""
ENCODED = 6
"""The size of an axis that no decode loop changes, such as the length of an encoder's text."""
UNKNOWN = 1
"""The size of an axis whose meaning is unknown: 1, because it broadcasts."""

Shapes = Mapping[str, tuple[tuple[int | str, ...], tuple[str, ...]]]
"""For each graph input: its dimensions, and for each axis the name of its size in `POINTS`."""

_FEW = 1 << 10  # most numbers in a constant that shapes are computed from
_ROUNDS = 6  # rounds of inference; each uses the numbers that the last one found
_WHOLE = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)


@dataclass(frozen=True)
class Term:
    """A size ``factor * B**batch * S**sequence``."""

    factor: int
    batch: int
    sequence: int

    def at(self, batch: int, sequence: int) -> int:
        """Return the size for numbers B and S."""
        return int(self.factor * batch**self.batch * sequence**self.sequence)

    def __str__(self) -> str:
        """Return the term as text, such as ``2*B*S``."""
        return "*".join([*[str(self.factor)][: self.factor != 1], *"B" * self.batch, *"S" * self.sequence]) or "1"


@dataclass(frozen=True)
class Kind:
    """Element type and shape of a tensor; the shape is None if a dimension is not a term in B and S."""

    elem_type: int
    shape: tuple[Term, ...] | None

    def __str__(self) -> str:
        """Return type and shape as text."""
        return f"{dtype_name(self.elem_type)} [{', '.join(map(str, self.shape or ('?',)))}]"


class Kinds:
    """Types and shapes of the tensors of a model.

    Raises:
        InvalidModelError: the shapes contradict each other.
    """

    def __init__(self, model: onnx.ModelProto, shapes: Shapes, batch: int | None) -> None:
        fixed = {} if batch is None else {"batch": batch}
        self._inferences = [_Inference(model, shapes, point | fixed) for point in POINTS]
        self._kinds = self._read()

    def get(self, name: str) -> Kind | None:
        """Return type and shape of a tensor, if known."""
        return self._kinds.get(name)

    def compute(self) -> None:
        """Evaluate integers from which shapes are computed, to find shapes that inference alone does not find."""
        for inference in self._inferences:
            inference.compute()
        self._kinds = self._read()

    def _read(self) -> dict[str, Kind]:
        first, second = (inference.types for inference in self._inferences)
        return {
            name: Kind(elem_type, terms(dims, second[name][1] if name in second else None))
            for name, (elem_type, dims) in first.items()
        }


class _Inference:
    """ONNX shape inference with numbers for B, S and P."""

    def __init__(self, model: onnx.ModelProto, shapes: Shapes, point: Mapping[str, int]) -> None:
        self._model = copied(model)
        del self._model.graph.value_info[:]
        inputs = {value.name for value in model.graph.input}
        replace_field(self._model.graph.output, [v for v in self._model.graph.output if v.name not in inputs])
        for value in self._model.graph.output:
            value.type.tensor_type.ClearField("shape")
        for value in self._model.graph.input:
            _fix(value, *shapes.get(value.name, ((), ())), point)
        self.types = self._infer()

    def _infer(self) -> dict[str, tuple[int, tuple[int, ...] | None]]:
        try:
            model = onnx.shape_inference.infer_shapes(self._model, check_type=False, strict_mode=False, data_prop=True)
        except (onnx.shape_inference.InferenceError, RuntimeError) as error:
            raise InvalidModelError(f"ONNX shape inference failed: {' '.join(str(error).split())}") from error
        types = {}
        for value in (*model.graph.value_info, *model.graph.output, *model.graph.input):
            tensor = value.type.tensor_type
            dims = tensor.shape.dim if tensor.HasField("shape") else [onnx.TensorShapeProto.Dimension()]
            known = tuple(d.dim_value for d in dims) if all(d.HasField("dim_value") for d in dims) else None
            types[value.name] = (tensor.elem_type, known)
        return types

    def compute(self) -> None:
        """Evaluate integers that follow from shapes, and infer again, until no more become known."""
        graph = self._model.graph
        values = {
            t.name: numpy_helper.to_array(t)
            for t in graph.initializer
            if t.data_location != TensorProto.EXTERNAL and math.prod(t.dims) <= _FEW
        }
        for _ in range(_ROUNDS):
            numbers = self._numbers(values)
            if not numbers:
                return
            values |= numbers
            replace_field(graph.node, [node for node in graph.node if not set(node.output) & set(numbers)])
            graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in numbers.items())
            self.types = self._infer()

    def _numbers(self, values: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return small tensors that follow from known shapes and from constants."""
        numbers: dict[str, npt.NDArray[Any]] = {}
        nodes, wanted = [], []
        reachable = set(values)
        for node in self._model.graph.node:
            if node.op_type in ("Shape", "Size") and (shape := self.types.get(node.input[0], (0, None))[1]) is not None:
                numbers[node.output[0]] = _shape_value(node, shape)
                reachable.add(node.output[0])
            elif (
                len(node.output) == 1
                and reachable.issuperset(n for n in node.input if n)
                and (node.input or node.op_type == "Constant")
                and all(a.type not in (a.GRAPH, a.GRAPHS) for a in node.attribute)
                and self._is_small(node.output[0])  # ONNX Runtime returns no arrays of types such as bfloat16
            ):
                nodes.append(node)
                reachable.add(node.output[0])
                wanted.append(node.output[0])
        if not nodes:
            return numbers
        used = {n for node in nodes for n in node.input}
        constants = [numpy_helper.from_array(v, n) for n, v in {**values, **numbers}.items() if n in used]
        try:
            computed = open_session(part_of(self._model, nodes, [], wanted, constants), {}).run({})
        except RunError:
            return numbers
        return numbers | {name: value for name, value in computed.items() if value.size <= _FEW}

    def _is_small(self, name: str) -> bool:
        elem_type, shape = self.types.get(name, (0, None))
        return elem_type in (*_WHOLE, 0) and (shape is None or math.prod(shape) <= _FEW)


def _fix(
    value: onnx.ValueInfoProto, dims: tuple[int | str, ...], axes: tuple[str, ...], point: Mapping[str, int]
) -> None:
    for place, dim in enumerate(value.type.tensor_type.shape.dim):
        known = dims[place] if place < len(dims) else "?"
        axis = axes[place] if place < len(axes) else ""
        if isinstance(known, int):
            dim.dim_value = known
        elif axis in point:
            dim.dim_value = point[axis]
        elif not dim.HasField("dim_value"):
            dim.dim_value = UNKNOWN if axis == "?" else ENCODED


def _shape_value(node: onnx.NodeProto, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if node.op_type == "Size":
        return np.asarray(math.prod(shape), np.int64)
    ends = {a.name: a.i for a in node.attribute}
    return np.asarray(shape[slice(ends.get("start"), ends.get("end"))], np.int64)


def terms(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[Term, ...] | None:
    """Derive the terms of a shape from its sizes at both `POINTS`; None if a dimension is not a term, or is unknown."""
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
