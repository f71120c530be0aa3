"""Records a proof: a decode of the rewritten model in float32, once exactly and once with rounding.

The model as exported also decodes the first part and must give the same logits. Most steps use the model's own cache
rows and tokens. Random rows and tokens would amplify rounding; tolerances would then be larger, and hide faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from onnx import ModelProto

from trt_kvcache.compare.bounds import Bounds
from trt_kvcache.compare.decode import Decode, Piece, compare, plan_pieces
from trt_kvcache.compare.differences import Share, share_of
from trt_kvcache.compare.exported_model import Exported
from trt_kvcache.compare.float32_copy import Float32Copies
from trt_kvcache.compare.proof import LOGITS, Facts, Proof, draws_digest, numbers_of_cache
from trt_kvcache.compare.rewritten_model import Feeds, Float32Session, Rewritten
from trt_kvcache.compare.rounding import MEASURED, UNITS, allowed, rounding_dtype, uneven, with_rounding
from trt_kvcache.compare.text_inputs import TextInputs, token_table
from trt_kvcache.cpu import RunError
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.cache_plan import CachePlan, Role
from trt_kvcache.importer.families import for_cpu
from trt_kvcache.importer.interface import index_limits
from trt_kvcache.importer.protos import Array, iter_scopes
from trt_kvcache.importer.steps.drawn_inputs import draw_constants, read_limits
from trt_kvcache.importer.steps.sessions import exact_experts

Watch = Callable[[Feeds, Mapping[str, Array]], None]
"""Called with the inputs and outputs of each step of the rewritten model."""

_ROWS, _FEWEST = 3, 2  # number of texts, and the least; an engine of one sequence replays one after the other
_SEED = 0
_GARBAGE = {"float32": 1e4, "bfloat16": 1e4, "float16": 30.0}
"""Value of cache rows without a token, by type: far above values in caches; scores computed from it do not overflow."""

_PROMPT = (5, 3, 1)
_SETTLED = 40  # tokens after which rounding no longer grows (measured on SmolLM2 and Gemma 3)
_SPAN = 256  # cache rows that an engine's steps read at first; longer texts need more
_CHUNK = 256  # most tokens of a step before a tested text length
_POSITIONS = 4  # most positions of a step whose logits are kept
_LOGITS = 1 << 24  # logits of a text in a step, at most
_ALL = 384 << 10  # bytes of logits, up to which all logits are kept
_HIGH, _COLUMNS = 64, 256  # otherwise, kept logits of a position: the highest, and those of fixed token ids
_SAMPLES = 384 << 10  # bytes of cache rows, at most
_WIDEST, _NEWEST = 64, 8  # numbers of one cache row that are kept, and number of rows
_MOST_BYTES = 960 << 10
_LEAST = 5  # least number of steps
_TIED = 1e-3  # allowed difference of rewritten and exported model, as a share of the largest logit


def record_proof(
    imported: ImportedModel, bounds: Bounds, *, steps: int | None = None, seconds: float | None = None,
    replaced: Mapping[str, bytes | bytearray] | None = None,
    watch: Callable[[ModelProto, Path, float], Watch] = lambda *_: lambda *_: None,
) -> Proof:  # fmt: skip
    """Decode with a rewritten model in ONNX Runtime, and return the proof: the results that its engine must repeat.

    Without `steps`, there are about 20. `seconds` limits the time. `replaced` are bytes to use instead of those in the
    files. `watch` takes the rewritten model in float32, the folder of its data and the value of unused cache rows. It
    returns a function to call at each step.

    Raises `UnsupportedModelError` if the model has no tokens or no logits, cannot run, or gives other logits than as
    exported; `OptionError` if the decode does not fit into memory, or takes too long; `OutputError` if temporary files
    do not fit onto the disk.
    """
    for role, io in ((Role.TOKENS, "input"), (Role.LOGITS, "output")):
        if imported.plan.tensor(role, io) is None:
            raise UnsupportedModelError(
                f"a proof records a decode of texts, but no {io} of the model has the role '{role.value}'"
            )
    with TemporaryDirectory(prefix="trt-kvcache-proof-") as name, exact_experts():
        try:
            return _Recording(imported, bounds, steps, Float32Copies(Path(name)), replaced).run(watch, seconds)
        except RunError as error:
            raise UnsupportedModelError(f"{imported.source.path}: ONNX Runtime cannot run the model: {error}") from None


def chooses_experts(model: ModelProto) -> bool:
    """Return True if a model chooses experts: rounding may decide between two nearly equal experts."""
    return any(node.op_type in ("TopK", "MoE", "QMoE") for scope in iter_scopes(model) for node in scope.node)


class _Recording:
    def __init__(
        self, imported: ImportedModel, bounds: Bounds, steps: int | None, copies: Float32Copies,
        replaced: Mapping[str, bytes | bytearray] | None,
    ) -> None:  # fmt: skip
        plan, source = imported.plan, imported.source
        self._imported, self._plan, self._bounds, self._copies = imported, plan, bounds, copies
        self._model, self._folder = copies.copy(for_cpu(imported.model)[0], source.path.parent, replaced)
        self._dtype = rounding_dtype(source.proto)
        self._limits, self._table = index_limits(imported.model, plan), token_table(plan, _SEED)
        vocabulary = min(self._limits.tokens.values(), default=2)
        rows = read_limits(plan, min(_ROWS, max(bounds.batch, _FEWEST))).batch
        pieces = _pieces(plan, bounds, rows, min(bounds.chunk, max(_LOGITS // vocabulary, 1)), steps)
        if not pieces:
            raise UnsupportedModelError(
                f"{source.path}: the caches are too short for any test step; plan with a larger --capacity"
            )
        rows = max(len(p.rows) for p in pieces)
        self._given = draw_constants(plan, rows, _SEED, length=bounds.encoder)
        count = vocabulary if self._table is None else len(self._table)
        self.decode = Decode(pieces, rows, count, _SEED, goes_on=self._table is None)

    def run(self, watch: Callable[[ModelProto, Path, float], Watch], seconds: float | None) -> Proof:
        decode, unit = self.decode, UNITS[self._dtype]
        seen = watch(self._model, self._folder, _GARBAGE[self._dtype])
        decode.wanted, rows = self._decoded(self._model, seen, seconds)
        self._tie()
        logits, others = self._decoded(with_rounding(self._model, MEASURED * unit, _SEED + 1))
        rounding: dict[str, dict[str, Share]] = {p.part: {} for p in decode.pieces}
        steps = zip(decode.pieces, decode.wanted, logits, strict=True)
        pairs = [(piece.part, LOGITS, before, after) for piece, before, after in steps]
        pairs += [(*name.partition("/")[::2], values, others[name]) for name, values in rows.items()]
        for part, name, before, after in pairs:
            for one, other in zip(before, after, strict=True):
                # A logit of NaN says nothing about rounding.
                share = Share(np.inf, np.inf) if np.isnan(one).any() else share_of(one, other)
                rounding[part][name] = rounding[part].get(name, share).most(share)
        return self._proof(rows, rounding, unit)

    def _decoded(
        self, model: ModelProto, watch: Watch = lambda *_: None, seconds: float | None = None
    ) -> tuple[list[Array], dict[str, Array]]:
        """Return logits ``[R, K, V]`` of each piece (step), and cache rows ``[R, T, W]`` by ``<part>/<past>``."""
        session, times, decode = Float32Session(model, self._folder), list[float](), self.decode

        def run(feeds: Feeds) -> Feeds:
            began = time.monotonic()
            outputs = session.run(feeds)
            times.append(time.monotonic() - began)
            return outputs

        inputs = TextInputs(self._plan, self._limits, self._given, self._table)
        runner = Rewritten(self._plan, inputs, run, garbage=_GARBAGE[self._dtype], seed=_SEED)
        runner.watch = watch
        logits, rows = list[Array](), dict[str, Array]()
        for count, values in enumerate(decode.steps(runner), 1):
            logits.append(values)
            part, took = decode.pieces[count - 1].part, sum(times)
            if seconds is not None and took > seconds and count < len(decode.pieces):
                if count < _LEAST:
                    raise OptionError(
                        f"{_LEAST} steps on the CPU take about {_LEAST * took / count:.0f} s here, more than "
                        f"{seconds:.0f}; give --proof {_LEAST} to record them anyway"
                    )
                decode.pieces = decode.pieces[:count]
            if count == len(decode.pieces) or decode.pieces[count].part != part:
                rows |= self._rows(runner, part)
            if count == len(decode.pieces):
                break
        return logits, rows

    def _rows(self, runner: Rewritten, part: str) -> dict[str, Array]:
        """Return numbers from the newest cache rows after a part, ``[R, T, W]`` by ``<part>/<past>``."""
        pieces, texts = self.decode.pieces, range(self.decode.rows)
        fewest = min(sum(p.length for p in pieces if p.part == part and text in p.rows) for text in texts)
        caches = {name: c for name, c in runner.tensors.items() if c.output is not None}
        kept = len({p.part for p in pieces}) * len(texts) * _NEWEST * len(caches)
        width, found = int(np.clip(_SAMPLES // (4 * max(kept, 1)), 1, _WIDEST)), dict[str, Array]()
        for name, cache in caches.items():
            count = min(_NEWEST, fewest, *([] if cache.update is None else [cache.update.capacity]))
            numbers = [numbers_of_cache(cache, runner.read(name, t), int(runner.ends[t]), count, width) for t in texts]
            found[f"{part}/{name}"] = np.stack(numbers)
        return found

    def _tie(self) -> None:
        """Raise `UnsupportedModelError` if the model as exported gives other logits in the first steps."""
        decode, source = self.decode, self._imported.source
        if self._plan.options.cache_dtype is not None:
            return
        first = replace(decode, pieces=tuple(p for p in decode.pieces if p.part == decode.pieces[0].part))
        try:
            exported = Exported(source, self._plan, self._given, self._table, last=_POSITIONS, copies=self._copies)
            found = compare(first, first.steps(exported), _TIED)
        except UnsupportedModelError:  # the exported model cannot decode so; the check has already compared its parts
            return
        if not found.passed and all(np.isfinite(w).all() for w in decode.wanted):
            raise UnsupportedModelError(
                f"{source.path}: the rewritten model does not give the logits of the model as exported: they differ "
                f"by {found.largest:.2g} in step {found.piece + 1}; run 'verify' for details"
            )

    def _proof(self, rows: Mapping[str, Array], rounding: dict[str, dict[str, Share]], unit: float) -> Proof:
        decode, kind, arrays = self.decode, self._plan.options.cache_dtype, dict[str, Array]()
        whole = {t.name for t in self._plan.tensors if t.io == "input" and "int" in t.dtype}
        coded = {n for own in rounding.values() for n in own if kind is not None or n in whole}
        shares = allowed(rounding, unit, decode.rows, coded - {LOGITS}, kind)
        note = ""
        if any(np.isnan(v).any() for v in decode.wanted):
            note = "some logits of the model are NaN, so its proof does not compare the logits of these parts"
        elif not any(LOGITS in own for own in shares.values()):
            least = min(own[LOGITS].typical for own in rounding.values())
            note = (
                "rounding alone decides the logits of this model: a relative change of its numbers by at most "
                f"{MEASURED * unit:.2g} changes the logits by {least:.2g} of their size; so its proof compares only "
                "cache rows"
            )
        vocabulary = decode.wanted[0].shape[-1]
        some = sum(v.size for v in decode.wanted) * 4 > _ALL and vocabulary > _HIGH + _COLUMNS
        for at, (tokens, values) in enumerate(zip(decode.tokens, decode.wanted, strict=True)):
            arrays[f"{at}/tokens"] = tokens.astype(np.int32)
            if some:
                columns = arrays[f"{at}/columns"] = _columns(values)
                values = np.take_along_axis(values, columns, -1)
            arrays[f"{at}/logits"] = values.astype(np.float32)
        arrays |= {n: v for n, v in rows.items() if n.split("/", 1)[1] in shares[n.split("/", 1)[0]]}
        if (size := sum(array.nbytes for array in arrays.values())) > _MOST_BYTES:
            raise OptionError(
                f"a proof of {len(decode.pieces)} steps takes {size / 1e6:.1f} MB, but at most "
                f"{_MOST_BYTES / 1e6:.1f} MB are allowed; give fewer steps"
            )
        facts = Facts(
            recorded_on=Rewritten.name, dtype=self._dtype, vocab=vocabulary, seed=_SEED, garbage=_GARBAGE[self._dtype],
            encoder=self._bounds.encoder, pieces=decode.pieces, chooses=chooses_experts(self._imported.source.proto),
            digest=draws_digest(_SEED), allowed=shares, uneven=uneven(rounding), note=note,
        )  # fmt: skip
        return Proof(facts, {name: np.ascontiguousarray(array) for name, array in arrays.items()})


def _pieces(plan: CachePlan, bounds: Bounds, rows: int, chunk: int, steps: int | None) -> tuple[Piece, ...]:
    limits = read_limits(plan, rows)
    filled = (limits.length or 1) - 1  # a session's last step must fit with its padding
    ends = [n for n in (limits.linear and limits.linear - filled, bounds.positions) if n is not None]
    limits = replace(limits, longest=min(limits.longest, chunk), linear=min(ends, default=None))
    bound = min((c for c in (limits.linear, *limits.circular) if c is not None), default=0)
    places = {_SETTLED: "decode"} | ({_SPAN: "span"} if bound > _SPAN and limits.length is None else {})
    places = {place: name for place, name in places.items() if limits.linear is None or place < limits.linear}
    kept = min(bounds.logits or _POSITIONS, _POSITIONS)

    def planned(tokens: int) -> tuple[Piece, ...]:
        drawn = plan.options.cache_dtype is None
        found = plan_pieces(limits, plan, _PROMPT, tokens, places=places, chunk=_CHUNK, far=True, drawn=drawn)
        return tuple(replace(p, kept=min(p.length, kept)) for p in found)

    found = planned(0)
    return found if steps is None else planned(max(steps - len(found), 0))[:steps]


def _columns(logits: Array) -> Array:
    """Return the token ids ``[R, K, C]`` whose logits a proof keeps: those of the highest logits, and fixed ids."""
    vocab = logits.shape[-1]
    high = np.argpartition(logits, -_HIGH, axis=-1)[..., -_HIGH:]
    fixed = np.arange(_COLUMNS) * vocab // _COLUMNS + np.arange(_COLUMNS) % max(vocab // _COLUMNS, 1)
    return np.concatenate([high, np.broadcast_to(fixed, (*high.shape[:-1], _COLUMNS))], -1).astype(np.int32)
