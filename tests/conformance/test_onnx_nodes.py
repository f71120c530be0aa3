"""ONNX's own node tests: rewritten, they give the stored outputs; built by TensorRT for RTX or refused by name."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from harness import build, imported, run_rewritten
from onnx_cases import NodeCase, node_cases

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import Fallback, PlanOptions

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
    with pytest.raises(UnsupportedModelError, match=r"past_key|returns its scores \(qk_matmul_output\)"):
        imported(case.model, tmp_path)
