"""Reads ONNX protos: nested graphs, nodes, tensors, shapes. This module reads no weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import Message
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

Scope = GraphProto | FunctionProto
"""Anything with a list of nodes: the main graph, the body of an If, Loop or Scan, or a model-local function."""

Shape = tuple[int | str, ...]
"""Sizes and symbols; ``"?"`` if the model gives neither."""

Array = npt.NDArray[Any]

DEFAULT_DOMAINS = ("", "ai.onnx")
"""Both names of ONNX's own domain of operators."""

TENSORRT_UPDATE = "TRT_KVCacheUpdate"
"""TensorRT's own operator that updates a cache. Its parser accepts the operator in any domain."""

FLOATS = frozenset((TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE))
"""Element types that activations may have."""

INTEGERS = frozenset((TensorProto.INT64, TensorProto.INT32))
"""Element types that token ids, positions and lengths may have."""

_Message = TypeVar("_Message", bound=Message)
_NUMBERS = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
_SUB_BYTE_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}


def copied(proto: _Message) -> _Message:
    """Return a copy of a message."""
    copy: _Message = type(proto)()
    copy.CopyFrom(proto)
    return copy


def replace_field(field: Any, values: Iterable[Any]) -> None:
    """Replace the entries of a repeated field. The new entries may include old entries of the field."""
    entries = list(values)
    del field[:]
    field.extend(entries)


def part_of(
    model: ModelProto,
    nodes: Iterable[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Iterable[str],
    constants: Sequence[TensorProto],
) -> ModelProto:
    """Return a model for ONNX Runtime that consists of some nodes of another model, which has no functions."""
    named = [ValueInfoProto(name=name) for name in outputs]
    graph = onnx.helper.make_graph(list(nodes), "part", inputs, named, constants)
    return onnx.helper.make_model(graph, ir_version=min(model.ir_version, 12), opset_imports=list(model.opset_import))


def iter_scopes(model: ModelProto) -> Iterator[Scope]:
    """Yield the main graph, all model-local functions, and all graphs nested in their nodes, outer graphs first."""
    for top in (model.graph, *model.functions):
        yield from nested_scopes(top)


def nested_scopes(scope: Scope) -> Iterator[Scope]:
    """Yield a graph or function, and all graphs nested in its nodes, outer graphs first."""
    yield scope
    for node in scope.node:
        for attribute in node.attribute:
            for graph in attribute_graphs(attribute):
                yield from nested_scopes(graph)


def all_nodes(scope: Scope) -> Iterator[NodeProto]:
    """Yield all nodes of a graph or function, also those in bodies of control flow."""
    for inner in nested_scopes(scope):
        yield from inner.node


def captured_names(body: GraphProto) -> set[str]:
    """Return the names of all tensors that a body (of If, Loop or Scan) reads, from itself or outer graphs."""
    scopes = [s for s in nested_scopes(body) if isinstance(s, GraphProto)]
    return {name for s in scopes for node in s.node for name in node.input} | {v.name for s in scopes for v in s.output}


def names_read(node: NodeProto) -> set[str]:
    """Return the names of tensors that a node reads, also inside its bodies."""
    bodies = [graph for attribute in node.attribute for graph in attribute_graphs(attribute)]
    return {*node.input}.union(*map(captured_names, bodies)) - {""}


def attribute_graphs(attribute: AttributeProto) -> Iterable[GraphProto]:
    """Return the graphs in an attribute: the bodies of If, Loop and Scan."""
    if attribute.type == AttributeProto.GRAPH:
        return (attribute.g,)
    return attribute.graphs if attribute.type == AttributeProto.GRAPHS else ()


def iter_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield all tensors of a model, also nested ones: initializers (if sparse: values and indices), and attributes."""
    for scope in iter_scopes(model):
        if isinstance(scope, GraphProto):
            yield from scope.initializer
            for sparse in scope.sparse_initializer:
                yield from (sparse.values, sparse.indices)
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                if attribute.HasField("sparse_tensor"):
                    yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)


def constant_value(node: NodeProto) -> TensorProto | None:
    """Return a Constant node's value, whatever the value's `name` is; None for other nodes, strings, sparse values."""
    if not is_op(node, "Constant") or len(node.attribute) != 1:
        return None
    (attribute,) = node.attribute
    if attribute.name in _NUMBERS:
        numbers = np.array(onnx.helper.get_attribute_value(attribute), _NUMBERS[attribute.name])
        return onnx.numpy_helper.from_array(numbers)
    return attribute.t if attribute.name == "value" else None


def constants_of(scope: Scope) -> dict[str, TensorProto]:
    """Return initializers and values of Constant nodes by tensor name. The field `name` of a value may differ."""
    constants = {tensor.name: tensor for tensor in scope.initializer} if isinstance(scope, GraphProto) else {}
    return constants | {node.output[0]: t for node in scope.node if (t := constant_value(node)) is not None}


def readers_of(nodes: Iterable[NodeProto]) -> dict[str, list[NodeProto]]:
    """Map the name of each tensor to the nodes that read it. A node that reads a tensor twice is listed twice."""
    readers: dict[str, list[NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def int_attribute(node: NodeProto, name: str, default: int = 0) -> int:
    """Return the value of an integer attribute, or the default."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def opset_version(model: ModelProto | FunctionProto) -> int | None:
    """Return the version of ONNX's own domain that a model imports; None if it imports none."""
    return max((entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS), default=None)


def is_op(node: NodeProto, op_type: str) -> bool:
    """True if the node is this operator of ONNX's own domain."""
    return node.op_type == op_type and node.domain in DEFAULT_DOMAINS


def describe(node: NodeProto) -> str:
    """Return a text that names a node in messages: its operator, and its name or, if it has none, its output."""
    return f"{node.op_type} '{node.name}'" if node.name else f"{node.op_type} writing '{', '.join(node.output)}'"


def shape_of(info: ValueInfoProto | None) -> Shape | None:
    """Return the shape: sizes (also those written as symbols, such as ``"64"``), symbols and ``"?"``; or None."""
    if info is None or not info.type.HasField("tensor_type") or not info.type.tensor_type.HasField("shape"):
        return None
    return tuple(_dim(dim) for dim in info.type.tensor_type.shape.dim)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    if dim.dim_param.isdecimal():
        return int(dim.dim_param)
    return dim.dim_param or "?"


def elem_type_of(info: ValueInfoProto | None) -> int:
    """Return the element type of a value; ``TensorProto.UNDEFINED`` if unknown."""
    return int(info.type.tensor_type.elem_type) if info is not None else TensorProto.UNDEFINED


def dtype_name(elem_type: int) -> str:
    """Return the ONNX name of an element type in lower case, such as ``"bfloat16"``."""
    return str(TensorProto.DataType.Name(elem_type)).lower()


def byte_size(tensor: TensorProto) -> int | None:
    """Return the bytes of a tensor's raw data; None for strings. Raises `ValueError` if dtype or dims are invalid."""
    name = TensorProto.DataType.Name(tensor.data_type)
    if name == "UNDEFINED" or any(dim < 0 for dim in tensor.dims):
        raise ValueError(f"dtype {name}, dims {list(tensor.dims)}")
    if name == "STRING":
        return None
    bits = _SUB_BYTE_BITS.get(name) or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return (int(math.prod(tensor.dims)) * bits + 7) // 8


def sliced_squares(graph: GraphProto) -> frozenset[str]:
    """Return the names of initializers ``[T, T]`` that only Slice nodes read: they are masks, not weights."""
    squares = {t.name for t in graph.initializer if len(t.dims) == 2 and t.dims[0] == t.dims[1]}
    sliced = {node.input[0] for node in graph.node if is_op(node, "Slice") and node.input[0] in squares}
    others = {n for node in graph.node for i, n in enumerate(node.input) if i or not is_op(node, "Slice")}
    return frozenset(sliced - others)


def may_be_bias(tensor: TensorProto) -> bool:
    """True if a tensor has the shape of a bias or mask: one row ``[.., 1, T]``, or all rows ``[1, H, T, T]``."""
    dims = list(tensor.dims)
    return len(dims) >= 3 and (dims[-2] == 1 or (len(dims) == 4 and dims[0] == 1 and dims[-2] == dims[-1]))
