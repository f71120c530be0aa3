"""Defines the options of a plan, such as target and capacity. This module imports neither ONNX nor TensorRT."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, Unpack

from trt_kvcache.arguments import is_number, shown
from trt_kvcache.errors import OptionError
from trt_kvcache.setting import Setting, check_settings, described


class Target(str, Enum):
    """The builder for which a plan is made: TensorRT or TensorRT for RTX."""

    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


class CacheLayout(str, Enum):
    """The option ``--cache-layout``: whether a cache may have another layout in the engine."""

    AUTO = "auto"
    """Sequence-major caches that only attention reads become ``[B, N, S_max, H]``. This avoids a transpose."""
    PRESERVE = "preserve"
    """Every cache keeps its memory layout."""


class Fallback(str, Enum):
    """The option ``--fallback``: how to write updates that TensorRT's own layer does not support."""

    AUTO = "auto"
    """`Route.PLUGIN` on TensorRT. TensorRT for RTX has no plugins; there it means `CONTRACT` if that is possible, else
    `FUNCTIONAL`."""
    CONTRACT = "contract"
    """Native, with a modulo on the write index. The caller must ensure that no update crosses the end of the ring."""
    FUNCTIONAL = "functional"
    """Plain operators: without a contract, but not in place."""


class Sliding(str, Enum):
    """The option ``--sliding``: how to store a cache of which attention sees only a window."""

    LINEAR = "linear"
    """The cache holds all tokens up to the capacity, as in the exported model."""
    CIRCULAR = "circular"
    """A circular buffer for the window and one update. Memory and step time do not grow with the number of tokens."""


class LogitPositions(str, Enum):
    """The option ``--logits``: the positions of a step for which logits are computed."""

    LAST = "last"
    """The last positions, as many as the caller requests with an added input (see `LogitsSpan`). Prefill needs one."""
    ALL = "all"
    """The same positions as in the exported model."""


class CacheDtype(str, Enum):
    """The option ``--cache-dtype``: the type to which rows of float caches are quantized."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    """8-bit floats, float8e4m3fn. Only for TensorRT."""


_MOST_ADAPTERS = 4096
_LEAST, _MOST = 1e-30, 3e38  # limits of ranges, so that scales are normal numbers in float32


class PlanValues(TypedDict, total=False):
    """The keyword arguments of `PlanOptions`. Values of enums may also be text."""

    target: Target | Literal["tensorrt", "tensorrt-rtx"]
    capacity: int | None
    beyond_length: bool | Literal["on", "off"]
    cache_layout: CacheLayout | Literal["auto", "preserve"]
    attention_span: bool | Literal["on", "off"]
    fallback: Fallback | Literal["auto", "contract", "functional"]
    packed_native: bool | Literal["on", "off"]
    config: str | os.PathLike[str] | None
    sliding: Sliding | Literal["linear", "circular"]
    window_chunk: int
    logits: LogitPositions | Literal["last", "all"]
    cache_dtype: CacheDtype | Literal["int8", "int4", "fp8"] | None
    cache_ranges: Mapping[str, float] | None
    lora_rank: int | None
    lora_slots: int
    lora_targets: Sequence[str]
    checkpoint: str | os.PathLike[str] | None
    check_seconds: int
    check_memory: int
    recheck: bool


@described
@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan. Values of enums may also be given as text.

    Raises:
        OptionError: a value has the wrong type, is not in its enum, or is out of range.
    """

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[PlanValues]) -> None: ...

    target: Annotated[Target, Setting("Builder to plan for. It need not be installed.")] = Target.TENSORRT_RTX
    capacity: Annotated[
        int | None,
        Setting(
            "Tokens per sequence, for caches that grow or have a symbolic length. Default: the length of the model's "
            "longest text, at most 4096; generate uses more if its texts need it.",
            "config.json or genai_config.json gives the longest text; see the options of a plan.",
            short="c",
            metavar="TOKENS",
            unit="tokens",
            least=1,
        ),
    ] = None
    beyond_length: Annotated[
        bool,
        Setting(
            "Allow a capacity beyond the model's longest text. Longer texts are unreliable.", choices=("on", "off")
        ),
    ] = False
    cache_layout: Annotated[
        CacheLayout,
        Setting(
            "auto: sequence-major caches become [B, N, S_max, H] in the engine. preserve: caches keep their layout."
        ),
    ] = CacheLayout.AUTO
    attention_span: Annotated[
        bool,
        Setting(
            "Attend only to the rows in use, not to the whole capacity.",
            "Adds an input, see `SpanInput`.",
            choices=("on", "off"),
        ),
    ] = True
    fallback: Annotated[
        Fallback,
        Setting(
            "How to write updates that TensorRT's own layer does not support. contract: by that layer; correct only if "
            "no update crosses the end of the ring. functional: by plain operators, not in place.",
            "auto: `Route.PLUGIN` on TensorRT; on TensorRT for RTX, contract if that is possible, else functional.",
        ),
    ] = Fallback.AUTO
    packed_native: Annotated[
        bool,
        Setting(
            "Use TensorRT's own layer for packed updates. off: for TensorRT 10.15 and 10.16, which do not have it.",
            "Later versions and TensorRT for RTX have a layer for packed updates.",
            choices=("on", "off"),
        ),
    ] = True
    config: Annotated[
        str | None,
        Setting(
            "YAML file with name patterns for roles, used before the shipped patterns.", metavar="YAML", is_path=True
        ),
    ] = None
    sliding: Annotated[
        Sliding,
        Setting(
            "For attention that sees only a window. circular: caches hold only the window and one update, not all "
            "tokens."
        ),
    ] = Sliding.LINEAR
    window_chunk: Annotated[
        int,
        Setting(
            "With --sliding circular: the most tokens of an update. Default: 128.",
            "Caches have this many rows more than the window.",
            metavar="TOKENS",
            unit="tokens",
            least=1,
        ),
    ] = 128
    logits: Annotated[
        LogitPositions,
        Setting(
            "last: compute logits only for the last positions, as many as the caller requests. all: for the "
            "same positions as in the exported model.",
            "last adds an input, see `LogitsSpan`.",
        ),
    ] = LogitPositions.LAST
    cache_dtype: Annotated[
        CacheDtype | None,
        Setting(
            "Quantize the rows of float caches, with a scale for each row and head. fp8: TensorRT only.",
            "None: caches keep the model's type.",
        ),
    ] = None
    cache_ranges: Annotated[
        Mapping[str, float] | None,
        Setting(
            "Maps each cache's input to the largest magnitude in its rows after quantization has rotated them; see "
            "`calibrate_caches`. Each cache then has one scale, and larger numbers are clipped. None: each row "
            "has its own scale.",
            has_flag=False,
        ),
    ] = None
    lora_rank: Annotated[
        int | None,
        Setting(
            "Add inputs for adapters (LoRA) of up to this rank; each sequence chooses one. Default: the rank of the "
            "given adapters.",
            metavar="N",
            least=1,
            most=_MOST_ADAPTERS,
        ),
    ] = None
    lora_slots: Annotated[
        int,
        Setting(
            "Number of adapters from which sequences of a step can choose.", metavar="N", least=1, most=_MOST_ADAPTERS
        ),
    ] = 8
    lora_targets: Annotated[
        tuple[str, ...],
        Setting(
            "Modules that adapters may change, by the last part of their names, such as q_proj,v_proj.",
            "all: the linear modules of all layers.",
            metavar="NAME,...|all",
            unit="names of modules, such as q_proj and v_proj, or all",
            read=lambda text: text.split(","),
        ),
    ] = ("all",)
    checkpoint: Annotated[
        str | None,
        Setting(
            "For adapters: the checkpoint of the model. Needed if names in the model do not show which module a "
            "MatMul or Gemm comes from.",
            "None: a checkpoint in the model's own folder, if there is one.",
            metavar="FOLDER",
            is_path=True,
        ),
    ] = None
    check_seconds: Annotated[
        int,
        Setting(
            "Limit of processor time for the check of the rewritten model.",
            "Because other processes may use the cores, the limit of real time is five times as long.",
            metavar="SECONDS",
            unit="seconds",
            least=1,
        ),
    ] = 120
    check_memory: Annotated[
        int, Setting("Limit of address space for the check.", metavar="GIB", unit="GiB", least=1)
    ] = 8
    recheck: Annotated[bool, Setting("Repeat checks that passed before.")] = False

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.lora_targets or not all(isinstance(name, str) and name for name in self.lora_targets):
            raise OptionError(
                f"lora_targets is {shown(self.lora_targets)}; it must be names of modules, such as q_proj,v_proj, or "
                "all"
            )
        if self.cache_ranges is not None:
            object.__setattr__(self, "cache_ranges", _checked_ranges(self.cache_ranges, self.cache_dtype))

    def unquantized(self) -> PlanOptions:
        """Return the same options without quantized caches."""
        return replace(self, cache_dtype=None, cache_ranges=None)


def _checked_ranges(ranges: object, dtype: CacheDtype | None) -> dict[str, float]:
    if dtype is None:
        raise OptionError(
            "cache_ranges are given without cache_dtype: give cache_dtype, too, or leave cache_ranges out"
        )
    if not isinstance(ranges, Mapping):
        raise OptionError(
            f"cache_ranges is {shown(ranges)}; it must be a mapping, such as the result of calibrate_caches"
        )
    for name, value in ranges.items():
        if not (is_number(value) and _LEAST < float(value) < _MOST):
            raise OptionError(
                f"cache_ranges['{name}'] is {shown(value)}; it must be the largest magnitude in this cache, a number "
                "above 0"
            )
    return {str(name): float(value) for name, value in ranges.items()}
