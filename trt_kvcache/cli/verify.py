"""``trt-kvcache verify``: original against rewritten model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.cli.options import (
    CacheLayoutOption,
    CapacityOption,
    ConfigOption,
    FallbackOption,
    JsonOption,
    ModelArgument,
    PackedOption,
    SpanOption,
    Switch,
    TargetOption,
    plan_options,
)
from trt_kvcache.importer.plan import CacheLayout, Fallback, Target

if TYPE_CHECKING:
    from trt_kvcache.verify import VerifyReport


def verify(
    model: ModelArgument,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences, each with its own length.")] = 3,
    chunks: Annotated[str, typer.Option(metavar="N,...", help="Lengths of the prefill chunks.")] = "5,3",
    tokens: Annotated[int, typer.Option(metavar="N", help="Single-token steps after the chunks.")] = 4,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Largest difference, as a share of an output's scale. Default: by dtype."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of tokens, caches and garbage.")] = 0,
    inputs: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Values by name for inputs of unknown role.")
    ] = None,
    target: TargetOption = Target.TENSORRT_RTX,
    capacity: CapacityOption = None,
    cache_layout: CacheLayoutOption = CacheLayout.AUTO,
    attention_span: SpanOption = Switch.ON,
    fallback: FallbackOption = Fallback.AUTO,
    packed_native: PackedOption = Switch.ON,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Run the original and the rewritten model side by side on ONNX Runtime over a decode; fail where they differ."""
    from trt_kvcache import OptionError, VerifyOptions, verify_model
    from trt_kvcache.cli.output import print_json

    try:
        lengths = tuple(int(chunk) for chunk in chunks.split(",") if chunk.strip())
    except ValueError:
        raise OptionError(f"--chunks {chunks!r} is not a list of token counts such as 5,3") from None
    report = verify_model(
        model,
        plan_options(
            target=target,
            capacity=capacity,
            cache_layout=cache_layout,
            attention_span=attention_span,
            fallback=fallback,
            packed_native=packed_native,
            config=config,
        ),
        VerifyOptions(
            batch=batch,
            chunks=lengths,
            tokens=tokens,
            tolerance=tolerance,
            seed=seed,
            inputs=None if inputs is None else str(inputs),
        ),
    )
    if json:
        print_json(report)
    else:
        _print(report)
    report.check()


def _print(report: VerifyReport) -> None:
    from trt_kvcache.cli.grouping import group_rows
    from trt_kvcache.cli.output import console, table

    out = console()
    engines = report.original_engine
    if report.rewritten_engine != report.original_engine:
        engines += f" and {report.rewritten_engine}"
    runs = sum(max(1, len(step.spans)) for step in report.steps)
    out.print(f"{report.model}: original against rewritten on {engines}, {len(report.steps)} steps, {runs} runs")
    grid = table("output", "role", "dtype", "largest difference", "of its scale", "allowed", "")
    rows = [
        (
            output.name,
            output.role,
            output.dtype,
            _number(output.max_absolute),
            _number(output.max_relative),
            f"{output.tolerance:.1g}",
            "same bits" if output.exact else "ok" if output.passed else "FAILED",
        )
        for output in report.outputs
    ]
    for row, _ in group_rows(rows, 1):
        grid.add_row(*row)
    out.print()
    out.print(grid)
    out.print()
    for note in report.notes:
        out.print(f"note: {note}")
    out.print("the rewritten model gives the original's numbers" if report.passed else "FAILED")


def _number(value: float | None) -> str:
    return "not comparable" if value is None else f"{value:.2g}"
