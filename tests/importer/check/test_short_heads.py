"""Long steps on short heads: regions that allow it, those that do not, and faults that only long steps show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from mutation_cuts import Pair
from onnx import TensorProto, helper
from verify import mistakes as m

from trt_kvcache.importer.check import region_comparison as running
from trt_kvcache.importer.check.region import Region
from trt_kvcache.importer.check.short_heads import with_short_heads
from trt_kvcache.importer.plan import CachePlan, PlanOptions

DECODER = Decoder(size=48, window=100)
OPTIONS = PlanOptions(capacity=1024)


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Region, CachePlan] | None]:
    """The answers of `slim`."""
    found: list[tuple[Region, CachePlan] | None] = []

    def keeping(region: Region, plan: CachePlan) -> tuple[Region, CachePlan] | None:
        found.append(with_short_heads(region, plan))
        return found[-1]

    monkeypatch.setattr(running, "with_short_heads", keeping)
    return found


def pair(decoder: Decoder, folder: Path, options: PlanOptions = OPTIONS) -> Pair:
    onnx.save(make_decoder(decoder), folder / "model.onnx")
    return Pair(folder / "model.onnx", options)


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    return made


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_region_runs_its_long_steps_with_short_heads(dtype: type, tmp_path: Path, seen: list[object]) -> None:
    both = pair(replace(DECODER, dtype=dtype), tmp_path)
    assert both.passes(both.imported.model) == ""
    regions = [found for found in seen if found]
    assert regions
    for region, plan in regions:  # type: ignore[misc]
        assert {c.logical_shape[-1] for c in plan.caches} == {16}  # type: ignore[has-type]
        assert all(t.factor != DECODER.size for b in region.boundaries for t in b.shape)  # type: ignore[has-type]


@pytest.mark.parametrize(
    "decoder",
    [
        replace(DECODER, window=48),  # the window may be the size
        replace(DECODER, size=16),
        replace(DECODER, size=2, heads=48, kv_heads=48, repeat="none"),
        replace(DECODER, layout="flat"),
    ],
    ids=["window", "short", "heads", "flat"],
)
def test_heads_keep_their_size_where_it_may_be_something_else(
    decoder: Decoder, tmp_path: Path, seen: list[object]
) -> None:
    both = pair(decoder, tmp_path)
    assert both.passes(both.imported.model) == ""
    assert [found for found in seen if found and decoder.window != decoder.size] == []


def scaled_if(model: onnx.ModelProto, name: str, op: str, number: int) -> None:
    """Queries are a quarter larger where a size of the step is as told."""
    node = m.nodes(model, "Attention")[0]
    size = f"{name}:size"
    model.graph.node.insert(0, helper.make_node("Shape", [name], [size], start=1, end=2))
    flag, factor = f"{name}:flag", f"{name}:factor"
    one, more = (m.constant(model, [v], np.float32) for v in (1.0, 1.25))
    model.graph.node.insert(1, helper.make_node(op, [size, m.constant(model, [number])], [flag]))
    model.graph.node.insert(2, helper.make_node("Where", [flag, more, one], [factor]))
    m.insert(model, node, 0, "Mul", factor)


@pytest.mark.parametrize(
    "fault",
    [
        lambda model: scaled_if(model, "input_ids", "Greater", 90),
        lambda model: scaled_if(model, "input_ids", "Equal", 101),
        m.own_key_hidden,
        m.next_key_visible,
        m.swap_keys_and_values,
        m.write_one_early,
    ],
    ids=["long prompts", "one length", "own key", "next key", "swapped", "early"],
)
def test_faults_are_found(fault: Callable[[onnx.ModelProto], None], tmp_path: Path, seen: list[object]) -> None:
    both = pair(DECODER, tmp_path)
    wrong = copied(both.imported.model)
    fault(wrong)
    assert both.passes(wrong)


def test_a_window_that_is_one_short_is_found_by_long_steps(tmp_path: Path, seen: list[object]) -> None:
    both = pair(DECODER, tmp_path)
    wrong = copied(both.imported.model)
    edited = 0
    for tensor in wrong.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if tensor.data_type == TensorProto.INT64 and values.size == 1 and values.item() in (99, 100):
            tensor.CopyFrom(onnx.numpy_helper.from_array(values - 1, tensor.name))
            edited += 1
    assert edited
    assert "in the original" in both.passes(wrong)
