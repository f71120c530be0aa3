"""Models that have the plugin's nodes themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import Graph
from harness import imported, run_rewritten
from onnx import TensorProto, helper
from plugin_reference import feeds_of, reference

from trt_kvcache.errors import InvalidModelError, ModelError, UnsupportedModelError
from trt_kvcache.importer import plan_model, rewrite_model
from trt_kvcache.importer.extensions.plugin_route.functions import operator_function
from trt_kvcache.importer.plan import PlanOptions, Route, Target, UpdateForm
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS, Operator
from trt_kvcache.verify import verify_model

FULL = PlanOptions(target=Target.TENSORRT)
SIZES = (4, 2)
FLOATS = {"cache": TensorProto.FLOAT16, "update": TensorProto.FLOAT16}


def hand_made(
    operator: Operator, kinds: dict[str, int], *, defined: bool, capacity: int = 6, scales: int = 2
) -> onnx.ModelProto:
    """One node of the plugin over graph inputs, with or without its definition beside it."""
    graph, packed = Graph(), operator.form is UpdateForm.PACKED_NHD
    for name in operator.inputs:
        kind, _, i = name.rpartition("_")
        shapes: dict[str, list[Any]] = {
            "cache": ["B", 2, capacity, SIZES[int(i == "1")]],
            "update": ["T", 2, SIZES[int(i == "1")]] if packed else ["B", 2, "S", SIZES[int(i == "1")]],
            "scale": [scales],
        }
        other = ["B_plus_1"] if packed and name == "lengths" else ["B"]
        graph.input(name, kinds.get(kind, kinds.get(name, TensorProto.INT64)), shapes.get(kind, other))
    graph.node(operator.name, operator.inputs, operator.outputs, NAMESPACE)
    for name in operator.outputs:
        graph.output(name, kinds["cache"], ["B", 2, capacity, SIZES[int(name.endswith("_1"))]])
    functions = [operator_function(operator, 24)] if defined else []
    return graph.model(24, [NAMESPACE], functions)


@pytest.mark.parametrize("first", [0, 1], ids=["int32", "int64"])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_taken_as_it_is(name: str, first: int, tmp_path: Path) -> None:
    """Plan, rewrite, and the numbers, refused updates and wraps included."""
    operator, rng = OPERATORS[name], np.random.default_rng(list(name.encode()))
    feeds = feeds_of(operator, rng, first)
    kinds = {n.rpartition("_")[0] or n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in feeds.items()}
    kinds |= {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in feeds.items()}
    result = imported(hand_made(operator, kinds, defined=len(name) % 2 == 0, scales=1 + first), tmp_path, FULL)
    assert [n.op_type for n in result.model.graph.node if n.domain == NAMESPACE] == [name]
    assert [(c.past, c.present, c.route) for c in result.plan.caches] == [
        (f"cache_{i}", f"present_{i}", Route.PLUGIN) for i in range(operator.caches)
    ]
    (node,) = [n for n in result.model.graph.node if n.domain == NAMESPACE]
    assert {a.name for a in node.attribute} == {"plugin_namespace", "plugin_version", "aot"}
    assert [f.name for f in result.model.functions] == [name]
    for trial in range(first, 30, 2):  # the types of `kinds`
        feeds = feeds_of(operator, rng, trial)
        found = run_rewritten(result, feeds)
        for output, value in reference(operator, feeds).items():
            np.testing.assert_array_equal(found[output], value, err_msg=f"{output} of trial {trial}")


@pytest.mark.parametrize("defined", [True, False])
@pytest.mark.parametrize("caches", [1, 2])
def test_verify_runs_them(caches: int, defined: bool, tmp_path: Path) -> None:
    operator = Operator(caches=caches)
    onnx.save(hand_made(operator, FLOATS, defined=defined, capacity=16), tmp_path / "model.onnx")
    plan = rewrite_model(tmp_path / "model.onnx", tmp_path / "rewritten.onnx", FULL)
    assert plan == plan_model(tmp_path / "model.onnx", FULL)
    report = verify_model(tmp_path / "model.onnx", FULL)
    report.check()
    assert {o.name for o in report.outputs} == set(operator.outputs)


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        ({}, PlanOptions(), UnsupportedModelError, r"node of the plugin \(KVCacheUpdatePacked\).*--target tensorrt"),
        ({"inputs": 3}, FULL, InvalidModelError, "3 inputs and 1 outputs; KVCacheUpdatePacked takes cache_0, upda"),
        ({"cache": TensorProto.FLOAT}, FULL, InvalidModelError, "update_0 is float16 and cache_0 float"),
        ({"lengths": TensorProto.INT8}, FULL, InvalidModelError, "lengths is int8; expected int32 or int64"),
        ({"heads": 3}, FULL, InvalidModelError, r"update_0 is \[\?, 3, 4\], cache_0 \[\?, 2, 6, 4\]; they must be"),
        ({"output": False}, FULL, UnsupportedModelError, "be done in place: the updated cache .* is not an output"),
    ],
    ids=["rtx", "inputs", "types", "lengths", "heads", "output"],
)  # fmt: skip
def test_refusals(
    change: dict[str, Any], options: PlanOptions, error: type[ModelError], words: str, tmp_path: Path
) -> None:
    model = hand_made(Operator(UpdateForm.PACKED_NHD), FLOATS | change, defined=False)
    if "inputs" in change:
        del model.graph.node[0].input[change["inputs"] :]
    if "heads" in change:
        model.graph.input[1].type.tensor_type.shape.dim[1].dim_value = change["heads"]
    if "output" in change:
        model.graph.node.append(helper.make_node("Neg", ["present_0"], ["negative"], name="neg"))
        model.graph.output[0].name = "negative"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(error, match=words):
        plan_model(tmp_path / "model.onnx", options)
