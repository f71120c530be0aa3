"""Options and result of a verification: plain data, JSON in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trt_kvcache.arguments import as_whole
from trt_kvcache.errors import OptionError, VerificationError
from trt_kvcache.importer.plan import CacheDtype
from trt_kvcache.setting import Setting, check_settings, described

# More shows nothing that fewer do not; the schedule of a number like 10 ** 20 would never end.
_MOST_ROWS = 1 << 16
_MOST_TOKENS = 1 << 20


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

    batch: Annotated[
        int,
        Setting(
            "Sequences, each with its own length.",
            "A fixed batch size in the model wins.",
            metavar="N",
            least=1,
            most=_MOST_ROWS,
        ),
    ] = 3
    chunks: Annotated[
        tuple[int, ...],
        Setting(
            "Lengths of the prefill chunks.",
            "In tokens; a fixed update length in the model wins.",
            metavar="N,...",
            unit="numbers of tokens",
            read=_read_chunks,
        ),
    ] = (5, 3)
    tokens: Annotated[
        int | None,
        Setting(
            "Single-token steps after the chunks. Default: 4; 3x the chunks where caches change.",
            "Where weights take more than 200 MB, all but 4 of those are one more chunk.",
            metavar="N",
            least=0,
            most=_MOST_TOKENS,
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        Setting("Largest difference, as a share of an output's scale. Default: by dtype.", metavar="SHARE", least=0),
    ] = None
    seed: Annotated[int, Setting("Seed of tokens, caches and garbage.", least=0)] = 0
    inputs: Annotated[
        str | None,
        Setting(
            "Values by name for inputs of unknown role.",
            "Axes that vary from step to step are cut to size.",
            metavar="FILE.npz",
            is_path=True,
        ),
    ] = None
    thorough: Annotated[
        bool,
        Setting(
            "Compare after a past of every length, too; see --check-seconds.",
            "Of every length up to 4,096, first, all changed parts.",
        ),
    ] = False

    def __post_init__(self) -> None:
        check_settings(self)
        chunks = tuple(as_whole(chunk, "a chunk", " of tokens") for chunk in self.chunks)
        object.__setattr__(self, "chunks", chunks)
        if not all(1 <= chunk <= _MOST_TOKENS for chunk in self.chunks):
            raise OptionError(
                f"the prefill chunks are {list(self.chunks)}; each must be at least 1 token, at most {_MOST_TOKENS}"
            )
        if self.tokens == 0 and not self.chunks:
            raise OptionError(f"{self.tokens} single-token steps and no chunk: there must be at least one step")
        if self.tolerance is not None and not self.tolerance < 1:
            raise OptionError(f"the tolerance is {self.tolerance}; it is a share of the output's scale, from 0 to 1")


@dataclass(frozen=True)
class VerifyStep:
    """One step that both models ran.

    Attributes:
        episode: ``"decode"`` (from short histories), ``"full"`` (up to the last row of linear caches), ``"wrap"``
            (over the end of circular ones), ``"short"`` (rows with fewer valid tokens than the update, idle rows too)
            or ``"padded"`` (an update whose last tokens are not valid).
        length: tokens of the update.
        starts: per row, tokens before the step; its write index.
        valid: per row, valid tokens after the step.
        spans: the spans that the rewritten model ran with, one run each; empty without span inputs.
        kept: of how many of the last positions it gave logits, one run each; empty where it gives those of all.
        difference: the largest of any output, as a share of its scale; None where outputs are not comparable.
    """

    episode: str
    length: int
    starts: tuple[int, ...]
    valid: tuple[int, ...]
    spans: tuple[int, ...]
    kept: tuple[int, ...] = ()
    difference: float | None = 0.0


@dataclass(frozen=True)
class OutputDifference:
    """The largest difference found in one output, over all steps.

    Attributes:
        dtype: as compared.
        max_absolute: None where one side is not finite and the other is, or shapes differ.
        max_relative: as a share of the original's largest magnitude in that step; None as above.
        tolerance: largest `max_relative` allowed.
        step: index into `VerifyReport.steps` of the worst step, or None where no step showed any difference.
        span: the span of that run, or None.
        exact: no step showed any difference.
        stale_rows_changed: caches: rows that the original left alone and the rewritten model changed, at the most in
            one step.
    """

    name: str
    role: str
    dtype: str
    max_absolute: float | None
    max_relative: float | None
    tolerance: float
    step: int | None
    span: int | None
    exact: bool
    stale_rows_changed: int
    passed: bool


LIMITS = {CacheDtype.INT8: 0.05, CacheDtype.FP8: 0.15, CacheDtype.INT4: 0.4}
"""The largest `Divergence.error_share` allowed: twice those of the models in the tests, which have random weights,
or more. Scales of int8 that are wrong by a quarter are above."""


@dataclass(frozen=True)
class Divergence:
    """The distance of the model with quantized caches from the same model with its own, over one text.

    Attributes:
        positions: compared; each sequence has its own tokens.
        agreement: share of positions at which both choose the same greedy token.
        mean_kl: Kullback-Leibler divergence of the next token's distribution, in nats; the mean of all positions.
        largest_error: of any logit.
        error_share: length of the error of a position's logits as a share of their own, around their mean; the mean of
            all positions.
        limit: the largest `error_share` allowed. A text decides the other three as much as the caches do.
    """

    cache_dtype: str
    positions: int
    agreement: float
    mean_kl: float
    largest_error: float
    error_share: float
    limit: float

    @property
    def passed(self) -> bool:
        """True if the error is within its limit; NaN is not."""
        return self.error_share <= self.limit

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.cache_dtype} caches against the model's own, {self.positions} positions: the same greedy token at "
            f"{self.agreement:.1%}, mean KL divergence {self.mean_kl:.2g}, largest error of a logit "
            f"{self.largest_error:.2g}, typical error {self.error_share:.2g} of the logits (allowed: {self.limit:g})"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The result of verifying one model.

    Attributes:
        original_engine, rewritten_engine: what ran each side, such as ``"ONNX Runtime 1.31.1"``.
        float32_twin: both sides computed in float32: the model is bfloat16, or a float16 one whose numbers rounding
            decides (`trt_kvcache.verify.rounding`).
        garbage: magnitude of the values in cache rows that no token has been written to.
        failure: why the rewritten model could not be run to the end, or None.
        notes: what else the reader should know.
        divergence: of the model with quantized caches; None: caches are not quantized, or all else failed already.
        capacity: tokens per sequence, as planned; None: the model fixes them.
    """

    model: str
    passed: bool
    original_engine: str
    rewritten_engine: str
    float32_twin: bool
    garbage: float
    outputs: tuple[OutputDifference, ...]
    steps: tuple[VerifyStep, ...]
    notes: tuple[str, ...] = ()
    failure: str | None = None
    divergence: Divergence | None = None
    capacity: int | None = None

    def check(self) -> None:
        """Does nothing where the verification passed.

        Raises:
            VerificationError: it failed; the message names the worst output.
        """
        if self.passed:
            return
        if self.failure is not None:
            raise VerificationError(f"{self.model}: {self.failure}")
        failed = [o for o in self.outputs if not o.passed]
        worst = max(failed, key=lambda o: float("inf") if o.max_relative is None else o.max_relative)
        step = "" if worst.step is None else f" at step {worst.step} ({_describe(self.steps[worst.step], worst.span)})"
        raise VerificationError(
            f"{self.model}: the rewritten model does not give the original's numbers: output '{worst.name}' "
            f"{_what(worst)}{step}; {len(failed)} of {len(self.outputs)} outputs fail"
        )


def _what(output: OutputDifference) -> str:
    if output.max_relative is None:
        return "has another shape, or is not finite where the original is"
    if output.max_relative > output.tolerance:
        return f"differs by {output.max_relative:.2g} of its scale (allowed: {output.tolerance:g})"
    return f"changes {output.stale_rows_changed} cache rows that the original leaves alone"


def _describe(step: VerifyStep, span: int | None) -> str:
    text = f"{step.episode}: {step.length} tokens at {list(step.starts)}, valid {list(step.valid)}"
    return text if span is None else f"{text}, span {span}"
