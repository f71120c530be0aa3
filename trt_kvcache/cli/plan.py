"""``trt-kvcache plan``: the dry run of a build."""

from __future__ import annotations

from typing import Annotated

import typer

from trt_kvcache.cli.options import (
    AllOption,
    CacheLayoutOption,
    CapacityOption,
    ConfigOption,
    FallbackOption,
    JsonOption,
    LatentOption,
    LogitsOption,
    ModelArgument,
    PackedOption,
    SlidingOption,
    SpanOption,
    Switch,
    TargetOption,
    WindowChunkOption,
    plan_options,
)
from trt_kvcache.importer.plan import CacheLayout, Fallback, LatentAttention, LogitPositions, Sliding, Target


def plan(
    model: ModelArgument,
    target: TargetOption = Target.TENSORRT_RTX,
    capacity: CapacityOption = None,
    cache_layout: CacheLayoutOption = CacheLayout.AUTO,
    attention_span: SpanOption = Switch.ON,
    fallback: FallbackOption = Fallback.AUTO,
    packed_native: PackedOption = Switch.ON,
    sliding: SlidingOption = Sliding.LINEAR,
    window_chunk: WindowChunkOption = None,
    latent_attention: LatentOption = LatentAttention.ABSORBED,
    logits: LogitsOption = LogitPositions.LAST,
    config: ConfigOption = None,
    max_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences to count cache bytes for.")] = 1,
    every_row: AllOption = False,
    json: JsonOption = False,
) -> None:
    """Show what a build will do to every cache and every attention, without doing it."""
    from trt_kvcache import plan_model
    from trt_kvcache.cli.output import console, print_json, print_warnings
    from trt_kvcache.cli.plan_view import batch_of, plan_data, print_plan

    made = plan_model(
        model,
        plan_options(
            target=target,
            capacity=capacity,
            cache_layout=cache_layout,
            attention_span=attention_span,
            fallback=fallback,
            packed_native=packed_native,
            sliding=sliding,
            window_chunk=window_chunk,
            latent_attention=latent_attention,
            logits=logits,
            config=config,
        ),
    )
    batch = batch_of(made, max_batch)
    if json:
        print_json(plan_data(made, batch))
    else:
        print_plan(console(), model.absolute().name, made, batch, every_row=every_row)
    print_warnings(made.warnings)
