"""Softmax that was taken apart becomes one operator; what only looks so is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_decode import check_decode, rewritten
from concat_graphs import Decoder, make_decoder
from onnx import NodeProto, helper, numpy_helper

from trt_kvcache import UnsupportedModelError

Edit = Callable[[list[NodeProto]], object]


def taken_apart(model: onnx.ModelProto, edit: Edit | None = None) -> onnx.ModelProto:
    """Each Softmax in five operators: ReduceMax, Sub, Exp, ReduceSum, Div; then `edit` changes them."""
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([2]), "rows"))
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "Softmax":
            nodes.append(node)
            continue
        x, y = node.input[0], node.output[0]
        most, less, power, total = (f"{y}_{i}" for i in range(4))
        parts = [
            helper.make_node("ReduceMax", [x, "last"], [most], most),
            helper.make_node("Sub", [x, most], [less], less),
            helper.make_node("Exp", [less], [power], power),
            helper.make_node("ReduceSum", [power, "last"], [total], total),
            helper.make_node("Div", [power, total], [y], f"{y}_div"),
        ]
        if edit is not None:
            edit(parts)
        nodes += parts
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize(
    ("decoder", "tolerance"),
    [
        (Decoder(layers=2), 1e-4),
        (Decoder(mask="padding", apply="where", dtype=np.float16, size=8), 2e-2),
        (Decoder(dtype=np.float16, size=8, upcast=True), 2e-2),
    ],
    ids=["Add", "Where, float16", "upcast"],
)
def test_attention_is_seen(decoder: Decoder, tolerance: float, tmp_path: Path) -> None:
    result = check_decode(taken_apart(make_decoder(decoder)), tmp_path, tolerance)
    assert [node.op_type for node in result.model.graph.node].count("Attention") == decoder.layers


def swap(parts: list[NodeProto]) -> None:
    parts[4].input[:] = list(parts[4].input)[::-1]


OTHERS: dict[str, Edit] = {
    "the sum along rows": lambda parts: parts[3].input.__setitem__(1, "rows"),
    "the sum of what is no power": lambda parts: parts[3].input.__setitem__(0, parts[1].output[0]),
    "the largest of something else": lambda parts: parts[0].input.__setitem__(0, "weight"),
    "the smallest": lambda parts: setattr(parts[0], "op_type", "ReduceMin"),
    "the mean": lambda parts: setattr(parts[3], "op_type", "ReduceMean"),
    "divided the other way round": swap,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_so_is_refused(name: str, tmp_path: Path) -> None:
    model = make_decoder(Decoder())
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "weight"))
    model = taken_apart(model, OTHERS[name])
    with pytest.raises(UnsupportedModelError):
        rewritten(model, tmp_path)
