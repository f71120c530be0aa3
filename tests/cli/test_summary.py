"""Answers of at most 20 lines at 80 columns, which end with the next command."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from sample_plans import sample_plan

from trt_kvcache.cli import summary
from trt_kvcache.cli.options import PlanFlags, SessionPlanFlags
from trt_kvcache.cli.output import table, wrapped
from trt_kvcache.cli.summary import advice, command_line, next_line, plan_lines, print_lines, print_next, tell_next
from trt_kvcache.importer.plan import CachePlan, Fallback, Target


def shown(plan: CachePlan) -> list[str]:
    out = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    print_lines(out, f"model.onnx: {plan.in_place_text}", plan_lines(plan, 4))
    print_next(out, "trt-kvcache build model.onnx -o model.engine")
    text = out.file.getvalue()  # type: ignore[attr-defined]
    return str(text).splitlines()


def test_notes_that_fit_are_shown() -> None:
    plan = replace(sample_plan(28), notes=("circular windows save 3 MiB",))
    assert "note       circular windows save 3 MiB" in shown(plan)
    assert not any("--all" in line for line in shown(plan))


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


def test_layers_that_read_a_cache_are_counted() -> None:
    assert not any("several" in line for line in shown(sample_plan(6)))
    plan = sample_plan(6)
    last = plan.attention[:2]
    expected = "           caches that several layers read: key_cache.0 by 3, key_cache.1 by 3"
    assert expected in shown(replace(plan, attention=last * 3))
    many = replace(plan, attention=plan.attention * 2)
    assert any(line.endswith("key_cache.2 by 2, and 3 more") for line in shown(many))


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


@pytest.mark.parametrize("terminal", [True, False])
def test_the_next_command_after_a_run_is_told_on_terminals(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is built, with the flags that it ran with; an engine goes on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(summary, "can_build", lambda _: True)
    told = io.StringIO()
    told.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", told)
    monkeypatch.setenv("COLUMNS", "1000")
    tell_next(Path("m.onnx"), "serve", SessionPlanFlags(capacity=48))
    tell_next(Path("m.engine"), "serve", SessionPlanFlags())
    assert (
        told.getvalue().splitlines()
        == ["next       trt-kvcache build m.onnx -o m-engine/ --capacity 48", "next       trt-kvcache serve m.engine"][
            : 2 * terminal
        ]
    )


def test_long_names_break_at_dots() -> None:
    name = "past_key_values.0..27.decoder.key_states"
    assert wrapped(f"{name} and more", 24) == ["past_key_values.0..27.", "decoder.key_states and", "more"]
    assert wrapped("x" * 30, 12) == ["x" * 12, "x" * 12, "x" * 6]
    assert wrapped("", 9) == [""]
    grid = table("name", "shape")
    grid.add_row(name, "[batch, 8, 4096, 128]")
    out = Console(file=io.StringIO(), width=46)
    out.print(grid)
    rows = [line.split("  ")[0].strip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert rows[2:4] == ["past_key_values.0..27.", "decoder.key_states"]
