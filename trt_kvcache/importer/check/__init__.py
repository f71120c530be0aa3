"""Checks that a rewritten model computes the same numbers as the exported model.

The check finds every region (a part that the two models compute differently), cuts it out of both models, and runs both
versions in ONNX Runtime on random queries, keys and values. A rewritten model passes only if every verdict is "equal".
The steps have lengths close to every number in the graph. An error that occurs only at one other length is missed.
`verify --thorough` also tries every past up to 4,096 tokens.

    hashed_graph       digests, which show that tensors are equal by construction
    models             pairs both models, and finds inputs that mean the same in both
    region             cuts the changed parts out of both models
    shrunk_weights     shrinks regions with large weights to few rows and columns of random numbers
    region_runs        runs both versions of a region, and makes their inputs (with `trt_kvcache.importer.steps`)
    region_comparison  plans the steps of a region, compares both versions, and names the first difference
    tolerances         sets the largest allowed differences
    verdicts           stores which regions were equal, in the user's cache folder
    mixing             finds sequences and tokens that depend on each other in the rest of the model
    checker            compares two models, in a process with limits on memory and time
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import onnx

from trt_kvcache.child import Child, ChildError
from trt_kvcache.errors import InvalidModelError, OptionError, TrtKvCacheError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, Dim, PlanOptions
from trt_kvcache.importer.protos import dtype_name, elem_type_of, shape_of
from trt_kvcache.progress import ProgressEvent, phase, tell

_UNREAD = "because the weights are too large to read, and no smaller sizes fit together"


@dataclass(frozen=True)
class Checked:
    """Facts that the check adds to a plan: notes, and True if prompts must not be split."""

    notes: tuple[str, ...] = ()
    prefill_in_one_step: bool = False

    def on(self, plan: CachePlan) -> CachePlan:
        """Return the plan with these notes added, and with the limit on prompts."""
        whole = plan.prefill_in_one_step or self.prefill_in_one_step
        return replace(plan, notes=(*plan.notes, *self.notes), prefill_in_one_step=whole)


def check_rewrite(
    original: onnx.ModelProto,
    rewritten: onnx.ModelProto,
    plan: CachePlan,
    weights: Mapping[str, onnx.TensorProto],
    folder: Path,
    *,
    thorough: bool = False,
) -> Checked:
    """Refuse a rewritten model that does not compute the same numbers as the original.

    Large weights of both models may be placeholders without data; then `weights` has the weights by name. With
    `thorough`, also compare steps after every number of past tokens up to 4,096.

    Raises:
        OptionError: the capacity is larger than the model supports.
        UnsupportedModelError: a part differs, could not be compared, or exceeds the limits of the plan's options.
    """
    if why := misfit(rewritten, plan):
        raise UnsupportedModelError(f"the rewritten model does not match its plan ({why}), so it is refused")
    options = plan.options
    try:
        verdicts = _verdicts(original, rewritten, plan, weights, folder, thorough=thorough)
    except ChildError as error:
        raise UnsupportedModelError(
            f"the rewritten model could not be compared with the original: {error}; the comparison may use at most "
            f"{options.check_seconds} s (--check-seconds) and {options.check_memory} GiB (--check-memory)"
        ) from None
    mixed = [v.name for v in verdicts if v.answer == "mixed"]
    verdicts = tuple(v for v in verdicts if v.answer != "mixed")
    first = min(verdicts, key=lambda v: (v.answer == "equal", v.answer != "different"), default=None)
    if first is None or first.answer == "equal":
        unread = [f"'{v.name}'" for v in verdicts if v.why]
        notes = [f"these parts were not compared with the original, {_UNREAD}: {', '.join(unread)}"] if unread else []
        notes += [
            f"'{name}' of a token differs between a step of several tokens and a step of that token only; so a session "
            "processes a prompt in one step of at most --max-chunk tokens, and uses no prefix cache and no drafts "
            "with this model"
            for name in mixed
        ]
        return Checked(tuple(notes), prefill_in_one_step=bool(mixed))
    if first.answer == "ends":
        longest = max(c.capacity for c in plan.caches)
        raise OptionError(
            f"--capacity is {longest}, but the model supports at most {first.name} tokens: {first.why}; give at most "
            f"--capacity {first.name}"
        )
    if first.answer == "alone":
        raise UnsupportedModelError(
            "the model declares a dynamic batch, but runs only with one sequence: export it with a batch of 1, or "
            "remove what fixes the batch, such as a Reshape to 1"
        )
    if first.answer == "dependent":
        raise UnsupportedModelError(
            f"'{first.name}' of one sequence of a batch depends on the other sequences: an operator mixes them, or the "
            "longest sequence chooses the rotary factors (LongRoPE, dynamic NTK). Sequences must not depend on each "
            "other: export with a batch of 1, or, for these rotary factors, use a capacity below the length at which "
            "they change"
        )
    where = f"around '{first.name}'" + ("" if first.layer is None else f" of layer {first.layer}")
    if first.answer == "different":
        raise UnsupportedModelError(
            f"{where} the rewritten model does not compute the same as the original: {first.why}. The importer refuses "
            "the model, because its engine would give wrong numbers"
        )
    raise UnsupportedModelError(
        f"{where} the rewritten model could not be compared with the original ({first.why}). The importer refuses "
        "models that it could not compare"
    )


@dataclass(frozen=True)
class Verdict:
    """The result of the check for one region (a changed part of the model).

    Attributes:
        name: name of the tensor or the cache that the region computes.
        answer: ``"equal"``, ``"different"``, or one of these:
            ``"vacuous"``: nothing was compared.
            ``"undecided"``: the region cannot run.
            ``"stuck"``: ONNX Runtime runs the original, but not the rewritten region.
            ``"dependent"``: a sequence depends on other sequences of the batch.
            ``"ends"``: the model supports only a limited number of tokens; `name` is this number.
            ``"alone"``: the model declares a dynamic batch, but supports only one sequence.
            ``"mixed"``: the numbers of a token depend on how many tokens a step has.
        why: the reason in words; empty for most equal regions.
        layer: index of the attention that reads the region's caches; None if unknown.
    """

    name: str
    answer: str
    why: str = ""
    layer: int | None = None


@dataclass(frozen=True)
class Request:
    """A message to the check's child process. The bytes of the original and of the rewritten model follow it."""

    plan: CachePlan
    folder: str
    thorough: bool


_lock = threading.Lock()
_asking = threading.Lock()
_current: dict[int, Child] = {}
"""Running child processes, by their limit of memory in bytes. A second one starts only while the first is busy."""
_answering: list[Child] = []
"""Child processes that a caller waits for."""


def start_process(options: PlanOptions, *, to_ask: bool = False) -> Child:
    """Return the check's child process; start it if none runs. With `to_ask`, other callers may not end it."""
    memory = options.check_memory << 30
    with _lock:
        child = _current.get(memory)
        if child is None or not child.alive:
            for size in [size for size, other in _current.items() if other not in _answering]:
                _current.pop(size).end()
            child = _current[memory] = Child("-m", "trt_kvcache.importer.check.checker", memory=memory)
        if to_ask:
            _answering.append(child)
        return child


def _verdicts(
    original: onnx.ModelProto,
    rewritten: onnx.ModelProto,
    plan: CachePlan,
    weights: Mapping[str, onnx.TensorProto],
    folder: Path,
    *,
    thorough: bool = False,
) -> tuple[Verdict, ...]:
    """Return the verdicts of `check_models`, from a child process with limits on memory and time."""
    parts = (original.SerializeToString(), rewritten.SerializeToString())
    with _asking, phase("comparing with the original"):
        child = start_process(plan.options, to_ask=True)
        try:
            child.send(Request(plan, str(folder), thorough), parts)
            return child.answer(
                tuple[Verdict, ...],
                plan.options.check_seconds,
                lambda news: tell(msgspec.json.decode(news, type=ProgressEvent)),
                lambda name: weights[name].SerializeToString(),
            )
        except TrtKvCacheError as error:
            raise UnsupportedModelError(
                f"the rewritten model could not be compared with the original: {error.message}"
            ) from None
        finally:
            _answering.remove(child)


def misfit(model: onnx.ModelProto, plan: CachePlan) -> str:
    """Describe the first difference between the inputs and outputs of a plan and of a model; empty if equal."""
    for io, values in (("input", model.graph.input), ("output", model.graph.output)):
        planned = {t.name: (t.dtype, t.shape) for t in plan.tensors if t.io == io}
        declared = {v.name: (dtype_name(elem_type_of(v)), shape_of(v)) for v in values}
        for name in dict.fromkeys((*planned, *declared)):
            wanted, actual = planned.get(name), declared.get(name)
            if wanted is None or actual is None:
                return f"{io} '{name}' is {'not in the plan' if wanted is None else 'missing'}"
            # a size that is dynamic in the plan, but fixed in the model: an engine would support only this size
            closed = io == "input" and any(
                isinstance(b, int) and not isinstance(a, int) and not a.isdecimal()
                for a, b in zip(wanted[1], actual[1] or (), strict=False)
            )
            if wanted[0] != actual[0] or closed or not _fits(wanted[1], actual[1]):
                return (
                    f"{io} '{name}' is {actual[0]} {list(actual[1] or '?')}, but the plan says {wanted[0]} "
                    f"{list(wanted[1])}"
                )
    makes = {name: node for node in model.graph.node for name in node.output}
    shapes = {v.name: shape_of(v) for v in model.graph.input}
    for cache in plan.caches:
        node, shape = makes.get(cache.present), shapes.get(cache.past, cache.physical_shape)
        if node is None or (cache.in_place and cache.past not in node.input):
            return f"no node computes '{cache.present}' from '{cache.past}'"
        if (
            not _fits(cache.physical_shape, shape)
            or cache.physical_shape[cache.physical_sequence_axis] != cache.capacity
        ):
            return (
                f"the plan says that the cache '{cache.past}' has the shape {list(cache.physical_shape)} and "
                f"{cache.capacity} rows"
            )
    return ""


def _fits(planned: Sequence[Dim], declared: Sequence[Dim] | None) -> bool:
    if declared is None or len(planned) != len(declared):
        return False
    return all(a == b for a, b in zip(planned, declared, strict=True) if isinstance(a, int) and isinstance(b, int))


def check_same_interface(rewritten: onnx.ModelProto, fresh: onnx.ModelProto, path: Path, source: Path) -> None:
    """Raise `InvalidModelError` if the interface of a rewritten model differs from a fresh rewrite of its source."""
    again = "the file was made from another model or by another version, or was changed later: rewrite the model again"
    written = {f.SerializeToString(deterministic=True) for f in fresh.functions}
    for function in rewritten.functions:
        if function.SerializeToString(deterministic=True) not in written:
            raise InvalidModelError(
                f"{path}: the function {function.name} differs from that in a rewrite of {source}; {again}"
            )
    for io in ("input", "output"):
        sides = [{v.name: _type(v) for v in getattr(m.graph, io)} for m in (fresh, rewritten)]
        for name in dict.fromkeys((*sides[0], *sides[1])):
            wanted, actual = (side.get(name, "missing") for side in sides)
            if wanted != actual:
                raise InvalidModelError(
                    f"{path}: {io} '{name}' is {actual}, but {wanted} in a rewrite of {source} with the recorded "
                    f"options; {again}"
                )


def _type(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    return f"{dtype_name(kind.elem_type)}{dims}"
