"""Decoders whose caches somebody reads beside attention, or whose update is none: refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx
from concat_graphs import Build, Decoder, decoders, make_decoder
from graphs import Graph
from onnx import TensorProto

from corpus import Entry, built

FLOAT = TensorProto.FLOAT
After = Callable[[Build, str], str]


def shown(what: Callable[[Build], str], rank: int = 4) -> After:
    """An output beside the logits."""

    def after(g: Build, x: str) -> str:
        g.Identity(what(g), out="debug")
        g.output("debug", FLOAT, [f"d{axis}" for axis in range(rank)])
        return x

    return after


def mixed(what: Callable[[Build], str]) -> After:
    """Added to the hidden states."""
    return lambda g, x: g.Add(x, g.ReduceMean(what(g), keepdims=0))


def first(kind: str) -> Callable[[Build], str]:
    return lambda g: (g.pasts if kind == "past" else g.presents)[0]


def norm(g: Build) -> str:
    return g.ReduceL2(g.presents[0], [3], keepdims=0)


def probabilities(g: Build, x: str) -> str:
    softmax = next(n for n in g.nodes if n.op_type == "Softmax")
    g.output(softmax.output[0], FLOAT, ["a", "b", "c", "d"])
    return x


READERS: dict[str, After] = {
    "present shown": shown(first("present")),
    "norm of the present shown": shown(norm, 3),
    "present in the hidden states": mixed(first("present")),
    "past in the hidden states": mixed(first("past")),
    "probabilities shown": probabilities,
}


def concat(graph: onnx.GraphProto) -> onnx.NodeProto:
    return next(n for n in graph.node if n.output[0] == "present.0.key")


def new_rows_first(graph: onnx.GraphProto) -> None:
    node = concat(graph)
    node.input[:] = list(node.input)[::-1]


def past_twice(graph: onnx.GraphProto) -> None:
    """Values are written after the past of the keys."""
    node = next(n for n in graph.node if n.output[0] == "present.0.value")
    node.input[0] = "past_key_values.0.key"


def three_parts(graph: onnx.GraphProto) -> None:
    concat(graph).input.append(concat(graph).input[1])


def past_with_past(graph: onnx.GraphProto) -> None:
    node = concat(graph)
    node.input[1] = node.input[0]


def attention_over_past(graph: onnx.GraphProto) -> None:
    """Reads the keys as they were before this step."""
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == "present.0.key" and node.op_type not in ("Shape",):
                node.input[i] = "past_key_values.0.key"


def fixed_length(graph: onnx.GraphProto) -> None:
    for value in graph.input:
        if value.name == "past_key_values.0.key":
            value.type.tensor_type.shape.dim[2].Clear()
            value.type.tensor_type.shape.dim[2].dim_value = 7


def one_symbol(graph: onnx.GraphProto, symbols: tuple[str, ...] = ("past", "total", "sequence")) -> None:
    """Exporters do not always care."""
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.startswith(symbols):
                dim.dim_param = "length"


def as_indices(graph: onnx.GraphProto) -> None:
    """An input that is called as one that is added, and is something else."""
    for value in graph.input:
        value.name = "write_indices" if value.name == "position_ids" else value.name
    for node in graph.node:
        node.input[:] = ["write_indices" if n == "position_ids" else n for n in node.input]


def picked(graph: onnx.GraphProto) -> None:
    """New rows that are picked by what the tokens are."""
    node = concat(graph)
    numbers = (onnx.numpy_helper.from_array(np.array([i]), f"b{i}") for i in range(3))
    graph.initializer.extend(numbers)
    make, place = onnx.helper.make_node, list(graph.node).index(node)
    nodes = [
        make("NonZero", ["input_ids"], ["picked"], name="pick"),
        make("Slice", ["picked", "b1", "b2", "b0"], ["row"], name="part"),
        make("Squeeze", ["row"], ["kept"], name="kept"),
        make("Gather", [node.input[1], "kept"], ["chosen"], name="chosen", axis=2),
    ]
    for extra in reversed(nodes):
        graph.node.insert(place, extra)
    node.input[1] = "chosen"


def edited(edit: Callable[[onnx.GraphProto], None], **how: Any) -> onnx.ModelProto:
    model = make_decoder(Decoder(**how))
    edit(model.graph)
    return model


def style(g: Build, x: str) -> str:
    """A Concat of an input that is no cache."""
    extra = g.input("style", FLOAT, ["batch", "styles", 16])
    joined = g.Concat(extra, x, axis=1)
    return g.Add(x, g.ReduceMean(joined, [1], keepdims=1))


def joined_features(symbol: str = "n") -> onnx.ModelProto:
    """Prompt vectors in front of embedded tokens, as an output: a Concat of an input that is no cache."""
    g = Graph()
    features = g.input("prompt", FLOAT, ["batch", symbol, 8])
    tokens = g.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    table = g.constant(np.random.default_rng(0).standard_normal((16, 8)), np.float32)
    rows = g.Gather(table, tokens)
    joined = g.Concat(features, rows, axis=1)
    g.MatMul(joined, g.constant(np.ones((8, 16)), np.float32), out="logits")
    g.output("logits", FLOAT, ["batch", "all", 16])
    return g.model(18)


EDITS = (new_rows_first, past_twice, three_parts, past_with_past, attention_over_past, fixed_length, picked)


def entries() -> Iterator[Entry]:
    yield from decoders("reader", {name: {"after": after} for name, after in READERS.items()})
    models = {f.__name__: partial(edited, f, repeat="tile", mask="positions") for f in EDITS}
    models |= {
        "one symbol": partial(edited, one_symbol, mask="padding", layers=2),
        "an input of that name": partial(edited, as_indices),
        "prompt in front": joined_features,
    }
    yield from built("update", models, capacity=24)
    yield from built("no capacity", {"plain": lambda: make_decoder(Decoder())})
    yield from decoders("beside", {"style": {"after": style}})
