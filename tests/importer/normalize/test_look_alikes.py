"""Models that look like decoders with caches and are something else: refused by name, or left as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_decode import CAPACITY, check_decode, normalized, rewritten
from concat_graphs import Build, Decoder, make_decoder
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.normalize import normalize
from trt_kvcache.importer.plan import PlanOptions

FLOAT = TensorProto.FLOAT
After = Callable[[Build, str], str]


def shown(what: Callable[[Build], str], rank: int = 4) -> After:
    """An output beside the logits."""

    def after(g: Build, x: str) -> str:
        g.node("Identity", [what(g)], "debug")
        g.output("debug", FLOAT, [f"d{axis}" for axis in range(rank)])
        return x

    return after


def mixed(what: Callable[[Build], str]) -> After:
    """Added to the hidden states."""
    return lambda g, x: g.node("Add", [x, g.node("ReduceMean", [what(g)], keepdims=0)])


def first(kind: str) -> Callable[[Build], str]:
    return lambda g: (g.pasts if kind == "past" else g.presents)[0]


def transposed(g: Build) -> str:
    return g.node("Transpose", [g.presents[0]], perm=[0, 2, 1, 3])


def norm(g: Build) -> str:
    return g.node("ReduceL2", [g.presents[0], g.constant([3])], keepdims=0)


def probabilities(g: Build, x: str) -> str:
    softmax = next(n for n in g.nodes if n.op_type == "Softmax")
    g.output(softmax.output[0], FLOAT, ["a", "b", "c", "d"])
    return x


NO_ATTENTION = "reads the cache 'past_key_values.0.key' and is no attention that the importer can prove"
READERS: dict[str, tuple[After, str]] = {
    "present shown twice": (shown(first("present")), "it has two results, 'debug' and 'present.0.key'"),
    "present shown in another layout": (shown(transposed), "it has two results, 'debug' and 'present.0.key'"),
    "norm of the present shown": (shown(norm, 3), f"ReduceL2 .* {NO_ATTENTION}"),
    "rows of the present shown": (
        shown(lambda g: g.node("Slice", [g.presents[0], *(g.constant([n]) for n in (-1, 2**31, 2))])),
        "it has two results, 'debug' and 'present.0.key'",
    ),
    "present in the hidden states": (mixed(first("present")), f"ReduceMean .* {NO_ATTENTION}"),
    "present in other layouts in the hidden states": (mixed(transposed), f"Transpose .* {NO_ATTENTION}"),
    "past shown": (shown(first("past")), "it comes out as it went in, as 'debug'"),
    "past in the hidden states": (mixed(first("past")), "ReduceMean 'node_.*' reads its past as well"),
    "probabilities shown": (probabilities, NO_ATTENTION),
}


@pytest.mark.parametrize("name", READERS)
def test_who_reads_a_cache_beside_attention_is_named(tmp_path: Path, name: str) -> None:
    after, words = READERS[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(after=after)), tmp_path)


def edited(decoder: Decoder, edit: Callable[[onnx.GraphProto], None]) -> onnx.ModelProto:
    model = make_decoder(decoder)
    edit(model.graph)
    onnx.checker.check_model(model, full_check=True)
    return model


def concat(graph: onnx.GraphProto) -> onnx.NodeProto:
    return next(n for n in graph.node if n.output[0] == "present.0.key")


def new_rows_first(graph: onnx.GraphProto) -> None:
    node = concat(graph)
    node.input[:] = list(node.input)[::-1]


def past_twice(graph: onnx.GraphProto) -> None:
    """Values are written behind the keys' past."""
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


EDITS: dict[str, tuple[Callable[[onnx.GraphProto], None], str]] = {
    "new rows first": (new_rows_first, "it puts the new rows before the past"),
    "one past for two presents": (past_twice, "it has two results"),
    "three parts": (three_parts, "it takes new rows from 2 tensors"),
    "past behind past": (past_with_past, "past_key_values.0.key"),
    "attention over the past": (attention_over_past, "reads its past as well"),
    "a past of fixed length": (fixed_length, "is state that no attention reads"),
}


@pytest.mark.parametrize("name", EDITS)
def test_updates_that_are_none(tmp_path: Path, name: str) -> None:
    edit, words = EDITS[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(edited(Decoder(repeat="tile", positions="input", mask="positions"), edit), tmp_path)


def joined_features(symbol: str = "n") -> onnx.ModelProto:
    """Prompt vectors in front of embedded tokens, as an output: a Concat of an input that is no cache."""
    g = Graph()
    features = g.input("prompt", FLOAT, ["batch", symbol, 8])
    tokens = g.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    table = g.constant(np.random.default_rng(0).standard_normal((16, 8)), np.float32)
    rows = g.node("Gather", [table, tokens])
    joined = g.node("Concat", [features, rows], axis=1)
    g.node("MatMul", [joined, g.constant(np.ones((8, 16)), np.float32)], "logits")
    g.output("logits", FLOAT, ["batch", "all", 16])
    return g.model(18)


def test_a_concat_that_is_no_cache_is_left_alone() -> None:
    model = joined_features()
    result = normalize(model, {}, PlanOptions(capacity=16))
    assert result.model is model
    assert result.findings is None


def test_a_concat_of_inputs_beside_caches_stays_a_concat(tmp_path: Path) -> None:
    def after(g: Build, x: str) -> str:
        extra = g.input("style", FLOAT, ["batch", "styles", 16])
        joined = g.node("Concat", [extra, x], axis=1)
        return g.node("Add", [x, g.node("ReduceMean", [joined, g.constant([1])], keepdims=1)])

    model = make_decoder(Decoder(after=after))
    result = normalized(model)
    assert [n.op_type for n in result.graph.node].count("TensorScatter") == 2
    (node,) = [n for n in result.graph.node if n.op_type == "Concat" and "style" in n.input]
    assert node.attribute[0].i == 1


def test_caches_that_grow_need_a_capacity(tmp_path: Path) -> None:
    onnx.save(make_decoder(Decoder()), tmp_path / "model.onnx")
    with pytest.raises(OptionError, match=r"'past_key_values.0.key' is as long as the text.* pass --capacity N"):
        import_model(tmp_path / "model.onnx")


@pytest.mark.parametrize("symbols", [("past", "total"), ("past", "total", "sequence")])
def test_one_symbol_for_everything(tmp_path: Path, symbols: tuple[str, ...]) -> None:
    """Exporters do not always care."""

    def share(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param.startswith(symbols):
                    dim.dim_param = "length"

    check_decode(edited(Decoder(mask="padding", layers=2), share), tmp_path)


def test_a_constant_with_the_symbol_of_the_past_keeps_it() -> None:
    """The cache has a length of its own from now on, and the constant may have any."""

    def after(g: Build, x: str) -> str:
        extra = g.input("extra", FLOAT, ["batch", "past"])
        return g.node("Add", [x, g.node("ReduceMean", [extra], keepdims=0)])

    inputs = {v.name: v.type.tensor_type.shape.dim for v in normalized(make_decoder(Decoder(after=after))).graph.input}
    assert inputs["extra"][1].dim_param == "past"
    assert inputs["past_key_values.0.key"][2].dim_value == CAPACITY


def test_tokens_decide_no_shape(tmp_path: Path) -> None:
    """New rows that are picked by what the tokens are."""

    def pick(graph: onnx.GraphProto) -> None:
        node = concat(graph)
        wanted = onnx.helper.make_node("NonZero", ["input_ids"], ["picked"], name="pick")
        row = onnx.helper.make_node("Squeeze", ["row"], ["kept"], name="kept")
        start, end = (onnx.numpy_helper.from_array(np.array([i]), f"b{i}") for i in (1, 2))
        zero = onnx.numpy_helper.from_array(np.array([0]), "b0")
        part = onnx.helper.make_node("Slice", ["picked", "b1", "b2", "b0"], ["row"], name="part")
        rows = onnx.helper.make_node("Gather", [node.input[1], "kept"], ["chosen"], name="chosen", axis=2)
        graph.initializer.extend([zero, start, end])
        place = list(graph.node).index(node)
        for extra in (rows, row, part, wanted):
            graph.node.insert(place, extra)
        node.input[1] = "chosen"

    model = make_decoder(Decoder(repeat="tile", mask="positions"))
    pick(model.graph)
    onnx.checker.check_model(model)
    with pytest.raises(UnsupportedModelError, match="nothing says the shape of 'chosen' with 5 tokens"):
        rewritten(model, tmp_path)
