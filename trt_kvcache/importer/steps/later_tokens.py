"""Finds models whose tokens see later tokens of their step. If a prompt of such a model is split, its result changes.

    causal      query i sees keys up to its own                any split gives the same numbers
    no mask     query i sees all keys of its step              the whole prompt must be in one step
    a prefix    every query sees the first N tokens            the first N tokens must be in one step

The plan describes most masks. If the graph computes a mask itself, this module computes it in two steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, Mask, Role
from trt_kvcache.importer.interface import index_limits
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.steps.cache_contents import drawn_contents, find_caches
from trt_kvcache.importer.steps.drawn_inputs import DrawnInputs, Step, draw_constants
from trt_kvcache.importer.steps.probe import Blueprint, Probe

_STEPS = (Step(4, (0,), (4,)), Step(3, (2,), (5,)))
_LONGEST = 4  # the most tokens of a step
_HIDDEN = -15.0  # a score counts as hidden if a mask adds this or less; float masks of `DrawnInputs` add -20


def see_later_tokens(model: onnx.ModelProto, plan: CachePlan) -> bool:
    """True if the model (canonical, with inferred shapes) lets a query see a later token of the same step."""
    lengths = {c.update_length for c in plan.caches if c.carried}
    if lengths <= {1}:
        return False
    masks = {m.name: m for m in plan.masks}
    names = dict.fromkeys(a.mask for a in plan.attention if a.caches)
    return any(name is None or _shows_later(model, plan, masks[name]) for name in names)


def _shows_later(model: onnx.ModelProto, plan: CachePlan, mask: Mask) -> bool:
    if mask.causal or mask.right_window == 0:
        return False
    if mask.mask is None:
        return True
    tensor = next((t for t in plan.tensors if t.name == mask.mask and t.io == "input"), None)
    if tensor is not None and tensor.role is Role.MASK:
        # else the caller's mask can be causal, as in sessions
        return "sequence" not in tensor.axes and tensor.shape[-2:-1] in ((), (1,))
    return any(_is_open(values, step) for step, values in _values(model, plan, mask.mask))


def _is_open(values: Array, step: Step) -> bool:
    visible = values if values.dtype == np.bool_ else values > _HIDDEN
    start = step.starts[0]
    keys = min(visible.shape[-1], start + step.length)
    if visible.ndim < 2 or visible.shape[-2] == 1:  # all queries share one row
        return bool(visible[..., start + 1 : keys].any())
    queries = np.arange(visible.shape[-2])[:, np.newaxis] + start
    return bool((visible[..., :keys] & (np.arange(keys) > queries)).any())


def _values(model: onnx.ModelProto, plan: CachePlan, name: str) -> Iterator[tuple[Step, Array]]:
    """Yield the values of a tensor in some steps. Yield nothing if these depend on weights or unknown operators."""
    blueprint, limits = Blueprint(model, {}), index_limits(model, plan)
    caches = {c.role.name: c for c in find_caches(plan)}
    # In inputs without a role, such as token types, the value 1 may show tokens that the value 0 hides.
    ones = {
        t.name: np.ones([d if isinstance(d, int) else _LONGEST for d in t.shape])
        for t in plan.tensors
        if t.io == "input" and t.role is Role.OTHER
    }
    for step, others in ((step, others) for step in _STEPS for others in ({}, ones)):
        try:
            values = draw_constants(plan, 1, 0) | others
            inputs = DrawnInputs(plan, limits, values, np.random.default_rng(0), unknown=_LONGEST, plain=True)
            feeds = inputs.shared(step)
            feeds |= {n: drawn_contents(c, 0, step.starts, 0.0) for n, c in caches.items() if n in blueprint.inputs}
        except (OptionError, UnsupportedModelError):
            return
        value = Probe(blueprint, {n: v.shape for n, v in feeds.items()}, feeds).value(name)
        if value is None:
            return
        yield step, value
