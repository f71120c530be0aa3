"""Recording a proof: `verify`'s decode of the original, twice: as it is, and with rounding.

Nothing of the rewritten model runs here but its plan, which says what a step takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.extensions import apart, define, for_cpu
from trt_kvcache.importer.plan import Role
from trt_kvcache.importer.planning.experts import exact_experts
from trt_kvcache.importer.planning.index_limits import index_limits
from trt_kvcache.importer.protos import iter_scopes
from trt_kvcache.importer.steps.contents import CacheTensor, first_contents
from trt_kvcache.importer.steps.element_types import has_bfloat16
from trt_kvcache.importer.steps.inputs import StepInputs
from trt_kvcache.importer.steps.runnable import with_exact_products
from trt_kvcache.importer.steps.schedule import Limits, Step
from trt_kvcache.proof.contents import Contents, draws_digest, embedded
from trt_kvcache.proof.file import Episode, Facts, Proof, Share, share_of
from trt_kvcache.proof.places import LOGITS, places, rows_apart
from trt_kvcache.proof.rounding import UNITS, rounding_dtype, with_rounding
from trt_kvcache.proof.schedule import Most, keeps, plan_proof, within
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

MOST_ROWS = 3
"""Rows of the batch in a step."""

_SEED = 0
_GARBAGE = {"float32": 1e4, "bfloat16": 1e4, "float16": 30.0}
"""Far above what caches hold; scores of it still fit into the type."""

_ALL = 384 << 10  # bytes of logits, up to which all are kept
_HIGH, _COLUMNS = 64, 256
_MOST_BYTES, _HEADER = 1 << 20, 64 << 10
_SAMPLES = 384 << 10  # bytes of cache rows
_WIDEST, _NARROWEST = 64, 1  # numbers of one cache row that are kept
_TIMES = Share(8.0, 5.0)  # what an engine may differ by, as a multiple of what rounding made
_LEAST = Share(8.0, 5.0)  # units of rounding, at least
_QUANTIZED = Share(2.5 / 127, 1.5 / 127)  # of quantized rows, at least: a number may be rounded to a neighbour
_SHOWS = 0.3  # of an output's scale: what allows more shows no fault


def record_proof(imported: ImportedModel, most: Most, *, rows: int = MOST_ROWS, steps: int | None = None) -> Proof:
    """Decode the original model on ONNX Runtime, and keep what an engine of it has to give.

    Args:
        imported: the model and its plan.
        most: the most that the engine is built for.
        rows: most rows of the batch in a step.
        steps: how many; None: about ten.

    Raises:
        UnsupportedModelError: the runtime cannot run the model, or nothing here runs the original; or rounding decides
            its numbers, so that no fault would show.
        OptionError: it does not fit into memory.
        OutputError: no room for temporary files.
    """
    RuntimeInputs(imported.plan)  # refuses what no session runs
    StepLogits(imported.plan)
    rows = rows if rows_apart(imported.plan) else 1
    with moved_out(imported) as (light, folder), _original(light, folder) as (model, place, twin), exact_experts():
        dtype = rounding_dtype(light.source.proto, twin=twin)
        ask = _Asked(most, rows, steps)
        decoder = _Decoder(light, model, place, ask, twin=twin)
        exact = decoder.decode(_GARBAGE[dtype])
        moved = with_rounding(model, UNITS[dtype], _SEED + 1)
        rounded = _Decoder(light, moved, place, ask, twin=twin).decode(exact.ran.garbage)
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
    """The inputs of a step, with embeddings that a seed gives."""

    contents: Contents
    embedded = ""
    count = 0

    def shared(self, step: Step) -> dict[str, Array]:
        made = super().shared(step)
        if self.embedded:
            values = self.contents.embeds(self.count, made[self.embedded].shape)
            made[self.embedded] = values.astype(made[self.embedded].dtype)
            self.count += 1
        return made


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
    """

    def __init__(self, light: ImportedModel, model: ModelProto, folder: Path, ask: _Asked, *, twin: bool) -> None:
        self.bounds, self.wanted = ask.most, ask.steps
        options = VerifyOptions(batch=min(ask.rows, ask.most.batch), tokens=0, seed=_SEED)
        super().__init__(light, options, model, light.model, folder, twin=twin)

    def _read_limits(self) -> Limits:
        return within(super()._read_limits(), self.plan, self.bounds)

    def _schedule(self, limits: Limits) -> Sequence[verify_schedule.Episode]:
        return plan_proof(limits, self.wanted)

    def decode(self, garbage: float) -> _Heard:
        """Run the original over all episodes, with garbage of this size, or less where it reads it."""
        episodes = self._episodes(self.limits)
        if not episodes:
            raise UnsupportedModelError(f"{self.path}: no step of a proof fits the caches of this model")
        contents = Contents(self.plan, self.text_rows, _SEED, garbage, self.bounds.encoder)
        constants = contents.constants(self.limits.batch)
        given = {n: v.astype(np.float32) if v.dtype.name == "bfloat16" else v for n, v in constants.items()}
        inputs = _Inputs(
            self.plan, index_limits(self.models[1], self.plan), given, self.rng, twin=self.twin,
            rings=bool(self.texts), plain=True,
        )  # fmt: skip
        tensor = embedded(self.plan)
        inputs.contents, inputs.embedded = contents, "" if tensor is None else tensor.name
        self.inputs = inputs
        self.most = garbage if any("int" not in c.role.dtype for c in self.caches) else math.inf
        tape = _Sampler(self, episodes)
        ran = self.run_original(episodes, tape)
        return _Heard(ran, tape.episodes, tape.logits, tape.rows)

    def _contents(self, step: Step, garbage: float, episode: int) -> dict[str, Array]:
        """Cache contents before an episode's first step, as `Contents` draws them again."""
        contents: dict[str, Array] = {}
        for number, cache in enumerate(self.caches):
            rng = np.random.default_rng([_SEED, episode, number])
            held = self.texts.get(cache.role.name, cache)
            contents[cache.role.name] = first_contents(held, step.starts, garbage, rng, twin=self.twin)
        return contents

    @property
    def text_rows(self) -> dict[str, int]:
        """See `Facts.texts`."""
        return {name: text.update.capacity for name, text in self.texts.items() if text.update is not None}


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
        rows = sum(len(e.starts) * sum(e.lengths) for e in self.episodes) * len(self._outputs)
        self._width = int(np.clip(_SAMPLES // (4 * max(rows, 1)), _NARROWEST, _WIDEST))

    def write(self, expected: Mapping[str, Array | Written | None]) -> None:
        """Keep a step."""
        at, number = next(self._steps)
        episode = self.episodes[at]
        logits = expected[self._name]
        assert isinstance(logits, np.ndarray)
        rows = len(episode.starts)
        keep = episode.keep[number]
        self.logits[f"{at}/{number}"] = logits.reshape(rows, -1, logits.shape[-1])[:, -keep:].astype(np.float32)
        for name, cache in self._outputs.items():
            value = expected.get(str(name))
            if isinstance(value, Written):
                self._written(at, number, cache, value)
            elif isinstance(value, np.ndarray) and cache.update is None:
                flat = value.reshape(rows, 1, -1)
                self.rows[f"{at}/{cache.role.name}"] = flat[..., places(flat.shape[-1], self._width)].astype(np.float32)

    def _written(self, at: int, number: int, cache: CacheTensor, value: Written) -> None:
        """Keep the cache rows of a step's tokens."""
        episode = self.episodes[at]
        before = sum(episode.lengths[:number])
        width = places(value.values.shape[-1], self._width)
        name = f"{at}/{cache.role.name}"
        if name not in self.rows:
            shape = len(episode.starts), sum(episode.lengths), len(width)
            self.rows[name] = np.full(shape, np.nan, np.float32)
        order = np.cumsum(value.rows).reshape(value.rows.shape) - 1  # of the row among those that changed
        capacity = value.rows.shape[1]
        for row, start in enumerate(episode.starts):
            for token in range(before, before + episode.lengths[number]):
                place = (start + token) % capacity
                if value.rows[row, place]:
                    self.rows[name][row, token] = value.values[order[row, place], width]


@contextmanager
def _original(imported: ImportedModel, folder: Path) -> Iterator[tuple[ModelProto, Path, bool]]:
    """The original as ONNX Runtime runs it, the folder of its data, and whether it is the twin of a bfloat16 model."""
    model, _ = for_cpu(with_exact_products(define(apart(imported.source.proto, imported.plan))))
    if not has_bfloat16(model):
        yield model, folder, False
        return
    with TemporaryDirectory(prefix="trt-kvcache-proof-") as name:
        twins = TwinFolder(Path(name), folder)
        yield twins.twin(model), twins.folder, True


def _proof(imported: ImportedModel, decoder: _Decoder, exact: _Heard, rounded: _Heard, dtype: str) -> Proof:
    """The parts of a decode that a proof keeps, with the effect of rounding on them."""
    plan, arrays = imported.plan, {}
    rounding = _rounding(exact, rounded)
    least = Share(_LEAST.largest * UNITS[dtype], _LEAST.typical * UNITS[dtype])
    integers = {b.past for b in carried_buffers(plan) if "int" in b.dtype}
    tolerances = {
        name: Share(_TIMES.largest * r.largest, _TIMES.typical * r.typical).most(
            _QUANTIZED if name in integers else least
        )
        for name, r in rounding.items()
    }
    if tolerances[LOGITS].typical > _SHOWS:
        raise UnsupportedModelError(
            f"{imported.source.path}: rounding decides the numbers of this model: moving them by no more than "
            f"{UNITS[dtype]:.2g} of themselves changes its logits by {rounding[LOGITS].typical:.2g} of their size, so "
            "that a proof would show no fault"
        )
    tolerances = {name: share for name, share in tolerances.items() if share.typical <= _SHOWS}
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
        episode, cache = name.split("/", 1)
        if cache in tolerances:
            arrays[f"{episode}/rows/{cache}"] = values
    tokens = plan.tensor(Role.TOKENS)
    assert tokens is not None
    for at, (planned, (_, steps)) in enumerate(zip(exact.episodes, exact.ran.episodes, strict=True)):
        for number, (_, feeds) in enumerate(steps):
            shape = len(planned.starts), planned.lengths[number]
            ids = np.zeros(shape) if tokens.embedded else feeds[tokens.name].reshape(shape)
            arrays[f"{at}/{number}/tokens"] = ids.astype(np.int32)
    facts = Facts(
        recorded_on=exact.ran.engine, dtype=dtype, vocab=vocab, seed=_SEED, garbage=exact.ran.garbage,
        encoder=decoder.bounds.encoder, chooses=_chooses(imported.source.proto),
        episodes=tuple(exact.episodes), texts=decoder.text_rows, digest=draws_digest(_SEED),
        tolerances=tolerances, rounding=rounding,
    )  # fmt: skip
    return Proof(facts, {name: np.ascontiguousarray(array) for name, array in arrays.items()})


def _chooses(model: ModelProto) -> bool:
    return any(node.op_type in ("TopK", "MoE", "QMoE") for scope in iter_scopes(model) for node in scope.node)


def _rounding(exact: _Heard, rounded: _Heard) -> dict[str, Share]:
    """The largest difference between two decodes, as a share of a row's scale: of the logits, and of each cache."""
    found: dict[str, Share] = {}
    both = [(LOGITS, values, rounded.logits[name]) for name, values in exact.logits.items()]
    both += [(name.split("/", 1)[1], values, rounded.rows[name]) for name, values in exact.rows.items()]
    for name, before, after in both:
        for one, other in zip(before, after, strict=True):
            share = share_of(one, other)
            found[name] = found.get(name, share).most(share)
    return found


def _columns(vocab: int, size: int) -> Array | None:
    """The columns of the logits that are kept; None: all."""
    if size <= _ALL or vocab <= _HIGH + _COLUMNS:
        return None
    return np.arange(_COLUMNS) * vocab // _COLUMNS + np.arange(_COLUMNS) % max(vocab // _COLUMNS, 1)
