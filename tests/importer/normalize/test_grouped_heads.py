"""Query heads that share keys and values by broadcasting: every way to write it becomes Attention over the caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_decode import check_decode, rewritten
from concat_graphs import Decoder, make_decoder
from grouped_graphs import Grouped

from trt_kvcache.errors import UnsupportedModelError

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "broadcast": ({}, {}),
    "broadcast, padding": ({"mask": "padding", "positions": "padding"}, {"mask": 5}),
    "broadcast, own mask": ({"mask": "own"}, {"mask": 5, "apply": "where"}),
    "broadcast, [B, S, N, D], a window": ({"layout": "bsnd", "window": 5}, {"mask": 3}),
    "einsum": ({"heads": 6}, {"form": "einsum"}),
    "einsum, text in front": ({"mask": "padding"}, {"form": "jax", "mask": 5}),
    "group and queries": ({}, {"form": "rows", "apply": "where"}),
    "group and queries, flat": ({"layout": "flat", "mask": "padding"}, {"form": "rows", "mask": 5}),
    "groups in front": ({"heads": 6, "kv_heads": 3}, {"form": "front", "mask": 5}),
    "groups in front, [B, S, N, D]": ({"heads": 6, "layout": "bsnd", "window": 5}, {"form": "front", "apply": "where"}),
    "groups in front, einsum": ({"heads": 6, "mask": "padding"}, {"form": "front einsum", "mask": 5}),
    "heads in turns": ({"heads": 6, "kv_heads": 3}, {"form": "tiled"}),
    "heads in turns, own mask": ({"heads": 6, "mask": "own"}, {"form": "tiled", "mask": 4}),
    "group and queries all the way": ({"heads": 6}, {"form": "folded"}),
    "group and queries all the way, padding": ({"mask": "padding", "layout": "bsnd"}, {"form": "folded"}),
    "group and queries, a computed batch": ({"heads": 6}, {"form": "rows", "computed": True}),
    "all the way, a computed batch": ({"heads": 6, "batch": 2}, {"form": "folded", "computed": True}),
    "one token": ({"heads": 6, "sequence": 1}, {"form": "one"}),
    "one token, a computed batch": ({"heads": 6, "sequence": 1}, {"form": "one", "computed": True}),
    "one token, padding": ({"sequence": 1, "mask": "padding"}, {"form": "one", "mask": 4}),
    "one token, one key head": ({"sequence": 1, "kv_heads": 1, "window": 5}, {"form": "one", "apply": "where"}),
    "sinks": ({"heads": 6, "sinks": "weight"}, {}),
    "sinks, einsum": ({"heads": 6, "sinks": "weight", "window": 5}, {"form": "einsum", "apply": "where"}),
    "sinks, groups in front": ({"heads": 6, "kv_heads": 3, "sinks": "weight"}, {"form": "front", "mask": 5}),
    "batch and heads": ({"scores": lambda g, s: g.node("Tanh", [s])}, {"form": "flat", "mask": 3}),
}


def _decoder(settings: dict[str, Any], **grouped: Any) -> Decoder:
    return Decoder(**{"repeat": "none", "scale": "none", **settings}, attend=Grouped(**grouped))


@pytest.mark.few(2)
@pytest.mark.parametrize(("settings", "grouped"), VARIANTS.values(), ids=VARIANTS.keys())
def test_it_becomes_attention(settings: dict[str, Any], grouped: dict[str, Any], tmp_path: Path) -> None:
    result = check_decode(make_decoder(_decoder(settings, **grouped)), tmp_path)
    heads = settings.get("heads", 4), settings.get("kv_heads", 2)
    assert [(a.query_heads, a.kv_heads) for a in result.plan.attention] == [heads]


@pytest.mark.parametrize("form", ["broadcast", "einsum", "rows", "flat", "front", "tiled", "folded", "one"])
def test_keys_of_other_heads_are_refused(form: str, tmp_path: Path) -> None:
    settings = {"sequence": 1} if form == "one" else {}
    with pytest.raises(UnsupportedModelError, match="is not cache .* with its heads repeated"):
        rewritten(make_decoder(_decoder(settings, form=form, rolled=True)), tmp_path)


@pytest.mark.parametrize("sequence", ["sequence", 2])
def test_groups_behind_the_queries_are_refused(sequence: int | str, tmp_path: Path) -> None:
    """``[B, N, S * G, D]``, also where steps are as long as groups are large."""
    with pytest.raises(UnsupportedModelError, match="is none of the supported ones"):
        rewritten(make_decoder(_decoder({"sequence": sequence, "positions": "past"}, form="folded back")), tmp_path)


def test_sinks_in_front_of_the_scores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="adds numbers other than 0 and the lowest"):
        rewritten(make_decoder(_decoder({"sinks": "weight"}, swapped=True)), tmp_path)


def test_values_of_other_heads_than_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="share heads of keys and of values in another order"):
        rewritten(make_decoder(_decoder({"batch": 1}, form="flat", crossed=True)), tmp_path)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("place", [0, 1], ids=["queries", "weights"])
def test_groups_in_front_of_the_sequences_are_refused(place: int, heads: int, tmp_path: Path) -> None:
    """``[G * B, N, S, D]``, with which one sequence alone fits: its keys broadcast, and each head meets another one."""
    model = make_decoder(_decoder({"heads": heads}, form="rows"))
    reshapes = [n for n in model.graph.node if n.op_type == "Reshape"]
    readers = {n.input[0]: n for n in model.graph.node if n.op_type == "MatMul"}
    shape = [n for n in reshapes if n.output[0] in readers and "concat" in n.input[1]][place].input[1]
    concat = next(n for n in model.graph.node if n.output[0] == shape)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([heads // 2]), "group"))
    model.graph.node.insert(
        list(model.graph.node).index(concat),
        onnx.helper.make_node("Mul", [concat.input[0], "group"], ["groups"], "groups"),
    )
    concat.input[0] = "groups"
    with pytest.raises(UnsupportedModelError, match="is no attention|is unknown"):
        rewritten(model, tmp_path)


def test_a_mask_of_no_sequence_is_refused(tmp_path: Path) -> None:
    """Keys are counted backwards, so that none is; it ended with an IndexError."""
    model = make_decoder(_decoder({}, form="folded"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(-1), "back"))
    next(node for node in model.graph.node if node.op_type == "Range").input[2] = "back"
    with pytest.raises(UnsupportedModelError):
        rewritten(model, tmp_path)


def test_groups_over_some_heads_of_the_keys_are_refused(tmp_path: Path) -> None:
    """``[B, N / 2, 2, D]`` in steps of one token, over the first half of the keys."""
    decoder = Decoder(heads=4, kv_heads=4, sequence=1, mask="none", attend=_one_token)
    with pytest.raises(UnsupportedModelError, match="is not cache .* with its heads repeated"):
        rewritten(make_decoder(decoder), tmp_path)


def test_several_tokens_in_an_axis_of_their_own_are_no_groups(tmp_path: Path) -> None:
    """The same axes, where steps have two tokens and each head of queries has its own of keys."""
    decoder = Decoder(heads=2, kv_heads=2, sequence=2, positions="past")
    result = check_decode(make_decoder(decoder), tmp_path)
    assert [(a.query_heads, a.kv_heads) for a in result.plan.attention] == [(2, 2)]


def _one_token(g: Any, query: str, keys: str, values: str) -> str:
    few, other = (g.node("Slice", [t, g.constant([0]), g.constant([2]), g.constant([1])]) for t in (keys, values))
    shaped = g.node("Reshape", [query, g.constant([0, 2, 2, 4])])
    scores = g.node("MatMul", [shaped, g.node("Transpose", [few], perm=[0, 1, 3, 2])])
    output = g.node("MatMul", [g.node("Softmax", [scores], axis=-1), other])
    return g.node("Reshape", [output, g.constant([0, 4, 1, 4])])
