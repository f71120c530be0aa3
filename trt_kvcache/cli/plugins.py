"""``trt-kvcache plugins``: the kernels of the cache-update plugin and those that choose tokens, compiled ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trt_kvcache.cli.options import JsonOption

if TYPE_CHECKING:
    from trt_kvcache.plugins.ahead import Kernels
    from trt_kvcache.plugins.choice import ChoiceKernels
    from trt_kvcache.plugins.compile import CompiledKernel
    from trt_kvcache.plugins.spec import KernelConfig


@dataclass(frozen=True)
class _Row:
    """One kernel on one architecture, as JSON; of several in one cubin, the most of each."""

    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    occupancy: float | None
    cubin_bytes: int
    ptx_bytes: int | None


def plugins(
    arch: Annotated[
        str, typer.Option(metavar="LIST", help="Compile for these GPU architectures, such as sm_80,sm_90.")
    ] = "",
    kernel: Annotated[
        str, typer.Option(metavar="PATTERN", help="Only kernels whose name matches, such as '*circular*'.")
    ] = "*",
    json: JsonOption = False,
) -> None:
    """List the kernels for caches and for choosing tokens; --arch compiles them ahead: registers, spills, occupancy."""
    from fnmatch import fnmatchcase

    from trt_kvcache.errors import OptionError
    from trt_kvcache.plugins.ahead import everything

    known = everything()
    chosen = [kernels for kernels in known if fnmatchcase(kernels.name, kernel)]
    if not chosen:
        first, last = known[0].name, known[-1].name
        raise OptionError(f"no kernel matches {kernel!r}; the {len(known)} are named like {first} and {last}")
    if arch:
        archs = list(dict.fromkeys(name.strip() for name in arch.split(",")))
        _compile(chosen, archs, json=json)
    else:
        _list(chosen, json=json)


def _list(chosen: Sequence[Kernels], *, json: bool) -> None:
    from trt_kvcache.cli.output import console, print_json
    from trt_kvcache.plugins.choice import KERNELS, ChoiceKernels

    choice = [kernels for kernels in chosen if isinstance(kernels, ChoiceKernels)]
    updates = [kernels for kernels in chosen if not isinstance(kernels, ChoiceKernels)]
    if json:
        rows: list[dict[str, Any]] = [{"kernel": config.name, "config": config} for config in updates]
        print_json([*rows, *({"kernel": c.name, "logits": c.logits, "functions": KERNELS} for c in choice)])
        return
    out = console()
    if updates:
        out.print(_updates(updates))
    if updates and choice:
        out.print()
    if choice:
        out.print(_choice(choice))


def _updates(chosen: Sequence[KernelConfig]) -> Any:
    from trt_kvcache.cli.output import table

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
    return rows


def _choice(chosen: Sequence[ChoiceKernels]) -> Any:
    from trt_kvcache.cli.output import table
    from trt_kvcache.plugins.choice import KERNELS

    rows = table("kernels", "logits", "functions")
    for kernels in chosen:
        rows.add_row(kernels.name, kernels.logits, ", ".join(KERNELS))
    return rows


def _compile(chosen: Sequence[Kernels], archs: list[str], *, json: bool) -> None:
    from trt_kvcache.cli.output import console, print_json, table
    from trt_kvcache.plugins.ahead import compile_ahead
    from trt_kvcache.plugins.compile import kernel_folder, nvrtc_version

    made = [_row(cubin, ptx) for cubin, ptx in compile_ahead(chosen, archs)]
    if json:
        print_json(made)
        return
    out = console()
    rows = table("kernel", "arch", "registers", "spills", "stack", "occupancy", "cubin", "PTX")
    for row in made:
        occupancy = "?" if row.occupancy is None else f"{row.occupancy:.0%}"
        ptx = "none" if row.ptx_bytes is None else f"{row.ptx_bytes} B"
        counts = (row.registers, f"{row.spill_bytes} B", f"{row.stack_bytes} B", occupancy, f"{row.cubin_bytes} B", ptx)
        rows.add_row(row.kernel, row.arch, *map(str, counts))
    out.print(rows)
    major, minor = nvrtc_version()
    out.print(f"\n{len(made)} kernels of NVRTC {major}.{minor} in {kernel_folder()}")


def _row(cubin: CompiledKernel, ptx: CompiledKernel | None) -> _Row:
    use = cubin.resources
    spills = use.spill_store_bytes + use.spill_load_bytes
    sizes = len(cubin.code), None if ptx is None else len(ptx.code)
    return _Row(cubin.name, cubin.arch, use.registers, spills, use.stack_bytes, use.occupancy, *sizes)
