"""Decodes texts with any runtime, and compares its logits with a reference. A piece is one step of this decode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np

from trt_kvcache.compare.differences import share_of_logits
from trt_kvcache.importer.cache_plan import CachePlan, Role
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.steps.drawn_inputs import SPAN_KINDS, Limits

_DISTANCE = 3  # difference in length between neighboring texts of a batch, in tokens
_REACH = 600  # most tokens of a text that are decoded to reach a place (`plan_pieces`)
_CHUNKS = 48  # most steps on the way to a place
_AFTER = 5  # tokens of the first step after skipped tokens
_SINGLES = 3  # single tokens around each place
_SEEDS = 5  # random tokens at the start of each text
DRAWN = "drawn"
"""The name of the last part of a decode: before it, caches are filled with random numbers."""


@dataclass(frozen=True)
class Piece:
    """One step of a decode: the next tokens of some texts.

    Attributes:
        length: new tokens of each text.
        rows: indices of the texts of this step, always the first texts of the batch. Texts may have different lengths.
        span: how many cache rows the step reads, if the model has an input for it: "tight", "bucketed" or "full".
        kept: number of last positions whose logits are computed, if the model has an input for it; None: all.
        part: name of this part of the decode, such as ``"window 512"`` for the end of an attention window.
        skip: number of tokens that each text gets before this step without a decode; their cache rows are copies.
        drawn: if True, fill all caches with random numbers before the step. Then a negative `skip` may shorten texts.
    """

    length: int
    rows: tuple[int, ...]
    span: str = "tight"
    kept: int | None = None
    part: str = "start"
    skip: int = 0
    drawn: bool = False


class Runner(Protocol):
    """Decodes texts with one runtime, such as ONNX Runtime; `name` is that runtime."""

    name: str

    def start(self, rows: int) -> None:
        """Start `rows` new texts without tokens."""

    def step(self, piece: Piece, tokens: Array) -> Array:
        """Run one step with tokens int64 ``[R, length]``; return logits ``[R, K, V]`` of the last K >= 1 positions."""


@dataclass
class Decode:
    """Texts, and the pieces (steps) of their decode.

    Attributes:
        vocabulary: token ids are 0 to ``vocabulary - 1``.
        seed: seed of the random tokens at the start of each text.
        goes_on: if True, the first `Runner` chooses the tokens after the start; if False, all tokens are random.
        tokens: tokens of each piece ``[R, length]``; the first `Runner` fills this list.
        wanted: the reference's logits of each piece.
    """

    pieces: tuple[Piece, ...]
    rows: int
    vocabulary: int
    seed: int = 0
    goes_on: bool = True
    tokens: list[Array] = field(default_factory=list)
    wanted: list[Array] = field(default_factory=list)

    def steps(self, runner: Runner) -> Iterator[Array]:
        """Decode, and yield the logits of each piece (step). The first runner chooses the tokens greedily.

        No pair of neighboring tokens occurs twice in a text; otherwise, a model could repeat itself forever.
        """
        rng = np.random.default_rng(self.seed)
        texts: list[list[int]] = [[] for _ in range(self.rows)]
        ahead: dict[int, int] = {}
        runner.start(self.rows)
        for number, piece in enumerate(self.pieces):
            if number == len(self.tokens):
                tokens = rng.integers(0, self.vocabulary, (len(piece.rows), piece.length))
                for at, row in enumerate(piece.rows):
                    if len(texts[row]) >= _SEEDS and row in ahead:
                        tokens[at, 0] = ahead[row]
                self.tokens.append(tokens)
            logits = runner.step(piece, self.tokens[number])
            chooses = self.goes_on and number + 1 == len(self.tokens)
            for at, row in enumerate(piece.rows if chooses else ()):
                texts[row] += self.tokens[number][at].tolist()
                scores = np.nan_to_num(logits[at, -1].astype(np.float64), nan=-np.inf)
                scores[[b for a, b in pairwise(texts[row]) if a == texts[row][-1]]] = -np.inf
                ahead[row] = int(scores.argmax())
            yield logits


@dataclass(frozen=True)
class Difference:
    """The difference between the logits of a runtime and those of the reference.

    Attributes:
        largest: largest difference of a logit, as a share of the largest logit at its position.
        allowed: the largest difference that rounding explains.
        pieces: number of compared pieces (steps).
        typical: median over positions of the norm of the difference, as a share of the norm of the centered logits.
        agreement: share of positions where runtime and reference have the same best token.
        beyond: share of positions that differ by more than `allowed`.
        piece, row, position: piece (step), text and token with the largest difference.
    """

    largest: float
    allowed: float
    pieces: int
    typical: float
    agreement: float
    beyond: float
    piece: int
    row: int
    position: int

    @property
    def passed(self) -> bool:
        """True if rounding explains the difference."""
        return self.largest <= self.allowed


def compare(decode: Decode, results: Iterable[Array], allowed: float, *, stop: bool = True) -> Difference:
    """Compare the logits of each piece (step) with the reference's. With `stop`, end when `allowed` is exceeded."""
    largest, place, pieces = -1.0, (0, 0, 0), 0
    shares, same, beyond = list[float](), list[bool](), list[bool]()
    starts = [0] * decode.rows
    for pieces, (piece, wanted, logits) in enumerate(zip(decode.pieces, decode.wanted, results, strict=False), 1):
        count = min(wanted.shape[1], logits.shape[1])
        one, other = wanted[:, wanted.shape[1] - count :], logits[:, logits.shape[1] - count :]
        far, typical = share_of_logits(one, other)
        shares += typical.reshape(-1).tolist()
        beyond += (far > allowed).reshape(-1).tolist()
        same += (one.argmax(-1) == other.argmax(-1)).reshape(-1).tolist()
        row, position = np.unravel_index(int(far.argmax()), far.shape)
        if far[row, position] > largest:
            largest = float(far[row, position])
            text = piece.rows[int(row)]
            place = pieces - 1, text, starts[text] + piece.length - count + int(position)
        for text in piece.rows:
            starts[text] += piece.length
        if stop and largest > allowed:
            break
    return Difference(
        largest, allowed, pieces, float(np.median(shares)), float(np.mean(same)), float(np.mean(beyond)), *place
    )


def plan_pieces(
    limits: Limits, plan: CachePlan, chunks: Sequence[int], tokens: int, *, full: bool = True,
    places: Mapping[int, str] = MappingProxyType({}), chunk: int = 64, far: bool = False, drawn: bool = False,
) -> tuple[Piece, ...]:  # fmt: skip
    """Return the pieces (steps) of a decode that tests a model where faults are likely.

    Texts begin one after the other. Then come a step of each size in `chunks`, `tokens` steps of one token, and steps
    that lead to each place: a text length at which something changes, such as the end of a window, or one of `places`.
    These steps have at most `chunk` tokens, but only one token while the text of middle length passes the place. With
    `full`, linear caches are filled to their last row. With `far`, steps skip tokens to reach far places. With `drawn`,
    the last steps have random cache contents: if weights are untrained, only these steps show faults of attention.
    """
    everyone = tuple(range(limits.batch))
    ends, pieces, room = [0] * limits.batch, list[Piece](), limits.linear
    shared = [t for t in plan.tensors if t.io == "input" and t.role in (Role.MASK, Role.POSITIONS)]
    shared = [t for t in shared if "batch" not in t.axes and t.shape[:1] != (limits.batch,)]  # one row for all
    ragged = limits.ragged and limits.indexed and not limits.fixed_batch and not shared  # texts of different lengths
    single, chunk = limits.length or 1, limits.length or min(limits.longest, chunk)

    def add(part: str, length: int, rows: tuple[int, ...] = everyone, skip: int = 0, *, drawn: bool = False) -> bool:
        """Add a step for `rows`; return False if it does not fit into the caches."""
        length = limits.length or min(length, limits.longest)
        if limits.indexed and room is not None and max(ends[r] for r in rows) + skip + length > room:
            return False
        if any((ends[r] + skip) % n + length > n for n in limits.no_straddle for r in rows):
            single_tokens = range(length if length > 1 and limits.length is None else 0)
            added = [add(part, 1, rows, 0 if n else skip, drawn=drawn and not n) for n in single_tokens]
            return bool(added) and all(added)
        number = len(pieces)
        kept = None if number % 3 or plan.logits_span is None else 1
        pieces.append(Piece(length, rows, SPAN_KINDS[number % len(SPAN_KINDS)], kept, part, skip, drawn))
        for row in rows:
            ends[row] += length + skip
        return True

    def walk(part: str, left: int) -> None:
        """Add steps for `left` tokens in chunks, then a few steps of single tokens."""
        skip = left - _AFTER if far and left > min(_REACH, _CHUNKS * chunk) else 0
        skip -= skip % single
        left -= skip
        while left >= single and add(part, min(left, chunk), skip=skip):
            left, skip = left - chunk, 0
        for _ in range(_SINGLES):
            if not add(part, 1):
                break

    if plan.prefill_in_one_step:  # tokens of a step depend on each other: one step for the prompt, then single tokens
        chunks = [max(sum(chunks), 1)]
    elif ragged:
        for row in range(limits.batch - 1):
            add("start", _DISTANCE * single, everyone[: row + 1])
    for length in (*chunks, *[1] * tokens):
        add("start", length)
    if not limits.indexed or plan.prefill_in_one_step:
        return tuple(pieces)
    windows = dict.fromkeys((m.left_window + 1 for m in plan.masks if m.left_window >= 0), "window")
    found = {**places, **windows, **dict.fromkeys(limits.circular, "wrap")}
    for place in sorted(found):
        middle = sorted(ends)[len(ends) // 2]
        if far or middle < place <= _REACH:
            walk(f"{found[place]} {place}", place - single - middle)
    if full and room is not None and (far or room <= _REACH):
        walk("full", room - 2 * single - max(ends))
    skip = 2 * single - min(ends)
    for number, length in enumerate((_AFTER, 1, 1, 1) if drawn else ()):
        add(DRAWN, length, skip=0 if number else skip, drawn=not number)
    return tuple(pieces)
