"""Turns bodies of operators (ONNX text that says what an operator computes) into nodes of a graph.

The text has two extensions:

    sum = Add (x, skip)
    sum = Add (sum, bias)                       a name may be assigned again; later lines see the new value
    y = Reshape (sum, [0, 0, 8, -1])            operands may be numbers: int64, or float32 with a decimal point

A body uses the names of inputs and outputs from the table of operators. An input that the node omits stays empty.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import NAME_PREFIX
from trt_kvcache.importer.protos import Shape, copied, dtype_name, elem_type_of, is_op, names_read, shape_of
from trt_kvcache.importer.weights import reinterpret

AGAIN = "export the model again"
SHAPES = "export the model with shapes"

_LITERAL = re.compile(r"\[[^\]]*\]|(?<![\w.])-?\d[\d.]*(?:e[+-]?\d+)?(?!\w)")
_HEADER = '<domain: "trt_kvcache", opset_import: ["": 24]> body () => () '


class UnknownShapeError(Exception):
    """Raised if a body needs a shape that shape inference has not found yet."""


class Tensors:
    """The types, shapes and readers of a model's tensors. New initializers are added to this object and the graph."""

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        self.graph = graph
        self.weights = {t.name: t for t in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output if name}
        self.read = {v.name for v in graph.output}.union(*map(names_read, graph.node)) if graph.node else set[str]()
        infos = (*graph.input, *graph.value_info, *graph.output)
        self.shapes: dict[str, Shape | None] = {v.name: shape_of(v) for v in infos}
        self.dtypes = {v.name: elem_type_of(v) for v in infos}
        self.shapes |= {t.name: tuple(t.dims) for t in graph.initializer}
        self.dtypes |= {t.name: t.data_type for t in graph.initializer}

    def add(self, tensor: TensorProto) -> str:
        """Add an initializer if it is not in the graph yet. Return its name."""
        if tensor.name not in self.weights:
            self.weights[tensor.name] = tensor
            self.shapes[tensor.name], self.dtypes[tensor.name] = tuple(tensor.dims), tensor.data_type
            self.graph.initializer.append(tensor)
        return str(tensor.name)

    def constant(self, tensor: TensorProto) -> str:
        """Add a constant, if there is no equal one. Return its name."""
        tensor.name = ""
        tensor.name = f"{NAME_PREFIX}constant_{hashlib.sha1(tensor.SerializeToString()).hexdigest()[:12]}"
        return self.add(tensor)


class Call:
    """A node to replace. Methods take names of inputs and outputs from `signature`, such as ``"x, scale -> y"``."""

    def __init__(self, tensors: Tensors, node: NodeProto, signature: str) -> None:
        inputs, outputs = ([name.strip() for name in part.split(",")] for part in signature.split("->"))
        self.node = node
        self._tensors = tensors
        self.attributes: Mapping[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if len(node.input) > len(inputs) and any(node.input[len(inputs) :]):
            what = f"has {len(node.input)} inputs; the importer supports {len(inputs)} ({', '.join(inputs)})"
            self.refuse(what, "export the model without the other inputs")
        self._names: dict[str, str] = dict.fromkeys(inputs, "") | dict(zip(inputs, node.input, strict=False))
        self._outputs: dict[str, str] = dict.fromkeys(outputs, "") | dict(zip(outputs, node.output, strict=False))

    def has(self, name: str) -> bool:
        """True if the node has this input."""
        return bool(self._names.get(name))

    def is_weight(self, name: str) -> bool:
        """True if an input is an initializer."""
        return self._names[name] in self._tensors.weights

    def when(self, name: str, line: str) -> str:
        """Return `line` if the node has this input, else an empty text."""
        return line if self.has(name) else ""

    def is_read(self, output: str) -> bool:
        """True if a node or a graph output reads this output."""
        name = self.output(output)
        return bool(name) and name in self._tensors.read

    def output(self, formal: str) -> str:
        """Return the name of the tensor that the node writes as this output; empty if the node omits the output."""
        return self._outputs.get(formal, "")

    def forget_shape(self, output: str) -> None:
        """Drop the declared shape of a model output, because its rank may be wrong. Shape inference finds the shape."""
        for value in self._tensors.graph.output:
            if value.name == self.output(output):
                value.type.tensor_type.ClearField("shape")

    def state_size(self, name: str, axis: int, size: int) -> None:
        """Set the size of one axis of a model input, in place, if the model does not state it."""
        for value in self._tensors.graph.input:
            dims = value.type.tensor_type.shape.dim
            if value.name == self._names.get(name) and axis < len(dims) and not dims[axis].HasField("dim_value"):
                dims[axis].dim_value = size

    def integer(self, name: str, default: int = 0) -> int:
        """Return the value of an integer attribute."""
        return int(self.attributes.get(name, default))

    def number(self, name: str, default: float = 0.0) -> float:
        """Return the value of a float attribute."""
        return float(self.attributes.get(name, default))

    def string(self, name: str, default: str = "") -> str:
        """Return the value of a string attribute."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    def name(self, formal: str) -> str:
        """Return the name of the tensor that the node reads as this input."""
        return self._names[formal]

    def bind(self, local: str, tensor: str) -> None:
        """Let the name `local` in ONNX text mean this tensor of the model."""
        self._names[local] = tensor

    def maker(self, name: str) -> NodeProto | None:
        """Return the node that computes an input; None for graph inputs and weights."""
        return self._tensors.makers.get(self._names[name])

    def shape(self, name: str) -> Shape | None:
        """Return the shape of an input; None if its rank is unknown."""
        return self._tensors.shapes.get(self._names.get(name, ""))

    def known_shape(self, name: str) -> Shape:
        """Return the shape of an input. Raises `UnknownShapeError` if its rank is not known yet."""
        shape = self.shape(name)
        if shape is None:
            raise UnknownShapeError(f"{self.label()} reads '{self._names[name]}', whose rank is unknown")
        return shape

    def width(self, name: str) -> int:
        """Return the last dimension of an input. Raises `UnknownShapeError` if it is not known yet."""
        last = self.known_shape(name)[-1:]
        if not last or not isinstance(last[0], int):
            raise UnknownShapeError(f"{self.label()} reads '{self._names[name]}', whose last dimension is unknown")
        return last[0]

    def dtype(self, name: str) -> int:
        """Return the ONNX element type of an input; 0 if unknown."""
        return self._tensors.dtypes.get(self._names[name], 0)

    def weight(self, name: str, types: Collection[int]) -> TensorProto:
        """Return the initializer that an input reads, also through Reshape or Identity; refuse types not in `types`."""
        tensor = self._names[name]
        while (maker := self._tensors.makers.get(tensor)) is not None and maker.op_type in ("Reshape", "Identity"):
            tensor = maker.input[0]
        weight: TensorProto | None = self._tensors.weights.get(tensor)
        if weight is None or weight.data_type not in types:
            names = ", ".join(dtype_name(t) for t in sorted(types))
            operand = f"the {dtype_name(self._tensors.dtypes.get(tensor, 0))} '{tensor}'"
            what = f"has {operand} as {name}; this input must be a weight of the model, of type {names}"
            self.refuse(what, "export the model with another quantization, or unquantized")
        return weight

    def view(self, local: str, name: str, shape: Sequence[int], types: Collection[int], to: int | None = None) -> None:
        """Let the name `local` in ONNX text mean the bytes of the weight `name` in another shape and type."""
        weight = self.weight(name, types)
        kind = weight.data_type if to is None else to
        if (kind, *shape) == (weight.data_type, *weight.dims):
            self._names[local] = weight.name
            return
        own = f"{NAME_PREFIX}{weight.name}/{dtype_name(kind)}{list(shape)}"
        try:
            self._names[local] = self._tensors.add(reinterpret(weight, own, kind, shape))
        except ValueError as error:
            self.refuse(f"has the weight '{weight.name}' {list(weight.dims)} as {name} ({error})", AGAIN)

    def constant(self, local: str, tensor: TensorProto | np.ndarray[Any, Any]) -> None:
        """Let the name `local` in ONNX text mean a constant. Equal constants are stored once."""
        proto = tensor if isinstance(tensor, TensorProto) else numpy_helper.from_array(tensor)
        self._names[local] = self._tensors.constant(proto)

    def label(self) -> str:
        """Return the operator and name of the node, for messages."""
        return f"{self.node.domain or 'ai.onnx'}::{self.node.op_type} '{self.node.name}'"

    def refuse(self, what: str, advice: str) -> NoReturn:
        """Raise `UnsupportedModelError` that says `what` the node has and gives `advice`."""
        raise UnsupportedModelError(f"{self.label()} {what}: {advice}")

    def nodes(self, text: str) -> Iterator[NodeProto]:
        """Yield the nodes of ONNX text, with names of the graph instead of names in the text."""
        body, literals = parse(text)
        names = dict(self._names)
        for local, literal in literals.items():
            self.constant(local, literal)
            names[local] = self._names[local]
        outputs = {name: index for index, node in enumerate(body) for name in node.output}
        for index, node in enumerate(body):
            copy = copied(node)
            copy.input[:] = [names[name] if name else "" for name in node.input]
            while copy.input and not copy.input[-1]:
                copy.input.pop()
            for place, name in enumerate(node.output):
                names[name] = (outputs[name] == index and self.output(name)) or self._inner(name, index)
                copy.output[place] = names[name]
            copy.name = self.node.name if is_op(copy, "Attention") else f"{self.node.name}/{node.output[0]}_{index}"
            yield copy

    def _inner(self, name: str, index: int) -> str:
        return f"{NAME_PREFIX}{next(filter(None, self.node.output))}/{name}_{index}"


@lru_cache(maxsize=4096)
def parse(text: str) -> tuple[tuple[NodeProto, ...], dict[str, TensorProto]]:
    """Parse the text of a body. Return its nodes, and the constants of its numbers by name."""
    literals: dict[str, TensorProto] = {}

    def named(match: re.Match[str]) -> str:
        value = ast.literal_eval(match[0])
        kind = np.float32 if isinstance(value, float) else np.int64
        name = f"number_{len(literals)}"
        literals[name] = numpy_helper.from_array(np.array(value, kind))
        return name

    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        head, _, operands = line.removesuffix(")").rpartition("(")
        lines.append(f"{head}({_LITERAL.sub(named, operands)})")
    body = onnx.parser.parse_function(f"{_HEADER}{{ {' '.join(lines)} }}")
    return tuple(body.node), literals
