"""The distance of a model with quantized caches from itself with its own: one text, the same tokens on both sides.

Both begin with empty caches, so that every row was written, and quantized, by the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.dtypes import PLAIN
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import CacheDtype, CachePlan, Role, TensorRole
from trt_kvcache.importer.steps.contents import find_caches, find_states, numpy_dtype
from trt_kvcache.importer.steps.inputs import span_inputs
from trt_kvcache.importer.steps.step import Step
from trt_kvcache.verify.decode import Array, Feeds, Verification
from trt_kvcache.verify.memory import give_back
from trt_kvcache.verify.report import LIMITS, Divergence
from trt_kvcache.verify.rounding import Side
from trt_kvcache.verify.schedule import plan_schedule
from trt_kvcache.verify.sessions import open_session


def measure_divergence(
    verification: Verification, plans: tuple[CachePlan, CachePlan], sides: tuple[Side, Side], *, twin: bool
) -> Divergence:
    """Decode with both models, one after the other.

    Args:
        verification: of the model with its own caches: its limits and inputs are those of both.
        plans: of the rewritten model with its own caches, and with quantized ones.
        sides: both models, with the folders of their external data.
        twin: they are float32 twins of bfloat16 models.

    Raises:
        OptionError: the model has no logits.
        RunError: a model does not run.
    """
    wanted = plans[1].options.cache_dtype
    assert wanted is not None
    steps = list(_steps(verification))
    exact, quantized = (
        np.concatenate(list(_decode(plan, side, steps, verification.free_bytes, twin=twin)))
        for plan, side in zip(plans, sides, strict=True)
    )
    give_back()
    return divergence_of(exact, quantized, wanted)


def divergence_of(exact: Array, quantized: Array, kind: CacheDtype) -> Divergence:
    """Compare logits ``[positions, V]``. Those that are not finite in `exact`, as of tokens ruled out, do not count."""
    exact, quantized = exact.astype(np.float64), quantized.astype(np.float64)
    known = np.isfinite(exact)
    error = np.where(known, quantized - np.where(known, exact, 0), 0)
    centered = np.where(known, exact - exact.mean(axis=-1, keepdims=True, where=known), 0)
    spread = np.sqrt(np.square(centered).sum(axis=-1))
    share = np.sqrt(np.square(error).sum(axis=-1)) / np.maximum(spread, np.finfo(np.float64).tiny)
    before, after = (_log_softmax(np.where(known, values, -np.inf)) for values in (exact, quantized))
    gain = np.where(known, np.exp(before) * (np.where(known, before, 0) - np.where(known, after, 0)), 0)
    return Divergence(
        cache_dtype=kind.value,
        positions=len(exact),
        agreement=float((exact.argmax(-1) == quantized.argmax(-1)).mean()),
        mean_kl=float(gain.sum(axis=-1).mean()),
        largest_error=float(np.abs(error).max()),
        error_share=float(share.mean()),
        limit=LIMITS[kind],
    )


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _steps(verification: Verification) -> Iterator[tuple[Step, Feeds]]:
    """The prompt and the single tokens of a verification, from the first row on, and the inputs of each step."""
    # All sequences start together, and none has fewer valid tokens than the update.
    limits = replace(verification.limits, ragged=False, lengths=False, circular=())
    for step in plan_schedule(limits, verification.verify)[0].steps:
        yield step, verification.inputs.shared(step)


def _decode(
    plan: CachePlan, side: Side, steps: Sequence[tuple[Step, Feeds]], free_bytes: int, *, twin: bool
) -> Iterator[Array]:
    """The logits of every step, ``[positions, V]``."""
    logits = plan.tensor(Role.LOGITS, "output")
    if logits is None:
        raise OptionError("the model has no logits, by which models with quantized caches are compared")
    give_back()
    carried = (*find_caches(plan), *find_states(plan))
    first, shared = steps[0]
    batch = len(first.starts)
    state = {c.role.name: _zeros(c.role, batch, twin=twin) for c in carried}
    trial = {**shared, **state, **span_inputs(plan, first, "tight")}
    session, _ = open_session(_with_numbers(side[0]), side[1], trial, free_bytes)
    for step, shared in steps:
        outputs = session.run({**shared, **state, **span_inputs(plan, step, "tight")})
        state |= {c.role.name: outputs[c.output] for c in carried if c.output is not None}
        yield outputs[logits.name].reshape(-1, outputs[logits.name].shape[-1])


def _zeros(role: TensorRole, batch: int, *, twin: bool) -> Array:
    shape = [d if isinstance(d, int) else batch for d in role.shape]
    return np.zeros(shape, numpy_dtype(role.dtype if role.dtype in (*PLAIN, "bfloat16") else "float", twin=twin))


def _with_numbers(model: ModelProto) -> ModelProto:
    """The model with float32 inputs and outputs in the place of float8, which NumPy does not have; the same numbers."""
    values = [*model.graph.input, *model.graph.output]
    narrow = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT8E4M3FN}
    if not narrow:
        return model
    wide = ModelProto()
    wide.CopyFrom(model)
    del wide.graph.node[:]

    def cast(name: str, to: int, source: str) -> NodeProto:
        return helper.make_node("Cast", [source], [name], to=to)

    for value in (*wide.graph.input, *wide.graph.output):
        if value.name in narrow:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    wide.graph.node.extend(
        cast(f"{v.name}/float8", TensorProto.FLOAT8E4M3FN, v.name) for v in wide.graph.input if v.name in narrow
    )
    for node in model.graph.node:
        new = wide.graph.node.add()
        new.CopyFrom(node)
        for names in (new.input, new.output):
            names[:] = [f"{name}/float8" if name in narrow else name for name in names]
        wide.graph.node.extend(
            cast(name, TensorProto.FLOAT, f"{name}/float8") for name in node.output if name in narrow
        )
    return wide
