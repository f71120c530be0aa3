"""Advice, the next command, and the JSON of a plan; whole answers: test_golden."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from sample_plans import cache_update, sample_plan, with_contract

from trt_kvcache.cli import summary
from trt_kvcache.cli.options import PlanFlags
from trt_kvcache.cli.plan_view import plan_data
from trt_kvcache.cli.summary import advice, command_line, next_line
from trt_kvcache.importer.cache_plan import CachePlan, Fallback, Target


def test_advice() -> None:
    plan = sample_plan(3)
    assert advice(plan) == []
    half = replace(plan, caches=tuple(replace(cache, dtype="float") for cache in plan.caches))
    assert advice(half) == ["export in float16 or bfloat16: float32 caches take twice the memory"]
    masks = tuple(replace(plan.masks[0], name=f"mask_{at}", mask=f"own_{at}") for at in range(3))
    nodes = tuple(replace(node, mask=f"mask_{at}") for at, node in enumerate(plan.attention))
    assert advice(replace(plan, masks=masks, attention=nodes)) == [
        "export with one mask for all layers: each layer computes its own in every step"
    ]
    assert advice(replace(plan, masks=masks[:1] * 3)) == []
    window = replace(plan, masks=(replace(plan.masks[0], left_window=31),))
    assert advice(window) == ["--sliding circular: 6 caches would hold their window, not the whole text"]
    assert advice(replace(plan, masks=(replace(plan.masks[0], left_window=127),))) == []
    first, second, _ = window.attention
    shared = replace(window, attention=(first, second, replace(second, node="third")))
    assert advice(shared) == ["--sliding circular: 4 caches would hold their window, not the whole text"]
    assert advice(replace(shared, attention=(first, replace(second, mask=None), second))) == [
        "--sliding circular: 2 caches would hold their window, not the whole text"
    ]


def test_the_next_command_has_the_flags_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "can_build", lambda _: True)
    flags = PlanFlags(capacity=48, fallback=Fallback.CONTRACT, target=Target.TENSORRT)
    assert next_line(Path("my export/m.onnx"), flags, 4, tensorrt=True) == (
        "trt-kvcache build 'my export/m.onnx' -o m-engine/ --backend tensorrt --max-batch 4 --capacity 48 "
        "--fallback contract"
    )
    assert next_line(Path("exports/llama"), PlanFlags()) == "trt-kvcache build exports/llama -o llama-engine/"
    assert command_line("generate", Path("a.engine"), "--prompt", "Hello") == (
        "trt-kvcache generate a.engine --prompt Hello"
    )


def test_json_decodes_as_the_plan() -> None:
    plan = replace(sample_plan(2), caches=(with_contract(cache_update(0)),))
    data = msgspec.json.encode(plan_data(plan, 4))
    assert msgspec.json.decode(data, type=CachePlan) == plan
    counted = msgspec.json.decode(data)["cache_bytes"]
    assert counted == {"per_sequence": 131072, "batch": 4, "total": 524288}
    assert msgspec.json.decode(data)["steps"] == []  # weights were not counted
    steps = plan_data(replace(plan, weights=10**6), 4, 300.0)["steps"]
    assert [(s["tokens"], s["batch"], s["weights"]) for s in steps] == [(256, 4, 10**6)]
    assert steps[0]["tokens_per_second_limit"] == 4 * 300e9 / steps[0]["bytes"]
