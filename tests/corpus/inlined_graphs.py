"""Functions and control flow around caches, and merged exports: a branch for the first step, one for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial

import numpy as np
import onnx
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

from corpus import Entry, built

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
SHAPE = ["B", 2, 8, 4]
CONFIG = DecoderConfig(layers=2, hidden=32, head_size=8, vocab=64)


def cache_graph() -> tuple[Graph, list[str]]:
    graph = Graph()
    inputs = [graph.input("past", F32, SHAPE), graph.input("update", F32, ["B", 2, "S", 4])]
    inputs.append(graph.input("write_indices", I64, ["B"]))
    graph.output("present", F32, SHAPE)
    return graph, inputs


def scatter_function(name: str = "Write", inner: str | None = None) -> onnx.FunctionProto:
    op = helper.make_node("TensorScatter", ["p", "u", "w"], ["r"], axis=2)
    if inner:
        op = helper.make_node(inner, ["p", "u", "w"], ["r"], domain="local")
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["p", "u", "w"], ["r"], [op], opsets)


def functions(depth: int, opset: int = 24, domain: str = "", *, endless: bool = False) -> onnx.ModelProto:
    """An update in functions of functions."""
    graph, inputs = cache_graph()
    names = [f"Write{i}" for i in range(depth)]
    inner = [*names[1:], names[0] if endless else None]
    made = [scatter_function(name, below) for name, below in zip(names, inner, strict=True)]
    next(o for o in made[0].opset_import if o.domain == domain).version = opset if domain == "" else 25
    graph.node("Write0", inputs, "present", domain="local")
    return graph.model(domains=["local"], functions=made)


def named_as_an_operator() -> onnx.ModelProto:
    """TensorRT's parser takes its own Relu for my::Relu; inlined, it cannot."""
    graph, inputs = cache_graph()
    graph.TensorScatter(inputs[0], graph.Relu("update", domain="my"), inputs[2], out="present", axis=2)
    square = helper.make_function("my", "Relu", ["x"], ["y"], [helper.make_node("Mul", ["x", "x"], ["y"])],
                                  [helper.make_opsetid("", 24)])  # fmt: skip
    return graph.model(domains=["my"], functions=[square])


def input_left_out() -> onnx.ModelProto:
    """No entry: ONNX Runtime 1.31 dies of it."""
    graph, inputs = cache_graph()
    normed = graph.Norm(inputs[1], graph.constant(np.ones(4), np.float32), domain="my")
    graph.TensorScatter(inputs[0], normed, inputs[2], out="present", axis=2)
    node = helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["y"])
    norm = helper.make_function("my", "Norm", ["x", "scale", "bias"], ["y"], [node], [helper.make_opsetid("", 24)])
    return graph.model(domains=["my"], functions=[norm])


def branch(inputs: list[str], *, written: bool) -> onnx.GraphProto:
    """A branch that captures the cache from outside; its inner names repeat those of the other branch."""
    if written:
        nodes = [
            helper.make_node("Identity", [inputs[1]], ["row"]),
            helper.make_node("TensorScatter", [inputs[0], "row", inputs[2]], ["out"], axis=2),
        ]
    else:
        nodes = [helper.make_node("Identity", [inputs[0]], ["row"]), helper.make_node("Identity", ["row"], ["out"])]
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info("out", F32, SHAPE)])


def condition(taken: str = "then_branch", *, nested: bool = False, computed: bool = False) -> onnx.ModelProto:
    """An If whose branch `taken` writes the cache."""
    graph, inputs = cache_graph()
    value = graph.input("condition", TensorProto.BOOL, []) if computed else ""
    value = value or graph.constant(taken == "then_branch", np.bool_)
    other = "else_branch" if taken == "then_branch" else "then_branch"
    branches = {taken: branch(inputs, written=True), other: branch(inputs, written=False)}
    if nested:
        inner = helper.make_node("If", [value], ["inner"], **branches)
        info = [helper.make_tensor_value_info("inner", F32, SHAPE)]
        branches[taken] = helper.make_graph([inner], "outer", [], info)
    graph.If(value, out="present", **branches)
    return graph.model()


def loop_body(inputs: list[str]) -> onnx.GraphProto:
    """(iteration, condition, cache) -> (condition, updated cache); iteration 0 adds nothing to the write index."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Add", [inputs[2], "i"], ["where"]),
        helper.make_node("TensorScatter", ["carried", inputs[1], "where"], ["written"], axis=2),
        helper.make_node("Identity", ["go"], ["still"]),
    ]
    return helper.make_graph(
        nodes, "body", [info("i", I64, []), info("go", TensorProto.BOOL, []), info("carried", F32, SHAPE)],
        [info("still", TensorProto.BOOL, []), info("written", F32, SHAPE)],
    )  # fmt: skip


def loop(trips: int | None) -> onnx.ModelProto:
    graph, inputs = cache_graph()
    count = graph.input("trips", I64, []) if trips is None else graph.constant(trips)
    graph.Loop(count, "", inputs[0], out="present", body=loop_body(inputs))
    return graph.model()


def without_caches() -> onnx.ModelProto:
    """Control flow that stays, in a branch of which another one lies that captures a constant."""
    graph, inputs = cache_graph()
    flag, shape = graph.input("flag", TensorProto.BOOL, [1]), ["B", 2, "S", 4]
    chosen = graph.Squeeze(flag)

    def body(factor: float, inner: onnx.NodeProto | None = None) -> onnx.GraphProto:
        value = numpy_helper.from_array(np.array(factor, np.float32), "factor")
        nodes = [helper.make_node("Mul", ["update", "factor"], ["scaled"])] if inner is None else [inner]
        return helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info("scaled", F32, shape)], [value])

    bare = [helper.make_graph([helper.make_node(op, ["update", "factor"], [f"{op}_out"])], op, [],
                              [helper.make_tensor_value_info(f"{op}_out", F32, shape)])
            for op in ("Mul", "Div")]  # fmt: skip
    inner = helper.make_node("If", [chosen], ["scaled"], then_branch=bare[0], else_branch=bare[1])
    always = graph.constant(True, np.bool_)
    scaled = graph.If(always, out="chosen", then_branch=body(2.0, inner), else_branch=body(3.0))
    graph.TensorScatter(inputs[0], scaled, inputs[2], out="present", axis=2)
    return graph.model()


def body_of(model: onnx.ModelProto, prefix: str, dropped: tuple[str, ...] = ()) -> onnx.GraphProto:
    """A model's graph as a branch: initializers inside, its own names prefixed, inputs taken from outside."""
    graph = model.graph
    own = {n for node in graph.node for n in node.output} | {t.name for t in graph.initializer}
    body = onnx.GraphProto(name=prefix)
    for node in graph.node:
        copy = body.node.add()
        copy.CopyFrom(node)
        copy.input[:] = [prefix + n if n in own else n for n in node.input]
        copy.output[:] = [prefix + n for n in node.output]
    for tensor in graph.initializer:
        body.initializer.add().CopyFrom(tensor)
        body.initializer[-1].name = prefix + tensor.name
    for value in graph.output:
        output = body.output.add()
        output.CopyFrom(value)
        output.name = prefix + value.name
    return body


def without_past(model: onnx.ModelProto) -> onnx.ModelProto:
    """The first step alone: every past becomes a constant of no tokens; `extra` is added to the logits."""
    first = deepcopy(model)
    for value in model.graph.input:
        if value.name.startswith("past_key_values"):
            shape = (1, CONFIG.kv_heads, 0, CONFIG.head_size)
            first.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), value.name))
    last = first.graph.node[-1]
    assert last.output[0] == "logits"
    last.output[0] = "logits_alone"
    first.graph.node.append(helper.make_node("Add", ["logits_alone", "extra"], ["logits"]))
    return first


def merged(*, swapped: bool = False, both_cached: bool = False) -> onnx.ModelProto:
    """As optimum merges: one If in the main graph, both branches with their weights inside."""
    model = make_foreign("concat", CONFIG)
    cached, first = body_of(model, "c."), body_of(without_past(model), "f.")
    if both_cached:
        first = body_of(model, "f.")
    shape = ["batch", CONFIG.kv_heads, "encoder", CONFIG.head_size]
    for body, source in ((cached, numpy_helper.from_array(np.zeros((0, 2, 1, 8), np.float32))), (first, None)):
        name = f"{body.name}cross"
        made = (
            helper.make_node("Constant", [], [name], value=source)
            if source is not None
            else helper.make_node("Unsqueeze", ["extra", "axes"], [name])
        )
        body.node.append(made)
        body.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    outputs = [o.name for o in model.graph.output] + ["present.0.cross"]
    branches = {"then_branch": cached, "else_branch": first}
    if swapped:
        branches = {"then_branch": first, "else_branch": cached}
    node = helper.make_node("If", ["use_cache_branch"], outputs, name="branches", **branches)
    switch = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    extra = helper.make_tensor_value_info("extra", TensorProto.FLOAT, [1, 1, 1])
    cross = helper.make_tensor_value_info("present.0.cross", TensorProto.FLOAT, shape)
    graph = helper.make_graph(
        [node], "merged", [*model.graph.input, extra, switch], [*model.graph.output, cross],
        [numpy_helper.from_array(np.array([0]), "axes")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{f"functions {depth}": partial(functions, depth) for depth in (1, 2, 3)},
    "functions of another opset": partial(functions, 1, 25),
    "functions of another local opset": partial(functions, 1, domain="local"),
    "endless functions": partial(functions, 1, endless=True),
    **{f.__name__: f for f in (named_as_an_operator, without_caches)},
    **{f"If {taken}": partial(condition, taken) for taken in ("then_branch", "else_branch")},
    "If in If": partial(condition, nested=True),
    "If computed": partial(condition, computed=True),
    **{f"Loop {trips}": partial(loop, trips) for trips in (1, 2, None)},
}
MERGED: dict[str, dict[str, bool]] = {
    "first": {}, "swapped": {"swapped": True}, "both with caches": {"both_cached": True}}  # fmt: skip


def entries() -> Iterator[Entry]:
    yield from built("inlined", MODELS)
    yield from built("merged export", {name: partial(merged, **how) for name, how in MERGED.items()}, capacity=16)
