"""The child process of the check: it compares two models, with limits on memory and time.

Run as ``python -m trt_kvcache.importer.check.checker``. Two models follow each request. The process sends progress
events as news. It asks the caller for weights that are stored inside the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import onnx
from onnx import TensorProto

from trt_kvcache.child import Caller, serve
from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.check.check_process import Request, Verdict
from trt_kvcache.importer.check.mixing import find_mixing
from trt_kvcache.importer.check.models import pair_models
from trt_kvcache.importer.check.region import Region, find_regions
from trt_kvcache.importer.check.region_comparison import compare_region
from trt_kvcache.importer.check.shrunk_weights import bytes_read, drawn, has_caches, shrunk
from trt_kvcache.importer.check.verdicts import keeping, open_verdicts
from trt_kvcache.importer.files.links import read_data
from trt_kvcache.importer.plan import CachePlan, Role, TensorRole
from trt_kvcache.importer.planning.experts import exact_experts
from trt_kvcache.importer.planning.index_limits import IndexLimits, index_limits
from trt_kvcache.importer.protos import copied
from trt_kvcache.importer.weights import detached, storage
from trt_kvcache.progress import listening, phase

_ROUNDS = 4
_RANK = 3  # axes of a tensor that has a batch
_WEIGHTS = 128 << 20  # bytes of weights in one region; more are not read
_DRAWN = (1 << 20, 8 << 20)  # bytes of random weights: by default, and if no smaller sizes fit together


def check(request: Request, parts: list[bytes], caller: Caller) -> tuple[Verdict, ...]:
    """Compare two models."""
    original, rewritten = (onnx.ModelProto.FromString(parts.pop(0)) for _ in range(2))
    verdicts = open_verdicts(again=request.plan.options.recheck)
    with exact_experts(), listening(caller.tell), keeping(verdicts):
        weights, folder = _Asked(caller), Path(request.folder)
        return tuple(check_models(original, rewritten, request.plan, weights, folder, thorough=request.thorough))


class _Asked(Mapping[str, onnx.TensorProto]):
    """The weights inside the model. The caller has them, and each read asks the caller again."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __getitem__(self, name: str) -> onnx.TensorProto:
        tensor = onnx.TensorProto()
        tensor.ParseFromString(self._caller.ask(name))
        return tensor

    def __iter__(self) -> NoReturn:
        raise TypeError("only the caller knows their names")

    __len__ = __iter__


def check_models(
    original: onnx.ModelProto,
    rewritten: onnx.ModelProto,
    plan: CachePlan,
    weights: Mapping[str, TensorProto],
    folder: Path,
    *,
    thorough: bool = False,
) -> list[Verdict]:
    """Return a verdict for every region; `check_rewrite` describes the arguments."""
    plan = replace(plan, tensors=tuple(_with_batch(t) for t in plan.tensors))
    pair = pair_models(original, rewritten, plan)
    limits = index_limits(rewritten, plan)
    done: dict[str, Verdict] = {}
    first: list[Verdict] = []
    for _ in range(_ROUNDS):
        try:
            regions = find_regions(pair)
            verdicts = []
            with phase("regions", len(regions)) as compared:
                for region in regions:
                    verdicts.append(_judge(region, plan, limits, weights, folder, done, thorough=thorough))
                    compared()
        except UnsupportedModelError:
            if not first:
                raise
            return first
        wrong = {v.name for v in verdicts if v.answer != "equal"}
        first = first or verdicts
        if not wrong:
            outside = find_mixing(pair, regions, limits, lambda model: _loaded(model, weights, folder))
            return verdicts if outside is None else [*verdicts, outside]
        # A name may have other contents in the rewritten graph, such as a view of a cache. Then later tensors decide:
        # regions whose joins differ are merged with the regions that read them.
        inner = wrong - set(pair.original.outputs)
        if inner <= pair.refuted:
            return first
        pair.refuted |= inner
    return first


def _judge(
    region: Region,
    plan: CachePlan,
    limits: IndexLimits,
    weights: Mapping[str, TensorProto],
    folder: Path,
    done: dict[str, Verdict],
    *,
    thorough: bool,
) -> Verdict:
    if region.key not in done:
        done[region.key] = _compared(region, plan, limits, weights, folder, thorough=thorough)
    name = next(iter(region.joins), ", ".join(region.presents))
    return replace(done[region.key], name=name, layer=region.layer)


def _with_batch(tensor: TensorRole) -> TensorRole:
    """Name a tensor's first axis "batch" if the exporter used another symbol there than for the batch."""
    counted = tensor.role in (Role.WRITE_INDICES, Role.VALID_LENGTHS)
    if tensor.axes[:1] != ("?",) or "batch" in tensor.axes or not (counted or len(tensor.axes) >= _RANK):
        return tensor
    return replace(tensor, axes=("batch", *tensor.axes[1:]))


def _compared(
    region: Region,
    plan: CachePlan,
    limits: IndexLimits,
    weights: Mapping[str, TensorProto],
    folder: Path,
    *,
    thorough: bool,
) -> Verdict:
    """Compare a region: with the model's own weights if it has caches; else with random weights and fewer rows."""
    own = has_caches(region, plan)
    first, second = ({storage(t) for t in model.graph.initializer} - {None} for model in region.models)
    readable = bytes_read(region.models) <= _WEIGHTS

    def with_own_weights() -> Verdict:
        read = tuple(_loaded(model, weights, folder) for model in region.models)
        return compare_region(replace(region, models=(read[0], read[1])), plan, limits, thorough=thorough)

    # A weight that only one side reads may have no effect with its own numbers, but an effect with random ones.
    if readable and (own or first != second or not first):
        return with_own_weights()
    stuck: Verdict | None = None
    if first and second <= first:
        for small, its_plan, its_limits in shrunk(region, plan, limits, *((_WEIGHTS, _WEIGHTS) if own else _DRAWN)):
            verdict = compare_region(drawn(small), its_plan, its_limits, thorough=thorough)
            if verdict.answer in ("equal", "different"):
                return verdict
            if verdict.answer == "stuck":
                stuck = verdict
    if readable:
        return with_own_weights()
    if stuck is not None:  # the rewritten side does not run although all sizes but the shrunk ones are equal
        return stuck
    unread = not own and not region.is_end and second <= first
    return Verdict("", "equal" if unread else "undecided", "it has more weights than can be read")


def _loaded(model: onnx.ModelProto, weights: Mapping[str, TensorProto], folder: Path) -> onnx.ModelProto:
    """Return a copy of the model with the data of its weights."""
    copy = copied(model)
    for tensor in copy.graph.initializer:
        if (data := detached(tensor, weights)) is not None:
            name = tensor.name
            tensor.CopyFrom(data)
            tensor.name = name
        try:
            read_data(tensor, folder)
        except (OSError, ValueError):
            raise InvalidModelError(
                f"{folder}: the data of '{tensor.name}' can no longer be read; run the command again when the "
                "files stay as they are"
            ) from None
    return copy


if __name__ == "__main__":
    serve(check, Request)
