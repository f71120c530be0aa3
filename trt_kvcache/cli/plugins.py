"""``trt-kvcache plugins``: lists and compiles the kernels that a model needs beside TensorRT's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trt_kvcache.cli.options import JsonOption, RunnableArgument, TensorRTPlanFlags

if TYPE_CHECKING:
    from pathlib import Path

    from trt_kvcache.plugins.ahead import KernelReport, Kernels


def plugins(
    model: RunnableArgument,
    flags: TensorRTPlanFlags,
    arch: Annotated[
        str, typer.Option(metavar="LIST", help="Compile for these GPU architectures, such as sm_80,sm_90.")
    ] = "",
    kernel: Annotated[
        str, typer.Option(metavar="PATTERN", help="Only kernels whose name matches, such as '*circular*'.")
    ] = "*",
    json: JsonOption = False,
) -> None:
    """List the model's kernels for caches and for choosing tokens; --arch shows registers, spills and sizes."""
    from fnmatch import fnmatchcase

    from trt_kvcache.cli.output import console, print_json
    from trt_kvcache.cli.summary import command_line, next_line, print_next
    from trt_kvcache.engine.backend import driver_present
    from trt_kvcache.errors import OptionError
    from trt_kvcache.model_paths import is_model

    known = _kernels(model, flags)
    chosen = [kernels for kernels in known if fnmatchcase(kernels.name, kernel)]
    if known and not chosen:
        names = ", ".join(kernels.name for kernels in known)
        raise OptionError(f"no kernel matches {kernel!r}; {model.name} needs {names}")
    if arch:
        from trt_kvcache.plugins.ahead import compile_ahead

        archs = list(dict.fromkeys(name.strip() for name in arch.split(",")))
        reports = list(compile_ahead(chosen, archs))
        if json:
            print_json(reports)
        elif reports:
            _print_compiled(reports, archs)
    elif json:
        print_json([{"kernel": kernels.name, "config": kernels} for kernels in chosen])
    elif chosen:
        _print_list(chosen)
    if not known and not json:
        console().print(f"{model.name} needs no kernel beside TensorRT's own")
    if not json:
        check = command_line("check" if driver_present() else "inspect", model)
        command = next_line(model, flags, tensorrt=True, or_else="") if is_model(model) else check
        print_next(console(), command)


def _kernels(model: Path, flags: TensorRTPlanFlags) -> Sequence[Kernels]:
    from trt_kvcache import load_manifest
    from trt_kvcache.plan import Target

    options = flags.options_for_file(model)
    updates: Sequence[Kernels] = ()
    if options is None:
        plan = load_manifest(model).plan
        from trt_kvcache.plugins.ahead import choice_kernels
    else:
        from trt_kvcache.importer import import_model
        from trt_kvcache.plugins.ahead import choice_kernels, update_kernels

        imported = import_model(model, replace(options, target=Target.TENSORRT))
        plan, updates = imported.plan, update_kernels(imported.model)
    return [*updates, *choice_kernels(plan)]


def _print_list(chosen: Sequence[Kernels]) -> None:
    from trt_kvcache.cli.output import console, table
    from trt_kvcache.plugins.choice import ChoiceKernels

    rows = table("kernel", "launched by", "caches", "values")
    for kernels in chosen:
        if isinstance(kernels, ChoiceKernels):
            rows.add_row(kernels.name, "sessions", "", f"{kernels.logits} logits")
        else:
            q = kernels.quantization
            values = f"{q.source} to {q.target}" if q else "any, unchanged"
            rows.add_row(kernels.name, "engines of TensorRT", str(kernels.caches), values)
    console().print(rows)


def _print_compiled(reports: Sequence[KernelReport], archs: list[str]) -> None:
    from trt_kvcache.cli.output import console, table
    from trt_kvcache.plugins.compile import kernel_folder, nvrtc_version

    out = console()
    rows = table("kernel", "registers", "spills", "stack", "occupancy", "cubin", "PTX")
    for name in dict.fromkeys(row.kernel for row in reports):
        same = [row for row in reports if row.kernel == name]
        rows.add_row(
            name,
            _range(row.registers for row in same),
            _range((row.spill_bytes for row in same), " B"),
            _range((row.stack_bytes for row in same), " B"),
            _range((None if row.occupancy is None else round(100 * row.occupancy) for row in same), "%"),
            _range((row.cubin_bytes for row in same), " B"),
            _range((row.ptx_bytes for row in same), " B"),
        )
    out.print(rows)
    major, minor = nvrtc_version()
    out.print(f"\n{len(reports)} kernels for {', '.join(archs)}, made by NVRTC {major}.{minor}, in {kernel_folder()}")


def _range(values: Iterable[int | None], unit: str = "") -> str:
    known: list[Any] = sorted({value for value in values if value is not None})
    if not known:
        return "-"
    return f"{known[0]}{unit}" if len(known) == 1 else f"{known[0]} to {known[-1]}{unit}"
