"""Builds in a child process: a model that crashes TensorRT must fail one test, not end the test run."""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import tensorrt_rtx
import trt

from trt_kvcache.importer.patch import patch_network
from trt_kvcache.importer.plan import CachePlan

CRASHED = trt.Outcome("crash", "TensorRT ended its process")

_pool: ProcessPoolExecutor | None = None


def build_in_child(
    model: bytes, profiles: Sequence[trt.Ranges], path: str = "", plan: CachePlan | None = None
) -> trt.Outcome:
    """Parse, patch the network as `plan` says, and build for `profiles`; `CRASHED` where the process died."""
    global _pool
    if _pool is None:
        _pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        atexit.register(_close)
    try:
        return _pool.submit(_build, model, [dict(profile) for profile in profiles], path, plan).result()
    except BrokenProcessPool:
        _close()
        return CRASHED


def _close() -> None:
    global _pool
    if _pool is not None:
        _pool.shutdown()
        _pool = None


def _build(model: bytes, profiles: Sequence[trt.Ranges], path: str, plan: CachePlan | None) -> trt.Outcome:
    patch = None if plan is None else lambda network: patch_network(network, plan, tensorrt_rtx)
    return trt.build(model, profiles, patch, path)
