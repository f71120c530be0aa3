"""The judgement of a difference: a mistake, or the effect of rounding on this model.

Some models turn the last bit of a float16 into a large difference: they divide by the norm of what may be small
(linear attention, gated norms), or choose experts by scores that are nearly equal. Any other order of operations then
gives other numbers, and that of the original may be ONNX Runtime's own: ``com.microsoft`` operators compute in float32
on the inside, and so do functions of a model that have the name of one.

Trained models do it after random cache contents, which are far from all that they know: SmolLM2-135M in float16 differs
by 0.92 of the scale of its logits there, and by 0.016 after a text of its own.

So a float16 model that fails runs again over the same tokens, computed in float32 between its float16 inputs and
outputs:

    original      rewritten                          must agree: structure, masks, indices, layouts

and then as it is, from empty caches on, which hold what the model itself wrote: there both must agree within the usual
tolerance. If they do not, weights decide, moved at random:

    original      rewritten, its weights moved       must differ, by half as much as both did in float16

Rounding to 8 bits (QuantizeLinear, DequantizeLinear) does the same in any type: a sum that another order moves over the
middle between two neighbours comes out a whole step away. Such a model, of float32 as well, must round in the same ways
on both sides, and agree without (the extension `quantizers`); its weights move by their rounding to its own type.

A float32 model is computed in float64 likewise:

    original      rewritten, both in float64         must agree: structure, masks, indices, layouts
    original      rewritten in float64               must differ, by half as much as both did in float32

since its many sums take it further from what float64 gives than moving its weights would. They move all the same, on
both sides alike: which step comes near a choice differs from run to run. Of a Qwen3-Next with six layers both give the
same in float64, and differ by 0.00015, 0.00019, 0.00015 in float32, where the original is 0.0004, 0.00005, 0.0002 from
float64. SmolLM2-135M by onnxruntime-genai differs by 0.00035 in float32, and not at all in float64. ONNX Runtime has no
float64 for some operators (Conv, Softplus); ONNX's reference evaluator runs small models with these, and large ones
fail as ever.

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

from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.errors import OptionError, OutputError, UnsupportedModelError
from trt_kvcache.importer.extensions import unround
from trt_kvcache.importer.protos import is_op, nested_scopes
from trt_kvcache.verify.report import VerifyReport
from trt_kvcache.verify.twin import TwinFolder, numpy_name

Side = tuple[ModelProto, Path]
"""The model of one side, and the folder of its external data."""

_TRIALS = 3  # of weights moved at random: not every one of them comes near a choice
_SIDES = 2  # both are as far from what float32 gives as rounding takes them, and the two may go different ways
_MOST = 1e-2  # of an output's scale: that rounding to float32 is asked to explain
_PREFIX = "trt_kvcache.verify/float32/"


def judge_rounding(
    report: VerifyReport, run: Callable[..., VerifyReport], original: Side, rewritten: Side
) -> VerifyReport:
    """The report of a model computed in a wider type, where rounding alone makes it fail in its own.

    Args:
        report: of both models as they are.
        run: the same verification, of other forms of both; `anywhere`: the reference evaluator may run them if ONNX
            Runtime does not; `empty`: from empty caches on.
        original: as in `report`.
        rewritten: as in `report`.

    Returns:
        `report` itself where it passed, or where rounding does not explain it.
    """
    differences, steps = _differences(report), unround(original[0])[1]
    if report.passed or differences is None or steps != unround(rewritten[0])[1]:
        return report
    kind = TensorProto.FLOAT16 if _is_half(original[0]) else TensorProto.FLOAT
    is_double = kind == TensorProto.FLOAT and not steps
    if is_double and differences[0] > _MOST:
        return report
    wide = TensorProto.DOUBLE if is_double else TensorProto.FLOAT
    try:
        with TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
            twins = TwinFolder(Path(name), original[1], kind, wide=wide)
            left, right = ((computed_wide(model, twins), twins.folder) for model, _ in (original, rewritten))
            exact = run((unround(left[0])[0], left[1]), (unround(right[0])[0], right[1]), anywhere=is_double)
            own = run(original, rewritten, empty=True) if exact.passed and not steps else report
            if own.passed:
                note = _note_on_history(differences[0], max(_differences(own) or (0.0,)), kind, wide)
                return replace(exact, float32_twin=not is_double, notes=(*exact.notes, note))
            others = _narrow_and_wide(original, rewritten) if is_double else _as_is_and_moved(left, rewritten, kind)
            for sides in others if exact.passed else ():
                moved = _differences(run(*sides, anywhere=is_double))
                if moved is not None and differences[0] <= _SIDES * moved[0] and differences[1] <= _SIDES * moved[1]:
                    note = _note(differences[0], moved[0], kind, wide, len(steps))
                    return replace(exact, float32_twin=not is_double, notes=(*exact.notes, note))
    except (OptionError, OutputError, UnsupportedModelError) as error:
        return replace(report, notes=(*report.notes, f"not compared in {numpy_name(wide)}: {error}"))
    return report


def _as_is_and_moved(left: Side, rewritten: Side, kind: int) -> Iterator[tuple[Side, Side]]:
    """Both sides in float32, one with its weights moved at random; each is gone when the next one comes."""
    for trial in range(_TRIALS):
        with TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
            moved = TwinFolder(Path(name), rewritten[1], kind, np.random.default_rng(trial))
            yield left, (computed_wide(rewritten[0], moved), moved.folder)


def _narrow_and_wide(original: Side, rewritten: Side) -> Iterator[tuple[Side, Side]]:
    """The original in float32 and the rewritten model in float64, with the same weights, moved at random."""
    for trial in range(_TRIALS):
        with (
            TemporaryDirectory(prefix="trt-kvcache-verify-") as name,
            TemporaryDirectory(prefix="trt-kvcache-verify-") as other,
        ):
            narrow = TwinFolder(Path(name), original[1], TensorProto.FLOAT, np.random.default_rng(trial))
            left, right = (narrow.twin(model) for model, _ in (original, rewritten))
            wide = TwinFolder(Path(other), narrow.folder, TensorProto.FLOAT, wide=TensorProto.DOUBLE)
            yield (left, narrow.folder), (computed_wide(right, wide), wide.folder)


def _note_on_history(difference: float, own: float, kind: int, wide: int) -> str:
    name = numpy_name(kind)
    return (
        f"after random cache contents rounding decides the numbers of this model: in {name} both models differ by up "
        f"to {difference:.2g} of their outputs' scale there, and were compared computed in {numpy_name(wide)}; from "
        f"empty caches on they differ by up to {own:.2g} in {name}"
    )


def _note(difference: float, moved: float, kind: int, wide: int, steps: int) -> str:
    name = numpy_name(kind)
    how = f"computed in {numpy_name(wide)}, between inputs and outputs of {name}" if kind != wide else ""
    without = f"without its {steps} ways of rounding to 8 bits, which are the same in both models" if steps else ""
    moves = (
        f"the original in {name} is up to {moved:.2g} of its outputs' scale away from what {numpy_name(wide)} gives"
        if wide == TensorProto.DOUBLE
        else f"moving its weights by no more than their rounding to {name} changes outputs by up to {moved:.2g} of "
        "their scale"
    )
    return (
        f"rounding decides the numbers of this model: {moves}. In {name} both models differ by up to {difference:.2g}; "
        f"they were compared {' and '.join(filter(None, (how, without)))}"
    )


def computed_wide(model: ModelProto, twins: TwinFolder) -> ModelProto:
    """The model with float32 in place of float16, or as `twins` say, but for its inputs and outputs, which are cast.

    Args:
        model: a model of the narrow type.
        twins: takes the weights.

    Raises:
        OutputError: the wider weights do not fit onto the disk.
    """
    ports = _ports(model, twins.dtype) if twins.dtype != twins.wide else set()
    wide = twins.twin(model)
    if twins.dtype == TensorProto.FLOAT16:
        _keep_casts(model, wide)
    for scope in nested_scopes(wide.graph):
        for node in scope.node:
            _rename(node.input, ports)
            _rename(node.output, ports)
    before, after = [], []
    for port in (*wide.graph.input, *wide.graph.output):
        if port.name in ports:
            port.type.tensor_type.elem_type = twins.dtype
    for port in wide.graph.input:
        if port.name in ports:
            before.append(helper.make_node("Cast", [port.name], [_inside(port.name)], to=twins.wide))
    for port in wide.graph.output:
        if port.name in ports:
            after.append(helper.make_node("Cast", [_inside(port.name)], [port.name], to=twins.dtype))
    nodes = [*before, *(NodeProto.FromString(n.SerializeToString()) for n in wide.graph.node), *after]
    del wide.graph.node[:]
    wide.graph.node.extend(nodes)
    return wide


def _ports(model: ModelProto, dtype: int) -> set[str]:
    """Names of the inputs and outputs of a type."""
    weights = {t.name for t in model.graph.initializer}
    ports = (*model.graph.input, *model.graph.output)
    return {p.name for p in ports if p.type.tensor_type.elem_type == dtype} - weights


def _is_half(model: ModelProto) -> bool:
    """True if a model computes in float16, whatever its inputs and outputs are."""
    half = TensorProto.FLOAT16
    return bool(_ports(model, half)) or any(t.data_type == half for t in model.graph.initializer)


def _keep_casts(model: ModelProto, wide: ModelProto) -> None:
    """Round float32 inputs in `wide` as `model` does: of a cache that it casts to float16, nothing else is kept."""
    floats = {v.name for v in model.graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    nodes = []
    for old, node in zip(model.graph.node, list(wide.graph.node), strict=True):
        halves = (a.i == TensorProto.FLOAT16 for a in old.attribute if a.name == "to")
        if is_op(old, "Cast") and old.input[0] in floats and any(halves):
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
