"""Read and walk over ONNX protos: nested graphs, nodes, tensors, shapes. Nothing here reads weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

Scope = GraphProto | FunctionProto
"""A list of nodes with names of its own: the main graph, the body of an If, Loop or Scan, or a model-local function."""

Shape = tuple[int | str, ...]
"""Sizes and symbols; ``"?"`` where the model gives neither."""

DEFAULT_DOMAINS = ("", "ai.onnx")
"""Both spellings of the ONNX operators' own domain."""

TENSORRT_UPDATE = "TRT_KVCacheUpdate"
"""TensorRT's own operator: its parser takes it in any domain."""

FLOATS = frozenset((TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE))
"""Element types that activations may have."""

INTEGERS = frozenset((TensorProto.INT64, TensorProto.INT32))
"""Element types that token ids, positions and lengths may have."""

_Message = TypeVar("_Message", bound=Message)
_NUMBERS = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
_SUB_BYTE_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}


def copied(proto: _Message) -> _Message:
    """A copy."""
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
    """Make a model for ONNX Runtime from some nodes of a model without functions."""
    named = [ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(list(nodes), "part", inputs, named, constants)
    return helper.make_model(graph, ir_version=min(model.ir_version, 12), opset_imports=list(model.opset_import))


def iter_scopes(model: ModelProto) -> Iterator[Scope]:
    """Yield the main graph, all model-local functions, and all graphs nested in their nodes, outer graphs first."""
    for top in (model.graph, *model.functions):
        yield from nested_scopes(top)


def nested_scopes(scope: Scope) -> Iterator[Scope]:
    """Yield a scope and all graphs nested in its nodes, outer graphs first."""
    yield scope
    for node in scope.node:
        for attribute in node.attribute:
            for graph in attribute_graphs(attribute):
                yield from nested_scopes(graph)


def all_nodes(scope: Scope) -> Iterator[NodeProto]:
    """Yield all nodes of a scope, also in bodies of control flow."""
    for inner in nested_scopes(scope):
        yield from inner.node


def captured_names(body: GraphProto) -> set[str]:
    """Names that a body reads and does not define: tensors of outer graphs. ONNX forbids a body to redefine them."""
    scopes = [s for s in nested_scopes(body) if isinstance(s, GraphProto)]
    return {name for s in scopes for node in s.node for name in node.input} | {v.name for s in scopes for v in s.output}


def names_read(node: NodeProto) -> set[str]:
    """Names of tensors that a node reads, also inside its bodies."""
    bodies = [graph for attribute in node.attribute for graph in attribute_graphs(attribute)]
    return {*node.input}.union(*map(captured_names, bodies)) - {""}


def attribute_graphs(attribute: AttributeProto) -> Iterable[GraphProto]:
    """The graphs that an attribute holds: the bodies of If, Loop, Scan."""
    if attribute.type == AttributeProto.GRAPH:
        return (attribute.g,)
    return attribute.graphs if attribute.type == AttributeProto.GRAPHS else ()


def iter_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield all tensors of the model, nested ones too: initializers (sparse: values and indices), tensor attributes."""
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
    """The value of a Constant node; its name may be any. None for other nodes, texts and sparse values."""
    if not is_op(node, "Constant") or len(node.attribute) != 1:
        return None
    (attribute,) = node.attribute
    if attribute.name in _NUMBERS:
        return numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), _NUMBERS[attribute.name]))
    return attribute.t if attribute.name == "value" else None


def constants_of(scope: Scope) -> dict[str, TensorProto]:
    """Initializers and values of Constant nodes, by name in the graph; the tensor's own name may differ."""
    constants = {tensor.name: tensor for tensor in scope.initializer} if isinstance(scope, GraphProto) else {}
    return constants | {node.output[0]: t for node in scope.node if (t := constant_value(node)) is not None}


def readers_of(nodes: Iterable[NodeProto]) -> dict[str, list[NodeProto]]:
    """The nodes that read each tensor, by its name. A node that reads it twice is listed twice."""
    readers: dict[str, list[NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def int_attribute(node: NodeProto, name: str, default: int = 0) -> int:
    """The value of an integer attribute, or the default."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def opset_version(model: ModelProto | FunctionProto) -> int | None:
    """The imported version of ONNX's own operators; None if they are not imported."""
    versions = [entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS]
    return max(versions) if versions else None


def is_op(node: NodeProto, op_type: str) -> bool:
    """True if the node is this operator of the default domain."""
    return node.op_type == op_type and node.domain in DEFAULT_DOMAINS


def describe(node: NodeProto) -> str:
    """A node in words, for messages: its operator, and its name or, without a name, its output."""
    return f"{node.op_type} '{node.name}'" if node.name else f"{node.op_type} writing '{', '.join(node.output)}'"


def shape_of(info: ValueInfoProto | None) -> Shape | None:
    """The shape of a tensor value: sizes, symbols, ``"?"`` for unknown; None if even the rank is unknown.

    Some exporters write a size as a symbol of digits; this function returns the number.
    """
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
    """The element type of a tensor value (``TensorProto.UNDEFINED`` where it is unknown)."""
    return int(info.type.tensor_type.elem_type) if info is not None else TensorProto.UNDEFINED


def dtype_name(elem_type: int) -> str:
    """The ONNX name of an element type in lower case, such as ``"bfloat16"``."""
    return str(TensorProto.DataType.Name(elem_type)).lower()


def byte_size(tensor: TensorProto) -> int | None:
    """Bytes of the tensor's data as stored raw, from its dtype and dims alone; None for strings.

    Raises:
        ValueError: ONNX does not define the element type, or a dimension is negative.
    """
    name = TensorProto.DataType.Name(tensor.data_type)
    if name == "UNDEFINED" or any(dim < 0 for dim in tensor.dims):
        raise ValueError(f"dtype {name}, dims {list(tensor.dims)}")
    if name == "STRING":
        return None
    bits = _SUB_BYTE_BITS.get(name) or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return (int(math.prod(tensor.dims)) * bits + 7) // 8


def sliced_squares(graph: GraphProto) -> frozenset[str]:
    """Names of initializers ``[T, T]`` that only Slice reads: these are masks, not weights."""
    squares = {t.name for t in graph.initializer if len(t.dims) == 2 and t.dims[0] == t.dims[1]}
    sliced = {node.input[0] for node in graph.node if is_op(node, "Slice") and node.input[0] in squares}
    others = {n for node in graph.node for i, n in enumerate(node.input) if i or not is_op(node, "Slice")}
    return frozenset(sliced - others)


def may_be_bias(tensor: TensorProto) -> bool:
    """True if the shape is that of a bias or mask of scores: one row ``[.., 1, T]`` or all rows ``[1, H, T, T]``."""
    dims = list(tensor.dims)
    return len(dims) >= 3 and (dims[-2] == 1 or (len(dims) == 4 and dims[0] == 1 and dims[-2] == dims[-1]))
