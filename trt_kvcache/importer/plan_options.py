"""Defines the options of a plan, such as target and capacity, and records them in a rewritten file.

A rewritten file is made for TensorRT and other runtimes, and cannot be planned again. To get its plan, this package
plans the source again with the options in the metadata. `verify` can compare the file with its source. This module
imports neither ONNX nor TensorRT.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, Unpack

from trt_kvcache.arguments import is_number, shown
from trt_kvcache.errors import InvalidModelError, OptionError, UnsupportedModelError
from trt_kvcache.setting import Setting, check_settings, described

if TYPE_CHECKING:
    import onnx


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
    """`Route.PLUGIN` on TensorRT. On TensorRT for RTX (no plugins), `CONTRACT` if possible, otherwise `FUNCTIONAL`."""
    CONTRACT = "contract"
    """By TensorRT's own layer, at the write index modulo capacity. No update may cross the end of a circular cache."""
    FUNCTIONAL = "functional"
    """By plain operators. Updates may cross the end of a circular cache, but each step writes the whole cache."""


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
            "auto: by our plugin on TensorRT. TensorRT for RTX has no plugins: there, contract if possible, else "
            "functional.",
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
            "Modules that adapters may change: the last part of each module's name, such as q_proj,v_proj.",
            "all: every linear module in every layer.",
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


_RECORD = "trt_kvcache.options"
_TAIL = 1 << 16  # bytes at the end of a file, which hold the metadata
_KEYS = (_RECORD, "trt_kvcache.plan")  # the second key: older versions stored the plan


def record_options(model: onnx.ModelProto, options: PlanOptions) -> None:
    """Write the options with which a model was rewritten into the metadata of the model."""
    import msgspec  # only rewritten files need it here

    model.metadata_props.add(key=_RECORD, value=msgspec.json.encode(options).decode())


def refuse_rewritten(model: onnx.ModelProto, path: Path) -> None:
    """Raise `UnsupportedModelError` if the metadata say that the model was rewritten before."""
    if any(entry.key in _KEYS for entry in model.metadata_props):
        raise UnsupportedModelError(
            f"{path}: was rewritten by trt_kvcache already, for TensorRT and other runtimes; give the model that it "
            f"was made from, and compare the two with 'verify MODEL --rewritten {path.name}'"
        )


def was_rewritten(path: Path) -> bool:
    """True if the metadata at the end of a model file say that trt_kvcache rewrote the model."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return _RECORD.encode() in file.read()


def recorded_options(model: onnx.ModelProto, options: PlanOptions, path: Path) -> PlanOptions:
    """Return the options recorded in a rewritten model, with `config`, `checkpoint` and check settings of `options`."""
    import msgspec

    record = next((entry.value for entry in model.metadata_props if entry.key == _RECORD), None)
    if record is None:
        raise InvalidModelError(
            f"{path}: the file does not record the options of a rewrite; give a file that 'rewrite' wrote"
        )
    try:
        recorded: PlanOptions = msgspec.json.decode(record, type=PlanOptions)
    except (msgspec.MsgspecError, RecursionError, OptionError) as error:
        raise InvalidModelError(
            f"{path}: its record of options cannot be read ({error}): rewrite the model again"
        ) from None
    if recorded.config is not None and options.config is None:
        raise OptionError(f"{path}: was rewritten with a file of name patterns; give the same file with --config")
    own = {
        name: getattr(options, name) for name in ("config", "checkpoint", "check_seconds", "check_memory", "recheck")
    }
    recorded, default = replace(recorded, **own), PlanOptions()
    for field in fields(PlanOptions):
        wanted, had = getattr(options, field.name), getattr(recorded, field.name)
        if wanted not in (had, getattr(default, field.name)):
            raise OptionError(
                f"{path}: was rewritten with {field.name} {_text(had)}, but the option now is {_text(wanted)}: leave "
                "the option out, or rewrite the model again"
            )
    return recorded


def _text(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else shown(value)
