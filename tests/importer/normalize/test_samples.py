"""What each input of a model as exported is, and the steps that proofs look at."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from concat_graphs import Build, Decoder, make_decoder
from onnx import TensorProto

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.idioms.cache_updates import find_candidates
from trt_kvcache.importer.plan import OriginalRole


def read(model: onnx.ModelProto) -> Interface:
    model = onnx.shape_inference.infer_shapes(model)
    return Interface(model, find_candidates(gs.import_onnx(model)), None)


def samples(decoder: Decoder, capacity: int = 24) -> Samples:
    model = make_decoder(decoder)
    return Samples(Blueprint(model, {}), read(model), capacity)


def roles(decoder: Decoder) -> dict[str, tuple[OriginalRole, tuple[str, ...]]]:
    return {t.name: (t.role, t.axes) for t in read(make_decoder(decoder)).inputs.values()}


def test_roles_of_a_decoder() -> None:
    found = roles(Decoder(mask="padding", layout="bsnd"))
    assert found == {
        "input_ids": (OriginalRole.TOKENS, ("batch", "sequence")),
        "attention_mask": (OriginalRole.PADDING_MASK, ("batch", "total")),
        "position_ids": (OriginalRole.POSITIONS, ("batch", "sequence")),
        "past_key_values.0.key": (OriginalRole.GROWING_CACHE, ("batch", "past", "", "")),
        "past_key_values.0.value": (OriginalRole.GROWING_CACHE, ("batch", "past", "", "")),
    }


@pytest.mark.parametrize("own_type", [np.bool_, np.float32])
def test_the_callers_own_mask(own_type: Any) -> None:
    assert roles(Decoder(mask="own", own_type=own_type))["mask"] == (
        OriginalRole.MASK,
        ("batch", "", "sequence", "total"),
    )


def test_embedded_tokens_are_the_tokens() -> None:
    assert read(make_decoder(Decoder(embedded=True))).tokens == "inputs_embeds"


def test_what_nothing_explains_is_a_constant() -> None:
    def after(g: Build, x: str) -> str:
        return g.node("Add", [x, g.input("style", TensorProto.FLOAT, ["batch", 1, 1])])

    assert roles(Decoder(after=after))["style"][0] is OriginalRole.CONSTANT


@pytest.mark.parametrize("capacity", [4, 5, 8, 24, 600])
@pytest.mark.parametrize("sequence", ["sequence", 1, 4])
@pytest.mark.parametrize("batch", ["batch", 1, 2])
def test_steps_fit_the_capacity_and_reach_its_end(capacity: int, sequence: int | str, batch: int | str) -> None:
    steps = samples(Decoder(sequence=sequence, batch=batch), capacity).plain
    assert all(s.total <= capacity for s in steps)
    assert steps[-1].total == capacity
    assert {s.length for s in steps} == {sequence} or sequence == "sequence"
    assert {s.batch for s in steps} == {batch} or batch == "batch"


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_smallest_capacities(capacity: int) -> None:
    steps = samples(Decoder(), capacity).plain
    assert max(s.total for s in steps) == capacity
    assert 0 in {s.past for s in steps}


@pytest.mark.parametrize("capacity", [24, 600])
def test_no_past_and_all_the_past_are_compared_with_one_another(capacity: int) -> None:
    """Only steps of one shape can be: nothing between them may go unseen that happens in long texts only."""
    steps = [(s.batch, s.length, s.past) for s in samples(Decoder(), capacity).plain]
    batch, length, past = steps[-1]
    assert past == capacity - length
    assert (batch, length, 0) in steps
    assert max(length for _, length, _ in steps) == min(capacity, 512)


@pytest.mark.parametrize("capacity", [1, 2, 8, 24])
@pytest.mark.parametrize("sequence", ["sequence", 1])
def test_twins_differ_in_the_past_only(capacity: int, sequence: int | str) -> None:
    one, other = samples(Decoder(sequence=sequence), capacity).twins
    assert (one.batch, one.length) == (other.batch, other.length)
    assert one.past != other.past


def test_values_of_a_step() -> None:
    found = samples(Decoder(mask="padding"))
    for sample in found.plain:
        positions = sample.probe.value("position_ids")
        assert positions is not None
        np.testing.assert_array_equal(positions, np.tile(sample.past + np.arange(sample.length), (sample.batch, 1)))
        np.testing.assert_array_equal(sample.probe.value("attention_mask"), np.ones((sample.batch, sample.total)))
        assert sample.probe.value("input_ids") is None
        assert sample.probe.shape("present.0.key") == (sample.batch, 2, sample.total, 4)


def test_only_caches_of_fixed_length_wrap() -> None:
    assert samples(Decoder()).wrapped == ()


def test_a_growing_cache_takes_the_capacity_that_is_given() -> None:
    interface = read(make_decoder(Decoder()))
    assert interface.capacity(17) == 17
    with pytest.raises(OptionError, match="pass --capacity N"):
        interface.capacity(None)


def test_outputs_may_have_no_shape() -> None:
    """As where inference finds none behind an operator that it does not know."""
    model = make_decoder(Decoder())
    caches = find_candidates(gs.import_onnx(model))
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    found = Interface(model, caches, None)
    axes = {t.name: (t.role, t.axes) for t in found.tensors if t.io == "output"}
    assert axes["present.0.key"] == (OriginalRole.GROWING_CACHE, ())


def test_the_callers_own_mask_hides_something_in_every_step_of_two_tokens() -> None:
    """What is all 0 does not show that it is scaled."""
    found = samples(Decoder(mask="own", own_type=np.float32))
    for _ in range(50):
        assert (found.step(1, 0, 2).probe.value("mask") != 0).any()
