"""One operator that holds a cache: GroupQueryAttention, MultiHeadAttention, or ONNX's Attention with a past."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx
from graphs import Graph
from onnx import TensorProto, helper

from corpus import Entry, built

CONTRIB = "com.microsoft"
CAPACITY = 24
TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}
HEADS, KV_HEADS, SIZE, WIDTH = 4, 2, 32, 48


def cache_inputs(graph: Graph, dtype: int, heads: int, size: int | str, value_size: int | str) -> None:
    """Declare ``past_k``, ``past_v``, ``present_k``, ``present_v`` as growing caches."""
    for name, width in (("k", size), ("v", value_size)):
        graph.input(f"past_{name}", dtype, ["B", heads, "P", width])
        graph.output(f"present_{name}", dtype, ["B", heads, "T", width])


def projected(graph: Graph, dtype: Any, width: int, sizes: dict[str, int], seed: int = 5) -> list[str]:
    """``x @ w`` for each name, with its width stated."""
    rng = np.random.default_rng(seed)
    names = []
    for name, size in sizes.items():
        weight = graph.constant(rng.standard_normal((width, size)) / np.sqrt(width), dtype)
        names.append(graph.MatMul("x", weight, out=name))
    return names


def mask_lengths(graph: Graph) -> tuple[str, str]:
    """``seqlens_k`` and ``total_sequence_length`` as onnxruntime-genai computes them from ``attention_mask [B, T]``."""
    graph.input("attention_mask", TensorProto.INT64, ["B", "T"])
    one, shape = graph.constant([1]), graph.Shape("attention_mask")
    count = graph.ReduceSum("attention_mask", one, keepdims=0)
    seqlens = graph.Cast(graph.Sub(count, one), out="seqlens_k", to=TensorProto.INT32)
    total = graph.Gather(shape, 1, axis=0)
    return seqlens, graph.Cast(total, out="total", to=TensorProto.INT32)


def padding(graph: Graph, dtype: Any) -> str:
    """mobius: attention_mask as bool [B, 1, S, T]."""
    shown = graph.Cast("attention_mask", to=TensorProto.BOOL)
    ones = [graph.Shape("x", start=0, end=2), graph.Shape("attention_mask", start=1)]
    shape = graph.node("Concat", ones, axis=0)
    expanded = graph.Expand(graph.Unsqueeze(shown, [1]), shape)
    return graph.Unsqueeze(expanded, [1])


def compared(
    graph: Graph, compare: Callable[[Graph, str, str], str], added: Any = None, value: float | None = None
) -> str:
    """A mask by a comparison of positions of keys and queries; with `added`, a type, as numbers added to scores."""
    total = graph.Squeeze(graph.Shape("attention_mask", start=1))
    new = graph.Squeeze(graph.Shape("x", start=1, end=2))
    keys = graph.Range(0, total, 1)
    queries = graph.Range(graph.Sub(total, new), total, 1)
    shown = compare(graph, keys, graph.Unsqueeze(queries, [1]))
    if added is not None:
        low = np.finfo(added).min if value is None else value
        shown = graph.Where(shown, graph.constant(0, added), graph.constant(low, added))
    return graph.Unsqueeze(shown, [0, 1])


def before(graph: Graph, keys: str, queries: str) -> str:
    return graph.LessOrEqual(keys, queries)


def near(graph: Graph, keys: str, queries: str) -> str:
    """Keys of a window of three, and those after the query, which are left to the operator."""
    return graph.Less(graph.Sub(queries, keys), 3)


def in_window(graph: Graph, keys: str, queries: str) -> str:
    return graph.And(near(graph, keys, queries), before(graph, keys, queries))


def third(graph: Graph, keys: str, queries: str) -> str:
    """Every third key."""
    shown = graph.Equal(graph.Mod(keys, 3), 0)
    return graph.And(shown, graph.GreaterOrEqual(queries, [[0]]))


MASKS: dict[str, Callable[[Graph, Any], str]] = {
    "padding": padding,
    "causal, added": lambda graph, dtype: compared(graph, before, dtype),
    "window": lambda graph, dtype: compared(graph, in_window),
    "near, added": lambda graph, dtype: compared(graph, near, dtype),
    "third": lambda graph, dtype: compared(graph, third),
    "bias": lambda graph, dtype: compared(graph, in_window, dtype, -2.0),
}


def grouped(
    dtype: Any = np.float32,
    packed: bool = True,
    rotary: int = 0,
    norm: bool = False,
    positions: str = "",
    cache_dim: int | str = "kv_cache_dim",
    sinks: bool = False,
    mask: str = "",
    **attrs: Any,
) -> onnx.ModelProto:
    """One GroupQueryAttention; `rotary` is the width of the rotated part, 0 for none."""
    graph = Graph()
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
    given = {10: MASKS[mask](graph, dtype)} if mask else {}
    if sinks:
        given[11] = graph.constant(np.array([0.5, -1.0, 2.0, 20.0]), dtype)
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
    return graph.model(22, [CONTRIB])


def shared(sources: tuple[str, ...] = ("0", "1"), given: bool = True) -> onnx.ModelProto:
    """Two layers with caches, one with a window, and layers that read the cache of an earlier one, by `sources`.

    The latter get keys and values of length 0, and the presents of the other layer as their past: so mobius-onnx 0.1
    writes Gemma 4 where it writes GroupQueryAttention (`mobius/models/gemma4.py`).

    Args:
        sources: for each of these layers, the number of the layer whose presents it reads, or "input": it reads inputs.
        given: it gets keys and values of no tokens, else none.
    """
    graph, dtype, code = Graph(), np.float32, TensorProto.FLOAT
    graph.input("x", code, ["B", "S", WIDTH])
    q, k = HEADS * SIZE, KV_HEADS * SIZE
    angles = np.outer(np.arange(CAPACITY), 0.5 ** np.arange(SIZE // 2))
    after = [*mask_lengths(graph), graph.constant(np.cos(angles), dtype), graph.constant(np.sin(angles), dtype)]
    own: dict[str, Any] = {"domain": CONTRIB, "num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1}
    windows: list[dict[str, int]] = [{"local_window_size": 5}, {}]
    for layer in range(2):
        for part in ("k", "v"):
            graph.input(f"past_{part}{layer}", code, ["B", KV_HEADS, "P", SIZE])
            graph.output(f"present_{part}{layer}", code, ["B", KV_HEADS, "T", SIZE])
        inputs = projected(graph, dtype, WIDTH, {f"{n}{layer}": w for n, w in (("q", q), ("k", k), ("v", k))}, layer)
        inputs += [f"past_k{layer}", f"past_v{layer}", *after]
        names = [f"y{layer}", f"present_k{layer}", f"present_v{layer}"]
        graph.node("GroupQueryAttention", inputs, names, **own, **windows[layer])
    for layer, source in enumerate(sources, start=2):
        (query,) = projected(graph, dtype, WIDTH, {f"q{layer}": q}, layer)
        inputs = [query, *(_nothing_new(graph, query, k) if given else ["", ""])]
        number = 0 if source == "input" else int(source)
        for part in ("k", "v"):
            other = f"present_{part}{number}"
            inputs.append(
                graph.input(f"other_{part}", code, ["B", KV_HEADS, "T", SIZE]) if source == "input" else other
            )
        graph.node("GroupQueryAttention", [*inputs, *after], [f"y{layer}", "", ""], **own, **windows[number])
    layers = [f"y{layer}" for layer in range(2 + len(sources))]
    graph.node("Concat", layers, "y", axis=-1)
    graph.output("y", code, ["B", "S", len(layers) * q])
    return graph.model(22, [CONTRIB])


def _nothing_new(graph: Graph, query: str, width: int) -> list[str]:
    """Keys and values of a layer that has none of its own."""
    sizes = graph.Concat(graph.Shape(query, start=0, end=1), [0, width], axis=0)
    return [graph.CastLike(graph.ConstantOfShape(sizes), query)] * 2


def multi(
    dtype: Any = np.float32, bias: bool = False, padding: bool = False, score_bias: str = "", **attrs: Any
) -> onnx.ModelProto:
    graph = Graph()
    code = TYPES[dtype]
    graph.input("x", code, ["B", "S", WIDTH])
    inputs = projected(graph, dtype, WIDTH, dict.fromkeys(("q", "k", "v"), HEADS * SIZE))
    cache_inputs(graph, code, HEADS, "head_size", "head_size")
    graph.input("attention_mask", TensorProto.INT64, ["B", "T"])
    own = np.random.default_rng(4).standard_normal(3 * HEADS * SIZE)
    inputs.append(graph.constant(own, dtype) if bias else "")
    mask = graph.Cast("attention_mask", to=TensorProto.INT32)
    inputs += [mask if padding else "", MASKS[score_bias](graph, dtype) if score_bias else "", "past_k", "past_v"]
    names = ["y", "present_k", "present_v"]
    graph.node("MultiHeadAttention", inputs, names, domain=CONTRIB, num_heads=HEADS, **attrs)
    graph.output("y", code, ["B", "S", HEADS * SIZE])
    return graph.model(20, [CONTRIB])


def of_onnx(
    dtype: Any = np.float32, rank: int = 3, value_size: int = SIZE, mask: str = "", opset: int = 24, **attrs: Any
) -> onnx.ModelProto:
    """One Attention with a past; `mask` names a maker below."""
    graph = Graph()
    code = TYPES[dtype]
    graph.input("x", code, ["B", "S", WIDTH])
    sizes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * value_size}
    inputs = projected(graph, dtype, WIDTH, sizes)
    if rank == 4:
        for i, (heads, size) in enumerate(((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size))):
            split = graph.Reshape(inputs[i], [0, 0, heads, size])
            inputs[i] = graph.Transpose(split, perm=[0, 2, 1, 3])
    else:
        attrs |= {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}
    cache_inputs(graph, code, KV_HEADS, SIZE, value_size)
    graph.input("attention_mask", TensorProto.INT64, ["B", "T"])
    inputs += [MASKS[mask](graph, dtype) if mask else "", "past_k", "past_v"]
    names = ["attended", "present_k", "present_v"]
    graph.node("Attention", inputs, names, **attrs)
    y = "attended"
    if rank == 4:
        rows = graph.Transpose(y, perm=[0, 2, 1, 3])
        y = graph.Reshape(rows, [0, 0, HEADS * value_size])
    graph.Identity(y, out="y")
    graph.output("y", code, ["B", "S", HEADS * value_size])
    return graph.model(opset, [CONTRIB])


GROUPED: list[dict[str, Any]] = [
    *({"dtype": t, "packed": p, "rotary": SIZE} for t in TYPES for p in (True, False)), {"scale": 0.3, "softcap": 1.5},
    {"rotary": SIZE, "local_window_size": 7}, {"rotary": SIZE, "local_window_size": 9, "mask": "near, added"},
    {"sinks": True}, {"smooth_softmax": 1}, {"smooth_softmax": 1, "scale": 0.7, "packed": False},
    {"norm": True, "packed": False, "rotary": SIZE // 2, "qk_norm_epsilon": 0.5}, {"causal": 0}, {"mask": "bias"},
    {"rotary": SIZE, "positions": "position_ids"}, {"rotary": SIZE, "rotary_interleaved": 1},
]  # fmt: skip
SHARED: list[dict[str, Any]] = [{}, {"sources": ("input",)}, {"given": False}]
MULTI: list[dict[str, Any]] = [
    {"dtype": np.float32, "bias": False, "unidirectional": 0}, {"padding": True, "unidirectional": 1},
    {"score_bias": "causal, added"}, {"score_bias": "near, added"},
    {"score_bias": "causal, added", "dtype": np.float16, "padding": True, "bias": True},
]  # fmt: skip
OF_ONNX: list[dict[str, Any]] = [
    *({"rank": r, "opset": v, "is_causal": 1} for r in (3, 4) for v in (23, 25)), {"is_causal": 0, "mask": "padding"},
    {"is_causal": 0}, {"is_causal": 1, "value_size": 8, "scale": 0.4, "softcap": 1.5},
    {"opset": 25, "is_causal": 1, "left_window_size": 9, "mask": "window"}, {"mask": "third", "is_causal": 1},
    {"opset": 25, "right_window_size": 2},
]  # fmt: skip


def computed_past(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Abs", ["past_k"], ["made"], name="make"))
    next(n for n in model.graph.node if n.op_type == "Attention").input[4] = "made"


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


def own_mask(model: onnx.ModelProto) -> None:
    """A bool mask of the caller over all keys."""
    next(n for n in model.graph.node if n.op_type == "Attention").input[3] = "mask"
    model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["B", 1, "S", "T"]))


Make = Callable[..., onnx.ModelProto]
EDITED: list[tuple[Make, dict[str, Any], Callable[[onnx.ModelProto], None]]] = [
    (of_onnx, {"is_causal": 1}, own_mask), (of_onnx, {"is_causal": 1}, computed_past),
    (of_onnx, {"is_causal": 1}, lost_write), (grouped, {}, one_past), (grouped, {}, later_rows),
]  # fmt: skip


def edited(make: Make, options: dict[str, Any], edit: Callable[[onnx.ModelProto], None]) -> onnx.ModelProto:
    model = make(**options)
    edit(model)
    return model


def entries() -> Iterator[Entry]:
    lists = ((grouped, GROUPED), (shared, SHARED), (multi, MULTI), (of_onnx, OF_ONNX))
    cases: list[tuple[Make, dict[str, Any]]] = [(make, options) for make, some in lists for options in some]
    models = {f"{make.__name__} {_words(o)}": partial(make, **o) for make, o in cases}
    models |= {f"{make.__name__} {edit.__name__}": partial(edited, make, o, edit) for make, o, edit in EDITED}
    yield from built("held", models, capacity=CAPACITY)


def _words(options: dict[str, Any]) -> str:
    return ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items())
