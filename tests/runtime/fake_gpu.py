"""The fake TensorRT where a GPU would be, in every process with `tests/runtime/fake_site` in front of its path.

It shows that the GPU tests run and mean what they say. It shows nothing about a GPU.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own_loop
from runtime.engines import write_engine
from runtime.fake_cuda import GPU, Machine
from runtime.fake_tensorrt import VERSIONS, fake_module

from trt_kvcache.engine import backend, diagnosis, engine_build
from trt_kvcache.engine.build_options import BuildOptions
from trt_kvcache.engine.manifest import Manifest, encoder_path, load_manifest, manifest_path, save_manifest
from trt_kvcache.importer.cache_plan import PlanOptions, Target
from trt_kvcache.runtime.trt import trt_runner


def install() -> None:
    """Replace what touches TensorRT and CUDA, in this process."""
    machine = Machine(total=4 << 30)
    refuse = os.environ.get("FAKE_GPU_REFUSES", "")

    def load(name: str) -> Any:
        faults = {"refuse": refuse} if refuse else {}
        return fake_module(machine, rtx=name == "tensorrt-rtx", version=VERSIONS[name], **faults)

    _install_for_own_loop(Machine(pageable=True))
    trt_runner.load_tensorrt = load
    trt_runner.cuda_bindings = machine.bindings
    engine_build.build_engine = _build
    diagnosis.find_gpus = lambda: ("13.0", (diagnosis.Gpu(GPU, "9.0", machine.total),), "")
    backend.installed_version = lambda target: VERSIONS[Target(target).value]


def _install_for_own_loop(machine: Machine) -> None:
    bindings = machine.bindings()
    own_loop.cuda, own_loop.driver = SimpleNamespace(core=bindings.core), bindings.driver
    names = {module: name for name, module in own_loop.MODULES.items()}

    def load(module: str) -> Any:
        return fake_module(machine, rtx=module == "tensorrt_rtx", version=VERSIONS[names[module]])

    own_loop.importlib = SimpleNamespace(import_module=load)


def _build(
    model: Path, output: Path, *, options: PlanOptions | None = None, build: BuildOptions | None = None, **_: Any
) -> Manifest:
    build = build or BuildOptions()
    name = "tensorrt-rtx" if build.backend == "auto" else build.backend
    made = write_engine(
        Path(model), options=options, backend=name, version=VERSIONS[name], max_batch=build.max_batch or 1,
        max_chunk=build.max_chunk or 16, max_encoder=build.max_encoder, encoder=build.encoder,
        shapes={n: (build.min_shapes[n], build.opt_shapes[n], most) for n, most in build.max_shapes.items()},
    )  # fmt: skip
    manifest = load_manifest(made)
    pairs = [(made, output)]
    if manifest.encoder is not None:
        pairs.append((encoder_path(made), encoder_path(output)))
        manifest = replace(manifest, encoder=replace(manifest.encoder, name=encoder_path(output).name))
    for before, after in pairs:
        shutil.move(before, after)
        shutil.move(manifest_path(before), manifest_path(after))
    save_manifest(manifest, manifest_path(output))
    return manifest


install()
