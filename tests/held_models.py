"""Operators that hold a cache, before and after normalization: how tests run a decode on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from graphs import Graph
from onnx import TensorProto, helper

from trt_kvcache.importer.lower import CONTRIB
from trt_kvcache.importer.normalize import normalize
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.importer.prepare import bind_capacity
from trt_kvcache.importer.simplify import simplify

Array = np.ndarray[Any, Any]
CAPACITY = 24
GARBAGE = 1e3
TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}


def normalized(model: onnx.ModelProto, capacity: int = CAPACITY) -> onnx.ModelProto:
    """The canonical form of a model, with the capacity in the shapes of its caches."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    result = normalize(simplify(copy)[0], {}, PlanOptions(capacity=capacity)).model
    bind_capacity(result.graph, capacity)
    onnx.checker.check_model(result, full_check=True)
    return result


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@dataclass
class Layer:
    """One operator between inputs ``x`` (tokens) and output ``y``, with caches ``past_k``, ``past_v``.

    `extra` are further inputs of the decode, made by `feeds` from the number of tokens so far and of new ones.
    """

    model: onnx.ModelProto
    dtype: Any
    heads: int
    size: int
    value_size: int
    width: int
    feeds: Any = field(default=lambda batch, past, new: {})


def check_decode(layer: Layer, chunks: Sequence[int], batch: int, result: onnx.ModelProto | None = None) -> None:
    """Run a decode in `chunks` on the model as exported and on its canonical form, or `result`; compare every step."""
    result = result or normalized(layer.model)
    before, after = session(layer.model), session(result)
    wanted = {value.name for value in result.graph.input}
    rng = np.random.default_rng(3)
    shape = (batch, layer.heads)
    past_k, past_v = (np.zeros((*shape, 0, n), layer.dtype) for n in (layer.size, layer.value_size))
    cache_k, cache_v = (np.full((*shape, CAPACITY, n), GARBAGE, layer.dtype) for n in (layer.size, layer.value_size))
    past = 0
    tolerance = 1e-4 if layer.dtype == np.float32 else 2e-2
    for new in chunks:
        x = rng.standard_normal((batch, new, layer.width)).astype(layer.dtype)
        extra = layer.feeds(batch, past, new)
        y, past_k, past_v = before.run(["y", "present_k", "present_v"],
                                       {"x": x, "past_k": past_k, "past_v": past_v, **extra})  # fmt: skip
        lengths = {
            "write_indices": np.full(batch, past),
            "nonpad_kv_seqlen": np.full(batch, past + new),
            "attention_span": np.arange(past + new),  # of a rewritten model
            "logits_span": np.arange(new),
        }
        feeds = {"x": x, "past_k": cache_k, "past_v": cache_v, **lengths, **extra}
        got, cache_k, cache_v = after.run(["y", "present_k", "present_v"],
                                          {n: v for n, v in feeds.items() if n in wanted})  # fmt: skip
        past += new
        np.testing.assert_allclose(got, y, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(cache_k[:, :, :past], past_k, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(cache_v[:, :, :past], past_v, rtol=tolerance, atol=tolerance)
        assert (cache_k[:, :, past:] == GARBAGE).all()
    assert past <= CAPACITY


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
        names.append(graph.node("MatMul", ["x", weight], name))
    return names


def mask_lengths(graph: Graph) -> tuple[str, str]:
    """``seqlens_k`` and ``total_sequence_length`` as onnxruntime-genai computes them from ``attention_mask [B, T]``."""
    graph.input("attention_mask", TensorProto.INT64, ["B", "T"])
    one, shape = graph.constant([1]), graph.node("Shape", ["attention_mask"])
    count = graph.node("ReduceSum", ["attention_mask", one], keepdims=0)
    seqlens = graph.node("Cast", [graph.node("Sub", [count, one])], "seqlens_k", to=TensorProto.INT32)
    total = graph.node("Gather", [shape, graph.constant(1)], axis=0)
    return seqlens, graph.node("Cast", [total], "total", to=TensorProto.INT32)


def mask_feeds(batch: int, past: int, new: int) -> dict[str, Array]:
    return {"attention_mask": np.ones((batch, past + new), np.int64)}


def finish(graph: Graph, opset: int = 22) -> onnx.ModelProto:
    return graph.model(opset, [CONTRIB])


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def attention_attrs(model: onnx.ModelProto) -> dict[str, Any]:
    node = next(n for n in model.graph.node if n.op_type == "Attention")
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def windows_as_masks(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model at opset 24, with Attention-25's left window as the mask that its page says: ``p - left <= j``.

    ONNX Runtime has no windows in Attention yet.
    """
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for entry in model.opset_import:
        entry.version = 24 if not entry.domain else entry.version
    index, node = next((i, n) for i, n in enumerate(model.graph.node) if n.op_type == "Attention")
    left = next(a for a in node.attribute if a.name == "left_window_size")
    node.attribute.remove(left)
    assert len(node.input) == 7
    assert not node.input[3]
    node.input[3] = "window/mask"
    mask = Graph()
    count = mask.node("Squeeze", [mask.node("Shape", ["x"], start=1, end=2)])
    steps = mask.node("Range", [mask.constant(0), count, mask.constant(1)])
    first = mask.node("Unsqueeze", ["write_indices", mask.constant([1])])
    lowest = mask.node("Sub", [mask.node("Add", [first, steps]), mask.constant(left.i)])
    rows = mask.node("Unsqueeze", [lowest, mask.constant([1, 3])])
    mask.node("GreaterOrEqual", [mask.constant(np.arange(CAPACITY)), rows], "mask")
    own = {name for n in mask.nodes for name in n.output} | {t.name for t in mask.initializers}
    for position, extra in enumerate(mask.nodes):
        for names in (extra.input, extra.output):
            names[:] = [f"window/{name}" if name in own else name for name in names]
        extra.name = f"window/{extra.name}"
        model.graph.node.insert(index + position, extra)
    for tensor in mask.initializers:
        tensor.name = f"window/{tensor.name}"
    model.graph.initializer.extend(mask.initializers)
    return model
