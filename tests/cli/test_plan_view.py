from __future__ import annotations

import io
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console
from sample_plans import cache_update, sample_plan, with_contract

from trt_kvcache.cli.output import console
from trt_kvcache.cli.plan_view import batch_of, bytes_of, mask_text, plan_data, print_plan
from trt_kvcache.importer.plan import AttentionKind, CachePlan, InterfaceChange, MaskGeometry, Route, StateUpdate


def shown(plan: CachePlan, *, width: int | None = None, batch: int = 4) -> str:
    out = io.StringIO()
    where = console(out) if width is None else Console(file=out, width=width, highlight=False, markup=False)
    print_plan(where, "model.onnx", plan, batch)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_32_layers_are_readable(width: int) -> None:
    text = shown(sample_plan(32), width=width)
    lines = text.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= width
    for part in (
        "model.onnx: opset 24, target tensorrt-rtx, 64 of 64 caches in place",
        "key_cache.0..31 ",
        "updated_value_cache.0..31 ",
        "[batch, 256, 256]",
        "[batch, 4, 256, 64]",
        "native x32",
        "native: linear update of a float16 cache",
        "/layers.0..31/Attention",
        "fused x32",
        "fused: float16, head size 64",
        "cache memory: 8.0 MiB per sequence, 32.0 MiB for a batch of 4",
    ):
        assert part in text


def test_nothing_is_cut_or_folded_when_piped() -> None:
    name = "past_" + "very_" * 60 + "long"
    plan = sample_plan(1)
    plan = replace(plan, caches=(replace(plan.caches[0], past=name),))
    assert name in shown(plan)


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_idiom_of_each_cache_is_named() -> None:
    plan = sample_plan(2)
    assert "[batch, 256, 256] float16 TensorScatter native x2" in "\n".join(lines_of(shown(plan)))
    grown = tuple(replace(c, idiom="Concat" if "key" in c.past else "ScatterND") for c in plan.caches)
    lines = lines_of(shown(replace(plan, caches=grown)))
    assert "key_cache.0..1 [batch, 256, 256] float16 Concat native x2" in lines
    assert "value_cache.0..1 [batch, 256, 256] float16 ScatterND native x2" in lines


def test_what_changes_for_the_caller_is_listed_old_to_new() -> None:
    changes = (
        InterfaceChange("input", "attention_mask [B, P + S]", "", "masks follow from lengths"),
        InterfaceChange("input", "past.0 [B, 2, P, 16]", "past.0 [B, 2, L, 16]", "a buffer"),
        InterfaceChange("input", "past.1 [B, 2, P, 16]", "past.1 [B, 2, L, 16]", "a buffer"),
        InterfaceChange("input", "", "write_indices [B]", "tokens before the step"),
        InterfaceChange("output", "count []", "", "the caller counts"),
    )
    lines = lines_of(shown(replace(sample_plan(1), changes=changes)))
    for line in (
        "input attention_mask [B, P + S] - masks follow from lengths",
        "input past.0..1 [B, 2, P, 16] past.0..1 [B, 2, L, 16] a buffer",
        "input - write_indices [B] tokens before the step",
        "output count [] - the caller counts",
    ):
        assert line in lines
    assert "What changes for the caller" not in shown(sample_plan(1))


def test_states_and_notes_are_shown() -> None:
    states = tuple(
        StateUpdate(f"conv.{i}", f"new_conv.{i}", "float16", ("batch", 64, 4), "replaced whole") for i in range(3)
    )
    text = shown(replace(sample_plan(1), states=states, notes=("circular windows save 3 MiB",)))
    assert "conv.0..2 new_conv.0..2 [batch, 64, 4] float16 x3" in lines_of(text)
    assert "two buffers: replaced whole" in text
    assert "note: circular windows save 3 MiB" in text
    assert "States" not in shown(sample_plan(1))


def test_json_decodes_as_the_plan() -> None:
    plan = replace(sample_plan(2), caches=(with_contract(cache_update(0)),))
    data = msgspec.json.encode(plan_data(plan, 4))
    assert msgspec.json.decode(data, type=CachePlan) == plan
    counted = msgspec.json.decode(data)["cache_bytes"]
    assert counted == {"per_sequence": 131072, "batch": 4, "total": 524288}


def test_odd_plans() -> None:
    """Functional caches that count twice, the contract, unequal head sizes, a fixed batch, no caches."""
    plan = sample_plan(3)
    first, second, *_ = plan.caches
    functional = replace(first, route=Route.FUNCTIONAL, reason="circular update of 4 tokens")
    text = shown(replace(plan, caches=(functional, second)), batch=1)
    assert "1 of 2 caches in place" in text
    assert "functional (key_cache.0): circular update of 4 tokens" in text
    assert bytes_of(replace(plan, caches=(functional,)), 1) == (2 * 4 * 256 * 64 * 2,) * 2
    node = replace(plan.attention[0], value_head_size=32, kind=AttentionKind.LOWERED, reason="unequal head sizes")
    text = shown(replace(plan, caches=(with_contract(first),), attention=(node,)))
    for part in ("no update straddles the wrap, at most 16 tokens per update", "64, values 32", "unequal head sizes"):
        assert part in text
    fixed = replace(plan, caches=(replace(first, logical_shape=(2, 256, 256), physical_shape=(2, 4, 256, 64)),))
    assert (batch_of(fixed, 8), batch_of(plan, 8)) == (2, 8)
    text = shown(replace(plan, caches=(), attention=(), masks=(), spans=()))
    assert "no caches" in text
    assert "cache memory" not in text


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (MaskGeometry("m", True, None, -1, -1, None, False, None, False), "j <= i"),
        (MaskGeometry("m", True, "n", -1, -1, None, False, "span", True),
         "j < n, and j <= i + n - S_q; over the rows of span; rows that see no key give zero"),
        (MaskGeometry("m", False, "n", 7, 0, None, False, None, False),
         "j < n, and j >= i + n - S_q - 7, and j <= i + n - S_q + 0"),
        (MaskGeometry("m", True, None, -1, -1, "bias", True, None, False), "j <= i, and bias is added"),
        (
            MaskGeometry("m", True, "n", -1, -1, None, True, None, False, "slopes"),
            "j < n, and j <= i + n - S_q, and a slope per head times j - (i + n - S_q) is added",
        ),
        (MaskGeometry("m", False, None, -1, -1, "keep", False, None, False), "keep allows it"),
    ],
)  # fmt: skip
def test_masks_in_words(mask: MaskGeometry, text: str) -> None:
    assert mask_text(mask) == text
