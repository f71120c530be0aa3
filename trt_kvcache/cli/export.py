"""``trt-kvcache export``: exports a checkpoint as an ONNX decoder."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli.options import PlanFlags
from trt_kvcache.model_paths import checkpoint_named


class ExporterChoice(str, Enum):
    """The exporter that `export` runs. The choice ``auto`` tries several exporters."""

    AUTO = "auto"
    MOBIUS = "mobius"
    GENAI = "genai"
    TORCH = "torch"
    OPTIMUM = "optimum"


class Dtype(str, Enum):
    """The type of weights, activations and caches."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Folder with config.json and weights, a .gguf file, or a name of the hub in the local cache.",
            readable=False,
            callback=checkpoint_named,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="New folder for the model.", readable=False)
    ],
    exporter: Annotated[
        ExporterChoice,
        typer.Option(help="auto: tries exporters from fast to slow; keeps the first whose model is right."),
    ] = ExporterChoice.AUTO,
    dtype: Annotated[
        Dtype,
        typer.Option(help="Type of the numbers. Models trained in bfloat16, such as Gemma, may overflow in float16."),
    ] = Dtype.FLOAT16,
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
        checkpoint, output, exporter=exporter.value, dtype=dtype.value, int4=int4, capacity=capacity, python=python,
        told=lambda line: said.print(line, soft_wrap=True),
    )  # fmt: skip
    plan, out = result.plan, console()
    flags = PlanFlags(capacity=capacity)
    lines = plan_lines(plan, batch_of(plan, 1), chosen=chosen_capacity(plan.options.capacity, flags))
    print_lines(out, f"{output}: {plan.in_place_text} (opset {plan.opset})", lines)
    print_next(out, next_line(output, flags))
    print_warnings(plan.warnings)
