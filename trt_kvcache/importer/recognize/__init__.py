"""Recognizes the caches of an exported model, and the attentions over them, by running parts of the model.

    carried             guesses from shapes which input and output are one cache; finds other state
    sample_steps        makes sample steps: a shape and a value for each input
    regions             cuts out the parts of the model that write a cache or attend to it
    region_steps        runs a region in a step, and finds how the step writes a cache
    attention_reader    finds what an attention computes
    records             data classes of the results

No list of operators is used. Every result is a guess; a later comparison with the original accepts or refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from trt_kvcache.cpu import RunError
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import PlanOptions, StateUpdate
from trt_kvcache.importer.graph import FLOATS, INT32, INT64, dims, elem_type, export_inferred, fold_identities, tidy
from trt_kvcache.importer.interface.exported_interface import Interface
from trt_kvcache.importer.protos import Array, copied, elem_type_of, is_op, shape_of
from trt_kvcache.importer.recognize.attention_reader import Reader, reading_step
from trt_kvcache.importer.recognize.carried import find_caches, find_states, stack_in_words, state_inner_sizes
from trt_kvcache.importer.recognize.records import (
    AdvisedError,
    Attention,
    Cache,
    ComputedError,
    FartherError,
    RecognizeError,
    UnknownError,
)
from trt_kvcache.importer.recognize.region_steps import Runner, read_updates
from trt_kvcache.importer.recognize.regions import Cutter, Region
from trt_kvcache.importer.recognize.sample_steps import Sample, Samples
from trt_kvcache.importer.simplify import take_branches
from trt_kvcache.importer.steps.probe import Blueprint
from trt_kvcache.importer.steps.runnable import open_types, runnable
from trt_kvcache.importer.steps.sessions import open_session

_MOST_STEPS = 12  # how often a region may become larger, by nodes before its inputs
_PLACES = ((4, 2), (4, 1), (3, 1))  # (rank of a cache, axis of its rows)
_Seen: TypeAlias = "Attention | FartherError | ComputedError"
_SOME = 0.05  # the share of a present's numbers that must also be in its past
_ROUNDS = 6  # the most rounds of guesses
_LARGEST = 1 << 16  # the most elements of a tensor that becomes a constant
_SHORT = 41  # if the model leaves the length of fixed caches open, they get at most this many rows here


@dataclass(frozen=True, eq=False)
class Recognized:
    """An exported model, with the caches and attentions that were recognized in it.

    Attributes:
        model: the exported model, without functions, with shapes.
        graph: the same model as a graph to edit.
        caches: all caches, in the order of the inputs.
        attentions: all attentions, in the order of the graph.
    """

    model: onnx.ModelProto
    graph: gs.Graph
    interface: Interface
    samples: Samples
    caches: tuple[Cache, ...]
    attentions: tuple[Attention, ...]


def recognize(
    model: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    options: PlanOptions,
    usual: int,
    folder: Path | None,
) -> Recognized | None:
    """Find caches and attentions by running parts of the model; None if no input may be a cache.

    `model` has named nodes, no functions, and placeholders for the large `weights`; it is not changed. `usual` is the
    capacity to use if neither the options nor the model give one. Raises `UnsupportedModelError` for an unsupported
    cache or attention, and `OptionError` if the capacity contradicts the model.
    """
    graph = gs.import_onnx(model)
    fold_identities(graph)
    tidy(graph)
    state_inner_sizes(graph)
    model = export_inferred(graph)
    guesses = _hold_rows(model, find_caches(graph))
    if not guesses:
        return None

    def among(caches: list[Cache]) -> Recognized:
        states = find_states(graph, {t.name for c in caches for t in (c.past, c.present)})
        return _Recognizer(model, graph, weights, options, usual, folder, states).recognize(caches)

    try:
        try:
            return among(guesses)
        except (RecognizeError, UnsupportedModelError, OptionError):
            growing = [c for c in guesses if c.growing]
            if not growing or len(growing) == len(guesses):
                raise
            others = {str(c.past.name) for c in guesses if not c.growing}
            with suppress(RecognizeError, UnsupportedModelError, OptionError):
                found = among(growing)
                if others <= {state.past for state in found.interface.states}:
                    return found
            raise
    except RecognizeError as error:
        if stack := stack_in_words(graph):
            raise UnsupportedModelError(stack) from None
        if isinstance(error, AdvisedError):
            raise UnsupportedModelError(str(error)) from None
        raise UnsupportedModelError(
            f"{error}. The importer supports only caches that are inputs and outputs of the model, whose outputs hold "
            "all rows with the new rows after the earlier ones, and attention over one cache of keys and one cache of "
            "values. Export with optimum, or with torch and DynamicCache"
        ) from None


def _hold_rows(model: onnx.ModelProto, guesses: list[Cache]) -> list[Cache]:
    """Run the model once. Return the guessed caches whose output contains rows of the input; all if the run fails."""
    shapes = {v.name: shape_of(v) or ("?",) for v in model.graph.input}
    if not guesses or any(isinstance(d, str) for shape in shapes.values() for d in shape):
        return guesses
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal([int(d) for d in s]).astype(np.float32) for n, s in shapes.items()}
    feeds |= {v.name: np.zeros(feeds[v.name].shape) for v in model.graph.input if elem_type_of(v) not in FLOATS}
    try:
        outputs = open_session(runnable(open_types(model, wide=True)), feeds).run(feeds)
    except RunError:
        return guesses
    return [c for c in guesses if np.isin(outputs[c.present.name], feeds[c.past.name]).mean() > _SOME]


class _Recognizer:
    """Finds caches and attentions in rounds. New facts on caches change the sample steps of the next round."""

    def __init__(
        self,
        model: onnx.ModelProto,
        graph: gs.Graph,
        weights: Mapping[str, onnx.TensorProto],
        options: PlanOptions,
        usual: int,
        folder: Path | None,
        states: Sequence[StateUpdate],
    ) -> None:
        self._model, self._graph, self._weights, self._options, self._usual = model, graph, weights, options, usual
        self._states, self._folder = states, folder
        self._tensors = graph.tensors()
        self._blueprint = Blueprint(model, weights)
        self._looked_at: dict[int, Cache] = {}

    def recognize(self, caches: list[Cache]) -> Recognized:
        for _ in range(_ROUNDS):
            # these inputs may say at which row of a fixed-size cache a step starts to write
            numbers = (t for t in self._graph.inputs if elem_type(t) in (INT32, INT64) and len(dims(t) or ()) <= 1)
            counters = tuple(str(t.name) for t in numbers)
            guess = [replace(c, positions=() if c.growing else counters) for c in caches]
            self._interface = Interface(self._model, guess, self._options.config, self._states)
            asked = self._interface.fixed_capacity(None)
            self._samples = Samples(self._blueprint, self._interface, asked or self._options.capacity or self._usual)
            if (folded := _fold_fixed(self._samples)) is not None:
                again = recognize(folded, self._weights, self._options, self._usual, self._folder)
                if again is None:
                    raise RecognizeError("no input looks like a cache after constant indices and conditions are folded")
                return again
            is_open = asked is None and any(not c.growing for c in guess)
            short = min(_SHORT, self._samples.capacity)
            self._short = Samples(self._blueprint, self._interface, short) if is_open else self._samples
            self._caches = {str(c.past.name): c for c in guess}
            self._cutter = Cutter(self._short, self._caches, self._weights, self._folder)
            try:
                seen = [self._seen(c) for c in guess]
                if all(one is two for one, two in zip(seen, guess, strict=True)):
                    self._interface.fixed_capacity(self._options.capacity)  # refuses an option that contradicts it
                    self._check_places()
                    known: dict[str, tuple[Region, _Seen]] = {}
                    return self._whole([self._read(front, known) for front in self._cutter.fronts])
                caches = seen
            except UnknownError as error:
                if error.args[0] == self._interface.tokens:
                    raise RecognizeError(
                        f"token ids ('{error.args[0]}') change an attention or its mask directly, not only through "
                        "their embeddings"
                    ) from None
                raise
        raise RecognizeError("could not determine how a step changes the caches")

    def _seen(self, cache: Cache) -> Cache:
        """Return a guessed cache, corrected where a step of the model shows something else."""
        name = str(cache.past.name)
        if cache.growing and not cache.shifted:
            step = self._samples.few[1]
            rows, past = step.probe.shape(cache.present.name), step.probe.shape(name)
            if rows is None or past is None or rows[cache.axis] == past[cache.axis] + step.length:
                return cache
            if rows == past and cache.window_rows is None:
                return replace(cache, growing=False)
            # If the present already has `window_rows` rows, an earlier round corrected this cache.
            return cache if cache.window_rows == rows[cache.axis] else replace(cache, window_rows=rows[cache.axis])
        first = next(c for c in self._caches.values() if _alike(c, cache))
        if first is cache:
            self._looked_at[id(cache)] = self._looked(cache)
        seen = self._looked_at[id(first)]
        facts = attrgetter("axis", "growing", "shifted", "circular")
        if facts(seen) == facts(cache):
            return cache
        return replace(
            cache,
            axis=seen.axis,
            growing=seen.growing,
            window_rows=seen.window_rows,
            shifted=seen.shifted,
            circular=seen.circular,
        )

    def _looked(self, cache: Cache) -> Cache:
        passed: set[str] = set()
        for _ in range(_MOST_STEPS):
            region = self._cutter.update(str(cache.past.name), passed)
            runner = Runner(region, self._caches, self._interface)
            sample = reading_step(region, self._caches, self._short)
            beyond = self._short.step(sample.batch, self._short.capacity + 2, 1)
            try:
                found = read_updates(runner, region, self._caches, self._tensors, sample, beyond)
            except FartherError as error:
                passed.add(max(error.args, key=region.texts.index))
                continue
            return next(c for c in found if c.past is cache.past)
        raise RecognizeError(f"no single tensor holds the new rows of '{cache.past.name}'")

    def _read(self, front: str, known: dict[str, tuple[Region, _Seen]]) -> Attention:
        """Describe the attention whose result is `front`, from the smallest part of the model that shows all of it."""
        passed: set[str] = set()
        for _ in range(_MOST_STEPS):
            region = self._cutter.front(front, passed)
            seen, names = self._seen_in(region, known)
            if isinstance(seen, ComputedError):
                part = self._cutter.computed(region, names[seen.query])
                inner, others = self._seen_in(part, known)
                if not isinstance(inner, Attention):
                    raise RecognizeError(f"the keys or the values of '{front}' are more than one tensor")
                caches = tuple(self._cache(c, names) for c in seen.caches)
                return replace(self._renamed(inner, others), computed_from=caches)
            if isinstance(seen, Attention):
                return self._renamed(seen, names)
            passed.add(max((names[n] for n in seen.args), key=region.texts.index))
        raise RecognizeError(f"the queries or the new rows of '{front}' are more than one tensor")

    def _seen_in(self, region: Region, known: dict[str, tuple[Region, _Seen]]) -> tuple[_Seen, dict[str, str]]:
        """Describe what a region computes, in names of the first equal region. Also map these to the region's names."""
        if region.key not in known:
            try:
                reader = Reader(region, self._caches, self._tensors, self._interface, self._short, self._samples)
                known[region.key] = region, reader.read()
            except (FartherError, ComputedError) as error:
                known[region.key] = region, error
        first, seen = known[region.key]
        return seen, dict(zip(first.names, region.names, strict=True))

    def _check_places(self) -> None:
        for cache in self._caches.values():
            rank = len(cache.past.shape)
            if (rank, cache.axis) not in _PLACES:
                raise RecognizeError(
                    f"the cache '{cache.past.name}' {list(cache.past.shape)} has its rows on axis {cache.axis}; "
                    "the importer supports [B, N, P, D], [B, P, N, D] and [B, P, N * D]"
                )

    def _cache(self, of: Cache, names: Mapping[str, str]) -> Cache:
        """Return the cache at the place of `of` in an equal part of the model. `names` maps names of both parts."""
        if of.update is None:
            tensor = self._tensors[names[str(of.past.name)]]
            return replace(of, past=tensor, present=tensor)
        own = self._caches[names[str(of.past.name)]]
        if str(own.present.name) != names[str(of.present.name)]:
            raise RecognizeError(
                f"by its name, '{own.present.name}' is the present of '{own.past.name}', but the attention writes "
                f"'{names[str(of.present.name)]}'"
            )
        return replace(own, update=self._tensors[names[str(of.update.name)]], perm=of.perm)

    def _renamed(self, seen: Attention, names: Mapping[str, str]) -> Attention:
        result, query = (self._tensors[names[str(t.name)]] for t in (seen.result, seen.query))
        name = str(result.inputs[0].name) if result.inputs else seen.name
        key, value = (self._cache(c, names) for c in (seen.key, seen.value))
        return replace(seen, name=name, query=query, result=result, key=key, value=value)

    def _whole(self, attentions: Sequence[Attention]) -> Recognized:
        caches = {str(c.past.name): c for a in attentions for c in a.caches}
        # Other nodes may read a cache that no attention reads: `check_readers` looks for them in the edited graph.
        ordered = tuple(caches[name] if name in caches else self._looked(c) for name, c in self._caches.items())
        samples = self._samples
        return Recognized(self._model, self._graph, self._interface, samples, ordered, tuple(attentions))


def _alike(one: Cache, two: Cache) -> bool:
    kinds = [(elem_type(c.past), dims(c.past), dims(c.present), c.axis, c.growing, c.shifted) for c in (one, two)]
    return kinds[0] == kinds[1]


def _fold_fixed(samples: Samples) -> onnx.ModelProto | None:
    """Replace indices and conditions that are the same in every step with constants; None if nothing was replaced.

        repeat_interleave(cos, 2)       NonZero(Range(n) < 2) -> GatherND          becomes      constant -> GatherND
        LongRoPE                        If(Shape(mask)[1] > 128, long, short)      becomes      short if capacity <= 128
        states of transformers.js       If(Shape(x)[1] == 1, one, several)         becomes      several

    TorchScript writes the first form; TensorRT for RTX does not support NonZero. This also removes special branches for
    steps of one token, and inputs that only such a condition reads, such as the mask. The check later compares results.
    """
    graph = samples.blueprint.model.graph
    outputs = {value.name for value in graph.output}
    names = {node.output[0] for node in graph.node if is_op(node, "NonZero") and node.output[0] not in outputs}
    chosen = {node.input[0] for node in graph.node if is_op(node, "If")}
    names |= chosen
    # The check runs only one size of an axis of unknown meaning. So a value that depends on that axis is not constant.
    batch, past, length = samples.few[0].batch, samples.few[0].past, samples.few[0].length
    steps = (*samples.plain, *samples.wrapped, samples.step(batch, past, length, other=None)) if names else ()
    fixed = {name: value for name in names if (value := _same(name, steps)) is not None}
    several = [step for step in steps if step.length > 1]
    fixed |= {n: value for n in chosen - fixed.keys() if several and (value := _same(n, several)) is not None}
    if not fixed:
        return None
    model = copied(samples.blueprint.model)
    graph = model.graph
    take_branches(graph, fixed)
    for node in [n for n in graph.node if is_op(n, "NonZero") and n.output[0] in fixed]:
        graph.initializer.append(numpy_helper.from_array(fixed[node.output[0]], node.output[0]))
        graph.node.remove(node)
    return model


def _same(name: str, steps: Sequence[Sample]) -> Array | None:
    first, *others = (step.probe.value(name) for step in steps)
    if first is None or first.size > _LARGEST or first.dtype.kind not in "iub":
        return None
    return first if all(value is not None and np.array_equal(first, value) for value in others) else None
