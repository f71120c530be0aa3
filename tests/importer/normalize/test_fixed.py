"""Constants in disguise are folded; what a size changes stays, and is refused where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from cache_updates import index_copy, load, update_model
from concat_decode import CAPACITY, check_decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.fixed import fold_fixed
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.idioms.cache_updates import find_candidates
from trt_kvcache.importer.plan import Target
from trt_kvcache.verify import verify_import

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
SWITCH = 11
Change = Callable[[Build, str], str]


def repeated(rows: Callable[[Build, str], str], reads: str = "cos") -> Change:
    """As TorchScript writes ``repeat_interleave(cos, 2)``: which column, and as often as there are copies of it.

    Args:
        rows: how many columns there are, int64 scalar, of the hidden states.
        reads: where the indices go: "cos", or "count" for how many there are.
    """

    def after(g: Build, x: str) -> str:
        count = rows(g, x)
        copies = g.node("Expand", [g.constant(2), g.node("Unsqueeze", [count, g.constant([0])])])
        most = g.node("ReduceMax", [copies], keepdims=0)
        columns = g.node("Range", [g.constant(0), most, g.constant(1)])
        wanted = g.node("Less", [columns, g.node("Unsqueeze", [copies, g.constant([1])])])
        found = g.node("Transpose", [g.node("NonZero", [wanted])], perm=[1, 0])
        if reads == "count":
            many = g.node("Cast", [g.size_of(found, 0)], to=FLOAT)
            return g.node("Mul", [x, many])
        column = g.node("Slice", [found, g.constant([0]), g.constant([1]), g.constant([1])])
        spread = g.node("GatherND", [g.node("Transpose", [x], perm=[2, 0, 1]), column])
        halves = g.node("Reshape", [g.node("Transpose", [spread], perm=[1, 2, 0]), g.constant([0, 0, -1, 2])])
        return g.node("ReduceSum", [halves, g.constant([3])], keepdims=0)

    return after


def width(g: Build, x: str) -> str:
    return g.size_of(x, 2)


def cancelled(g: Build, x: str) -> str:
    """Rows of the present minus those of the past, over the new tokens: 1, of which there are as many as columns."""
    new = g.node("Sub", [g.all, g.past])
    return g.node("Mul", [g.node("Div", [new, g.length]), g.size_of(x, 2)])


def read(x: int) -> Callable[[Build, str], str]:
    return lambda g, _: g.constant(x)


def count_of(tensor: Callable[[Build, str], str]) -> Change:
    """Scales by how many numbers a NonZero finds."""

    def after(g: Build, x: str) -> str:
        many = g.node("Cast", [g.size_of(g.node("NonZero", [tensor(g, x)]), 1)], to=FLOAT)
        return g.node("Mul", [x, g.node("Add", [many, g.number(1.0)])])

    return after


def ones(size: Callable[[Build, str], str]) -> Callable[[Build, str], str]:
    """As many ones as a size says."""

    def make(g: Build, x: str) -> str:
        return g.node("Expand", [g.constant(1), g.node("Unsqueeze", [size(g, x), g.constant([0])])])

    return make


def below(limit: int, size: Callable[[Build, str], str]) -> Callable[[Build, str], str]:
    """1 up to a limit, and 2 beyond it: the same in all small steps."""

    def make(g: Build, x: str) -> str:
        over = g.node("GreaterOrEqual", [size(g, x), g.constant(limit)])
        return g.node("Add", [g.node("Cast", [over], to=INT64), g.constant(1)])

    return make


def by_axis(axis: int) -> Callable[[Build, str], str]:
    return lambda g, x: g.size_of(g.tokens, axis)


def ops(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [width, cancelled, read(16)])
@pytest.mark.parametrize("reads", ["cos", "count"])
def test_indices_that_no_size_changes_are_a_constant(tmp_path: Path, rows, reads: str) -> None:
    result = check_decode(make_decoder(Decoder(after=repeated(rows, reads))), tmp_path)
    assert "NonZero" not in ops(result.model)


def test_a_chain_of_them_is_folded(tmp_path: Path) -> None:
    """The second is as large as the first found."""

    def after(g: Build, x: str) -> str:
        first = g.node("NonZero", [ones(width)(g, x)])
        return count_of(lambda g, _: ones(lambda g, _: g.size_of(first, 1))(g, x))(g, x)

    assert "NonZero" not in ops(check_decode(make_decoder(Decoder(after=after)), tmp_path).model)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "found",
    [
        ones(by_axis(0)),
        ones(by_axis(1)),
        ones(below(13, by_axis(0))),
        ones(below(2 * CAPACITY, by_axis(0))),
        ones(below(CAPACITY - 3, by_axis(1))),
        lambda g, _: g.tokens,
        lambda g, _: g.position_ids,
        lambda g, _: g.padding,
        lambda g, _: g.node("RandomUniform", [], shape=[4], seed=1.0),
    ],
    ids=[
        "batch",
        "update",
        "a large batch",
        "a larger batch",
        "a long update",
        "tokens",
        "positions",
        "padding",
        "chance",
    ],
)
def test_indices_that_a_size_or_an_input_changes_are_refused(tmp_path: Path, found) -> None:
    """TensorRT for RTX cannot make them; TensorRT could, where no length of the past takes part."""
    model = make_decoder(Decoder(mask="padding", after=count_of(found)))
    with pytest.raises(UnsupportedModelError):
        rewritten(model, tmp_path)


@pytest.mark.parametrize("axis", [0, 1])
def test_what_stays_names_the_operator_and_what_to_do(tmp_path: Path, axis: int) -> None:
    model = make_decoder(Decoder(after=count_of(ones(by_axis(axis)))))
    with pytest.raises(UnsupportedModelError, match=r"^NonZero 'node_nonzero_\d+' gives .*mobius-onnx.*tensorrt\)"):
        rewritten(model, tmp_path)
    if not axis:  # of the batch, so that each sequence depends on who else is in it
        with pytest.raises(UnsupportedModelError, match="computes something else"):
            rewritten(model, tmp_path, target=Target.TENSORRT)
        return
    result = rewritten(model, tmp_path, target=Target.TENSORRT)
    assert "NonZero" in ops(result.model)
    verify_import(result).check()


@pytest.mark.parametrize("limit", [CAPACITY // 2, CAPACITY])
def test_indices_that_a_length_of_the_past_changes_are_refused(tmp_path: Path, limit: int) -> None:
    """Whatever the target: they would be another number in the next step."""
    model = make_decoder(Decoder(after=count_of(ones(below(limit, lambda g, _: g.all)))))
    for target in Target:
        with pytest.raises(UnsupportedModelError, match="length of the cache|NonZero|computes something else"):
            rewritten(model, tmp_path, target=target)


def test_a_limit_beyond_the_capacity_is_none(tmp_path: Path) -> None:
    """No step reaches it."""
    model = make_decoder(Decoder(after=count_of(ones(below(CAPACITY + 1, lambda g, _: g.all)))))
    assert "NonZero" not in ops(check_decode(model, tmp_path).model)


def test_an_axis_that_nothing_explains_may_be_of_any_size(tmp_path: Path) -> None:
    """As the length of an encoder's output is."""

    def after(limit: int | None) -> Change:
        def change(g: Build, x: str) -> str:
            extra = g.input("extra", FLOAT, ["batch", "extra", 16])
            size = g.size_of(extra, 1)
            size = size if limit is None else below(limit, lambda *_: size)(g, x)
            added = g.node("ReduceMean", [extra, g.constant([1])], keepdims=1)
            return g.node("Add", [count_of(ones(lambda *_: size))(g, x), added])

        return change

    for limit in (None, 7, 300):
        with pytest.raises(UnsupportedModelError, match="^NonZero "):
            rewritten(make_decoder(Decoder(after=after(limit))), tmp_path)


def test_indices_made_of_constants_go_beside_caches_that_are_canonical(tmp_path: Path) -> None:
    g = Graph()
    past = g.input("past_key_values.0.key", FLOAT, ["batch", 2, 16, 4])
    update = g.input("update", FLOAT, ["batch", 2, "S", 4])
    picked = g.node("NonZero", [g.constant([1, 0, 1], np.int64)], "picked")
    many = g.node("Cast", [g.node("ReduceSum", [picked], keepdims=0)], to=FLOAT)
    start = g.input("write_indices", INT64, ["batch"])
    scaled = g.node("Mul", [update, many])
    g.node("TensorScatter", [past, scaled, start], "present.0.key", axis=2)
    g.output("present.0.key", FLOAT, ["batch", 2, 16, 4])
    onnx.save(g.model(), tmp_path / "model.onnx")
    result = import_model(tmp_path / "model.onnx")
    assert "NonZero" not in ops(result.model)
    verify_import(result).check()


def branch(value: float, name: str) -> onnx.GraphProto:
    table = numpy_helper.from_array(np.full((1, 16), value, np.float32), f"{name}_table")
    out = helper.make_tensor_value_info(f"{name}_out", FLOAT, [1, 16])
    return helper.make_graph(
        [helper.make_node("Constant", [], [f"{name}_out"], f"{name}_made", value=table)], name, [], [out]
    )


def chosen(size: Callable[[Build, str], str], switch: int = SWITCH) -> Change:
    """As onnxruntime-genai chooses the factors of LongRoPE."""

    def after(g: Build, x: str) -> str:
        long = g.node("Greater", [size(g, x), g.constant(switch)])
        factors = g.node("If", [long], "factors", then_branch=branch(3.0, "long"), else_branch=branch(0.5, "short"))
        return g.node("Mul", [x, factors])

    return after


def keys(g: Build, x: str) -> str:
    return g.size_of(g.padding, 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [keys, lambda g, _: g.all], ids=["mask", "caches"])
@pytest.mark.parametrize("capacity", [5, SWITCH])
def test_a_branch_that_is_always_taken_is_all_that_stays(tmp_path: Path, size, capacity: int) -> None:
    """And the mask goes, which only its condition read."""
    model = make_decoder(Decoder(mask="past", after=chosen(size)))
    result = rewritten(model, tmp_path, capacity=capacity)
    assert "If" not in ops(result.model)
    assert "attention_mask" not in {value.name for value in result.model.graph.input}
    verify_import(result).check()


@pytest.mark.parametrize("size", [keys, lambda g, _: g.all], ids=["mask", "caches"])
@pytest.mark.parametrize("capacity", [SWITCH + 1, CAPACITY])
def test_a_branch_chosen_by_the_longest_sequence_is_refused(tmp_path: Path, size, capacity: int) -> None:
    model = make_decoder(Decoder(mask="past", after=chosen(size)))
    expected = rf"^If 'node_factors' chooses 'factors' .* from {SWITCH + 1} tokens on, .*LongRoPE.*at most {SWITCH}$"
    with pytest.raises(UnsupportedModelError, match=expected):
        rewritten(model, tmp_path, capacity=capacity)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_branch_chosen_by_batch_or_update_stays(tmp_path: Path, axis: int) -> None:
    model = make_decoder(Decoder(after=chosen(by_axis(axis), 2)))
    if not axis:  # of the batch, so that each sequence depends on who else is in it
        with pytest.raises(UnsupportedModelError, match="computes something else"):
            rewritten(model, tmp_path)
        return
    result = rewritten(model, tmp_path)
    assert "If" in ops(result.model)
    verify_import(result).check()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_branch_that_only_large_steps_take_stays(tmp_path: Path, axis: int) -> None:
    """In no sample it is taken."""
    model = make_decoder(Decoder(after=chosen(by_axis(axis), CAPACITY - 2)))
    if not axis:  # of the batch, so that each sequence depends on who else is in it
        with pytest.raises(UnsupportedModelError, match="computes something else"):
            rewritten(model, tmp_path)
        return
    assert "If" in ops(rewritten(model, tmp_path).model)


@pytest.mark.parametrize("limit", [18, 1000, 1 << 17])
def test_beyond_the_capacity_circular_caches_go_on(limit: int) -> None:
    """Their mask may be as long as the text."""

    def folded(limit: int) -> onnx.ModelProto | None:
        def scaled(g: Graph, past: str, new: str) -> str:
            mask = g.input("attention_mask", INT64, ["B", "total"])
            total = g.node("Gather", [g.node("Shape", [mask]), g.constant(1)], axis=0)
            found = g.node("NonZero", [g.node("Greater", [g.constant([limit]), total])])
            many = g.node("Cast", [g.node("Gather", [g.node("Shape", [found]), g.constant(1)])], to=FLOAT)
            return index_copy()(g, past, g.node("Mul", [new, many]))

        graph, model = load(update_model(scaled))
        interface = Interface(model, find_candidates(graph), None)
        return fold_fixed(Samples(Blueprint(model, {}), interface, 16))

    assert folded(1 << 40) is not None
    assert folded(limit) is None


def with_experts(model: onnx.ModelProto) -> onnx.ModelProto:
    """With an expert that some tokens take, as TorchScript writes a mixture of them, in front of the caches."""
    nodes = list(model.graph.node)
    place = next(i for i, node in enumerate(nodes) if "input_ids" in node.input and node.op_type == "Gather")
    g, name = Graph(), nodes[place].output[0]
    nodes[place].output[0] = "embedded"
    nodes[place].name = "embed"
    flat = g.node("Reshape", ["embedded", "flat"], "tokens")
    mine = g.node("Greater", [g.node("ReduceSum", [flat, "one"], "sums", keepdims=0), "zero"], "mine")
    rows = g.node("Transpose", [g.node("NonZero", [mine], "experts")], "chosen", perm=[1, 0])
    given = g.node("MatMul", [g.node("GatherND", [flat, rows], "taken"), "expert"], "given")
    added = g.node("ScatterND", [flat, rows, given], "added", reduction="add")
    g.node("Reshape", [added, g.node("Shape", ["embedded"], "size")], name)
    weight = np.random.default_rng(2).standard_normal((16, 16))
    constants = {"flat": np.array([-1, 16]), "one": np.array([1]), "zero": np.float32(0), "expert": np.float32(weight)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    del model.graph.node[:]
    model.graph.node.extend([*nodes[: place + 1], *g.nodes, *nodes[place + 1 :]])
    onnx.checker.check_model(model, full_check=True)
    return model


def test_experts_chosen_by_tokens_leave_shapes_alone(tmp_path: Path) -> None:
    model = with_experts(make_decoder(Decoder(layers=2)))
    with pytest.raises(UnsupportedModelError, match="^NonZero 'node_experts' .*mobius-onnx"):
        rewritten(model, tmp_path)
    check_decode(model, tmp_path, target=Target.TENSORRT)
