"""Function bodies: write the meaning of an operator as ONNX text, and insert it into a graph.

A body is ONNX text, with two liberties:

    sum = Add (x, skip)
    sum = Add (sum, bias)                       a name may stand again; it means the last one
    y = Reshape (sum, [0, 0, 8, -1])            numbers may stand for operands: int64, or float32 with a point

Names are those of the operator's inputs and outputs, as the table of operators has them. An input that the node leaves
out stays empty.
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
from trt_kvcache.importer.protos import Shape, dtype_name, elem_type_of, is_op, names_read, shape_of
from trt_kvcache.importer.weights import reinterpret

AGAIN = "export it again"
SHAPES = "export it with shapes"

_LITERAL = re.compile(r"\[[^\]]*\]|(?<![\w.])-?\d[\d.]*(?:e[+-]?\d+)?(?!\w)")
_HEADER = '<domain: "trt_kvcache", opset_import: ["": 24]> body () => () '


class UnknownShapeError(Exception):
    """A body needs a shape that inference does not know yet."""


class Tensors:
    """Facts about the tensors of a model, and the initializers that bodies add."""

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
        """Add an initializer once; returns its name."""
        if tensor.name not in self.weights:
            self.weights[tensor.name] = tensor
            self.shapes[tensor.name], self.dtypes[tensor.name] = tuple(tensor.dims), tensor.data_type
            self.graph.initializer.append(tensor)
        return str(tensor.name)

    def constant(self, tensor: TensorProto) -> str:
        """Add a constant, which equal ones share; returns its name."""
        tensor.name = ""
        tensor.name = f"{NAME_PREFIX}constant_{hashlib.sha1(tensor.SerializeToString()).hexdigest()[:12]}"
        return self.add(tensor)


class Call:
    """A node whose operator is replaced, as the writer of its body sees it.

    Attributes:
        node: the node.
        attributes: those that it states.
    """

    def __init__(self, tensors: Tensors, node: NodeProto, signature: str) -> None:
        inputs, outputs = ([name.strip() for name in part.split(",")] for part in signature.split("->"))
        self.node = node
        self._tensors = tensors
        self.attributes: Mapping[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if len(node.input) > len(inputs) and any(node.input[len(inputs) :]):
            what = f"has {len(node.input)} inputs; supported are {len(inputs)} ({', '.join(inputs)})"
            self.refuse(what, "export it without the others")
        self._names: dict[str, str] = dict.fromkeys(inputs, "") | dict(zip(inputs, node.input, strict=False))
        self._outputs: dict[str, str] = dict.fromkeys(outputs, "") | dict(zip(outputs, node.output, strict=False))

    def has(self, name: str) -> bool:
        """True if the node gives this input."""
        return bool(self._names.get(name))

    def is_weight(self, name: str) -> bool:
        """True if an input is an initializer."""
        return self._names[name] in self._tensors.weights

    def when(self, name: str, line: str) -> str:
        """A line of a body that stands there only if the node gives an input."""
        return line if self.has(name) else ""

    def is_read(self, output: str) -> bool:
        """True if a node or a graph output reads this output."""
        name = self.output(output)
        return bool(name) and name in self._tensors.read

    def output(self, formal: str) -> str:
        """The tensor that the node gives as an output; empty where it leaves it out."""
        return self._outputs.get(formal, "")

    def forget_shape(self, output: str) -> None:
        """Let, in place, inference say the shape of an output of the model: exporters may declare another rank."""
        for value in self._tensors.graph.output:
            if value.name == self.output(output):
                value.type.tensor_type.ClearField("shape")

    def state_size(self, name: str, axis: int, size: int) -> None:
        """Write, in place, a size into the shape of an input of the model that leaves it open."""
        for value in self._tensors.graph.input:
            dims = value.type.tensor_type.shape.dim
            if value.name == self._names.get(name) and axis < len(dims) and not dims[axis].HasField("dim_value"):
                dims[axis].dim_value = size

    def integer(self, name: str, default: int = 0) -> int:
        """An integer attribute."""
        return int(self.attributes.get(name, default))

    def number(self, name: str, default: float = 0.0) -> float:
        """A float attribute."""
        return float(self.attributes.get(name, default))

    def string(self, name: str, default: str = "") -> str:
        """A string attribute."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    def name(self, formal: str) -> str:
        """The tensor that the node gives as an input."""
        return self._names[formal]

    def bind(self, local: str, tensor: str) -> None:
        """Bind the name `local` to a tensor of the model."""
        self._names[local] = tensor

    def maker(self, name: str) -> NodeProto | None:
        """The node that makes an input; None for graph inputs and weights."""
        return self._tensors.makers.get(self._names[name])

    def shape(self, name: str) -> Shape | None:
        """The shape of an input; None where nothing says its rank."""
        return self._tensors.shapes.get(self._names.get(name, ""))

    def known_shape(self, name: str) -> Shape:
        """The shape of an input.

        Raises:
            UnknownShapeError: its rank is not known yet.
        """
        shape = self.shape(name)
        if shape is None:
            raise UnknownShapeError(f"{self.label()} reads '{self._names[name]}', whose rank is not in the model")
        return shape

    def width(self, name: str) -> int:
        """The last dimension of an input.

        Raises:
            UnknownShapeError: it is not known yet.
        """
        last = self.known_shape(name)[-1:]
        if not last or not isinstance(last[0], int):
            raise UnknownShapeError(f"{self.label()} reads '{self._names[name]}', whose width is not in the model")
        return last[0]

    def dtype(self, name: str) -> int:
        """The ONNX element type of an input; 0 where it is not known."""
        return self._tensors.dtypes.get(self._names[name], 0)

    def weight(self, name: str, types: Collection[int]) -> TensorProto:
        """The initializer that an input is, or is a Reshape of.

        Raises:
            UnsupportedModelError: it is computed, or of none of `types`.
        """
        tensor = self._names[name]
        while (maker := self._tensors.makers.get(tensor)) is not None and maker.op_type in ("Reshape", "Identity"):
            tensor = maker.input[0]
        weight: TensorProto | None = self._tensors.weights.get(tensor)
        if weight is None or weight.data_type not in types:
            names = ", ".join(dtype_name(t) for t in sorted(types))
            operand = f"the {dtype_name(self._tensors.dtypes.get(tensor, 0))} '{tensor}'"
            what = f"has {operand} as {name}; supported is a weight of the model, of {names}"
            self.refuse(what, "export with another quantization, or unquantized")
        return weight

    def view(self, local: str, name: str, shape: Sequence[int], types: Collection[int], to: int | None = None) -> None:
        """Let `local` be the bytes of a weight, read as another shape and element type.

        Raises:
            UnsupportedModelError: see `weight`, or the size does not fit.
        """
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
        """Let `local` be a constant, which equal ones share."""
        proto = tensor if isinstance(tensor, TensorProto) else numpy_helper.from_array(tensor)
        self._names[local] = self._tensors.constant(proto)

    def label(self) -> str:
        """The node's name for messages."""
        return f"{self.node.domain or 'ai.onnx'}::{self.node.op_type} '{self.node.name}'"

    def refuse(self, what: str, advice: str) -> NoReturn:
        """Refuse the node.

        Args:
            what: what the node has, and what is supported.
            advice: what to do.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(f"{self.label()} {what}: {advice}")

    def nodes(self, text: str) -> Iterator[NodeProto]:
        """The nodes of a body in the place of the node."""
        body, literals = _parse(text)
        names = dict(self._names)
        for local, literal in literals.items():
            self.constant(local, literal)
            names[local] = self._names[local]
        outputs = {name: index for index, node in enumerate(body) for name in node.output}
        for index, node in enumerate(body):
            copy = NodeProto()
            copy.CopyFrom(node)
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
def _parse(text: str) -> tuple[tuple[NodeProto, ...], dict[str, TensorProto]]:
    """The nodes of a body, and the constants that its numbers are, by name."""
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
