"""One attention over growing or fixed caches in many spellings: each is taken and right, or refused."""

import collections
from pathlib import Path
from typing import Any

import net
import onnx
import pytest
import spellings
from spelling_judge import EQUAL, REFUSED, judge
from spellings import FIXED_SPELLINGS, SPELLINGS, Spelling, all_single, spelled

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions

SHARE = 50


def _check(spelling: Spelling) -> str:
    outcome = judge(spelling)
    assert outcome.kind in (EQUAL, REFUSED), (spelling.seed, spelling.unusual, outcome)
    return outcome.kind


@pytest.mark.few(16)
@pytest.mark.parametrize(
    ("fixed", "part", "how"),
    [(False, *one) for one in all_single(SPELLINGS)] + [(True, *one) for one in all_single(FIXED_SPELLINGS)],
)
def test_one_unusual_spelling(fixed: bool, part: str, how: str) -> None:
    """Each by itself is taken."""
    seed = 1000 * list(SPELLINGS).index(part) + (FIXED_SPELLINGS if fixed else SPELLINGS)[part].index(how)
    assert _check(spelled(seed, part, how, fixed=fixed)) == EQUAL


def test_a_step_beyond_the_last_row() -> None:
    """A cache that slices write grows there, so that it is no ring."""
    assert _check(spelled(0, "append", "concat", fixed=True)) == EQUAL


def test_refusals_say_what_was_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every third key is hidden."""

    def visible(g: Any) -> str:
        return g.Unsqueeze(g.Greater(g.Mod(g.Range(1, g.Add(g.scalar(g.total), 1), 1), 3), g.constant(0)), [0, 1, 2])

    monkeypatch.setattr(spellings, "_visible", visible)
    onnx.save(spellings.make(spelled(0, kept=1.0)), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=r"after 4 tokens, query 0 of '\w+' gives no weight to key 2"):
        import_model(tmp_path / "model.onnx", PlanOptions(capacity=16))


def test_one_token_a_step(tmp_path: Path) -> None:
    """Scores in no form that is known by name, in an export whose steps have one token."""
    model = spellings.make(spelled(0, "scores", "mul and sum"))
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "sequence":
                dim.dim_value = 1
    onnx.save(model, tmp_path / "model.onnx")
    plan = import_model(tmp_path / "model.onnx", PlanOptions(capacity=16)).plan
    assert {c.update_length for c in plan.caches} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.0, 0.83])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("first", range(0, 200, SHARE))
def test_everything_drawn(first: int, fixed: bool, kept: float) -> None:
    kinds = collections.Counter(_check(spelled(seed, kept=kept, fixed=fixed)) for seed in range(first, first + SHARE))
    assert kinds[EQUAL] >= net.promises().spellings["fixed" if fixed else "growing"] * SHARE
