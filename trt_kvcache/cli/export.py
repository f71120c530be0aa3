"""``trt-kvcache export``: exports a checkpoint as an ONNX decoder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from trt_kvcache.cli.options import PlanFlags, file_argument, output_flag
from trt_kvcache.model_paths import checkpoint_named


def export(
    checkpoint: Annotated[
        Path,
        file_argument(
            metavar="CHECKPOINT",
            help="Folder with config.json and weights, a .gguf file, or the name of a cached Hugging Face model.",
            callback=checkpoint_named,
        ),
    ],
    output: Annotated[Path, output_flag(metavar="FOLDER", help="New folder for the model.")],
    exporter: Annotated[
        Literal["auto", "mobius", "genai", "torch", "optimum"],
        typer.Option(help="auto: tries exporters from fast to slow; keeps the first whose model is right."),
    ] = "auto",
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"],
        typer.Option(help="Type of the numbers. Models trained in bfloat16, such as Gemma, may overflow in float16."),
    ] = "float16",
    int4: Annotated[bool, typer.Option("--int4", help="Weights of 4 bits (genai).")] = False,
    capacity: Annotated[
        int | None,
        typer.Option(
            "--capacity",
            "-c",
            min=1,
            metavar="TOKENS",
            help="Tokens per sequence, for the plan at the end. Default: the model's longest text, at most 4096.",
        ),
    ] = None,
    python: Annotated[
        str, typer.Option(metavar="FILE", help="Python interpreter that has the exporter. Default: this one.")
    ] = sys.executable,
) -> None:
    """Export a checkpoint with an installed exporter, and plan the result. Nothing is downloaded."""
    from trt_kvcache.cli.output import console, print_warnings
    from trt_kvcache.cli.plan_view import batch_of
    from trt_kvcache.cli.summary import chosen_capacity, next_line, plan_lines, print_lines, print_next
    from trt_kvcache.export.run import export_checkpoint

    said = console(sys.stderr)
    result = export_checkpoint(
        checkpoint, output, exporter=exporter, dtype=dtype, int4=int4, capacity=capacity, python=python,
        told=lambda line: said.print(line, soft_wrap=True),
    )  # fmt: skip
    plan, out = result.plan, console()
    flags = PlanFlags(capacity=capacity)
    lines = plan_lines(plan, batch_of(plan, 1), chosen=chosen_capacity(plan.options.capacity, flags))
    print_lines(out, f"{output}: {plan.in_place_text} (opset {plan.opset})", lines)
    print_next(out, next_line(output, flags))
    print_warnings(plan.warnings)
