"""From an ONNX decoder to a TensorRT engine that updates its KV caches in place.

    plan_model      the dry run: what will be done to every cache and every attention
    rewrite_model   the rewritten model alone, still standard ONNX
    build_engine    the engine and its manifest
    verify_model    original against rewritten model on ONNX Runtime
    inspect_engine  a built engine against its manifest
    load_manifest   the manifest of a built engine
    diagnose        what this machine can do
    DecodeSession   an engine or a model, decoding

Names load on first use, so that ``import trt_kvcache`` needs neither TensorRT nor CUDA and takes no time.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Read when onnxruntime is imported. Seen of 1.32.0 on Linux without it: a name for the machine and a database under
# ~/.cache/Microsoft, a file .ses in TMPDIR, and within half a minute a look-up of mobile.events.data.microsoft.com.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from trt_kvcache.engine.build import ProgressEvent, build_engine
    from trt_kvcache.engine.doctor import Diagnosis, diagnose
    from trt_kvcache.engine.inspect import EngineReport, inspect_engine
    from trt_kvcache.engine.manifest import FileIdentity, Manifest, Profile, ShapeRange, load_manifest
    from trt_kvcache.engine.options import BuildOptions
    from trt_kvcache.errors import (
        AmbiguousRoleError,
        BackendError,
        BuildError,
        CacheFileError,
        CapacityError,
        InvalidModelError,
        ManifestError,
        ModelError,
        NoCapacityError,
        OptionError,
        OutputError,
        PromptError,
        SessionError,
        SlotError,
        TrtKvCacheError,
        UnsupportedModelError,
        VerificationError,
    )
    from trt_kvcache.importer import plan_model, rewrite_model
    from trt_kvcache.importer.plan import (
        AttentionKind,
        AttentionPlan,
        CacheLayout,
        CachePlan,
        CacheUpdate,
        Fallback,
        MaskGeometry,
        PhysicalLayout,
        PlanOptions,
        Role,
        Route,
        SpanInput,
        Target,
        TensorRole,
        UpdateContract,
        UpdateForm,
        UpdateMode,
    )
    from trt_kvcache.runtime.events import FinishReason, TokenEvent
    from trt_kvcache.runtime.generation.config import GenerationConfig
    from trt_kvcache.runtime.requests import Generation
    from trt_kvcache.runtime.session import DecodeSession
    from trt_kvcache.verify import VerifyOptions, VerifyReport, verify_model

_HOMES = {
    "trt_kvcache.engine.build": ("ProgressEvent", "build_engine"),
    "trt_kvcache.engine.doctor": ("Diagnosis", "diagnose"),
    "trt_kvcache.engine.inspect": ("EngineReport", "inspect_engine"),
    "trt_kvcache.engine.manifest": ("FileIdentity", "Manifest", "Profile", "ShapeRange", "load_manifest"),
    "trt_kvcache.engine.options": ("BuildOptions",),
    "trt_kvcache.errors": (
        "AmbiguousRoleError",
        "BackendError",
        "BuildError",
        "CacheFileError",
        "CapacityError",
        "InvalidModelError",
        "ManifestError",
        "ModelError",
        "NoCapacityError",
        "OptionError",
        "OutputError",
        "PromptError",
        "SessionError",
        "SlotError",
        "TrtKvCacheError",
        "UnsupportedModelError",
        "VerificationError",
    ),
    "trt_kvcache.importer": ("plan_model", "rewrite_model"),
    "trt_kvcache.importer.plan": (
        "AttentionKind",
        "AttentionPlan",
        "CacheLayout",
        "CachePlan",
        "CacheUpdate",
        "Fallback",
        "MaskGeometry",
        "PhysicalLayout",
        "PlanOptions",
        "Role",
        "Route",
        "SpanInput",
        "Target",
        "TensorRole",
        "UpdateContract",
        "UpdateForm",
        "UpdateMode",
    ),
    "trt_kvcache.runtime.generation.config": ("GenerationConfig",),
    "trt_kvcache.runtime.events": ("FinishReason", "TokenEvent"),
    "trt_kvcache.runtime.requests": ("Generation",),
    "trt_kvcache.runtime.session": ("DecodeSession",),
    "trt_kvcache.verify": ("VerifyOptions", "VerifyReport", "verify_model"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AmbiguousRoleError",
    "AttentionKind",
    "AttentionPlan",
    "BackendError",
    "BuildError",
    "BuildOptions",
    "CacheFileError",
    "CacheLayout",
    "CachePlan",
    "CacheUpdate",
    "CapacityError",
    "DecodeSession",
    "Diagnosis",
    "EngineReport",
    "Fallback",
    "FileIdentity",
    "FinishReason",
    "Generation",
    "GenerationConfig",
    "InvalidModelError",
    "Manifest",
    "ManifestError",
    "MaskGeometry",
    "ModelError",
    "NoCapacityError",
    "OptionError",
    "OutputError",
    "PhysicalLayout",
    "PlanOptions",
    "Profile",
    "ProgressEvent",
    "PromptError",
    "Role",
    "Route",
    "SessionError",
    "ShapeRange",
    "SlotError",
    "SpanInput",
    "Target",
    "TensorRole",
    "TokenEvent",
    "TrtKvCacheError",
    "UnsupportedModelError",
    "UpdateContract",
    "UpdateForm",
    "UpdateMode",
    "VerificationError",
    "VerifyOptions",
    "VerifyReport",
    "__version__",
    "build_engine",
    "diagnose",
    "inspect_engine",
    "load_manifest",
    "plan_model",
    "rewrite_model",
    "verify_model",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Every public name, loaded or not."""
    return sorted({*globals(), *__all__})
