"""Adapters as inputs of a rewritten model: which product is which module, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from adapters import LLAMAS, MODELS, TARGETS, Tiny, draw, write
from onnx import helper, numpy_helper
from safetensors.numpy import save_file

from trt_kvcache import (
    BuildOptions,
    DecodeSession,
    PlanOptions,
    VerifyOptions,
    build_engine,
    load_manifest,
    plan_model,
    rewrite_model,
    verify_model,
)
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import AdapterProduct, CachePlan, Role
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.proof_check import load_proof
from trt_kvcache.runtime.replay import replay

OPTIONS = PlanOptions(capacity=64, lora_rank=4)
TORCH = MODELS / "torch" / "llama_dynamic_float16_sdpa" / "model.onnx"
GENAI = MODELS / "ort-genai" / "llama_cpu_fp32" / "model.onnx"


def modules(plan: CachePlan) -> list[str]:
    assert plan.adapters is not None
    return [part.module for product in plan.adapters.products for part in product.parts]


def by_module(plan: CachePlan) -> dict[str, AdapterProduct]:
    assert plan.adapters is not None
    return {part.module: product for product in plan.adapters.products for part in product.parts}


@pytest.mark.parametrize(
    ("model", "found_by"),
    [("mobius/llama_static_f32", "its weight's name"), ("optimum/llama", "its node's name"),
     ("ort-genai/llama_cpu_int4", "its weight's name"), ("ort-genai/llama_trtrtx_fp16", "its weight's name")],
)  # fmt: skip
def test_names_say_which_product_is_which_module(model: str, found_by: str) -> None:
    options = PlanOptions(capacity=None if "static" in model else 64, lora_rank=4)
    plan = plan_model(MODELS / model / "model.onnx", options)
    block = {target: "mlp" if target in TARGETS[4:] else "self_attn" for target in TARGETS}
    if "genai" in model:
        block = {target: where.replace("self_attn", "attn") for target, where in block.items()}
    wanted = [f"model.layers.{layer}.{block[target]}.{target}" for layer in (0, 1) for target in TARGETS]
    assert sorted(modules(plan)) == sorted(wanted)
    assert plan.adapters is not None
    assert {product.found_by for product in plan.adapters.products} == {found_by}


def test_modules_that_were_fused_share_the_rank_of_all(tmp_path: Path) -> None:
    plan = plan_model(GENAI, OPTIONS)
    product = by_module(plan)["model.layers.0.attn.k_proj"]
    assert product.rank == 12
    assert [(part.start, part.stop) for part in product.parts] == [(0, 64), (64, 96), (96, 128)]
    two = by_module(plan_model(GENAI, replace(OPTIONS, lora_targets=("q_proj", "v_proj"))))
    assert {product.rank for product in two.values()} == {8}
    assert len(two) == 6
    whole = by_module(plan_model(GENAI, replace(OPTIONS, lora_targets=("qkv_proj",))))
    assert {product.rank for product in whole.values()} == {4}
    assert [t.shape for t in plan.tensors if t.role is Role.ADAPTER_WEIGHTS][:2] == [(9, 64, 12), (9, 12, 128)]


def checkpoint_of(model: Path, folder: Path, *, double: bool = False) -> Path:
    """The weights of a model as a checkpoint has them, by what the nodes of a stripped export multiply in order."""
    names = [
        f"model.layers.{i}.{'mlp' if t in TARGETS[4:] else 'self_attn'}.{t}.weight" for i in (0, 1) for t in TARGETS
    ]
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer}
    products = [n.input[1] for n in onnx.load(model).graph.node if n.op_type == "MatMul" and n.input[1] in weights]
    tensors = {
        name: np.ascontiguousarray(weights[product].T) for name, product in zip(names, products[:14], strict=True)
    }
    if double:
        tensors["model.layers.7.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"]
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_weights_say_it_where_names_do_not(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"cannot tell which products of the model belong .*; give the checkpoint of the model with",
    ):
        plan_model(TORCH, replace(OPTIONS, lora_targets=("q_proj",)))
    given = replace(OPTIONS, checkpoint=str(checkpoint_of(TORCH, tmp_path / "checkpoint")))
    plan = plan_model(TORCH, given)
    assert len(modules(plan)) == 14
    products = by_module(plan)
    assert products["model.layers.1.mlp.down_proj"].inputs == 128
    assert {product.dtype for product in products.values()} == {"float16"}
    assert {product.found_by for product in products.values()} == {"weights of checkpoint"}


def test_weights_that_two_modules_have_are_no_proof(tmp_path: Path) -> None:
    folder = checkpoint_of(TORCH, tmp_path / "checkpoint", double=True)
    plan = plan_model(TORCH, replace(OPTIONS, checkpoint=str(folder)))
    assert "model.layers.0.self_attn.q_proj" not in modules(plan)
    assert len(modules(plan)) == 13


def test_weights_of_fused_modules_are_found_side_by_side(tmp_path: Path) -> None:
    tiny = Tiny("ort-genai/llama_cpu_fp32")
    tensors = {f"{module}.weight": np.ascontiguousarray(tiny.weight(module).T) for module in tiny.modules}
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_model(GENAI, replace(OPTIONS, checkpoint=str(tmp_path)))
    assert sorted(modules(plan)) == sorted(tiny.modules)
    parts = by_module(plan)["model.layers.1.self_attn.v_proj"].parts
    assert [(part.start, part.stop) for part in parts] == [(0, 64), (64, 96), (96, 128)]


def test_a_checkpoint_of_another_model_is_not_taken_for_its_own(tmp_path: Path) -> None:
    tiny = Tiny("mobius/llama_static_f32")
    tensors = {f"{module}.weight": np.ascontiguousarray(tiny.weight(module).T + 1e-3) for module in tiny.modules}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match="cannot tell which products of the model belong to modules of the checkpoint"
    ):
        plan_model(TORCH, replace(OPTIONS, checkpoint=str(tmp_path)))
    with pytest.raises(OptionError, match="not a checkpoint: it has no .safetensors file"):
        plan_model(TORCH, replace(OPTIONS, checkpoint=str(tmp_path / "none")))


def test_targets_that_are_not_there_are_named_with_the_closest() -> None:
    with pytest.raises(UnsupportedModelError, match=r"product for the module 'q_prj'; it has .* for 'q_proj', '\w+'"):
        plan_model(LLAMAS["optimum/llama"], replace(OPTIONS, lora_targets=("q_prj",)))


@pytest.mark.parametrize(
    ("values", "words"),
    [({"lora_rank": 0}, "lora_rank is 0; it must be 1 to"), ({"lora_slots": 0}, "lora_slots is 0"),
     ({"lora_rank": "4"}, "lora_rank is '4'"), ({"lora_targets": ()}, r"lora_targets is \(\); it must be names"),
     ({"lora_targets": ("",)}, "lora_targets is"), ({"checkpoint": 3}, "checkpoint is 3")],
)  # fmt: skip
def test_options_that_make_no_sense(values: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        PlanOptions(**values)  # type: ignore[arg-type]


def test_a_product_whose_first_axis_is_unknown_is_refused(tmp_path: Path) -> None:
    """The hidden states have the tokens first: an adapter of a sequence would meet a token of all of them."""
    from decoders import DecoderConfig, make_decoder

    model = make_decoder(DecoderConfig(layers=1))
    graph = model.graph
    product = next(node for node in graph.node if node.op_type == "MatMul" and node.input[1].endswith("gate.weight"))
    product.name, x = "/model/layers.0/mlp/gate_proj/MatMul", product.input[0]
    turned = helper.make_node("Transpose", [x], ["turned"], "turn", perm=[1, 0, 2])
    back = helper.make_node("Transpose", ["back"], [product.output[0]], "back", perm=[1, 0, 2])
    product.input[0], product.output[0] = "turned", "back"
    at = list(graph.node).index(product)
    graph.node.insert(at + 1, back)
    graph.node.insert(at, turned)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=r"the model does not show that the first axis is the batch"):
        plan_model(tmp_path / "model.onnx", PlanOptions(lora_rank=4))


@pytest.mark.parametrize("model", ["mobius/llama_dynamic_f16_onnxstd", "ort-genai/llama_cpu_int4"])
def test_the_model_itself_stays_the_same(model: str) -> None:
    report = verify_model(MODELS / model / "model.onnx", OPTIONS, VerifyOptions(batch=2, chunks=(4, 2), tokens=2))
    report.check()


def test_a_rewritten_file_takes_adapters_and_is_verified(tmp_path: Path) -> None:
    model = LLAMAS["mobius/llama_dynamic_f32"]
    written = tmp_path / "rewritten.onnx"
    plan = rewrite_model(model, written, OPTIONS)
    assert plan.adapters is not None
    names = {value.name for value in onnx.load(written, load_external_data=False).graph.input}
    assert {"adapter", "lora.model.layers.1.mlp.down_proj.a"} <= names
    verify_model(model, verify=VerifyOptions(batch=1, chunks=(4,), tokens=2), rewritten=written).check()


def test_quantized_products_stay_and_the_adapter_is_added(tmp_path: Path) -> None:
    """Judged by the model as exported, with the change of each module as one more product beside the quantized one."""
    source = MODELS / "ort-genai" / "llama_cpu_int4"
    sizes = {"o_proj": (64, 64), "v_proj": (64, 32), "down_proj": (96, 64), "gate_proj": (64, 96)}
    rng, tensors = np.random.default_rng(5), {}
    model = onnx.load(source / "model.onnx")
    for layer, target in ((0, "v_proj"), (0, "o_proj"), (1, "gate_proj"), (1, "down_proj")):
        inputs, outputs = sizes[target]
        a = (rng.normal(size=(3, inputs)) / inputs**0.5).astype(np.float32)
        b = rng.normal(size=(outputs, 3)).astype(np.float32)
        block = "self_attn" if target in TARGETS[:4] else "mlp"
        module = f"model.layers.{layer}.{block}.{target}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        change = 2 * (b @ a).T
        if target == "v_proj":
            change = np.concatenate([np.zeros((64, 96), np.float32), change], 1)
        called = f"/model/layers.{layer}/{block.replace('self_', '')}/{'qkv_proj' if target == 'v_proj' else target}/"
        nodes = model.graph.node
        at = next(i for i, node in enumerate(nodes) if node.name.startswith(called) and node.op_type == "MatMulNBits")
        (result,) = nodes[at].output
        nodes[at].output[0] = f"{module}.own"
        model.graph.initializer.append(numpy_helper.from_array(change, f"{module}.change"))
        nodes.insert(at + 1, helper.make_node("Add", [f"{module}.own", f"{module}.more"], [result], f"{module}.add"))
        more = helper.make_node("MatMul", [nodes[at].input[0], f"{module}.change"], [f"{module}.more"], f"{module}.m")
        nodes.insert(at + 1, more)
    write(tmp_path / "a", tensors, {"r": 3, "lora_alpha": 6})
    onnx.save(model, tmp_path / "model.onnx")
    scores = []
    for path, adapters in ((tmp_path / "model.onnx", None), (source / "model.onnx", {"a": tmp_path / "a"})):
        with DecodeSession.open(path, tokenizer=False, adapters=adapters, capacity=64) as session:
            slot = session.cache.acquire(adapter="a" if adapters else None)
            scores.append(session.update({slot: [5, 17, 33, 70, 91]}, keep=5)[slot])
            if adapters:
                base = session.cache.acquire()
                scores.append(session.update({base: [5, 17, 33, 70, 91]}, keep=5)[base])
    assert np.abs(scores[0] - scores[1]).max() < 1e-4
    assert np.abs(scores[1] - scores[2]).max() > 0.1


def test_quantized_caches_take_adapters(tmp_path: Path) -> None:
    tiny = Tiny("mobius/llama_dynamic_f32")
    merged = tiny.merged(draw(tiny, tmp_path / "a", 3), tmp_path / "merged" / "model.onnx")
    options = PlanOptions(capacity=64, cache_dtype="int8")  # type: ignore[arg-type]
    scores = []
    for model, adapters in ((merged, None), (tiny.path, {"a": tmp_path / "a"})):
        with DecodeSession.open(model, tokenizer=False, adapters=adapters, plan_options=options) as session:
            slot = session.cache.acquire(adapter="a" if adapters else None)
            scores.append(session.update({slot: [5, 17, 33, 70, 91]}, keep=5)[slot])
    assert np.abs(scores[0] - scores[1]).max() < 0.02 * np.abs(scores[0]).max()


def test_tensorrt_for_rtx_builds_an_engine_that_takes_adapters(tmp_path: Path) -> None:
    """Its proof holds whatever lies in the slots that no sequence chooses."""
    folder, model = tmp_path / "engine", LLAMAS["mobius/llama_dynamic_f32"]
    options = replace(OPTIONS, lora_slots=2)
    build = BuildOptions(max_batch=2, max_chunk=4, backend="tensorrt-rtx")
    plan = build_engine(model, f"{folder}/", options=options, build=build).plan
    assert load_manifest(folder).plan.adapters == plan.adapters
    weights = [t for t in plan.tensors if t.role is Role.ADAPTER_WEIGHTS]
    assert plan.adapter_bytes() * 3 == sum(4 * int(np.prod(t.shape)) for t in weights)
    runner = OnnxRuntimeRunner(model, options, max_batch=2, max_chunk=4)
    for tensor in weights:
        runner.write_adapter(tensor.name, 2, np.full(tensor.shape[1:], 9, np.float32))
    assert replay(runner, load_proof(load_manifest(folder), folder / "model.engine")).passed
    runner.close()


def test_adapters_as_onnxruntime_genai_takes_them_are_refused_by_name(tmp_path: Path) -> None:
    """Its exports can take the factors of one adapter, for all sequences, as inputs."""
    model = onnx.load(GENAI)
    product = next(node for node in model.graph.node if node.name == "/model/layers.0/attn/o_proj/MatMul")
    (x, _), (y,), stem = product.input, product.output, "model.layers.0.attn.o_proj"
    product.output[0] = "own"
    at = list(model.graph.node).index(product) + 1
    factors = [f"{stem}.lora_{side}.MatMul.weight" for side in "AB"]
    for name, shape in zip(factors, ((64, "r"), ("r", 64)), strict=True):
        model.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    for node in reversed([
        helper.make_node("MatMul", [x, factors[0]], ["low"], "/model/layers.0/attn/o_proj/lora_A/MatMul"),
        helper.make_node("MatMul", ["low", factors[1]], ["change"], "/model/layers.0/attn/o_proj/lora_B/MatMul"),
        helper.make_node("Add", ["own", "change"], [y], "sum"),
    ]):  # fmt: skip
        model.graph.node.insert(at, node)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(
        UnsupportedModelError, match=r"lora_A.MatMul.weight' .* takes the weights of an adapter for all "
    ):
        DecodeSession.open(tmp_path / "model.onnx", tokenizer=False, capacity=64)
