"""The options of a build, and parsers for their text on the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, Unpack

from trt_kvcache.arguments import is_whole, shown
from trt_kvcache.errors import OptionError
from trt_kvcache.setting import Setting, check_settings, described

BACKENDS = ("auto", "tensorrt", "tensorrt-rtx")
DECODE_WEIGHTS = ("auto", "shared", "own")
PROOFS = ("auto", "off")
VERBOSITIES = ("none", "layer-names-only", "detailed")
REFITS = ("none", "any", "identical")
DEFAULT_CHUNK = 512
DEFAULT_LOGITS = 16
"""The default of `max_logits`: enough to verify drafts of 15 tokens in one step."""
CURRENT = "current"
"""The name for the compute capability of this machine's GPU."""

Shape = tuple[int, ...]

_MOST_STEPS = 256
_MOST = 2**31 - 1  # TensorRT's largest number of sequences, tokens and positions
_MOST_ROWS = 65_536  # limit of TensorRT for RTX 1.7: a profile of 4,000,000 rows does not fit into its shapes
_LEAST_WORKSPACE = 1 << 20  # bytes; a smaller number without a unit was probably meant in another unit

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    unit: 1024**power
    for power, letter in enumerate("kmgt", start=1)
    for unit in (letter, f"{letter}ib")
}  # fmt: skip


def parse_shapes(text: str) -> dict[str, Shape]:
    """Return shapes by input name, from ``name:1x2x3,other:4`` (trtexec's form); raise `OptionError` if malformed."""
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
    """Return shapes in the text form that `parse_shapes` reads."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def parse_bytes(text: str) -> int:
    """Return bytes, from ``"4GiB"``, ``"512M"`` (M, G: binary, as in trtexec), ``"4GB"`` (decimal) or a plain number.

    Raises `OptionError` if the text has another form, or gives less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise OptionError(f"size {text!r} is not a number of bytes such as 4GiB, 512MiB or 1000000")
    value = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if value < 1:
        raise OptionError(f"size {text!r} is less than one byte")
    return value


def _read_shapes(text: str) -> dict[str, Shape]:
    return parse_shapes(text) if text else {}


_size = partial(Setting, group="What the engine must hold", least=1)
_how = partial(Setting, group="How the engine is built")


class BuildValues(TypedDict, total=False):
    """The keyword arguments of `BuildOptions`. For some, the text of the command-line flag is also accepted."""

    max_batch: int | None
    max_chunk: int | None
    max_logits: int | None
    opt_batch: int | None
    max_encoder: int | None
    encoder: str | os.PathLike[str]
    min_shapes: Mapping[str, Shape] | str
    opt_shapes: Mapping[str, Shape] | str
    max_shapes: Mapping[str, Shape] | str
    decode_weights: Literal["auto", "shared", "own"]
    backend: Literal["auto", "tensorrt", "tensorrt-rtx"]
    compute_capabilities: Sequence[str] | str
    workspace: int | str | None
    opt_level: int | None
    timing_cache: str | os.PathLike[str] | None
    version_compatible: bool
    declare_aliases: bool
    strip_plan: bool
    refit: Literal["none", "any", "identical"]
    profiling_verbosity: Literal["none", "layer-names-only", "detailed"]
    proof: str | int
    log: str | os.PathLike[str] | None
    memory_check: bool


@described
@dataclass(frozen=True)
class BuildOptions:
    """The options of a build.

    Raises:
        OptionError: a value is illegal.
    """

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[BuildValues]) -> None: ...

    max_batch: Annotated[
        int | None,
        _size("Largest number of sequences in a step. Default: the model's own, else 1.", metavar="N", most=_MOST_ROWS),
    ] = None
    max_chunk: Annotated[
        int | None,
        _size(
            "Longest update in a step. Default: the model's own, else 512.",
            "Or the capacity, if that is smaller.",
            metavar="TOKENS",
            most=_MOST,
        ),
    ] = None
    max_logits: Annotated[
        int | None,
        _size(
            "Most positions with logits in a step, such as N for drafts of N - 1 tokens. Default: 16.",
            "Or the longest update, if that is shorter. A larger number takes more memory; logits of more "
            "positions than this take several steps.",
            metavar="N",
            most=_MOST,
        ),
    ] = None
    opt_batch: Annotated[
        int | None,
        _size("Batch size that TensorRT chooses kernels for. Default: the largest.", metavar="N", most=_MOST),
    ] = None
    max_encoder: Annotated[
        int | None,
        _size(
            "Longest output of the encoder, in positions. Default: taken from the encoder that is built.",
            "Without such an encoder, it is taken from `max_shapes`.",
            metavar="N",
            most=_MOST,
        ),
    ] = None
    encoder: Annotated[
        str,
        _size(
            "Encoder to build an engine from. auto: the encoder beside the model; if TensorRT refuses it, it runs "
            "on the CPU.",
            metavar="auto|none|FILE|DIR",
            is_path=True,
        ),
    ] = "auto"
    min_shapes: Annotated[
        Mapping[str, Shape],
        _size(
            "Smallest shapes, for inputs of unknown role.",
            "They may also narrow the shapes of other inputs. A mapping of input names to shapes, or a text for "
            "`parse_shapes`.",
            flag="minShapes",
            metavar="NAME:1x2,...",
            read=_read_shapes,
        ),
    ] = field(default_factory=dict)
    opt_shapes: Annotated[
        Mapping[str, Shape], _size("Typical shapes.", flag="optShapes", metavar="NAME:1x2,...", read=_read_shapes)
    ] = field(default_factory=dict)
    max_shapes: Annotated[
        Mapping[str, Shape], _size("Largest shapes.", flag="maxShapes", metavar="NAME:1x2,...", read=_read_shapes)
    ] = field(default_factory=dict)
    decode_weights: Annotated[
        str,
        _how(
            "Whether decoding with a batch of one shares the weights of prefill or has its own. auto: the smaller "
            "engine.",
            "own: the decode profile takes a batch of exactly one, and TensorRT stores a second copy of the "
            "weights in another layout for it. shared: the profile takes a batch of one or two. auto (measured "
            "with TensorRT for RTX 1.7.1): own for quantized weights, else shared. No effect for larger batches.",
            choices=DECODE_WEIGHTS,
        ),
    ] = "auto"
    backend: Annotated[str, _how("auto: TensorRT if there is a GPU, otherwise TensorRT for RTX.", choices=BACKENDS)] = (
        "auto"
    )
    compute_capabilities: Annotated[
        tuple[str, ...],
        _how(
            "GPUs to build for; current: the GPU of this machine.",
            "TensorRT for RTX only; TensorRT builds for the GPU of this machine. Default: all from 8.0 on.",
            metavar="sm80,sm89,...",
            unit="texts, such as 'sm80'",
            read=lambda text: text.split(",") if text else (),
        ),
    ] = ()
    workspace: Annotated[
        int | None,
        _how(
            "Most GPU memory for TensorRT's scratch data, such as 4GiB.",
            "A number of bytes, or a text for `parse_bytes`. Default: TensorRT's own limit.",
            metavar="SIZE",
            least=1,
            most=2**63 - 1,
            read=parse_bytes,
        ),
    ] = None
    opt_level: Annotated[
        int | None,
        _how("TensorRT's optimization level.", "TensorRT only. Default: TensorRT's own level.", least=0, most=5),
    ] = None
    timing_cache: Annotated[
        str | None,
        _how("File of measured kernel times, read and written.", "TensorRT only.", metavar="FILE", is_path=True),
    ] = None
    version_compatible: Annotated[
        bool,
        _how(
            "The engine runs on later TensorRT versions too.",
            "It runs on later versions with the same major version; TensorRT only.",
        ),
    ] = False
    declare_aliases: Annotated[
        bool,
        _how(
            "Tell TensorRT which outputs of the plugin share a buffer with an input.",
            "TensorRT may then copy whole caches. Without it, the session binds one address to both. TensorRT only.",
        ),
    ] = False
    strip_plan: Annotated[
        bool, _how("Leave the weights out of the engine.", "Only weights that can be refitted are left out.")
    ] = False
    refit: Annotated[
        str,
        _how(
            "Allow setting weights after the build: any, or only identical ones, such as those that --strip-plan "
            "left out.",
            choices=REFITS,
        ),
    ] = "none"
    profiling_verbosity: Annotated[
        str, _how("Detail in which the engine describes its layers.", choices=VERBOSITIES)
    ] = "layer-names-only"
    proof: Annotated[
        str | int,
        _how(
            "Record a proof: a decode of the rewritten model that the engine has to repeat where it runs. auto: "
            "only if this takes at most two minutes; STEPS: this number of steps, however long they take.",
            "auto also records none if too little memory is free.",
            metavar="auto|off|STEPS",
        ),
    ] = "auto"
    log: Annotated[
        str | None,
        _how(
            "File for TensorRT's whole log.",
            '"-": stderr. None: no file; the result still has the warnings and errors.',
            metavar="FILE",
            is_path=True,
        ),
    ] = None
    memory_check: Annotated[
        bool,
        _how(
            "Refuse a build that would not fit into this machine's memory.",
            "The need is estimated; TensorRT for RTX only.",
        ),
    ] = True

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "proof", _proof(self.proof))
        for name in ("min_shapes", "opt_shapes", "max_shapes"):
            object.__setattr__(self, name, _shapes(getattr(self, name), name))
        if self.workspace is not None and self.workspace < _LEAST_WORKSPACE:
            raise OptionError(
                f"--workspace is {self.workspace} bytes, too little for any kernel; give a unit, as in 4GiB"
            )
        capabilities = dict.fromkeys(_compute_capability(text) for text in self.compute_capabilities)
        if CURRENT in capabilities and len(capabilities) > 1:
            raise OptionError(
                f"compute capability {CURRENT!r} is this machine's GPU, and cannot be combined with others"
            )
        object.__setattr__(self, "compute_capabilities", tuple(capabilities))
        if self.timing_cache is not None:
            object.__setattr__(self, "timing_cache", str(Path(self.timing_cache).absolute()))


def _proof(value: object) -> str | int:
    if isinstance(value, str) and value in PROOFS:
        return value
    steps = int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value
    if not is_whole(steps) or not 1 <= steps <= _MOST_STEPS:
        raise OptionError(f"proof is {shown(value)}; it must be auto, off or a number of steps, 1 to {_MOST_STEPS}")
    return int(steps)


def _shapes(value: object, name: str) -> dict[str, Shape]:
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(shape, Sequence) and all(is_whole(size) for size in shape)
        for key, shape in value.items()
    ):
        raise OptionError(f"{name} is {shown(value)}; give shapes by input name, such as {{'mask': (1, 64)}}")
    return {key: tuple(int(size) for size in shape) for key, shape in value.items()}


def _compute_capability(text: object) -> str:
    """Return ``"sm80"`` for ``"sm80"``, ``"sm_80"``, ``"80"`` or ``"8.0"``. Keep `CURRENT` as it is."""
    if not isinstance(text, str):
        raise OptionError(f"compute capability is {shown(text)}; give a text such as 'sm80'")
    if text.strip().lower() == CURRENT:
        return CURRENT
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", text.strip().lower())
    if match is None:
        raise OptionError(f"compute capability {text!r} must have the form sm80, 80 or 8.0, or be {CURRENT}")
    return f"sm{match[1]}{match[2]}"
