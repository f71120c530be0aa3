"""``trt-kvcache plugins``: the kernels of the cache-update plugin, compiled ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.cli.options import JsonOption

if TYPE_CHECKING:
    from trt_kvcache.plugins.compile import CompiledKernel
    from trt_kvcache.plugins.spec import KernelConfig


@dataclass(frozen=True)
class _Row:
    """One kernel on one architecture, as JSON."""

    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    occupancy: float | None
    cubin_bytes: int
    ptx_bytes: int


def plugins(
    arch: Annotated[
        str, typer.Option(metavar="LIST", help="Compile for these GPU architectures, such as sm_80,sm_90.")
    ] = "",
    kernel: Annotated[
        str, typer.Option(metavar="PATTERN", help="Only kernels whose name matches, such as '*circular*'.")
    ] = "*",
    json: JsonOption = False,
) -> None:
    """List the cache-update kernels; with --arch compile them ahead and show registers, spills and occupancy."""
    from fnmatch import fnmatchcase

    from trt_kvcache.errors import OptionError
    from trt_kvcache.plugins.family import all_kernels

    chosen = [config for config in all_kernels() if fnmatchcase(config.name, kernel)]
    if not chosen:
        names = [config.name for config in all_kernels()]
        raise OptionError(f"no kernel matches {kernel!r}; the {len(names)} are named like {names[0]} and {names[-1]}")
    if arch:
        archs = list(dict.fromkeys(name.strip() for name in arch.split(",")))
        _compile(chosen, archs, json=json)
    else:
        _list(chosen, json=json)


def _list(chosen: list[KernelConfig], *, json: bool) -> None:
    from trt_kvcache.cli.output import console, print_json, table

    if json:
        print_json([{"kernel": config.name, "config": config} for config in chosen])
        return
    rows = table("kernel", "update", "mode", "caches", "elements", "valid lengths", "error flags")
    for config in chosen:
        q = config.quantization
        packed = config.form.value.startswith("packed")
        rows.add_row(
            config.name,
            "packed" if packed else "padded",
            config.mode.value,
            str(config.caches),
            f"{q.source} to {q.target}" if q else "any, as they are",
            "cumulative" if packed else "yes" if config.length_type else "no",
            "yes" if config.errors else "no",
        )
    console().print(rows)


def _compile(chosen: list[KernelConfig], archs: list[str], *, json: bool) -> None:
    from trt_kvcache.cli.output import console, print_json, table
    from trt_kvcache.plugins.compile import compile_ahead, kernel_folder, nvrtc_version

    made = [_row(cubin, ptx) for cubin, ptx in compile_ahead(chosen, archs)]
    if json:
        print_json(made)
        return
    out = console()
    rows = table("kernel", "arch", "registers", "spills", "stack", "occupancy", "cubin", "PTX")
    for row in made:
        occupancy = "?" if row.occupancy is None else f"{row.occupancy:.0%}"
        counts = (row.registers, f"{row.spill_bytes} B", f"{row.stack_bytes} B", occupancy)
        rows.add_row(row.kernel, row.arch, *map(str, counts), f"{row.cubin_bytes} B", f"{row.ptx_bytes} B")
    out.print(rows)
    major, minor = nvrtc_version()
    out.print(f"\n{len(made)} kernels of NVRTC {major}.{minor} in {kernel_folder()}")


def _row(cubin: CompiledKernel, ptx: CompiledKernel) -> _Row:
    use = cubin.resources
    spills = use.spill_store_bytes + use.spill_load_bytes
    sizes = (len(cubin.code), len(ptx.code))
    return _Row(cubin.name, cubin.arch, use.registers, spills, use.stack_bytes, use.occupancy, *sizes)
