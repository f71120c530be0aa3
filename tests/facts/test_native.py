"""What the native ONNX parser and builder do with every row of the support matrix.

A failure here means that TensorRT changed: the row, and what this package does about it, are to be looked at again.
"""

from __future__ import annotations

import pytest
import trt
from builder import build_in_child
from cases import ALL_CASES, Case


@pytest.mark.few(36)
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.key)
def test_native_outcome(case: Case) -> None:
    """Stage and words of the failure, or none."""
    if case.native.stage == "crash":
        assert build_in_child(case.model().SerializeToString(), [dict(case.ranges)]).stage == "crash"
        return
    outcome = trt.build(case.model(), case.ranges)
    assert outcome.stage == case.native.stage, str(outcome)
    assert case.native.words in outcome.words
