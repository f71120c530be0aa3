"""A model of the corpus with a number, an operator or an attribute changed is refused, or keeps its numbers."""

from dataclasses import replace
from pathlib import Path

import net
import numpy as np
import pytest
from concat_graphs import Build, decoders
from corpus import Entry, entries
from mutation_trials import VERIFY, judge, mutant
from onnx import TensorProto

from trt_kvcache.importer.cache_plan import PlanOptions

QUICK = replace(VERIFY, batch=2, tokens=2)
PROMISED = net.promises().models
ENTRIES = [e for e in entries() if e[0] in PROMISED and not e[0].startswith(net.ELSEWHERE)]


@pytest.mark.few(12)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry[0])
def test_a_changed_model_is_refused_or_keeps_its_numbers(entry: Entry, tmp_path: Path) -> None:
    key, make, options = entry
    (tmp_path / "changed").mkdir()
    path, done = mutant(make(tmp_path), tmp_path / "changed", seed=sum(map(ord, key)))
    word, reason = judge(path, PlanOptions(**options), QUICK)
    assert word in ("refused", "equal", "ill"), f"{done}: {reason}"


def even_bias(g: Build, scores: str) -> str:
    """Added to the scores: a slope per head times the distance (ALiBi)."""
    slopes = g.constant(np.array([0.5, 0.25, 0.125, 0.06]).reshape(1, 4, 1, 1), np.float32)
    distance = g.Cast(g.Sub(g.key_rows, g.query_rows), to=TensorProto.FLOAT)
    return g.Add(scores, g.Mul(g.to_scores(distance), slopes))


def test_caches_that_no_attention_reads_are_refused(tmp_path: Path) -> None:
    """They ended in a trace once their attention was looked for by what it computes."""
    key = "mask/even bias"
    ((_, make, options),) = decoders("mask", {"even bias": {"scores": even_bias}})
    (tmp_path / "changed").mkdir()
    path, _ = mutant(make(tmp_path), tmp_path / "changed", seed=sum(map(ord, key)))
    assert judge(path, PlanOptions(**options), QUICK)[0] == "refused"
