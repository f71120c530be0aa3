"""Works with onnx-graphsurgeon graphs: reads dimensions and constants, emits nodes, sorts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.importers.onnx_importer import OnnxImporter
from onnx_graphsurgeon.logger import G_LOGGER

from trt_kvcache.importer.cache_plan import Dim
from trt_kvcache.importer.protos import FLOATS as FLOATS
from trt_kvcache.importer.protos import Array

# For every bfloat16 or float8 tensor, graphsurgeon would warn that numpy does not have the type. It keeps the type.
G_LOGGER.severity = G_LOGGER.ERROR

_Result = TypeVar("_Result")
NAME_PREFIX = "trt_kvcache/"
ONNX_DOMAINS = (None, "", "ai.onnx")
BOOL = int(onnx.TensorProto.BOOL)
FLOAT = int(onnx.TensorProto.FLOAT)
DOUBLE = int(onnx.TensorProto.DOUBLE)
INT32 = int(onnx.TensorProto.INT32)
INT64 = int(onnx.TensorProto.INT64)


def is_op(node: gs.Node, *op_types: str) -> bool:
    """True if `node` has one of the given operator types of the default ONNX domain."""
    return node.op in op_types and node.domain in ONNX_DOMAINS


def elem_type(tensor: gs.Tensor) -> int | None:
    """Return the ONNX element type (``onnx.TensorProto.DataType``) of a tensor; None if unknown."""
    dtype = tensor.dtype
    if dtype is None or isinstance(dtype, int):
        return dtype
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def dtype_name(tensor: gs.Tensor) -> str:
    """Return the element type in lower case, such as ``"float16"``; ``"?"`` if unknown."""
    code = elem_type(tensor)
    return "?" if code in (None, 0) else str(onnx.TensorProto.DataType.Name(code)).lower()


def dims(tensor: gs.Tensor) -> tuple[Dim, ...] | None:
    """Return the shape, with ``"?"`` for dimensions without size and symbol; None if the rank is unknown."""
    if tensor.shape is None:
        return None
    return tuple(d if isinstance(d, int) and d >= 0 else d if isinstance(d, str) and d else "?" for d in tensor.shape)


def input_or_none(node: gs.Node, index: int) -> gs.Tensor | None:
    """Return input `index` of a node; None if it is missing or empty."""
    is_given = index < len(node.inputs) and not node.inputs[index].is_empty()
    return node.inputs[index] if is_given else None


def producer(tensor: gs.Tensor) -> gs.Node | None:
    """Return the node that computes a tensor; None for graph inputs and weights."""
    return tensor.inputs[0] if tensor.inputs else None


def consumers(tensor: gs.Tensor) -> list[gs.Node]:
    """Return the nodes that read a tensor, each node once."""
    return list({id(node): node for node in tensor.outputs}.values())


def contains(tensors: Sequence[gs.Tensor], tensor: gs.Tensor) -> bool:
    """True if `tensors` contains the object `tensor` itself; an equal tensor does not count."""
    return any(t is tensor for t in tensors)


def is_copy(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """True if only Identity nodes are between a graph input and `tensor`."""
    while (node := producer(tensor)) is not None and is_op(node, "Identity"):
        tensor = node.inputs[0]
    return contains(graph.inputs, tensor)


def inputs_behind(graph: gs.Graph) -> dict[str, frozenset[str]]:
    """Map each tensor to the graph inputs whose values it depends on. Nodes must be in topological order."""
    sources = {str(t.name): frozenset([str(t.name)]) for t in graph.inputs}
    for node in graph.nodes:
        names = () if is_op(node, "Shape", "Size") else _reads(node)
        reached = frozenset[str]().union(*(sources.get(name, frozenset()) for name in names))
        sources.update((str(t.name), reached) for t in node.outputs)
    return sources


def _reads(node: gs.Node) -> Iterator[str]:
    yield from (str(t.name) for t in node.inputs)
    for body in (value for value in node.attrs.values() if isinstance(value, gs.Graph)):
        for inner in body.nodes:
            yield from _reads(inner)
        yield from (str(t.name) for t in body.outputs)


def is_constant(tensor: gs.Tensor) -> bool:
    """True if a tensor is computed only from constants, without Shape and Size."""
    pending, seen = [tensor], set[int]()
    while pending:
        current = pending.pop()
        if id(current) in seen or current.is_empty() or isinstance(current, gs.Constant):
            continue
        seen.add(id(current))
        node = producer(current)
        if node is None or (not node.inputs and not is_op(node, "Constant")) or is_op(node, "Shape", "Size"):
            return False
        pending += node.inputs
    return True


def small_constant(tensor: gs.Tensor | None, limit: int = 1024) -> Array | None:
    """Return the value of a small constant whose data are in the model; else None. Never loads weights."""
    if not isinstance(tensor, gs.Constant):
        return None
    lazy = tensor._values  # .values would read external data
    if isinstance(lazy, np.ndarray):
        return lazy if lazy.size <= limit else None
    proto = lazy.tensor
    if proto.data_location == onnx.TensorProto.EXTERNAL or int(np.prod(proto.dims)) > limit:
        return None
    return np.asarray(onnx.numpy_helper.to_array(proto))


class Emitter:
    """Adds nodes and constants to a graph. Equal constants are added once."""

    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph
        self._taken = set(graph.tensors()) | {node.name for node in graph.nodes}
        self._constants: dict[tuple[int, tuple[int, ...], bytes], gs.Constant] = {}
        self._results: dict[object, Any] = {}

    def name(self, hint: str) -> str:
        """Return a new name in the graph: ``trt_kvcache/``, the hint, and a number if needed."""
        name, count = NAME_PREFIX + hint, 1
        while name in self._taken:
            count += 1
            name = f"{NAME_PREFIX}{hint}_{count}"
        self._taken.add(name)
        return name

    def op(
        self, op: str, inputs: Sequence[gs.Tensor], hint: str, dtype: int | None = None, **attrs: Any
    ) -> gs.Variable:
        """Append a node, and return its only output. The output's type is `dtype`, or that of the first input."""
        output = gs.Variable(self.name(hint), dtype=inputs[0].dtype if dtype is None else dtype)
        self.graph.nodes.append(gs.Node(op, self.name(f"{hint}:{op}"), attrs, list(inputs), [output]))
        return output

    def ints(self, values: int | Sequence[int]) -> gs.Constant:
        """Add an int64 constant: a scalar for an int, 1-D for a sequence."""
        return self.constant(np.asarray(values, dtype=np.int64))

    def constant(self, values: Array) -> gs.Constant:
        """Add a constant with the values of a numpy array."""
        return self.tensor(onnx.numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape)))

    def scalar(self, value: float, dtype: int) -> gs.Constant:
        """Add a scalar constant of an ONNX floating-point element type."""
        return self.tensor(onnx.helper.make_tensor("", dtype, [], [value]))

    def tensor(self, proto: onnx.TensorProto) -> gs.Constant:
        """Add a constant from a tensor without a name."""
        key = (proto.data_type, tuple(proto.dims), proto.SerializeToString())
        if key not in self._constants:
            proto.name = self.name("const")
            self._constants[key] = OnnxImporter.import_tensor(proto)
        return self._constants[key]

    def once(self, key: object, make: Callable[[], _Result]) -> _Result:
        """Return the result of `make()`. Only the first call with a given key calls `make`."""
        if key not in self._results:
            self._results[key] = make()
        return cast(_Result, self._results[key])


def free_name(name: str, taken: Collection[str]) -> str:
    """Return `name`, with as many underscores at its end as it needs to be new in `taken`."""
    while name in taken:
        name += "_"
    return name


def replace_uses(old: gs.Tensor, new: gs.Tensor, keep: Sequence[gs.Node] = ()) -> None:
    """Make every reader of `old`, except the nodes in `keep`, read `new`."""
    for node in consumers(old):
        if not any(node is other for other in keep):
            node.inputs = [new if t is old else t for t in node.inputs]


def tidy(graph: gs.Graph, *, sort: bool = True) -> gs.Graph:
    """Remove nodes that no output needs, and sort others, in place; faster than ``cleanup().toposort()``."""
    if graph.functions or any(isinstance(v, gs.Graph) for node in graph.nodes for v in node.attrs.values()):
        return graph.cleanup().toposort() if sort else graph.cleanup()
    for tensor in graph.inputs:
        tensor.inputs.clear()
    own = {id(node) for node in graph.nodes}
    used: set[int] = set()
    todo = list(graph.outputs)
    while todo:
        tensor = todo.pop()
        for node in () if tensor.is_empty() else tensor.inputs:
            if id(node) in own and id(node) not in used:
                used.add(id(node))
                todo += node.inputs
    needed = []
    for node in graph.nodes:
        if id(node) in used:
            needed.append(node)
        else:
            node.inputs.clear()
            node.outputs.clear()
    graph.nodes = needed
    order = _order(needed) if sort else needed
    graph.nodes = order or needed
    return graph if order is not None else graph.toposort()  # which raises an error that describes the cycle


def _order(nodes: Sequence[gs.Node]) -> list[gs.Node] | None:
    """Return the nodes, sorted by their longest distance from an input; None if the graph has a cycle."""
    own = {id(node) for node in nodes}
    before = {id(n): [maker for tensor in n.inputs for maker in tensor.inputs if id(maker) in own] for n in nodes}
    levels: dict[int, int] = {}
    ordered: list[gs.Node] = []
    for root in nodes:
        stack = [] if id(root) in levels else [(root, iter(before[id(root)]))]
        path = {id(root)}
        while stack:
            node, left = stack[-1]
            following = next((maker for maker in left if id(maker) not in levels), None)
            if following is None:
                stack.pop()
                path.remove(id(node))
                levels[id(node)] = 1 + max((levels[id(maker)] for maker in before[id(node)]), default=-1)
                ordered.append(node)
            elif id(following) in path:
                return None
            else:
                path.add(id(following))
                stack.append((following, iter(before[id(following)])))
    return sorted(ordered, key=lambda node: levels[id(node)])


def export_inferred(graph: gs.Graph) -> onnx.ModelProto:
    """Export a graph with all shapes that ONNX infers. Store these shapes in `graph`, too."""
    model: onnx.ModelProto = onnx.shape_inference.infer_shapes(gs.export_onnx(graph), data_prop=True)
    tensors = graph.tensors()
    for value in (*model.graph.value_info, *model.graph.output):
        tensor = tensors.get(value.name)
        if isinstance(tensor, gs.Variable):
            stated = OnnxImporter.import_tensor(value)
            tensor.dtype, tensor.shape, tensor.type = stated.dtype, stated.shape, stated.type
    return model


def fold_identities(graph: gs.Graph) -> None:
    """Remove Identity nodes, in place, unless they copy a graph input, a weight or a graph output to a graph output."""
    identities = [node for node in graph.nodes if is_op(node, "Identity")]
    for node in identities:
        source, target = node.inputs[0], node.outputs[0]
        if not contains(graph.outputs, target):
            replace_uses(target, source)
            node.outputs.clear()
        elif (maker := producer(source)) is not None and not contains(graph.outputs, source):
            node.outputs.clear()
            maker.outputs = [target if t is source else t for t in maker.outputs]
            replace_uses(source, target)
    if identities:
        tidy(graph, sort=False)
