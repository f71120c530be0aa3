"""The parsed network against the plan: equal, or the difference is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import tensorrt_rtx as trt
from concat_graphs import Decoder, make_decoder
from decoders import DecoderConfig, write_decoder
from hybrids import hybrid_model
from onnx import TensorProto, helper
from sample_plans import sample_plan

from trt_kvcache.engine.builder import check_network
from trt_kvcache.errors import BuildError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions, Role, Route, TensorRole


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CachePlan, object]:
    """The network of a rewritten decoder, its plan, and what must live as long."""
    path = write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig(layers=2, dtype="float16"))
    imported = import_model(path)
    return *parse(imported.model, path), imported.plan


def parse(model: onnx.ModelProto, path: Path) -> tuple[Any, object]:
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString(), str(path))
    return network, (builder, parser, logger)


def change_tensor(name: str, /, **changes: Any) -> Callable[[CachePlan], CachePlan]:
    def change(plan: CachePlan) -> CachePlan:
        assert name in {t.name for t in plan.tensors}
        return replace(plan, tensors=tuple(replace(t, **changes) if t.name == name else t for t in plan.tensors))

    return change


def drop_cache(plan: CachePlan) -> CachePlan:
    return replace(plan, caches=plan.caches[1:])


def swap_caches(plan: CachePlan) -> CachePlan:
    first, second, *others = plan.caches
    return replace(
        plan, caches=(replace(first, present=second.present), replace(second, present=first.present), *others)
    )


def not_native(plan: CachePlan) -> CachePlan:
    return replace(plan, caches=(replace(plan.caches[0], route=Route.FUNCTIONAL), *plan.caches[1:]))


def add_cache(plan: CachePlan) -> CachePlan:
    return replace(plan, caches=(*plan.caches, replace(plan.caches[0], past="other_cache", present="other_present")))


def add_input(plan: CachePlan) -> CachePlan:
    return replace(
        plan, tensors=(*plan.tensors, TensorRole("extra", "input", Role.OTHER, "int64", (1,), "test", ("",)))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_cache, "KV-cache layers that are not in the plan: key_cache.0 -> updated_key_cache.0"),
        (not_native, "KV-cache layers that are not in the plan: key_cache.0 -> updated_key_cache.0"),
        (add_cache, "has 4 KV-cache layers, but the plan has 5; missing: other_cache -> other_present"),
        (swap_caches, "has 4 KV-cache layers, but the plan has 4; missing: key_cache.0 -> updated_value_cache.0"),
        (add_input, r"inputs differ from the plan's: missing \['extra'\], unknown \[\]"),
        (change_tensor("logits", name="scores"), r"outputs .*: missing \['scores'\], unknown \['logits'\]"),
        (change_tensor("logits", dtype="double"), "gives output 'logits' the dtype HALF, but the model says double"),
        (
            change_tensor("key_cache.0", dtype="bfloat16"),
            "gives input 'key_cache.0' the dtype HALF, but the model says bfl",
        ),
        (
            change_tensor("write_indices", shape=(4,)),
            r"input 'write_indices' the shape \[-1\], but the plan says \[4\]",
        ),
        (change_tensor("write_indices", shape=("a", 1)), r"input 'write_indices' the shape \[-1\], but the plan says"),
        (change_tensor("logits", shape=("batch", "s", 7)), "output 'logits' the shape .*, but the plan says .*7"),
    ],
)
def test_a_difference_is_named(
    parsed: tuple[Any, object, CachePlan], change: Callable[[CachePlan], CachePlan], message: str
) -> None:
    network, _, plan = parsed
    with pytest.raises(BuildError, match=message):
        check_network(network, change(plan), trt)


@pytest.mark.parametrize("form", ["canonical", "growing", "hybrid"])
def test_inputs_that_are_outputs_too_keep_their_names(form: str, tmp_path: Path) -> None:
    """TensorRT's parser renames such an input; the plan says that the output is gone."""
    path = tmp_path / "model.onnx"
    if form == "canonical":
        model = onnx.load(write_decoder(path, DecoderConfig(dtype="float16")))
    else:
        model = hybrid_model() if form == "hybrid" else make_decoder(Decoder(positions="input"))
    names = [value.name for value in model.graph.input]
    model.graph.output.extend(model.graph.input)
    onnx.save(model, path)
    imported = import_model(path, PlanOptions(capacity=16 if form == "growing" else None))
    check_network(parse(imported.model, path)[0], imported.plan, trt)
    assert {c.route for c in imported.plan.caches} == {Route.NATIVE}
    assert [c.old.partition(" ")[0] for c in imported.plan.changes if c.why == "an unchanged input"] == names


def test_an_input_that_decides_shapes_by_its_values_is_refused(tmp_path: Path) -> None:
    """Its values would have to be in the profiles and in host memory at run time."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]),
        helper.make_tensor_value_info("shape", TensorProto.INT64, [2]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 24)]
    )
    model.ir_version = 11
    network, _alive = parse(model, tmp_path / "model.onnx")
    tensors = (
        TensorRole("x", "input", Role.OTHER, "float", ("n", 4), "test", ("?", "")),
        TensorRole("shape", "input", Role.OTHER, "int64", (2,), "test", ("",)),
        TensorRole("y", "output", Role.OTHER, "float", ("a", "b"), "test", ("?", "?")),
    )
    plan = replace(sample_plan(layers=1), caches=(), attention=(), masks=(), spans=(), tensors=tensors)
    with pytest.raises(BuildError, match="input 'shape' decides shapes by its values"):
        check_network(network, plan, trt)
