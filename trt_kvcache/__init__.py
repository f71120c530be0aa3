"""Turns an ONNX decoder into a TensorRT engine that updates its KV caches in place, and runs models and engines.

    export_checkpoint exports a checkpoint or a GGUF file as ONNX
    plan_model        the dry run: what will be done to every cache and every attention
    rewrite_model     the rewritten model alone, still standard ONNX
    build_engine      the engine and its manifest
    verify_model      original against rewritten model on ONNX Runtime
    inspect_engine    a built engine against its manifest
    load_manifest     the manifest of a built engine
    diagnose          what this machine can do
    score             the perplexity of a text
    Tokenizer         text to token ids and back, and chat templates
    DecodeSession     generates text with an engine or a model: ``DecodeSession.open("my-export/").generate("Hello")``

The types of their arguments and results are in the modules `plan`, `decoding`, `reports` and `errors` of this package.
Names load on first use, so that ``import trt_kvcache`` is fast and needs neither TensorRT nor CUDA.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# onnxruntime reads this variable when it is imported. Without it, 1.32.0 on Linux creates an id of the machine and a
# database under ~/.cache/Microsoft, a file .ses in TMPDIR, and within half a minute contacts
# mobile.events.data.microsoft.com.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from trt_kvcache.compare.verify_report import VerifyOptions
    from trt_kvcache.engine.build_options import BuildOptions
    from trt_kvcache.engine.diagnosis import diagnose
    from trt_kvcache.engine.engine_build import build_engine
    from trt_kvcache.engine.inspection import inspect_engine
    from trt_kvcache.engine.manifest import Manifest, load_manifest
    from trt_kvcache.errors import TrtKvCacheError
    from trt_kvcache.export.run import export_checkpoint
    from trt_kvcache.importer import plan_model, rewrite_model
    from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions
    from trt_kvcache.runtime.calibration import calibrate_caches
    from trt_kvcache.runtime.generation.generation_config import GenerationConfig
    from trt_kvcache.runtime.scoring import score
    from trt_kvcache.runtime.session import DecodeSession
    from trt_kvcache.runtime.structured import Grammars
    from trt_kvcache.runtime.text.tokenizer import Tokenizer
    from trt_kvcache.verify import verify_model

_HOME_OF = {
    "BuildOptions": "trt_kvcache.engine.build_options",
    "CachePlan": "trt_kvcache.importer.cache_plan",
    "DecodeSession": "trt_kvcache.runtime.session",
    "GenerationConfig": "trt_kvcache.runtime.generation.generation_config",
    "Grammars": "trt_kvcache.runtime.structured",
    "Manifest": "trt_kvcache.engine.manifest",
    "PlanOptions": "trt_kvcache.importer.cache_plan",
    "Tokenizer": "trt_kvcache.runtime.text.tokenizer",
    "TrtKvCacheError": "trt_kvcache.errors",
    "VerifyOptions": "trt_kvcache.compare.verify_report",
    "build_engine": "trt_kvcache.engine.engine_build",
    "calibrate_caches": "trt_kvcache.runtime.calibration",
    "diagnose": "trt_kvcache.engine.diagnosis",
    "export_checkpoint": "trt_kvcache.export.run",
    "inspect_engine": "trt_kvcache.engine.inspection",
    "load_manifest": "trt_kvcache.engine.manifest",
    "plan_model": "trt_kvcache.importer",
    "rewrite_model": "trt_kvcache.importer",
    "score": "trt_kvcache.runtime.scoring",
    "verify_model": "trt_kvcache.verify",
}

__all__ = [
    "BuildOptions",
    "CachePlan",
    "DecodeSession",
    "GenerationConfig",
    "Grammars",
    "Manifest",
    "PlanOptions",
    "Tokenizer",
    "TrtKvCacheError",
    "VerifyOptions",
    "__version__",
    "build_engine",
    "calibrate_caches",
    "diagnose",
    "export_checkpoint",
    "inspect_engine",
    "load_manifest",
    "plan_model",
    "rewrite_model",
    "score",
    "verify_model",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name in _HOME_OF:
        value: object = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all public names of the package, whether loaded or not, without the modules."""
    return sorted(__all__)
