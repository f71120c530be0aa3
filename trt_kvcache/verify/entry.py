"""The verification that a model gets, and the models that each side runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.extensions import define, for_cpu, unstacked
from trt_kvcache.importer.planning.experts import exact_experts
from trt_kvcache.importer.steps.element_types import has_bfloat16
from trt_kvcache.importer.steps.runnable import with_exact_products
from trt_kvcache.importer.steps.sessions import RunError
from trt_kvcache.machine import bounded_memory
from trt_kvcache.verify.decode import Verification
from trt_kvcache.verify.divergence import measure_divergence
from trt_kvcache.verify.inline import moved_out
from trt_kvcache.verify.report import Divergence, VerifyOptions, VerifyReport
from trt_kvcache.verify.rounding import Side, judge_rounding
from trt_kvcache.verify.runnable import check_runnable
from trt_kvcache.verify.twin import TwinFolder

_DEFAULTS = VerifyOptions()


def verify_import(
    imported: ImportedModel, verify: VerifyOptions = _DEFAULTS, folder: Path | None = None
) -> VerifyReport:
    """Verifies a model that has been imported already; see `trt_kvcache.verify.verify_model`.

    Args:
        imported: both models.
        verify: what to run.
        folder: of the rewritten model's external data, if it is a file of its own.
    """
    with _within_memory(imported):
        return _verify(imported, verify, folder)


def verify_quantized(
    imported: ImportedModel, quantized: ImportedModel, verify: VerifyOptions = _DEFAULTS, folder: Path | None = None
) -> VerifyReport:
    """Verifies a model, and then the same model with quantized caches against it.

    Args:
        imported: the model as exported, and rewritten with its own caches.
        quantized: the same, rewritten with quantized caches.
        verify: what to run.
        folder: of the external data of the model with quantized caches, if it is a file of its own.
    """
    report = verify_import(imported, verify)
    if not report.passed:
        return report
    with _within_memory(imported):
        try:
            divergence = _diverge(imported, quantized, verify, folder, twin=report.float32_twin)
        except RunError as error:
            return replace(report, passed=False, failure=f"the model with quantized caches cannot be run: {error}")
    failure = None if divergence.passed else f"quantized caches change too much: {divergence}"
    return replace(report, passed=divergence.passed, failure=failure, divergence=divergence)


@contextmanager
def _within_memory(imported: ImportedModel) -> Iterator[None]:
    """Runs a verification in the memory that is free, of files that stay as they are."""
    try:
        with bounded_memory():
            yield
        imported.source.check_unchanged()
    except MemoryError:
        raise UnsupportedModelError(
            f"{imported.source.path}: needs more memory than is free; verify it on a larger machine"
        ) from None


def _diverge(
    imported: ImportedModel, quantized: ImportedModel, verify: VerifyOptions, folder: Path | None, *, twin: bool
) -> Divergence:
    source = imported.source
    verification = Verification(imported, verify, source.proto, imported.model, source.path.parent, twin=twin)
    # The model with its own caches is the original now, in the interface that both have.
    plan = replace(quantized.plan, original=(), stacks=())
    pair = ImportedModel(replace(source, proto=imported.model), plan, quantized.model)
    with (
        moved_out(pair) if folder is None else nullcontext((pair, source.path.parent)) as (pair, left),
        _both_sides(pair, left, folder or left) as (exact, other, twin, _),
        exact_experts(),
    ):
        return measure_divergence(verification, (imported.plan, quantized.plan), (exact, other), twin=twin)


def _verify(imported: ImportedModel, verify: VerifyOptions, folder: Path | None) -> VerifyReport:
    source, twin = imported.source, has_bfloat16(imported.source.proto) or has_bfloat16(imported.model)
    # A model that does not fit into memory is refused here, before weights are written anywhere.
    Verification(imported, verify, source.proto, imported.model, source.path.parent, twin=twin)
    source_folder = source.path.parent
    del source
    with (
        moved_out(imported) if folder is None else nullcontext((imported, source_folder)) as (imported, left),
        _both_sides(imported, left, folder or left) as (original, rewritten, twin, notes),
        exact_experts(),
    ):

        def run(left: Side, right: Side, *, anywhere: bool = False, empty: bool = False) -> VerifyReport:
            folders = left[1], right[1]
            verification = Verification(imported, verify, left[0], right[0], folders, twin=twin, empty=empty)
            verification.anywhere = anywhere
            verification.notes += notes
            return verification.run()

        report = run(original, rewritten)
        if twin or verify.tolerance is not None or report.passed:
            return report
        if original[1] != rewritten[1]:
            note = "rounding was not judged, which needs both models in one folder: their weights are moved together"
            return replace(report, notes=(*report.notes, note))
        return judge_rounding(report, run, original, rewritten)


@contextmanager
def _both_sides(imported: ImportedModel, left: Path, right: Path) -> Iterator[tuple[Side, Side, bool, list[str]]]:
    """Original and rewritten model, whether they are float32 twins, and notes; `left`, `right`: of external data."""
    original, notes = for_cpu(with_exact_products(define(unstacked(imported.source.proto, imported.plan))))
    rewritten, _ = for_cpu(imported.model)
    check_runnable(rewritten)
    if not has_bfloat16(original) and not has_bfloat16(rewritten):
        yield (original, left), (rewritten, right), False, notes
        return
    with TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
        twins = TwinFolder(Path(name), left)
        others = twins
        if left != right:
            (Path(name) / "rewritten").mkdir()
            others = TwinFolder(Path(name) / "rewritten", right)
        yield (twins.twin(original), twins.folder), (others.twin(rewritten), others.folder), True, notes
