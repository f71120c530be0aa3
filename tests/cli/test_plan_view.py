"""The answers of `plan --all` and `--json`; whole ones are golden/plan-all and golden/odd-all."""

from dataclasses import replace

import msgspec
from sample_plans import cache_update, sample_plan, with_contract

from trt_kvcache.cli.plan_view import batch_of, bytes_of, plan_data
from trt_kvcache.importer.plan import CachePlan, Route


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
