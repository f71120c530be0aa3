"""The answers of `plan --all` and `--json`; whole ones are golden/plan-all and golden/odd-all."""

import io
from dataclasses import replace

import msgspec
import pytest
from sample_plans import cache_update, sample_plan, with_contract

from trt_kvcache.cli.output import console
from trt_kvcache.cli.plan_view import batch_of, bytes_of, mask_text, plan_data, print_plan
from trt_kvcache.cli.summary import plan_lines
from trt_kvcache.importer.plan import CachePlan, Mask, Route


def test_nothing_is_cut_or_folded_when_piped() -> None:
    name = "past_" + "very_" * 60 + "long"
    plan = sample_plan(1)
    out = io.StringIO()
    print_plan(console(out), "model.onnx", replace(plan, caches=(replace(plan.caches[0], past=name),)), 4)
    assert name in out.getvalue()


def test_a_plan_without_caches_says_so() -> None:
    plan = replace(sample_plan(1), caches=(), attention=(), masks=(), spans=())
    out = io.StringIO()
    print_plan(console(out), "model.onnx", plan, 4)
    assert "no caches" in out.getvalue()
    assert "cache memory" not in out.getvalue()
    assert [label for label, _ in plan_lines(plan, 4)] == ["refused"]


def test_bytes_of_two_buffers_and_of_a_fixed_batch() -> None:
    plan = sample_plan(3)
    functional = replace(plan.caches[0], route=Route.FUNCTIONAL)
    assert bytes_of(replace(plan, caches=(functional,)), 1) == (2 * 4 * 256 * 64 * 2,) * 2
    fixed = replace(plan.caches[0], logical_shape=(2, 256, 256), physical_shape=(2, 4, 256, 64))
    assert (batch_of(replace(plan, caches=(fixed,)), 8), batch_of(plan, 8)) == (2, 8)


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


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Mask("m", True, None, -1, -1, None, False, None, False), "j <= i"),
        (Mask("m", True, "n", -1, -1, None, False, "span", True),
         "j < n, and j <= i + n - S_q; over the rows of span; rows that see no key give zero"),
        (Mask("m", False, "n", 7, 0, None, False, None, False),
         "j < n, and j >= i + n - S_q - 7, and j <= i + n - S_q + 0"),
        (Mask("m", True, None, -1, -1, "bias", True, None, False), "j <= i, and bias is added"),
        (Mask("m", False, None, -1, -1, "keep", False, None, False), "keep allows it"),
    ],
)  # fmt: skip
def test_masks_in_words(mask: Mask, text: str) -> None:
    assert mask_text(mask) == text
