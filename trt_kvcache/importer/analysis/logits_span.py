"""Logits of the last positions of a step only: where the value that they are computed from can be cut, and how.

    logits [B, S, V] = tail(x [B, S, H])    ->    logits [B, K, V] = tail(x[:, S - K :])

A prefill needs the logits of one position, and V is 128,256 where H is 2,048: computed for all of them, they take from
7 to 60 % of its products, counted in weights, and gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from trt_kvcache.importer.analysis.tail import find_cut
from trt_kvcache.importer.plan import InterfaceChange, LogitPositions, LogitsSpan, PlanOptions, Role, TensorRole

__all__ = ["change_of", "plan_logits", "role_of", "with_span"]

_NAME = "logits_span"


def plan_logits(graph: gs.Graph, roles: Sequence[TensorRole], options: PlanOptions) -> tuple[LogitsSpan | None, str]:
    """Say where logits of all positions are cut to the last ones, or why they are not.

    Args:
        graph: prepared, sorted.
        roles: of its inputs and outputs.
        options: whether to.

    Returns:
        None and nothing to say where it is not asked for, and where the model gives logits of one position anyway.
    """
    logits = _only(roles, Role.LOGITS, "output")
    tokens = _only(roles, Role.TOKENS, "input")
    if options.logits is LogitPositions.ALL or logits is None or not _several(logits, tokens):
        return None, ""
    if "tokens" in logits.axes:
        return None, _note(logits, "the tokens of all sequences are packed in one axis")
    output = next(t for t in graph.outputs if t.name == logits.name)
    cut = find_cut(graph, output, 1)
    if isinstance(cut, str):
        return None, _note(logits, cut)
    taken = {str(name) for name in graph.tensors()} | {str(d) for r in roles for d in r.shape}
    name = _NAME
    while name in taken:
        name += "_"
    readers = tuple(str(node.name) for node in cut.readers)
    return LogitsSpan(name, name, logits.name, str(cut.tensor.name), cut.axis, readers), ""


def _only(roles: Sequence[TensorRole], role: Role, io: str) -> TensorRole | None:
    found = [r for r in roles if r.role is role and r.io == io]
    return found[0] if len(found) == 1 else None


def _several(logits: TensorRole, tokens: TensorRole | None) -> bool:
    """Whether logits are of every token of steps that may have several."""
    if "tokens" in logits.axes:
        return True
    if len(logits.shape) != 3 or tokens is None or len(tokens.shape) < 2:
        return False
    return logits.axes[1] == "sequence" or (logits.shape[1] == tokens.shape[1] != 1 and logits.axes[1] == "")


def _note(logits: TensorRole, why: str) -> str:
    return f"'{logits.name}' stays as exported, of all positions of a step: {why}"


def role_of(span: LogitsSpan) -> TensorRole:
    """The added input."""
    return TensorRole(span.name, "input", Role.SPAN, "int64", (span.symbol,), "added", ("kept",))


def with_span(role: TensorRole, span: LogitsSpan | None) -> TensorRole:
    """The role of an output of the rewritten model."""
    if span is None or role.name != span.output or role.io != "output":
        return role
    return replace(role, shape=(role.shape[0], span.symbol, role.shape[2]), axes=(role.axes[0], "kept", role.axes[2]))


def change_of(role: TensorRole, span: LogitsSpan) -> InterfaceChange:
    """What changes for the caller.

    Args:
        role: of the logits as exported.
        span: see `plan_logits`.
    """
    names = {"batch": "B", "sequence": "S"}
    old = [names.get(a, str(d)) for d, a in zip(role.shape, role.axes, strict=True)]
    new = [old[0], span.symbol, old[2]]
    why = f"of the last positions, as many as {span.name} is long; --logits all keeps them"
    return InterfaceChange("output", f"{role.name} [{', '.join(old)}]", f"{role.name} [{', '.join(new)}]", why)
