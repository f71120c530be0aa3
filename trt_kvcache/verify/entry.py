"""Which verification a model gets, and the models that each side runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.extensions import apart, define, for_cpu
from trt_kvcache.importer.planning.experts import exact_experts
from trt_kvcache.importer.steps.runnable import with_exact_products
from trt_kvcache.machine import bounded_memory
from trt_kvcache.verify.decode import Verification
from trt_kvcache.verify.inline import moved_out
from trt_kvcache.verify.report import VerifyOptions, VerifyReport
from trt_kvcache.verify.rounding import Side, judge_rounding
from trt_kvcache.verify.runnable import check_runnable
from trt_kvcache.verify.twin import TwinFolder, has_bfloat16

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
    try:
        with bounded_memory():
            report = _verify(imported, verify, folder)
        imported.source.check_unchanged()
        return report
    except MemoryError:
        raise UnsupportedModelError(
            f"{imported.source.path}: needs more memory than is free; verify it on a larger machine"
        ) from None


def _verify(imported: ImportedModel, verify: VerifyOptions, folder: Path | None) -> VerifyReport:
    source, twin = imported.source, has_bfloat16(imported.source.proto) or has_bfloat16(imported.model)
    # What does not fit into memory is refused here, before weights are written anywhere.
    Verification(imported, verify, source.proto, imported.model, source.path.parent, twin=twin)
    source_folder = source.path.parent
    del source
    with (
        moved_out(imported) if folder is None else nullcontext((imported, source_folder)) as (imported, left),
        _both_sides(imported, left, folder or left) as (original, rewritten, twin, notes),
        exact_experts(),
    ):

        def run(left: Side, right: Side, anywhere: bool) -> VerifyReport:
            verification = Verification(imported, verify, left[0], right[0], (left[1], right[1]), twin=twin)
            verification.anywhere = anywhere
            verification.notes += notes
            return verification.run()

        report = run(original, rewritten, False)
        if twin or verify.tolerance is not None or report.passed:
            return report
        if original[1] != rewritten[1]:
            note = "rounding was not judged, which needs both models in one folder: their weights are moved together"
            return replace(report, notes=(*report.notes, note))
        return judge_rounding(report, run, original, rewritten)


@contextmanager
def _both_sides(imported: ImportedModel, left: Path, right: Path) -> Iterator[tuple[Side, Side, bool, list[str]]]:
    """Original and rewritten model, whether they are float32 twins, and notes; `left`, `right`: of external data."""
    original, notes = for_cpu(with_exact_products(define(apart(imported.source.proto, imported.plan))))
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
