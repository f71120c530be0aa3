"""Caches of a fixed length of which a step takes the rows in use, as models that are not given a mask do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from speech_graphs import HEARD, LAYERS, WIDTH, Speech, make_decoder

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model, plan_model
from trt_kvcache.verify import VerifyOptions, verify_import

VERIFY = VerifyOptions(batch=2, chunks=(2, 2), tokens=1)
HOW = [
    Speech(),
    Speech(write="rows", mask="all"),
    Speech(mask="all", index_columns=2),
    Speech(room=24),  # more positions than tokens: their tables do not tell which is which
]


def saved(folder: Path, how: Speech) -> Path:
    onnx.save(make_decoder(how), folder / "decoder.onnx")
    return folder / "decoder.onnx"


@pytest.mark.few(2)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_rows_in_use_are_written_in_place(tmp_path: Path, how: Speech) -> None:
    path = saved(tmp_path, how)
    found = import_model(path)
    plan = found.plan
    assert [c.route.value for c in plan.caches] == ["native"] * 2 * LAYERS
    assert {c.logical_shape for c in plan.caches} == {("n_audio", how.room, WIDTH)}
    assert {len(c.readers) for c in plan.caches} == {1}
    is_square = how.mask == "square"
    assert [t.name for t in plan.original if t.singly] == ["tokens"] * is_square
    assert any("fit several tokens only while nothing is in its caches" in n for n in plan.notes) == is_square
    verify_import(found, VERIFY).check()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (Speech(mask="all", first=1), "writes rows 0 of axis 1 when 1 rows hold tokens"),
        (Speech(mask="all", back=1), "computes something else"),
        (Speech(later=0.0), "does not hide later ones from earlier ones of [24]"),
    ],
    ids=str,
)
def test_other_rows_are_refused(tmp_path: Path, how: Speech, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(saved(tmp_path, how))


def test_rows_that_are_put_back_in_another_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="computes which one of several caches it writes"):
        plan_model(saved(tmp_path, Speech(mask="all", scrambled=True, room=8)))


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", ["all", "square"])
@pytest.mark.parametrize("room", [3, 6, 7])
def test_sequences_that_mix_are_seen_where_there_is_little_room(tmp_path: Path, mask: str, room: int) -> None:
    with pytest.raises(UnsupportedModelError):
        plan_model(saved(tmp_path, Speech(mask=mask, scrambled=True, room=room)))


def edited(folder: Path, op: str, name: str, **attrs: str) -> str:
    """What is said of a decoder of which one operator is another, or has more attributes."""
    model = make_decoder(Speech(mask="all"))
    node = [n for n in model.graph.node if n.op_type == op][int(name)]
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attrs.items())
    onnx.save(model, folder / "edited.onnx")
    with pytest.raises(UnsupportedModelError) as caught:
        plan_model(folder / "edited.onnx")
    return str(caught.value)


@pytest.mark.parametrize("place", ["0", "1"])
def test_rows_that_are_added_to_are_refused(tmp_path: Path, place: str) -> None:
    assert "neither those of past nor those of new rows" in edited(tmp_path, "ScatterND", place, reduction="add")


def test_a_front_of_another_length_is_refused(tmp_path: Path) -> None:
    """Attention over a row more than there are tokens."""
    model = make_decoder(Speech(write="rows", mask="all"))
    made = {name: node for node in model.graph.node for name in node.output}
    cut = next(n for n in model.graph.node if n.op_type == "Slice" and made.get(n.input[0], n).op_type == "Gather")
    one = onnx.helper.make_tensor("one_more", onnx.TensorProto.INT64, [1], [1])
    model.graph.initializer.append(one)
    place = list(model.graph.node).index(cut)
    model.graph.node.insert(place, onnx.helper.make_node("Add", [cut.input[2], "one_more"], ["more"], name="more"))
    cut.input[2] = "more"
    onnx.save(model, tmp_path / "longer.onnx")
    with pytest.raises(UnsupportedModelError):
        plan_model(tmp_path / "longer.onnx")


def test_the_original_fails_where_it_is_run_one_by_one(tmp_path: Path) -> None:
    """What `singly` says: nothing is hidden behind it."""
    session = ort.InferenceSession(str(saved(tmp_path, Speech())), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    caches = {f"in_n_layer_self_{k}_cache": np.zeros((LAYERS, 1, Speech.room, WIDTH), np.float32) for k in "kv"}
    cross = {f"n_layer_cross_{k}": rng.normal(size=(LAYERS, 1, HEARD, WIDTH)).astype(np.float32) for k in "kv"}

    def run(offset: int, length: int) -> None:
        feed = {"tokens": np.ones((1, length), np.int64), "offset": np.array([offset]), **caches, **cross}
        session.run(["logits"], feed)

    run(0, 3)
    run(3, 1)
    with pytest.raises(Fail):
        run(3, 2)


def test_a_single_token_whose_mask_is_no_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="do not fit each other"):
        plan_model(saved(tmp_path, Speech(single=-1.0, room=9)))


def test_a_mask_as_large_as_a_weight_is_read(tmp_path: Path) -> None:
    assert any(t.singly for t in plan_model(saved(tmp_path, Speech(room=33))).original)


def test_one_token_that_is_computed_otherwise_than_several_is_refused(tmp_path: Path) -> None:
    """Where the original runs one by one, several at once have to be the same."""
    model = make_decoder(Speech())
    norm = next(n for n in model.graph.node if n.op_type == "LayerNormalization")
    x = norm.output[0]
    norm.output[0] = "normed"
    nodes = [
        helper.make_node("Shape", ["tokens"], ["count"], name="count", start=1, end=2),
        helper.make_node("Equal", ["count", "single"], ["is_single"], name="is_single"),
        helper.make_node("Neg", ["normed"], ["negative"], name="negative"),
        helper.make_node("Where", ["is_single", "negative", "normed"], [x], name="odd"),
    ]
    model.graph.initializer.append(helper.make_tensor("single", onnx.TensorProto.INT64, [1], [1]))
    place = list(model.graph.node).index(norm) + 1
    for node in reversed(nodes):
        model.graph.node.insert(place, node)
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(UnsupportedModelError, match="'odd' computes tokens with 'is_single', which is not the same"):
        plan_model(tmp_path / "odd.onnx")
