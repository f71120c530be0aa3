"""Operators that hold a cache against their canonical form, over decodes on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
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

from trt_kvcache.errors import TrtKvCacheError, UnsupportedModelError
from trt_kvcache.importer.lower import CONTRIB, attention
from trt_kvcache.importer.plan import PlanOptions, Route
from trt_kvcache.verify import VerifyReport, verify_model

HEADS, KV_HEADS, SIZE, WIDTH = 4, 2, 32, 48
CHUNKS = [5, 1, 1, 4, 1, 3]  # of one sequence: ONNX Runtime takes chunks after a past for one row only


def padding(graph: Graph, dtype: Any) -> str:
    """mobius: attention_mask as bool [B, 1, S, T]."""
    shown = graph.node("Cast", ["attention_mask"], to=TensorProto.BOOL)
    ones = [graph.node("Shape", ["x"], start=0, end=2), graph.node("Shape", ["attention_mask"], start=1)]
    shape = graph.node("Concat", ones, axis=0)
    expanded = graph.node("Expand", [graph.node("Unsqueeze", [shown, graph.constant([1])]), shape])
    return graph.node("Unsqueeze", [expanded, graph.constant([1])])


def compared(
    graph: Graph, compare: Callable[[Graph, str, str], str], added: Any = None, value: float | None = None
) -> str:
    """A mask by a comparison of positions of keys and queries; with `added`, a type, as numbers added to scores."""
    total = graph.node("Squeeze", [graph.node("Shape", ["attention_mask"], start=1)])
    new = graph.node("Squeeze", [graph.node("Shape", ["x"], start=1, end=2)])
    keys = graph.node("Range", [graph.constant(0), total, graph.constant(1)])
    queries = graph.node("Range", [graph.node("Sub", [total, new]), total, graph.constant(1)])
    shown = compare(graph, keys, graph.node("Unsqueeze", [queries, graph.constant([1])]))
    if added is not None:
        low = np.finfo(added).min if value is None else value
        shown = graph.node("Where", [shown, graph.constant(0, added), graph.constant(low, added)])
    return graph.node("Unsqueeze", [shown, graph.constant([0, 1])])


def before(graph: Graph, keys: str, queries: str) -> str:
    return graph.node("LessOrEqual", [keys, queries])


def near(graph: Graph, keys: str, queries: str) -> str:
    """Keys of a window of three, and those after the query, which are left to the operator."""
    return graph.node("Less", [graph.node("Sub", [queries, keys]), graph.constant(3)])


def in_window(graph: Graph, keys: str, queries: str) -> str:
    return graph.node("And", [near(graph, keys, queries), before(graph, keys, queries)])


def third(graph: Graph, keys: str, queries: str) -> str:
    """Every third key."""
    shown = graph.node("Equal", [graph.node("Mod", [keys, graph.constant(3)]), graph.constant(0)])
    return graph.node("And", [shown, graph.node("GreaterOrEqual", [queries, graph.constant([[0]])])])


MASKS: dict[str, Callable[[Graph, Any], str]] = {
    "padding": padding,
    "causal": lambda graph, dtype: compared(graph, before),
    "causal, added": lambda graph, dtype: compared(graph, before, dtype),
    "window": lambda graph, dtype: compared(graph, in_window),
    "window, added": lambda graph, dtype: compared(graph, in_window, dtype),
    "near": lambda graph, dtype: compared(graph, near),
    "near, added": lambda graph, dtype: compared(graph, near, dtype),
    "third": lambda graph, dtype: compared(graph, third),
    "bias": lambda graph, dtype: compared(graph, in_window, dtype, -2.0),
    "short": lambda graph, dtype: graph.node(
        "Slice", [compared(graph, before), *(graph.constant([n]) for n in (0, 1, 3))]
    ),
}


def grouped(
    dtype: Any = np.float32,
    packed: bool = True,
    rotary: int = 0,
    norm: bool = False,
    positions: str = "",
    cache_dim: int | str = "kv_cache_dim",
    extra: dict[int, str] | None = None,
    mask: str = "",
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
    inputs += ["past_k", "past_v", *mask_lengths(graph)]
    if rotary:
        angles = np.outer(np.arange(CAPACITY), 0.5 ** np.arange(rotary // 2))
        inputs += [graph.constant(np.cos(angles), dtype), graph.constant(np.sin(angles), dtype)]
        attrs["do_rotary"] = 1
    given = dict(extra or {}) | ({10: MASKS[mask](graph, dtype)} if mask else {})
    if positions:
        given[9] = graph.input(positions, TensorProto.INT64, ["B", "S"])
    if norm:
        rng = np.random.default_rng(2)
        given |= {index: graph.constant(rng.standard_normal(SIZE), dtype) for index in (14, 15)}
    for index in range(len(inputs), max(given, default=0) + 1):
        inputs.append(given.get(index, ""))
    names = ["y", "present_k", "present_v"]
    graph.node("GroupQueryAttention", inputs, names, domain=CONTRIB, num_heads=HEADS, kv_num_heads=KV_HEADS, **attrs)
    graph.output("y", code, ["B", "S", q])
    return Layer(finish(graph), dtype, KV_HEADS, SIZE, SIZE, WIDTH, mask_feeds)


def multi(
    dtype: Any = np.float32,
    bias: bool = False,
    padding: bool = False,
    score_bias: str = "",
    **attrs: Any,
) -> Layer:
    graph = Graph()
    code = TYPES[dtype]
    graph.input("x", code, ["B", "S", WIDTH])
    inputs = projected(graph, dtype, WIDTH, dict.fromkeys(("q", "k", "v"), HEADS * SIZE))
    cache_inputs(graph, code, HEADS, "head_size", "head_size")
    graph.input("attention_mask", TensorProto.INT64, ["B", "T"])
    own = np.random.default_rng(4).standard_normal(3 * HEADS * SIZE)
    inputs.append(graph.constant(own, dtype) if bias else "")
    mask = graph.node("Cast", ["attention_mask"], to=TensorProto.INT32)
    inputs += [mask if padding else "", MASKS[score_bias](graph, dtype) if score_bias else "", "past_k", "past_v"]
    names = ["y", "present_k", "present_v"]
    graph.node("MultiHeadAttention", inputs, names, domain=CONTRIB, num_heads=HEADS, **attrs)
    graph.output("y", code, ["B", "S", HEADS * SIZE])
    return Layer(finish(graph, 20), dtype, HEADS, SIZE, SIZE, WIDTH, mask_feeds)


def of_onnx(
    dtype: Any = np.float32,
    rank: int = 3,
    value_size: int = SIZE,
    mask: str = "",
    opset: int = 24,
    **attrs: Any,
) -> Layer:
    """One Attention with a past; `mask` names a maker below."""
    graph = Graph()
    code = TYPES[dtype]
    graph.input("x", code, ["B", "S", WIDTH])
    sizes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * value_size}
    inputs = projected(graph, dtype, WIDTH, sizes)
    if rank == 4:
        for i, (heads, size) in enumerate(((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size))):
            split = graph.node("Reshape", [inputs[i], graph.constant([0, 0, heads, size])])
            inputs[i] = graph.node("Transpose", [split], perm=[0, 2, 1, 3])
    else:
        attrs |= {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}
    cache_inputs(graph, code, KV_HEADS, SIZE, value_size)
    graph.input("attention_mask", TensorProto.INT64, ["B", "T"])
    inputs += [MASKS[mask](graph, dtype) if mask else "", "past_k", "past_v"]
    names = ["attended", "present_k", "present_v"]
    graph.node("Attention", inputs, names, **attrs)
    y = "attended"
    if rank == 4:
        rows = graph.node("Transpose", [y], perm=[0, 2, 1, 3])
        y = graph.node("Reshape", [rows, graph.constant([0, 0, HEADS * value_size])])
    graph.node("Identity", [y], "y")
    graph.output("y", code, ["B", "S", HEADS * value_size])
    return Layer(finish(graph, opset), dtype, KV_HEADS, SIZE, value_size, WIDTH, mask_feeds)


GROUPED: list[dict[str, Any]] = [
    *({"dtype": t, "packed": p, "rotary": r} for t in TYPES for p in (True, False) for r in (0, SIZE, SIZE // 2)),
    {"rotary": SIZE, "rotary_interleaved": 1}, {"scale": 0.3}, {"scale": 0.0}, {"softcap": 1.5}, {"causal": 0},
    {"packed": False, "rotary": SIZE, "rotary_interleaved": 1, "softcap": 2.0, "scale": 0.5},
    *({"rotary": SIZE, "local_window_size": n} for n in (1, 2, 7, 100)), {"rotary": SIZE, "mask": "window, added"},
    *({"rotary": SIZE, "local_window_size": n, "mask": "near, added"} for n in (9, 2)), {"cache_dim": SIZE},
]  # fmt: skip
MULTI: list[dict[str, Any]] = [
    *({"dtype": t, "bias": b, "unidirectional": u} for t in TYPES for b in (False, True) for u in (0, 1)),
    {"padding": True, "unidirectional": 1}, {"padding": True}, {"score_bias": "causal, added"},
    {"score_bias": "causal, added", "dtype": np.float16, "padding": True, "bias": True},
    {"scale": 0.3, "unidirectional": 1}, {"score_bias": "near, added", "unidirectional": 1},
]  # fmt: skip
OF_ONNX: list[dict[str, Any]] = [
    *({"dtype": t, "rank": r, "opset": v, "is_causal": 1} for t in TYPES for r in (3, 4) for v in (23, 24, 25)),
    *({"is_causal": c, "mask": "padding"} for c in (0, 1)), *({"is_causal": c, "mask": "causal"} for c in (0, 1)),
    {"is_causal": 0}, {"is_causal": 0, "mask": "causal, added"}, {"is_causal": 1, "scale": 0.4, "softcap": 1.5},
    {"is_causal": 1, "softmax_precision": 1}, *({"is_causal": 1, "value_size": 8, "rank": r} for r in (3, 4)),
    {"is_causal": 1, "mask": "window"}, {"is_causal": 1, "mask": "near"}, {"is_causal": 1, "mask": "near, added"},
]  # fmt: skip
CASES = [
    pytest.param(make, options, id=f"{make.__name__} {options}")
    for make, cases in ((grouped, GROUPED), (multi, MULTI), (of_onnx, OF_ONNX))
    for options in cases
]


@pytest.mark.few(30)
@pytest.mark.parametrize(("make", "options"), CASES)
def test_decode(make: Callable[..., Layer], options: dict[str, Any]) -> None:
    case = make(**options)
    result = normalized(case.model)
    ops = op_types(result)
    assert (ops.count("TensorScatter"), ops.count("Attention")) == (2, 1)
    assert {"write_indices", "nonpad_kv_seqlen"} <= {i.name for i in result.graph.input}
    if "left_window_size" in attention_attrs(result):  # ONNX Runtime has none: as its page says it
        result = windows_as_masks(result)
    check_decode(case, CHUNKS, 1, result)
    if make is not grouped:
        check_decode(case, CHUNKS, 2, result)


@pytest.mark.parametrize(
    ("case", "attrs"),
    [
        (lambda: grouped(local_window_size=7), {"is_causal": 1, "left_window_size": 6}),
        (lambda: grouped(local_window_size=9, mask="near, added"), {"is_causal": 1, "left_window_size": 2}),
        (lambda: multi(score_bias="near, added", unidirectional=1), {"is_causal": 1, "left_window_size": 2}),
        (lambda: of_onnx(is_causal=0, mask="causal"), {"is_causal": 1}),
        (lambda: of_onnx(is_causal=1, mask="window"), {"is_causal": 1, "left_window_size": 2}),
        (lambda: of_onnx(opset=25, is_causal=1, left_window_size=2, mask="padding"), {"left_window_size": 2}),
        (lambda: of_onnx(opset=25, is_causal=1, left_window_size=9, mask="window"), {"left_window_size": 2}),
        (lambda: of_onnx(opset=25, left_window_size=3, right_window_size=0), {"is_causal": 1, "left_window_size": 3}),
        (lambda: of_onnx(is_causal=1, softmax_precision=1), {"softmax_precision": 1}),
    ],
)
def test_attributes(case: Callable[[], Layer], attrs: dict[str, int]) -> None:
    assert attrs.items() <= attention_attrs(normalized(case().model)).items()


@pytest.mark.parametrize("rows", [4, 9, CAPACITY])
def test_a_cache_of_a_window_becomes_linear(rows: int) -> None:
    """The operator's own buffers drop old rows; attention is that of a linear cache all the same."""
    case = grouped(local_window_size=4, sliding_window_cache=1, rotary=SIZE)
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
    case = grouped(dtype, graph=graph, **options)
    result = harness.imported(case.model, tmp_path, PlanOptions(capacity=CAPACITY))
    assert (result.plan.attention[0].reason == "attention sinks") == (attrs != {"smooth_softmax": -1})
    check_decode(case, CHUNKS, 1, result.model)
    check_decode(case, [5, 1, 1, 1], 3, result.model)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("options", [{"rotary": SIZE}, {"rotary": SIZE // 2, "qk_norm_epsilon": 0.5}], ids=str)
def test_norm_weights_are_verified(dtype: Any, packed: bool, options: dict[str, Any], tmp_path: Path) -> None:
    report = _verified(grouped(dtype, packed=packed, norm=True, **options), tmp_path)
    report.check()
    assert any("norms of queries and keys, which ONNX Runtime refuses on the CPU" in note for note in report.notes)
    assert not any("masks without" in note for note in report.notes)


def test_rotations_that_are_lost_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check."""
    monkeypatch.setattr(attention, "_rotated", lambda call, name: f"{name} = Identity ({name})")
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        _verified(grouped(norm=True, rotary=SIZE), tmp_path)


def _verified(case: Layer, folder: Path) -> VerifyReport:
    onnx.save(case.model, folder / "model.onnx")
    return verify_model(folder / "model.onnx", PlanOptions(capacity=CAPACITY))


def test_position_ids_of_the_caller_stay() -> None:
    case = grouped(rotary=SIZE, positions="position_ids")
    case.feeds = lambda batch, past, new: (
        mask_feeds(batch, past, new) | {"position_ids": np.broadcast_to(past + np.arange(new), (batch, new)).copy()}
    )
    result = normalized(case.model)
    assert "position_ids" in {i.name for i in result.graph.input}
    check_decode(case, CHUNKS, 1, result)


def test_mask_of_the_caller() -> None:
    """A bool mask over all keys stays the caller's, now over the rows of the cache."""
    case = of_onnx(is_causal=1)
    node = next(n for n in case.model.graph.node if n.op_type == "Attention")
    node.input[3] = "mask"
    case.model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["B", 1, "S", "T"]))
    result = normalized(case.model)
    assert next(n for n in result.graph.node if n.op_type == "Attention").input[3] == "mask"
    assert attention_attrs(result)["is_causal"] == 1


def computed_past(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Abs", ["past_k"], ["made"], name="make"))
    next(n for n in model.graph.node if n.op_type == "Attention").input[4] = "made"


def past_read_twice(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Abs", ["past_k"], ["copy"], name="copy_it"))
    model.graph.output.append(helper.make_tensor_value_info("copy", TensorProto.FLOAT, ["B", KV_HEADS, "P", SIZE]))


def lost_write(model: onnx.ModelProto) -> None:
    kept = [o for o in model.graph.output if o.name != "present_v"]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def one_past(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if "past_v" in n.input)
    node.input[list(node.input).index("past_v")] = ""


def later_rows(model: onnx.ModelProto) -> None:
    """The row before the one that the next token belongs to."""
    node = next(n for n in model.graph.node if n.op_type == "GroupQueryAttention")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.int32), "less"))
    model.graph.node.insert(len(model.graph.node) - 1, helper.make_node("Sub", [node.input[5], "less"], ["fewer"]))
    node.input[5] = "fewer"


def odd_positions(model: onnx.ModelProto) -> None:
    """The same position for every token."""
    node = next(n for n in model.graph.node if n.op_type == "GroupQueryAttention")
    value = helper.make_tensor("", TensorProto.INT64, [1], [3])
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["two"], ["odd"], value=value))
    model.graph.node.insert(0, helper.make_node("Shape", ["x"], ["two"], start=0, end=2))
    node.input.extend([""] * (10 - len(node.input)))
    node.input[9] = "odd"


REFUSED: dict[str, tuple[Callable[[], Layer], Callable[[onnx.ModelProto], None] | None]] = {
    "the mask of 'node_attended' is none of the supported": (lambda: of_onnx(mask="third", is_causal=1), None),
    r"the mask of 'node_attended' .* sees .* keys, from \d+ to": (lambda: of_onnx(is_causal=0, mask="near"), None),
    "the mask of 'node_y' is none of the supported ones": (lambda: multi(score_bias="near, added"), None),
    "position bias": (lambda: grouped(mask="bias"), None),
    "around 'y' the model computes something else": (lambda: of_onnx(mask="short"), None),
    "has right_window_size": (lambda: of_onnx(opset=25, right_window_size=2), None),
    "'made' -> 'present_k' of Attention .* is no input and output": (lambda: of_onnx(is_causal=1), computed_past),
    "'past_v' -> .* is no input and output": (lambda: of_onnx(is_causal=1), lost_write),
    "has no past_key and past_value": (grouped, one_past),
    "'' -> 'present_v' of MultiHeadAttention": (multi, one_past),
    "the cache 'past_k' of GroupQueryAttention 'node_y' is read by Abs 'copy_it'": (grouped, past_read_twice),
    "computes something else|could not be compared|length of the cache": (grouped, later_rows),
    "computes something else": (lambda: grouped(rotary=SIZE), odd_positions),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str, tmp_path: Path) -> None:
    make, edit = REFUSED[words]
    model = make().model
    if edit is not None:
        edit(model)
    with pytest.raises(TrtKvCacheError, match=words):
        harness.imported(model, tmp_path, PlanOptions(capacity=CAPACITY))


BUILT = [
    (grouped, {"rotary": SIZE}), (grouped, {"rotary": SIZE // 2, "rotary_interleaved": 1, "norm": True}),
    (grouped, {"local_window_size": 4}), (grouped, {"softcap": 2.0}),
    (grouped, {"smooth_softmax": 1, "local_window_size": 4}), (multi, {"unidirectional": 1, "bias": True}),
    (multi, {"score_bias": "causal, added"}), (of_onnx, {"is_causal": 1, "mask": "padding"}),
    (of_onnx, {"rank": 4, "is_causal": 1}),
]  # fmt: skip
NAMES = {grouped: "GroupQueryAttention", multi: "MultiHeadAttention", of_onnx: "Attention"}


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("make", "options"), BUILT, ids=lambda v: getattr(v, "__name__", str(v)))
def test_builds_with_one_cache_layer_each(
    make: Callable[..., Layer], options: dict[str, Any], dtype: Any, tmp_path: Path
) -> None:
    result = harness.imported(make(dtype, **options).model, tmp_path, PlanOptions(capacity=CAPACITY))
    assert [(c.route, c.idiom) for c in result.plan.caches] == [(Route.NATIVE, NAMES[make])] * 2
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words
