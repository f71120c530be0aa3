"""Recording a proof: `verify`'s decode of the original, twice: as it is, and with rounding.

Nothing of the rewritten model runs here but its plan, which says what a step takes. Caches hold what the original wrote
into them, and the text is its own: on random cache contents and random tokens, rounding is amplified far more than on
what a model was trained to see, and tolerances, which follow rounding, would hide faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, helper, numpy_helper

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.extensions import define, for_cpu, unstacked
from trt_kvcache.importer.plan import CachePlan, Role, TensorRole
from trt_kvcache.importer.planning.experts import exact_experts
from trt_kvcache.importer.planning.index_limits import index_limits
from trt_kvcache.importer.protos import iter_scopes
from trt_kvcache.importer.simplify import inline_functions, name_nodes
from trt_kvcache.importer.steps.contents import CacheTensor
from trt_kvcache.importer.steps.element_types import has_bfloat16
from trt_kvcache.importer.steps.inputs import StepInputs, span_inputs
from trt_kvcache.importer.steps.runnable import with_exact_products
from trt_kvcache.importer.steps.sessions import ModelSession
from trt_kvcache.importer.steps.step import Limits, Step
from trt_kvcache.proof.contents import Contents, copies, draws_digest
from trt_kvcache.proof.file import Episode, Facts, Proof
from trt_kvcache.proof.places import LOGITS, places
from trt_kvcache.proof.rounding import UNITS, rounding_dtype, with_rounding
from trt_kvcache.proof.schedule import DRAWN, MOST_POSITIONS, Most, keeps, plan_proof, within
from trt_kvcache.proof.tolerance import MEASURED, MOST_ROWS, allowed, measured
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.inputs import StepInputs as RuntimeInputs
from trt_kvcache.runtime.logits import StepLogits
from trt_kvcache.verify import schedule as verify_schedule
from trt_kvcache.verify.decode import Ran, Verification
from trt_kvcache.verify.inline import moved_out
from trt_kvcache.verify.record import Tape, Written
from trt_kvcache.verify.report import VerifyOptions
from trt_kvcache.verify.twin import TwinFolder

__all__ = ["MOST_ROWS", "record_proof"]

Array = npt.NDArray[Any]

_FEWEST = 2  # rows: an engine of one sequence replays them one after the other
_SEED = 0
_PREFIX = "trt_kvcache.proof/last/"
_GARBAGE = {"float32": 1e4, "bfloat16": 1e4, "float16": 30.0}
"""Far above what caches hold; scores of it still fit into the type."""

_ALL = 384 << 10  # bytes of logits, up to which all are kept
_HIGH, _COLUMNS = 64, 256
_LOGITS = 1 << 24  # of a row in a step
_MOST_BYTES, _HEADER = 1 << 20, 64 << 10
_SAMPLES = 384 << 10  # bytes of cache rows
_WIDEST, _NARROWEST = 64, 1  # numbers of one cache row that are kept
_SEEDS = 5  # random tokens, with which each row begins
_TEXT = 48  # tokens that continue those of the first row; they repeat


def record_proof(imported: ImportedModel, most: Most, *, rows: int = MOST_ROWS, steps: int | None = None) -> Proof:
    """Decode the original model on ONNX Runtime, and keep what an engine of it has to give.

    Args:
        imported: the model and its plan.
        most: the most that the engine is built for.
        rows: most rows of the batch in a step.
        steps: how many; None: about ten.

    Raises:
        UnsupportedModelError: the runtime cannot run the model, or nothing here runs the original.
        OptionError: it does not fit into memory.
        OutputError: temporary files do not fit onto the disk.
    """
    RuntimeInputs(imported.plan)  # refuses what no session runs
    StepLogits(imported.plan)
    if imported.plan.options.cache_dtype is not None:
        # The original has other numbers: the rewritten model, whose codes `verify` compares with it, stands for it.
        source = replace(imported.source, proto=imported.model)
        imported = ImportedModel(source, replace(imported.plan, original=(), stacks=()), imported.model)
    with moved_out(imported) as (light, folder), _original(light, folder) as (model, place, twin), exact_experts():
        dtype = rounding_dtype(light.source.proto, twin=twin)
        ask = _Asked(most, rows, steps)
        decoder = _Decoder(light, model, place, ask, twin=twin)
        exact = decoder.decode(_GARBAGE[dtype])
        moved = with_rounding(model, MEASURED * UNITS[dtype], _SEED + 1)
        rounded = _Decoder(light, moved, place, ask, twin=twin, text=decoder.text).decode(exact.ran.garbage)
        proof = _proof(light, decoder, exact, rounded, dtype)
    if (size := sum(array.nbytes for array in proof.arrays.values())) > _MOST_BYTES - _HEADER:
        raise OptionError(
            f"{proof.facts.steps} steps make a proof of {size / 1e6:.1f} MB, and it may have {_MOST_BYTES / 1e6:.1f}; "
            "give fewer steps"
        )
    return proof


@dataclass(frozen=True)
class _Asked:
    """See `record_proof`."""

    most: Most
    rows: int
    steps: int | None


@dataclass
class _Heard:
    """The outputs of a decode.

    Attributes:
        logits: of each step ``[R, K, V]``.
        rows: by episode and name of the cache, ``[R, T, W]``: numbers of the rows that it wrote; NaN: not known.
    """

    ran: Ran
    episodes: list[Episode] = field(default_factory=list)
    logits: dict[str, Array] = field(default_factory=dict)
    rows: dict[str, Array] = field(default_factory=dict)


class _Inputs(StepInputs):
    """The inputs of a step, with the tokens of a text, or with embeddings that a seed gives."""

    contents: Contents
    tokens: TensorRole
    text: _Text
    spans: Callable[[Step], dict[str, Array]]
    count = 0

    def shared(self, step: Step) -> dict[str, Array]:
        feeds = super().shared(step)
        tokens = feeds[self.tokens.name]
        values = self.contents.embeds(self.count, tokens.shape) if self.tokens.embedded else self.text.tokens_of(step)
        feeds[self.tokens.name] = values.reshape(tokens.shape).astype(tokens.dtype)
        self.count += 1
        return feeds | self.spans(step)


class _Text:
    """The tokens of a proof: each row begins with its own random ones, and goes on somewhere in the same text.

    Attributes:
        continued: the text, as the model goes on after the first row's random tokens; without it, more random ones.

    Args:
        rows: of the batch.
        vocab: number of tokens.
    """

    def __init__(self, rows: int, vocab: int) -> None:
        rng = np.random.default_rng(_SEED)
        self._seeds = rng.integers(0, vocab, (rows, _SEEDS))
        self.continued: list[int] = []
        self._drawn = rng.integers(0, vocab, _TEXT)

    def tokens_of(self, step: Step) -> Array:
        """The tokens ``[R, S]`` of a step."""
        text = np.array([*self.continued, *self._drawn[len(self.continued) :]])
        places = np.add.outer(np.array(step.starts), np.arange(step.length))
        shift = np.arange(len(places))[:, None] * _TEXT // len(self._seeds)
        seeds = self._seeds[: len(places)]
        begun = np.take_along_axis(seeds, np.minimum(places, _SEEDS - 1), 1)
        return np.where(places < _SEEDS, begun, text[(places - _SEEDS + shift) % _TEXT])

    def choose(self, logits: Array) -> None:
        """Go on with the best token that did not follow the one before already: a model repeats itself for ever."""
        before = self.continued[-1:]
        scores = logits.astype(np.float64)
        scores[[b for a, b in zip(self.continued, self.continued[1:], strict=False) if [a] == before]] = -np.inf
        self.continued.append(int(scores.argmax()))


class _Decoder(Verification):
    """`Verification` of which only the original runs, over the schedule of a proof.

    Attributes:
        bounds: of the engine.

    Args:
        light: the model and its plan.
        model: what runs: the original, or a form of it.
        folder: of its external data.
        ask: what is recorded.
        twin: it is the float32 twin of a bfloat16 model.
        text: its tokens; None: those with which the model goes on by itself.
    """

    def __init__(
        self, light: ImportedModel, model: ModelProto, folder: Path, ask: _Asked, *, twin: bool,
        text: _Text | None = None,
    ) -> None:  # fmt: skip
        tokens = light.plan.tensor(Role.TOKENS)
        assert tokens is not None
        self._tokens, self._vocab = tokens, index_limits(light.model, light.plan).tokens.get(tokens.name, 2)
        # The original gives logits of all tokens of a step.
        longest = max(_LOGITS // self._vocab, 1)
        self.bounds, self.wanted = replace(ask.most, chunk=min(ask.most.chunk, longest)), ask.steps
        self._state: dict[str, Array] = {}
        options = VerifyOptions(batch=min(ask.rows, max(ask.most.batch, _FEWEST)), tokens=0, seed=_SEED)
        super().__init__(light, options, model, light.model, folder, twin=twin)
        self._goes_on = text is None and not tokens.embedded and self.limits.length in (None, 1)
        self.text = text or _Text(self.limits.batch, self._vocab)

    def _read_limits(self) -> Limits:
        return within(super()._read_limits(), self.plan, self.bounds)

    def _schedule(self, limits: Limits) -> Sequence[verify_schedule.Episode]:
        windows = {g.left_window + 1 for g in self.plan.masks if g.left_window >= 0}
        return plan_proof(limits, windows, self.wanted, drawn=self.plan.options.cache_dtype is None)

    def decode(self, garbage: float) -> _Heard:
        """Run the original over all episodes, with garbage of this size, or less where it reads it."""
        self._planned = self._episodes(self.limits)
        if not self._planned:
            raise UnsupportedModelError(f"{self.path}: no step of a proof fits the caches of this model")
        contents = Contents(self.plan, _SEED, garbage, self.bounds.encoder)
        constants = contents.constants(self.limits.batch)
        values = {n: v.astype(np.float32) if v.dtype.name == "bfloat16" else v for n, v in constants.items()}
        inputs = _Inputs(
            self.plan, index_limits(self.models[1], self.plan), values, self.rng, twin=self.twin,
            rings=bool(self.texts), plain=True,
        )  # fmt: skip
        inputs.contents, inputs.tokens, inputs.text = contents, self._tokens, self.text
        quantized = self.plan.options.cache_dtype is not None
        inputs.spans = lambda step: span_inputs(self.plan, step, "full") if quantized else {}
        self.inputs = inputs
        self.most = garbage if any("int" not in c.role.dtype for c in self.caches) else math.inf
        tape = _Sampler(self, self._planned)
        ran = self.run_original(self._planned, tape)
        return _Heard(ran, tape.episodes, tape.logits, tape.rows)

    def _open_original(self, trial: dict[str, Array]) -> ModelSession:
        """The session, with which the text is made."""
        original = super()._open_original(trial)
        rows = self.limits.batch if self.limits.fixed_batch else 1
        if not self._goes_on:
            return original
        name, longest = StepLogits(self.plan).name, max(max(e.steps[-1].valid) for e in self._planned)
        state = self.drawn((0,) * rows, 0.0, 0)
        for end in range(min(_SEEDS + _TEXT, longest) - 1):
            outputs = original.run({**self.inputs.shared(Step(1, (end,) * rows, (end + 1,) * rows)), **state})
            state |= {c.role.name: outputs[c.output] for c in self.caches if c.output is not None}
            if end >= _SEEDS - 1:
                self.text.choose(outputs[name].reshape(rows, -1)[0])
        return original

    def _contents(self, step: Step, garbage: float, episode: int) -> dict[str, Array]:
        """Caches before an episode: empty ones, or what the episode before left, which `_record` keeps up to date."""
        if self._planned[episode].name == DRAWN:
            return self.drawn(step.starts, garbage, episode)
        fresh = {} if all(step.starts) else self.drawn((0,) * len(step.starts), garbage, episode)
        if not any(step.starts):
            self._state = fresh
            return fresh
        ends = self._planned[episode - 1].steps[-1].valid
        for cache in self.caches:
            name = cache.role.name
            contents = self._state[name] = self._state[name].copy()
            for row, (start, end) in enumerate(zip(step.starts, ends, strict=True)):
                if not start:
                    contents[row] = fresh[name][row]
                elif start > end and cache.update is not None:
                    copies(self.texts.get(name, cache).rows(contents)[row], cache.update.capacity, end, start)
        return self._state


class _Sampler(Tape):
    """In the place of `verify`'s tape: keeps what a proof keeps."""

    def __init__(self, decoder: _Decoder, episodes: Sequence[verify_schedule.Episode]) -> None:
        plan = decoder.plan
        logits = StepLogits(plan)
        self.logits: dict[str, Array] = {}
        self.rows: dict[str, Array] = {}
        self.episodes = [
            Episode(e.name, e.steps[0].starts, tuple(s.length for s in e.steps),
                    keeps(e, decoder.bounds, last_only=logits.last_only))
            for e in episodes
        ]  # fmt: skip
        self._name = logits.name
        self._carried = {b.present: b for b in carried_buffers(plan)}
        self._outputs = {c.output: c for c in decoder.caches if c.role.name in {b.past for b in self._carried.values()}}
        self._steps = iter([(at, n) for at, e in enumerate(self.episodes) for n in range(len(e.lengths))])
        rows = sum(len(e.starts) * len(e.newest) for e in self.episodes) * len(self._outputs)
        self._width = int(np.clip(_SAMPLES // (4 * max(rows, 1)), _NARROWEST, _WIDEST))

    def write(self, expected: Mapping[str, Array | Written | None]) -> None:
        """Keep a step."""
        at, number = next(self._steps)
        episode = self.episodes[at]
        logits = expected[self._name]
        assert isinstance(logits, np.ndarray)
        rows = len(episode.starts)
        keep = episode.keep[number]
        if keep:
            self.logits[f"{at}/{number}"] = logits.reshape(rows, -1, logits.shape[-1])[:, -keep:].astype(np.float32)
        for name, cache in self._outputs.items():
            value = expected.get(str(name))
            if isinstance(value, Written):
                self._written(at, number, cache, value)
            elif isinstance(value, np.ndarray) and cache.update is None:
                flat = value.reshape(rows, 1, -1)
                self.rows[f"{at}/{cache.role.name}"] = flat[..., places(flat.shape[-1], self._width)].astype(np.float32)

    def _written(self, at: int, number: int, cache: CacheTensor, value: Written) -> None:
        """Keep the cache rows of a step's last tokens."""
        episode = self.episodes[at]
        before = sum(episode.lengths[:number])
        width = places(value.values.shape[-1], self._width)
        name = f"{at}/{cache.role.name}"
        if name not in self.rows:
            self.rows[name] = np.full((len(episode.starts), len(episode.newest), len(width)), np.nan, np.float32)
        order = np.cumsum(value.rows).reshape(value.rows.shape) - 1  # of the row among those that changed
        for row, start in enumerate(episode.starts):
            for index, token in enumerate(episode.newest):
                place = (start + token) % value.rows.shape[1]
                if before <= token < before + episode.lengths[number] and value.rows[row, place]:
                    self.rows[name][row, index] = value.values[order[row, place], width]


@contextmanager
def _original(imported: ImportedModel, folder: Path) -> Iterator[tuple[ModelProto, Path, bool]]:
    """The original as ONNX Runtime runs it, the folder of its data, and whether it is the twin of a bfloat16 model."""
    model, _ = for_cpu(with_exact_products(define(unstacked(imported.source.proto, imported.plan))))
    model = _with_last_logits(model, imported.plan)
    if not has_bfloat16(model):
        yield model, folder, False
        return
    with TemporaryDirectory(prefix="trt-kvcache-proof-") as name:
        twins = TwinFolder(Path(name), folder)
        yield twins.twin(model), twins.folder, True


def _with_last_logits(model: ModelProto, plan: CachePlan) -> ModelProto:
    """The model with logits of as many last positions as a proof keeps, if its plan knows how to cut them.

    A history is long, and its logits may be more work than all layers of a model with a large vocabulary.
    """
    span = plan.logits_span
    if span is None:
        return model
    shortened = ModelProto()
    shortened.CopyFrom(model)
    if shortened.functions:  # readers may be in them
        shortened, _ = inline_functions(shortened)
        name_nodes(shortened.graph)
    if {n.name for n in shortened.graph.node if span.tensor in n.input} != set(span.readers):
        return model
    last, nodes = f"{_PREFIX}{span.tensor}", list(shortened.graph.node)
    bounds = {"first": -MOST_POSITIONS, "end": np.iinfo(np.int64).max, "axis": span.axis}
    shortened.graph.initializer.extend(numpy_helper.from_array(np.array([v]), last + n) for n, v in bounds.items())
    for node in nodes:
        if node.name in span.readers:
            node.input[:] = [last if name == span.tensor else name for name in node.input]
    first = next(at for at, node in enumerate(nodes) if last in node.input)
    new = helper.make_node("Slice", [span.tensor, *(last + n for n in bounds)], [last], last)
    shortened.graph.node.insert(first, new)
    for output in shortened.graph.output:
        if output.name == span.output:
            output.type.tensor_type.ClearField("shape")
    return shortened


def _proof(imported: ImportedModel, decoder: _Decoder, exact: _Heard, rounded: _Heard, dtype: str) -> Proof:
    """The parts of a decode that a proof keeps, with the effect of rounding on them."""
    plan, arrays = imported.plan, {}
    rounding = measured(_pairs(exact, rounded))
    unit = UNITS[dtype]
    coded = {b.past for b in carried_buffers(plan) if "int" in b.dtype or plan.options.cache_dtype is not None}
    tolerances = allowed(rounding, unit, decoder.limits.batch, coded, plan.options.cache_dtype)
    note = ""
    if any(np.isnan(v).any() for v in exact.logits.values()):
        note = (
            "the original has logits that are not a number, as where float16 overflows; its proof leaves these "
            "episodes' logits out; bfloat16 or float32 has room for them"
        )
    elif not any(LOGITS in shares for shares in tolerances.values()):
        least = min(shares[LOGITS].typical for shares in rounding.values())
        note = (
            f"rounding decides the logits of this model: moving its numbers by no more than {MEASURED * unit:.2g} of "
            f"themselves changes logits by {least:.2g} of their size; its proof compares cache rows alone"
        )
    vocab = next(iter(exact.logits.values())).shape[-1]
    columns = _columns(vocab, sum(v.size for v in exact.logits.values()) * 4)
    if columns is not None:
        arrays["columns"] = columns
    for name, values in exact.logits.items():
        arrays[f"{name}/logits"] = values if columns is None else values[..., columns]
        if columns is not None:
            high = np.argpartition(values, -_HIGH, axis=-1)[..., -_HIGH:]
            arrays[f"{name}/high"] = high.astype(np.int32)
            arrays[f"{name}/highest"] = np.take_along_axis(values, high, -1)
    for name, values in exact.rows.items():
        place, cache = name.split("/", 1)
        if cache in tolerances[exact.episodes[int(place)].name]:
            arrays[f"{place}/rows/{cache}"] = values
    tokens = plan.tensor(Role.TOKENS)
    assert tokens is not None
    for at, (planned, (_, steps)) in enumerate(zip(exact.episodes, exact.ran.episodes, strict=True)):
        for number, (_, feeds) in enumerate(steps):
            shape = len(planned.starts), planned.lengths[number]
            ids = np.zeros(shape) if tokens.embedded else feeds[tokens.name].reshape(shape)
            arrays[f"{at}/{number}/tokens"] = ids.astype(np.int32)
    facts = Facts(
        recorded_on=exact.ran.backend, dtype=dtype, vocab=vocab, seed=_SEED, garbage=exact.ran.garbage,
        encoder=decoder.bounds.encoder, chooses=_chooses(imported.source.proto),
        episodes=tuple(exact.episodes), digest=draws_digest(_SEED),
        tolerances=tolerances, rounding=rounding, note=note,
    )  # fmt: skip
    return Proof(facts, {name: np.ascontiguousarray(array) for name, array in arrays.items()})


def _chooses(model: ModelProto) -> bool:
    return any(node.op_type in ("TopK", "MoE", "QMoE") for scope in iter_scopes(model) for node in scope.node)


def _pairs(exact: _Heard, rounded: _Heard) -> Iterator[tuple[str, str, Array, Array]]:
    """All outputs: names of episode and output, and both decodes' numbers."""
    for name, values in exact.logits.items():
        yield exact.episodes[int(name.split("/")[0])].name, LOGITS, values, rounded.logits[name]
    for name, values in exact.rows.items():
        place, cache = name.split("/", 1)
        yield exact.episodes[int(place)].name, cache, values, rounded.rows[name]


def _columns(vocab: int, size: int) -> Array | None:
    """The columns of the logits that are kept; None: all."""
    if size <= _ALL or vocab <= _HIGH + _COLUMNS:
        return None
    return np.arange(_COLUMNS) * vocab // _COLUMNS + np.arange(_COLUMNS) % max(vocab // _COLUMNS, 1)
