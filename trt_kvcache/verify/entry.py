"""Which verification a model gets, and the models that each side runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.analysis.experts import exact_experts
from trt_kvcache.importer.check.runnable import (
    check_runnable,
    with_exact_products,
    with_packed_function,
    with_plugin_functions,
)
from trt_kvcache.importer.extensions import for_cpu
from trt_kvcache.verify.decode import Verification
from trt_kvcache.verify.inline import moved_out
from trt_kvcache.verify.normalized import NormalizedVerification
from trt_kvcache.verify.report import VerifyOptions, VerifyReport
from trt_kvcache.verify.rounding import Side, judge_rounding
from trt_kvcache.verify.twin import TwinFolder, has_bfloat16

_DEFAULTS = VerifyOptions()


def verify_import(imported: ImportedModel, verify: VerifyOptions = _DEFAULTS) -> VerifyReport:
    """Verifies a model that has been imported already; see `trt_kvcache.verify.verify_model`."""
    if imported.model is imported.source.proto:
        raise UnsupportedModelError(
            f"{imported.source.path}: a rewritten model, and verification compares one with its original; verify the "
            "model that it was made from, with the same options"
        )
    kind = NormalizedVerification if imported.plan.original else Verification
    source, twin = imported.source, has_bfloat16(imported.source.proto) or has_bfloat16(imported.model)
    # What does not fit into memory is refused here, before weights are written anywhere.
    kind(imported, verify, source.proto, imported.model, source.path.parent, twin=twin)
    del source
    with (
        moved_out(imported) as (imported, folder),
        _both_sides(imported, folder) as (original, rewritten, twin, notes),
        exact_experts(),
    ):

        def run(left: Side, right: Side, anywhere: bool) -> VerifyReport:
            verification = kind(imported, verify, left[0], right[0], (left[1], right[1]), twin=twin)
            verification.anywhere = anywhere
            verification.notes += notes
            return verification.run()

        report = run(original, rewritten, False)
        return report if twin or verify.tolerance is not None else judge_rounding(report, run, original, rewritten)


@contextmanager
def _both_sides(imported: ImportedModel, folder: Path) -> Iterator[tuple[Side, Side, bool, list[str]]]:
    """Original and rewritten model, whether they are float32 twins, and notes; `folder`: of their external data."""
    original = with_plugin_functions(with_packed_function(imported.source.proto))
    original, notes = for_cpu(with_exact_products(original))
    rewritten, _ = for_cpu(imported.model)
    check_runnable(rewritten)
    if not has_bfloat16(original) and not has_bfloat16(rewritten):
        yield (original, folder), (rewritten, folder), False, notes
        return
    with TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
        twins = TwinFolder(Path(name), folder)
        yield (twins.twin(original), twins.folder), (twins.twin(rewritten), twins.folder), True, notes
