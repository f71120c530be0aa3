"""Options that several commands share, and the `PlanOptions` made of them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import (
    CacheLayout,
    Fallback,
    LatentAttention,
    LogitPositions,
    PlanOptions,
    Sliding,
    Target,
)


class Switch(str, Enum):
    """``on`` or ``off``."""

    ON = "on"
    OFF = "off"


class BackendChoice(str, Enum):
    """Which TensorRT builds the engine."""

    AUTO = "auto"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


class DecodeWeights(str, Enum):
    """Whether decode steps of one row have weights of their own."""

    AUTO = "auto"
    SHARED = "shared"
    OWN = "own"


class Verbosity(str, Enum):
    """What an engine tells about its layers."""

    NONE = "none"
    LAYER_NAMES_ONLY = "layer-names-only"
    DETAILED = "detailed"


_PLAN = "How the model is planned"

ModelArgument = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="ONNX decoder with KV caches, or the folder of its export.", readable=False),
]
EmbeddingsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Of token ids, for a model that takes embeddings: .onnx, .npy or .safetensors[:TENSOR]. Default: the "
        "exporter's model beside it.",
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="One row per layer, nothing shortened.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
CapacityOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="TOKENS",
        help="Tokens per sequence, for caches that grow or have a symbolic length. Default of generate: what its texts "
        "need.",
        rich_help_panel=_PLAN,
    ),
]
CacheLayoutOption = Annotated[
    CacheLayout,
    typer.Option(
        help="auto: sequence-major caches become [B, N, S_max, H] in the engine. preserve: byte order is kept.",
        rich_help_panel=_PLAN,
    ),
]
SpanOption = Annotated[
    Switch,
    typer.Option(
        "--attention-span", help="Attend to the active rows only, not to the capacity.", rich_help_panel=_PLAN
    ),
]
FallbackOption = Annotated[
    Fallback,
    typer.Option(
        help="For updates that TensorRT's own layer does not know. contract: native, if no update straddles the wrap. "
        "functional: plain operators, not in place.",
        rich_help_panel=_PLAN,
    ),
]
SlidingOption = Annotated[
    Sliding,
    typer.Option(
        help="Where attention sees a window only. circular: caches hold the window and one update, not the text.",
        rich_help_panel=_PLAN,
    ),
]
WindowChunkOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="TOKENS",
        help=f"With --sliding circular: longest update in a step. Default: {PlanOptions().window_chunk}.",
        rich_help_panel=_PLAN,
    ),
]
LatentOption = Annotated[
    LatentAttention,
    typer.Option(
        "--latent-attention",
        help="Where caches hold latents (MLA). absorbed: for decoding. expanded: for steps of several hundred tokens.",
        rich_help_panel=_PLAN,
    ),
]
LogitsOption = Annotated[
    LogitPositions,
    typer.Option(
        help="last: logits of as many of a step's last positions as asked for; prefill needs one. all: as exported.",
        rich_help_panel=_PLAN,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="YAML",
        help="Name patterns for roles, tried before the shipped ones.",
        rich_help_panel=_PLAN,
        readable=False,
    ),
]
TargetOption = Annotated[
    Target, typer.Option(help="The builder to plan for; need not be installed.", rich_help_panel=_PLAN)
]
PackedOption = Annotated[
    Switch,
    typer.Option("--packed-native", help="off for TensorRT 10.15 and 10.16.", rich_help_panel=_PLAN),
]


def plan_options(
    *,
    target: Target = Target.TENSORRT_RTX,
    capacity: int | None,
    cache_layout: CacheLayout,
    attention_span: Switch,
    fallback: Fallback,
    config: Path | None,
    sliding: Sliding,
    window_chunk: int | None,
    latent_attention: LatentAttention,
    logits: LogitPositions,
    packed_native: Switch = Switch.ON,
) -> PlanOptions:
    """Make `PlanOptions` of the options as given on the command line.

    Raises:
        OptionError: one has no effect without another.
    """
    return PlanOptions(
        target=target,
        capacity=capacity,
        cache_layout=cache_layout,
        attention_span=attention_span is Switch.ON,
        fallback=fallback,
        packed_native=packed_native is Switch.ON,
        config=None if config is None else str(config),
        sliding=sliding,
        window_chunk=_window_chunk(sliding, window_chunk),
        latent_attention=latent_attention,
        logits=logits,
    )


def runner_options(
    model: Path,
    capacity: int | None,
    sliding: Sliding,
    window_chunk: int | None,
    latent_attention: LatentAttention,
    logits: LogitPositions,
) -> dict[str, Any]:
    """Options of `DecodeSession.open` made of those that plan a model; none where none was given.

    Raises:
        OptionError: they are given for an engine, which was planned when it was built; or one has no effect without
            another.
    """
    given = (capacity, sliding, window_chunk, latent_attention, logits)
    if given == (None, Sliding.LINEAR, None, LatentAttention.ABSORBED, LogitPositions.LAST):
        return {}
    if model.suffix.lower() != ".onnx" and not model.is_dir():
        raise OptionError(
            f"--capacity, --sliding, --window-chunk, --latent-attention and --logits plan a model, and {model} is "
            "taken for an engine, which was planned when it was built; leave them out, or give the .onnx file"
        )
    options = PlanOptions(
        capacity=capacity,
        sliding=sliding,
        window_chunk=_window_chunk(sliding, window_chunk),
        latent_attention=latent_attention,
        logits=logits,
    )
    return {"plan_options": options}


def _window_chunk(sliding: Sliding, given: int | None) -> int:
    if given is not None and sliding is not Sliding.CIRCULAR:
        raise OptionError(f"--window-chunk {given} has no effect without --sliding circular; add that, or leave it out")
    return PlanOptions().window_chunk if given is None else given
