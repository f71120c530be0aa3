"""Which verification a model gets, and the models that each side runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from onnx import ModelProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.verify.decode import Verification
from trt_kvcache.verify.normalized import NormalizedVerification
from trt_kvcache.verify.report import VerifyOptions, VerifyReport
from trt_kvcache.verify.rounding import Side, judge_rounding
from trt_kvcache.verify.runnable import check_runnable, with_exact_products, with_packed_function, with_plugin_functions
from trt_kvcache.verify.twin import TwinFolder, has_bfloat16


def verify_import(imported: ImportedModel, verify: VerifyOptions) -> VerifyReport:
    """Verifies a model that has been imported already; see `trt_kvcache.verify.verify_model`."""
    if imported.model is imported.source.proto:
        raise UnsupportedModelError(
            f"{imported.source.path}: a rewritten model, and verification compares one with its original; verify the "
            "model that it was made from, with the same options"
        )
    check_runnable(imported.model)
    kind = NormalizedVerification if imported.plan.original else Verification
    with _both_sides(imported) as (original, rewritten, folder, twin):

        def run(left: Side, right: Side) -> VerifyReport:
            return kind(imported, verify, left[0], right[0], (left[1], right[1]), twin=twin).run()

        sides = (original, folder), (rewritten, folder)
        report = run(*sides)
        return report if twin or verify.tolerance is not None else judge_rounding(report, run, *sides)


@contextmanager
def _both_sides(imported: ImportedModel) -> Iterator[tuple[ModelProto, ModelProto, Path, bool]]:
    """Original and rewritten model, the folder of their external data, and whether they are float32 twins."""
    source = imported.source
    original = with_exact_products(with_plugin_functions(with_packed_function(source.proto)))
    if not has_bfloat16(original) and not has_bfloat16(imported.model):
        yield original, imported.model, source.path.parent, False
        return
    with TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
        twins = TwinFolder(Path(name), source.path.parent)
        yield twins.twin(original), twins.twin(imported.model), twins.folder, True
