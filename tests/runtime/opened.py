"""Opens engines on the stand-in for TensorRT, and changes what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime.fake_cuda import Machine
from runtime.fake_tensorrt import fake_module

from trt_kvcache.engine.manifest import Manifest, load_manifest, manifest_path, save_manifest
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner


def open_(engine: Path, machine: Machine | None = None, version: str = "1.7.1.116", **faults: Any) -> TensorRTRunner:
    arguments = {
        name: faults.pop(name) for name in ("max_batch", "max_chunk", "device", "kernel_cache") if name in faults
    }
    machine = machine or Machine()
    module = fake_module(machine, version=version, **faults)
    runner = TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()), **arguments)
    runner.module = module  # type: ignore[attr-defined]
    return runner


def check_refused(error: type[Exception], words: str, engine: Path, **faults: Any) -> None:
    """Opening fails with these words, and leaves nothing behind."""
    machine = faults.pop("machine", None) or Machine()
    with pytest.raises(error, match=words):
        open_(engine, machine, **faults)
    assert machine.used == 0
    assert not machine.pinned


def edit(engine: Path, change: Callable[[Manifest], Manifest]) -> None:
    save_manifest(change(load_manifest(engine)), manifest_path(engine))
