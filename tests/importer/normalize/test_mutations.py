"""Decoders of real exporters, changed at random: refused by name, or rewritten with the same numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mutation_masks
import mutation_trials
import numpy as np
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from mutation_cuts import CAPACITY as SHORT
from mutation_cuts import Pair, exposed, trial
from mutation_trials import VERIFY, judge, mutant
from onnx import ModelProto, helper, numpy_helper
from stored import MODELS, edited

from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions

SOURCES = (
    "optimum/llama", "mobius/llama_dynamic_f32", "mobius/llama_static_f32", "ort-genai/llama_cpu_fp32",
    "torch/llama_static_wrap_op24", "transformers/llama_static", "plain-torch/mod_index_put_dynamo_op18",
    "plain-torch/where_dynamo_op18",
)  # fmt: skip
CAPACITY = {"optimum": 40, "mobius/llama_dynamic_f32": 40, "ort-genai": 40, "transformers": 40}
QUICK = replace(VERIFY, batch=2, tokens=2)


def options(source: str) -> PlanOptions:
    return PlanOptions(capacity=next((c for name, c in CAPACITY.items() if source.startswith(name)), None))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_a_changed_decoder_is_refused_or_keeps_its_numbers(tmp_path: Path, source: str) -> None:
    found: Counter[str] = Counter()
    for seed in range(3):
        path, done = mutant(MODELS / source / "model.onnx", tmp_path, seed)
        word, reason = judge(path, options(source), QUICK)
        assert word in ("refused", "equal", "ill"), f"seed {seed}: {done}: {reason}"
        found[word] += 1
    assert found["refused"] + found["equal"]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_masks_that_overflow(seed: int) -> None:
    words = Counter(mutation_masks.trial(10 * seed + i)[0] for i in range(10))
    assert set(words) <= {"equal", "refused"}, words
    assert words["equal"] > 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("pair") / "model.onnx"
    onnx.save(make_decoder(Decoder(layers=2)), path)
    return Pair(path, PlanOptions(capacity=SHORT))


def test_faults_of_a_rewritten_model(pair: Pair) -> None:
    """Whatever the check takes has the same numbers."""
    words = Counter(trial(pair, seed)[0] for seed in range(20))
    assert not words["wrong"]
    assert words["refused"]


def test_faults_in_the_cutting(pair: Pair) -> None:
    """What a wrong cut hides is found by the whole models; what the right one takes is right."""
    found = Counter(exposed(pair, seed)[1] for seed in range(10))
    assert not found["missed"]
    assert found["whole models"]


def test_other_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "torch/llama_static_wrap_op24"
    rewritten = import_model(MODELS / source / "model.onnx")

    def scaled(model: ModelProto) -> None:
        attributes = (a for n in model.graph.node if n.op_type == "Attention" for a in n.attribute)
        next(a for a in attributes if a.name == "scale").f *= 2

    path = edited(source, tmp_path, scaled)
    assert judge(path, PlanOptions(), QUICK) == ("equal", "")
    monkeypatch.setattr(mutation_trials, "import_model", lambda *a: replace(import_model(*a), model=rewritten.model))
    assert judge(path, PlanOptions(), QUICK)[0] == "wrong"


def mask_transposed(model: ModelProto) -> None:
    where = next(n for n in model.graph.node if n.op_type == "Where")
    model.graph.node.insert(0, helper.make_node("Transpose", ["mask"], ["turned"], perm=[0, 1, 3, 2]))
    where.input[0] = "turned"


def no_permutation(model: ModelProto) -> None:
    for node in model.graph.node:
        if node.name == "node_transpose":
            node.attribute[0].ints[:] = [1, 2, 1, 3]


def numbers_as_queries(model: ModelProto) -> None:
    attention = next(n for n in model.graph.node if n.op_type == "Attention")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 64), np.int64), "numbers"))
    attention.input[0] = "numbers"


def two_positions(model: ModelProto) -> None:
    value = next(v for v in model.graph.input if v.name == "position_ids")
    value.type.tensor_type.shape.dim[1].dim_value = 2


def two_keys_in_the_mask(model: ModelProto) -> None:
    value = next(v for v in model.graph.input if v.name == "mask")
    value.type.tensor_type.shape.dim[3].dim_value = 2


def divided_by_sine(model: ModelProto) -> None:
    """At position 0 keys are infinite, which the guard of the softmax hides in the original."""
    next(n for n in model.graph.node if n.name == "/model/layers.0/self_attn/Mul_3").op_type = "Div"


FINDINGS = (
    ("optimum/llama", two_positions, "are 2 for a step of 3 tokens; supported is one for each token"),
    ("optimum/llama", divided_by_sine, "0 in the original, nan in the rewritten model"),
    ("plain-torch/index_put_batch_dynamo_op18", two_keys_in_the_mask, "breaks a rule of ONNX: Incompatible dimensions"),
    ("plain-torch/scatter_dynamo_op18", mask_transposed, "reads the cache .* and is no attention"),
    (
        "plain-torch/onehot_mul_dynamo_op24",
        no_permutation,
        "breaks a rule of ONNX: Attribute perm .* repeated",
    ),
    ("mobius/llama_static_f32", numbers_as_queries, "of int64 and .* of float, where ONNX demands one type"),
)


@pytest.mark.parametrize(("source", "edit", "message"), FINDINGS)
def test_what_mutations_found_is_refused(
    tmp_path: Path, source: str, edit: Callable[[ModelProto], None], message: str
) -> None:
    word, reason = judge(edited(source, tmp_path, edit), options(source))
    assert word == "refused", reason
    assert re.search(message, reason)


@pytest.mark.parametrize(
    ("source", "op", "name"),
    [
        ("mobius/llama_static_f32", "Attention", "is_causal"),
        ("mobius/llama_dynamic_f32", "Attention", "is_causal"),
        ("mobius/llama_dynamic_f32", "RotaryEmbedding", "interleaved"),
        ("ort-genai/llama_cpu_fp32", "GroupQueryAttention", "do_rotary"),
        ("ort-genai/llama_cpu_fp32", "GroupQueryAttention", "rotary_interleaved"),
    ],
)
def test_flags_are_0_or_1(tmp_path: Path, source: str, op: str, name: str) -> None:
    def five(model: ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == op)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, 5)])

    word, reason = judge(edited(source, tmp_path, five), options(source))
    assert (word, f"has {name}=5; it is a flag, 0 or 1" in reason) == ("refused", True), reason


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize(
    ("source", "op"),
    [
        ("mobius/llama_static_f32", "Attention"),
        ("mobius/llama_dynamic_f32", "Attention"),
        ("torch/llama_static_wrap_op24", "Attention"),
        ("ort-genai/llama_cpu_fp32", "GroupQueryAttention"),
    ],
)
def test_factors_and_caps_below_zero_are_refused(tmp_path: Path, source: str, op: str, name: str) -> None:
    """Engines disagree on them: ONNX Runtime ignores such a cap, or the whole model."""

    def negative(model: ModelProto) -> None:
        for node in (n for n in model.graph.node if n.op_type == op):
            kept = [a for a in node.attribute if a.name != name]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(name, -0.5)])

    word, reason = judge(edited(source, tmp_path, negative), options(source))
    assert word == "refused", reason
    assert "supported are factors above 0, and caps above 0 or none" in reason
