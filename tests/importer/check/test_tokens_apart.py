"""Models whose tokens of a step meet outside of attention: their prompts are never cut."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_graphs import Build, Decoder, make_decoder
from decoders import DecoderConfig, write_decoder
from greedy import greedy

from trt_kvcache import DecodeSession, PlanOptions, build_engine, plan_model
from trt_kvcache.errors import CapacityError

PROMPT = (3, 30, 2, 2, 11, 17, 8, 25, 11, 30, 6)


def mean(g: Build, x: str) -> str:
    return str(g.Sub(x, g.ReduceMean(x, [1], keepdims=1)))


def sums(g: Build, x: str) -> str:
    return str(g.CumSum(x, 1))


def convolution(g: Build, x: str) -> str:
    """Over three tokens of the step, zeros before the first one: nothing keeps what came in the step before."""
    turned = g.Transpose(x, perm=[0, 2, 1])
    made = g.Conv(turned, g.weight(16, 1, 3), group=16, pads=[2, 0], kernel_shape=[3])
    return str(g.Add(x, g.Transpose(made, perm=[0, 2, 1])))


def counted(g: Build, x: str) -> str:
    """Positions 0, 1, ... of each step, whatever came before."""
    return str(g.Add(x, g.Gather(g.weight(32, 16), g.Range(0, g.size_of(g.tokens, 1), 1))))


def length(g: Build, x: str) -> str:
    return str(g.Mul(x, g.Cast(g.size_of(g.tokens, 1), to=onnx.TensorProto.FLOAT)))


FORMS = {"ReduceMean": mean, "CumSum": sums, "Conv": convolution, "Gather": counted, "Mul": length}


def write(folder: Path, after: Callable[[Build, str], str], **how: object) -> Path:
    decoder = Decoder(**{"positions": "past", "after": after, **how})  # type: ignore[arg-type]
    onnx.save(make_decoder(decoder), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", ["batch", 1])
def test_prompts_are_not_cut(form: str, batch: str | int, tmp_path: Path) -> None:
    model = write(tmp_path, FORMS[form], batch=batch)
    plan = plan_model(model, PlanOptions(capacity=24))
    assert plan.prefill_in_one_step
    assert f"'{named(model, form)}' of a token differs between a step of several tokens" in plan.notes[-1]
    too_long = pytest.raises(CapacityError, match="has 11 tokens to write")
    with DecodeSession.open(model, capacity=24, max_chunk=4) as session, too_long:
        session.generate([PROMPT], max_new_tokens=4)
    with DecodeSession.open(model, capacity=24) as session:
        assert session.generate([PROMPT], max_new_tokens=4)[0].tokens == greedy(model, PROMPT, 4)


def named(model: Path, form: str) -> str:
    """The first tensor that holds the tokens of a step, made by what lets them meet."""
    nodes = onnx.load(model).graph.node
    made = next(node for node in reversed(nodes) if node.op_type == form).output[0]
    return next(node.output[0] for node in nodes if made in node.input) if form == "ReduceMean" else made


@pytest.mark.parametrize("after", [lambda g, x: g.Softmax(x, axis=-1), lambda g, x: g.Sub(x, g.ReduceMean(x, [2]))])
def test_what_each_token_makes_of_its_own_is_taken(after: Callable[[Build, str], str], tmp_path: Path) -> None:
    model = write(tmp_path, after)
    with DecodeSession.open(model, capacity=24, max_chunk=4) as session:
        assert not session.plan.prefill_in_one_step
        assert session.generate([PROMPT], max_new_tokens=4)[0].tokens == greedy(model, PROMPT, 4)


def test_models_that_write_their_caches_themselves_are_told_apart_too(tmp_path: Path) -> None:
    small = DecoderConfig(layers=1, hidden=16, vocab=32, capacity=16, positions=32)
    path = write_decoder(tmp_path / "model.onnx", small)
    assert not plan_model(path, PlanOptions()).prefill_in_one_step
    model = onnx.load(path)
    graph = model.graph
    head = [node for node in graph.node if node.op_type == "MatMul"][-1]
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    made = [
        onnx.helper.make_node("ReduceMean", [head.input[0], "one"], ["mean"], "mean"),
        onnx.helper.make_node("Sub", [head.input[0], "mean"], ["apart"], "apart"),
    ]
    place = list(graph.node).index(head)
    for node in reversed(made):
        graph.node.insert(place, node)
    graph.node[place + 2].input[0] = "apart"
    onnx.save(model, path)
    plan = plan_model(path, PlanOptions())
    assert plan.prefill_in_one_step
    assert "'apart' of a token differs between a step of several tokens" in plan.notes[-1]


def test_an_engine_says_so(tmp_path: Path) -> None:
    """The build begins before the check has ended."""
    manifest = build_engine(write(tmp_path, mean), tmp_path / "engine", options=PlanOptions(capacity=24))
    assert manifest.plan.prefill_in_one_step
