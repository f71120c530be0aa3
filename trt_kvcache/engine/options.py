"""The options of a build, and the parsers of their textual forms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trt_kvcache.errors import OptionError
from trt_kvcache.given import given_list, given_path, given_switch, given_whole, is_whole, shown

BACKENDS = ("auto", "tensorrt", "tensorrt-rtx")
DECODE_WEIGHTS = ("auto", "shared", "own")
PROOFS = ("auto", "off")
VERBOSITIES = ("none", "layer-names-only", "detailed")
REFITS = ("none", "any", "identical")
DEFAULT_CHUNK = 512
DEFAULT_LOGITS = 16
"""Enough to verify drafts of 15 tokens in one step."""
CURRENT = "current"
"""The compute capability of this machine's GPU."""

Shape = tuple[int, ...]

_MOST_STEPS = 256
_MOST, _MOST_BYTES = 2**31 - 1, 2**63 - 1
"""TensorRT's largest numbers of sequences, tokens and positions, and of bytes."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    unit: 1024**power
    for power, letter in enumerate("kmgt", start=1)
    for unit in (letter, f"{letter}ib")
}  # fmt: skip


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build.

    Attributes:
        backend: ``"tensorrt"``, ``"tensorrt-rtx"``, or ``"auto"``: TensorRT if it and a GPU driver are installed,
            otherwise TensorRT for RTX.
        max_batch: the largest batch. None: the model's own, if it is fixed, else 1.
        opt_batch: the batch that TensorRT chooses kernels for. None: `max_batch`.
        max_chunk: the longest update in tokens. None: the model's own, if it is fixed, else 512 or the capacity if
            that is smaller.
        max_logits: most positions at the end of a step with logits; more positions take several steps. Memory grows
            with it. None: 16, or the longest update if that is shorter.
        max_encoder: the longest output of an encoder, in positions, for models that attend one. None: the
            encoder's output for the longest source, if the encoder is built too and the length is known; otherwise from
            `max_shapes`.
        opt_encoder: the length of the encoder's output that TensorRT chooses kernels for. None: `max_encoder`.
        encoder: the encoder that becomes an engine too. ``"auto"``: the encoder beside the model, if there is one and
            TensorRT takes it; ``"none"``; or the path of its ``.onnx`` file or folder.
        decode_weights: for `max_batch` 1; no effect for larger batches. ``"own"``: decode is for a batch of one
            exactly, for which TensorRT stores weights in a layout of their own. ``"shared"``: decode may also take two,
            and uses the weights of prefill. ``"auto"``: the smaller engine (measured with TensorRT for RTX 1.7.1): own
            for quantized weights, otherwise shared.
        min_shapes, opt_shapes, max_shapes: shapes by input name, for inputs that `max_batch`, `max_chunk` and the
            capacity do not determine; see `parse_shapes`.
        compute_capabilities: GPU architectures to build for, as ``"sm80"``, ``"80"`` or ``"8.0"``, or ``"current"``
            alone, for the GPU of this machine (TensorRT for RTX only). Empty: all from 8.0 on.
        workspace: most bytes of GPU scratch memory; see `parse_bytes`. None: TensorRT's default.
        opt_level: TensorRT's builder optimization level, 0 to 5. None: its default (TensorRT only).
        timing_cache: file of measured kernel times, read if it exists and written after the build (TensorRT only).
        version_compatible: the engine runs on later TensorRT versions of the same major version (TensorRT only).
        declare_aliases: tell TensorRT that the plugin's present and past caches are one buffer, instead of only binding
            one address to both (TensorRT only). TensorRT may then copy whole caches to keep its own promises.
        strip_plan: leave the weights that can be refitted out of the engine.
        refit: weights can be set after the build: ``"any"``, or ``"identical"``, those of the build alone, which an
            engine without them (`strip_plan`) gets back. ``"none"``.
        profiling_verbosity: ``"none"``, ``"layer-names-only"`` or ``"detailed"``: detail in which the engine
            describes its layers.
        proof: ``"auto"``: record a decode of the original, which the engine has to repeat where it runs, if that takes
            less than two minutes and fits into memory; ``"off"``; or the number of its steps, whatever it takes.
        log: file for TensorRT's own log, in full; ``"-"``: stderr. None: warnings and errors alone, as the result has
            them.
        memory_check: refuse a build that would not fit into this machine's memory, by an estimate (TensorRT for RTX
            only).

    Raises:
        OptionError: a value is illegal.
    """

    backend: str = "auto"
    max_batch: int | None = None
    opt_batch: int | None = None
    max_chunk: int | None = None
    max_logits: int | None = None
    max_encoder: int | None = None
    opt_encoder: int | None = None
    encoder: str = "auto"
    decode_weights: str = "auto"
    min_shapes: Mapping[str, Shape] = field(default_factory=dict)
    opt_shapes: Mapping[str, Shape] = field(default_factory=dict)
    max_shapes: Mapping[str, Shape] = field(default_factory=dict)
    compute_capabilities: tuple[str, ...] = ()
    workspace: int | None = None
    opt_level: int | None = None
    timing_cache: str | None = None
    version_compatible: bool = False
    declare_aliases: bool = False
    strip_plan: bool = False
    refit: str = "none"
    profiling_verbosity: str = "layer-names-only"
    proof: str | int = "auto"
    log: str | None = None
    memory_check: bool = True

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("decode_weights", self.decode_weights, DECODE_WEIGHTS)
        _one_of("profiling_verbosity", self.profiling_verbosity, VERBOSITIES)
        _one_of("refit", self.refit, REFITS)
        for name in ("max_batch", "opt_batch", "max_chunk", "max_logits", "max_encoder", "opt_encoder", "workspace"):
            if getattr(self, name) is None:
                continue
            value = given_whole(getattr(self, name), name)
            if value < 1:
                raise OptionError(f"{name} is {value}; it must be at least 1")
            limit = _MOST_BYTES if name == "workspace" else _MOST
            if value > limit:
                raise OptionError(f"{name} is {value}; it must be at most {limit}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "proof", _proof(self.proof))
        if self.log is not None:
            object.__setattr__(self, "log", str(given_path(self.log, "log")))
        for name in ("version_compatible", "declare_aliases", "strip_plan", "memory_check"):
            given_switch(getattr(self, name), name)
        for name in ("min_shapes", "opt_shapes", "max_shapes"):
            object.__setattr__(self, name, _shapes(getattr(self, name), name))
        object.__setattr__(self, "encoder", str(given_path(self.encoder, "encoder")))
        if self.opt_encoder is not None and self.opt_encoder > (self.max_encoder or 0):
            most = "none is given" if self.max_encoder is None else f"it is {self.max_encoder}"
            raise OptionError(
                f"opt_encoder is {self.opt_encoder}, which needs a max_encoder of at least as much, and {most}"
            )
        if self.opt_level is not None:
            object.__setattr__(self, "opt_level", given_whole(self.opt_level, "opt_level"))
            if not 0 <= self.opt_level <= 5:
                raise OptionError(f"opt_level is {self.opt_level}; it must be 0 to 5")
        texts = given_list(self.compute_capabilities, "compute_capabilities", "texts, such as 'sm80'")
        capabilities = dict.fromkeys(_compute_capability(text) for text in texts)
        if CURRENT in capabilities and len(capabilities) > 1:
            raise OptionError(f"compute capability {CURRENT!r} is this machine's GPU, and goes with no other")
        object.__setattr__(self, "compute_capabilities", tuple(capabilities))
        if self.timing_cache is not None:
            object.__setattr__(self, "timing_cache", str(given_path(self.timing_cache, "timing_cache").absolute()))


def parse_shapes(text: str) -> dict[str, Shape]:
    """Return shapes by input name, from trtexec's form ``name:1x2x3,other:4``.

    Raises:
        OptionError: the text has another form, or a name is given twice.
    """
    shapes: dict[str, Shape] = {}
    for item in text.split(","):
        name, _, dims = item.strip().rpartition(":")
        if not name or not re.fullmatch(r"\d+(x\d+)*", dims):
            raise OptionError(f"shape {item.strip()!r} is not of the form name:1x2x3 (several: name:1x2x3,other:4)")
        if name in shapes:
            raise OptionError(f"the shape of {name!r} is given twice: {text!r}")
        shapes[name] = tuple(int(d) for d in dims.split("x"))
    return shapes


def format_shapes(shapes: Mapping[str, Shape]) -> str:
    """The inverse of `parse_shapes`."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def parse_bytes(text: str) -> int:
    """Return bytes, from ``"4GiB"``, ``"512M"`` (M, G: binary, as in trtexec), ``"4GB"`` (decimal) or a plain number.

    Raises:
        OptionError: the text has another form, or gives less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise OptionError(f"size {text!r} is not a number of bytes such as 4GiB, 512MiB or 1000000")
    value = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if value < 1:
        raise OptionError(f"size {text!r} is less than one byte")
    return value


def _proof(given: object) -> str | int:
    """Return ``"auto"``, ``"off"`` or a number of steps."""
    if isinstance(given, str) and given in PROOFS:
        return given
    steps = int(given) if isinstance(given, str) and given.isascii() and given.isdecimal() else given
    if not is_whole(steps) or not 1 <= steps <= _MOST_STEPS:
        raise OptionError(f"proof is {shown(given)}; it must be auto, off or a number of steps, 1 to {_MOST_STEPS}")
    return int(steps)


def _one_of(name: str, value: str, legal: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in legal:
        raise OptionError(f"{name} is {shown(value)}; it must be one of {', '.join(legal)}")


def _shapes(given: object, name: str) -> dict[str, Shape]:
    """Return shapes by input name, as plain numbers."""
    if not isinstance(given, Mapping) or not all(
        isinstance(key, str) and isinstance(shape, Sequence) and all(is_whole(size) for size in shape)
        for key, shape in given.items()
    ):
        raise OptionError(f"{name} is {shown(given)}; give shapes by input name, such as {{'mask': (1, 64)}}")
    return {key: tuple(int(size) for size in shape) for key, shape in given.items()}


def _compute_capability(text: object) -> str:
    """Return ``"sm80"`` for ``"sm80"``, ``"sm_80"``, ``"80"`` or ``"8.0"``; `CURRENT` stays."""
    if not isinstance(text, str):
        raise OptionError(f"compute capability {shown(text)} is no text such as 'sm80'")
    if text.strip().lower() == CURRENT:
        return CURRENT
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", text.strip().lower())
    if match is None:
        raise OptionError(f"compute capability {text!r} is not of the form sm80, 80 or 8.0, nor {CURRENT}")
    return f"sm{match[1]}{match[2]}"
