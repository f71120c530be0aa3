"""Sequences of a batch that depend on each other are refused; what each of them decides for itself is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_decode import Decode, check_decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache import VerifyOptions, plan_model, verify_model
from trt_kvcache.errors import UnsupportedModelError

SWITCH = 9
FAR = 1 << 40
# What regions of caches are made of, they compare with the original, row by row.
REFUSED = "depends on the other sequences|computes something else than what was recognized"


def _scaled(g: Build, x: str, positions: str) -> str:
    """Another factor in long texts."""
    long = g.node("Greater", [positions, g.constant(SWITCH)])
    return g.node("Mul", [x, g.node("Where", [long, g.number(3), g.number(1)])])


def by_the_longest(g: Build, x: str) -> str:
    """As LongRoPE chooses its factors."""
    return _scaled(g, x, g.node("ReduceMax", [g.position_ids], keepdims=0))


def by_the_shortest(g: Build, x: str) -> str:
    return _scaled(g, x, g.node("ReduceMin", [g.position_ids], keepdims=0))


def by_the_first(g: Build, x: str) -> str:
    rows = g.node("Unsqueeze", [g.position_ids, g.constant([2])])
    return _scaled(g, x, g.node("Gather", [rows, g.constant([0])], axis=0))


def by_the_last(g: Build, x: str) -> str:
    rows = g.node("Unsqueeze", [g.position_ids, g.constant([2])])
    return _scaled(g, x, g.node("Gather", [rows, g.constant([-1])], axis=0))


def by_a_row_of_a_table(g: Build, x: str) -> str:
    """Weights are looked up behind an offset: no value shows, only which rows are taken."""
    long = g.node("Greater", [g.node("ReduceMax", [g.position_ids], keepdims=0), g.constant(SWITCH)])
    offset = g.node("Mul", [g.node("Cast", [long], to=TensorProto.INT64), g.constant(64)])
    table = g.node("Mul", [g.weight(128, 1), g.node("Cast", [g.node("ReduceMax", [g.tokens])], to=TensorProto.FLOAT)])
    return g.node("Mul", [x, g.node("Gather", [table, g.node("Add", [g.position_ids, offset])], axis=0)])


def each_by_itself(g: Build, x: str) -> str:
    rows = g.node("Unsqueeze", [g.position_ids, g.constant([2])])
    return _scaled(g, x, rows)


def by_a_table_cut_to_the_longest(g: Build, x: str) -> str:
    """What is cut off, no sequence reads but the longest."""
    longest = g.node("ReduceMax", [g.position_ids], keepdims=0)
    end = g.node("Reshape", [g.node("Add", [longest, g.constant(1)]), g.constant([1])])
    cut = g.node("Slice", [g.weight(64, 1), g.constant([0]), end])
    rows = g.node("Add", [g.position_ids, g.node("Mul", [g.tokens, g.constant(0)])])
    return g.node("Mul", [x, g.node("Gather", [cut, rows], axis=0)])


@pytest.mark.parametrize("after", [by_the_longest, by_the_shortest, by_the_first, by_the_last, by_a_row_of_a_table])
def test_a_factor_chosen_for_the_whole_batch_is_refused(tmp_path: Path, after) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        rewritten(make_decoder(Decoder(after=after)), tmp_path)


@pytest.mark.parametrize("after", [by_the_longest, by_the_shortest])
def test_below_the_switch_it_is_taken(tmp_path: Path, after) -> None:
    model = make_decoder(Decoder(after=after))
    Decode(model, rewritten(model, tmp_path, SWITCH).model, SWITCH).check([2, 1, 1, SWITCH - 7], [3, 1, 0])


def test_one_sequence_alone_decides_what_it_likes(tmp_path: Path) -> None:
    check_decode(make_decoder(Decoder(after=by_the_longest, batch=1)), tmp_path)


@pytest.mark.parametrize("after", [each_by_itself, by_a_table_cut_to_the_longest])
def test_each_sequence_by_itself_is_taken(tmp_path: Path, after) -> None:
    check_decode(make_decoder(Decoder(after=after)), tmp_path)


def _beside(g: Build, *rows: str) -> str:
    return g.node("Concat", list(rows), axis=0)


def _rows(g: Build, x: str, *bounds: int) -> str:
    """A Slice of the batch."""
    start, end, *step = (g.constant([n]) for n in bounds)
    return g.node("Slice", [x, start, end, g.constant([0]), *step])


def _flat(g: Build, x: str, change: Callable[[str], str]) -> str:
    """``[B * S, D]`` on the way."""
    return g.node("Reshape", [change(g.node("Reshape", [x, g.constant([-1, 16])])), g.node("Shape", [x])])


def _beside_others(g: Build, x: str) -> str:
    """Sums over the sequences ``[S, B, D]``, each weighted by how much it is like the others."""
    return g.node("MatMul", [g.node("MatMul", [x, g.node("Transpose", [x], perm=[0, 2, 1])]), x])


MIXES = {
    "roll": lambda g, x: _beside(g, _rows(g, x, 1, FAR), _rows(g, x, 0, 1)),
    "roll of all tokens": lambda g, x: _flat(g, x, lambda y: _beside(g, _rows(g, y, 1, FAR), _rows(g, y, 0, 1))),
    "softmax of all tokens": lambda g, x: _flat(g, x, lambda y: g.node("Softmax", [y], axis=0)),
    "reversed": lambda g, x: _rows(g, x, -1, -FAR, -1),
    "the first": lambda g, x: g.node("Sub", [x, g.node("Gather", [x, g.constant([0])], axis=0)]),
    "mean": lambda g, x: g.node("Sub", [x, g.node("ReduceMean", [x, g.constant([0])])]),
    "mean of all": lambda g, x: g.node("Sub", [x, g.node("ReduceMean", [x])]),
    "softmax": lambda g, x: g.node("Softmax", [x], axis=0),
    "sum": lambda g, x: g.node("CumSum", [x, g.constant(0)]),
    "norm": lambda g, x: g.node("LayerNormalization", [x, g.weight(1)], axis=0),
    "product": lambda g, x: g.node("Transpose", [_beside_others(g, g.node("Transpose", [x], perm=[1, 0, 2]))],
                                   perm=[1, 0, 2]),
    "reshape": lambda g, x: g.node("Reshape", [
        g.node("Transpose", [g.node("Reshape", [x, g.node("Concat", [
            g.node("Unsqueeze", [n, g.constant([0])]) for n in (g.size_of(x, 1), g.size_of(x, 0), g.constant(16))
        ], axis=0)])], perm=[1, 0, 2]), g.constant([0, -1, 16])]),
}  # fmt: skip


@pytest.mark.few(7)
@pytest.mark.parametrize("name", MIXES)
def test_operators_along_the_batch_are_refused_behind_weights(tmp_path: Path, name: str) -> None:
    mixed = Decoder(after=MIXES[name])
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        rewritten(make_decoder(mixed), tmp_path)


def whole(g: Build, x: str) -> str:
    """What such operators do to none, or to one sequence."""
    batch = g.size_of(g.tokens, 0)
    x = _rows(g, g.node("Gather", [x, g.node("Range", [g.constant(0), batch, g.constant(1)])], axis=0), 0, FAR)
    one = g.node("Reshape", [x, g.constant([1, -1, 16])])
    return g.node("Reshape", [g.node("LayerNormalization", [one, g.weight(16)], axis=2), g.node("Shape", [x])])


def test_whole_batches_are_taken(tmp_path: Path) -> None:
    check_decode(make_decoder(Decoder(after=whole)), tmp_path)


def static_decoder(folder: Path, switch: int = SWITCH, batch: int | None = None, *, each: bool = False) -> Path:
    """A decoder with TensorScatter caches by mobius-onnx, with rotary factors chosen as by its LongRoPE."""
    source = Path(__file__).parents[2] / "models/mobius/llama_static_f32"
    for path in source.glob("*.data"):
        (folder / path.name).write_bytes(path.read_bytes())
    model = onnx.load(source / "model.onnx", load_external_data=False)
    rest = list(model.graph.node)
    for node in rest:
        node.input[:] = ["chosen" if name == "position_ids" else name for name in node.input]
    constants = {"switch": np.array(switch), "axes": np.array([1] if each else [0, 1])}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    del model.graph.node[:]
    model.graph.node.extend([
        helper.make_node("ReduceMax", ["position_ids", "axes"], ["longest"], "longest"),
        helper.make_node("GreaterOrEqual", ["longest", "switch"], ["is_long"], "is_long"),
        helper.make_node("Cast", ["is_long"], ["use_long"], "use_long", to=TensorProto.INT64),
        helper.make_node("Mul", ["use_long", "switch"], ["offset"], "offset"),
        helper.make_node("Add", ["position_ids", "offset"], ["chosen"], "chosen"),
        *rest,
    ])  # fmt: skip
    if batch is not None:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = batch
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("batch", [None, 2])
def test_a_factor_chosen_for_the_whole_batch_is_refused_beside_canonical_caches(tmp_path: Path, batch) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        plan_model(static_decoder(tmp_path, batch=batch))


@pytest.mark.parametrize("case", [{"each": True}, {"batch": 1}, {"switch": 64}], ids=str)
def test_canonical_caches_of_independent_sequences_are_taken(tmp_path: Path, case) -> None:
    path = static_decoder(tmp_path, **case)
    verify_model(path, verify=VerifyOptions(tokens=8)).check()


def test_an_open_batch_that_takes_one_sequence_only_is_refused(tmp_path: Path) -> None:
    def one(g: Build, x: str) -> str:
        return g.node("Reshape", [x, g.node("Concat", [g.constant([1]), g.node("Unsqueeze", [
            g.size_of(x, 1), g.constant([0])]), g.constant([16])], axis=0)])  # fmt: skip

    with pytest.raises(UnsupportedModelError, match="states an open batch and runs with one sequence"):
        rewritten(make_decoder(Decoder(after=one)), tmp_path)
    rewritten(make_decoder(Decoder(after=one, batch=1)), tmp_path)
