"""Answers of at most 20 lines at 80 columns, which end with the next command."""

from dataclasses import replace
from pathlib import Path

import pytest
from sample_plans import sample_plan

from trt_kvcache.cli import summary
from trt_kvcache.cli.options import PlanFlags
from trt_kvcache.cli.summary import advice, command_line, next_line
from trt_kvcache.importer.plan import Fallback, Target


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
