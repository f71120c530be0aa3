"""State that is no attention cache: what is found, what is refused, and what must not be taken for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import Graph
from hybrids import hybrid_model, write
from onnx import TensorProto

from trt_kvcache import BuildOptions, PlanOptions, build_engine, plan_model
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.normalize.idioms.states import find_states
from trt_kvcache.importer.plan import Role, Route, StateUpdate

FLOAT = TensorProto.FLOAT
PAIRS = [("past_conv.1", "present_conv.1"), ("past_recurrent.2", "present_recurrent.2")]


def found(graph: Graph, caches: Sequence[str] = ()) -> list[tuple[str, str]]:
    return [(s.past, s.present) for s in states(graph, caches)]


def states(graph: Graph, caches: Sequence[str] = ()) -> tuple[StateUpdate, ...]:
    model = onnx.shape_inference.infer_shapes(graph.model())
    return find_states(gs.import_onnx(model), set(caches))


def chain(names: Sequence[tuple[str, str]], shape: Sequence[int | str] = ("B", 4)) -> Graph:
    """Layers of one state each: ``x += past``, ``present = past * x``."""
    graph = Graph()
    x = graph.input("x", FLOAT, shape)
    for past, present in names:
        graph.input(past, FLOAT, shape)
        x = graph.node("Add", [x, past])
        graph.node("Mul", [past, x], present)
        graph.output(present, FLOAT, shape)
    return graph


@pytest.mark.parametrize("convolution", [True, False])
@pytest.mark.parametrize("batch", ["batch", 1])
def test_a_hybrid(tmp_path: Path, convolution: bool, batch: int | str) -> None:
    plan = plan_model(write(tmp_path / "m.onnx", hybrid_model(batch=batch, convolution=convolution)))
    assert [(s.past, s.present) for s in plan.states] == PAIRS
    assert [(s.dtype, s.shape) for s in plan.states] == [("float", (batch, 32, 2)), ("float", (batch, 2, 16, 16))]
    assert all("KV caches and plugins only" in s.reason for s in plan.states)
    roles = {t.name: t for t in plan.tensors}
    for name in (name for pair in PAIRS for name in pair):
        assert roles[name].role is Role.STATE
        assert roles[name].axes[0] == ("batch" if batch == "batch" else "")
        assert set(roles[name].axes[1:]) == {""}
    assert len(plan.caches) == 2
    assert {c.route for c in plan.caches} == {Route.NATIVE}


def test_an_engine(tmp_path: Path) -> None:
    """TensorRT for RTX takes it: caches in one buffer, state in two, state's rows in the profiles."""
    model = write(tmp_path / "m.onnx", hybrid_model())
    manifest = build_engine(model, tmp_path / "m.engine", build=BuildOptions(max_batch=4, max_chunk=8))
    assert manifest.aliases == {f"present.a.{part}": f"past.a.{part}" for part in ("key", "value")}
    assert manifest.double_buffered == {present: past for past, present in PAIRS}
    for profile in manifest.profiles:
        assert (profile.shapes["past_conv.1"].min, profile.shapes["past_conv.1"].max) == ((1, 32, 2), (4, 32, 2))


def test_a_fixed_batch_of_the_states_is_that_of_the_engine(tmp_path: Path) -> None:
    model = hybrid_model()
    for value in (*model.graph.input, *model.graph.output):
        if "conv" in value.name:
            value.type.tensor_type.shape.dim[0].dim_value = 1
    with pytest.raises(OptionError, match="--max-batch is 4, but the model's batch is fixed at 1"):
        build_engine(write(tmp_path / "m.onnx", model), tmp_path / "m.engine", build=BuildOptions(max_batch=4))


@pytest.mark.parametrize(
    "names",
    [
        [("past_conv.0", "present_conv.0"), ("past_conv.1", "present_conv.1")],
        [("past_key_values.0.conv_state", "present.0.conv_state"), ("past_key_values.1.x", "present.1.x")],
        [("cache_params.conv.0", "cache_params_out.conv.0"), ("cache_params.ssm.0", "cache_params_out.ssm.0")],
    ],
)
def test_pairs_by_name(names: list[tuple[str, str]]) -> None:
    assert found(chain(names)) == names


def test_names_win_over_the_order_of_outputs() -> None:
    graph = chain([("past_s.0", "present_s.0"), ("past_s.1", "present_s.1")])
    graph.outputs.reverse()
    assert found(graph) == [("past_s.0", "present_s.0"), ("past_s.1", "present_s.1")]


def replaced(name: str) -> Graph:
    """The last token, as RWKV keeps it: the next value does not depend on the one before."""
    graph = Graph()
    graph.input("x", FLOAT, ["B", 4])
    graph.input(name, FLOAT, ["B", 4])
    graph.node("Add", ["x", name], "y")
    graph.node("Neg", ["x"], "new_shift")
    for output in ("y", "new_shift"):
        graph.output(output, FLOAT, ["B", 4])
    return graph


def test_state_may_be_replaced_without_a_look_at_it() -> None:
    assert found(replaced("shift")) == [("shift", "new_shift")]
    with pytest.raises(UnsupportedModelError, match="'past_tokens' looks like state .* could become 'y', .*name them"):
        found(replaced("past_tokens"))


def test_what_nothing_reads_is_no_state() -> None:
    graph = replaced("shift")
    graph.nodes[0].input[1] = "x"
    assert found(graph) == []


def test_ambiguous_pairs_are_refused() -> None:
    """Two states of which each makes both outputs, and names that say nothing."""
    graph = Graph()
    for name in ("state_a", "state_b"):
        graph.input(name, FLOAT, ["B", 4])
    both = graph.node("Add", ["state_a", "state_b"])
    for name in ("u", "w"):
        graph.node("Tanh" if name == "u" else "Sin", [both], name)
        graph.output(name, FLOAT, ["B", 4])
    with pytest.raises(UnsupportedModelError, match="'state_a' looks like state .* could become 'u' or 'w'.*name them"):
        found(graph)


def test_one_output_for_two_inputs_is_refused() -> None:
    graph = Graph()
    for name in ("state_a", "state_b"):
        graph.input(name, FLOAT, ["B", 4])
    graph.node("Add", ["state_a", "state_b"], "u")
    graph.output("u", FLOAT, ["B", 4])
    with pytest.raises(UnsupportedModelError, match="'state_a' .* could become 'u', of the same shape"):
        found(graph)


def _scatter(g: Graph) -> None:
    g.input("rows", TensorProto.INT64, ["B", 2, 1, 4])
    g.node("ScatterElements", ["past", "rows", "new"], "present", axis=2)


def _rolling(g: Graph) -> None:
    rows = g.node("Concat", ["past", "new"], axis=2)
    g.node("Slice", [rows, g.constant([-8]), g.constant([99]), g.constant([2])], "present")
    g.node("MatMul", ["q", g.node("Transpose", ["present"], perm=[0, 1, 3, 2])], "y")


def _one_hot(g: Graph) -> None:
    g.input("keep", FLOAT, ["B", 1, 8, 1])
    g.node("Add", [g.node("Mul", ["past", "keep"]), "new"], "present")
    scores = g.node("MatMul", ["q", g.node("Transpose", ["present"], perm=[0, 1, 3, 2])])
    g.node("Softmax", [g.node("Mul", [scores, g.constant(0.5, np.float32)])], "y")


def _attention(g: Graph) -> None:
    g.node("Attention", ["q", "past", "past"], "y")
    g.node("Add", ["past", "new"], "present")


def _unchanged(g: Graph) -> None:
    g.node("Identity", ["past"], "present")


def _unread(g: Graph) -> None:
    g.node("Expand", ["new", g.constant([1, 2, 8, 4])], "present")


@pytest.mark.parametrize("write_", [_scatter, _rolling, _one_hot, _attention, _unchanged, _unread])
def test_attention_caches_are_no_state(write_: Callable[[Graph], None]) -> None:
    graph = Graph()
    shape = ["B", 2, 8, 4]
    graph.input("past", FLOAT, shape)
    graph.input("new", FLOAT, ["B", 2, 1, 4])
    graph.input("q", FLOAT, ["B", 2, 1, 4])
    write_(graph)
    graph.output("present", FLOAT, shape)
    assert found(graph) == []


def test_what_a_product_without_softmax_reads_is_state() -> None:
    """The same as a cache written by one-hot vectors, but for the Softmax: linear attention."""
    graph = Graph()
    graph.input("past_kv", FLOAT, ["B", 2, 4, 4])
    graph.input("new", FLOAT, ["B", 2, 4, 4])
    graph.input("q", FLOAT, ["B", 2, 1, 4])
    graph.node("Add", [graph.node("Mul", ["past_kv", graph.constant(0.5, np.float32)]), "new"], "present_kv")
    graph.node("MatMul", ["q", "present_kv"], "y")
    graph.output("present_kv", FLOAT, ["B", 2, 4, 4])
    assert found(graph) == [("past_kv", "present_kv")]


@pytest.mark.parametrize(
    ("past", "present", "dtype", "shape", "out"),
    [
        ("inputs_embeds", "hidden_out", FLOAT, ["B", 1, 4], ["B", 1, 4]),  # names that do not speak of state
        ("past_x", "present_x", TensorProto.INT64, ["B", 4], ["B", 4]),  # a count
        ("past_x", "present_x", FLOAT, ["B", "P"], ["B", "P"]),  # grows
        ("past_x", "present_x", FLOAT, ["B"], ["B"]),
        ("past_x", "present_x", FLOAT, ["B", 4], [2, 4]) ,  # another batch
    ],
)  # fmt: skip
def test_other_tensors_are_no_state(
    past: str, present: str, dtype: int, shape: list[int | str], out: list[int]
) -> None:
    graph = Graph()
    graph.input(past, dtype, shape)
    graph.node("Add", [past, past], present)
    graph.output(present, dtype, out if out != [2, 4] else shape)
    if out == [2, 4]:
        graph.inputs[0].type.tensor_type.shape.dim[0].dim_value = 3
        graph.outputs[0].type.tensor_type.shape.dim[0].dim_value = 2
        assert find_states(gs.import_onnx(graph.model()), set()) == ()
        return
    assert found(graph) == []


def test_caches_are_left_alone() -> None:
    assert found(chain([("past_a", "present_a"), ("past_b", "present_b")]), ["past_a", "present_a"]) == [
        ("past_b", "present_b")
    ]


def test_a_config_cannot_name_state(tmp_path: Path) -> None:
    config = tmp_path / "roles.yaml"
    config.write_text("roles: {other: past_conv.1}")
    model = write(tmp_path / "m.onnx", hybrid_model())
    with pytest.raises(OptionError, match=r"gives the role 'other' to 'past_conv.1', which is state that each step"):
        plan_model(model, PlanOptions(config=str(config)))
    config.write_text("roles: {state: past_conv.1}")
    with pytest.raises(OptionError, match="role 'state': states are found in the graph, not by name"):
        plan_model(model, PlanOptions(config=str(config)))
