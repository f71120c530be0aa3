"""A foreign decoder with state beside its caches: an optimum export with a short convolution grafted onto its input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from trt_kvcache import (
    DecodeSession,
    GenerationConfig,
    PlanOptions,
    Role,
    UnsupportedModelError,
    build_engine,
    plan_model,
    verify_model,
)

LLAMA = Path(__file__).parents[1] / "models" / "optimum" / "llama" / "model.onnx"
OPTIONS = PlanOptions(capacity=64)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return graft(tmp_path_factory.mktemp("hybrid"))


def graft(folder, first=-3, length=None):
    """The decoder with a convolution whose state is rows `first` and on; `length` fixes the number of tokens."""
    graph = gs.import_onnx(onnx.load(LLAMA))
    lookup = next(n for n in graph.nodes if n.op == "Gather" and "embed_tokens" in n.outputs[0].name)
    embedded = lookup.outputs[0]
    readers = {id(n): n for n in embedded.outputs}.values()
    past = gs.Variable("past_conv.0", np.float32, ["batch_size", 64, 3])
    left = 3 if first == -3 or length == 1 else "sequence_length + 2"
    present = gs.Variable("present_conv.0", np.float32, ["batch_size", 64, left])
    columns, window, mixed, rows, hidden = (gs.Variable(f"conv_{i}", np.float32) for i in range(5))
    weight = np.random.default_rng(0).normal(0, 0.5, (64, 1, 4)).astype(np.float32)
    ends = [gs.Constant(f"conv_{name}", np.array([v])) for name, v in (("from", first), ("to", 2**62), ("axis", 2))]
    for reader in readers:
        reader.inputs = [hidden if t is embedded else t for t in reader.inputs]
    graph.nodes += [
        gs.Node("Transpose", "conv_t", {"perm": [0, 2, 1]}, [embedded], [columns]),
        gs.Node("Concat", "conv_cat", {"axis": 2}, [past, columns], [window]),
        gs.Node("Slice", "conv_keep", {}, [window, *ends], [present]),
        gs.Node("Conv", "conv", {"group": 64, "kernel_shape": [4]}, [window, gs.Constant("conv_w", weight)], [mixed]),
        gs.Node("Transpose", "conv_back", {"perm": [0, 2, 1]}, [mixed], [rows]),
        gs.Node("Add", "conv_add", {}, [embedded, rows], [hidden]),
    ]
    graph.inputs.append(past)
    graph.outputs.append(present)
    model = gs.export_onnx(graph.cleanup().toposort())
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if length and dim.dim_param == "sequence_length":
                dim.dim_value = length
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def test_the_convolution_is_state_and_no_rolling_cache(hybrid):
    plan = plan_model(hybrid, OPTIONS)
    assert [(s.past, s.present) for s in plan.states] == [("past_conv.0", "present_conv.0")]
    assert {c.idiom for c in plan.caches} == {"Concat"}
    assert {t.name for t in plan.tensors if t.role is Role.STATE} == {"past_conv.0", "present_conv.0"}


@pytest.mark.slow
def test_the_rewritten_model_gives_the_numbers_of_the_original(hybrid):
    verify_model(hybrid, OPTIONS).check()


@pytest.mark.slow
def test_tensorrt_builds_it(hybrid, tmp_path):
    manifest = build_engine(hybrid, tmp_path / "model.engine", options=OPTIONS)
    assert len(manifest.aliases) == 4


def test_state_follows_its_sequence_in_a_ragged_batch(hybrid):
    prompts = [[3, 4, 5, 6, 7, 8, 9], [200, 100], [17, 30, 60, 90]]
    config = GenerationConfig(max_new_tokens=10)
    with DecodeSession.open(hybrid, capacity=64, max_chunk=3) as session:
        alone = [session.generate([p], config)[0].tokens for p in prompts]
        together = [r.tokens for r in session.generate(prompts, config)]
    assert together == alone


@pytest.mark.slow
def test_state_that_keeps_its_size_for_one_token_only(tmp_path):
    """As mobius-onnx writes Jamba's: all rows but the first."""
    words = "'past_conv.0' .* Slice 'conv_keep' moves its rows in every step"
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(graft(tmp_path, first=1), OPTIONS)
    fixed = graft(tmp_path, first=1, length=1)
    assert [state.past for state in plan_model(fixed, OPTIONS).states] == ["past_conv.0"]
    verify_model(fixed, OPTIONS).check()
