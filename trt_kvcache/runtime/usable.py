"""Models that plan and build, and that no session runs."""

from __future__ import annotations

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.runtime.inputs import StepInputs
from trt_kvcache.runtime.logits import StepLogits

__all__ = ["why_no_session"]


def why_no_session(plan: CachePlan) -> str:
    """The reason why no session can fill a decoder's inputs or read its outputs; empty if it can.

    A model that takes no tokens is no decoder: whoever plans it drives it.
    """
    if plan.tensor(Role.TOKENS) is None or not plan.caches:
        return ""
    try:
        StepInputs(plan)
        StepLogits(plan)
    except UnsupportedModelError as error:
        return error.message
    return ""
