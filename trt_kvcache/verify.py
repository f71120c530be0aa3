"""Verifies a rewrite: decodes the same texts at several stations (forms of the model with a runtime), compares logits.

    model as exported -> rewritten model -> its caches quantized -> the session on the CPU
                                         -> the network that TensorRT parsed

The model as exported decodes with its own caches and chooses the tokens; all other stations decode the same texts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import tee
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from onnx import ModelProto

from trt_kvcache.arguments import as_options
from trt_kvcache.compare.decode import Decode, Difference, Runner, compare, plan_pieces
from trt_kvcache.compare.differences import GARBAGE, first_layer, share_between, with_inner_outputs
from trt_kvcache.compare.exported_model import Exported, ring_rows
from trt_kvcache.compare.float32_copy import NARROW, Float32Copies
from trt_kvcache.compare.network_comparison import LIMIT
from trt_kvcache.compare.proof_recording import chooses_experts
from trt_kvcache.compare.quantized import with_numbers, with_quantized_rows
from trt_kvcache.compare.rewritten_model import Float32Session, Rewritten, output_of
from trt_kvcache.compare.rounding import UNITS, rounding_dtype, with_rounding
from trt_kvcache.compare.text_inputs import TextInputs, check_values, load_inputs, token_table
from trt_kvcache.compare.verify_report import STATIONS, Quality, Station, VerifyOptions, VerifyReport
from trt_kvcache.cpu import RunError
from trt_kvcache.errors import OptionError, TrtKvCacheError, UnsupportedModelError
from trt_kvcache.importer import ImportedModel, import_model, quantize_caches
from trt_kvcache.importer.cache_plan import CachePlan, OriginalRole, PlanOptions, Role
from trt_kvcache.importer.check import check_same_interface
from trt_kvcache.importer.families import for_cpu
from trt_kvcache.importer.files.source import SourceModel, load_source
from trt_kvcache.importer.interface import IndexLimits, index_limits
from trt_kvcache.importer.plan_options import recorded_options
from trt_kvcache.importer.protos import Array, byte_size, iter_scopes, iter_tensors
from trt_kvcache.importer.steps.drawn_inputs import draw_constants, read_limits
from trt_kvcache.importer.steps.runnable import all_types, rounds
from trt_kvcache.importer.steps.sessions import exact_experts
from trt_kvcache.machine import bounded_memory
from trt_kvcache.progress import phase

__all__ = ["VerifyOptions", "VerifyReport", "verify_import", "verify_model"]


_PLAN = PlanOptions()
_VERIFY = VerifyOptions()
_CAPACITY = 96  # capacity, in tokens, of caches that grow: short enough that a decode reaches their end
_WIDE = 2.0**-20  # relative rounding error that is measured for float32 models: 16 times that of float32
_FLOOR = 5e-5  # least allowed difference between two computations in float32 (Gemma 3 270M: 2.5e-5)
_FLOORS = {"float32": _FLOOR, "float16": 1e-3, "bfloat16": 4e-3}
"""Least allowed differences by type of the model: a rewrite rounds a constant, such as a scale, to that type."""
_TIMES = 5.0  # allowed difference of a station, as a multiple of the effect of rounding
_UNITS = 16.0  # least allowed difference, in units of rounding
_SHOWS = 0.3  # share of the logits; a larger allowed difference could not show a fault
# share of positions that may differ if the model chooses experts: rounding decides between nearly equal experts
_CHOSEN = 0.25
_SMALLER = (GARBAGE, 100.0, 1.0)  # magnitudes of garbage, tried from the largest on until the exported model hides it
# pieces that TensorRT's network runs: NumPy takes seconds for one piece of a large model
_NETWORK, _LARGE_NETWORK = 6, 4
_LARGE = 100 << 20  # bytes of weights from which a model counts as large: each run reads all of them
_LAYER = 1e-4  # allowed difference of a tensor inside a model, as a share of its largest number
_ROUNDED_ROWS = "the rewritten model with rounded rows"
_LAST = 4  # last positions of a step whose logits are compared


def verify_model(
    model: str | os.PathLike[str],
    options: PlanOptions = _PLAN,
    verify: VerifyOptions = _VERIFY,
    rewritten: str | os.PathLike[str] | None = None,
) -> VerifyReport:
    """Decode the same texts with several forms of the model (stations), and report how far the logits are apart.

    The model as exported decodes each text alone in ONNX Runtime, in float32: each present output becomes the past
    input of the next step, unchanged. The texts continue greedily. Then other stations decode the same tokens:

    - ``rewritten``: the rewritten model in float32, with the texts at different positions in one batch. Steps read just
      the cache rows in use, a few more, or all. All cache rows without a token hold garbage (large numbers);
    - ``quantized``: with `PlanOptions.cache_dtype`, the model with quantized caches, against a rewritten model in which
      standard operators round the cache rows in the same way;
    - ``session``: the model that `DecodeSession` runs on the CPU, in the model's own types, with fusions;
    - ``network``: the network that TensorRT's parser made, in NumPy, against the rewritten model.

    The allowed difference of two stations follows from rounding alone, which is measured on the model as exported.

    Args:
        model: path of an ONNX decoder with caches.
        options: options of the plan. Without a capacity, growing caches get a small one, which the texts fill.
        verify: options of the verification.
        rewritten: a file that `rewrite_model` wrote, compared with `model` instead of a new rewrite. The model is
            planned again, with the options that the file records.

    Returns:
        The report, even if the verification failed; `VerifyReport.check` raises an error then.

    Raises:
        ModelError: the model cannot be planned, or ONNX Runtime cannot run it; or `rewritten` records no options, or
            its inputs or outputs differ from those of a rewrite of `model`.
        OptionError: an option does not fit the model, or an input's values cannot be guessed.
        OutputError: temporary files do not fit onto the disk.
    """
    verify = as_options(verify, VerifyOptions, "verify")
    options = as_options(options, PlanOptions, "options")
    if rewritten is None:
        try:
            small = replace(options, capacity=_CAPACITY) if options.capacity is None else options
            imported = import_model(model, small.unquantized(), thorough=verify.thorough)
        except OptionError:
            if options.capacity is not None:
                raise
            imported = import_model(model, options.unquantized(), thorough=verify.thorough)
        return _verify(imported, options, verify)
    if verify.thorough:
        raise OptionError("thorough=True compares a fresh rewrite of the model, so leave either it or --rewritten out")
    file = load_source(rewritten)
    options = recorded_options(file.proto, options, file.path)
    return _verify(import_model(model, options.unquantized()), options, verify, file)


def _verify(
    imported: ImportedModel, options: PlanOptions, verify: VerifyOptions, file: SourceModel | None = None
) -> VerifyReport:
    options = replace(options, capacity=imported.plan.options.capacity)
    asked = quantize_caches(replace(imported, plan=replace(imported.plan, options=options)))
    folder = None
    if file is not None:
        check_same_interface(file.proto, asked.model, file.path, imported.source.path)
        asked = replace(asked, model=file.proto)
        folder = file.path.parent if file.external_files else None
        if options.cache_dtype is None:
            imported = asked
    quantized = asked if options.cache_dtype is not None else None
    return verify_import(imported, verify, quantized, folder, written=file is not None)


def verify_import(
    imported: ImportedModel, verify: VerifyOptions = _VERIFY, quantized: ImportedModel | None = None,
    folder: Path | None = None, *, written: bool = False,
) -> VerifyReport:  # fmt: skip
    """Verify a model that is already planned and rewritten; see `verify_model`.

    `quantized` is the same model with quantized caches. `folder` has the rewritten model's external data; None: the
    original's folder has them. If `written`, the rewritten model is a file: `session` and `network` do not run.
    """
    try:
        with bounded_memory(), exact_experts(), TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
            report = _Verification(imported, verify, quantized, folder, Float32Copies(Path(name)), written).run()
        imported.source.check_unchanged()
        return report
    except MemoryError:
        raise UnsupportedModelError(
            f"{imported.source.path}: the comparison needs more memory than is free; verify the model on a larger "
            "machine"
        ) from None
    except ValueError as error:  # NumPy raises it if sizes do not fit
        raise UnsupportedModelError(
            f"{imported.source.path}: an input or output has axes that verify does not know ({error})"
        ) from error


@dataclass
class _Verification:
    """One verification: the model as exported decodes texts, and other forms of the model are compared with it."""

    imported: ImportedModel
    verify: VerifyOptions
    quantized: ImportedModel | None
    folder: Path | None
    copies: Float32Copies
    written: bool
    notes: list[str] = field(default_factory=list)
    quality: Quality | None = None
    garbage: float = GARBAGE
    title: str = ""

    def run(self) -> VerifyReport:
        plan = self.imported.plan
        if not any(cache.carried for cache in plan.caches):
            why = f"is passed from step to step ({plan.caches[0].reason})" if plan.caches else "is updated"
            raise OptionError(f"no cache of the model {why}: there is no decode with caches to verify")
        reference = self._exported()
        if any(rounds(node) for scope in iter_scopes(self.imported.source.proto) for node in scope.node):
            self.notes.append(
                "the model as exported ran with activations of float32: ONNX Runtime rounds them to 8 bits "
                "(accuracy_level of MatMulNBits, experts in QMoE), and neither the rewritten model nor an engine does"
            )
        asked = self.verify.station or [n for n in STATIONS if n != "quantized" or self.quantized is not None]
        wanted = [name for name in STATIONS if name in asked]
        self.title = f"station 1 of {len(wanted) + 1}: exported"
        self.decode.wanted = [*self._counted(self.decode.steps(reference))]
        self.garbage = self._hidden(reference)
        stations = []
        for number, name in enumerate(wanted, 2):
            self.title = f"station {number} of {len(wanted) + 1}: {name}"
            stations.append(self._run(name))
        return VerifyReport(
            str(self.imported.source.path), all(s.passed for s in stations), self.decode.rows,
            sum(p.length * len(p.rows) for p in self.decode.pieces), plan.options.capacity, reference.name,
            tuple(stations), tuple(self.notes), self.quality,
        )  # fmt: skip

    def _run(self, name: str) -> Station:
        """Compare one form of the model. If it cannot run on this machine, note why, and count the form as passed."""
        run: Callable[[], Station] = getattr(self, f"_{name}")
        try:
            return run()
        except (RunError, TrtKvCacheError) as error:
            if name == "rewritten":
                raise UnsupportedModelError(f"{self.imported.source.path}: the rewritten model: {error}") from None
            return _not_compared(name, str(error))

    # --- the decode, and its inputs

    @cached_property
    def decode(self) -> Decode:
        plan, imported = self.imported.plan, self.imported
        limits = read_limits(plan, self.verify.batch)
        ends = [limits.linear, *ring_rows(imported.source, plan), *self.limits.positions.values()]
        limits = replace(limits, linear=min((n for n in ends if n is not None), default=None))
        pieces = plan_pieces(limits, plan, self.verify.chunks, self.verify.tokens, full=not self.large)
        if not pieces:
            raise OptionError("the caches of this model are too small for any of these steps; give shorter --chunks")
        tokens = plan.tensor(Role.TOKENS)
        has_ids = tokens is not None and not tokens.embedded
        rows = 2 if self.table is None else len(self.table)
        vocabulary = min(self.limits.tokens.values(), default=2) if has_ids else rows
        goes_on = has_ids and plan.tensor(Role.LOGITS, "output") is not None
        return Decode(pieces, limits.batch, vocabulary, self.verify.seed, goes_on=goes_on)

    @cached_property
    def dtype(self) -> str:
        """Narrowest floating-point type in which the model as exported computes."""
        return rounding_dtype(self.imported.source.proto)

    @cached_property
    def large(self) -> bool:
        """True if the model's weights are so large that each run takes long."""
        return sum(byte_size(t) or 0 for t in iter_tensors(self.imported.source.proto)) > _LARGE

    @cached_property
    def limits(self) -> IndexLimits:
        return index_limits(self.imported.model, self.imported.plan)

    @cached_property
    def table(self) -> Array | None:
        """Embeddings of token ids, for a model that takes embeddings; None for other models."""
        return token_table(self.imported.plan, self.verify.seed)

    @cached_property
    def given(self) -> dict[str, Array]:
        """Values of the inputs that do not follow from the tokens, the same for all compared models."""
        plan, values = self.imported.plan, load_inputs(self.verify.inputs)
        check_values(values, plan)
        return draw_constants(plan, read_limits(plan, self.verify.batch).batch, self.verify.seed) | values

    def _hidden(self, reference: Exported) -> float:
        """Return the largest number that may fill unused cache rows without an effect on the model as exported."""
        original = self.imported.plan.original
        if original and not any(t.role is OriginalRole.FIXED_CACHE for t in original):
            return GARBAGE  # caches that grow have no rows without a token
        first = replace(self.decode, pieces=self.decode.pieces[:2])
        for garbage in _SMALLER:
            reference.garbage = garbage
            if compare(first, first.steps(reference), _FLOOR).passed:
                return garbage
        self.notes.append(
            "the model as exported reads cache rows that were never written, so these rows are not filled with garbage"
        )
        return 0.0

    def _counted(self, steps: Iterator[Array], title: str = "") -> Iterator[Array]:
        with phase(title or self.title, len(self.decode.pieces)) as advance:
            for logits in steps:
                advance()
                yield logits

    # --- models in float32

    @cached_property
    def wide(self) -> tuple[ModelProto, Path]:
        """The rewritten model in float32, and the folder of its external data."""
        return self._widened(self.imported.model, self.folder)

    def _widened(self, model: ModelProto, folder: Path | None = None) -> tuple[ModelProto, Path]:
        types = all_types(self.imported.source.proto) & {*NARROW}
        model, notes = for_cpu(model)
        self.notes += [note for note in notes if note not in self.notes]
        return self.copies.copy(model, folder or self.imported.source.path.parent, types=types)

    def _exported(self, edit: Callable[[ModelProto], ModelProto] = lambda model: model) -> Exported:
        return Exported(
            self.imported.source, self.imported.plan, self.given, self.table, self.verify.seed, last=_LAST, edit=edit,
            copies=self.copies,
        )  # fmt: skip

    def _rewritten_runner(self, plan: CachePlan, model: ModelProto, folder: Path) -> Rewritten:
        inputs = TextInputs(
            plan, self.limits, self.given, self.table, seed=self.verify.seed,
            rings=bool(ring_rows(self.imported.source, self.imported.plan)),
        )  # fmt: skip
        return Rewritten(plan, inputs, Float32Session(model, folder).run, garbage=self.garbage)

    # --- stations

    def _rewritten(self) -> Station:
        runner = self._rewritten_runner(self.imported.plan, *self.wide)
        return self._compared(
            "rewritten", runner, self.decode, _FLOORS[self.dtype], _WIDE, "the model as exported", self._first_layer
        )

    def _first_layer(self, found: Difference) -> str:
        """Name, for a message, the first layer whose results differ where the logits differ (`found`); or ""."""
        model, folder = self.wide
        names = {name for node in model.graph.node for name in node.output}
        wanted, had = dict[str, Array](), dict[str, Array]()
        try:
            reference = self._exported(lambda original: with_inner_outputs(original, names))
            reference.watch = lambda _, outputs: wanted.update(outputs)
            # Presents are left out: the garbage in unused cache rows differs between the models.
            inside = names.intersection(reference.outputs).difference(c.present for c in self.imported.plan.caches)
            runner = self._rewritten_runner(self.imported.plan, with_inner_outputs(model, inside), folder)
            runner.watch = lambda _, outputs: had.update(outputs)
            reference.start(self.decode.rows)
            runner.start(self.decode.rows)
            pieces = self.decode.pieces[: found.piece + 1]
            for piece, tokens in zip(pieces, self.decode.tokens, strict=False):
                runner.step(piece, tokens)
                if found.row in piece.rows:
                    at = piece.rows.index(found.row)
                    reference.step(replace(piece, rows=(found.row,)), tokens[at : at + 1])
        except (RunError, TrtKvCacheError, MemoryError):
            return ""  # the tensors inside a model may be larger than the model itself
        place, allowed = (pieces[-1].rows.index(found.row), len(pieces[-1].rows)), max(_LAYER, found.allowed)
        differs = {
            name: share_between(*pair) > allowed
            for name in sorted(inside)
            if (pair := _of_text(wanted[name], reference.batch, had[name], place)) is not None
        }
        return f"; {text}" if (text := first_layer(model.graph.node, differs, [output_of(self.imported.plan)])) else ""

    @cached_property
    def rounded(self) -> Decode:
        """Results of the rewritten model on the same texts, with cache rows rounded as in quantized caches."""
        assert self.quantized is not None
        model, folder = self.wide
        rounding = with_quantized_rows(model, self.imported.plan, self.quantized.plan.options)
        runner = self._rewritten_runner(self.imported.plan, rounding, folder)
        return replace(self.decode, wanted=[*self.decode.steps(runner)])

    @cached_property
    def moved(self) -> Difference:
        """Difference between the logits of the rewritten model with rounding (`rounded`) and without."""
        return compare(self.decode, self.rounded.wanted, np.inf)

    def _quantized(self) -> Station:
        if self.quantized is None:
            return _not_compared("quantized", "caches are not quantized (--cache-dtype)")
        kind, decode, moved = self.quantized.plan.options.cache_dtype, self.rounded, self.moved
        assert kind is not None
        count = sum(w.shape[1] * len(p.rows) for p, w in zip(decode.pieces, decode.wanted, strict=True))
        self.quality = Quality(kind.value, count, moved.agreement, moved.typical, moved.largest)
        plan, numbers = with_numbers(self.quantized.plan, self.quantized.model)
        runner = self._rewritten_runner(plan, *self._widened(numbers, self.folder))
        station = self._compared("quantized", runner, decode, _FLOOR, _WIDE, _ROUNDED_ROWS)
        if station.passed or station.difference is None:
            return station
        # A number halfway between two codes may become either one: few positions change, and only a little.
        found = compare(decode, decode.steps(runner), _FLOOR, stop=False)
        if found.typical <= 10 * _FLOOR and found.largest <= moved.largest:
            return replace(station, passed=True, failure="", allowed=moved.largest,
                           note="some numbers lie between two codes, and rounding decides between them")  # fmt: skip
        return station

    def _session(self) -> Station:
        from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
        from trt_kvcache.runtime.replay import SessionSteps

        if self.written:
            return _not_compared("session", "a session rewrites a model itself, and does not run a rewritten file")
        options = (self.quantized or self.imported).plan.options
        chunk = max(p.length for p in self.decode.pieces)
        runner = OnnxRuntimeRunner(self.imported.source.path, options, max_batch=self.decode.rows, max_chunk=chunk)
        try:
            half = self.dtype == "float16"  # bfloat16 runs in float32
            floor, unit = (_UNITS * UNITS["float16"], 2 * UNITS["float16"]) if half else (_FLOORS[self.dtype], _WIDE)
            session, decode = SessionSteps(runner, self.given, self.table), self.decode
            against = "the model as exported"
            if self.quantized is not None:  # a number halfway between two codes may become either one
                floor, decode, against = max(floor, self.moved.largest), self.rounded, _ROUNDED_ROWS
            return self._compared("session", session, decode, floor, unit, against)
        finally:
            runner.close()

    def _network(self) -> Station:
        from trt_kvcache.engine.parsing import compare_parsed

        if self.written:
            return _not_compared("network", "TensorRT builds from a model, and not from a rewritten file")
        with phase(self.title):
            texts = self.decode.tokens[: _LARGE_NETWORK if self.large else _NETWORK]
            pieces, imported = self.decode.pieces[: len(texts)], self.quantized or self.imported
            here, there = (all_types(m) & {*NARROW} for m in (imported.model, imported.source.proto))
            shares = self.quantized is None and bool(here) and here == there  # a model in float32 has no copy
            title, result = compare_parsed(
                imported, pieces, texts, self.garbage, self.verify.seed, self.wide if shares else None
            )
        if result.note:
            return _not_compared("network", result.note)
        return Station(
            "network", f"the network of {title}, NumPy", "the rewritten model", result.steps,
            _finite(result.difference), LIMIT, passed=not result.finding, failure=result.finding,
        )  # fmt: skip

    def _compared(
        self, name: str, runner: Runner, decode: Decode, floor: float, unit: float, against: str,
        where: Callable[[Difference], str] = lambda _: "",
    ) -> Station:  # fmt: skip
        """Compare a form of the model with the logits in `decode`. Measure rounding only if `floor` is exceeded."""
        given, outliers = self.verify.tolerance, _CHOSEN if chooses_experts(self.imported.source.proto) else 0.0
        results, again = tee(self._counted(decode.steps(runner)))

        def compared(results: Iterator[Array], allowed: float) -> tuple[Difference, bool]:
            found = compare(decode, results, allowed, stop=not outliers)
            chosen = outliers > 0 and found.beyond <= outliers and bool(np.isfinite(found.largest))
            return found, found.passed or chosen

        found, passed = compared(results, floor if given is None else given)
        note = ""
        if given is None and not passed:
            rounded = self._exported(lambda model: with_rounding(model, unit, self.verify.seed + 1))
            steps = self._counted(self.decode.steps(rounded), "what rounding makes")
            allowed = max(floor, _TIMES * compare(self.decode, steps, np.inf).largest)
            if allowed > _SHOWS:
                note = (
                    f"rounding alone moves logits by {allowed / _TIMES:.2g} of their size, so this comparison "
                    "cannot show a small fault"
                )
            found, passed = compared(again, allowed)
        return Station(
            name, runner.name, against, found.pieces, _finite(found.largest), found.allowed, found.agreement, passed,
            "" if passed else self._where(found) + where(found), note,
        )  # fmt: skip

    def _where(self, found: Difference) -> str:
        piece = self.decode.pieces[found.piece]
        by = "are not finite, or of another size" if np.isinf(found.largest) else f"differ by {found.largest:.2g}"
        return (
            f"logits {by} (allowed: {found.allowed:.2g} of the largest) at token {found.position} of text {found.row}, "
            f"in step {found.piece + 1} of {len(self.decode.pieces)} ({piece.length} tokens of {len(piece.rows)} "
            f"texts, {piece.span} span)"
        )


def _not_compared(station: str, why: str) -> Station:
    return Station(station, note=f"not compared: {why}")


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _of_text(values: Array, batch: int, others: Array, place: tuple[int, int]) -> tuple[Array, Array] | None:
    """Return one sequence's values from a tensor in two models; None if the two arrays cannot be compared.

    `values` holds `batch` copies of the sequence. `others` holds several sequences; `place` is (index of this
    sequence in `others`, number of sequences in `others`).
    """
    at, rows = place
    if values.dtype.kind != "f" or others.dtype.kind != "f" or not values.ndim or values.ndim != others.ndim:
        return None
    if len(values) % batch == 0 and len(others) % rows == 0:  # [rows, ...], or [rows * tokens, ...]
        one, other = values[: len(values) // batch], np.array_split(others, rows)[at]
        if one.size and one.shape == other.shape:
            return one, other
    return (values, others) if values.size and values.shape == others.shape else None
