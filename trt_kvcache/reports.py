"""Reports of builds, inspections, verifications and diagnoses: ``from trt_kvcache.reports import VerifyReport``."""

from __future__ import annotations

from trt_kvcache.compare.verify_report import Quality, Station, VerifyReport
from trt_kvcache.engine.diagnosis import BackendStatus, Diagnosis, Gpu, PackageStatus, RouteStatus
from trt_kvcache.engine.inspection import EngineReport, EngineTensor, EngineView
from trt_kvcache.engine.manifest import Profile, ShapeRange
from trt_kvcache.export.run import Export
from trt_kvcache.files import FileIdentity
from trt_kvcache.progress import ProgressEvent
from trt_kvcache.runtime.scoring import Score

__all__ = [
    "BackendStatus",
    "Diagnosis",
    "EngineReport",
    "EngineTensor",
    "EngineView",
    "Export",
    "FileIdentity",
    "Gpu",
    "PackageStatus",
    "Profile",
    "ProgressEvent",
    "Quality",
    "RouteStatus",
    "Score",
    "ShapeRange",
    "Station",
    "VerifyReport",
]
