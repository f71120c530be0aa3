"""The stage as a whole: what goes through untouched, what the plan says, and what is in the result."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
from concat_decode import CAPACITY, normalized, rewritten
from concat_graphs import Decoder, make_decoder
from decoders import DecoderConfig
from decoders import make_decoder as make_canonical
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.importer import prepare as preparation
from trt_kvcache.importer.normalize import Normalized, normalize
from trt_kvcache.importer.plan import OriginalRole, PlanOptions

CANONICAL = {
    "linear": DecoderConfig(),
    "circular": DecoderConfig(mode="circular"),
    "two layers, float16": DecoderConfig(layers=2, dtype="float16"),
}


@pytest.mark.parametrize("name", CANONICAL)
def test_a_canonical_model_is_the_same_object(name: str) -> None:
    model = make_canonical(CANONICAL[name])
    before = model.SerializeToString()
    result = normalize(model, {}, PlanOptions(capacity=16))
    assert result.model is model
    assert result.findings is None
    assert model.SerializeToString() == before


@pytest.mark.parametrize("name", CANONICAL)
def test_a_canonical_model_is_imported_as_without_this_stage(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CANONICAL[name]
    model = make_canonical(config)
    result = rewritten(model, tmp_path, config.capacity)
    monkeypatch.setattr(preparation, "normalize", lambda model, weights, options: Normalized(model, None))
    bypassed = rewritten(model, tmp_path, config.capacity)
    assert result.model.SerializeToString(deterministic=True) == bypassed.model.SerializeToString(deterministic=True)
    assert result.plan == bypassed.plan
    assert not result.plan.changes
    assert not result.plan.original


def test_a_model_without_caches_is_the_same_object() -> None:
    g = Graph()
    x = g.input("x", TensorProto.FLOAT, ["batch", "sequence", 8])
    g.node("Softmax", [g.node("MatMul", [x, g.node("Transpose", [x], perm=[0, 2, 1])])], "y")
    g.output("y", TensorProto.FLOAT, ["batch", "sequence", "sequence"])
    model = g.model(18)
    assert normalize(model, {}, PlanOptions()).model is model


def test_the_model_as_exported_is_not_changed() -> None:
    model = make_decoder(Decoder(mask="padding", positions="padding"))
    before = model.SerializeToString()
    normalized(model)
    assert model.SerializeToString() == before


def test_the_same_model_comes_out_every_time() -> None:
    model = make_decoder(Decoder(layers=2, mask="padding", window=5))
    first, second = (normalized(model).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("layers", [1, 3])
def test_what_is_left_of_a_decoder(layers: int) -> None:
    """One update for each cache, one attention for each layer, and nothing of masks and repetitions."""
    result = normalized(make_decoder(Decoder(layers=layers, mask="padding", positions="padding", upcast=True)))
    kinds = Counter(node.op_type for node in result.graph.node)
    assert kinds["TensorScatter"] == 2 * layers
    assert kinds["Attention"] == layers
    assert not {"Softmax", "Where", "Expand", "Concat", "LessOrEqual", "CumSum"} & set(kinds)
    assert result.graph.output[0].name == "logits"
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in result.graph.input}
    assert shapes.pop("input_ids") == ["batch", "sequence"]
    assert shapes.pop("write_indices") == shapes.pop("nonpad_kv_seqlen") == ["batch"]
    assert set(map(tuple, shapes.values())) == {("batch", 2, CAPACITY, 4)}
    assert len(shapes) == 2 * layers


def test_opset_and_names_are_those_of_a_valid_model() -> None:
    result = normalized(make_decoder(Decoder(window=5, opset=18)))
    assert [(o.domain, o.version) for o in result.opset_import] == [("", 25)]
    assert result.ir_version >= 10
    names = [node.name for node in result.graph.node]
    assert len(names) == len(set(names))
    onnx.checker.check_model(result)


def test_inputs_that_have_the_new_names_already() -> None:
    """An input that is called as one that is added, and is something else."""

    def taken(model: onnx.ModelProto) -> onnx.ModelProto:
        for value in model.graph.input:
            if value.name == "position_ids":
                value.name = "write_indices"
        for node in model.graph.node:
            node.input[:] = ["write_indices" if n == "position_ids" else n for n in node.input]
        return model

    result = normalized(taken(make_decoder(Decoder())))
    scatters = [n for n in result.graph.node if n.op_type == "TensorScatter"]
    shapes = {v.name: len(v.type.tensor_type.shape.dim) for v in result.graph.input}
    assert {shapes[n.input[2]] for n in scatters} == {1}


def test_the_plan_knows_the_interface_as_exported(tmp_path: Path) -> None:
    result = rewritten(make_decoder(Decoder(mask="padding")), tmp_path)
    roles = {t.name: (t.role, t.axes) for t in result.plan.original}
    assert roles == {
        "input_ids": (OriginalRole.TOKENS, ("batch", "sequence")),
        "attention_mask": (OriginalRole.PADDING_MASK, ("batch", "total")),
        "position_ids": (OriginalRole.POSITIONS, ("batch", "sequence")),
        "past_key_values.0.key": (OriginalRole.GROWING_CACHE, ("batch", "", "past", "")),
        "past_key_values.0.value": (OriginalRole.GROWING_CACHE, ("batch", "", "past", "")),
        "logits": (OriginalRole.LOGITS, ("batch", "sequence", "")),
        "present.0.key": (OriginalRole.GROWING_CACHE, ("batch", "", "past", "")),
        "present.0.value": (OriginalRole.GROWING_CACHE, ("batch", "", "past", "")),
    }
