"""Finds models that can be planned and built, but that no session can run."""

from __future__ import annotations

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.runtime.inputs import StepInputs
from trt_kvcache.runtime.logits import StepLogits

__all__ = ["why_no_session"]


def why_no_session(plan: CachePlan) -> str:
    """Return why no session can fill a decoder's inputs or read its outputs; empty if it can.

    A model without tokens is not a decoder: the program that plans it also runs it.
    """
    if plan.tensor(Role.TOKENS) is None or not plan.caches:
        return ""
    try:
        StepInputs(plan)
        StepLogits(plan)
    except UnsupportedModelError as error:
        return error.message
    return ""
