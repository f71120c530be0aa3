"""``trt-kvcache rewrite``: the rewritten model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli.options import (
    CacheLayoutOption,
    CapacityOption,
    ConfigOption,
    FallbackOption,
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


def rewrite(
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.onnx", help="The rewritten model.", readable=False)
    ],
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
) -> None:
    """Write the rewritten model alone: standard ONNX, for trtexec and others. Another folder gets data files too."""
    from trt_kvcache import rewrite_model
    from trt_kvcache.cli.output import console, print_warnings
    from trt_kvcache.cli.plan_view import in_place_text

    made = rewrite_model(
        model,
        output,
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
    print_warnings(made.warnings)
    console().print(f"{output}: {in_place_text(made)}")
