"""Models with a Scan over the tokens of an update, as linear attention has one."""

import numpy as np
import onnx
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

HEADS, SIZE = 2, 16
STEPS = {"B": (1, 1, 1), "S": (1, 4, 4)}
REPEATS: dict[str, tuple[str, list[int]]] = {
    "Tile": ("Tile", [1, 1, 2, 1, 1]),
    "Expand": ("Expand", [1, 1, 2, 1, 1]),
    "Tile of two axes": ("Tile", [1, 2, 3, 1, 1]),
    "Tile of nothing": ("Tile", [1, 1, 1, 1, 1]),
    "Expand of nothing": ("Expand", [1, 2, 1, 1, 16]),
}


def scan(repeat: str, length: int | str = "S", *, cached: bool = False) -> onnx.ModelProto:
    """Linear attention as mobius-onnx writes it: heads apart, repeated, tokens first, then a Scan over tokens.

    `cached`: tokens are written to a cache beside it.
    """
    op, counts = REPEATS.get(repeat, ("", []))
    heads = HEADS * int(np.prod(counts[1:3])) if op == "Tile" or repeat == "Expand" else HEADS
    graph = Graph()
    graph.input("state", TensorProto.FLOAT, ["B", heads, SIZE, SIZE])
    graph.input("x", TensorProto.FLOAT, ["B", length, HEADS * SIZE])
    split = graph.Reshape("x", [0, 0, HEADS, SIZE])
    rows = graph.Unsqueeze(graph.Transpose(split, perm=[0, 2, 1, 3]), [2])
    if op:
        rows = graph.node(op, [rows, graph.constant(counts)])
    rows = graph.Reshape(rows, [0, heads, -1, SIZE])
    first = graph.Transpose(rows, perm=[2, 0, 1, 3])
    graph.Scan("state", first, out=["new_state", "scanned"], body=_body(), num_scan_inputs=1)
    graph.output("new_state", TensorProto.FLOAT, ["B", heads, SIZE, SIZE])
    graph.output("scanned", TensorProto.FLOAT, [length, "B", heads, SIZE])
    if cached:
        past = graph.input("past", TensorProto.FLOAT, ["B", HEADS, 32, SIZE])
        update = graph.Transpose(split, perm=[0, 2, 1, 3])
        graph.TensorScatter(past, update, graph.input("write_indices", TensorProto.INT64, ["B"]), out="present")
        graph.output("present", TensorProto.FLOAT, ["B", HEADS, 32, SIZE])
    return graph.model()


def _body(dtype: int = TensorProto.FLOAT) -> onnx.GraphProto:
    """state + k^T k, and k @ state."""
    body = Graph()
    body.initializers += [numpy_helper.from_array(np.array([n]), f"axis_{-n}") for n in (-2, -1)]
    row = body.Unsqueeze("k", "axis_2", out="row")
    column = body.Unsqueeze("k", "axis_1", out="column")
    body.Squeeze(body.MatMul(row, "s", out="product"), "axis_2", out="y")
    body.Add("s", body.MatMul(column, row, out="update"), out="s_new")
    values = [[helper.make_tensor_value_info(n, dtype, None) for n in names]
              for names in (("s", "k"), ("s_new", "y"))]  # fmt: skip
    return helper.make_graph(body.nodes, "body", *values, body.initializers)


def decoder(dtype: int = TensorProto.FLOAT16, length: int | str = "S", *, computed: bool = False) -> onnx.ModelProto:
    """Attention over caches, a Scan over what it gives, and attention over other caches after that.

    `computed`: what is scanned comes from an Expand by a computed shape.
    """
    graph, heads = Graph(), 4
    graph.input("x", dtype, ["B", length, heads * SIZE])
    graph.input("state", dtype, ["B", heads, SIZE, SIZE])
    for name in ("write_indices", "nonpad_kv_seqlen"):
        graph.input(name, TensorProto.INT64, ["B"])
    rows = graph.Transpose(graph.Reshape("x", [0, 0, heads, SIZE]),
                      perm=[0, 2, 1, 3])  # fmt: skip
    first = graph.Transpose(_attended(graph, rows, dtype, 0), perm=[2, 0, 1, 3])
    if computed:
        shape = graph.Shape(first)
        ones = graph.Div(shape, shape)
        first = graph.Expand(first, ones)
    graph.Scan("state", first, out=["new_state", "scanned"], body=_body(dtype), num_scan_inputs=1)
    graph.Identity(_attended(graph, graph.Transpose("scanned", perm=[1, 2, 0, 3]), dtype, 1), out="output")
    graph.output("new_state", dtype, ["B", heads, SIZE, SIZE])
    graph.output("output", dtype, ["B", heads, length, SIZE])
    return graph.model()


def _attended(graph: Graph, rows: str, dtype: int, layer: int) -> str:
    presents = []
    for name in ("k", "v"):
        past, present = graph.input(f"past_{name}{layer}", dtype, ["B", 4, 32, SIZE]), f"present_{name}{layer}"
        presents.append(graph.TensorScatter(past, rows, "write_indices", out=present, axis=2))
        graph.output(present, dtype, ["B", 4, 32, SIZE])
    query = graph.Mul(rows, graph.constant(0.5, np.float16 if dtype == TensorProto.FLOAT16 else np.float32))
    return graph.Attention(query, *presents, "", "", "", "nonpad_kv_seqlen", is_causal=1)
