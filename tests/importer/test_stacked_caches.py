"""Caches of several layers in one tensor: taken apart, and each then as it would be by itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from onnx import helper, numpy_helper
from stacked_graphs import Stacking, stacked

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model, plan_model
from trt_kvcache.importer.plan import CachePlan, PlanOptions
from trt_kvcache.verify import VerifyOptions, verify_import

OPTIONS = PlanOptions(capacity=16)
VERIFY = VerifyOptions(batch=2, chunks=(3,), tokens=2)
FORMS = (
    ("concat", Stacking("L", 1, "slice")),
    ("concat-attention", Stacking("M")),
    ("concat-attention", Stacking("K", 2)),
    ("past-attention", Stacking("LK", 1, "split")),
    ("gqa", Stacking("LK", 1)),
    ("scatter", Stacking("LK", 1)),
    ("scatter", Stacking("L", 0, "slice", "slots")),
)


def edited(form: str, how: Stacking | None, layers: int = 2) -> onnx.ModelProto:
    """A decoder; with its caches one by one where `how` is None."""
    model = make_foreign(form, DecoderConfig(vocab=64, capacity=16, layers=layers))
    return model if how is None else stacked(model, how)


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def caches(plan: CachePlan) -> list[tuple[object, ...]]:
    return sorted((c.logical_shape, c.physical_shape, c.route.value, c.idiom, len(c.readers)) for c in plan.caches)


@cache
def caches_of(form: str) -> list[tuple[object, ...]]:
    with TemporaryDirectory() as folder:
        return caches(plan_model(saved(Path(folder), edited(form, None)), OPTIONS))


@pytest.mark.few(3)
@pytest.mark.parametrize(("form", "how"), FORMS, ids=str)
def test_each_cache_is_as_it_would_be_by_itself(tmp_path: Path, form: str, how: Stacking) -> None:
    found = import_model(saved(tmp_path, edited(form, how)), OPTIONS)
    assert caches(found.plan) == caches_of(form)
    verify_import(found, VERIFY).check()


def test_one_layer_is_taken_out_of_its_axis(tmp_path: Path) -> None:
    found = import_model(saved(tmp_path, edited("concat-attention", Stacking("L"), layers=1)), OPTIONS)
    assert [c.past for c in found.plan.caches] == ["past.key.0", "past.value.0"]
    verify_import(found, VERIFY).check()


def test_what_changes_is_said_from_the_tensor_as_exported(tmp_path: Path) -> None:
    plan = plan_model(saved(tmp_path, edited("concat-attention", Stacking("LK"))), OPTIONS)
    changes = {(c.io, c.old): (c.new, c.why) for c in plan.changes}
    why = "one tensor for each cache; a buffer of fixed capacity L, updated in place"
    assert changes["input", "past.all[1, 0] of [2, 2, batch, 2, past, 16]"] == ("past.all.1.0 [B, 2, L, 16]", why)
    assert changes["output", "present.all[0, 1] of [2, 2, batch, 2, past + sequence, 16]"][1] == why
    assert [(s.name, s.io, len(s.parts)) for s in plan.stacks] == [
        ("past.all", "input", 4),
        ("present.all", "output", 4),
    ]


def refused(folder: Path, model: onnx.ModelProto) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        plan_model(saved(folder, model), OPTIONS)
    return str(caught.value)


def maker(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if name in n.output)


@pytest.mark.parametrize("form", ["concat-attention", "scatter"])
def test_a_cache_that_comes_back_in_another_place_is_refused(tmp_path: Path, form: str) -> None:
    message = refused(tmp_path, edited(form, Stacking("L", moved=True)))
    assert "takes a cache as 'past.key.0' and gives it back as 'present.key.1'" in message
    assert "stack the caches in the order of the layers" in message


def test_a_place_that_is_computed_is_refused(tmp_path: Path) -> None:
    model = edited("concat-attention", Stacking("L"))
    node = maker(model, "past_key_values.1.key")
    model.graph.node.insert(0, helper.make_node("Shape", ["input_ids"], ["s"], name="s", end=1))
    model.graph.node.insert(1, helper.make_node("Squeeze", ["s"], ["computed"], name="computed"))
    node.input[1] = "computed"
    message = refused(tmp_path, model)
    assert f"'past.key' holds several caches, and Gather '{node.name}' reads it as a whole" in message


def test_a_tensor_that_is_read_as_a_whole_is_refused(tmp_path: Path) -> None:
    model = edited("concat-attention", Stacking("LK", 1))
    maker(model, "logits").output[0] = "scores"
    model.graph.node.append(helper.make_node("ReduceMean", ["past.all"], ["mean"], name="mean", keepdims=0))
    model.graph.node.append(helper.make_node("Add", ["scores", "mean"], ["logits"], name="shifted"))
    message = refused(tmp_path, model)
    assert "'past.all' holds several caches, and ReduceMean 'mean' reads it as a whole" in message
    assert "chosen by a constant index (past[i], or unbind and stack)" in message


def test_a_write_to_a_place_that_is_computed_is_refused(tmp_path: Path) -> None:
    model = edited("scatter", Stacking("L", 0, "gather", "slots"))
    model.graph.node.insert(0, helper.make_node("Shape", ["input_ids"], ["s"], name="s", end=1))
    model.graph.node.insert(1, helper.make_node("Unsqueeze", ["s", "axes"], ["place"], name="place"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axes"))
    maker(model, "present.key").input[1] = "place"
    assert "computes which one of several caches it writes ('place')" in refused(tmp_path, model)


def test_a_cache_that_two_layers_write_is_refused(tmp_path: Path) -> None:
    model = edited("scatter", Stacking("L", 0, "gather", "slots"))
    last = maker(model, "present.key")
    last.input[1] = maker(model, last.input[0]).input[1]
    assert "past.key.1" in refused(tmp_path, model)


def test_a_cache_that_is_added_to_is_refused(tmp_path: Path) -> None:
    model = edited("scatter", Stacking("L", 0, "gather", "slots"))
    maker(model, "present.key").attribute.append(helper.make_attribute("reduction", "add"))
    said = refused(tmp_path, model)
    assert "computes something else than what was recognized" in said
    assert "present.key." in said
