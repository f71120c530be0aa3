"""``trt-kvcache inspect``: a built engine against its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli.options import AllOption, JsonOption


def inspect(
    engine: Annotated[
        Path, typer.Argument(metavar="ENGINE", help="Engine; its manifest lies beside it.", readable=False)
    ],
    every_row: AllOption = False,
    json: JsonOption = False,
) -> None:
    """Show an engine's manifest and check it: the engine's hash, and with a GPU the engine's own I/O and aliases."""
    from trt_kvcache import inspect_engine
    from trt_kvcache.cli.manifest_view import print_manifest
    from trt_kvcache.cli.output import console, print_json
    from trt_kvcache.cli.plan_view import batch_of, print_plan

    report = inspect_engine(engine)
    if json:
        print_json(report)
        return
    out = console()
    manifest = report.manifest
    print_manifest(out, manifest)
    out.print()
    print_plan(out, "plan", manifest.plan, batch_of(manifest.plan, manifest.max_batch), every_row=every_row)
    out.print("\nthe engine's hash is the manifest's")
    if report.view is None:
        out.print(f"the engine itself was not opened: {report.not_opened}")
    else:
        out.print("the engine was opened: its inputs, outputs, profiles and aliases are the manifest's")
