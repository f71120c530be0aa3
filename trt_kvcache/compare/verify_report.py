"""The options and results of a verification, as plain data for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trt_kvcache.arguments import as_whole, shown
from trt_kvcache.errors import OptionError, VerificationError
from trt_kvcache.setting import Setting, check_settings, described

# Larger numbers would show nothing more, and a decode of 10 ** 20 tokens would never end.
_MOST_ROWS = 1 << 16
_MOST_TOKENS = 1 << 20

STATIONS = ("rewritten", "quantized", "session", "network")
"""The stations (forms of the model with a runtime) that a verification can compare, in order."""


def _read_chunks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(chunk) for chunk in text.split(",") if chunk.strip())
    except ValueError:
        raise OptionError(f"--chunks {text!r} is not a list of token counts such as 5,3") from None


@described
@dataclass(frozen=True)
class VerifyOptions:
    """Options of a verification.

    Raises:
        OptionError: a value is out of range.
    """

    batch: Annotated[int, Setting(
        "Texts that are decoded in one batch, each with its own length.",
        "If the model fixes the batch size, that size is used.", metavar="N", least=1, most=_MOST_ROWS,
    )] = 3  # fmt: skip
    chunks: Annotated[tuple[int, ...], Setting(
        "Lengths of the prefill chunks.",
        "In tokens. If the model fixes the update length, that length is used.",
        metavar="N,...", unit="numbers of tokens", read=_read_chunks,
    )] = (5, 3)  # fmt: skip
    tokens: Annotated[
        int, Setting("Number of single-token steps after the chunks.", metavar="N", least=0, most=_MOST_TOKENS)
    ] = 4
    station: Annotated[tuple[str, ...], Setting(
        f"Compare these stations only: {', '.join(STATIONS)}.",
        "Default: all stations that can run on this machine.", metavar="NAME,...", unit="names of stations",
        read=lambda text: [name.strip() for name in text.split(",") if name.strip()],
    )] = ()  # fmt: skip
    tolerance: Annotated[float | None, Setting(
        "Allowed difference, as a share of the largest logit. Default: measured rounding.", metavar="SHARE", least=0,
    )] = None  # fmt: skip
    seed: Annotated[int, Setting("Seed of the random tokens, and of the garbage in unwritten cache rows.", least=0)] = 0
    inputs: Annotated[str | None, Setting(
        "Values for inputs of unknown role, as arrays with the names of the inputs.",
        "Axes whose size varies from step to step are cut to the size of the step.", metavar="FILE.npz", is_path=True,
    )] = None  # fmt: skip
    thorough: Annotated[bool, Setting(
        "First compare the rewritten parts with the original parts, for every number of past tokens up to 4,096.",
        "If this takes too long, allow more --check-seconds.",
    )] = False  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "chunks", tuple(as_whole(chunk, "a chunk", " of tokens") for chunk in self.chunks))
        if not all(1 <= chunk <= _MOST_TOKENS for chunk in self.chunks):
            raise OptionError(
                f"the prefill chunks are {list(self.chunks)}; each must be at least 1 token, at most {_MOST_TOKENS}"
            )
        if self.tokens == 0 and not self.chunks:
            raise OptionError(f"there must be at least one step; got {self.tokens} single-token steps and no chunks")
        if self.tolerance is not None and not self.tolerance < 1:
            raise OptionError(f"the tolerance is {self.tolerance}; it is a share of the output's scale, from 0 to 1")
        for name in self.station:
            if not isinstance(name, str) or name not in STATIONS:
                raise OptionError(f"there is no station {shown(name)}; stations are {', '.join(STATIONS)}")


@dataclass(frozen=True)
class Station:
    """The result of one station: one form of the model with its runtime, compared with another form.

    Attributes:
        name: one of `STATIONS`.
        ran_on: name of the runtime; empty if the station did not run.
        against: the station that is its reference, such as ``"the model as exported"``.
        steps: number of compared steps.
        difference: largest difference of a logit, as a share of the largest logit at its position. Infinite if only one
            of two logits is finite; None if nothing was compared.
        allowed: the largest difference that rounding explains.
        agreement: share of positions with the same best token.
        passed: True if no fault was found, or if nothing was compared (then `note` says why).
        failure: first step, text and token that differ by more than `allowed`, and first layer that differs; empty if
            passed.
        note: why the station was not compared, or another remark.
    """

    name: str
    ran_on: str = ""
    against: str = ""
    steps: int = 0
    difference: float | None = None
    allowed: float | None = None
    agreement: float | None = None
    passed: bool = True
    failure: str = ""
    note: str = ""

    @property
    def compared(self) -> bool:
        """True if the model ran in this form, and its logits were compared."""
        return bool(self.steps)


@dataclass(frozen=True)
class Quality:
    """How far quantized caches change a model's results. A verification never fails because of these figures.

    Attributes:
        cache_dtype: dtype of the caches.
        positions: number of compared positions; each text has its own tokens.
        agreement: share of positions whose best token is the same with and without quantization.
        typical: median over positions of the norm of the logits' difference, divided by the norm of the centered
            logits.
        largest: largest difference of a logit, as a share of the largest logit at its position.
    """

    cache_dtype: str
    positions: int
    agreement: float
    typical: float
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.cache_dtype} caches against the model's own, {self.positions} positions: the same greedy token at "
            f"{self.agreement:.1%}; logits move by {self.typical:.2g} of their size (median), by {self.largest:.2g} at "
            "most"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The result of verifying one model.

    Attributes:
        passed: every compared station (one form of the model with its runtime) agrees with its reference.
        texts: number of texts that were decoded.
        positions: number of tokens of all texts.
        capacity: the capacity that the model was planned with; None: the model fixes it.
        reference: the runtime that ran the model as exported.
        stations: the stations, in the order of `STATIONS`.
        notes: other remarks.
        quality: figures of quantized caches; None: the caches are the model's own.
    """

    model: str
    passed: bool
    texts: int
    positions: int
    capacity: int | None
    reference: str
    stations: tuple[Station, ...]
    notes: tuple[str, ...] = ()
    quality: Quality | None = None

    def check(self) -> None:
        """Raise `VerificationError` if a station failed; the message names the station, step, text and token."""
        for station in (s for s in self.stations if not s.passed):
            raise VerificationError(f"{self.model}: {station.name}: {station.failure}")
