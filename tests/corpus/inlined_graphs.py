"""Functions and control flow around caches, and merged exports: a branch for the first step, one for all others."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial

import numpy as np
import onnx
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from onnx import TensorProto, helper, numpy_helper, parser

from corpus import Entry, built

CONFIG = DecoderConfig(layers=2, hidden=32, head_size=8, vocab=64)
CACHE = "float[B,2,8,4]"
WRITE = "TensorScatter <axis = 2>"


def update(body: str, inputs: str = "", constants: str = "", functions: str = "") -> onnx.ModelProto:
    return parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 24, "local" : 1, "my" : 1]>
        graph ({CACHE} past, float[B,2,S,4] update, int64[B] write_indices{inputs}) => ({CACHE} present)
        <{constants}> {{ {body} }}
        {functions}""")


def functions(depth: int, last: str = WRITE, opset: int = 24, local: int = 1) -> onnx.ModelProto:
    calls = [*(f"local.Write{i}" for i in range(1, depth)), last]
    texts = [
        f"""<domain: "local", opset_import: ["" : {opset if i == 0 else 24}, "local" : {local if i == 0 else 1}]>
        Write{i} (p, u, w) => (r) {{ r = {call} (p, u, w) }}"""
        for i, call in enumerate(calls)
    ]
    return update("[node_present] present = local.Write0 (past, update, write_indices)", functions="\n".join(texts))


def of_function(call: str, body: str) -> onnx.ModelProto:
    """New rows that a function makes."""
    return update(
        f"new = my.{call} (update, scale)  present = {WRITE} (past, new, write_indices)",
        constants="float[4] scale = {1, 1, 1, 1}",
        functions=f'<domain: "my", opset_import: ["" : 24]> {call} (x, scale, bias) => (y) {{ {body} }}',
    )


def input_left_out() -> onnx.ModelProto:
    """No entry: ONNX Runtime 1.31 dies of it."""
    return of_function("Norm", "y = LayerNormalization (x, scale, bias)")


def condition(constant: str = "", *, inputs: str = "") -> onnx.ModelProto:
    """An If of which one branch writes the cache; the inner names of both are the same."""
    written = f"row = Identity (update)  out = {WRITE} (past, row, write_indices)"
    return update(
        f"""[node_present] present = If (c) <
            then_branch = a () => ({CACHE} out) {{ {written} }},
            else_branch = b () => ({CACHE} out) {{ row = Identity (past)  out = Identity (row) }}>""",
        inputs, constant,
    )  # fmt: skip


def loop(inputs: str = "", constant: str = "") -> onnx.ModelProto:
    """Iteration 0 adds nothing to the write index."""
    return update(
        f"""[node_present] present = Loop (trips, , past) <body = b (int64 i, bool go, {CACHE} carried) => (
            bool still, {CACHE} written) {{
            where = Add (write_indices, i)
            written = {WRITE} (carried, update, where)
            still = Identity (go)
        }}>""",
        inputs, constant,
    )  # fmt: skip


def body_of(model: onnx.ModelProto, prefix: str) -> onnx.GraphProto:
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
    "functions": partial(functions, 2),
    "functions of another opset": partial(functions, 1, opset=25),
    "functions of another local opset": partial(functions, 1, local=25),
    "endless functions": partial(functions, 1, "local.Write0"),
    # TensorRT's parser takes its own Relu for my::Relu; inlined, it cannot.
    "named_as_an_operator": partial(of_function, "Relu", "y = Mul (x, x)"),
    "If": partial(condition, "bool c = {1}"),
    "If computed": partial(condition, inputs=", bool c"),
    "Loop 1": partial(loop, constant="int64 trips = {1}"),
    "Loop None": partial(loop, ", int64 trips"),
}
MERGED: dict[str, dict[str, bool]] = {
    "first": {}, "swapped": {"swapped": True}, "both with caches": {"both_cached": True}}  # fmt: skip


def entries() -> Iterator[Entry]:
    yield from built("inlined", MODELS)
    yield from built("merged export", {name: partial(merged, **how) for name, how in MERGED.items()}, capacity=16)
