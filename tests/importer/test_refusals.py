"""Refusals name what is not supported, not what was looked at last."""

from pathlib import Path

import onnx
import pytest
from concat_graphs import Build, Decoder, make_decoder
from onnx import TensorProto, helper

from trt_kvcache import PlanOptions, plan_model
from trt_kvcache.errors import UnsupportedModelError


def stacked(model: onnx.ModelProto, batch_first: bool) -> onnx.ModelProto:
    """The model with its four caches in one tensor: ``[4, B, N, P, D]``, or ``[B, 4, N, P, D]``."""
    graph, axis = model.graph, 1 if batch_first else 0
    pasts = [v for v in graph.input if "past" in v.name]
    presents = [v for v in graph.output if "present" in v.name]
    dims = [d.dim_param or d.dim_value for d in pasts[0].type.tensor_type.shape.dim]

    def declared(name: str, last: str) -> onnx.ValueInfoProto:
        shape = [dims[0], dims[1], last, dims[3]]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [*shape[:axis], len(pasts), *shape[axis:]])

    graph.initializer.append(helper.make_tensor("axes", TensorProto.INT64, [1], [axis]))
    parts = [f"part_{at}" for at in range(len(pasts))]
    first = [helper.make_node("Split", ["caches"], parts, axis=axis, num_outputs=len(parts))]
    first += [helper.make_node("Squeeze", [p, "axes"], [v.name]) for p, v in zip(parts, pasts, strict=True)]
    whole = [f"whole_{at}" for at in range(len(presents))]
    last = [helper.make_node("Unsqueeze", [v.name, "axes"], [w]) for v, w in zip(presents, whole, strict=True)]
    last += [helper.make_node("Concat", whole, ["new_caches"], axis=axis)]
    nodes, inputs, outputs = ([*first, *graph.node, *last], [*graph.input], [*graph.output])
    for field, values in (
        (graph.node, nodes),
        (graph.input, [*(v for v in inputs if v not in pasts), declared("caches", "past")]),
        (graph.output, [*(v for v in outputs if v not in presents), declared("new_caches", "total")]),
    ):
        del field[:]
        field.extend(values)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("batch_first", [True, False])
def test_several_caches_in_one_tensor(batch_first: bool, tmp_path: Path) -> None:
    onnx.save(stacked(make_decoder(Decoder(layers=2)), batch_first), tmp_path / "model.onnx")
    with pytest.raises(
        UnsupportedModelError, match=r"'caches' \[.*\] holds several caches in one tensor; each cache must"
    ):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=24))


def test_a_mask_over_the_new_tokens_alone(tmp_path: Path) -> None:
    """As Whisper's decoders have it that take one prompt and then single tokens."""

    def over_new(g: Build, scores: str) -> str:
        rows = g.Range(g.constant(0), g.length, 1)
        seen = g.LessOrEqual(rows, g.Unsqueeze(rows, [1]))
        return g.Add(scores, g.Where(seen, g.number(0), g.number(-1e9)))

    onnx.save(make_decoder(Decoder(mask="none", masked=over_new)), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=r"Add '.*' gets sizes \d+ and \d+, .*; if one of them is a mask"):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=24))


def test_token_ids_in_a_mask(tmp_path: Path) -> None:
    def by_tokens(g: Build, scores: str) -> str:
        shown = g.Unsqueeze(g.Less(g.tokens, g.constant(40)), [1, 3])
        return g.Where(shown, scores, g.number(-5))

    onnx.save(make_decoder(Decoder(masked=by_tokens)), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=r"token ids \('input_ids'\) change an attention or its mask"):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=24))


def test_a_capacity_beyond_a_bias_by_distance_is_named() -> None:
    """The message gives the capacity to take, and no advice on the caches, which are right."""
    model = Path(__file__).parents[1] / "models" / "optimum" / "t5"
    with pytest.raises(UnsupportedModelError, match=r"for at most 16384 tokens: give capacity=16384 or less$"):
        plan_model(model, PlanOptions(capacity=131_072))
