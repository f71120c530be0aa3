"""Measures the speed of a session: prefill by length of the prompt, decoding by position and by batch size."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from trt_kvcache.errors import OptionError
from trt_kvcache.files import read_file
from trt_kvcache.machine import peak_memory
from trt_kvcache.page import Html, table, tag
from trt_kvcache.runtime.session import DecodeSession

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Amount = Annotated[float, msgspec.Meta(gt=0, le=1e15)]


@dataclass(frozen=True)
class Timing:
    """The measured times of one case, such as decoding with a batch of 4.

    Attributes:
        phase: ``"prefill"``: a whole prompt of `tokens` tokens; ``"decode"``: one token per sequence.
        batch: sequences per step.
        tokens: tokens of the prompt; for decoding, tokens in each cache at the first measured step.
        median_ms: median of the repeats.
        low_ms, high_ms: quartiles.
        tokens_per_second: tokens of all sequences per second, computed from the median.
    """

    phase: str
    batch: _Count
    tokens: _Count
    median_ms: _Amount
    low_ms: _Amount
    high_ms: _Amount
    tokens_per_second: _Amount

    @property
    def cells(self) -> tuple[str, ...]:
        """The timing as texts, one for each column of `COLUMNS`."""
        spread = f"{self.low_ms:.2f} to {self.high_ms:.2f}"
        counts = str(self.batch), str(self.tokens)
        return self.phase, *counts, f"{self.median_ms:.2f}", spread, f"{self.tokens_per_second:.1f}"


COLUMNS = ("phase", "batch", "tokens", "median ms", "quartiles", "tokens/s")
"""Titles of `Timing.cells`."""


@dataclass(frozen=True, repr=False)
class BenchReport:
    """Measurements of a model or an engine, and where they were made.

    Attributes:
        model: name of the file.
        runner: runtime and device.
        dtype: dtype of the caches.
        capacity: tokens per sequence; None: no limit, because all caches are circular.
        cache_bytes: bytes of all cache buffers.
        peak_bytes: largest main memory of the process so far.
    """

    model: str
    runner: str
    dtype: str
    capacity: int | None
    max_batch: int
    max_chunk: int
    cache_bytes: int
    peak_bytes: int
    timings: Annotated[tuple[Timing, ...], msgspec.Meta(min_length=1)]

    def __repr__(self) -> str:
        return f"<BenchReport: {self.title}, {self.runner}, {self.max_batch} rows, {len(self.timings)} timings>"

    @property
    def title(self) -> str:
        """Model, type and capacity as text: ``"model.onnx, float16, capacity 4096"``."""
        capacity = "circular" if self.capacity is None else f"capacity {self.capacity}"
        return f"{self.model}, {self.dtype}, {capacity}"

    def _repr_html_(self) -> Html:
        return tag("div", tag("p", repr(self)[1:-1]), table(COLUMNS, [t.cells for t in self.timings]))


def default_sizes(most: int, first: int = 16, factor: int = 4) -> list[int]:
    """Return `most` and, before it, all numbers ``first * factor ** k`` below `most`, ascending."""
    return [*takewhile(lambda size: size < most, (first * factor**k for k in count())), most]


def bench_session(
    session: DecodeSession,
    *,
    lengths: Sequence[int],
    positions: Sequence[int],
    batches: Sequence[int],
    repeats: int = 20,
    warmup: int = 3,
    seconds: float | None = None,
) -> Iterator[Timing]:
    """Yield timings of a session: prefill by length, decoding by position, then by batch at the first position.

    Args:
        session: a session in which all batch rows are free.
        lengths: numbers of tokens in prompts.
        positions: numbers of tokens in the cache before the first measured step.
        batches: numbers of sequences per step.
        repeats: measured steps.
        warmup: steps before the measured ones.
        seconds: time limit for each length, position or batch; at least three steps are measured anyway. None: no
            limit.

    Raises:
        OptionError: a number is below 1, or too large for the session.
        SessionError: a step failed.
    """
    for name, values in (("length", lengths), ("position", positions), ("batch", batches), ("repeats", [repeats])):
        if not values or min(values) < 1:
            raise OptionError(f"{name} is {list(values)}; give at least one, each at least 1")
    capacity = session.cache.capacity
    longest = max(max(lengths), max(positions) + warmup + repeats)
    if capacity is not None and longest > capacity:
        raise OptionError(
            f"lengths up to {max(lengths)} and {warmup + repeats} steps from position {max(positions)} need "
            f"{longest} rows, but the caches hold {capacity}; give smaller numbers"
        )
    if max(batches) > session.cache.free:
        raise OptionError(
            f"batch {max(batches)} needs as many rows, but only {session.cache.free} are free; give a smaller batch"
        )
    rng = np.random.default_rng(0)
    first = next(token for token in range(session.vocab) if session.takes(token))

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, session.vocab, count).tolist()
        return [token if session.takes(token) else first for token in drawn]

    steps = _Steps(repeats, warmup, seconds)
    for length in lengths:
        yield _timing("prefill", 1, length, _prefill(session, tokens, length, steps), length)
    for position in positions:
        yield _timing("decode", 1, position, _decode(session, tokens, 1, position, steps), 1)
    for batch in batches:
        if batch > 1:
            yield _timing("decode", batch, positions[0], _decode(session, tokens, batch, positions[0], steps), batch)


def report(session: DecodeSession, model: str, timings: Sequence[Timing]) -> BenchReport:
    """Return a report with these timings and facts about the session's model, caches and machine."""
    dtypes = dict.fromkeys("float32" if c.dtype == "float" else c.dtype for c in session.plan.caches)
    return BenchReport(
        model=model,
        dtype=", ".join(dtypes),
        runner=session.name,
        capacity=session.cache.capacity,
        max_batch=session.max_batch,
        max_chunk=session.max_chunk,
        cache_bytes=session.cache.bytes,
        peak_bytes=peak_memory(),
        timings=tuple(timings),
    )


def load_report(path: Path) -> BenchReport:
    """Return the report in the last line of a file that ``bench`` printed; raise `OptionError` if there is none."""
    try:
        lines = read_file(path).splitlines()
        return msgspec.json.decode(lines[-1] if lines else b"", type=BenchReport)
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{path}: not JSON of 'trt-kvcache bench' ({error}); give such a file, or measure again"
        ) from error


_FEWEST = 3
"""The smallest number of measured runs; they run however long they take."""
Tokens = Callable[[int], list[int]]


@dataclass(frozen=True)
class _Steps:
    """How often to run a step: measured runs, warmup runs before these, and a time limit in seconds."""

    repeats: int
    warmup: int
    seconds: float | None

    def times(self, step: Callable[[], float]) -> list[float]:
        """Return the seconds of the measured runs. `step` runs once and returns its seconds."""
        end = math.inf if self.seconds is None else time.perf_counter() + self.seconds
        for _ in range(self.warmup):
            step()
            if time.perf_counter() > end:
                break
        seconds: list[float] = []
        while len(seconds) < self.repeats and (len(seconds) < _FEWEST or time.perf_counter() < end):
            seconds.append(step())
        return seconds


def _prefill(session: DecodeSession, tokens: Tokens, length: int, steps: _Steps) -> list[float]:
    def step() -> float:
        slot, prompt = session.cache.acquire(), tokens(length)
        try:
            return _seconds(session, {slot: prompt})
        finally:
            session.remove(slot)

    return steps.times(step)


def _decode(session: DecodeSession, tokens: Tokens, batch: int, position: int, steps: _Steps) -> list[float]:
    slots = [session.cache.acquire() for _ in range(batch)]
    try:
        session.update({slot: tokens(position) for slot in slots})
        return steps.times(
            lambda: _seconds(session, {slot: [token] for slot, token in zip(slots, tokens(batch), strict=True)})
        )
    finally:
        for slot in slots:
            session.remove(slot)


def _seconds(session: DecodeSession, update: dict[int, list[int]]) -> float:
    start = time.perf_counter()
    session.update(update)
    return time.perf_counter() - start


def _timing(phase: str, batch: int, tokens: int, seconds: list[float], count: int) -> Timing:
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median, median, median)
    return Timing(phase, batch, tokens, 1e3 * median, 1e3 * low, 1e3 * high, count / median)
