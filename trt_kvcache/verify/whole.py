"""The verification of a file: whole models, with their weights."""

from __future__ import annotations

import os
from dataclasses import replace

from trt_kvcache.arguments import as_options
from trt_kvcache.errors import OptionError
from trt_kvcache.importer import ImportedModel, import_model, quantize_caches
from trt_kvcache.importer.files.source import SourceModel, load_source
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.importer.rewritten import check_same_interface, recorded_options
from trt_kvcache.verify.entry import verify_import, verify_quantized
from trt_kvcache.verify.report import VerifyOptions, VerifyReport

__all__ = ["verify_model"]

_PLAN = PlanOptions()
_VERIFY = VerifyOptions()


def verify_model(
    model: str | os.PathLike[str],
    options: PlanOptions = _PLAN,
    verify: VerifyOptions = _VERIFY,
    rewritten: str | os.PathLike[str] | None = None,
) -> VerifyReport:
    """Runs a model and its rewritten form side by side and reports how far their outputs are apart.

    Both get the same tokens, positions, indices, lengths and masks over several episodes: prefill in chunks and then
    single tokens from ragged starts, up to the last row of linear caches, over the wrap of circular ones, and with rows
    whose valid length is shorter than the update. Cache rows that no token has been written to hold large finite
    garbage. Each side carries its own caches from step to step, in its own layout. The span inputs of the rewritten
    model take a tight, a bucketed and the full value in turn.

    Where normalization changed the interface, the original runs in its own, row by row
    (`trt_kvcache.importer.steps.original`): a past that grows has one length for all rows. Valid lengths shorter than
    the update do not exist there. The decode covers at least three times the prompt, in fewer and longer steps where
    weights are large, and the report counts equal greedy tokens.

    ONNX Runtime runs both sides; where it cannot (opsets newer than it knows, windows, short masks), ONNX's reference
    evaluator runs small models. bfloat16 models are compared as their float32 twins; float16 models whose numbers
    rounding decides are compared in float32 (`trt_kvcache.verify.rounding`), unless `verify` has a tolerance. The
    report says which.

    With `PlanOptions.cache_dtype`, all of that is done with the model's own caches. Then the model decodes a text with
    these and with quantized ones, from empty caches and with the same tokens (`VerifyReport.divergence`).

    One model at a time is open, and the outputs that are compared are kept in a temporary file. Weights stay in their
    files; those of float16, which ONNX Runtime converts, take 2.6 times their size, or a step converts them one by one
    where that does not fit. Temporary files take the weights of bfloat16 models in float32 and weights that lie inside
    of a model; all are gone when this returns or raises.

    Args:
        model: path of an ONNX decoder with caches.
        options: what to plan; the original runs with the same capacity.
        verify: what to run.
        rewritten: a file that `rewrite_model` wrote, to be compared with `model` in the place of a fresh rewrite. The
            model is planned afresh, with the options that the file records.

    Returns:
        The report, also where the verification failed: `VerifyReport.check` raises then.

    Raises:
        ModelError: the model cannot be planned, or neither engine runs the original, or the rewritten model has nodes
            that only TensorRT knows; `rewritten` records no options, or has other inputs or outputs than a rewrite
            of `model`.
        OptionError: an option does not fit the model; an input's values cannot be guessed; the caches of not even one
            sequence fit into the memory that is free.
        OutputError: temporary files do not fit onto the disk.
    """
    verify = as_options(verify, VerifyOptions, "verify")
    options = as_options(options, PlanOptions, "options")
    if rewritten is None:
        return _verify(import_model(model, options.unquantized(), thorough=verify.thorough), options, verify)
    if verify.thorough:
        raise OptionError("thorough compares a fresh rewrite of a model: leave --rewritten out")
    file = load_source(rewritten)
    options = recorded_options(file.proto, options, file.path)
    return _verify(import_model(model, options.unquantized()), options, verify, file)


def _verify(
    imported: ImportedModel, options: PlanOptions, verify: VerifyOptions, file: SourceModel | None = None
) -> VerifyReport:
    """Verifies a model with its own caches, and with those that `options` ask for; `file`: is rewritten so."""
    options = replace(options, capacity=imported.plan.options.capacity)
    asked = quantize_caches(replace(imported, plan=replace(imported.plan, options=options)))
    folder = None
    if file is not None:
        check_same_interface(file.proto, asked.model, file.path, imported.source.path)
        asked = replace(asked, model=file.proto)
        folder = file.path.parent if file.external_files else None
    if options.cache_dtype is None:
        return verify_import(asked, verify, folder)
    return verify_quantized(imported, asked, verify, folder)
