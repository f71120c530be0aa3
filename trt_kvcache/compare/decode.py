"""A decode, cut into pieces, and the comparison of what several runners make of it. Neither knows any runner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.importer.steps.inputs import SPAN_KINDS
from trt_kvcache.importer.steps.step import Limits

__all__ = ["DRAWN", "Decode", "Difference", "Piece", "Runner", "compare", "plan_pieces", "share_of_logits"]

Array = npt.NDArray[Any]

_DISTANCE = 3  # tokens between the rows of a batch
_REACH = 600  # tokens of a text, for the sake of a place that lies beyond them
_CHUNKS = 48  # steps on the way to a place, at most
_AFTER = 5  # tokens of a first step after those that are left out
_SINGLES = 3  # tokens one by one, over each place
DRAWN = "drawn"
"""The part of a decode before which caches hold random numbers."""

_SEEDS = 5  # random tokens, with which each text begins


@dataclass(frozen=True)
class Piece:
    """A step: the next tokens of some texts.

    Attributes:
        length: new tokens of each text.
        rows: the texts: the first ones of the batch, each after tokens of its own number.
        span: one of `trt_kvcache.importer.steps.inputs.SPAN_KINDS`, where the rows that are read are chosen.
        kept: last positions whose logits are computed, where that is chosen; None: all.
        part: of the decode: where the texts are, such as ``"window 512"``: at the end of an attention window.
        skip: tokens of each text that are left out before: their cache rows are copies of those of tokens before them.
        drawn: caches hold random numbers before, for so many tokens as there are then; `skip` may be negative.
    """

    length: int
    rows: tuple[int, ...]
    span: str = "tight"
    kept: int | None = None
    part: str = "start"
    skip: int = 0
    drawn: bool = False


class Runner(Protocol):
    """Decodes texts, and knows no other runner.

    Attributes:
        name: of what runs, for people.
    """

    name: str

    def start(self, rows: int) -> None:
        """Begin as many texts, without tokens."""
        ...

    def step(self, piece: Piece, tokens: Array) -> Array:
        """Decode a piece.

        Args:
            piece: see `Piece`.
            tokens: int64 ``[R, length]``.

        Returns:
            Logits ``[R, K, V]`` of the last K positions, 1 at least.
        """
        ...


@dataclass
class Decode:
    """Texts, and the pieces in which they are decoded.

    Attributes:
        pieces: in their order.
        rows: texts.
        vocabulary: token ids are 0 to ``vocabulary - 1``.
        seed: of the tokens with which texts begin.
        goes_on: texts go on with the reference's own tokens; else all tokens are random.
        tokens: of each piece ``[R, length]``, once the reference has run.
        wanted: logits of each piece, once the reference has run.
    """

    pieces: tuple[Piece, ...]
    rows: int
    vocabulary: int
    seed: int = 0
    goes_on: bool = True
    tokens: list[Array] = field(default_factory=list)
    wanted: list[Array] = field(default_factory=list)

    def run(self, reference: Runner) -> Iterator[int]:
        """Decode with the reference, which chooses the tokens; gives the number of pieces that are done, one by one.

        A text continues greedily, but never with a pair of tokens that it has already: a model repeats itself for ever.
        """
        rng = np.random.default_rng(self.seed)
        texts: list[list[int]] = [[] for _ in range(self.rows)]
        ahead: list[list[int]] = [[] for _ in range(self.rows)]
        reference.start(self.rows)
        for piece in self.pieces:
            tokens = rng.integers(0, self.vocabulary, (len(piece.rows), piece.length))
            for at, row in enumerate(piece.rows):
                if len(texts[row]) >= _SEEDS and ahead[row]:
                    tokens[at, 0] = ahead[row][0]
                texts[row] += tokens[at].tolist()
            logits = reference.step(piece, tokens)
            for at, row in enumerate(piece.rows):
                ahead[row] = [_next(texts[row], logits[at, -1])] if self.goes_on else []
            self.tokens.append(tokens)
            self.wanted.append(logits)
            yield len(self.wanted)


def _next(text: Sequence[int], logits: Array) -> int:
    scores = np.nan_to_num(logits.astype(np.float64), nan=-np.inf)
    scores[[b for a, b in pairwise(text) if a == text[-1]]] = -np.inf
    return int(scores.argmax())


@dataclass(frozen=True)
class Difference:
    """What one runner gives, against the reference.

    Attributes:
        largest: difference, as a share of the largest logit of a position; infinite where one is finite and the other
            is not.
        allowed: the most that rounding explains.
        pieces: that were compared.
        typical: the median over positions of the length of the difference, as a share of the logits' own around their
            mean.
        agreement: share of positions with the same best token.
        beyond: share of positions that differ by more than is allowed.
        piece, row, position: where the largest is; None: there is none.
    """

    largest: float
    allowed: float
    pieces: int
    typical: float = 0.0
    agreement: float = 1.0
    beyond: float = 0.0
    piece: int | None = None
    row: int | None = None
    position: int | None = None

    @property
    def passed(self) -> bool:
        """True if rounding explains it."""
        return self.largest <= self.allowed


def compare(decode: Decode, runner: Runner, allowed: float, *, stop: bool = True) -> Iterator[Difference]:
    """Decode with a runner, and compare it with the reference, piece by piece; the last one is of the whole decode.

    Args:
        decode: that the reference ran.
        runner: see `Runner`.
        allowed: see `Difference`.
        stop: at the first piece that differs by more.
    """
    runner.start(decode.rows)
    worst, shares, same, beyond = Difference(0.0, allowed, 0), list[float](), list[bool](), list[bool]()
    starts = [0] * decode.rows
    for at, (piece, tokens, wanted) in enumerate(zip(decode.pieces, decode.tokens, decode.wanted, strict=False)):
        logits = runner.step(piece, tokens)
        count = min(wanted.shape[1], logits.shape[1])
        one, other = wanted[:, wanted.shape[1] - count :], logits[:, logits.shape[1] - count :]
        largest, typical = share_of_logits(one, other)
        shares += typical.reshape(-1).tolist()
        beyond += (largest > allowed).reshape(-1).tolist()
        same += (one.argmax(-1) == other.argmax(-1)).reshape(-1).tolist()
        place = np.unravel_index(int(largest.argmax()), largest.shape)
        if largest[place] > worst.largest or worst.piece is None:
            row = piece.rows[place[0]]
            position = starts[row] + piece.length - count + int(place[1])
            worst = Difference(float(largest[place]), allowed, 0, piece=at, row=row, position=position)
        for row in piece.rows:
            starts[row] += piece.length
        yield Difference(
            worst.largest, allowed, at + 1, float(np.median(shares)), float(np.mean(same)), float(np.mean(beyond)),
            worst.piece, worst.row, worst.position,
        )  # fmt: skip
        if stop and worst.largest > allowed:
            return


def share_of_logits(wanted: Array, had: Array) -> tuple[Array, Array]:
    """How far logits are apart, for each position: see `Difference.largest` and `Difference.typical`.

    Args:
        wanted: of the reference, ``[..., V]``.
        had: of the same shape; another vocabulary differs throughout.
    """
    if wanted.shape != had.shape:
        everywhere = np.full(wanted.shape[:-1], math.inf)
        return everywhere, everywhere
    one, other = wanted.astype(np.float64), had.astype(np.float64)
    known = np.isfinite(one)
    with np.errstate(all="ignore"):  # what is not finite is compared, not warned of
        error = np.where(known, other - np.where(known, one, 0), 0)
        centered = np.where(known, one - np.where(known, one, 0).mean(-1, keepdims=True), 0)
        far = np.abs(error).max(-1)
        largest = np.where(far == 0, 0.0, far / np.abs(np.where(known, one, 0)).max(-1))
        typical = np.linalg.norm(error, axis=-1) / np.linalg.norm(centered, axis=-1)
        typical = np.nan_to_num(typical, posinf=np.inf)
    alike = (known == np.isfinite(other)).all(-1)
    return np.where(alike & ~np.isnan(largest), largest, np.inf), np.where(alike, typical, np.inf)


def plan_pieces(
    limits: Limits, plan: CachePlan, chunks: Sequence[int], tokens: int, *, whole: bool = False, full: bool = True,
    places: Mapping[int, str] = MappingProxyType({}), chunk: int = 64, far: bool = False, drawn: bool = False,
) -> tuple[Piece, ...]:  # fmt: skip
    """The pieces of a decode: texts that begin one after the other, chunks, single tokens, and each place beyond.

    Over each place at which something changes, the text in the middle goes token by token.

    Args:
        limits: of the model.
        plan: of the model.
        chunks: lengths of the chunks of a prompt.
        tokens: single tokens after them.
        whole: a prompt has to come in one step.
        full: up to the last row of linear caches.
        places: numbers of tokens that are places, too, and their names.
        chunk: tokens of a step on the way to a place, at most.
        far: places that lie too far away are reached, too: tokens on the way are left out (`Piece.skip`).
        drawn: end with steps after random cache contents: attention of weights that nobody trained is so faint that
            its faults show here alone.
    """
    everyone = tuple(range(limits.batch))
    ends, pieces, room = [0] * limits.batch, list[Piece](), limits.linear
    ragged = limits.ragged and limits.indexed and not limits.fixed_batch
    single, chunk = limits.length or 1, limits.length or min(limits.longest, chunk)

    def add(part: str, length: int, rows: tuple[int, ...] = everyone, skip: int = 0, *, drawn: bool = False) -> bool:
        """Add a step; False: it does not fit."""
        length = limits.length or min(length, limits.longest)
        if limits.indexed and room is not None and max(ends[r] for r in rows) + skip + length > room:
            return False
        if any((ends[r] + skip) % n + length > n for n in limits.no_straddle for r in rows):
            return (
                length > 1
                and limits.length is None
                and all(add(part, 1, rows, 0 if n else skip, drawn=drawn and not n) for n in range(length))
            )
        number = len(pieces)
        kept = None if number % 3 or plan.logits_span is None else 1
        pieces.append(Piece(length, rows, SPAN_KINDS[number % len(SPAN_KINDS)], kept, part, skip, drawn))
        for row in rows:
            ends[row] += length + skip
        return True

    def walk(part: str, left: int) -> None:
        """Add so many tokens in chunks, then single ones."""
        skip = left - _AFTER if far and left > min(_REACH, _CHUNKS * chunk) else 0
        skip -= skip % single
        left -= skip
        while left >= single and add(part, min(left, chunk), skip=skip):
            left, skip = left - chunk, 0
        for _ in range(_SINGLES):
            if not add(part, 1):
                break

    if whole:  # tokens of a step depend on each other: a prompt as a whole, then single tokens
        chunks = [max(sum(chunks), 1)]
    elif ragged:
        for row in range(limits.batch - 1):
            add("start", _DISTANCE * single, everyone[: row + 1])
    for length in (*chunks, *[1] * tokens):
        add("start", length)
    if not limits.indexed or whole:
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
