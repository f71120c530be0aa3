"""GroupQueryAttention against its canonical form, over decodes on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
import pytest
from graphs import Graph
from held_models import (
    CAPACITY,
    TYPES,
    Layer,
    attention_attrs,
    cache_inputs,
    check_decode,
    finish,
    mask_feeds,
    mask_lengths,
    normalized,
    op_types,
    projected,
    session,
    windows_as_masks,
)
from onnx import TensorProto, helper

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.normalize.fused import gqa
from trt_kvcache.importer.normalize.fused.contrib import CONTRIB
from trt_kvcache.importer.plan import PlanOptions, Route
from trt_kvcache.verify import VerifyReport, verify_model

HEADS, KV_HEADS, SIZE, WIDTH = 4, 2, 32, 48
CHUNKS = [5, 1, 1, 4, 1, 3]  # of one sequence: ONNX Runtime takes chunks behind a past for one row only


def layer(
    dtype: Any = np.float32,
    packed: bool = True,
    rotary: int = 0,
    norm: bool = False,
    positions: str = "",
    cache_dim: int | str = "kv_cache_dim",
    extra: dict[int, str] | None = None,
    outputs: int = 3,
    seqlens: str = "",
    total: str = "",
    graph: Graph | None = None,
    **attrs: Any,
) -> Layer:
    """One GroupQueryAttention; `rotary` is the width of the rotated part, 0 for none."""
    graph = graph or Graph()
    code = TYPES[dtype]
    graph.input("x", code, ["B", "S", WIDTH])
    q, k = HEADS * SIZE, KV_HEADS * SIZE
    if packed:
        inputs = [*projected(graph, dtype, WIDTH, {"qkv": q + 2 * k}), "", ""]
    else:
        inputs = projected(graph, dtype, WIDTH, {"q": q, "k": k, "v": k})
    cache_inputs(graph, code, KV_HEADS, cache_dim, cache_dim)
    lengths = mask_lengths(graph) if not seqlens else (seqlens, total)
    inputs += ["past_k", "past_v", *lengths]
    if rotary:
        angles = np.outer(np.arange(CAPACITY), 0.5 ** np.arange(rotary // 2))
        inputs += [graph.constant(np.cos(angles), dtype), graph.constant(np.sin(angles), dtype)]
        attrs["do_rotary"] = 1
    given = dict(extra or {})
    if positions:
        given[9] = graph.input(positions, TensorProto.INT64, ["B", "S"])
    if norm:
        rng = np.random.default_rng(2)
        given |= {index: graph.constant(rng.standard_normal(SIZE), dtype) for index in (14, 15)}
    for index in range(len(inputs), max(given, default=0) + 1):
        inputs.append(given.get(index, ""))
    names = ["y", "present_k", "present_v", "qk"][:outputs]
    graph.node("GroupQueryAttention", inputs, names, domain=CONTRIB, num_heads=HEADS, kv_num_heads=KV_HEADS, **attrs)
    graph.output("y", code, ["B", "S", q])
    if outputs > 3:
        graph.output("qk", code, ["B", HEADS, "S", "T"])
    return Layer(finish(graph), dtype, KV_HEADS, SIZE, SIZE, WIDTH, mask_feeds)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rotary", [0, SIZE, SIZE // 2])
def test_decode(dtype: Any, packed: bool, rotary: int) -> None:
    check_decode(layer(dtype, packed, rotary), CHUNKS, batch=1)
    check_decode(layer(dtype, packed, rotary), [5, 1, 1, 1], batch=3)


@pytest.mark.parametrize(
    "attrs",
    [
        {"rotary": SIZE, "rotary_interleaved": 1},
        {"scale": 0.3},
        {"scale": 0.0},
        {"softcap": 1.5},
        {"causal": 0},
        {"packed": False, "rotary": SIZE, "rotary_interleaved": 1, "softcap": 2.0, "scale": 0.5},
    ],
    ids=str,
)
def test_options(attrs: dict[str, Any]) -> None:
    check_decode(layer(**attrs), CHUNKS, batch=1)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100])
def test_a_window_holds_the_query_itself(window: int) -> None:
    """ONNX Runtime has no windows in Attention, so that the model is compared with the operator page's own words."""
    case = layer(local_window_size=window, rotary=SIZE)
    result = normalized(case.model)
    assert attention_attrs(result)["left_window_size"] == window - 1
    assert next(o.version for o in result.opset_import if not o.domain) == 25
    masked = windows_as_masks(result)
    check_decode(case, CHUNKS, batch=1, result=masked)


@pytest.mark.parametrize("rows", [4, 9, CAPACITY])
def test_a_cache_of_a_window_becomes_linear(rows: int) -> None:
    """The operator's own buffers drop old rows; attention is that of a linear cache all the same."""
    case = layer(local_window_size=4, sliding_window_cache=1, rotary=SIZE)
    result = windows_as_masks(normalized(case.model))
    before, after = session(case.model), session(result)
    rng = np.random.default_rng(3)
    buffers = [np.full((1, KV_HEADS, rows, SIZE), 7, np.float32) for _ in "kv"]
    caches = [np.full((1, KV_HEADS, CAPACITY, SIZE), 7, np.float32) for _ in "kv"]
    past = 0
    for new in (3, 1, 1, 4, 1, 2, 1, 1, 4, 1, 1):
        x = rng.standard_normal((1, new, WIDTH), np.float32)
        feeds = {"x": x, "past_k": buffers[0], "past_v": buffers[1], **mask_feeds(1, past, new)}
        y, *buffers = before.run(["y", "present_k", "present_v"], feeds)
        feeds = {"x": x, "past_k": caches[0], "past_v": caches[1],
                 "write_indices": np.array([past]), "nonpad_kv_seqlen": np.array([past + new])}  # fmt: skip
        got, *caches = after.run(["y", "present_k", "present_v"], feeds)
        np.testing.assert_allclose(got, y, rtol=1e-4, atol=1e-4)
        past += new


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "attrs",
    [
        {"sinks": True},
        {"smooth_softmax": 1},
        {"sinks": True, "smooth_softmax": 1},
        {"smooth_softmax": -1},
        {"sinks": True, "softcap": 1.5, "rotary": SIZE},
        {"sinks": True, "local_window_size": 3},
        {"smooth_softmax": 1, "scale": 0.7, "packed": False},
    ],
    ids=str,
)
def test_sinks(tmp_path: Path, dtype: Any, attrs: dict[str, Any]) -> None:
    """By ONNX Runtime's own kernel, head_sink counts in any case, and smooth_softmax=1 without it is a sink of 0."""
    graph = Graph()
    options = {name: value for name, value in attrs.items() if name != "sinks"}
    if "sinks" in attrs:
        options["extra"] = {11: graph.constant(np.array([0.5, -1.0, 2.0, 20.0]), dtype)}
    case = layer(dtype, graph=graph, **options)
    result = harness.imported(case.model, tmp_path, PlanOptions(capacity=CAPACITY))
    assert (result.plan.attention[0].reason == "attention sinks") == (attrs != {"smooth_softmax": -1})
    check_decode(case, CHUNKS, 1, result.model)
    check_decode(case, [5, 1, 1, 1], 3, result.model)


def test_norm_weights() -> None:
    """ONNX Runtime's CPU kernel refuses them: the reference normalizes each head before the operator."""
    case = layer(np.float32, packed=False, rotary=SIZE, norm=True, qk_norm_epsilon=1e-3)
    reference = onnx.ModelProto.FromString(case.model.SerializeToString())
    node = next(n for n in reference.graph.node if n.op_type == "GroupQueryAttention")
    weights = list(node.input[14:16])
    del node.input[9:]
    index = list(reference.graph.node).index(node)
    reference.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 0, -1, SIZE]), "n_heads"))
    reference.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 0, -1]), "n_flat"))
    for position, weight in enumerate(weights):
        name = node.input[position]
        for extra in (
            helper.make_node("Reshape", [name, "n_heads"], [f"{name}_split"]),
            helper.make_node("SimplifiedLayerNormalization", [f"{name}_split", weight], [f"{name}_n"], epsilon=1e-3),
            helper.make_node("Reshape", [f"{name}_n", "n_flat"], [f"{name}_normed"]),
        ):
            reference.graph.node.insert(index, extra)
            index += 1
        node.input[position] = f"{name}_normed"
    check_decode(
        Layer(reference, np.float32, KV_HEADS, SIZE, SIZE, WIDTH, mask_feeds), CHUNKS, 1, normalized(case.model)
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("options", [{"rotary": SIZE}, {"rotary": SIZE // 2, "qk_norm_epsilon": 0.5}], ids=str)
def test_norm_weights_are_verified(dtype: Any, packed: bool, options: dict[str, Any], tmp_path: Path) -> None:
    report = _verified(layer(dtype, packed=packed, norm=True, **options), tmp_path)
    report.check()
    assert any("norms of queries and keys, which ONNX Runtime refuses on the CPU" in note for note in report.notes)
    assert not any("masks without" in note for note in report.notes)


def test_norms_that_are_lost_or_swapped_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = layer(norm=True, rotary=SIZE)
    normed = gqa._normalized
    monkeypatch.setattr(gqa, "_normalized", lambda canonical, node, heads: heads)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        _verified(case, tmp_path)

    def swapped(canonical: Any, node: Any, heads: Any) -> Any:
        node.inputs[14], node.inputs[15] = node.inputs[15], node.inputs[14]
        return normed(canonical, node, heads)

    monkeypatch.setattr(gqa, "_normalized", swapped)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        _verified(case, tmp_path)


def _verified(case: Layer, folder: Path) -> VerifyReport:
    onnx.save(case.model, folder / "model.onnx")
    return verify_model(folder / "model.onnx", PlanOptions(capacity=CAPACITY))


def test_position_ids_of_the_caller_stay() -> None:
    case = layer(rotary=SIZE, positions="position_ids")
    case.feeds = lambda batch, past, new: (
        mask_feeds(batch, past, new) | {"position_ids": np.broadcast_to(past + np.arange(new), (batch, new)).copy()}
    )
    result = normalized(case.model)
    assert "position_ids" in {i.name for i in result.graph.input}
    check_decode(case, CHUNKS, 1, result)


def test_lengths_that_are_inputs_go_away() -> None:
    graph = Graph()
    graph.input("seqlens_k", TensorProto.INT32, ["B"])
    graph.input("total_sequence_length", TensorProto.INT32, [])
    case = layer(rotary=SIZE, seqlens="seqlens_k", total="total_sequence_length", graph=graph)
    case.feeds = lambda batch, past, new: {
        "seqlens_k": np.full(batch, past + new - 1, np.int32),
        "total_sequence_length": np.array(past + new, np.int32),
    }
    result = normalized(case.model)
    assert [i.name for i in result.graph.input] == ["x", "past_k", "past_v", "write_indices", "nonpad_kv_seqlen"]
    check_decode(case, CHUNKS, 1, result)


def test_canonical_form() -> None:
    result = normalized(layer(rotary=SIZE).model)
    ops = op_types(result)
    assert ops.count("TensorScatter") == 2
    assert ops.count("Attention") == 1
    assert ops.count("RotaryEmbedding") == 2
    assert "GroupQueryAttention" not in ops
    assert [i.name for i in result.graph.input] == ["x", "past_k", "past_v", "write_indices", "nonpad_kv_seqlen"]
    for value in (result.graph.input[1], result.graph.output[0]):
        assert [d.dim_value for d in value.type.tensor_type.shape.dim][1:] == [KV_HEADS, CAPACITY, SIZE]
    assert attention_attrs(result) == {"is_causal": 1, "scale": pytest.approx(SIZE**-0.5)}


def test_head_size_from_the_cache_where_projections_have_no_shape() -> None:
    case = layer(cache_dim=SIZE, rotary=SIZE)
    node = next(n for n in case.model.graph.node if n.op_type == "MatMul")
    node.op_type, node.domain = "FusedMatMul", CONTRIB  # ONNX infers no shape for it
    check_decode(case, CHUNKS, batch=1)


def test_a_mask_beside_the_lengths_is_taken_for_what_it_is() -> None:
    graph = Graph()
    bias = window_bias(graph, 4)
    case = layer(extra={10: bias}, graph=graph, rotary=SIZE)
    result = normalized(case.model)
    assert attention_attrs(result)["left_window_size"] == 3
    check_decode(case, CHUNKS, 1, windows_as_masks(result))


@pytest.mark.parametrize(("own", "left"), [(-1, 3), (9, 3), (2, 1)])
def test_a_mask_that_leaves_the_keys_behind_the_query_to_the_operator(own: int, left: int) -> None:
    graph = Graph()
    bias = window_bias(graph, 4, both=False)
    case = layer(extra={10: bias}, graph=graph, rotary=SIZE, local_window_size=own)
    result = normalized(case.model)
    assert attention_attrs(result)["left_window_size"] == left
    check_decode(case, CHUNKS, 1, windows_as_masks(result))


def window_bias(graph: Graph, window: int, value: float = -1e9, *, both: bool = True) -> str:
    """A bias that hides all but so many keys up to the query's own, from the lengths of x and of attention_mask.

    `both`: and those behind it.
    """
    total = graph.node("Gather", [graph.node("Shape", ["attention_mask"]), graph.constant(1)])
    new = graph.node("Gather", [graph.node("Shape", ["x"]), graph.constant(1)])
    keys = graph.node("Range", [graph.constant(0), total, graph.constant(1)])
    rows = graph.node("Unsqueeze", [graph.node("Range", [graph.node("Sub", [total, new]), total, graph.constant(1)]),
                                    graph.constant([1])])  # fmt: skip
    near = graph.node("Greater", [keys, graph.node("Sub", [rows, graph.constant(window)])])
    past = graph.node("LessOrEqual", [keys, rows])
    shown = graph.node("And", [near, past]) if both else near
    floats = [graph.constant(0.0, np.float32), graph.constant(value, np.float32)]
    return graph.node("Unsqueeze", [graph.node("Where", [shown, *floats]), graph.constant([0, 1])])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra": {11: "sink"}}, "a weight with one logit for each of its heads"),
        ({"extra": {11: "one_sink"}}, "a weight with one logit for each of its heads"),
        ({"k_quant_type": "PER_TENSOR"}, "has quantized caches"),
        ({"outputs": 4, "qk_output": 1}, "gives its scores as an output"),
        (
            {"seqlens": "total_minus_two", "total": "total"},
            "seqlens_k 'total_minus_two' of GroupQueryAttention 'node_y' is",
        ),
        ({"seqlens": "seqlens_k", "total": "total_plus"}, "total_sequence_length 'total_plus'"),
        ({"extra": {10: "odd_bias"}}, "position bias"),
        ({"extra": {9: "odd_positions"}, "rotary": SIZE}, "do not count on from the tokens in the cache"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    graph = Graph()
    names = {*options.get("extra", {}).values(), options.get("seqlens", ""), options.get("total", "")}
    if "sink" in names:
        graph.input("sink", TensorProto.FLOAT, [HEADS])
    if "one_sink" in names:
        graph.initializers.append(onnx.numpy_helper.from_array(np.zeros(1, np.float32), "one_sink"))
    if names & {"total_minus_two", "total_plus"}:
        seqlens, total = mask_lengths(graph)
        two = graph.constant(1, np.int32)
        graph.node("Sub", [seqlens, two], "total_minus_two")
        graph.node("Add", [total, two], "total_plus")
    if "odd_bias" in names:
        window_bias(graph, 4, value=-2.0)
        graph.node("Identity", [graph.nodes[-1].output[0]], "odd_bias")
    if "odd_positions" in names:
        graph.node("Shape", ["x"], "shape_x")
        two = graph.node("Slice", ["shape_x", graph.constant([0]), graph.constant([2])])
        graph.node("ConstantOfShape", [two], "odd_positions", value=helper.make_tensor("", TensorProto.INT64, [1], [3]))
    with pytest.raises(UnsupportedModelError, match=words):
        normalized(layer(graph=graph, **options).model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local_window_size": 0}, "local_window_size=0"),
        ({"local_window_size": 4, "causal": 0}, "local_window_size=4, causal=0"),
        ({"sliding_window_cache": 1}, "local_window_size=-1, causal=1 and sliding_window_cache=1"),
        ({"do_rotary": 1}, "no cos_cache or sin_cache"),
        ({"cache_dim": 16}, "has size 16 on axis 3"),
    ],
    ids=str,
)
def test_contradictions(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidModelError, match=words):
        normalized(layer(**options).model)


def test_no_past() -> None:
    case = layer()
    node = next(n for n in case.model.graph.node if n.op_type == "GroupQueryAttention")
    node.input[3] = node.input[4] = ""
    with pytest.raises(UnsupportedModelError, match="has no past_key and past_value"):
        normalized(case.model)


@pytest.mark.parametrize("missing", [3, 4])
def test_one_past_only(missing: int) -> None:
    case = layer()
    next(n for n in case.model.graph.node if n.op_type == "GroupQueryAttention").input[missing] = ""
    with pytest.raises(InvalidModelError, match="has only one of past_key and past_value"):
        normalized(case.model)


def test_a_past_used_twice() -> None:
    case = layer()
    case.model.graph.node.append(helper.make_node("Identity", ["past_k"], ["copy"], name="copy_it"))
    case.model.graph.output.append(helper.make_tensor_value_info("copy", TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedModelError, match="the cache 'past_k' of GroupQueryAttention 'node_y' is read by"):
        normalized(case.model)


def test_a_write_that_is_lost() -> None:
    case = layer()
    kept = [o for o in case.model.graph.output if o.name != "present_v"]
    del case.model.graph.output[:]
    case.model.graph.output.extend(kept)
    with pytest.raises(UnsupportedModelError, match="the cache 'past_v' of .* has no graph output"):
        normalized(case.model)


def test_original_of_the_reference_runs() -> None:
    """ONNX Runtime takes what the tests compare with; else nothing above would be compared."""
    assert {o.name for o in session(layer(rotary=SIZE).model).get_outputs()} == {"y", "present_k", "present_v"}


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "options",
    [
        {"rotary": SIZE},
        {"rotary": SIZE // 2, "rotary_interleaved": 1, "norm": True},
        {"local_window_size": 4},
        {"softcap": 2.0},
        {"smooth_softmax": 1, "local_window_size": 4},
    ],
    ids=str,
)
def test_builds_with_one_cache_layer_each(dtype: Any, options: dict[str, Any], tmp_path: Path) -> None:
    result = harness.imported(layer(dtype, **options).model, tmp_path, PlanOptions(capacity=CAPACITY))
    assert [(c.route, c.idiom) for c in result.plan.caches] == [(Route.NATIVE, "GroupQueryAttention")] * 2
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words
