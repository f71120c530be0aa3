"""Whether a difference in float16 is a mistake, or what rounding makes of this model.

Some models turn the last bit of a float16 into a large difference: they divide by the norm of what may be small
(linear attention, gated norms), or choose experts by scores that are nearly equal. Any other order of operations then
gives other numbers, and that of the original may be ONNX Runtime's own: ``com.microsoft`` operators compute in float32
on the inside, and so do functions of a model that have the name of one.

So a float16 model that fails runs again over the same tokens, computed in float32 between its float16 inputs and
outputs:

    original      rewritten                          must agree: structure, masks, indices, layouts
    original      rewritten, its weights moved       must differ, by half as much as both did in float16

Rounding to 8 bits (QuantizeLinear, DequantizeLinear) does the same in any type: a sum that another order moves over the
middle between two neighbours comes out a whole step away. Such a model, of float32 as well, must round in the same ways
on both sides, and agree without (`trt_kvcache.verify.rounded`); its weights move by their rounding to its own type.

The weights move at random by no more than rounding them to float16 has moved them already: what changes then is
nothing that the model knows. What only float16 shows, such as an overflow or a lost cast, fails as ever, unless it is
smaller than twice that, at the worst step and at a typical one. Measured with random weights and six layers:

    largest difference of an output's scale      float16    float32    float32, weights moved
    Qwen3.5, mobius-onnx                         0.29       0.0009     0.10, 0.21, 0.43
    Mixtral, torch.onnx                          0.069      0.0006     0.74, 0.34, 0.19
    Qwen3 MoE, torch.onnx                        0.20       0.0006     0.20, 0.20, 0.014
    DeepSeek V3, torch.onnx                      0.80       0.005      1.5, 0.80, 1.5
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.errors import OutputError, UnsupportedModelError
from trt_kvcache.importer.protos import dtype_name, is_op, nested_scopes
from trt_kvcache.verify.report import VerifyReport
from trt_kvcache.verify.rounded import rounding_steps, unrounded
from trt_kvcache.verify.twin import TwinFolder

Side = tuple[ModelProto, Path]
"""What runs on one side, and the folder of its external data."""

_TRIALS = 3  # of weights moved at random: not every one of them comes near a choice
_SIDES = 2  # both are as far from what float32 gives as rounding takes them, and the two may go different ways
_PREFIX = "trt_kvcache.verify/float32/"


def judge_rounding(
    report: VerifyReport, run: Callable[[Side, Side], VerifyReport], original: Side, rewritten: Side
) -> VerifyReport:
    """The report of a float16 model computed in float32, where rounding alone makes it fail in float16.

    Args:
        report: of both models as they are.
        run: the same verification, of other forms of both.
        original: as in `report`.
        rewritten: as in `report`.

    Returns:
        `report` itself where it passed, or where rounding does not explain it.
    """
    found, steps = _differences(report), rounding_steps(original[0])
    kind = TensorProto.FLOAT16 if _is_half(original[0]) else TensorProto.FLOAT
    if report.passed or found is None or (kind == TensorProto.FLOAT and not steps):
        return report
    if steps != rounding_steps(rewritten[0]):
        return report
    try:
        with TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
            twins = TwinFolder(Path(name), original[1], kind)
            left, right = ((computed_in_float32(model, twins), twins.folder) for model, _ in (original, rewritten))
            exact = run((unrounded(left[0]), left[1]), (unrounded(right[0]), right[1]))
            for trial in range(_TRIALS if exact.passed else 0):
                with TemporaryDirectory(prefix="trt-kvcache-verify-") as other:
                    moving = TwinFolder(Path(other), rewritten[1], kind, np.random.default_rng(trial))
                    moved = _differences(run(left, (computed_in_float32(rewritten[0], moving), moving.folder)))
                if moved is not None and found[0] <= _SIDES * moved[0] and found[1] <= _SIDES * moved[1]:
                    note = _note(found[0], moved[0], kind, len(steps))
                    return replace(exact, float32_twin=True, notes=(*exact.notes, note))
    except (OutputError, UnsupportedModelError) as error:
        return replace(report, notes=(*report.notes, f"not compared in float32: {error}"))
    return report


def _note(found: float, moved: float, kind: int, steps: int) -> str:
    name = dtype_name(kind)
    how = "computed in float32, between inputs and outputs of float16" if kind == TensorProto.FLOAT16 else ""
    without = f"without its {steps} ways of rounding to 8 bits, which are the same in both models" if steps else ""
    return (
        f"rounding decides the numbers of this model: moving its weights by no more than their rounding to {name} "
        f"changes outputs by up to {moved:.2g} of their scale. In {name} both models differ by up to {found:.2g}; "
        f"they were compared {' and '.join(filter(None, (how, without)))}"
    )


def computed_in_float32(model: ModelProto, twins: TwinFolder) -> ModelProto:
    """The model with float32 in place of float16, but for its inputs and outputs, which are cast.

    Args:
        model: a float16 model.
        twins: takes the weights.

    Raises:
        OutputError: no room for the weights in float32.
    """
    ports = _half_ports(model)
    wide = twins.twin(model)
    _keep_casts(model, wide)
    for scope in nested_scopes(wide.graph):
        for node in scope.node:
            _rename(node.input, ports)
            _rename(node.output, ports)
    before, after = [], []
    for port in (*wide.graph.input, *wide.graph.output):
        if port.name in ports:
            port.type.tensor_type.elem_type = TensorProto.FLOAT16
    for port in wide.graph.input:
        if port.name in ports:
            before.append(helper.make_node("Cast", [port.name], [_inside(port.name)], to=TensorProto.FLOAT))
    for port in wide.graph.output:
        if port.name in ports:
            after.append(helper.make_node("Cast", [_inside(port.name)], [port.name], to=TensorProto.FLOAT16))
    nodes = [*before, *(NodeProto.FromString(n.SerializeToString()) for n in wide.graph.node), *after]
    del wide.graph.node[:]
    wide.graph.node.extend(nodes)
    return wide


def _half_ports(model: ModelProto) -> set[str]:
    """Names of the inputs and outputs of float16."""
    weights = {t.name for t in model.graph.initializer}
    ports = (*model.graph.input, *model.graph.output)
    return {p.name for p in ports if p.type.tensor_type.elem_type == TensorProto.FLOAT16} - weights


def _is_half(model: ModelProto) -> bool:
    """Whether a model computes in float16, whatever its inputs and outputs are."""
    return bool(_half_ports(model)) or any(t.data_type == TensorProto.FLOAT16 for t in model.graph.initializer)


def _keep_casts(model: ModelProto, wide: ModelProto) -> None:
    """Round float32 inputs in `wide` as `model` does: of a cache that it casts to float16, nothing else is kept."""
    given = {v.name for v in model.graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    nodes = []
    for old, node in zip(model.graph.node, list(wide.graph.node), strict=True):
        halves = (a.i == TensorProto.FLOAT16 for a in old.attribute if a.name == "to")
        if is_op(old, "Cast") and old.input[0] in given and any(halves):
            half = f"{_PREFIX}{old.output[0]}/half"
            nodes.append(helper.make_node("Cast", [node.input[0]], [half], to=TensorProto.FLOAT16))
            nodes.append(helper.make_node("Cast", [half], [node.output[0]], to=TensorProto.FLOAT))
        else:
            nodes.append(NodeProto.FromString(node.SerializeToString()))
    del wide.graph.node[:]
    wide.graph.node.extend(nodes)


def _inside(name: str) -> str:
    return f"{_PREFIX}{name}"


def _rename(names: MutableSequence[str], ports: set[str]) -> None:
    for place, name in enumerate(names):
        if name in ports:
            names[place] = _inside(name)


def _differences(report: VerifyReport) -> tuple[float, float] | None:
    """The difference of the worst step and of a typical one; None where something else than numbers is wrong."""
    if report.failure is not None or any(o.max_relative is None or o.stale_rows_changed for o in report.outputs):
        return None
    steps = [step.difference or 0.0 for step in report.steps]
    return max(steps), float(np.median(steps))
