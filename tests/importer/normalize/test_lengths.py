"""What is right in most steps and wrong in some is refused: masks, factors, positions, padding and rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import concat_graphs
import numpy as np
import onnx
import pytest
from cache_updates import along, count, index_copy, positions, prove_updates, update_model
from concat_decode import rewritten
from concat_graphs import Build, Decoder, make_decoder
from graphs import Graph
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from slope_graphs import added, distance, table

import trt_kvcache.importer.normalize as stage
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize import exported, normalize
from trt_kvcache.importer.normalize.evidence import lengths
from trt_kvcache.importer.normalize.evidence.program import Program, Step
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.plan import PlanOptions

MODELS = Path(__file__).parents[2] / "models"
CAPACITIES = (12, 24, 100, 300)  # probes, all steps, each position and prompt, not each prompt

Odd = Callable[[Build], str]


def equal(what: str, number: int) -> Odd:
    return lambda g: g.node("Equal", [getattr(g, what), g.constant(number)])


def above(what: str, number: int) -> Odd:
    return lambda g: g.node("Greater", [getattr(g, what), g.constant(number)])


def both(one: Odd, other: Odd) -> Odd:
    return lambda g: g.node("And", [one(g), other(g)])


def square(number: int) -> Odd:
    """P + S is `number`, which is nowhere in the graph."""
    return lambda g: g.node("Equal", [g.node("Mul", [g.all, g.all]), g.constant(number * number)])


KINDS = ("P", "S", "T", "P and S", "P and T", "long", "long behind some", "square")


@st.composite
def odd_steps(draw: st.DrawFn, kinds: Sequence[str] = KINDS) -> tuple[str, Odd, int]:
    """In which steps a decoder is odd, in words and as a scalar of its graph; and its capacity."""
    capacity = draw(st.sampled_from(CAPACITIES))
    length = draw(st.integers(2, capacity))  # what is odd in every step is not odd
    past = draw(st.integers(0, capacity - length))
    kind = draw(st.sampled_from(kinds))
    odd: dict[str, Odd] = {
        "P": equal("past", past),
        "S": equal("length", length),
        "T": equal("all", past + length),
        "P and S": both(equal("past", past), equal("length", length)),
        "P and T": both(equal("past", past), equal("all", past + length)),
        "long": above("length", length - 1),
        "long behind some": both(above("length", length - 1), above("past", past - 1)),
        "square": square(past + length),
    }
    return f"{kind}: P {past}, S {length}, capacity {capacity}", odd[kind], capacity


def masked(odd: Odd, apply: str) -> onnx.ModelProto:
    """The last key is hidden in odd steps."""

    def mask(g: Build) -> str:
        last = g.node("Equal", [g.key_rows, g.node("Sub", [g.all, g.constant(1)])])
        hidden = g.node("And", [last, odd(g)])
        return g.to_scores(g.node("And", [g.causal(), g.node("Not", [hidden])]))

    return make_decoder(Decoder(mask=mask, apply=apply))


def scaled(odd: Odd) -> onnx.ModelProto:
    """Scores are doubled in odd steps."""

    def scores(g: Build, tensor: str) -> str:
        factor = g.node("Where", [odd(g), g.constant(2.0, np.float32), g.constant(1.0, np.float32)])
        return g.node("Mul", [tensor, factor])

    return make_decoder(Decoder(scores=scores))


def shifted(odd: Odd) -> onnx.ModelProto:
    """Positions are one more in odd steps."""

    def after(g: Build, x: str) -> str:
        rows = g.node("Transpose", [g.query_rows], perm=[1, 0])
        more = g.node("Cast", [odd(g)], to=TensorProto.INT64)
        column = g.node("Unsqueeze", [g.node("Add", [rows, more]), g.constant([-1])])
        return g.node("Add", [x, g.node("Cast", [column], to=TensorProto.FLOAT)])

    return make_decoder(Decoder(positions="none", after=after))


@pytest.mark.parametrize(
    ("scores", "heads"),
    [({}, 1), ({"scores": added(distance)}, 4), ({"scores": added(table)}, 1)],
    ids=["mask", "bias", "rows"],
)
def test_long_updates_are_as_long_as_all_heads_afford(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: dict[str, Any], heads: int
) -> None:
    """A bias of 32 heads for 4,096 tokens behind none has 2 GiB."""
    areas: list[int] = []
    affordable = lengths._affordable

    def recording(steps: Iterable[lengths.Lengths], area: int) -> list[lengths.Lengths]:
        areas.append(area)
        return affordable(steps, area)

    monkeypatch.setattr(lengths, "_affordable", recording)
    rewritten(make_decoder(Decoder(heads=4, capacity=40, **scores)), tmp_path, 40)
    assert min(areas) == min(lengths._SLOW_AREA, lengths._AREA // heads)


@given(apply=st.sampled_from(["add", "where"]), steps=odd_steps())
@settings(max_examples=70, deadline=None)
def test_a_mask_that_is_another_one_in_some_steps(apply: str, steps: tuple[str, Odd, int]) -> None:
    _, odd, capacity = steps
    with pytest.raises(UnsupportedModelError, match=r"none of the supported ones .*the last query sees"):
        _plan(masked(odd, apply), capacity)


@pytest.mark.slow
@given(steps=odd_steps())
@settings(max_examples=40, deadline=None)
def test_a_factor_that_is_another_one_in_some_steps(steps: tuple[str, Odd, int]) -> None:
    _, odd, capacity = steps
    with pytest.raises(UnsupportedModelError, match=r"factor|no attention that the importer can prove"):
        _plan(scaled(odd), capacity)


@pytest.mark.slow
@given(steps=odd_steps(["P", "T", "P and S", "square"]))  # what only depends on S may stay
@settings(max_examples=40, deadline=None)
def test_positions_that_are_others_in_some_steps(steps: tuple[str, Odd, int]) -> None:
    _, odd, capacity = steps
    with pytest.raises(UnsupportedModelError):
        _plan(shifted(odd), capacity)


@given(steps=odd_steps())
@settings(max_examples=20, deadline=None)
def test_the_same_without_a_program(steps: tuple[str, Odd, int]) -> None:
    """As where ONNX Runtime lacks an operator: probes look at the steps where something can turn."""
    said, odd, capacity = steps
    if said.startswith("square") and capacity > lengths._TINY:
        return  # only every length shows it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "runs", False)
        with pytest.raises(UnsupportedModelError, match="none of the supported ones"):
            _plan(masked(odd, "add"), capacity)


@pytest.mark.slow
@given(total=st.integers(2, 90))
@settings(max_examples=30, deadline=None)
def test_padding_that_is_seen_at_one_length(total: int) -> None:
    """In one step, the padding mask hides nothing."""

    def mask(g: Build) -> str:
        shown = g.node("Cast", [g.padding], to=TensorProto.BOOL)
        shown = g.node("Or", [shown, equal("all", total)(g)])
        return g.node("And", [g.to_scores(g.causal()), g.node("Unsqueeze", [shown, g.constant([1, 2])])])

    with pytest.raises(UnsupportedModelError, match="does not hide what the padding mask hides"):
        _plan(make_decoder(Decoder(mask=mask)), 90)


def hidden_by(odd: Odd, form: str) -> onnx.ModelProto:
    """What stands in the place of hidden scores is not low in odd steps."""

    def scores(g: Build, tensor: str) -> str:
        lowest = g.node("Where", [odd(g), g.number(0.0), g.number(-1e4)])
        visible = g.to_scores(g.causal())
        if form == "visible":
            return g.node("Where", [visible, tensor, lowest])
        if form == "hidden":
            return g.node("Where", [g.node("Not", [visible]), lowest, tensor])
        return g.node("Max", [g.node("Where", [visible, tensor, g.number(-1e4)]), lowest])

    return make_decoder(Decoder(mask="none", scores=scores))


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["visible", "hidden", "Max"])
@given(steps=odd_steps())
@settings(max_examples=12, deadline=None)
def test_masks_that_do_not_hide_in_some_steps(form: str, steps: tuple[str, Odd, int]) -> None:
    _, odd, capacity = steps
    with pytest.raises(
        UnsupportedModelError, match=r"masks that hide at every length|no attention that the importer can"
    ):
        _plan(hidden_by(odd, form), capacity)


@given(steps=odd_steps())
@settings(max_examples=12, deadline=None)
def test_the_callers_own_mask_scaled_in_some_steps(steps: tuple[str, Odd, int]) -> None:
    """It hides the same keys, and the numbers that a caller may put between are others."""
    _, odd, capacity = steps

    def scores(g: Build, tensor: str) -> str:
        mask = g.input("mask", TensorProto.FLOAT, ["batch", 1, "sequence", "total"])
        factor = g.node("Where", [odd(g), g.number(0.5), g.number(1.0)])
        return g.node("Add", [tensor, g.node("Mul", [mask, factor])])

    with pytest.raises(UnsupportedModelError, match="'mask'"):
        _plan(make_decoder(Decoder(mask="none", scores=scores)), capacity)


def pick(g: Build, odd: Odd, one: Sequence[int], other: Sequence[int]) -> str:
    """Numbers that are `one` in odd steps, and `other` in all others."""
    return g.node("Where", [odd(g), g.constant(one), g.constant(other)])


def turned(g: Build, tensor: str, odd: Odd, how: str) -> str:
    """Keys ``[B, H, T, D]``, scrambled in odd steps."""
    end = 2**31
    if how == "heads":  # of one group, so that each keeps its shape
        return g.node("Gather", [tensor, pick(g, odd, [2, 3, 0, 1], [0, 1, 2, 3])], axis=1)
    axis = {"rows": 2, "channels": 3}[how]
    bounds = [pick(g, odd, [-1], [0]), pick(g, odd, [-end], [end]), g.constant([axis]), pick(g, odd, [-1], [1])]
    return g.node("Slice", [tensor, *bounds])


@pytest.mark.few(2)
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("how", ["heads", "channels", "rows"])
@given(steps=odd_steps())
@settings(max_examples=8, deadline=None)
def test_caches_that_are_read_otherwise_in_some_steps(how: str, which: str, steps: tuple[str, Odd, int]) -> None:
    _, odd, capacity = steps
    decoder = Decoder(**{which: lambda g, tensor: turned(g, tensor, odd, how)})
    with pytest.raises(UnsupportedModelError, match=r"grow evenly|with its heads repeated"):
        _plan(make_decoder(decoder), capacity)


def guarded(odd: Odd) -> Callable[[Build, str, str, str, str], str]:
    """Attention whose guard is true in odd steps, and where a query sees nothing."""
    attend = concat_graphs._attend

    def guard(g: Build, query: str, keys: str, values: str) -> str:
        output = attend(g, query, keys, values)
        counts = g.node("ReduceSum", [g.node("Cast", ["mask"], to=TensorProto.FLOAT), g.constant([-1])], keepdims=1)
        blind = g.node("Less", [counts, g.number(0.5)])
        return g.node("Where", [g.node("Or", [blind, odd(g)]), g.number(0.0), output])

    return guard


@given(steps=odd_steps(["P", "T", "P and S", "square"]))
@settings(max_examples=12, deadline=None)
def test_guards_that_close_in_some_steps(steps: tuple[str, Odd, int]) -> None:
    """Those that only depend on S may stay."""
    _, odd, capacity = steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concat_graphs, "_attend", guarded(odd))
        model = make_decoder(Decoder(mask="own"))
    with pytest.raises(UnsupportedModelError):
        _plan(model, capacity)


@given(steps=odd_steps(["P", "T", "P and S", "long behind some", "square"]))
@settings(max_examples=12, deadline=None)
def test_new_rows_that_are_turned_in_some_steps(steps: tuple[str, Odd, int]) -> None:
    """What only depends on S may stay: it is seen in samples of that S, and left in front of the update."""
    words, odd, capacity = steps
    assume(not words.startswith("long behind some: P 0,"))  # behind none or more
    split = concat_graphs._split

    def turn(g: Build, tensor: str, heads: int) -> str:
        rows, size = split(g, tensor, heads), g.decoder.size
        shape = pick(g, odd, [0, size, -1, heads], [0, heads, -1, size])
        seen = g.node("Transpose", [g.node("Reshape", [rows, shape])], perm=[0, 2, 1, 3])
        back = g.node("Reshape", [seen, g.constant([0, -1, heads, size])])
        return g.node("Transpose", [back], perm=[0, 2, 1, 3])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concat_graphs, "_split", turn)
        model = make_decoder(Decoder())
    with pytest.raises(
        UnsupportedModelError, match=r"what is written to the cache|cannot be done in place|length of the cache"
    ):
        _plan(model, capacity)


@pytest.mark.slow
@given(steps=odd_steps())
@settings(max_examples=12, deadline=None)
def test_counts_that_are_others_in_some_steps(steps: tuple[str, Odd, int]) -> None:
    """An output that counts the tokens is left out."""
    _, odd, capacity = steps

    def after(g: Build, x: str) -> str:
        g.node("Add", [g.all, g.node("Cast", [odd(g)], to=TensorProto.INT64)], "count")
        g.output("count", TensorProto.INT64, [])
        return x

    with pytest.raises(UnsupportedModelError, match="count"):
        _plan(make_decoder(Decoder(after=after)), capacity)


def cut_shorter(odd: Odd) -> onnx.ModelProto:
    """A mask is made of the size of something that is cut shorter in odd steps."""

    def mask(g: Build) -> str:
        less = g.node("Sub", [g.length, g.node("Cast", [odd(g)], to=TensorProto.INT64)])
        end = g.node("Unsqueeze", [less, g.constant([0])])
        cut = g.node("Slice", [g.tokens, g.constant([0]), end, g.constant([1])])
        missing = g.node("Sub", [g.size_of(cut, 1), g.length])
        return g.to_scores(g.node("LessOrEqual", [g.key_rows, g.node("Add", [g.query_rows, missing])]))

    return make_decoder(Decoder(mask=mask))


@pytest.mark.slow
@given(steps=odd_steps())
@settings(max_examples=20, deadline=None)
def test_shapes_that_are_others_in_some_steps(steps: tuple[str, Odd, int]) -> None:
    _, odd, capacity = steps
    with pytest.raises(UnsupportedModelError, match="none of the supported ones"):
        _plan(cut_shorter(odd), capacity)


@pytest.mark.few(6)
@pytest.mark.parametrize("capacity", [24, 100])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("past", [None, 4])
def test_shapes_that_are_others_in_steps_that_are_learnt_from(capacity: int, length: int, past: int | None) -> None:
    """Their sizes cannot be learnt, so that nothing else says where to look."""
    odd = equal("length", length) if past is None else both(equal("past", past), equal("length", length))
    with pytest.raises(UnsupportedModelError, match="none of the supported ones"):
        _plan(cut_shorter(odd), capacity)


@pytest.mark.few(2)
@pytest.mark.parametrize("capacity", [12, 24, 300])
@given(past=st.integers(0, 10))
@settings(max_examples=8, deadline=None)
def test_counts_that_cancel_out_before_they_are_canonical_only(capacity: int, past: int) -> None:
    """Rows of the past less a position, at that position: 0 as exported; the capacity less it afterwards."""

    def after(g: Build, x: str) -> str:
        first = g.node("Gather", [g.position_ids, g.constant([0])], axis=1)  # [B, 1], of each row its own
        there = g.node("Cast", [g.node("Equal", [first, g.constant(past)])], to=TensorProto.INT64)
        nothing = g.node("Mul", [there, g.node("Sub", [g.past, g.constant(past)])])
        as_x = g.node("Unsqueeze", [g.node("Cast", [nothing], to=TensorProto.FLOAT), g.constant([2])])
        return g.node("Add", [x, as_x])

    with pytest.raises(UnsupportedModelError, match="the number of new tokens as the rows of the present"):
        _plan(make_decoder(Decoder(after=after)), capacity)


@given(at=st.integers(0, 39))
@settings(max_examples=12, deadline=None)
def test_counters_that_count_at_one_position(at: int) -> None:
    """An input that counts the tokens goes; whether it says one number does not stay either."""

    def after(g: Build, x: str) -> str:
        counter = g.input("position_ids", TensorProto.INT64, [])
        there = g.node("Cast", [g.node("Equal", [counter, g.constant(at)])], to=TensorProto.FLOAT)
        return g.node("Add", [x, there])

    with pytest.raises(UnsupportedModelError, match="from the length of the cache"):
        _plan(make_decoder(Decoder(positions="none", after=after)), 40)


def moved(g: Graph, at: int, by: int) -> str:
    """Rows of the new tokens, `by` further where the first of them is row `at`."""
    start = g.node("Where", [g.node("Equal", ["pos", g.constant(at)]), g.constant(at + by), "pos"])
    return positions(g, start)


def one_hot(at: int, by: int) -> Callable[[Graph, str, str], str]:
    """A blend of one new row with the past; at position `at`, another row is chosen."""

    def idiom(g: Graph, past: str, new: str) -> str:
        start = g.node("Where", [g.node("Equal", ["pos", g.constant(at)]), g.constant(at + by), "pos"])
        chosen = along(g, g.node("Equal", [count(g, ROWS), start]), 2, 4)
        return g.node("Where", [chosen, g.node("Transpose", [new], perm=[0, 2, 1, 3]), past])

    return idiom


ROWS = 60


@given(at=st.integers(0, ROWS - 1), by=st.sampled_from([-1, 1]), idiom=st.sampled_from(["ScatterND", "one-hot"]))
@settings(max_examples=60, deadline=None)
def test_rows_that_are_others_at_one_position(at: int, by: int, idiom: str) -> None:
    write = index_copy(lambda g: moved(g, at, by)) if idiom == "ScatterND" else one_hot(at, by)
    model = update_model(write, shape=("B", 2, ROWS, 4), length="S" if idiom == "ScatterND" else 1)
    with pytest.raises(UnsupportedModelError, match="cannot be done in place"):
        prove_updates(model)


@pytest.mark.parametrize("idiom", ["ScatterND", "one-hot"])
def test_rows_that_are_right_everywhere(idiom: str) -> None:
    write = index_copy() if idiom == "ScatterND" else one_hot(0, 0)
    model = update_model(write, shape=("B", 2, ROWS, 4), length="S" if idiom == "ScatterND" else 1)
    (update,) = prove_updates(model)
    assert update.promise is not None


def check_planned(decoder: Decoder, capacity: int) -> None:
    """Its caches are updated in place."""
    kinds = Counter(node.op_type for node in _plan(make_decoder(decoder), capacity).model.graph.node)
    assert (kinds["TensorScatter"], kinds["Attention"]) == (2, 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("capacity", [1, 2, 5, 15, 16, 17, 33, 1000, 20000])
@pytest.mark.parametrize(
    "decoder", [Decoder(), Decoder(mask="padding", window=5), Decoder(sequence=3), Decoder(batch=1)]
)
def test_decoders_that_are_right_everywhere_pass_at_every_capacity(capacity: int, decoder: Decoder) -> None:
    if decoder.sequence == 3 and capacity < 3:
        pytest.skip("no step fits")
    check_planned(decoder, capacity)


@pytest.mark.parametrize("capacity", [9000, 40000])
def test_windows_that_only_long_texts_fill(capacity: int) -> None:
    check_planned(Decoder(window=capacity - 100), capacity)


STORED = sorted(path for path in MODELS.rglob("*.onnx") if path.stat().st_size < 1 << 20)


@pytest.mark.few(3)
@pytest.mark.parametrize("path", STORED, ids=lambda path: str(path.relative_to(MODELS)))
def test_a_program_computes_what_probes_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors that proofs are about, in real exports, at lengths that the program did not learn from."""
    checked: list[Samples] = []
    real = lengths.check_promises

    def compared(samples: Samples) -> None:
        checked.append(samples)
        check_computed(samples)
        real(samples)

    for module in (exported, stage):
        monkeypatch.setattr(module, "check_promises", compared)
    model = onnx.load(path)
    try:
        _plan(model, 64)
    except UnsupportedModelError:
        pytest.skip("a dead end")
    if not checked:
        pytest.skip("canonical already")


def check_computed(samples: Samples) -> None:
    names = sorted({name for promise in samples.promises for name in promise.names})
    weights = {name: value for promise in samples.promises for name, value in promise.given.items()}
    length = samples.fixed_length
    learnt = [Step(sample.past, sample.length, sample.probe) for sample in samples.learning]
    program = Program(samples.blueprint, names, learnt, weights)
    assert program.runs
    for past, new in [(0, 1), (1, 1), (3, 5), (11, 2), (17, 13), (samples.capacity - 1, 1)]:
        if past + (length or new) > samples.capacity:
            continue
        sample = samples.step(1, past, new)
        values = program.run(past, length or new, sample.probe.values)
        probe = sample.probe.given(weights)
        for name in names:
            expected = probe.value(name)
            assert (name in values) == (expected is not None), name
            if expected is not None:
                assert np.array_equal(values[name], expected), (name, past, new)


@pytest.mark.parametrize(("windows", "kinds"), [((5, 5, 5), 1), ((5, 6, 5), 2)])
def test_masks_of_layers_that_are_alike_are_one(
    windows: tuple[int, ...], kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer makes a mask for itself."""
    left = list(windows)

    def scores(g: Build, tensor: str) -> str:
        first = g.node("Sub", [g.query_rows, g.constant(left.pop())])
        visible = g.node("And", [g.causal(), g.node("Greater", [g.key_rows, first])])
        return g.node("Where", [g.to_scores(visible), tensor, g.number(-1e4)])

    found: list[int] = []

    def counted(samples: Samples) -> None:
        names = [name for promise in samples.promises if promise.key[0] == "causal" for name in promise.names]
        learnt = [Step(sample.past, sample.length, sample.probe) for sample in samples.learning]
        program = Program(samples.blueprint, names, learnt, {})
        found.append(len({program.key(name) for name in names}))

    monkeypatch.setattr(exported, "check_promises", counted)
    _plan(make_decoder(Decoder(layers=len(windows), mask="none", scores=scores)), 24)
    assert found[0] == kinds


def _plan(model: onnx.ModelProto, capacity: int) -> Any:
    return normalize(model, {}, PlanOptions(capacity=capacity))
