"""Options that several commands share, and the `PlanOptions` made of them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.importer.plan import CacheLayout, Fallback, Target

if TYPE_CHECKING:
    from trt_kvcache.importer.plan import PlanOptions


class Switch(str, Enum):
    """``on`` or ``off``."""

    ON = "on"
    OFF = "off"


class BackendChoice(str, Enum):
    """Which TensorRT builds the engine."""

    AUTO = "auto"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


class Verbosity(str, Enum):
    """What an engine tells about its layers."""

    NONE = "none"
    LAYER_NAMES_ONLY = "layer-names-only"
    DETAILED = "detailed"


_PLAN = "How the model is planned"

ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="ONNX decoder, opset 24 or later.")]
AllOption = Annotated[bool, typer.Option("--all", help="One row per layer, nothing shortened.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
CapacityOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="TOKENS", help="Tokens per sequence, for a symbolic cache length.", rich_help_panel=_PLAN
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
ConfigOption = Annotated[
    Path | None,
    typer.Option(metavar="YAML", help="Name patterns for roles, tried before the shipped ones.", rich_help_panel=_PLAN),
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
    packed_native: Switch = Switch.ON,
) -> PlanOptions:
    """Make `PlanOptions` of the options as given on the command line."""
    from trt_kvcache.importer.plan import PlanOptions

    return PlanOptions(
        target=target,
        capacity=capacity,
        cache_layout=cache_layout,
        attention_span=attention_span is Switch.ON,
        fallback=fallback,
        packed_native=packed_native is Switch.ON,
        config=None if config is None else str(config),
    )
