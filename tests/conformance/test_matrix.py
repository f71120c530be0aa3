"""Every row of the support matrix as this package treats it: treatment, numbers, engine; or the named refusal."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from cases import ALL_CASES, Case
from harness import Feeds, build, imported, random_feeds, run_rewritten
from onnx.reference import ReferenceEvaluator
from reference import packed_scatter

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import PlanOptions

BATCH, STEP = 2, 3
TREATED = [case for case in ALL_CASES if not case.ours.refusal]
REFUSED = [case for case in ALL_CASES if case.ours.refusal]


def feeds_of(case: Case, model: onnx.ModelProto) -> Feeds:
    """Random inputs as a decode step has them: ragged rows, each with its new tokens at its end."""
    rng = np.random.default_rng(list(case.key.encode()))
    sizes = {"B": BATCH, "S": STEP, "S_max": 16, "T": 4, "B_plus_1": BATCH + 1}
    feeds = random_feeds(model, sizes, rng)
    starts = np.array([1, 6])
    for name, value in (
        ("write_indices", starts),
        ("nonpad_kv_seqlen", starts + STEP),
        ("lengths", np.array([0, 3, 4])),
    ):
        if name in feeds:
            feeds[name] = value.astype(feeds[name].dtype)
    return feeds


def original_outputs(case: Case, model: onnx.ModelProto, feeds: Feeds) -> Feeds:
    """Outputs of the model as it is, by ONNX's reference; TensorRT's own operator by ours."""
    if case.key == "packed":
        names = ("past", "update", "write_indices", "lengths")
        return {"present": packed_scatter(*(feeds[name] for name in names))}
    with np.errstate(invalid="ignore"):
        values = ReferenceEvaluator(model).run(None, feeds)
    return dict(zip((value.name for value in model.graph.output), values, strict=True))


@pytest.mark.few(3)
@pytest.mark.parametrize("case", TREATED, ids=lambda case: case.key)
def test_treated(case: Case, tmp_path: Path) -> None:
    model = case.model()
    result = imported(model, tmp_path, PlanOptions(capacity=case.capacity))
    ours, plan = case.ours, result.plan
    if ours.route is not None:
        assert {cache.route for cache in plan.caches} == {ours.route}, [cache.reason for cache in plan.caches]
        assert bool(plan.warnings) == (not all(cache.in_place and cache.contract is None for cache in plan.caches))
    if ours.layout is not None:
        assert {cache.layout for cache in plan.caches} == {ours.layout}
    if ours.kind is not None:
        assert {attention.kind for attention in plan.attention} == {ours.kind}
    feeds = feeds_of(case, model)
    want, got = original_outputs(case, model, feeds), run_rewritten(result, feeds)
    assert set(got) == set(want)
    for name, expected in want.items():
        bits = 1e-2 if name in case.computed else 0
        np.testing.assert_allclose(
            got[name].astype(np.float64), expected.astype(np.float64), rtol=bits, atol=bits, err_msg=name
        )
    outcome = build(result, case.ranges)
    assert outcome.stage == "built", str(outcome)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.key)
def test_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=case.ours.refusal):
        imported(case.model(), tmp_path)


def test_keys_are_unique() -> None:
    keys = [case.key for case in ALL_CASES]
    assert len(keys) == len(set(keys))
