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
    with _both_sides(imported) as (original, rewritten, folder, twin):
        kind = NormalizedVerification if imported.plan.original else Verification
        return kind(imported, verify, original, rewritten, folder, twin=twin).run()


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
