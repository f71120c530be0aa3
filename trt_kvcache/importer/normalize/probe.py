"""Evaluate parts of a model on one sample, lazily.

What a mask looks like, where a scatter writes, how a chain of operators moves data: a sample fixes the shape of every
graph input and the value of some. From these follow the exact shape of every tensor, and the exact value of every one
that no weight and no token reaches: shape arithmetic, positions, masks. Any tensor may be given a value, which then
stands for what its producer would make; so a chain of operators can be fed numbers and its result compared with what it
should be. Values come from ONNX's reference evaluator, shapes from ONNX shape inference, operator by operator, only for
what is asked. Weights are never read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper
from onnx.reference.ops import load_op

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

# Inputs whose values decide the shape of the output, by operator; every other operator's output shape follows from
# shapes.
_SHAPED_BY: dict[str, tuple[int, ...]] = {
    "Reshape": (1,), "Expand": (1,), "Slice": (1, 2, 3, 4), "Tile": (1,), "Range": (0, 1, 2), "ConstantOfShape": (0,),
    "Squeeze": (1,), "Unsqueeze": (1,), "Pad": (1, 3), "Split": (1,), "TopK": (1,), "OneHot": (1,), "Resize": (2, 3),
    "ReduceSum": (1,), "ReduceMean": (1,), "ReduceMax": (1,), "ReduceMin": (1,), "ReduceProd": (1,), "ReduceL2": (1,),
    "ReduceSumSquare": (1,), "CenterCropPad": (1,),
}  # fmt: skip
_LARGEST = 1 << 26  # elements of one value; beyond it nothing is computed
_READABLE = {  # masks kept as buffers, and rows counted over a capacity
    onnx.TensorProto.BOOL, onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.INT32,
    onnx.TensorProto.INT64,
}  # fmt: skip


class Blueprint:
    """A model as probes read it: made once, shared by all samples.

    Args:
        model: flat, with named tensors. Not kept in sync with later edits.
        weights: large inline initializers that were detached from `model`, by name; only integers and masks are read.
    """

    def __init__(self, model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
        self.model = model
        self.opsets = {o.domain if o.domain != "ai.onnx" else "": o.version for o in model.opset_import}
        self.producers: dict[str, tuple[onnx.NodeProto, int]] = {}
        for node in model.graph.node:
            for index, name in enumerate(node.output):
                if name:
                    self.producers[name] = (node, index)
        self.initializers = {t.name: t for t in model.graph.initializer}
        self.inputs = {v.name: v for v in model.graph.input if v.name not in self.initializers}
        self._weights = weights
        self._operators: dict[str, Callable[..., Any] | None] = {}
        self._constants: dict[str, Array | None] = {}

    def constant(self, name: str) -> Array | None:
        """The value of a Constant, or of an initializer that is small or may be a mask; None for weights."""
        if name not in self._constants and name not in self.initializers:
            self._constants[name] = self.evaluate(self.producers[name][0], [])[0]
        elif name not in self._constants:
            tensor = self.initializers[name]
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            if external and name in self._weights and tensor.data_type in _READABLE:
                tensor, external = self._weights[name], False
            self._constants[name] = None if external else np.asarray(numpy_helper.to_array(tensor))
        return self._constants[name]

    def is_constant(self, name: str) -> bool:
        """Whether a tensor is an initializer or comes from a Constant."""
        made = self.producers.get(name)
        return name in self.initializers or (made is not None and is_standard(made[0], "Constant"))

    def evaluate(self, node: onnx.NodeProto, inputs: Sequence[Array | None]) -> Sequence[Array | None]:
        """The outputs of a node, by ONNX's reference implementation of its operator.

        Args:
            node: any of the model.
            inputs: None where one is left out.

        Returns:
            One value for each output; None where they are unknown: no such implementation, a subgraph, or inputs that
            do not fit.
        """
        if is_standard(node, "Range"):  # ONNX Runtime takes [1] for a scalar, and exporters rely on it
            inputs = [v.reshape(()) if v is not None and v.size == 1 else v for v in inputs]
        try:
            return self._run(node, inputs)
        except Exception:  # noqa: BLE001 - an index out of range, a shape that does not fit: the sample is none for this node
            return [None] * len(node.output)

    def _run(self, node: onnx.NodeProto, inputs: Sequence[Array | None]) -> Sequence[Array | None]:
        key = next(name for name in node.output if name)
        if key not in self._operators:
            self._operators[key] = self._operator(node)
        operator = self._operators[key]
        if operator is None:
            return [None] * len(node.output)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return [np.asarray(value) for value in operator(*inputs)]

    def _operator(self, node: onnx.NodeProto) -> Callable[..., Any] | None:
        """The reference implementation of a node, with its attributes."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        if any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute):
            return None
        try:
            made = load_op(domain, node.op_type, self.opsets.get(domain, 1))
            settings = {"log": lambda *_: None, "opsets": self.opsets, "verbose": 0, "new_ops": None}
            return cast("Callable[..., Any]", made(node, settings).run)
        except Exception:  # noqa: BLE001 - no such operator: its values are unknown
            return None


class Probe:
    """The tensors of a model in one sample.

    Args:
        blueprint: the model.
        shapes: shape of every graph input.
        values: of graph inputs or any other tensors.
    """

    def __init__(self, blueprint: Blueprint, shapes: Mapping[str, Shape], values: Mapping[str, Array]) -> None:
        self._blueprint = blueprint
        self._shapes = dict(shapes)
        self._given = dict(values)
        self._values: dict[str, Array | None] = {}
        self._types: dict[str, onnx.TypeProto | None] = {}

    @property
    def values(self) -> Mapping[str, Array]:
        """What was given."""
        return self._given

    def given(self, values: Mapping[str, Array]) -> Probe:
        """The same sample with more values."""
        return Probe(self._blueprint, self._shapes, self._given | dict(values))

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor, or None where an operator is unknown or its shape hangs on weights or tokens."""
        kind = self._type(name)
        if kind is None or not kind.tensor_type.HasField("shape"):
            return None
        dims = kind.tensor_type.shape.dim
        return tuple(d.dim_value for d in dims) if all(d.HasField("dim_value") for d in dims) else None

    def elem_type(self, name: str) -> int | None:
        """The ONNX element type of a tensor, or None where it is unknown."""
        kind = self._type(name)
        return None if kind is None else int(kind.tensor_type.elem_type)

    def value(self, name: str) -> Array | None:
        """The value of a tensor, or None where weights, tokens or an unknown operator take part in it."""
        for needed in self._order(name):
            self._values[needed] = self._compute(needed)
        return self._values[name]

    def _order(self, name: str) -> list[str]:
        """The tensors to compute, each after what it is made from: without recursion, for chains of any length."""
        order: list[str] = []
        stack = [(name, False)]
        open_: set[str] = set()
        while stack:
            current, ready = stack.pop()
            if ready:
                order.append(current)
                continue
            if current in self._values or current in open_:
                continue
            open_.add(current)
            stack.append((current, True))
            made = None if current in self._given else self._blueprint.producers.get(current)
            if made is not None and made[0].op_type not in ("Shape", "Size", "Constant"):
                stack.extend((before, False) for before in operands(made[0]) if before)
        return order

    def _compute(self, name: str) -> Array | None:
        if name in self._given:
            return self._given[name]
        if self._blueprint.is_constant(name):
            return self._blueprint.constant(name)
        made = self._blueprint.producers.get(name)
        if made is None:
            return None
        node, index = made
        if is_standard(node, "Shape", "Size"):
            return self._shape_value(node)
        inputs = [self._values.get(n) if n else None for n in operands(node)]
        if any(n and v is None for n, v in zip(operands(node), inputs, strict=True)):
            return None
        if is_standard(node, "CastLike"):
            return self._cast_like(node, inputs[0])
        return self._evaluate(node, index, inputs)

    def _shape_value(self, node: onnx.NodeProto) -> Array | None:
        shape = self.shape(node.input[0])
        if shape is None:
            return None
        if node.op_type == "Size":
            return np.asarray(int(np.prod(shape)), np.int64)
        bounds = {a.name: a.i for a in node.attribute}
        return np.asarray(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], np.int64)

    def _evaluate(self, node: onnx.NodeProto, index: int, inputs: list[Array | None]) -> Array | None:
        if node.op_type in ("Expand", "ConstantOfShape", "Tile", "Range") and not self._affordable(node.output[0]):
            return None
        return self._blueprint.evaluate(node, inputs)[index]

    def _cast_like(self, node: onnx.NodeProto, value: Array | None) -> Array | None:
        wanted = self.elem_type(node.input[1])
        return value.astype(onnx.helper.tensor_dtype_to_np_dtype(wanted)) if value is not None and wanted else None

    def _affordable(self, name: str) -> bool:
        shape = self.shape(name)
        return shape is not None and int(np.prod(shape)) <= _LARGEST

    def _type(self, name: str) -> onnx.TypeProto | None:
        pending = [name]
        while pending:
            current = pending[-1]
            if current in self._types:
                pending.pop()
                continue
            missing = self._missing_types(current)
            if missing:
                pending.extend(missing)
                continue
            self._types[current] = self._infer(current)
            pending.pop()
        return self._types[name]

    def _missing_types(self, name: str) -> list[str]:
        known = name in self._given or self._values.get(name) is not None
        made = None if known else self._blueprint.producers.get(name)
        if made is None or made[0].op_type in ("Shape", "Size", "Constant"):
            return []
        return [n for n in made[0].input if n and n not in self._types]

    def _infer(self, name: str) -> onnx.TypeProto | None:
        value = self._given.get(name)
        value = self._values.get(name) if value is None else value
        if value is not None:
            return _type(onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        if name in self._blueprint.initializers:
            tensor = self._blueprint.initializers[name]
            return _type(tensor.data_type, tuple(tensor.dims))
        if name in self._shapes:
            return _type(self._blueprint.inputs[name].type.tensor_type.elem_type, self._shapes[name])
        made = self._blueprint.producers.get(name)
        if made is None:
            return None
        node, index = made
        if node.op_type in ("Shape", "Size", "Constant"):
            value = self.value(name)
            return None if value is None else self._infer_known(name)
        return self._infer_outputs(node).get(node.output[index])

    def _infer_known(self, name: str) -> onnx.TypeProto | None:
        value = self._values[name]
        assert value is not None
        return _type(onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    def _infer_outputs(self, node: onnx.NodeProto) -> dict[str, onnx.TypeProto]:
        types = {n: t for n in node.input if n and (t := self._types.get(n)) is not None}
        if len(types) < len({n for n in node.input if n}):
            return {}
        if node.domain == "com.microsoft":
            return _contrib_outputs(node, types)
        domain = "" if node.domain == "ai.onnx" else node.domain
        data: dict[str, onnx.TensorProto] = {}
        for position in _SHAPED_BY.get(node.op_type, ()):
            if position < len(node.input) and node.input[position]:
                value = self.value(node.input[position])
                if value is None:
                    return {}
                value = value.reshape(()) if node.op_type == "Range" and value.size == 1 else value
                data[node.input[position]] = numpy_helper.from_array(value)
        try:
            schema = onnx.defs.get_schema(node.op_type, self._blueprint.opsets.get(domain, 1), domain)
            inferred: dict[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(schema, node, types, data)
        except Exception:  # noqa: BLE001 - no schema, or shapes that do not fit: unknown
            return {}
        return inferred


def is_standard(node: onnx.NodeProto, *op_types: str) -> bool:
    """Whether a node is one of these operators of ONNX itself."""
    return node.op_type in op_types and node.domain in ("", "ai.onnx")


def operands(node: onnx.NodeProto) -> list[str]:
    """The inputs whose values count: of what CastLike is like, it is the type."""
    return list(node.input)[:1] if is_standard(node, "CastLike") else list(node.input)


def _type(elem_type: int, shape: Shape) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(elem_type, list(shape))


def _contrib_outputs(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> dict[str, onnx.TypeProto]:
    """The first output of the attention operators of com.microsoft: ``[B, S, heads * head size]``."""
    if node.op_type not in ("GroupQueryAttention", "MultiHeadAttention"):
        return {}
    query = types[node.input[0]].tensor_type
    dims = [d.dim_value for d in query.shape.dim]
    attributes = {a.name: a.i for a in node.attribute}
    if len(dims) != 3:
        return {}
    if len(node.input) < 2 or not node.input[1]:  # packed
        heads, kv_heads = attributes.get("num_heads", 1), attributes.get("kv_num_heads", attributes.get("num_heads", 1))
        dims[2] = dims[2] * heads // (heads + 2 * kv_heads)
    return {node.output[0]: _type(query.elem_type, tuple(dims))}
