"""Attention that rounds to 8 bits on its way, as NVIDIA ModelOpt quantizes, against the model as exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from concat_decode import CAPACITY, Decode, check_decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper
from rounded_graphs import FP8, INT8, OPSET, PARTS, modelopt, rounds

from trt_kvcache import PlanOptions, UnsupportedModelError, plan_model, verify_model
from trt_kvcache.importer.graph import producer
from trt_kvcache.importer.plan import AttentionKind


def lowered(result: Any) -> set[tuple[AttentionKind, str]]:
    return {(a.kind, a.reason) for a in result.plan.attention}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("repeat", ["expand", "none", "gather"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_as_modelopt_leaves_it(tmp_path: Path, kind: Any, repeat: str, dtype: Any) -> None:
    kv_heads = 1 if repeat == "none" else 2
    decoder = Decoder(attend=modelopt(kind), repeat=repeat, kv_heads=kv_heads, dtype=dtype, layers=2, opset=OPSET)
    # float16: sums in another order, and so another choice between two neighbours once in a while
    result = check_decode(make_decoder(decoder), tmp_path, 1e-4 if dtype is np.float32 else 0.1)
    name = "int8" if kind is INT8 else "float8e4m3fn"
    assert lowered(result) == {(AttentionKind.LOWERED, f"rounded to {name} on the way")}
    assert {a.keys for a in result.plan.attention} == {"span"}
    onnx.checker.check_model(result.model, full_check=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_factor_that_sizes_make(tmp_path: Path, dtype: Any) -> None:
    decoder = Decoder(attend=modelopt(INT8, from_sizes=True), dtype=dtype, opset=OPSET)
    result = check_decode(make_decoder(decoder), tmp_path, 1e-4 if dtype is np.float32 else 0.1)
    assert lowered(result) == {(AttentionKind.LOWERED, "rounded to int8 on the way")}


def test_rows_in_use_alone_are_rounded_and_before_heads_are_repeated(tmp_path: Path) -> None:
    model = make_decoder(Decoder(attend=modelopt(INT8), opset=OPSET))
    graph = gs.import_onnx(rewritten(model, tmp_path).model)
    spread = [n.name for n in graph.nodes if n.op in ("Expand", "Tile") and "trt_kvcache" in n.name]
    assert not spread
    caches = [n for n in graph.nodes if n.op == "TensorScatter"]
    for cache in caches:
        readers = [n.op for n in cache.outputs[0].outputs]
        assert readers == ["Slice"]  # no reader of the whole capacity


def test_nothing_stands_between_rounding_and_products(tmp_path: Path) -> None:
    """TensorRT has kernels for products of rounded numbers."""
    graph = gs.import_onnx(rewritten(make_decoder(Decoder(attend=modelopt(INT8), opset=OPSET)), tmp_path).model)
    products = [n for n in graph.nodes if n.op == "MatMul" and n.name.startswith("trt_kvcache")]
    assert len(products) == 2
    moves = ("Reshape", "Transpose")
    for tensor in (t for node in products for t in node.inputs):
        maker = producer(tensor)
        while maker is not None and maker.op in moves:
            maker = producer(maker.inputs[0])
        assert maker is not None
        assert maker.op == "DequantizeLinear"


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    kind=st.sampled_from([INT8, FP8]),
    hooks=st.sets(st.sampled_from(["scores", "weights", "keys", "values"]), min_size=1),
    decoder=st.builds(
        Decoder,
        kv_heads=st.sampled_from([1, 2, 4]),
        scale=st.sampled_from(["scores", "q", "k", "both", "none"]),
        by=st.sampled_from(["Mul", "Div"]),
        sinks=st.sampled_from(["", "weight"]),
        mask=st.sampled_from(["past", "padding", "positions", "buffer", "own"]),
        apply=st.sampled_from(["add", "where", "hide"]),
        window=st.sampled_from([0, 5]),
        guard=st.booleans(),
        upcast=st.booleans(),
        repeat=st.sampled_from(["expand", "tile", "gather"]),
        opset=st.just(OPSET),
    ),
)
def test_any_combination(tmp_path: Path, kind: Any, hooks: set[str], decoder: Decoder) -> None:
    decoder = replace(decoder, guard=decoder.guard and not decoder.sinks)
    check_decode(make_decoder(replace(decoder, **{name: rounds(kind) for name in hooks})), tmp_path)


@pytest.mark.parametrize("layout", ["bsnd", "flat"])
def test_other_layouts_of_the_cache(tmp_path: Path, layout: str) -> None:
    onnx.save(make_decoder(Decoder(attend=modelopt(INT8), layout=layout, opset=OPSET)), tmp_path / "model.onnx")
    verify_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY)).check()


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_caches_rounded_alone_leave_the_attention_whole(tmp_path: Path, kind: Any) -> None:
    """What a quantized KV cache is in the export of a simulation: float caches, rounded before they are read."""
    model = make_decoder(Decoder(keys=rounds(kind), values=rounds(kind), opset=OPSET))
    result = check_decode(model, tmp_path)
    assert {a.kind for a in result.plan.attention} == {AttentionKind.DECOMPOSED}


def test_rounding_before_the_write_stays_there(tmp_path: Path) -> None:
    model = make_decoder(Decoder(opset=OPSET))
    concat = next(n for n in model.graph.node if n.op_type == "Concat" and "past" in n.input[0])
    names = [f"{concat.input[1]}_{part}" for part in ("small", "rounded", "scale", "zero")]
    model.graph.initializer.append(helper.make_tensor(names[2], TensorProto.FLOAT, [], [0.05]))
    model.graph.initializer.append(helper.make_tensor(names[3], TensorProto.INT8, [], [0]))
    place = list(model.graph.node).index(concat)
    model.graph.node.insert(place, helper.make_node("DequantizeLinear", [names[0], *names[2:]], [names[1]]))
    model.graph.node.insert(place, helper.make_node("QuantizeLinear", [concat.input[1], *names[2:]], [names[0]]))
    concat.input[1] = names[1]
    result = check_decode(model, tmp_path)
    graph = gs.import_onnx(result.model)
    writes = [n for n in graph.nodes if n.op == "TensorScatter"]
    assert [producer(n.inputs[1]).op for n in writes].count("DequantizeLinear") == 1


def test_a_scale_for_each_channel(tmp_path: Path) -> None:
    """Scales along the size of a head are the same for all rows."""

    def per_channel(g: Build, tensor: str) -> str:
        scales = g.constant(np.linspace(0.02, 0.05, g.decoder.size), np.float32)
        zeros = g.constant(np.zeros(g.decoder.size), INT8)
        small = g.node("QuantizeLinear", [tensor, scales, zeros], axis=3)
        return g.node("DequantizeLinear", [small, scales, zeros], axis=3)

    check_decode(make_decoder(Decoder(keys=per_channel, values=per_channel, opset=OPSET)), tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "behind the mask": ({"masked": rounds(INT8)}, "adds numbers other than 0 and the lowest"),
    "two scales": ({"scores": rounds(INT8, behind=0.5)}, "with scales .* the same in both: quantize symmetrically"),
    "a zero point": ({"weights": rounds(np.uint8, 1 / 255, zero=3)}, "zero points .*quantize symmetrically"),
    "no saturation": ({"weights": rounds(FP8, 0.1, saturate=0)}, "without saturation"),
    "capped before": ({"scores": rounds(INT8), "softcap": 3.0}, "rounds scores that are capped already"),
    "twice": (
        {"scores": lambda g, t: rounds(INT8, 0.5)(g, rounds(INT8)(g, t))},
        "computes something else",
    ),
    "keys without saturation": ({"keys": rounds(FP8, 0.1, saturate=0)}, "-?[0-9.]+ in the original, nan in the"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    settings, words = REFUSED[name]
    onnx.save(make_decoder(Decoder(opset=OPSET, **settings)), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY))


def rounded_as_a_whole(kind: Any, dtype: Any = np.float32, scale: float = 0.0625, cast: bool = False) -> ModelProto:
    """ModelOpt rounds the very output where attention reads it without repeating heads.

    With this scale no number lies so near the middle of two steps that float16 decides which one it becomes.
    """
    model = make_decoder(Decoder(kv_heads=4, dtype=dtype, opset=OPSET))
    concat = next(n for n in model.graph.node if n.output[0] == "present.0.value")
    concat.output[0] = "joined"
    number = numpy_helper.from_array(np.asarray(scale, dtype), "s")
    zero = helper.make_tensor("z", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), [], b"\0", raw=True)
    model.graph.initializer.extend([number, zero])
    last = "rounded" if cast else "present.0.value"
    more = [
        helper.make_node("QuantizeLinear", ["joined", "s", "z"], ["small"], name="rounds"),
        helper.make_node("DequantizeLinear", ["small", "s", "z"], [last]),
    ]
    if cast:
        more.append(helper.make_node("Cast", [last], ["present.0.value"], to=number.data_type))
    place = list(model.graph.node).index(concat) + 1
    for node in reversed(more):
        model.graph.node.insert(place, node)
    return model


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("cast", [False, True])
def test_a_cache_that_is_rounded_as_a_whole(tmp_path: Path, kind: Any, dtype: Any, cast: bool) -> None:
    result = check_decode(rounded_as_a_whole(kind, dtype, cast=cast), tmp_path, 1e-4 if dtype is np.float32 else 2e-2)
    graph = gs.import_onnx(result.model)
    writes = [n for n in graph.nodes if n.op == "TensorScatter"]
    assert [producer(n.inputs[1]).op for n in writes].count("DequantizeLinear") == 1
    assert sum(n.op == "QuantizeLinear" for n in graph.nodes) == 1


def test_a_cache_that_is_read_as_it_is_and_rounded_as_a_whole_is_refused(tmp_path: Path) -> None:
    model = rounded_as_a_whole(INT8)
    product = next(n for n in model.graph.node if "present.0.value" in n.input)
    product.input[1] = "joined"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=r"'rounds' rounds the cache 'past_key_values.0.value' as a whole"):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY))


def test_a_cache_that_concat_rounds_is_refused(tmp_path: Path) -> None:
    """As onnxruntime's quantize_static leaves it, unless products alone are quantized: each with a scale of its own."""
    model = rounded_as_a_whole(INT8)
    concat = next(n for n in model.graph.node if n.output[0] == "joined")
    place = list(model.graph.node).index(concat)
    for i, tensor in enumerate(list(concat.input)):
        scale = numpy_helper.from_array(np.float32(0.03 + i / 100), f"s{i}")
        model.graph.initializer.append(scale)
        back = helper.make_node("DequantizeLinear", [f"q{i}", f"s{i}", "z"], [f"r{i}"])
        model.graph.node.insert(place, back)
        model.graph.node.insert(place, helper.make_node("QuantizeLinear", [tensor, f"s{i}", "z"], [f"q{i}"]))
        concat = next(n for n in model.graph.node if n.output[0] == "joined")
        concat.input[i] = f"r{i}"
    onnx.save(model, tmp_path / "model.onnx")
    words = r"rounds the cache 'past_key_values.0.value' as a whole .* not Concat \(onnxruntime: op_types_to_quantize="
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY))


@pytest.mark.parametrize("scale", [1e-7, 3e-8])
def test_a_cache_that_changes_each_time_it_is_rounded_is_refused(tmp_path: Path, scale: float) -> None:
    """float8 times a scale that float16 hardly has comes out as other numbers."""
    onnx.save(rounded_as_a_whole(FP8, np.float16, scale), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="as a whole"):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY))


def test_scales_that_a_step_computes_are_refused(tmp_path: Path) -> None:
    def dynamic(g: Build, tensor: str) -> str:
        scale = g.node("Div", [g.node("ReduceMax", [tensor], keepdims=0), g.constant(127, np.float32)])
        small = g.node("QuantizeLinear", [tensor, scale, g.constant(0, INT8)])
        return g.node("DequantizeLinear", [small, scale, g.constant(0, INT8)])

    onnx.save(make_decoder(Decoder(keys=dynamic, opset=OPSET)), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="is no attention that the importer can prove"):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY))


@pytest.mark.parametrize("attribute", ["rounded_scores", "rounded_weights"])
def test_comparisons_notice(tmp_path: Path, attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode above would fail if a rounding were lost."""
    model = make_decoder(Decoder(attend=modelopt(INT8), opset=OPSET))
    with monkeypatch.context() as patched:
        patched.setattr(
            f"trt_kvcache.importer.planning.attention_facts.{attribute.removeprefix('rounded_').upper()}", "nothing"
        )
        with pytest.raises((UnsupportedModelError, AssertionError)):
            Decode(model, rewritten(model, tmp_path).model).check()


def as_written_from_torch(model: onnx.ModelProto) -> onnx.ModelProto:
    """Float8 operators as exports from torch have them: in NVIDIA's domain, the weight's as ONNX's by name alone."""
    zeros = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT8E4M3FN}
    for number, node in enumerate(n for n in model.graph.node if "quantizelinear" in n.op_type.lower()):
        node.domain = "trt"
        if number % 4 < 2:
            node.op_type = f"TRT_FP8{node.op_type}"
            del node.input[2:]
        assert all(name in zeros for name in node.input[2:])
    model.opset_import.add(domain="trt", version=1)
    return model


def test_operators_of_nvidia_s_domain(tmp_path: Path) -> None:
    decoder = Decoder(attend=modelopt(FP8), opset=OPSET)
    (tmp_path / "standard").mkdir()
    standard = rewritten(make_decoder(decoder), tmp_path / "standard")
    written = as_written_from_torch(make_decoder(decoder))
    result = rewritten(written, tmp_path)
    assert not {n.domain for n in result.model.graph.node} - {"", "ai.onnx"}
    Decode(make_decoder(decoder), result.model).check()
    assert lowered(result) == lowered(standard)
    report = verify_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY))
    report.check()
    assert report.original_engine.startswith("ONNX Runtime")


def test_nvidia_s_operators_in_an_old_opset_are_refused(tmp_path: Path) -> None:
    written = as_written_from_torch(make_decoder(Decoder(attend=modelopt(FP8), opset=OPSET)))
    written.opset_import[0].version = 18
    onnx.save(written, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="has no equal in opset 18; export with opset 19 or later"):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("parts", [PARTS, ("keys", "values")])
def test_builds(tmp_path: Path, kind: Any, parts: tuple[str, ...]) -> None:
    decoder = Decoder(attend=modelopt(kind, parts), dtype=np.float16, size=16, opset=OPSET)
    outcome = harness.build(rewritten(make_decoder(decoder), tmp_path))
    assert outcome.stage == "built", outcome.words
