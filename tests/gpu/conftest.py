"""Engines for the GPU at hand: one per backend that is installed, and skipped in TensorRT's own words where it refuses.

Set TRT_KVCACHE_GPU_BACKENDS (``tensorrt-rtx,tensorrt``) to choose, TRT_KVCACHE_GPU_BUILT_FOR for other GPUs to build
for than all. Nobody has run these tests on a GPU yet: what they
have run on is the fake of `tests/runtime/fake_gpu.py`.
"""

import os
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from decoders import DecoderConfig, write_decoder
from gpu_steps import built_for

from trt_kvcache import BuildOptions, build_engine
from trt_kvcache.engine.backend import installed_version
from trt_kvcache.errors import BackendError
from trt_kvcache.importer.cache_plan import PlanOptions, Target
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

MAX_BATCH, MAX_CHUNK = 3, 16

LOST = re.compile(
    "CUDA_ERROR_(ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|INVALID_PC|LAUNCH_FAILED|LAUNCH_TIMEOUT|ASSERT"
    "|HARDWARE_STACK_ERROR|INVALID_ADDRESS_SPACE|ECC_UNCORRECTABLE)|cudaError (700|702|710|71[4-9]|214)\\b"
)
"""What CUDA says, from then on to every call, of a process whose kernel went wrong."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End with the test that loses the GPU: the others would fail with its words."""
    report = yield
    if report.failed and (words := LOST.search(report.longreprtext)):
        item.session.shouldfail = f"{words[0]}: nothing runs on the GPU any more in this process"
    return report


def backends() -> list[str]:
    asked = os.environ.get("TRT_KVCACHE_GPU_BACKENDS")
    if asked:
        return asked.split(",")
    return [target.value for target in Target if installed_version(target) is not None]


@dataclass
class Workshop:
    """Builds and opens engines; each kind is built once."""

    backend: str
    folder: Path
    built: dict[Any, Path] = field(default_factory=dict)
    opened: list[Any] = field(default_factory=list)

    def model(self, config: DecoderConfig) -> Path:
        path = self.folder / f"{abs(hash(config)):x}.onnx"
        return path if path.exists() else write_decoder(path, config)

    def engine(self, config: DecoderConfig, options: PlanOptions | None = None) -> TensorRTRunner:
        key = (config, options)
        if key not in self.built:
            output = self.folder / f"{len(self.built)}.engine"
            build = BuildOptions(backend=self.backend, max_batch=MAX_BATCH, max_chunk=MAX_CHUNK, **built_for())
            build_engine(self.model(config), output, options=options, build=build)
            self.built[key] = output
        return self.open(self.built[key])

    def open(self, engine: Path, **arguments: Any) -> TensorRTRunner:
        runner = TensorRTRunner(engine, **arguments)
        self.opened.append(runner)
        return runner

    def reference(self, config: DecoderConfig, options: PlanOptions | None = None) -> OnnxRuntimeRunner:
        return OnnxRuntimeRunner(self.model(config), options, max_batch=MAX_BATCH, max_chunk=MAX_CHUNK)

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


@pytest.fixture(scope="session", params=backends())
def _workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    workshop = Workshop(request.param, tmp_path_factory.mktemp(request.param))
    try:
        workshop.engine(DecoderConfig()).close()
    except BackendError as error:
        if str(error).startswith("CUDA:"):  # no refusal, but a fault, or too little memory
            raise
        pytest.skip(f"{request.param} does not run on this GPU; in its own words: {error}")
    return workshop


@pytest.fixture
def workshop(_workshop: Workshop) -> Iterator[Workshop]:
    """Everything that a test opens is closed after it."""
    yield _workshop
    _workshop.close()
