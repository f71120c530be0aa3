"""The child process of the check: it compares two models, with limits on memory and time.

Run as ``python -m trt_kvcache.importer.check.checker``. Two models follow each request. The process sends progress
events, and asks the caller for weights that are stored inside the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import onnx

from trt_kvcache.child import Caller, serve
from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, Role, TensorRole
from trt_kvcache.importer.check import Request, Verdict
from trt_kvcache.importer.check.mixing import find_mixing
from trt_kvcache.importer.check.models import pair_models
from trt_kvcache.importer.check.region import Region, find_regions
from trt_kvcache.importer.check.region_comparison import compare_region
from trt_kvcache.importer.check.shrunk_weights import bytes_read, drawn, has_caches, shrunk
from trt_kvcache.importer.check.verdicts import keeping, open_verdicts
from trt_kvcache.importer.interface import IndexLimits, index_limits
from trt_kvcache.importer.protos import copied
from trt_kvcache.importer.steps.sessions import exact_experts
from trt_kvcache.importer.weights import detached, read_data, storage
from trt_kvcache.progress import listening, phase

_ROUNDS = 4
_RANK = 3  # axes of a tensor that has a batch
_WEIGHTS = 128 << 20  # bytes; the check does not read more weights for one region
_DRAWN = (1 << 20, 8 << 20)  # bytes of random weights: usual limit, and limit if no smaller sizes fit together


def check(request: Request, parts: list[bytes], caller: Caller) -> tuple[Verdict, ...]:
    """Check the two models of a request, in the child process; return the verdicts of all changed parts."""
    original, rewritten = (onnx.ModelProto.FromString(parts.pop(0)) for _ in range(2))
    verdicts = open_verdicts(again=request.plan.options.recheck)
    with exact_experts(), listening(caller.tell), keeping(verdicts):
        weights, folder = _Asked(caller), Path(request.folder)
        return tuple(check_models(original, rewritten, request.plan, weights, folder, thorough=request.thorough))


class _Asked(Mapping[str, onnx.TensorProto]):
    """Weights inside the model's file, which only the parent process has. Each access asks the parent for a weight."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __getitem__(self, name: str) -> onnx.TensorProto:
        tensor: onnx.TensorProto = onnx.TensorProto.FromString(self._caller.ask(name))
        return tensor

    def __iter__(self) -> NoReturn:
        raise TypeError("the child process does not know the names of the weights")

    __len__ = __iter__


def check_models(
    original: onnx.ModelProto,
    rewritten: onnx.ModelProto,
    plan: CachePlan,
    weights: Mapping[str, onnx.TensorProto],
    folder: Path,
    *,
    thorough: bool = False,
) -> list[Verdict]:
    """Return a verdict for every changed part of the model; `check_rewrite` describes the arguments."""
    plan = replace(plan, tensors=tuple(_with_batch(t) for t in plan.tensors))
    pair, limits = pair_models(original, rewritten, plan), index_limits(rewritten, plan)
    judge = _Judge(plan, limits, weights, folder, thorough)
    first: list[Verdict] = []
    for _ in range(_ROUNDS):
        try:
            regions = find_regions(pair)
            verdicts = []
            with phase("regions", len(regions)) as compared:
                for region in regions:
                    verdicts.append(judge.verdict(region))
                    compared()
        except UnsupportedModelError:
            if not first:
                raise
            return first
        wrong = {v.name for v in verdicts if v.answer != "equal"}
        first = first or verdicts
        if not wrong:
            outside = find_mixing(pair, regions, limits, judge.loaded)
            return verdicts if outside is None else [*verdicts, outside]
        # A tensor may have the same name as one of the original, but other contents, such as a view of a cache. So the
        # next round compares only later tensors: a region that differed becomes part of the regions that read it.
        inner = wrong - set(pair.original.outputs)
        if inner <= pair.refuted:
            return first
        pair.refuted |= inner
    return first


def _with_batch(tensor: TensorRole) -> TensorRole:
    counted = tensor.role in (Role.WRITE_INDICES, Role.VALID_LENGTHS)
    if tensor.axes[:1] != ("?",) or "batch" in tensor.axes or not (counted or len(tensor.axes) >= _RANK):
        return tensor
    return replace(tensor, axes=("batch", *tensor.axes[1:]))


@dataclass(frozen=True)
class _Judge:
    """Compares both versions of regions (changed parts of the model). Regions with equal keys share a verdict."""

    plan: CachePlan
    limits: IndexLimits
    weights: Mapping[str, onnx.TensorProto]
    folder: Path
    thorough: bool
    done: dict[str, Verdict] = field(default_factory=dict)

    def verdict(self, region: Region) -> Verdict:
        if region.key not in self.done:
            self.done[region.key] = self._compared(region)
        name = next(iter(region.joins), ", ".join(region.presents))
        return replace(self.done[region.key], name=name, layer=region.layer)

    def _compared(self, region: Region) -> Verdict:
        """Run both versions: with the model's weights if the region has caches, else with random ones."""
        own = has_caches(region, self.plan)
        first, second = ({storage(t) for t in model.graph.initializer} - {None} for model in region.models)
        readable = bytes_read(region.models) <= _WEIGHTS
        # If only one side reads a weight, the real weight may change nothing where random numbers would change the
        # result.
        if readable and (own or first != second or not first):
            return self._with_own_weights(region)
        stuck: Verdict | None = None
        if first and second <= first:
            sizes = (_WEIGHTS, _WEIGHTS) if own else _DRAWN
            for small, its_plan, its_limits in shrunk(region, self.plan, self.limits, *sizes):
                verdict = compare_region(drawn(small), its_plan, its_limits, thorough=self.thorough)
                if verdict.answer in ("equal", "different"):
                    return verdict
                if verdict.answer == "stuck":
                    stuck = verdict
        if readable:
            return self._with_own_weights(region)
        if stuck is not None:  # the original side ran with the same smaller sizes
            return stuck
        unread = not own and not region.is_end and second <= first
        return Verdict("", "equal" if unread else "undecided", "its weights are too large to read")

    def _with_own_weights(self, region: Region) -> Verdict:
        one, other = map(self.loaded, region.models)
        return compare_region(replace(region, models=(one, other)), self.plan, self.limits, thorough=self.thorough)

    def loaded(self, model: onnx.ModelProto) -> onnx.ModelProto:
        copy = copied(model)
        for tensor in copy.graph.initializer:
            if (data := detached(tensor, self.weights)) is not None:
                tensor.CopyFrom(data)
            try:
                read_data(tensor, self.folder)
            except (OSError, ValueError):
                raise InvalidModelError(
                    f"{self.folder}: the data of '{tensor.name}' could not be read again; do not change the files "
                    "while the command runs, and run it again"
                ) from None
        return copy


if __name__ == "__main__":
    serve(check, Request)
