"""Caches of several layers in one tensor: taken apart, and each then as it would be by itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from onnx import helper, numpy_helper
from stacked_graphs import Stacking, stacked, text_first

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model, plan_model
from trt_kvcache.importer.extensions.stacked_caches.operators import RULES
from trt_kvcache.importer.extensions.stacked_caches.pieces import Pieces
from trt_kvcache.importer.extensions.stacked_caches.uses import find_uses
from trt_kvcache.importer.plan import CachePlan, PlanOptions
from trt_kvcache.verify import VerifyOptions, verify_import

OPTIONS = PlanOptions(capacity=16)
VERIFY = VerifyOptions(batch=2, chunks=(3,), tokens=2)
GROWING = (
    ("concat", Stacking("L", 1, "slice", "transpose")),
    ("concat-attention", Stacking("M", 0, "reshape", "reshape")),
    ("concat-attention", Stacking("M", 0, "halves", "stack")),
    ("concat-attention", Stacking("L", 2, "transpose", "none")),
    ("concat-attention", Stacking("LK", 0, "none", "stack")),
    ("past-attention", Stacking("KL", 1, "split", "stack")),
    ("gqa", Stacking("LK", 1, "gather", "stack")),
)
FIXED = (
    ("scatter", Stacking("LK", 1, "gather", "stack")),
    ("scatter", Stacking("L", 0, "slice", "slots")),
    ("scatter", Stacking("M", 1, "split", "elements")),
)


def saved(folder: Path, form: str, how: Stacking | None, layers: int = 2) -> Path:
    """The path of a decoder; with its caches one by one where `how` is None."""
    model = make_foreign(form, DecoderConfig(vocab=64, capacity=16, layers=layers))
    path = folder / f"{form}-{how}.onnx"
    onnx.save(model if how is None else stacked(model, how), path)
    return path


def caches(plan: CachePlan) -> list[tuple[object, ...]]:
    return sorted((c.logical_shape, c.physical_shape, c.route.value, c.idiom, len(c.readers)) for c in plan.caches)


@cache
def caches_of(form: str) -> list[tuple[object, ...]]:
    with TemporaryDirectory() as folder:
        return caches(plan_model(saved(Path(folder), form, None), OPTIONS))


@pytest.mark.few(3)
@pytest.mark.parametrize(("form", "how"), [*GROWING, *FIXED], ids=str)
def test_each_cache_is_as_it_would_be_by_itself(tmp_path: Path, form: str, how: Stacking) -> None:
    path = saved(tmp_path, form, how)
    found = import_model(path, OPTIONS)
    assert caches(found.plan) == caches_of(form)
    verify_import(found, VERIFY).check()


@pytest.mark.parametrize("how", [None, Stacking("L")], ids=str)
def test_the_batch_comes_first_where_the_text_did(tmp_path: Path, how: Stacking | None) -> None:
    model = text_first(make_foreign("concat-attention", DecoderConfig(vocab=64, capacity=16)))
    onnx.save(model if how is None else stacked(model, how), tmp_path / "model.onnx")
    found = import_model(tmp_path / "model.onnx", OPTIONS)
    plan = found.plan
    assert {c.logical_shape for c in plan.caches} == {("batch", 2, 16, 16)}
    change = next(c for c in plan.changes if c.old.startswith("past"))
    assert change.why.startswith("the batch comes first" if how is None else "one tensor for each cache; the batch")
    verify_import(found, VERIFY).check()


@pytest.mark.parametrize("read", ["gather", "slice"])
def test_one_layer_is_taken_out_of_its_axis(tmp_path: Path, read: str) -> None:
    path = saved(tmp_path, "concat-attention", Stacking("L", 0, read), layers=1)
    found = import_model(path, OPTIONS)
    assert [c.past for c in found.plan.caches] == ["past.key.0", "past.value.0"]
    verify_import(found, VERIFY).check()


def test_what_changes_is_said_from_the_tensor_as_exported(tmp_path: Path) -> None:
    plan = plan_model(saved(tmp_path, "concat-attention", Stacking("LK")), OPTIONS)
    changes = {(c.io, c.old): (c.new, c.why) for c in plan.changes}
    why = "one tensor for each cache; a buffer of fixed capacity L, updated in place"
    assert changes["input", "past.all[1, 0] of [2, 2, batch, 2, past, 16]"] == ("past.all.1.0 [B, 2, L, 16]", why)
    assert changes["output", "present.all[0, 1] of [2, 2, batch, 2, past + sequence, 16]"][1] == why
    assert [(s.name, s.io, len(s.parts)) for s in plan.stacks] == [
        ("past.all", "input", 4),
        ("present.all", "output", 4),
    ]


def refused(folder: Path, model: onnx.ModelProto) -> str:
    onnx.save(model, folder / "refused.onnx")
    with pytest.raises(UnsupportedModelError) as caught:
        plan_model(folder / "refused.onnx", OPTIONS)
    return str(caught.value)


@pytest.mark.parametrize("form", ["concat-attention", "scatter"])
def test_a_cache_that_comes_back_in_another_place_is_refused(tmp_path: Path, form: str) -> None:
    model = stacked(make_foreign(form, DecoderConfig(vocab=64, capacity=16)), Stacking("L", moved=True))
    message = refused(tmp_path, model)
    assert "takes a cache as 'past.key.0' and gives it back as 'present.key.1'" in message
    assert "stack the caches in the order of the layers" in message


def test_outputs_that_are_flipped_are_refused(tmp_path: Path) -> None:
    model = edited("concat-attention", Stacking("L"))
    node = next(n for n in model.graph.node if n.output[0] == "present.key")
    node.output[0] = "in_order"
    bounds = {"last": -1, "none": np.iinfo(np.int64).min, "layers": 0, "back": -1}
    model.graph.initializer.extend(numpy_helper.from_array(np.array([n], np.int64), k) for k, n in bounds.items())
    model.graph.node.append(helper.make_node("Slice", ["in_order", *bounds], ["present.key"], name="flip"))
    assert "takes a cache as 'past.key.0' and gives it back as 'present.key.1'" in refused(tmp_path, model)


def edited(form: str, how: Stacking) -> onnx.ModelProto:
    return stacked(make_foreign(form, DecoderConfig(vocab=64, capacity=16)), how)


def test_a_place_that_is_computed_is_refused(tmp_path: Path) -> None:
    model = edited("concat-attention", Stacking("L"))
    node = next(n for n in model.graph.node if n.output[0] == "past_key_values.1.key")
    shape = [helper.make_node("Shape", ["input_ids"], ["s"], name="s", end=1),
             helper.make_node("Squeeze", ["s"], ["computed"], name="computed")]  # fmt: skip
    node.input[1] = "computed"
    for made in reversed(shape):
        model.graph.node.insert(0, made)
    message = refused(tmp_path, model)
    assert "'past.key' holds several caches, and Gather" in message
    assert "computes which one it reads ('computed')" in message
    assert "chosen by a constant index (past[i], or unbind and stack)" in message


def test_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = edited("concat-attention", Stacking("L"))
    node = next(n for n in model.graph.node if n.output[0] == "past_key_values.1.key")
    model.graph.initializer.append(numpy_helper.from_array(np.array(2), "beyond"))
    node.input[1] = "beyond"
    assert f"Gather '{node.name}' reads place 2 of 2" in refused(tmp_path, model)


def test_a_tensor_that_is_read_as_a_whole_is_refused(tmp_path: Path) -> None:
    model = edited("concat-attention", Stacking("LK", 1))
    logits = next(n for n in model.graph.node if n.output[0] == "logits")
    logits.output[0] = "scores"
    model.graph.node.extend(
        [
            helper.make_node("ReduceMean", ["past.all"], ["mean"], name="mean", keepdims=0),
            helper.make_node("Add", ["scores", "mean"], ["logits"], name="shifted"),
        ]
    )
    assert "'past.all' holds several caches, and ReduceMean 'mean' reads it as a whole" in refused(tmp_path, model)


@pytest.mark.parametrize(("op", "attrs"), [("Transpose", {"perm": [0, 1, 2, 3, 4]}), ("Squeeze", {"axes": [0, 1, 2]})])
def test_operators_on_axes_that_are_not_there_are_not_followed(op: str, attrs: dict[str, object]) -> None:
    """Shape inference leaves such models alone where it does not know the rank."""
    whole = gs.Variable("past", np.dtype(np.float32), [2, "P", 4])
    node = gs.Node(op, "turned", attrs, [whole], [gs.Variable("out", np.dtype(np.float32), [2, "P", 4])])
    graph = gs.Graph([node], [whole], node.outputs)
    uses = find_uses(Pieces(graph, lambda _: None, RULES), graph.inputs)
    assert not uses.chosen
    assert op == "Squeeze" or uses.whole == {("past", 0): node, ("past", 2): node}


def test_a_write_to_a_place_that_is_computed_is_refused(tmp_path: Path) -> None:
    model = edited("scatter", Stacking("L", 0, "gather", "slots"))
    node = next(n for n in model.graph.node if n.output[0] == "present.key")
    model.graph.node.insert(0, helper.make_node("Shape", ["input_ids"], ["s"], name="s", end=1))
    model.graph.node.insert(1, helper.make_node("Unsqueeze", ["s", node.input[1] + "/axes"], ["place"], name="place"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), node.input[1] + "/axes"))
    node.input[1] = "place"
    assert "computes which one it writes ('place')" in refused(tmp_path, model)


def test_a_cache_that_two_layers_write_is_refused(tmp_path: Path) -> None:
    model = edited("scatter", Stacking("L", 0, "gather", "slots"))
    made = {name: n for n in model.graph.node for name in n.output}
    made["present.key"].input[1] = made[made["present.key"].input[0]].input[1]
    assert "past.key.1" in refused(tmp_path, model)


@pytest.mark.parametrize("write", ["slots", "elements"])
def test_a_cache_that_is_added_to_is_refused(tmp_path: Path, write: str) -> None:
    model = edited("scatter", Stacking("L", 0, "gather", write))
    node = next(n for n in model.graph.node if n.output[0] == "present.key")
    node.attribute.append(helper.make_attribute("reduction", "add"))
    said = refused(tmp_path, model)
    assert "computes something else than what was recognized" in said
    assert "the cache 'present.key." in said
