"""The steps of a verification: pure arithmetic on lengths.

All rows of a step have one update length, as in the operators; what is ragged is where each row starts. Right padding
of a row (fewer valid tokens than the update) shifts the causal frontier of that row (offset = valid - S_q), so it is a
case of its own here and not a way to prefill (https://onnx.ai/onnx/operators/onnx__Attention.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trt_kvcache.importer.steps.step import Limits, Step
from trt_kvcache.verify.report import VerifyOptions

_TOKENS = 4  # single-token steps, where the caller does not say how many
_TIMES_PROMPT = 3  # tokens after the prompt, where the interface changed and the caller does not say how many


@dataclass(frozen=True)
class Episode:
    """Steps over one set of caches; each step starts where the one before ended."""

    name: str
    steps: tuple[Step, ...]


def beyond_prompt(options: VerifyOptions, *, few: bool) -> VerifyOptions:
    """The options for a model whose caches grow, as long as they do not say how many single tokens to decode.

    Args:
        options: of the caller.
        few: in few steps: most of the tokens in one more chunk. Both decode as many tokens.
    """
    if options.tokens is not None:
        return options
    tokens = _TIMES_PROMPT * max(sum(options.chunks), 1)
    if not few or tokens <= 2 * _TOKENS:
        return replace(options, tokens=tokens)
    return replace(options, chunks=(*options.chunks, tokens - _TOKENS), tokens=_TOKENS)


def plan_schedule(limits: Limits, options: VerifyOptions, *, empty: bool = False) -> tuple[Episode, ...]:
    """All episodes of a verification; `empty`: the one whose caches hold no random rows."""
    lengths = _fitting(limits, options)
    if empty and limits.indexed:  # without write indices every step begins at row 0 anyway
        return (Episode("decode", consecutive(limits, lengths, (0,) * limits.batch)),)
    if not limits.indexed:
        return _from_row_zero(limits, lengths)
    total = sum(lengths)
    last_start = None if limits.linear is None else limits.linear - total
    episodes = [Episode("decode", consecutive(limits, lengths, _starts(limits, 0, 5, last_start)))]
    if last_start:
        last = [*lengths[:1], *lengths[-1:]] if len(lengths) > 1 else lengths
        end = last_start + total - sum(last)
        episodes.append(Episode("full", consecutive(limits, last, _starts(limits, end, -3, end))))
    for capacity in limits.circular:
        # Two rows before the end; a fixed length under a contract must fit before it.
        starts = _starts(limits, capacity - (limits.length or 2), capacity + (limits.length or 3), last_start)
        episodes.append(Episode("wrap", consecutive(limits, lengths, starts)))
    if limits.lengths:
        episodes += _short(limits)
    return tuple(episodes)


def _wanted(limits: Limits, options: VerifyOptions) -> list[int]:
    """Lengths of the updates that were asked for; a length that the model fixes wins."""
    wanted = [*options.chunks, *([1] * (_TOKENS if options.tokens is None else options.tokens))]
    return wanted if limits.length is None else [limits.length] * len(wanted)


def _fitting(limits: Limits, options: VerifyOptions) -> list[int]:
    """Those of the updates that were asked for that fit, cut to the longest one allowed."""
    lengths = [min(length, limits.longest) for length in _wanted(limits, options)]
    while limits.indexed and limits.linear is not None and sum(lengths) > limits.linear:
        lengths.pop()
    return lengths


def _starts(limits: Limits, first: int, stride: int, last_start: int | None) -> tuple[int, ...]:
    """One start per row, up to the last that linear caches allow; an update of a fixed length fits before the wrap."""
    starts = []
    for row in range(limits.batch):
        start = max(first + (stride * row if limits.ragged else 0), 0)
        if last_start is not None and start > last_start:
            start %= last_start + 1
        length = limits.length or 1
        while any(start % capacity + length > capacity for capacity in limits.no_straddle):
            start -= 1
        starts.append(start)
    return tuple(starts)


def consecutive(limits: Limits, lengths: list[int], starts: tuple[int, ...]) -> tuple[Step, ...]:
    """Consecutive steps; an update that would straddle a wrap where a contract forbids it is split there."""
    steps: list[Step] = []
    for wanted in lengths:
        left = wanted
        while left:
            ends = [capacity - start % capacity for capacity in limits.no_straddle for start in starts]
            length = min([left, *ends])
            if limits.length is not None and length != limits.length:
                return tuple(steps)  # the update length is fixed: the next update would break the contract
            valid = tuple(start + length for start in starts)
            steps.append(Step(length, starts, valid))
            starts, left = valid, left - length
    return tuple(steps)


def _from_row_zero(limits: Limits, lengths: list[int]) -> tuple[Episode, ...]:
    """Every update overwrites the rows from 0 on, as TensorScatter without write indices does."""
    zeros = (0,) * limits.batch
    steps = tuple(Step(length, zeros, (length,) * limits.batch) for length in lengths)
    return (Episode("decode", steps), *(_short(limits) if limits.lengths else ()))


def _short(limits: Limits) -> list[Episode]:
    """Rows with fewer valid tokens than the update has: their first queries see no key at all; and an idle row."""
    length = limits.length or min(4, limits.longest)
    zeros = (0,) * limits.batch
    if not limits.ragged:
        return [Episode("short", (Step(length, zeros, (max(length - 2, 0),) * limits.batch),))]
    pattern = (max(length - 2, 0), length, 0)
    short = Step(length, zeros, tuple(pattern[row % 3] for row in range(limits.batch)))
    last_start = min(c for c in (limits.linear, *limits.circular) if c is not None) - length
    if not limits.indexed or last_start < 1:
        return [Episode("short", (short,))]
    starts = tuple(1 + (4 * row) % last_start for row in range(limits.batch))
    padded = Step(length, starts, tuple(s + max(length - 1 - row % 3, 0) for row, s in enumerate(starts)))
    return [Episode("short", (short,)), Episode("padded", (padded,))]


def whole(step: Step) -> Step:
    """The step with all new tokens of a sequence valid, or none."""
    valid = tuple(v if v == s + step.length else 0 for s, v in zip(step.starts, step.valid, strict=True))
    return replace(step, valid=valid)


def schedule_notes(limits: Limits, options: VerifyOptions, episodes: Sequence[Episode]) -> list[str]:
    """Notes for people on a schedule."""
    notes = []
    wanted, lengths = _wanted(limits, options), _fitting(limits, options)
    if max(wanted) > limits.longest:
        long = ", ".join(str(length) for length in dict.fromkeys(wanted) if length > limits.longest)
        notes.append(f"updates of {limits.longest} tokens instead of {long}: the caches take no longer ones")
    if len(lengths) < len(wanted):
        notes.append(f"{len(lengths)} of {len(wanted)} updates: the caches hold {limits.linear} tokens")
    if limits.no_straddle:
        notes.append(
            "contract: no update straddles the wrap of a circular cache; the updates were split there, as the caller "
            "of the engine must do"
        )
    if not limits.ragged:
        notes.append("the model takes one write index or length for the whole batch: all rows start together")
    wrapped = {c for c in limits.circular for e in episodes for s in e.steps if max(s.valid) > c}
    for capacity in sorted(set(limits.circular) - wrapped):
        notes.append(f"circular caches of {capacity} rows did not wrap: other caches of the model end before")
    return notes
