"""The choices that a caller has about a plan.

Nothing here imports ONNX or TensorRT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from trt_kvcache.errors import OptionError
from trt_kvcache.given import given_path, given_switch, given_whole, is_number, shown


class Target(str, Enum):
    """The builder that a plan is for."""

    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


class CacheLayout(str, Enum):
    """The option ``--cache-layout``: may a cache change its physical layout?"""

    AUTO = "auto"
    """Sequence-major caches that only attention reads become ``[B, N, S_max, H]``: no transpose before attention."""
    PRESERVE = "preserve"
    """Every cache keeps its byte order."""


class Fallback(str, Enum):
    """The option ``--fallback``: what to do where TensorRT's own layer does not know an update."""

    AUTO = "auto"
    """`Route.PLUGIN` on TensorRT. On TensorRT for RTX, which has no plugins: `CONTRACT` where that is possible, else
    `FUNCTIONAL`."""
    CONTRACT = "contract"
    """Native with a modulo on the write index, under the contract that no update straddles the wrap."""
    FUNCTIONAL = "functional"
    """Plain operators, no contract, not in place."""


class Sliding(str, Enum):
    """The option ``--sliding``: how to hold a cache of which attention only sees a window."""

    LINEAR = "linear"
    """All tokens up to the capacity, as the model has it."""
    CIRCULAR = "circular"
    """A circular buffer of the window and one update: memory and step time stop growing with the text."""


class LatentAttention(str, Enum):
    """The option ``--latent-attention``: how to attend where caches hold latents, and weights make keys and values."""

    ABSORBED = "absorbed"
    """Queries go to the latents: no row is multiplied with a weight. Fast where a step has few tokens."""
    EXPANDED = "expanded"
    """Keys and values of all rows in use are computed in each step, as exported. Fast where a step has many tokens."""


class LogitPositions(str, Enum):
    """The option ``--logits``: of which positions of a step are they computed?"""

    LAST = "last"
    """Of as many of the last ones as the caller asks for (adds an input, see `LogitsSpan`): prefill needs one."""
    ALL = "all"
    """Of those that the model as exported gives."""


class CacheDtype(str, Enum):
    """The option ``--cache-dtype``: what rows of a cache of floats are quantized to."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    """8-bit floats, float8e4m3fn. TensorRT only."""


@dataclass(frozen=True)
class PlanOptions:
    """The choices that a caller has about a plan.

    Attributes:
        target: which builder the plan is for; its package need not be installed.
        capacity: tokens per sequence, for a model whose caches grow or have a symbolic length. None: those of the
            longest text that ``config.json`` or ``genai_config.json`` names, at most 4096; see the options of a plan.
        cache_layout: may caches be reordered physically?
        attention_span: read only the active rows of the caches (adds an input, see `SpanInput`).
        fallback: what to do where TensorRT's own layer does not know an update.
        packed_native: the target knows packed updates natively (TensorRT from 11.0 on, TensorRT for RTX).
        config: a YAML file with name patterns for roles, used before the shipped ones.
        sliding: how to hold caches of which attention only sees a window.
        window_chunk: the most tokens of one update, where `sliding` makes circular caches: they hold that many rows
            beside the window.
        latent_attention: how to attend over latents.
        logits: of which positions of a step the logits are computed.
        cache_dtype: what the rows of caches are quantized to; None: caches stay in the model's type.
        cache_ranges: the largest magnitude in the rotated rows of each cache, by the name of its input, as
            `calibrate_caches` finds it: one scale for the cache follows, and larger numbers become it. None: each row
            has its own scale.
        lora_rank: the largest rank of adapters (LoRA), which the model then takes as inputs; None: it takes none.
        lora_slots: adapters that it holds at a time.
        lora_targets: last parts of the names of the modules that adapters change, such as ``"q_proj"``; ``"all"``: all
            linear modules of the layers.
        checkpoint: folder of the checkpoint that the model was exported from: its weights say which product is which
            module, where the names in the model do not. None: the model's own folder, if it holds one.
        check_seconds: the most processor time that the comparison of the rewritten model with the original may take;
            where other work leaves it less than a fifth of a core, five times as many seconds.
        check_memory: GiB of address space that it may use.
        recheck: compare again what an earlier comparison found equal.

    Raises:
        OptionError: a value is none of its enum's, or of another type. Those of enums may be given as text.
    """

    target: Target = Target.TENSORRT_RTX
    capacity: int | None = None
    cache_layout: CacheLayout = CacheLayout.AUTO
    attention_span: bool = True
    fallback: Fallback = Fallback.AUTO
    packed_native: bool = True
    config: str | None = None
    sliding: Sliding = Sliding.LINEAR
    window_chunk: int = 128
    latent_attention: LatentAttention = LatentAttention.ABSORBED
    logits: LogitPositions = LogitPositions.LAST
    cache_dtype: CacheDtype | None = None
    cache_ranges: Mapping[str, float] | None = None
    lora_rank: int | None = None
    lora_slots: int = 8
    lora_targets: tuple[str, ...] = ("all",)
    checkpoint: str | None = None
    check_seconds: int = 120
    check_memory: int = 8
    recheck: bool = False

    def __post_init__(self) -> None:
        for name, kind in _ENUMS.items():
            if name == "cache_dtype" and self.cache_dtype is None:
                continue
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except (ValueError, TypeError):
                legal = ", ".join(member.value for member in kind)
                raise OptionError(f"{name} is {shown(getattr(self, name))}; it must be one of {legal}") from None
        for name in ("capacity", "window_chunk"):
            if self.capacity is not None or name != "capacity":
                object.__setattr__(self, name, given_whole(getattr(self, name), name, " of tokens"))
        for name, unit in (("check_seconds", "seconds"), ("check_memory", "GiB")):
            object.__setattr__(self, name, given_whole(getattr(self, name), name, f" of {unit}"))
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be at least 1")
        self._check_adapters()
        for name in ("attention_span", "packed_native", "recheck"):
            given_switch(getattr(self, name), name)
        if self.config is not None:
            object.__setattr__(self, "config", str(given_path(self.config, "config")))
        if self.cache_ranges is not None:
            object.__setattr__(self, "cache_ranges", _given_ranges(self.cache_ranges, self.cache_dtype))

    def _check_adapters(self) -> None:
        for name in ("lora_rank", "lora_slots"):
            if self.lora_rank is not None or name != "lora_rank":
                object.__setattr__(self, name, given_whole(getattr(self, name), name))
                if not 1 <= getattr(self, name) <= _MOST_ADAPTERS:
                    raise OptionError(f"{name} is {getattr(self, name)}; it must be 1 to {_MOST_ADAPTERS}")
        targets: object = self.lora_targets
        targets = tuple(targets.split(",")) if isinstance(targets, str) else targets
        if not isinstance(targets, (tuple, list)) or not targets or not all(t and isinstance(t, str) for t in targets):
            raise OptionError(f"lora_targets is {shown(targets)}; give names of modules, such as q_proj,v_proj, or all")
        object.__setattr__(self, "lora_targets", tuple(targets))
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", str(given_path(self.checkpoint, "checkpoint")))

    def unquantized(self) -> PlanOptions:
        """The same with the caches that the model has."""
        return replace(self, cache_dtype=None, cache_ranges=None)


def _given_ranges(ranges: object, dtype: CacheDtype | None) -> dict[str, float]:
    if dtype is None:
        raise OptionError("cache_ranges are given, and no cache_dtype: give the type as well, or leave the ranges out")
    if not isinstance(ranges, Mapping):
        raise OptionError(f"cache_ranges is {shown(ranges)}; give a mapping, as calibrate_caches returns it")
    for name, value in ranges.items():
        if not (is_number(value) and _LEAST < float(value) < _MOST):
            raise OptionError(
                f"cache_ranges['{name}'] is {shown(value)}; it must be the largest magnitude in that cache, a number "
                "above 0"
            )
    return {str(name): float(value) for name, value in ranges.items()}


_MOST_ADAPTERS = 4096
_LEAST, _MOST = 1e-30, 3e38  # their scales are normal numbers in float32


_ENUMS: dict[str, type[Enum]] = {
    "target": Target,
    "cache_layout": CacheLayout,
    "fallback": Fallback,
    "sliding": Sliding,
    "latent_attention": LatentAttention,
    "logits": LogitPositions,
    "cache_dtype": CacheDtype,
}
