"""``trt-kvcache rewrite``: writes the rewritten model, without building an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from trt_kvcache.cli.options import ModelArgument, PlanFlags, output_flag


def rewrite(
    model: ModelArgument,
    output: Annotated[Path, output_flag(metavar="OUT.onnx", help="The rewritten model.")],
    flags: PlanFlags,
) -> None:
    """Write the rewritten model as standard ONNX, for trtexec and others, with its data files beside it."""
    options = flags.options_for(model)
    from trt_kvcache import rewrite_model
    from trt_kvcache.cli.output import console, print_warnings
    from trt_kvcache.cli.summary import chosen_capacity, command_line, print_next

    plan = rewrite_model(model, output, options)
    print_warnings(plan.warnings)
    out = console()
    chosen = chosen_capacity(plan.options.capacity, flags)
    out.print(f"{output}: {plan.in_place_text}{chosen and f'; capacity: {chosen}'}")
    print_next(out, command_line("verify", model, "--rewritten", output, flags=flags))
