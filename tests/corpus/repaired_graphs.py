"""Models of tools that ONNX forbids: repaired, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper
from state_graphs import beside_a_cache

from corpus import Entry, built

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
SMALL = DecoderConfig(layers=1, hidden=32, vocab=32, query_heads=2, kv_heads=1, head_size=16, capacity=16, positions=32)
Edit = Callable[[onnx.ModelProto], object]


def shuffled(model: onnx.ModelProto, seed: int) -> None:
    """The nodes in another order."""
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    random.Random(seed).shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def no_import(model: onnx.ModelProto) -> None:
    imports = [entry for entry in model.opset_import if entry.domain != "com.microsoft"]
    assert len(imports) < len(model.opset_import)
    del model.opset_import[:]
    model.opset_import.extend(imports)


def scalars_for_lists(model: onnx.ModelProto) -> set[str]:
    """Let, in place, operators read a scalar where they read a list of one number; which operators."""
    lists = {t.name: t for t in model.graph.initializer if t.data_type == TensorProto.INT64 and t.dims == [1]}
    found = set()
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if place and name in lists and node.op_type not in ("Gather", "Equal", "Where"):
                node.input[place] = f"{name}/scalar"
                found.add(node.op_type)
    for name, tensor in lists.items():
        values = numpy_helper.to_array(tensor)
        model.graph.initializer.append(numpy_helper.from_array(values.reshape(()), f"{name}/scalar"))
    return found


def other_rank(model: onnx.ModelProto) -> None:
    """onnxruntime-genai states a wrong rank of constants, which ONNX Runtime's optimizer makes initializers."""
    name = next(t.name for t in model.graph.initializer if t.data_type == TensorProto.INT64 and t.dims == [1])
    model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.INT64, []))


def foreign(form: str, edit: Edit) -> onnx.ModelProto:
    model = make_foreign(form, SMALL)
    edit(model)
    return model


def branch(nodes: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", [], [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["B", 4])])


def later_in_a_body() -> onnx.ModelProto:
    """The tensors that an If reads are named in its bodies only, those nested in these too."""
    graph = Graph()
    graph.input("x", FLOAT, ["B", 4])
    graph.input("choice", TensorProto.BOOL, [])
    inner = branch([helper.make_node("Neg", ["late"], ["minus"])], "minus")
    outer = branch([helper.make_node("If", ["choice"], ["picked"], then_branch=inner, else_branch=inner)], "picked")
    plain = branch([helper.make_node("Abs", ["x"], ["kept"])], "kept")
    graph.If("choice", out="y", then_branch=outer, else_branch=plain)
    graph.Relu("x", out="late")
    graph.output("y", FLOAT, ["B", 4])
    return beside_a_cache(graph)


def scalars_in_a_body() -> onnx.ModelProto:
    graph = Graph()
    graph.input("x", FLOAT, ["B", 4])
    graph.input("choice", TensorProto.BOOL, [])
    inputs = ["x", graph.constant(0)]
    most, total = (
        branch([helper.make_node(op, inputs, ["made"], keepdims=1)], "made") for op in ("ReduceMax", "ReduceSum")
    )
    graph.If("choice", out="y", then_branch=most, else_branch=total)
    graph.output("y", FLOAT, ["B", 4])
    return beside_a_cache(graph)


def cycle() -> onnx.ModelProto:
    graph = Graph()
    graph.input("x", FLOAT, [4])
    graph.Add("x", "b", out="a")
    graph.Relu("a", out="b")
    graph.output("b", FLOAT, [4])
    return beside_a_cache(graph)


def other_domain() -> onnx.ModelProto:
    graph = Graph()
    graph.input("x", FLOAT, [4])
    graph.Own("x", out="y", domain="com.own")
    graph.output("y", FLOAT, [4])
    return beside_a_cache(graph)


# Element types that contradict each other, as converters to float16 leave them.


def graph(out: int = FLOAT) -> Graph:
    made = Graph()
    made.input("half", HALF, ["B", 4])
    made.input("float", FLOAT, ["B", 4])
    made.output("y", out, ["B", 4])
    return made


def stated_otherwise() -> onnx.ModelProto:
    """onnxconverter-common: the result of a Cast that stayed, stated as what the rest became."""
    made = graph(HALF)
    made.Cast("half", out="cast", to=FLOAT)
    made.Add("cast", "half", out="y")
    model = made.model()
    model.graph.value_info.append(helper.make_tensor_value_info("cast", HALF, ["B", 4]))
    return model


def mixed() -> onnx.ModelProto:
    made = graph(HALF)
    made.Add("half", "float", out="y")
    return made.model()


def quantized() -> onnx.ModelProto:
    """NVIDIA ModelOpt's PTQ of a file that was float16 already."""
    made = graph(HALF)
    small = made.QuantizeLinear("float", made.constant(0.1, np.float32), made.constant(0, np.int8))
    made.Add("half", made.DequantizeLinear(small, made.constant(0.1, np.float32)), out="y")
    return made.model()


def fused() -> onnx.ModelProto:
    """onnxruntime.transformers.optimizer over optimum-onnx' Llama in float16."""
    made = Graph()
    made.input("x", HALF, ["B", 2, "S", 8])
    made.input("positions", TensorProto.INT64, ["B", "S"])
    tables = [made.constant(np.ones((4, 4)), np.float32) for _ in range(2)]
    made.RotaryEmbedding("x", "positions", *tables, out="y", domain="com.microsoft")
    made.output("y", HALF, ["B", 2, "S", 8])
    return made.model(21, ["com.microsoft"])


def types_of_their_own() -> onnx.ModelProto:
    """Where has a bool, Pow and CastLike two types, LayerNormalization may have two."""
    made = graph()
    positive = made.Greater("float", "float")
    power = made.Pow("float", "half")
    like = made.CastLike("half", "float")
    made.Where(positive, power, like, out="y")
    return beside_a_cache(made)


WRONG_TYPES = (stated_otherwise, mixed, quantized, fused)


def entries() -> Iterator[Entry]:
    edits: dict[str, tuple[str, Edit]] = {
        **{f"any order {seed}": ("concat", partial(shuffled, seed=seed)) for seed in range(2)},
        "no import": ("gqa", no_import),
        **{edit.__name__: ("concat", edit) for edit in (scalars_for_lists, other_rank)},
    }
    yield from built("repaired", {n: partial(foreign, *how) for n, how in edits.items()}, capacity=16)
    made = (later_in_a_body, scalars_in_a_body, cycle, other_domain, types_of_their_own)
    yield from built("repaired", {make.__name__: make for make in made})
    yield from built("wrong types", {make.__name__: make for make in WRONG_TYPES})
