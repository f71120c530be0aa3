"""``trt-kvcache build``: the engine and its manifest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.cli.options import (
    BackendChoice,
    CacheLayoutOption,
    CapacityOption,
    ConfigOption,
    DecodeWeights,
    FallbackOption,
    JsonOption,
    LatentOption,
    LogitsOption,
    ModelArgument,
    SlidingOption,
    SpanOption,
    Switch,
    Verbosity,
    WindowChunkOption,
    plan_options,
)
from trt_kvcache.importer.plan import CacheLayout, Fallback, LatentAttention, LogitPositions, Sliding

if TYPE_CHECKING:
    from trt_kvcache.engine.manifest import Manifest

_SIZES = "What the engine must hold"
_HOW = "How the engine is built"


def build(
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="ENGINE", help="The manifest goes to ENGINE.json.", readable=False)
    ],
    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Most sequences in a step. Default: the model's own, else 1.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    max_chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Longest update in a step. Default: the model's own, else 512.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    max_logits: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Most positions that a step gives logits of, such as drafts of N - 1 tokens. Default: 16.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    opt_batch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Batch that kernels are chosen for. Default: the largest.", rich_help_panel=_SIZES
        ),
    ] = None,
    max_encoder: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Longest output of an encoder, for models that attend one. Default: what the encoder built makes.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    opt_encoder: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Length of it to choose kernels for. Default: the longest.", rich_help_panel=_SIZES
        ),
    ] = None,
    encoder: Annotated[
        str,
        typer.Option(
            metavar="auto|none|FILE|DIR",
            help="Which encoder becomes an engine too. auto: the exporter's beside the model, if TensorRT takes it. "
            "Else it runs on the CPU.",
            rich_help_panel=_SIZES,
        ),
    ] = "auto",
    decode_weights: Annotated[
        DecodeWeights,
        typer.Option(
            help="For a batch of one: decode with the weights of prefill, or its own. auto: the smaller engine.",
            rich_help_panel=_HOW,
        ),
    ] = DecodeWeights.AUTO,
    min_shapes: Annotated[
        str | None,
        typer.Option(
            "--minShapes",
            metavar="NAME:1x2,...",
            help="Smallest shapes, for inputs of unknown role.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    opt_shapes: Annotated[
        str | None, typer.Option("--optShapes", metavar="NAME:1x2,...", help="Typical shapes.", rich_help_panel=_SIZES)
    ] = None,
    max_shapes: Annotated[
        str | None, typer.Option("--maxShapes", metavar="NAME:1x2,...", help="Largest shapes.", rich_help_panel=_SIZES)
    ] = None,
    backend: Annotated[
        BackendChoice,
        typer.Option(help="auto: TensorRT with a GPU, else TensorRT for RTX.", rich_help_panel=_HOW),
    ] = BackendChoice.AUTO,
    compute_capabilities: Annotated[
        str | None,
        typer.Option(
            metavar="sm80,sm89,...", help="GPUs to build for; current: the one at hand.", rich_help_panel=_HOW
        ),
    ] = None,
    workspace: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most scratch memory, as 4GiB.", rich_help_panel=_HOW)
    ] = None,
    opt_level: Annotated[
        int | None, typer.Option(min=0, max=5, help="TensorRT's effort.", rich_help_panel=_HOW)
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Kernel times, read and written.", rich_help_panel=_HOW, readable=False),
    ] = None,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="Runs on later TensorRT versions too.", rich_help_panel=_HOW)
    ] = False,
    declare_aliases: Annotated[
        bool,
        typer.Option("--declare-aliases", help="Tell TensorRT what the plugin does in place.", rich_help_panel=_HOW),
    ] = False,
    strip_plan: Annotated[
        bool, typer.Option("--strip-plan", help="Leave the weights out of the engine.", rich_help_panel=_HOW)
    ] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Weights can be changed after the build.", rich_help_panel=_HOW)
    ] = False,
    profiling_verbosity: Annotated[
        Verbosity, typer.Option(help="What the engine tells about its layers.", rich_help_panel=_HOW)
    ] = Verbosity.LAYER_NAMES_ONLY,
    memory_check: Annotated[
        bool,
        typer.Option(help="Refuse a build that would not fit into this machine's memory.", rich_help_panel=_HOW),
    ] = True,
    capacity: CapacityOption = None,
    cache_layout: CacheLayoutOption = CacheLayout.AUTO,
    attention_span: SpanOption = Switch.ON,
    fallback: FallbackOption = Fallback.AUTO,
    sliding: SlidingOption = Sliding.LINEAR,
    window_chunk: WindowChunkOption = None,
    latent_attention: LatentOption = LatentAttention.ABSORBED,
    logits: LogitsOption = LogitPositions.LAST,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Build an engine whose caches are updated in place, and its manifest beside it."""
    from trt_kvcache import BuildOptions, OptionError, build_engine
    from trt_kvcache.cli.output import print_json, print_warnings
    from trt_kvcache.cli.progress import build_progress
    from trt_kvcache.engine.options import parse_bytes, parse_shapes

    if decode_weights is DecodeWeights.OWN and max_batch is not None and max_batch > 1:
        raise OptionError(f"--decode-weights own is for a batch of one, and --max-batch is {max_batch}; leave one out")
    options = BuildOptions(
        backend=backend.value,
        max_batch=max_batch,
        opt_batch=opt_batch,
        max_chunk=max_chunk,
        max_logits=max_logits,
        max_encoder=max_encoder,
        opt_encoder=opt_encoder,
        encoder=encoder,
        decode_weights=decode_weights.value,
        min_shapes=parse_shapes(min_shapes) if min_shapes else {},
        opt_shapes=parse_shapes(opt_shapes) if opt_shapes else {},
        max_shapes=parse_shapes(max_shapes) if max_shapes else {},
        compute_capabilities=tuple(compute_capabilities.split(",")) if compute_capabilities else (),
        workspace=parse_bytes(workspace) if workspace else None,
        opt_level=opt_level,
        timing_cache=None if timing_cache is None else str(timing_cache),
        version_compatible=version_compatible,
        declare_aliases=declare_aliases,
        strip_plan=strip_plan,
        refit=refit,
        profiling_verbosity=profiling_verbosity.value,
        memory_check=memory_check,
    )
    plan = plan_options(
        capacity=capacity,
        cache_layout=cache_layout,
        attention_span=attention_span,
        fallback=fallback,
        sliding=sliding,
        window_chunk=window_chunk,
        latent_attention=latent_attention,
        logits=logits,
        config=config,
    )
    start = time.perf_counter()
    with build_progress() as report:
        manifest = build_engine(model, output, options=plan, build=options, progress=report)
    seconds = time.perf_counter() - start
    print_warnings((*manifest.plan.warnings, *manifest.warnings))
    if json:
        print_json(manifest)
    else:
        _print(output, manifest, seconds)


def _print(output: Path, manifest: Manifest, seconds: float) -> None:
    from trt_kvcache.cli.manifest_view import print_profiles
    from trt_kvcache.cli.output import console, human_bytes
    from trt_kvcache.cli.plan_view import batch_of, bytes_of, in_place_text

    out = console()
    plan = manifest.plan
    batch = batch_of(plan, manifest.max_batch)
    sequence, total = bytes_of(plan, batch)
    size = human_bytes(manifest.engine.size)
    out.print(f"{output}: {size}, built in {seconds:.1f} s with {manifest.backend} {manifest.backend_version}")
    out.print(f"{output}.json: its manifest")
    if manifest.encoder is not None:
        encoder, encoder_size = output.with_name(manifest.encoder.name), human_bytes(manifest.encoder.size)
        out.print(f"{encoder}: {encoder_size}, the engine of its encoder; {encoder.name}.json: the manifest of that")
    out.print(
        f"{in_place_text(plan)}; cache memory: {human_bytes(sequence)} per sequence, "
        f"{human_bytes(total)} for a batch of {batch}"
    )
    print_profiles(out, manifest)
