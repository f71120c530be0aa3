"""Models of 16 bits whose caches come, or come and go, in another type, as converters leave them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper
from stored import MODELS, edited

from trt_kvcache import VerifyOptions
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model, plan_model
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.verify import verify_import

FLOAT, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
SOURCES = {
    "optimum/llama_fp16": 40,  # Concat
    "mobius/llama_dynamic_f16_onnxstd": 40,  # Attention
    "ort-genai/llama_trtrtx_fp16": 40,  # GroupQueryAttention
    "torch/llama_dynamic_float16_sdpa": 40,
    "torch/llama_static_wrap_op20": None,  # ScatterND
}


def keep_io_types(model: ModelProto, *, each: bool = False) -> None:
    """Casts around everything; with `each`, every reader has one of its own, as onnxconverter-common writes them."""
    before, after = [], []
    for value in (v for v in model.graph.input if v.type.tensor_type.elem_type == FLOAT16):
        value.type.tensor_type.elem_type = FLOAT
        for number, node in enumerate(n for n in model.graph.node if value.name in n.input):
            inner = f"{value.name}_cast_{number if each else 0}"
            node.input[:] = [inner if name == value.name else name for name in node.input]
            if each or not number:
                before.append(helper.make_node("Cast", [value.name], [inner], inner, to=FLOAT16))
    for value in (v for v in model.graph.output if v.type.tensor_type.elem_type == FLOAT16):
        value.type.tensor_type.elem_type = FLOAT
        inner = f"{value.name}_uncast"
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == value.name else name for name in names]
        after.append(helper.make_node("Cast", [inner], [value.name], inner, to=FLOAT))
    nodes = [*before, *model.graph.node, *after]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def in_bfloat16(model: ModelProto) -> None:
    """Everything of float16 in bfloat16 instead."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == FLOAT16:
            value.type.tensor_type.elem_type = BFLOAT16
    tensors = [a.t for node in model.graph.node for a in node.attribute if a.type == AttributeProto.TENSOR]
    for tensor in (t for t in (*model.graph.initializer, *tensors) if t.data_type == FLOAT16):
        values = numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(helper.make_tensor(tensor.name, BFLOAT16, values.shape, values.tobytes(), raw=True))
    for attribute in (a for node in model.graph.node for a in node.attribute if a.name == "to" and a.i == FLOAT16):
        attribute.i = BFLOAT16


def keep_pasts(model: ModelProto, taken: int) -> None:
    """Casts behind the inputs alone, which are of another type than what they come from."""
    kept = {v.type.tensor_type.elem_type for v in model.graph.output} & {FLOAT16, BFLOAT16}
    (kind,) = kept
    for value in [v for v in model.graph.input if v.type.tensor_type.elem_type == kind]:
        value.type.tensor_type.elem_type = taken
        inner = f"{value.name}_cast"
        for node in model.graph.node:
            node.input[:] = [inner if name == value.name else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("Cast", [value.name], [inner], inner, to=kind))


def types(model: ModelProto) -> dict[str, int]:
    return {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}


@pytest.mark.few(2)
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_caches_get_the_type_that_they_are_cast_to(tmp_path: Path, source: str, each: bool) -> None:
    options = PlanOptions(capacity=SOURCES[source])
    path = edited(source, tmp_path, lambda model: keep_io_types(model, each=each))
    found, bare = import_model(path, options), import_model(MODELS / source / "model.onnx", options)
    assert {c.dtype for c in found.plan.caches} == {"float16"}
    assert types(found.model) == types(bare.model) | {"logits": FLOAT}
    added = [n for n in found.model.graph.node if n.op_type == "Cast" and n.output[0] == "logits"]
    assert len(found.model.graph.node) == len(bare.model.graph.node) + len(added)
    verify_import(found, VerifyOptions(tokens=6)).check()


@pytest.mark.few(2)
@pytest.mark.parametrize("source", ["optimum/llama_fp16", "torch/llama_static_wrap_op20"])
@pytest.mark.parametrize(("kept", "taken"), [("float16", FLOAT), ("bfloat16", FLOAT), ("bfloat16", FLOAT16)])
def test_pasts_alone_may_come_in_a_type_that_holds_more(tmp_path: Path, source: str, kept: str, taken: int) -> None:
    def edit(model: ModelProto) -> None:
        if kept == "bfloat16":
            in_bfloat16(model)
        keep_pasts(model, taken)

    options = PlanOptions(capacity=SOURCES[source])
    path = edited(source, tmp_path, edit)
    found = import_model(path, options)
    plan = found.plan
    assert {c.dtype for c in plan.caches} == {kept}
    why = {(c.io, c.old): (c.new, c.why) for c in plan.changes}
    old = helper.tensor_dtype_to_string(taken).removeprefix("TensorProto.").lower()
    for cache in plan.caches:
        assert why["input", f"{cache.past} {old}"] == (
            f"{cache.past} {kept}",
            f"the model reads and writes it as {kept}",
        )
    verify_import(found, VerifyOptions(tokens=6)).check()


@pytest.mark.parametrize("source", ["optimum/llama_fp16", "torch/llama_static_wrap_op20"])
def test_pasts_in_a_type_that_holds_less_are_refused(tmp_path: Path, source: str) -> None:
    path = edited(source, tmp_path, lambda model: keep_pasts(model, BFLOAT16))
    with pytest.raises(UnsupportedModelError, match="comes as bfloat16 and goes as float16 .*convert the model again"):
        plan_model(path, PlanOptions(capacity=SOURCES[source]))


@pytest.mark.parametrize("source", ["optimum/llama_fp16", "torch/llama_static_wrap_op20"])
def test_the_plan_names_the_new_type(tmp_path: Path, source: str) -> None:
    plan = plan_model(edited(source, tmp_path, keep_io_types), PlanOptions(capacity=SOURCES[source]))
    why = {(c.io, c.old): (c.new, c.why) for c in plan.changes}
    for cache in plan.caches:
        for io, name in (("input", cache.past), ("output", cache.present)):
            assert why[io, f"{name} float"] == (f"{name} float16", "the model reads and writes it as float16")
    assert {t.dtype for t in plan.original if "cache" in t.role.value} == {"float"}


def read_wide(model: ModelProto) -> None:
    keep_io_types(model)
    model.graph.node.append(helper.make_node("Neg", ["past_key_values.0.key"], ["seen"], "look"))
    model.graph.output.append(helper.make_tensor_value_info("seen", FLOAT, ["b", "n", "p", "d"]))


def other_types(model: ModelProto) -> None:
    keep_io_types(model, each=True)
    node = next(n for n in model.graph.node if n.op_type == "Cast" and n.input[0] == "past_key_values.0.key")
    model.graph.node.insert(0, helper.make_node("Cast", [node.input[0]], ["double"], "twice", to=TensorProto.DOUBLE))
    model.graph.node.append(helper.make_node("Shape", ["double"], ["size"], "size"))
    model.graph.output.append(helper.make_tensor_value_info("size", TensorProto.INT64, [4]))


def written_wide(model: ModelProto) -> None:
    keep_io_types(model)
    model.graph.node.append(helper.make_node("Neg", ["present.0.key"], ["seen"], "look"))
    model.graph.output.append(helper.make_tensor_value_info("seen", FLOAT, ["b", "n", "p", "d"]))


@pytest.mark.parametrize(
    ("edit", "op"), [(read_wide, "Neg 'look'"), (other_types, "Cast 'twice'"), (written_wide, "Neg 'look'")]
)
def test_a_cache_that_is_read_as_it_comes_is_refused(
    tmp_path: Path, edit: Callable[[ModelProto], None], op: str
) -> None:
    path = edited("optimum/llama_fp16", tmp_path, edit)
    with pytest.raises(
        UnsupportedModelError, match=f"{op} reads (its past as well|the cache 'p.*' and is no attention)"
    ):
        plan_model(path, PlanOptions(capacity=40))


def test_attention_may_read_a_cache_as_it_comes(tmp_path: Path) -> None:
    """onnxconverter-common leaves what reads such an output in float32."""

    def narrow(model: ModelProto) -> None:
        write = next(node for node in model.graph.node if node.output[0] == "k_cache_out")
        names = [*write.input[1:], "k_cache_out"]
        write.input[1:], write.output[0] = [f"{name}_narrow" for name in names[:2]], "k_cache_narrow_out"
        for name in names[:2]:
            model.graph.node.append(helper.make_node("Cast", [name], [f"{name}_narrow"], f"narrow {name}", to=FLOAT16))
        model.graph.node.append(helper.make_node("Cast", ["k_cache_narrow_out"], names[2:], "wide", to=FLOAT))

    found = import_model(edited("plain-torch/where_dynamo_op18", tmp_path, narrow))
    assert "float16" in {c.dtype for c in found.plan.caches}
    verify_import(found, VerifyOptions(tokens=6)).check()


@pytest.mark.parametrize("to", [FLOAT, FLOAT16])
def test_a_cache_that_is_given_twice_is_refused(tmp_path: Path, to: int) -> None:
    def twice(model: ModelProto) -> None:
        keep_io_types(model)
        model.graph.node.append(helper.make_node("Cast", ["present.0.key_uncast"], ["again"], "again", to=to))
        model.graph.output.append(helper.make_tensor_value_info("again", to, ["b", "n", "p", "d"]))

    with pytest.raises(UnsupportedModelError, match="'past_key_values.0.key' and is no attention|has two results"):
        plan_model(edited("optimum/llama_fp16", tmp_path, twice), PlanOptions(capacity=40))
