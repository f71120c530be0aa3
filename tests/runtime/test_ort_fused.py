"""GroupQueryAttention, MoE and QMoE on the CPU: the same numbers as what TensorRT gets, and only where it is right."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder, write_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from importer.test_experts import decoder
from mixtures import Mixture
from onnx import ModelProto

from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.runtime.ort import ort_runner
from trt_kvcache.runtime.ort.cpu_model import fuse_attention, keep_experts
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch

BASE = DecoderConfig(capacity=32, vocab=64)
MODELS = Path(__file__).parents[1] / "models"
Shape = list[int | str]


def write(path: Path, config: DecoderConfig, window: int | None = None) -> Path:
    """A decoder, of which each query sees itself and `window` keys before it."""
    proto = make_decoder(config)
    if window is not None:
        proto.opset_import[0].version = 25
        for node in proto.graph.node:
            if node.op_type == "Attention":
                node.attribute.append(onnx.helper.make_attribute("left_window_size", window))
                del node.output[1:]  # since opset 25, no presents beside valid lengths
    onnx.save(proto, path)
    return path


def operators(path: Path, options: PlanOptions | None = None) -> Counter[str]:
    """The number of nodes of each operator in the model that the runner runs."""
    imported = import_model(path, options or PlanOptions())
    model = keep_experts(fuse_attention(imported.model, imported.plan), imported.source.proto)
    return Counter(node.op_type for node in model.graph.node)


def plain(path: Path, rows: int, options: PlanOptions | None = None) -> OnnxRuntimeRunner:
    """A runner of the rewritten model as it is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fuse_attention", "keep_experts"):
            patch.setattr(ort_runner, name, lambda model, other: model)
        return OnnxRuntimeRunner(path, options, max_batch=rows)


def agree(runner: OnnxRuntimeRunner, reference: OnnxRuntimeRunner, lengths: list[int]) -> None:
    """Run steps of so many tokens on two rows; the logits must be the same."""
    random, written = np.random.default_rng(0), 0
    for length in lengths:
        tokens = random.integers(0, runner.vocab, (2, length))
        batch = StepBatch(0, tokens, np.array([written, written]), keep=length)
        wanted = reference.step(batch)
        np.testing.assert_allclose(runner.step(batch), wanted, atol=2e-5 * max(1, float(np.abs(wanted).max())))
        written += length


def poison(runner: OnnxRuntimeRunner, lengths: list[int], value: float) -> None:
    """Fill the rows of every cache that hold no token."""
    for cache in runner.plan.caches:
        for row, length in enumerate(lengths):
            runner.view(cache.past)[row, :, length:] = value


@st.composite
def steps(draw: st.DrawFn, rows: int) -> list[tuple[int, int, int]]:
    """First row, rows and tokens per row of some steps that fit into the caches."""
    lengths, made = [0] * rows, []
    for _ in range(draw(st.integers(1, 8))):
        first = draw(st.integers(0, rows - 1))
        count = draw(st.integers(1, rows - first))
        room = 32 - max(lengths[first : first + count])
        if room:
            tokens = draw(st.one_of(st.just(1), st.integers(1, room)))
            made.append((first, count, tokens))
            lengths[first : first + count] = [n + tokens for n in lengths[first : first + count]]
    return made


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(["mobius", "heads-major", "seq-major"]),
    heads=st.sampled_from([(4, 2), (4, 4), (6, 1), (1, 1)]),
    size=st.sampled_from([8, 16, 24]),
    window=st.sampled_from([None, 0, 3, 31]),
    taken=steps(3),
)
def test_the_same_numbers(
    form: str,
    heads: tuple[int, int],
    size: int,
    window: int | None,
    taken: list[tuple[int, int, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = replace(BASE, form=form, query_heads=heads[0], kv_heads=heads[1], head_size=size)
    path = write(tmp_path_factory.mktemp("fused") / "model.onnx", config, window)
    found = operators(path)
    # The Slice is of the positions that get logits. Caches need none.
    assert (found["GroupQueryAttention"], found["Attention"], found["TensorScatter"], found["Slice"]) == (2, 0, 0, 1)
    assert (found["RotaryEmbedding"], found["Transpose"], found["Reshape"]) == (4, 0, 0)  # heads stay where they are
    fused, reference = OnnxRuntimeRunner(path, max_batch=3), plain(path, 3)
    lengths, random = [0, 0, 0], np.random.default_rng(0)
    for first, rows, length in taken:
        poison(fused, lengths, np.nan)
        poison(reference, lengths, 1e30)
        starts = np.array(lengths[first : first + rows])
        batch = StepBatch(first, random.integers(0, 64, (rows, length)), starts, keep=length)
        logits, expected = fused.step(batch), reference.step(batch)
        np.testing.assert_allclose(logits, expected, atol=2e-5)
        for row in range(first, first + rows):
            lengths[row] += length
        for cache in fused.plan.caches:
            for row, count in enumerate(lengths):
                held, wanted = (r.view(cache.past)[row] for r in (fused, reference))
                np.testing.assert_allclose(held[:, :count], wanted[:, :count], atol=2e-5)
                assert np.isnan(held[:, count:]).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mobius/llama_static_f32", "mobius/llama_dynamic_f32", "optimum/llama",
                                  "ort-genai/llama_cpu_fp32", "ort-genai/llama_cpu_int4"])  # fmt: skip
def test_what_exporters_write(name: str) -> None:
    path, options = MODELS / name / "model.onnx", PlanOptions(capacity=None if "static" in name else 64)
    found = operators(path, options)
    assert (found["GroupQueryAttention"], found["Attention"], found["TensorScatter"]) == (2, 0, 0)
    if name.endswith(("f32", "fp32")):
        assert (found["RotaryEmbedding"], found["Transpose"], found["Reshape"]) == (4, 0, 0)
    agree(OnnxRuntimeRunner(path, options, max_batch=2), plain(path, 2, options), [1, 5, 1, 7])


SPLIT: dict[str, tuple[Shape | None, Shape | None, bool]] = {
    "by both numbers": (None, [0, 0, "N", "H"], True),
    "by size": (None, [0, 0, -1, "H"], True),
    "by count": (None, [0, 0, "N", -1], True),
    "tokens left over": (None, [0, -1, "N", "H"], True),
    "by a computed shape": (None, None, False),
    "out of all rows as one": ([1, -1, "W"], None, False),
    "out of four axes": ([0, 0, 2, -1], [0, 0, "N", "H"], False),
}
"""How heads are split: rows before that, the shape (None: of the tokens), whether it is ``[B, S, N*H]`` for sure."""


@pytest.mark.few(2)
@pytest.mark.parametrize("how", SPLIT)
def test_heads_that_are_split(how: str, tmp_path: Path) -> None:
    rows, shape, sure = SPLIT[how]
    path = tmp_path / "model.onnx"
    onnx.save(split_heads(make_decoder(replace(BASE, form="heads-major")), rows, shape), path)
    found = operators(path)
    assert (found["GroupQueryAttention"], found["Transpose"]) == (2, 0)
    assert (found["Reshape"] == 0) == sure
    agree(OnnxRuntimeRunner(path, max_batch=2), plain(path, 2), [1, 5, 1, 7])


def split_heads(proto: onnx.ModelProto, rows: Shape | None, shape: Shape | None) -> onnx.ModelProto:
    """A decoder whose queries, keys and values get their heads in another way."""
    make, nodes = onnx.helper.make_node, [onnx.helper.make_node("Shape", ["input_ids"], ["tokens"])]

    def constant(name: str, values: Shape, heads: int) -> str:
        known = {"N": heads, "H": BASE.head_size, "W": heads * BASE.head_size}
        numbers = [known[v] if isinstance(v, str) else v for v in values]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(numbers), name))
        return name

    for node in proto.graph.node:
        product = node.input[0]
        if node.op_type == "Reshape" and product.endswith((".q", ".k", ".v")):
            heads = BASE.query_heads if product.endswith(".q") else BASE.kv_heads
            if rows is not None:
                nodes.append(make("Reshape", [product, constant(f"{product}.rows", rows, heads)], [f"{product}.other"]))
                node.input[0] = f"{product}.other"
            if shape is not None:
                node.input[1] = constant(f"{product}.shape", shape, heads)
            else:
                split = constant(f"{product}.split", ["N", "H"], heads)
                nodes.append(make("Concat", ["tokens", split], [f"{product}.shape"], axis=0))
                node.input[1] = f"{product}.shape"
        nodes.append(node)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


KEPT = {
    "head size": replace(BASE, head_size=12),
    "value head size": replace(BASE, value_head_size=8),
    "float16": replace(BASE, dtype="float16"),
    "mask": replace(BASE, mask="bool"),
    "not causal": replace(BASE, causal=False),
    "softcap": replace(BASE, softcap=2.0),
    "circular": replace(BASE, mode="circular", capacity=8),
    "one cache": replace(BASE, form="five-d"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("why", KEPT)
def test_what_stays(why: str, tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "model.onnx", KEPT[why])
    imported = import_model(path, PlanOptions())
    assert fuse_attention(imported.model, imported.plan) is imported.model


def test_a_cache_that_two_attentions_read_stays(tmp_path: Path) -> None:
    proto = make_decoder(replace(BASE, layers=1, form="heads-major"))
    node = next(n for n in proto.graph.node if n.op_type == "Attention")
    twin = onnx.NodeProto()
    twin.CopyFrom(node)
    twin.name, twin.output[:] = "twin", ["twin"]
    proto.graph.node.insert(list(proto.graph.node).index(node) + 1, twin)
    for reader in proto.graph.node:
        if reader.op_type == "Transpose" and reader.input[0] == node.output[0]:
            reader.input[0] = "both"
    proto.graph.node.insert(
        list(proto.graph.node).index(twin) + 1, onnx.helper.make_node("Add", [node.output[0], "twin"], ["both"])
    )
    onnx.save(proto, tmp_path / "model.onnx")
    assert operators(tmp_path / "model.onnx")["GroupQueryAttention"] == 0


# MoE and QMoE back in place on the CPU: the same numbers as what TensorRT gets, and only where it is right.


GENAI = Path(__file__).parents[1] / "models" / "ort-genai" / "gptoss_cpu_int4"
SMALL = Mixture(experts=6, k=2, hidden=64, inner=32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixture",
    [
        SMALL,
        Mixture(experts=6, hidden=64, inner=32, activation="silu", bias=False),
        Mixture(experts=6, hidden=64, inner=32, bits=4, zeros=True),
        Mixture(experts=6, hidden=64, inner=32, bits=8),
        Mixture(experts=6, hidden=64, inner=32, bits=8, block=0),
    ],
    ids=["swiglu", "silu", "int4", "int8", "int8 by row"],
)
def test_the_same_numbers_of_experts(tmp_path: Path, mixture: Mixture) -> None:
    path = decoder(tmp_path, mixture)
    found = operators(path)
    assert found[mixture.op] == 2
    assert not found.keys() & {"TopK", "CumSum", "ScatterElements"}  # of sorting tokens by expert
    agree(OnnxRuntimeRunner(path, max_batch=2), plain(path, 2), [5, 1, 3, 1])


@pytest.mark.slow
def test_an_export_by_onnxruntime_genai() -> None:
    options = PlanOptions(capacity=64)
    assert operators(GENAI, options)["QMoE"] == 2
    agree(OnnxRuntimeRunner(GENAI, options, max_batch=2), plain(GENAI, 2, options), [5, 1, 3, 1])


def test_float16_stays(tmp_path: Path) -> None:
    assert not operators(decoder(tmp_path, SMALL, "float16"))["MoE"]


@pytest.mark.slow
def test_shares_that_do_not_sum_to_one_stay(tmp_path: Path) -> None:
    assert not operators(decoder(tmp_path, replace(SMALL, normalized=False)))["MoE"]


@pytest.mark.few(2)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["embed_tokens", "nowhere"])
def test_what_is_made_of_something_else_stays(tmp_path: Path, place: int, name: str) -> None:
    """A source whose first layer is another one than was rewritten."""
    imported = import_model(decoder(tmp_path, SMALL), PlanOptions())
    other = ModelProto()
    other.CopyFrom(imported.source.proto)
    node = next(n for n in other.graph.node if n.op_type == "MoE")
    node.input[place] = name
    kept = [n.name for n in keep_experts(imported.model, other).graph.node if n.op_type == "MoE"]
    assert kept == ["layers.1.experts"]


def test_weights_that_changed_stay(tmp_path: Path) -> None:
    imported = import_model(decoder(tmp_path, SMALL), PlanOptions())
    node = next(n for n in imported.source.proto.graph.node if n.op_type == "MoE")
    changed = ModelProto()
    changed.CopyFrom(imported.model)
    tensor = next(t for t in changed.graph.initializer if t.name == node.input[3])
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros((1, 1), np.float32), tensor.name))
    kept = [n.name for n in keep_experts(changed, imported.source.proto).graph.node if n.op_type == "MoE"]
    assert kept == ["layers.1.experts"]
