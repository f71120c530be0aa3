"""``trt-kvcache plan``: the dry run of a build."""

from __future__ import annotations

from typing import Annotated

import typer

from trt_kvcache.cli.options import AllOption, JsonOption, ModelArgument, PlanFlags


def plan(
    model: ModelArgument,
    flags: PlanFlags,
    max_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Batch size for the memory estimate.")] = 1,
    every_row: AllOption = False,
    json: JsonOption = False,
) -> None:
    """Show what a build will do to every cache and every attention, without doing it."""
    options = flags.options_for(model)
    from trt_kvcache import plan_model
    from trt_kvcache.cli.output import console, print_json, print_warnings
    from trt_kvcache.cli.plan_view import batch_of, plan_data, print_plan

    made = plan_model(model, options)
    batch = batch_of(made, max_batch)
    if json:
        print_json(plan_data(made, batch))
    else:
        print_plan(console(), model.absolute().name, made, batch, every_row=every_row)
    print_warnings(made.warnings)
