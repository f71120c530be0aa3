"""ONNX's own node tests: rewritten, they give the stored outputs; built by TensorRT for RTX or refused by name."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from harness import build, imported, run_rewritten
from onnx_cases import NodeCase, node_cases

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import AttentionKind, Fallback, PlanOptions, Route

CASES = node_cases()[0]
REFUSED = [case for case in CASES if case.has_in_op_cache]
TREATED = [case for case in CASES if not case.has_in_op_cache]
TOLERANCE = {np.dtype(np.float16): 4e-3, np.dtype(ml_dtypes.bfloat16): 3e-2}


@pytest.mark.few(6)
@pytest.mark.parametrize("case", TREATED, ids=lambda case: case.name)
def test_treated(case: NodeCase, tmp_path: Path) -> None:
    """Same outputs as ONNX stores; and an engine."""
    # The circular case writes across the wrap, which only the form without a contract may do.
    result = imported(case.model, tmp_path, PlanOptions(fallback=Fallback.FUNCTIONAL))
    assert len(result.plan.caches) == (case.node.op_type == "TensorScatter")
    assert len(result.plan.attention) == (case.node.op_type == "Attention")
    got = run_rewritten(result, case.inputs)
    assert set(got) == set(case.outputs)
    for name, expected in case.outputs.items():
        assert got[name].dtype == expected.dtype
        bits = TOLERANCE.get(expected.dtype, 1e-5)
        np.testing.assert_allclose(
            got[name].astype(np.float64), expected.astype(np.float64), rtol=bits, atol=bits, err_msg=name
        )
    outcome = build(result)
    assert outcome.stage == "built", str(outcome)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_in_op_cache_is_refused(case: NodeCase, tmp_path: Path) -> None:
    """A cache inside Attention, or an output beside it, is named as such."""
    with pytest.raises(UnsupportedModelError, match=r"past_key|gives its scores as an output \(qk_matmul_output\)"):
        imported(case.model, tmp_path)


def test_circular_under_a_contract(tmp_path: Path) -> None:
    """By default the circular case is in place, and the plan says what the caller must keep to."""
    (case,) = (case for case in TREATED if case.name == "test_tensorscatter_circular")
    result = imported(case.model, tmp_path)
    (cache,) = result.plan.caches
    assert (cache.route, cache.contract is not None and cache.contract.no_straddle) == (Route.NATIVE, True)
    assert any("straddle" in warning for warning in result.plan.warnings)
    assert build(result).stage == "built"


@pytest.mark.slow
def test_kinds_that_the_cases_cover(tmp_path: Path) -> None:
    """The node tests reach both treatments that are more than a mask: their head size, 8, has no fused kernel."""
    kinds = set()
    for case in TREATED:
        if case.node.op_type == "Attention":
            kinds.add(imported(case.model, tmp_path).plan.attention[0].kind)
    assert kinds >= {AttentionKind.DECOMPOSED, AttentionKind.LOWERED}
