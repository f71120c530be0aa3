"""Models whose tokens see later tokens of a step: a prompt is never cut, and nothing is guessed or taken back."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from graphs import Graph
from greedy import greedy
from onnx import TensorProto
from runtime.engines import drain

from trt_kvcache import DecodeSession, PlanOptions, plan_model
from trt_kvcache.decoding import Schedule
from trt_kvcache.errors import CapacityError, OptionError

PROMPT = (3, 30, 2, 2, 11, 17, 8, 25, 11, 30, 6)
HALF: dict[str, Any] = {"dtype": np.float16, "upcast": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder without a mask."""
    path = tmp_path_factory.mktemp("whole") / "model.onnx"
    onnx.save(make_decoder(Decoder(mask="none", positions="past", layers=2)), path)
    return path


@pytest.fixture
def session(model: Path) -> Iterator[DecodeSession]:
    with DecodeSession.open(model, capacity=24) as opened:
        yield opened


def test_prompts_come_in_one_step(model: Path, session: DecodeSession) -> None:
    assert session.max_chunk == 24
    prompts = [PROMPT, PROMPT[:4], PROMPT[3:]]
    found = session.generate(prompts, max_new_tokens=4)
    assert [g.tokens for g in found] == [greedy(model, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("held", [0, 1])
def test_a_prompt_comes_whole_while_others_decode(model: Path, held: int) -> None:
    """Whatever the budget, and whatever row it gets: one between those that decode, too."""
    with DecodeSession.open(model, capacity=24, max_batch=4, schedule=Schedule(prefill_budget=2)) as session:
        free = session.cache.acquire()
        first = [session.add(PROMPT[:4], max_new_tokens=9), session.add(PROMPT[3:5], max_new_tokens=9)]
        found: dict[int, list[int | None]] = {event.sequence: [event.token] for event in session.step()}
        if held:
            session.cache.release(free)
        late = [session.add(PROMPT, max_new_tokens=4), session.add(PROMPT[2:9], max_new_tokens=4)]
        drain(session, found)
    wanted = [greedy(model, PROMPT[:4], 9), greedy(model, PROMPT[3:5], 9), greedy(model, PROMPT, 4)]
    assert [found[slot] for slot in (*first, *late)] == [*wanted, greedy(model, PROMPT[2:9], 4)]


def test_a_prompt_that_does_not_fit_into_a_step_is_refused(model: Path) -> None:
    with DecodeSession.open(model, capacity=24, max_chunk=4) as session:
        assert session.generate([PROMPT[:4]], max_new_tokens=4)[0].tokens == greedy(model, PROMPT[:4], 4)
        with pytest.raises(CapacityError, match="prompt 0 has 11 tokens to write, .* takes at most 4 here"):
            session.generate([PROMPT], max_new_tokens=4)
        with pytest.raises(CapacityError, match="the prompt has 11 tokens to write"):
            session.add(PROMPT)
        slot = session.cache.acquire()
        with pytest.raises(CapacityError, match=f"slot {slot} has 11 tokens to write"):
            session.update({slot: PROMPT})


def test_nothing_is_guessed_shared_or_taken_back(model: Path, session: DecodeSession) -> None:
    with pytest.raises(
        OptionError, match="must be able to take wrong guesses back, but tokens of one step see later ones"
    ):
        session.generate([PROMPT], prompt_lookup_num_tokens=2)
    with pytest.raises(OptionError, match="a draft cannot help this model: tokens of one step see later ones"):
        DecodeSession.open(model, capacity=24, draft=model)
    with pytest.raises(OptionError, match="prefix_cache cannot reuse rows of this model: tokens of one step see later"):
        DecodeSession.open(model, capacity=24, schedule=Schedule(prefix_cache=1 << 20))
    slot = session.cache.acquire()
    session.update({slot: PROMPT})
    with pytest.raises(CapacityError, match="cannot be cropped to 4 tokens: tokens of one step see later ones"):
        session.cache.crop(slot, 4)


def test_no_draft_is_made_of_such_a_model(model: Path, tmp_path: Path) -> None:
    onnx.save(make_decoder(Decoder(positions="past")), tmp_path / "causal.onnx")
    with pytest.raises(OptionError, match="the draft cannot take back tokens that were rejected: tokens of one step"):
        DecodeSession.open(tmp_path / "causal.onnx", capacity=24, draft=model)


def causal(g: Graph) -> str:
    """Bool ``[B, 1, S, 16]``."""
    first = g.Unsqueeze("write_indices", [1, 2, 3])
    steps = g.Range(g.constant(0), g.Gather(g.Shape("input_ids"), g.constant(1)), g.constant(1))
    queries = g.Add(first, g.Unsqueeze(steps, [0, 1, 3]))
    return g.LessOrEqual(g.constant(np.arange(16).reshape(1, 1, 1, 16)), queries)


def with_prefix(g: Graph) -> str:
    return g.Or(causal(g), g.Less(g.constant(np.arange(16).reshape(1, 1, 1, 16)), g.constant(3)))


def added(g: Graph) -> str:
    return g.Where(causal(g), g.constant(0.0, np.float32), g.constant(-1e9, np.float32))


def of_types(g: Graph) -> str:
    """Tokens of one type see each other."""
    types = g.input("types", TensorProto.INT64, ["B", "S"])
    image = g.Cast(g.ReduceMax(types, [1], keepdims=1), to=TensorProto.BOOL)
    return g.Or(causal(g), g.And(g.Unsqueeze(image, [1, 2]), g.Less(g.constant(np.arange(16)), g.constant(16))))


def valid(g: Graph) -> str:
    """All rows up to the last token of the step."""
    end = g.Add("write_indices", g.Gather(g.Shape("input_ids"), g.constant(1)))
    made: str = g.Less(g.constant(np.arange(16).reshape(1, 1, 1, 16)), g.Unsqueeze(end, [1, 2, 3]))
    return made


def own(*shape: int | str) -> Callable[[Graph], str]:
    return lambda g: g.input("mask", TensorProto.BOOL, shape)


@pytest.mark.parametrize(("mask", "whole", "length"), [
    (causal, False, "S"), (added, False, "S"), (with_prefix, True, "S"), (of_types, True, "S"), (valid, True, "S"),
    (valid, False, 1), (None, True, "S"), (own("B", 1, "S", 16), False, "S"), (own("B", 1, 1, 16), True, "S"),
])  # fmt: skip
def test_masks_of_static_models_are_run(
    mask: Callable[[Graph], str] | None, whole: bool, length: int | str, tmp_path: Path
) -> None:
    g, rng = Graph(), np.random.default_rng(0)

    def weight(*shape: int) -> str:
        return g.constant(rng.standard_normal(shape), np.float32)

    ids = g.input("input_ids", TensorProto.INT64, ["B", length])
    x = g.Gather(weight(32, 16), ids)
    start = g.input("write_indices", TensorProto.INT64, ["B"])
    heads = [g.Transpose(g.Reshape(g.MatMul(x, weight(16, 16)), [0, 0, 2, 8]), perm=[0, 2, 1, 3]) for _ in range(3)]
    for name, new in zip(("key", "value"), heads[1:], strict=True):
        past = g.input(f"past.{name}", TensorProto.FLOAT, ["B", 2, 16, 8])
        g.TensorScatter(past, new, start, out=f"present.{name}")
        g.output(f"present.{name}", TensorProto.FLOAT, ["B", 2, 16, 8])
    seen = [] if mask is None else [mask(g)]
    y = g.Attention(heads[0], "present.key", "present.value", *seen)
    rows = g.Reshape(g.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, 16])
    g.MatMul(rows, weight(16, 32), out="logits")
    g.output("logits", TensorProto.FLOAT, ["B", length, 32])
    onnx.save(g.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx")
    assert plan.prefill_in_one_step is whole
    assert any("tokens see later tokens of the same step" in note for note in plan.notes) is whole


@pytest.mark.parametrize(
    "how", [{"mask": "past"}, {"mask": "padding"}, {"mask": "own"}, {"mask": "own", "own_type": np.float32, **HALF}]
)
def test_causal_decoders_take_prompts_in_pieces(how: dict[str, Any], tmp_path: Path) -> None:
    onnx.save(make_decoder(Decoder(**how)), tmp_path / "model.onnx")
    assert not plan_model(tmp_path / "model.onnx", PlanOptions(capacity=24)).prefill_in_one_step
