"""Right models pass at every station; wrong ones fail at the first one that is wrong, by step, text and token."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_graphs import Decoder as Growing
from concat_graphs import make_decoder as make_growing
from decoders import DecoderConfig, make_decoder, write_decoder
from foreign_decoders import make_foreign
from hybrids import hybrid_model
from onnx import ModelProto, TensorProto, helper, numpy_helper
from plain_graphs import plain_model
from stored import MODELS
from verify import mistakes as m

from trt_kvcache.compare.rewritten_model import output_of
from trt_kvcache.compare.verify_report import VerifyOptions, VerifyReport
from trt_kvcache.errors import OptionError, UnsupportedModelError, VerificationError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.cache_plan import CacheDtype, PlanOptions, UpdateMode
from trt_kvcache.runtime.ort import ort_runner
from trt_kvcache.verify import verify_import, verify_model

REWRITTEN = VerifyOptions(station=("rewritten",))
HEADS = DecoderConfig(form="heads-major")


def _imported(model: ModelProto, folder: Path, capacity: int | None = 24) -> ImportedModel:
    onnx.save(model, folder / "model.onnx")
    return import_model(folder / "model.onnx", PlanOptions(capacity=capacity))


def _fails(report: VerifyReport, station: str = "rewritten") -> None:
    failed = [s for s in report.stations if not s.passed]
    assert [s.name for s in failed] == [station]
    with pytest.raises(
        VerificationError, match=rf"{station}: logits (differ by|are not finite).* at token \d+ of text \d"
    ):
        report.check()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "capacity"),
    [("torch/gemma3_rolled_sdpa", None), ("optimum/t5", None), ("mobius/gemma4_dynamic_f32_gqa", None),
     ("plain-torch/where_dynamo_op18", None), ("torch/deepseek_v3_dynamic_eager", 40)],
)  # fmt: skip
def test_exports_of_every_kind(name: str, capacity: int | None) -> None:
    report = verify_model(MODELS / name / "model.onnx", PlanOptions(capacity=capacity))
    report.check()
    compared = {s.name for s in report.stations if s.compared}
    assert compared == {"rewritten", "network"} | ({"session"} if "plain" not in name else set()), report.stations
    assert all(s.difference < 1e-5 for s in report.stations if s.compared)


@pytest.mark.parametrize("sequence", ["S", 1])
def test_rings_wrap(tmp_path: Path, sequence: int | str) -> None:
    report = verify_model(write_decoder(tmp_path / "m.onnx", DecoderConfig(mode="circular", sequence=sequence)))
    report.check()
    assert report.positions > 3 * 64


CANONICAL = [
    (m.no_lengths, HEADS),
    (m.no_lengths, replace(HEADS, dtype="float16")),
    (m.no_lengths, replace(HEADS, dtype="bfloat16")),
    (m.attention("is_causal", 0), HEADS),
    (m.lengths("Max", 5), HEADS),
    (m.attention("scale", 0.2), replace(HEADS, dtype="float16")),
    (m.attention("scale", 0.255), replace(HEADS, dtype="float16")),  # 2 %
    (m.swap_heads, HEADS),
    (m.swap_keys_and_values, HEADS),
    (m.write_one_early, HEADS),
    (m.neither_mask_nor_causal, replace(HEADS, mask="bool")),  # each hides what the other does
    (m.rows("Mod", 63), DecoderConfig(form="heads-major", mode="circular", sequence=1)),
    (m.nan_logits, HEADS),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("mistake", "config"), CANONICAL)
def test_a_wrong_model_fails(tmp_path: Path, mistake: m.Mistake, config: DecoderConfig) -> None:
    """The model as exported, with a mistake, plays the rewritten one: they have one interface."""
    path = write_decoder(tmp_path / "m.onnx", config)
    imported = import_model(path, PlanOptions(attention_span=False, logits="all", cache_layout="preserve"))
    imported = replace(imported, model=imported.source.proto)
    m.verify_with(imported, m.nothing).check()
    _fails(m.verify_with(imported, mistake))


ORIGINALS: dict[str, Callable[[], ModelProto]] = {
    **{str(how): (lambda how=how: make_growing(Growing(**how))) for how in (
        {}, {"mask": "padding", "positions": "padding"}, {"window": 5}, {"dtype": np.float16}, {"batch": 2})},
    "scatter": lambda: make_foreign("scatter", DecoderConfig(vocab=64, capacity=24)),
}  # fmt: skip
IN_ANY = (m.span_short_by_one, m.own_key_hidden, m.next_key_visible, m.write_one_early, m.swap_keys_and_values)


@pytest.mark.few(4)
@pytest.mark.parametrize("mistake", IN_ANY)
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_wrong_rewrite_fails(tmp_path: Path, name: str, mistake: m.Mistake) -> None:
    imported = _imported(ORIGINALS[name](), tmp_path)
    assert imported.plan.original
    _fails(m.verify_with(imported, mistake))


@pytest.mark.few(2)
@pytest.mark.parametrize("mistake", [*m.IN_REWRITES, m.one_position_early])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_mistake_of_the_importer_fails(tmp_path: Path, dtype: str, mistake: m.Mistake) -> None:
    imported = import_model(write_decoder(tmp_path / "m.onnx", DecoderConfig(dtype=dtype)))
    _fails(m.verify_with(imported, mistake))


def _round_to_bfloat16(model: ModelProto) -> None:
    """Numbers of the last layer lose digits, which only the rewritten side knows."""
    for node in m.nodes(model, "TensorScatter")[-2:]:
        m.insert(model, node, 1, "Cast", to=TensorProto.FLOAT)
        m.insert(
            model, next(n for n in model.graph.node if n.output[0] == node.input[1]), 0, "Cast", to=TensorProto.BFLOAT16
        )


def test_rounding_of_the_rewritten_model_allows_it_nothing(tmp_path: Path) -> None:
    """What is allowed follows from the model as exported alone."""
    imported = import_model(write_decoder(tmp_path / "m.onnx", DecoderConfig()))
    _fails(m.verify_with(imported, _round_to_bfloat16))


@pytest.mark.parametrize("seed", [2, 5001])
def test_windows_that_became_rings(tmp_path: Path, seed: int) -> None:
    plain = plain_model(seed, ("ring",))
    onnx.save(plain.model, tmp_path / "model.onnx")
    imported = import_model(tmp_path / "model.onnx", plain.options)
    assert {c.mode for c in imported.plan.caches} == {UpdateMode.CIRCULAR}
    verify_import(imported, REWRITTEN).check()

    def shift(model: ModelProto) -> None:
        node = next(n for n in m.nodes(model, "Sub") if "window_oldest" in n.output[0])
        tensor = next(t for t in model.graph.initializer if t.name == node.input[1])
        node.input[1] = m.constant(model, numpy_helper.to_array(tensor) - 1)

    _fails(m.verify_with(imported, shift))


def test_state_that_the_rewritten_model_drops_shows(tmp_path: Path) -> None:
    """A rewritten model that starts from zeros in every step is right in the first step of a text only."""
    imported = _imported(hybrid_model(), tmp_path, None)
    verify_import(imported, REWRITTEN).check()

    def drop(model: ModelProto) -> None:
        state = imported.plan.states[0].past
        for node in model.graph.node:
            node.input[:] = ["nothing" if name == state else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("Sub", [state, state], ["nothing"]))

    report = m.verify_with(imported, drop)
    _fails(report)
    assert "in step 1 " not in report.stations[0].failure


@pytest.mark.parametrize("fault", ["a lost mask", "a late row"])
def test_a_fault_of_the_sessions_fusion_shows(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A session puts GroupQueryAttention in the place of what the plan names: nothing else compares that."""
    fuse = ort_runner.fuse_attention

    def wrong(model: ModelProto, *given: Any) -> ModelProto:
        fused = fuse(model, *given)
        node = m.nodes(fused, "GroupQueryAttention")[-1]
        if fault == "a lost mask":
            m.insert(fused, node, 5, "Add", m.constant(fused, [1], np.int32))
        else:
            m.set_attribute(node, "scale", 0.26)
        return fused

    monkeypatch.setattr(ort_runner, "fuse_attention", wrong)
    report = verify_model(MODELS / "optimum/llama/model.onnx", verify=VerifyOptions(station=("rewritten", "session")))
    _fails(report, "session")


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [CacheDtype.INT8, CacheDtype.INT4])
@pytest.mark.parametrize("fault", ["none", "sign", "keys and values", "a layer of zeros", "2 % of a scale"])
def test_quantized_caches_are_compared_with_a_model_that_rounds(
    monkeypatch: pytest.MonkeyPatch, kind: CacheDtype, fault: str
) -> None:
    """How much quantization changes is a figure; whether it is right is another question, and a tight one."""
    from trt_kvcache import verify as verifying

    quantize = verifying.quantize_caches

    def wrong(imported: ImportedModel, **options: Any) -> ImportedModel:
        made = quantize(imported, **options)
        if fault == "none" or made is imported:
            return made
        reshaped = [n for n in made.model.graph.node if n.op_type == "TensorScatter"]
        if fault == "keys and values":
            keys, values = reshaped[:2]
            keys.input[1], values.input[1] = values.input[1], keys.input[1]
            return made
        turned = next(n for n in made.model.graph.node if n.op_type == "Cast" and n.name.endswith("wide:Cast"))
        factor = {"sign": -1.0, "a layer of zeros": 0.0, "2 % of a scale": 1.02}[fault]
        m.insert(made.model, turned, 0, "Mul", m.constant(made.model, factor, np.float32))
        return made

    monkeypatch.setattr(verifying, "quantize_caches", wrong)
    options = PlanOptions(capacity=64, cache_dtype=kind)
    report = verify_model(MODELS / "optimum/llama/model.onnx", options, VerifyOptions(station=("quantized",)))
    assert report.quality is not None
    assert 0 < report.quality.typical < 0.5
    assert report.passed is (fault == "none"), report.stations


def wrong_scale(model: ModelProto) -> None:
    m.set_attribute(m.nodes(model, "Attention")[-1], "scale", 0.9)


@pytest.mark.parametrize("mistake", [wrong_scale, m.swap_keys_and_values])
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["optimum/llama", "transformers/llama_static", "torch/gemma3_rolled_sdpa"])
def test_the_first_layer_that_differs_is_named(name: str, mistake: m.Mistake) -> None:
    """Both faults are in the attention of layer 1; layer 0 and what comes after are right."""
    imported = import_model(MODELS / name / "model.onnx", PlanOptions(capacity=64 if name == "optimum/llama" else None))
    failure = m.verify_with(imported, mistake).stations[0].failure
    found = re.search(r"; the first layer that differs is '.*' \(\w+\), whose output is '(.*)'$", failure)
    assert found is not None, failure
    names = [output for node in imported.model.graph.node for output in node.output]
    attention = [names.index(n.output[0]) for n in imported.model.graph.node if n.op_type == "Attention"]
    assert attention[-1] <= names.index(found[1]) <= attention[-1] + 3, failure


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["optimum/t5", "optimum/bloom", "mobius/gemma4_dynamic_f16", "ort-genai/gptoss_cpu_int4",
             "plain-torch/index_copy_dynamo_op18", "torch/llama_static_wrap_op20"],
)  # fmt: skip
def test_no_right_layer_is_named(name: str) -> None:
    """Only the last layer is wrong: neither caches with garbage of their own nor reused names come before it."""
    imported = import_model(MODELS / name / "model.onnx", PlanOptions(capacity=None if "torch/" in name else 24))
    output = output_of(imported.plan)

    def scale(model: ModelProto) -> None:
        node = next(n for n in model.graph.node if output in n.output)
        node.output[0] = "right"
        model.graph.node.append(helper.make_node("Mul", ["right", "factor"], [output], name="wrong"))
        kind = next(t.dtype for t in imported.plan.tensors if t.name == output)
        factor = np.asarray(1.1, np.float16 if kind == "float16" else np.float32)
        model.graph.initializer.append(numpy_helper.from_array(factor, "factor"))

    failure = m.verify_with(imported, scale).stations[0].failure
    assert "logits differ by 0.1" in failure
    found = re.search(r"first layer that differs is '(.*)'", failure)
    assert found is None or found[1] == f"wrong' (Mul), whose output is '{output}", failure


def with_extra_input(dtype: int) -> ModelProto:
    """A decoder with an input that scales the logits: nothing says what it is."""
    model = make_decoder(DecoderConfig())
    model.graph.node[-1].output[0] = "unscaled"
    model.graph.input.append(helper.make_tensor_value_info("temperature_scale", dtype, [256]))
    model.graph.node.append(
        helper.make_node("Cast", ["temperature_scale"], ["factor"], name="cast", to=TensorProto.FLOAT)
    )
    model.graph.node.append(helper.make_node("Mul", ["unscaled", "factor"], ["logits"], name="scale"))
    return model


def test_unexplained_inputs(tmp_path: Path) -> None:
    onnx.save(with_extra_input(TensorProto.FLOAT), tmp_path / "model.onnx")
    verify_model(tmp_path / "model.onnx", verify=REWRITTEN).check()
    onnx.save(with_extra_input(TensorProto.INT64), tmp_path / "model.onnx")
    verify_model(tmp_path / "model.onnx", verify=REWRITTEN).check()
    np.savez(tmp_path / "values.npz", temperature_scale=np.arange(256) % 3 + 1)
    verify_model(tmp_path / "model.onnx", verify=replace(REWRITTEN, inputs=str(tmp_path / "values.npz"))).check()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nobody": np.zeros(1)}, "'nobody', which is not an input of the model; inputs are input_ids"),
        ({"write_indices": np.zeros(3)}, r"'write_indices' \(write_indices\), which verification sets itself"),
        ({}, r"cannot be read as an \.npz file"),
    ],
)
def test_given_values_must_fit(tmp_path: Path, values: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "values.npz", **values)
    if not values:
        (tmp_path / "values.npz").write_text("no archive")
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig())
    with pytest.raises(OptionError, match=message):
        verify_model(path, verify=VerifyOptions(inputs=str(tmp_path / "values.npz")))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"chunks": (0,)}, r"chunks are \[0\]"),
        ({"chunks": (), "tokens": 0}, "at least one step"),
        ({"tolerance": 1.5}, "tolerance is 1.5"),
        ({"thorough": "yes"}, "thorough"),
        ({"station": ("engine",)}, "there is no station .engine.; stations are rewritten, quantized, session, network"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        VerifyOptions(**wrong)


def test_a_mask_that_all_sequences_share(tmp_path: Path) -> None:
    """Then all are as long as each other, although positions have a row for each."""
    model = make_growing(Growing(mask="own", apply="where"))
    value = next(v for v in model.graph.input if v.name == "mask")
    value.type.tensor_type.shape.dim[0].dim_value = 1
    verify_import(_imported(model, tmp_path), REWRITTEN).check()


def test_a_model_without_another_output_than_caches_is_refused(tmp_path: Path) -> None:
    model = make_decoder(DecoderConfig())
    kept = [o for o in model.graph.output if o.name != "logits"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises((OptionError, UnsupportedModelError), match="no output except its caches|logits"):
        verify_model(tmp_path / "model.onnx", verify=REWRITTEN)
