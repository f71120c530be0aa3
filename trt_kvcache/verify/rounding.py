"""Whether a difference in float16 is a mistake, or what rounding makes of this model.

Some models turn the last bit of a float16 into a large difference: they divide by the norm of what may be small
(linear attention, gated norms), or choose experts by scores that are nearly equal. Any other order of operations then
gives other numbers, and that of the original may be ONNX Runtime's own: ``com.microsoft`` operators compute in float32
on the inside, and so do functions of a model that have the name of one.

So a float16 model that fails runs again over the same tokens, computed in float32 between its float16 inputs and
outputs:

    original      rewritten                          must agree: structure, masks, indices, layouts
    original      rewritten, its weights moved       must differ, by half as much as both did in float16

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
from trt_kvcache.importer.protos import nested_scopes
from trt_kvcache.verify.report import VerifyReport
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
    found = _differences(report)
    if report.passed or found is None or not _half_ports(original[0]):
        return report
    try:
        with TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
            twins = TwinFolder(Path(name), original[1], TensorProto.FLOAT16)
            left, right = ((computed_in_float32(model, twins), twins.folder) for model, _ in (original, rewritten))
            exact = run(left, right)
            for trial in range(_TRIALS if exact.passed else 0):
                with TemporaryDirectory(prefix="trt-kvcache-verify-") as other:
                    moving = TwinFolder(Path(other), rewritten[1], TensorProto.FLOAT16, np.random.default_rng(trial))
                    moved = _differences(run(left, (computed_in_float32(rewritten[0], moving), moving.folder)))
                if moved is not None and found[0] <= _SIDES * moved[0] and found[1] <= _SIDES * moved[1]:
                    return replace(exact, float32_twin=True, notes=(*exact.notes, _note(found[0], moved[0])))
    except (OutputError, UnsupportedModelError) as error:
        return replace(report, notes=(*report.notes, f"not compared in float32: {error}"))
    return report


def _note(found: float, moved: float) -> str:
    return (
        "rounding decides the numbers of this model: moving its weights by no more than their rounding to float16 "
        f"changes outputs by up to {moved:.2g} of their scale. In float16 both models differ by up to {found:.2g}; "
        "they were compared computed in float32, between inputs and outputs of float16"
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
