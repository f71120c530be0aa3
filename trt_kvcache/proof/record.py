"""Recording a proof: a decode of the rewritten model in float32, twice: as it is, and with rounding.

The rewritten model has the engine's own interface, so that nobody translates a cache; the model as exported decodes the
first episode, too, and has to give the same logits. Caches hold what the model wrote into them, and the text is its
own: on random cache contents and random tokens, rounding is amplified far more than on what a model was trained to see,
and tolerances, which follow rounding, would hide faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto

from trt_kvcache.compare.decode import share_of_logits
from trt_kvcache.compare.exported import Exported
from trt_kvcache.compare.float32_copy import Float32Copies
from trt_kvcache.compare.rewritten import WideSession
from trt_kvcache.compare.rounding import UNITS, rounding_dtype, with_rounding
from trt_kvcache.cpu import RunError
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.extensions import for_cpu
from trt_kvcache.importer.plan import Role
from trt_kvcache.importer.planning.experts import exact_experts
from trt_kvcache.importer.planning.index_limits import IndexLimits, index_limits
from trt_kvcache.importer.protos import iter_scopes
from trt_kvcache.importer.steps.element_types import has_bfloat16
from trt_kvcache.importer.steps.inputs import StepInputs, span_inputs
from trt_kvcache.importer.steps.step import Step, read_limits
from trt_kvcache.proof.contents import Contents, copies, draws_digest
from trt_kvcache.proof.file import Episode, Facts, Proof
from trt_kvcache.proof.places import LOGITS, places
from trt_kvcache.proof.schedule import DRAWN, MOST_POSITIONS, Most, keeps, plan_proof, within
from trt_kvcache.proof.tolerance import MEASURED, MOST_ROWS, allowed, measured
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.inputs import StepInputs as RuntimeInputs
from trt_kvcache.runtime.logits import StepLogits

__all__ = ["MOST_ROWS", "record_proof"]

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], dict[str, Array]]

_FEWEST = 2  # rows: an engine of one sequence replays them one after the other
_SEED = 0
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
_TIED = 1e-3  # of the logits: what the rewritten model may differ by from the model as exported


def record_proof(imported: ImportedModel, most: Most, *, rows: int = MOST_ROWS, steps: int | None = None) -> Proof:
    """Decode a model on ONNX Runtime, and keep what an engine of it has to give.

    Args:
        imported: the model and its plan.
        most: the most that the engine is built for.
        rows: most rows of the batch in a step.
        steps: how many; None: about ten.

    Raises:
        UnsupportedModelError: the runtime cannot run the model, or nothing here runs it; or the rewritten model does
            not give the logits of the model as exported.
        OptionError: it does not fit into memory.
        OutputError: temporary files do not fit onto the disk.
    """
    RuntimeInputs(imported.plan)  # refuses what no session runs
    StepLogits(imported.plan)
    with TemporaryDirectory(prefix="trt-kvcache-proof-") as name, exact_experts():
        copies = Float32Copies(Path(name))
        model, folder = copies.copy(for_cpu(imported.model)[0], imported.source.path.parent)
        dtype = rounding_dtype(imported.source.proto, twin=has_bfloat16(imported.source.proto))
        decoder = _Decoder(imported, most, rows, steps)
        try:
            run = WideSession(model, folder).run
            decoder.choose_text(run)
            exact = decoder.decode(run, _GARBAGE[dtype])
            decoder.tie(exact, copies)
            rounded = WideSession(with_rounding(model, MEASURED * UNITS[dtype], _SEED + 1), folder).run
            moved = decoder.decode(rounded, _GARBAGE[dtype])
        except RunError as error:
            path = imported.source.path
            raise UnsupportedModelError(f"{path}: ONNX Runtime does not run the model: {error}") from None
        proof = _proof(imported, decoder, exact, moved, dtype)
    if (size := sum(array.nbytes for array in proof.arrays.values())) > _MOST_BYTES - _HEADER:
        raise OptionError(
            f"{proof.facts.steps} steps make a proof of {size / 1e6:.1f} MB, and it may have {_MOST_BYTES / 1e6:.1f}; "
            "give fewer steps"
        )
    return proof


@dataclass
class _Heard:
    """What a decode gave.

    Attributes:
        tokens: of each step ``[R, S]``, by episode and step.
        logits: of the steps that are compared ``[R, K, V]``, likewise.
        rows: by episode and name of the cache, ``[R, T, W]``: numbers of the rows of its newest tokens.
    """

    garbage: float
    tokens: dict[str, Array] = field(default_factory=dict)
    logits: dict[str, Array] = field(default_factory=dict)
    rows: dict[str, Array] = field(default_factory=dict)


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
        at = np.add.outer(np.array(step.starts), np.arange(step.length))
        shift = np.arange(len(at))[:, None] * _TEXT // len(self._seeds)
        seeds = self._seeds[: len(at)]
        begun = np.take_along_axis(seeds, np.minimum(at, _SEEDS - 1), 1)
        return np.where(at < _SEEDS, begun, text[(at - _SEEDS + shift) % _TEXT])

    def choose(self, logits: Array) -> None:
        """Go on with the best token that did not follow the one before already: a model repeats itself for ever."""
        before = self.continued[-1:]
        scores = np.nan_to_num(logits.astype(np.float64), nan=-np.inf)
        scores[[b for a, b in zip(self.continued, self.continued[1:], strict=False) if [a] == before]] = -np.inf
        self.continued.append(int(scores.argmax()))


class _Decoder:
    """Decodes the episodes of a proof, with whatever runs the rewritten model.

    Attributes:
        episodes: with the steps whose logits are kept.
        bounds: of the engine.
        rows: of the batch.
    """

    def __init__(self, imported: ImportedModel, most: Most, rows: int, steps: int | None) -> None:
        plan = self._plan = imported.plan
        self._imported = imported
        tokens = plan.tensor(Role.TOKENS)
        assert tokens is not None
        self._tokens = tokens
        self._limits: IndexLimits = index_limits(imported.model, plan)
        vocab = self._limits.tokens.get(tokens.name, 2)
        chunk = min(most.chunk, max(_LOGITS // vocab, 1))
        self.bounds = Most(most.batch, chunk, most.logits, most.positions, most.encoder)
        limits = within(read_limits(plan, min(rows, max(most.batch, _FEWEST))), plan, self.bounds)
        windows = {g.left_window + 1 for g in plan.masks if g.left_window >= 0}
        self._planned = plan_proof(limits, windows, steps, drawn=plan.options.cache_dtype is None)
        if not self._planned:
            raise UnsupportedModelError(f"{imported.source.path}: no step of a proof fits the caches of this model")
        logits = StepLogits(plan)
        self._name, self.rows = logits.name, limits.batch
        self.episodes = [
            Episode(e.name, e.steps[0].starts, tuple(s.length for s in e.steps),
                    keeps(e, self.bounds, last_only=logits.last_only))
            for e in self._planned
        ]  # fmt: skip
        self._text = _Text(self.rows, vocab)
        self._goes_on = not tokens.embedded and limits.length in (None, 1)
        self._buffers = {b.past: b for b in carried_buffers(plan)}
        kept = sum(len(e.starts) * len(e.newest) for e in self.episodes) * len(self._buffers)
        self._width = int(np.clip(_SAMPLES // (4 * max(kept, 1)), _NARROWEST, _WIDEST))

    def choose_text(self, run: Run) -> None:
        """Let the model continue the first row's random tokens, from empty caches on."""
        if not self._goes_on:
            return
        longest = max(max(e.steps[-1].valid) for e in self._planned)
        contents = Contents(self._plan, _SEED, 0.0, self.bounds.encoder)
        caches = {n: _wide(v) for n, v in contents.first(0, (0,) * self.rows)}
        inputs = self._inputs(contents)
        for end in range(min(_SEEDS + _TEXT, longest) - 1):
            step = Step(1, (end,) * self.rows, (end + 1,) * self.rows)
            outputs = run(self._feeds(inputs, contents, step, 0) | caches)
            self._accept(contents, caches, outputs)
            if end >= _SEEDS - 1:
                self._text.choose(outputs[self._name].reshape(self.rows, -1)[0])

    def decode(self, run: Run, garbage: float) -> _Heard:
        """Decode all episodes, with garbage of this size in rows without a token."""
        contents = Contents(self._plan, _SEED, garbage, self.bounds.encoder)
        inputs, heard = self._inputs(contents), _Heard(garbage)
        caches: dict[str, Array] = {}
        ends, count = (0,) * self.rows, 0
        for at, (planned, episode) in enumerate(zip(self._planned, self.episodes, strict=True)):
            drawn = episode.starts if episode.name == DRAWN else (0,) * self.rows
            for name, fresh in contents.first(at, drawn):
                self._begin(contents, caches, name, _wide(fresh), episode, ends)
            for number, step in enumerate(planned.steps):
                feeds = self._feeds(inputs, contents, step, count)
                count += 1
                outputs = run(feeds | caches)
                self._accept(contents, caches, outputs)
                heard.tokens[f"{at}/{number}"] = self._text.tokens_of(step)
                if keep := episode.keep[number]:
                    logits = outputs[self._name]
                    logits = logits.reshape(self.rows, -1, logits.shape[-1])[:, -keep:]
                    heard.logits[f"{at}/{number}"] = logits.astype(np.float32)
            ends = episode.ends
            for name in self._buffers:
                heard.rows[f"{at}/{name}"] = self._newest(contents, caches[name], name, episode)
        return heard

    def tie(self, exact: _Heard, copies: Float32Copies) -> None:
        """Let the model as exported decode the first episode, where it can.

        Raises:
            UnsupportedModelError: it gives other logits than the rewritten model.
        """
        episode = self.episodes[0]
        if self._plan.options.cache_dtype is not None or self._tokens.embedded or any(episode.starts):
            return
        given = Contents(self._plan, _SEED, 0.0, self.bounds.encoder).constants(self.rows)
        try:
            exported = Exported(self._imported.source, self._plan, wide=True, given=given, copies=copies)
            exported.last = MOST_POSITIONS
            exported.start([()] * self.rows)
            steps = [exported.step([r.tolist() for r in exact.tokens[f"0/{n}"]]) for n in range(len(episode.lengths))]
        except UnsupportedModelError:  # it does not decode by itself: the check has compared its parts
            return
        for number, logits in enumerate(steps):
            wanted = exact.logits.get(f"0/{number}")
            if wanted is None:
                continue
            had = np.stack(logits)[:, -wanted.shape[1] :]
            share, _ = share_of_logits(had, wanted[:, -had.shape[1] :])
            if np.isfinite(had).all() and not share.max() <= _TIED:
                raise UnsupportedModelError(
                    f"{self._imported.source.path}: the rewritten model does not give the logits of the model as "
                    f"exported: they differ by {share.max():.2g} in step {number + 1}; 'verify' says more"
                )

    def _inputs(self, contents: Contents) -> StepInputs:
        constants = {n: _wide(v) for n, v in contents.constants(self.rows).items()}
        return StepInputs(
            self._plan, self._limits, constants, np.random.default_rng(_SEED), twin=True, plain=True
        )  # fmt: skip

    def _feeds(self, inputs: StepInputs, contents: Contents, step: Step, count: int) -> dict[str, Array]:
        kept = min(MOST_POSITIONS, step.length)
        feeds = {n: _wide(v) for n, v in inputs.shared(step).items()} | span_inputs(self._plan, step, "tight", kept)
        tokens = feeds[self._tokens.name]
        values = contents.embeds(count, tokens.shape) if self._tokens.embedded else self._text.tokens_of(step)
        return feeds | {self._tokens.name: values.reshape(tokens.shape).astype(tokens.dtype)}

    def _accept(self, contents: Contents, caches: dict[str, Array], outputs: Mapping[str, Array]) -> None:
        for name, cache in contents.caches.items():
            if cache.output is not None:
                caches[name] = outputs[cache.output]

    def _begin(
        self, contents: Contents, caches: dict[str, Array], name: str, fresh: Array, episode: Episode,
        ends: tuple[int, ...],
    ) -> None:  # fmt: skip
        """What a cache holds before an episode: nothing, drawn numbers, what it held, or copies of that."""
        cache = contents.caches[name]
        if name not in caches:
            caches[name] = fresh
            return
        values = caches[name] = caches[name].copy()
        for row, (start, end) in enumerate(zip(episode.starts, ends, strict=True)):
            if not start or episode.name == DRAWN:
                values[row] = fresh[row]
            elif start > end and name in self._buffers and not self._buffers[name].is_state:
                copies(cache.physical_rows(values[row : row + 1])[0], self._buffers[name].capacity, end, start)

    def _newest(self, contents: Contents, values: Array, name: str, episode: Episode) -> Array:
        """The numbers ``[R, T, W]`` that are kept of a cache after an episode."""
        buffer = self._buffers[name]
        if buffer.is_state:
            flat = values.reshape(len(values), 1, -1)
            return np.asarray(flat[..., places(flat.shape[-1], self._width)], np.float32)
        rows = contents.caches[name].physical_rows(values).reshape(len(values), buffer.capacity, -1)
        width = places(rows.shape[-1], self._width)
        kept = [rows[r, (start + episode.newest) % buffer.capacity][:, width] for r, start in enumerate(episode.starts)]
        return np.asarray(np.stack(kept), np.float32)


def _wide(values: Array) -> Array:
    return values.astype(np.float32) if values.dtype.name in ("float16", "bfloat16") else values


def _proof(imported: ImportedModel, decoder: _Decoder, exact: _Heard, rounded: _Heard, dtype: str) -> Proof:
    """The parts of a decode that a proof keeps, with the effect of rounding on them."""
    plan, arrays, episodes = imported.plan, dict[str, Array](), decoder.episodes
    rounding = measured(_pairs(episodes, exact, rounded))
    unit = UNITS[dtype]
    coded = {b.past for b in carried_buffers(plan) if "int" in b.dtype or plan.options.cache_dtype is not None}
    tolerances = allowed(rounding, unit, decoder.rows, coded, plan.options.cache_dtype)
    note = ""
    if any(np.isnan(v).any() for v in exact.logits.values()):
        note = "the model has logits that are not a number; its proof leaves these episodes' logits out"
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
        at, cache = name.split("/", 1)
        if cache in tolerances[episodes[int(at)].name]:
            arrays[f"{at}/rows/{cache}"] = values
    tokens = plan.tensor(Role.TOKENS)
    assert tokens is not None
    for name, ids in exact.tokens.items():
        arrays[f"{name}/tokens"] = (np.zeros_like(ids) if tokens.embedded else ids).astype(np.int32)
    facts = Facts(
        recorded_on=f"ONNX Runtime {ort.__version__}, float32", dtype=dtype, vocab=vocab, seed=_SEED,
        garbage=exact.garbage, encoder=decoder.bounds.encoder, chooses=_chooses(imported.source.proto),
        episodes=tuple(episodes), digest=draws_digest(_SEED),
        tolerances=tolerances, rounding=rounding, note=note,
    )  # fmt: skip
    return Proof(facts, {name: np.ascontiguousarray(array) for name, array in arrays.items()})


def _chooses(model: ModelProto) -> bool:
    return any(node.op_type in ("TopK", "MoE", "QMoE") for scope in iter_scopes(model) for node in scope.node)


def _pairs(episodes: list[Episode], exact: _Heard, rounded: _Heard) -> Iterator[tuple[str, str, Array, Array]]:
    """All outputs: names of episode and output, and both decodes' numbers."""
    for name, values in exact.logits.items():
        yield episodes[int(name.split("/")[0])].name, LOGITS, values, rounded.logits[name]
    for name, values in exact.rows.items():
        at, cache = name.split("/", 1)
        yield episodes[int(at)].name, cache, values, rounded.rows[name]


def _columns(vocab: int, size: int) -> Array | None:
    """The columns of the logits that are kept; None: all."""
    if size <= _ALL or vocab <= _HIGH + _COLUMNS:
        return None
    return np.arange(_COLUMNS) * vocab // _COLUMNS + np.arange(_COLUMNS) % max(vocab // _COLUMNS, 1)
