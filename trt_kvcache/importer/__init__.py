"""Turns an ONNX decoder into a plan and a rewritten model, without TensorRT.

    load_source     read and check a file                             files
    prepare         one flat graph, known shapes, fixed capacity;     prepare, simplify, recognize, emit
                    caches and attention in canonical form
    analyze         -> CachePlan                                      analysis, planning, interface
    rewrite_graph   edit the graph as the plan says                   rewrite
    check_rewrite   compare the rewritten model with the original     check

`pipeline` calls all of these in this order. It loads `families` only for models that need them. Public names load on
first use, so that manifests can use `trt_kvcache.importer.cache_plan` without ONNX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trt_kvcache.importer.pipeline import (
        ImportedModel,
        import_model,
        import_unchecked,
        plan_model,
        quantize_caches,
        rewrite_model,
    )

__all__ = ["ImportedModel", "import_model", "import_unchecked", "plan_model", "quantize_caches", "rewrite_model"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("trt_kvcache.importer.pipeline"), name)
