"""Probes: what is known of a tensor in one step without weights and tokens, and what is not."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import pytest
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.importer.normalize.evidence import blueprint
from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.probe import Probe

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def model() -> onnx.ModelProto:
    """Positions from a shape, a product with a weight, and a chain of both."""
    g = Graph()
    past = g.input("past", FLOAT, ["B", 2, "P", 4])
    tokens = g.input("tokens", INT64, ["B", "S"])
    flags = g.input("flags", TensorProto.BOOL, ["B"])
    length = g.node("Gather", [g.node("Shape", [past]), g.constant(2)], "length", axis=0)
    g.node("Range", [g.constant(0), length, g.constant(1)], "rows")
    g.node("Cast", ["rows"], "numbers", to=FLOAT)
    rows = g.node("Gather", ["weight", tokens], "embedded")
    g.node("Add", [rows, "numbers"], "mixed")
    g.node("Shape", ["mixed"], "mixed_shape")
    g.node("Transpose", [past], "moved", perm=[0, 2, 1, 3])
    g.node("Where", [flags, "numbers", "numbers"], "chosen")
    g.node("NonZero", [tokens], "found")
    g.node("Reshape", ["found", g.constant([-1])], "found_flat")
    g.node("NonZero", ["rows"], "counted")
    g.node("Transpose", ["counted"], "counted_rows", perm=[1, 0])
    g.node("Compress", [tokens, g.node("Less", ["rows", g.constant(2)])], "picked", axis=0)
    for op in ("ScatterElements", "ScatterND"):
        g.node(op, ["embedded", "found", "unheard"], f"filled_{op}")
    g.node("Unheard", ["rows"], "unheard", domain="some.where")
    g.node("Expand", [g.constant(1.0, np.float32), g.node("Mul", [g.node("Shape", [past]), g.constant(10**4)])], "huge")
    g.node("ReduceSum", ["rows", g.constant([5])], "failing")
    g.output("mixed", FLOAT, ["B", "S", "P"])
    made = g.model(18, ["some.where"])
    weight = onnx.helper.make_tensor("weight", FLOAT, [8, 3], np.ones((8, 3)))
    made.graph.initializer.append(weight)
    return made


@pytest.fixture
def probe() -> Probe:
    weightless = model()
    tensor = weightless.graph.initializer[-1]
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="nowhere")
    return Probe(Blueprint(weightless, {}), {"past": (2, 2, 3, 4), "tokens": (2, 5), "flags": (2,)}, {})


def test_values_follow_from_shapes(probe: Probe) -> None:
    np.testing.assert_array_equal(probe.value("rows"), [0, 1, 2])
    np.testing.assert_array_equal(probe.value("numbers"), [0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    "name", ["past", "tokens", "weight", "embedded", "mixed", "moved", "chosen", "found", "nothing"]
)
def test_weights_and_tokens_have_no_value(probe: Probe, name: str) -> None:
    assert probe.value(name) is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("past", (2, 2, 3, 4)), ("moved", (2, 3, 2, 4)), ("embedded", (2, 5, 3)), ("mixed", (2, 5, 3)),
        ("rows", (3,)), ("length", ()), ("weight", (8, 3)), ("mixed_shape", (3,)), ("counted", (1, 2)),
        ("counted_rows", (2, 1)), ("filled_ScatterElements", (2, 5, 3)), ("filled_ScatterND", (2, 5, 3)),
    ],
)  # fmt: skip
def test_shapes_are_known_of_weights_and_tokens_too(probe: Probe, name: str, shape: tuple[int, ...]) -> None:
    assert probe.shape(name) == shape


def test_a_shape_is_a_value(probe: Probe) -> None:
    np.testing.assert_array_equal(probe.value("mixed_shape"), [2, 5, 3])


@pytest.mark.parametrize("name", ["found", "found_flat", "picked", "unheard", "nothing"])
def test_shapes_that_hang_on_tokens_are_unknown(probe: Probe, name: str) -> None:
    assert probe.shape(name) is None


@pytest.mark.parametrize("name", ["unheard", "huge", "failing"])
def test_what_cannot_be_computed_is_unknown(probe: Probe, name: str) -> None:
    assert probe.value(name) is None


@pytest.mark.parametrize(("name", "kind"), [("past", FLOAT), ("tokens", INT64), ("embedded", FLOAT), ("length", INT64)])
def test_types(probe: Probe, name: str, kind: int) -> None:
    assert probe.elem_type(name) == kind


def test_a_given_value_goes_before_what_makes_it(probe: Probe) -> None:
    given = probe.given({"rows": np.array([7, 8])})
    np.testing.assert_array_equal(given.value("numbers"), [7.0, 8.0])
    assert given.shape("numbers") == (2,)
    np.testing.assert_array_equal(probe.value("numbers"), [0.0, 1.0, 2.0])


def test_numbers_in_a_cache_show_what_a_chain_does(probe: Probe) -> None:
    numbers = np.arange(48, dtype=np.float32).reshape(2, 2, 3, 4)
    np.testing.assert_array_equal(probe.given({"past": numbers}).value("moved"), numbers.transpose(0, 2, 1, 3))


def test_small_weights_inside_the_model_are_constants() -> None:
    plain = Probe(Blueprint(model(), {}), {"past": (2, 2, 3, 4), "tokens": (2, 5), "flags": (2,)}, {})
    np.testing.assert_array_equal(plain.value("weight"), np.ones((8, 3)))
    tokens = np.zeros((2, 5), np.int64)
    np.testing.assert_array_equal(plain.given({"tokens": tokens}).value("mixed"), np.tile([1.0, 2.0, 3.0], (2, 5, 1)))


def test_samples_share_no_more_than_what_is_the_same_in_each() -> None:
    """As if each had a blueprint of its own, in any order: values, shapes and types, and what is given."""
    shared, rng = Blueprint(model(), {}), np.random.default_rng(0)
    names = [*shared.producers, *shared.inputs, "weight"]
    for _ in range(40):
        batch, past, length = (int(n) for n in rng.integers(1, 4, 3))
        shapes = {"past": (batch, 2, past, 4), "tokens": (batch, length), "flags": (batch,)}
        given = {"tokens": rng.integers(0, 2, (batch, length))} if rng.random() < 0.5 else {}
        found, alone = Probe(shared, shapes, given), Probe(Blueprint(model(), {}), shapes, given)
        for name in rng.permutation(names):
            expected, value = alone.value(name), found.value(name)
            assert (found.shape(name), found.elem_type(name)) == (alone.shape(name), alone.elem_type(name)), name
            assert (value is None) == (expected is None), name
            if value is not None and expected is not None:
                assert value.dtype == expected.dtype
                np.testing.assert_array_equal(value, expected)
    assert shared.evaluated
    assert shared.inferred


def test_long_chains_do_not_recurse() -> None:
    g = Graph()
    name = g.input("x", FLOAT, ["n"])
    shape = g.node("Shape", [name])
    for _ in range(3000):
        shape = g.node("Add", [shape, g.constant([1])])
        name = g.node("Neg", [name])
    long = Probe(Blueprint(g.model(18), {}), {"x": (2,)}, {})
    np.testing.assert_array_equal(long.value(shape), [3002])
    assert long.shape(name) == (2,)


def test_what_a_constant_is_cast_like_lends_its_type_only() -> None:
    g = Graph()
    tokens = g.input("tokens", INT64, ["B"])
    g.node("CastLike", [g.constant(2.5, np.float32), g.node("Gather", ["weight", tokens], "embedded")], "like")
    g.output("like", FLOAT, [])
    made = g.model(24)
    made.graph.initializer.append(onnx.helper.make_tensor("weight", TensorProto.DOUBLE, [8, 3], np.ones((8, 3))))
    value = Probe(Blueprint(made, {}), {"tokens": (2,)}, {}).value("like")
    assert value is not None
    assert value.dtype == np.float64
    assert value == 2.5


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [
        ("RandomUniform", [], {"shape": [4]}),
        ("RandomNormal", [], {"shape": [4], "seed": 1.0}),
        ("RandomUniformLike", ["numbers"], {"dtype": FLOAT}),
        ("RandomNormalLike", ["numbers"], {"dtype": FLOAT}),
        ("Bernoulli", ["half"], {}),
        ("Multinomial", ["odds"], {}),
        ("Dropout", ["numbers", "ratio", "training"], {}),
    ],
)
def test_chance_has_no_value(op: str, inputs: list[str], attributes: dict[str, object]) -> None:
    made = model()
    given = {"half": [0.5, 0.5], "odds": [[1.0, 1.0]], "ratio": 0.5, "training": True}
    for name, value in given.items():
        array = np.asarray(value, np.bool_ if name == "training" else np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    made.graph.node.append(onnx.helper.make_node(op, inputs, ["made"], "made", **attributes))
    made.graph.node.append(onnx.helper.make_node("NonZero", ["made"], ["places"], "places"))
    probe = Probe(Blueprint(made, {}), {"past": (2, 2, 3, 4), "tokens": (2, 5), "flags": (2,)}, {})
    assert probe.value("made") is None
    assert probe.shape("places") is None


def test_dropout_that_drops_nothing_has_the_value_of_its_input() -> None:
    made = model()
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(False), "training"))
    made.graph.node.append(onnx.helper.make_node("Dropout", ["numbers", "", "training"], ["made"], "made"))
    probe = Probe(Blueprint(made, {}), {"past": (2, 2, 3, 4), "tokens": (2, 5), "flags": (2,)}, {})
    np.testing.assert_array_equal(probe.value("made"), [0.0, 1.0, 2.0])


def test_shapes_of_constants_outside_are_known() -> None:
    g = Graph()
    tensor = TensorProto(name="at", data_type=FLOAT, dims=[3, 1, 5], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="nowhere")
    g.node("Transpose", [g.node("Constant", [], value=tensor)], "moved", perm=[1, 2, 0])
    g.output("moved", FLOAT, [1, 5, 3])
    probe = Probe(Blueprint(g.model(), {}), {}, {})
    assert probe.shape("moved") == (1, 5, 3)
    assert probe.elem_type("moved") == FLOAT
    assert probe.value("moved") is None


@pytest.mark.parametrize(
    ("shape", "read"),
    [([8, 1, 300], True), ([1, 8, 1, 300], True), ([1, 2, 40, 40], True), ([64, 64], False), ([2, 64, 64], False)],
)
def test_of_large_weights_only_biases_are_read(shape: list[int], read: bool) -> None:
    g = Graph()
    g.node("Neg", ["weight"], "out")
    g.output("out", FLOAT, shape)
    made = g.model()
    weight = onnx.numpy_helper.from_array(np.ones(shape, np.float32), "weight")
    made.graph.initializer.append(TensorProto(name="weight", data_type=FLOAT, dims=shape))
    made.graph.initializer[0].data_location = TensorProto.EXTERNAL
    probe = Probe(Blueprint(made, {"weight": weight}), {}, {})
    assert (probe.value("out") is not None) is read
    assert probe.shape("out") == tuple(shape)


@pytest.mark.parametrize("name", ["length", "rows", "numbers", "mixed_shape", "moved"])
@pytest.mark.parametrize("first", ["tokens", "length", "numbers"])
def test_what_comes_before_a_given_value_is_what_it_was(probe: Probe, first: str, name: str) -> None:
    given = {first: np.array({"tokens": [[1]], "length": 9, "numbers": [7.0]}[first])}
    fresh = Probe(probe._blueprint, probe._shapes, given)
    for tensor in ("rows", "mixed", "moved"):
        probe.value(tensor), probe.shape(tensor)  # known before
    again = probe.given(given)
    assert again.shape(name) == fresh.shape(name)
    np.testing.assert_array_equal(again.value(name), fresh.value(name))  # None, too


def test_nothing_is_before_where_nodes_are_not_sorted() -> None:
    turned = model()
    nodes = list(turned.graph.node)[::-1]
    del turned.graph.node[:]
    turned.graph.node.extend(nodes)
    whole = Probe(Blueprint(turned, {}), {"past": (2, 2, 3, 4), "tokens": (2, 5)}, {})
    np.testing.assert_array_equal(whole.value("numbers"), [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(whole.given({"length": np.array(2)}).value("numbers"), [0.0, 1.0])


def test_the_same_small_values_share_what_follows(probe: Probe) -> None:
    shared = probe.shared({"length": np.array(4)})
    assert probe.shared({"length": np.array(4)}) is shared is not probe.shared({"length": np.array(5)})
    np.testing.assert_array_equal(shared.value("rows"), [0, 1, 2, 3])


GROWING = {  # each makes more of what it gets
    "doubled": lambda g, x: g.node("Concat", [x, x], axis=0),
    "with each other": lambda g, x: g.node("Reshape", [
        g.node("Mul", [g.node("Unsqueeze", [x, g.constant([0])]), g.node("Unsqueeze", [x, g.constant([1])])]),
        g.constant([-1]),
    ]),
    "padded": lambda g, x: g.node("Pad", [x, g.constant([0, 1 << 40])]),
    "repeated": lambda g, x: g.node("Tile", [x, g.constant([1 << 40])]),
    "convolved": lambda g, x: g.node("Reshape", [g.node("ConvTranspose", [
        *[g.node("Reshape", [g.node("Cast", [x], to=FLOAT), g.constant([1, 1, -1])])] * 2
    ]), g.constant([-1])]),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_what_would_take_all_memory_has_no_value(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(blueprint, "LARGEST", 1 << 20)
    g = Graph()
    x = g.node("Range", [g.constant(1), g.node("Squeeze", [g.node("Shape", [g.input("tokens", INT64, ["S"])])]),
                         g.constant(1)])  # fmt: skip
    for step in range(40):
        x = g.node("Identity", [GROWING[name](g, x)], f"grown_{step}")
    g.output(x, INT64, ["T"])
    made = Probe(Blueprint(g.model(18), {}), {"tokens": (9,)}, {})
    tracemalloc.start()
    assert made.value("grown_39") is None
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
