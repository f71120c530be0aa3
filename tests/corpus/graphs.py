"""A few lines to write ONNX graphs in tests: names are given where tests need them, made up elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dim = int | str
IR_VERSION = 11


class Graph:
    """An ONNX graph under construction."""

    def __init__(self) -> None:
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def input(self, name: str, dtype: int, shape: Sequence[Dim]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[Dim]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(
        self, op: str, inputs: Sequence[str], out: str | Sequence[str] = "", domain: str = "", **attrs: Any
    ) -> str:
        """Add a node; returns its first output. A node is called after its first output."""
        outputs = [out] if isinstance(out, str) else list(out)
        outputs[0] = outputs[0] or f"{op.lower()}_{len(self.nodes)}"
        name = f"node_{outputs[0]}"
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=name, domain=domain, **attrs))
        return outputs[0]

    def __getattr__(self, op: str) -> Callable[..., str]:
        """``g.Slice(x, [0], ends)`` is a node of that operator; inputs that are no names become int64 constants."""
        if not op[:1].isupper():
            raise AttributeError(op)

        def add(*inputs: Any, out: str | Sequence[str] = "", **attrs: Any) -> str:
            return self.node(op, [i if isinstance(i, str) else self.constant(i) for i in inputs], out, **attrs)

        return add

    def model(self, opset: int = 24, domains: Sequence[str] = (), functions: Any = ()) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "graph", self.inputs, self.outputs, self.initializers)
        imports = [helper.make_opsetid("", opset)] + [helper.make_opsetid(d, 1) for d in domains]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, functions=list(functions))


def renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """The model with other names of tensors; changed in place."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
    return model


def scatter_model(
    shape: Sequence[Dim] = ("B", 2, 16, 8),
    axis: int | None = None,
    length: Dim = "S",
    dtype: int = TensorProto.FLOAT16,
    mode: str | None = None,
    indices: bool = True,
    opset: int = 24,
) -> onnx.ModelProto:
    """One TensorScatter from ``past`` to ``present``; attributes that are None stay at their defaults."""
    graph = Graph()
    update = list(shape)
    update[-2 if axis is None else axis] = length
    inputs = [graph.input("past", dtype, shape), graph.input("update", dtype, update)]
    if indices:
        inputs.append(graph.input("write_indices", TensorProto.INT64, [shape[0]]))
    attrs = {k: v for k, v in (("axis", axis), ("mode", mode)) if v is not None}
    graph.node("TensorScatter", inputs, "present", **attrs)
    graph.output("present", dtype, shape)
    return graph.model(opset)


def attention_model(
    dtype: int = TensorProto.FLOAT16,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    value_head_size: int | None = None,
    keys: Dim = 16,
    queries: Dim = "S",
    batch: Dim = "B",
    mask: Sequence[Dim] | None = None,
    mask_dtype: int = TensorProto.BOOL,
    past: Dim | None = None,
    nonpad: bool = False,
    outputs: int = 1,
    scores: bool = False,
    rank: int = 4,
    opset: int = 24,
    **attrs: Any,
) -> onnx.ModelProto:
    """One Attention over graph inputs ``Q``, ``K``, ``V``; the unused extra outputs of `outputs` are left dangling.

    `scores` makes the fourth output, ``qk``, one of the graph.
    """
    value_head_size = value_head_size or head_size
    graph = Graph()

    def shape(n: int, length: Dim, size: int) -> list[Dim]:
        return [batch, n, length, size] if rank == 4 else [batch, length, n * size]

    inputs = [
        graph.input("Q", dtype, shape(heads, queries, head_size)),
        graph.input("K", dtype, shape(kv_heads, keys, head_size)),
        graph.input("V", dtype, shape(kv_heads, keys, value_head_size)),
        graph.input("mask", mask_dtype, mask) if mask is not None else "",
        graph.input("past_key", dtype, [batch, kv_heads, past, head_size]) if past is not None else "",
        graph.input("past_value", dtype, [batch, kv_heads, past, value_head_size]) if past is not None else "",
        graph.input("nonpad", TensorProto.INT64, [batch]) if nonpad else "",
    ]
    while not inputs[-1]:
        inputs.pop()
    if rank == 3:
        attrs = {"q_num_heads": heads, "kv_num_heads": kv_heads, **attrs}
    names = ["Y", "", "", "qk"] if scores else ["Y", "present_key", "present_value", "qk"][:outputs]
    graph.node("Attention", inputs, names, **attrs)
    graph.output("Y", dtype, shape(heads, queries, value_head_size))
    if scores:
        graph.output("qk", dtype, [batch, heads, queries, keys])
    return graph.model(opset)
