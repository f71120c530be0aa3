"""From an ONNX decoder to a TensorRT engine that updates its KV caches in place.

    plan_model      the dry run: what will be done to every cache and every attention
    rewrite_model   the rewritten model alone, still standard ONNX
    build_engine    the engine and its manifest
    verify_model    original against rewritten model on ONNX Runtime
    inspect_engine  a built engine against its manifest
    load_manifest   the manifest of a built engine
    diagnose        what this machine can do
    DecodeSession   an engine or a model, decoding: ``DecodeSession.open("my-export/").generate("Hello")``

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
    from trt_kvcache.engine.doctor import BackendStatus, Diagnosis, Gpu, PackageStatus, RouteStatus, diagnose
    from trt_kvcache.engine.inspect import EngineReport, EngineTensor, EngineView, inspect_engine
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
        CacheDtype,
        CacheLayout,
        CachePlan,
        CacheUpdate,
        Dim,
        Fallback,
        InterfaceChange,
        LatentAttention,
        LogitPositions,
        LogitsSpan,
        MaskGeometry,
        OriginalRole,
        OriginalTensor,
        PhysicalLayout,
        PlanOptions,
        Role,
        Route,
        Sliding,
        SpanInput,
        Stack,
        StackPart,
        StateUpdate,
        Target,
        TensorRole,
        UpdateContract,
        UpdateForm,
        UpdateMode,
    )
    from trt_kvcache.runtime.cache import KVCache
    from trt_kvcache.runtime.calibration import calibrate_caches
    from trt_kvcache.runtime.embeddings import GivenEmbeddings
    from trt_kvcache.runtime.encoders.encoder import Source
    from trt_kvcache.runtime.events import FinishReason, TokenEvent
    from trt_kvcache.runtime.generation.config import GenerationConfig, LogitsProcessor
    from trt_kvcache.runtime.generation.masks import Grammar, TokenMask
    from trt_kvcache.runtime.generation.settings import Settings
    from trt_kvcache.runtime.generation.speculation import SpeculationStats
    from trt_kvcache.runtime.prefix import PrefixStats
    from trt_kvcache.runtime.requests import EmbedsAll, Generation, Given, GivenAll, PositionsAll, Prompt
    from trt_kvcache.runtime.session import DecodeSession
    from trt_kvcache.runtime.structured import Grammars
    from trt_kvcache.verify import (
        Divergence,
        OutputDifference,
        VerifyOptions,
        VerifyReport,
        VerifyStep,
        verify_model,
    )

_HOMES = {
    "trt_kvcache.runtime.prefix": ("PrefixStats",),
    "trt_kvcache.engine.build": (
        "ProgressEvent",
        "build_engine",
    ),
    "trt_kvcache.engine.doctor": (
        "BackendStatus",
        "Diagnosis",
        "Gpu",
        "PackageStatus",
        "RouteStatus",
        "diagnose",
    ),
    "trt_kvcache.engine.inspect": (
        "EngineReport",
        "EngineTensor",
        "EngineView",
        "inspect_engine",
    ),
    "trt_kvcache.engine.manifest": (
        "FileIdentity",
        "Manifest",
        "Profile",
        "ShapeRange",
        "load_manifest",
    ),
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
        "OptionError",
        "OutputError",
        "PromptError",
        "SessionError",
        "SlotError",
        "TrtKvCacheError",
        "UnsupportedModelError",
        "VerificationError",
    ),
    "trt_kvcache.importer": (
        "plan_model",
        "rewrite_model",
    ),
    "trt_kvcache.importer.plan": (
        "AttentionKind",
        "AttentionPlan",
        "CacheDtype",
        "CacheLayout",
        "CachePlan",
        "CacheUpdate",
        "Dim",
        "Fallback",
        "InterfaceChange",
        "LatentAttention",
        "LogitPositions",
        "LogitsSpan",
        "MaskGeometry",
        "OriginalRole",
        "OriginalTensor",
        "PhysicalLayout",
        "PlanOptions",
        "Role",
        "Route",
        "Sliding",
        "SpanInput",
        "Stack",
        "StackPart",
        "StateUpdate",
        "Target",
        "TensorRole",
        "UpdateContract",
        "UpdateForm",
        "UpdateMode",
    ),
    "trt_kvcache.runtime.cache": ("KVCache",),
    "trt_kvcache.runtime.calibration": ("calibrate_caches",),
    "trt_kvcache.runtime.embeddings": ("GivenEmbeddings",),
    "trt_kvcache.runtime.encoders.encoder": ("Source",),
    "trt_kvcache.runtime.events": (
        "FinishReason",
        "TokenEvent",
    ),
    "trt_kvcache.runtime.generation.config": (
        "GenerationConfig",
        "LogitsProcessor",
    ),
    "trt_kvcache.runtime.generation.settings": ("Settings",),
    "trt_kvcache.runtime.generation.speculation": ("SpeculationStats",),
    "trt_kvcache.runtime.requests": (
        "EmbedsAll",
        "Generation",
        "Given",
        "GivenAll",
        "PositionsAll",
        "Prompt",
    ),
    "trt_kvcache.runtime.session": ("DecodeSession",),
    "trt_kvcache.runtime.generation.masks": ("Grammar", "TokenMask"),
    "trt_kvcache.runtime.structured": ("Grammars",),
    "trt_kvcache.verify": (
        "Divergence",
        "OutputDifference",
        "VerifyOptions",
        "VerifyReport",
        "VerifyStep",
        "verify_model",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AmbiguousRoleError",
    "AttentionKind",
    "AttentionPlan",
    "BackendError",
    "BackendStatus",
    "BuildError",
    "BuildOptions",
    "CacheDtype",
    "CacheFileError",
    "CacheLayout",
    "CachePlan",
    "CacheUpdate",
    "CapacityError",
    "DecodeSession",
    "Diagnosis",
    "Dim",
    "Divergence",
    "EmbedsAll",
    "EngineReport",
    "EngineTensor",
    "EngineView",
    "Fallback",
    "FileIdentity",
    "FinishReason",
    "Generation",
    "GenerationConfig",
    "Given",
    "GivenAll",
    "GivenEmbeddings",
    "Gpu",
    "Grammar",
    "Grammars",
    "InterfaceChange",
    "InvalidModelError",
    "KVCache",
    "LatentAttention",
    "LogitPositions",
    "LogitsProcessor",
    "LogitsSpan",
    "Manifest",
    "ManifestError",
    "MaskGeometry",
    "ModelError",
    "OptionError",
    "OriginalRole",
    "OriginalTensor",
    "OutputDifference",
    "OutputError",
    "PackageStatus",
    "PhysicalLayout",
    "PlanOptions",
    "PositionsAll",
    "PrefixStats",
    "Profile",
    "ProgressEvent",
    "Prompt",
    "PromptError",
    "Role",
    "Route",
    "RouteStatus",
    "SessionError",
    "Settings",
    "ShapeRange",
    "Sliding",
    "SlotError",
    "Source",
    "SpanInput",
    "SpeculationStats",
    "Stack",
    "StackPart",
    "StateUpdate",
    "Target",
    "TensorRole",
    "TokenEvent",
    "TokenMask",
    "TrtKvCacheError",
    "UnsupportedModelError",
    "UpdateContract",
    "UpdateForm",
    "UpdateMode",
    "VerificationError",
    "VerifyOptions",
    "VerifyReport",
    "VerifyStep",
    "__version__",
    "build_engine",
    "calibrate_caches",
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
    """Every public name, loaded or not, and none of the modules."""
    return sorted(__all__)
