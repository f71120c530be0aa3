"""``trt-kvcache doctor``: shows the capabilities of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_kvcache.cli.options import JsonOption

if TYPE_CHECKING:
    from trt_kvcache.engine.diagnosis import Diagnosis


def doctor(json: JsonOption = False) -> None:
    """Show packages, TensorRT backends, GPU, driver, the ways to update a cache that work here, and what to install."""
    from trt_kvcache import diagnose
    from trt_kvcache.cli.output import print_json

    diagnosis = diagnose()
    if json:
        print_json(diagnosis)
    else:
        _print(diagnosis)


def _print(diagnosis: Diagnosis) -> None:
    from trt_kvcache.cli.output import console, human_bytes, table
    from trt_kvcache.cli.summary import print_next

    out = console()
    out.print(f"trt-kvcache {diagnosis.version}, Python {diagnosis.python}, {diagnosis.system}")
    packages = table("package", "version", "used for", title="Packages")
    for package in diagnosis.packages:
        packages.add_row(package.name, package.version or "not installed", package.used_for)
    backends = table("backend", "version", "state", title="Backends")
    for backend in diagnosis.backends:
        backends.add_row(backend.name, backend.version or "", "imports" if backend.importable else backend.problem)
    routes = table("route", "updates", "here", "", title="Cache routes")
    for route in diagnosis.routes:
        routes.add_row(route.route.value, route.form, "yes" if route.available else "no", route.detail)
    out.print("", packages, "", backends, "", routes, "", sep="\n")
    for gpu in diagnosis.gpus:
        out.print(
            f"GPU: {gpu.name}, compute capability {gpu.compute_capability}, {human_bytes(gpu.memory)}, "
            f"driver for CUDA {diagnosis.driver}"
        )
    if diagnosis.gpu_problem:
        out.print(f"GPU: {diagnosis.gpu_problem}")
    if diagnosis.advice:
        out.print("\nfor more:")
        for line in diagnosis.advice:
            out.print(f"  {line}")
    print_next(out, "trt-kvcache plan MODEL")
