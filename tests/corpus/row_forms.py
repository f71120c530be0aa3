"""Decoders whose caches keep their newest rows: growing ones that are cut, fixed ones that are shifted, and rings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from concat_graphs import Build, Decoder, decoders, joined
from graphs import Dim
from onnx import TensorProto

from corpus import Entry

FAR = 2**31


def _slice(g: Build, tensor: str, start: str | int, end: str | int = FAR, axis: int | None = None) -> str:
    bounds = [b if isinstance(b, str) else g.constant([b]) for b in (start, end)]
    return g.Slice(tensor, *bounds, [g.axis if axis is None else axis])


# Growing caches that are cut, as layers with a window have it.


@dataclass(frozen=True)
class Cut:
    """The form of a decoder.

    Attributes:
        kept: rows that each layer keeps; 0: all.
        window: tokens that each layer sees, its own included; 0: all.
        twice: a past is cut to the window before the new rows are joined, too.
        padded: masks read the padding mask, which is as long as the rows that are kept.
        counted: positions are counted from the rows of the first layer; else they are an input.
    """

    kept: tuple[int, ...] = (7,)
    window: tuple[int, ...] = (8,)
    twice: bool = False
    padded: bool = False
    counted: bool = False

    def decoder(self) -> Decoder:
        return Decoder(
            layers=len(self.kept), mask="none", scale="none", repeat="gather", scores=self._hide, write=self._write,
            positions=self._positions if self.counted else "input",
            rows=lambda layer, kind: (f"past_{layer}_{kind}", f"after_{layer}_{kind}"),
        )  # fmt: skip

    def _positions(self, g: Build) -> str:
        return g.Unsqueeze(g.Range(*_ends(g, 0), 1), [0])

    def _hide(self, g: Build, scores: str) -> str:
        held, total = _ends(g, g.layer)
        keys = g.Unsqueeze(g.Range(0, total, 1), [0, 1, 2])
        queries = g.Unsqueeze(g.Range(held, total, 1), [0, 1, 3])
        seen, window = g.LessOrEqual(keys, queries), self.window[g.layer]
        if window:
            seen = g.And(seen, g.Greater(keys, g.Sub(queries, window)))
        if self.padded:
            seen = g.And(g.Unsqueeze(g.Cast(g.padding, to=TensorProto.BOOL), [1, 2]), seen)
        return g.Where(seen, scores, g.number(g.decoder.lowest))

    def _write(self, g: Build, past: str, new: str, present: str) -> str:
        kept = self.kept[g.layer]
        if not kept:
            return joined(g, past, new, present)
        whole = joined(g, _slice(g, past, -kept) if self.twice else past, new)
        rest = _slice(g, whole, -kept - 3) if self.twice else whole
        g.Identity(_slice(g, rest, -kept), out=present)
        return whole


def _ends(g: Build, layer: int) -> tuple[str, str]:
    """P and P + S of a layer."""
    held = g.size_of(g.pasts[2 * layer], g.axis)
    return held, g.Add(held, g.length)


CUTS: dict[str, Cut] = {
    "plain": Cut(),
    "twice": Cut(twice=True),
    "a window of two": Cut(kept=(1,), window=(2,)),
    "windows of their own": Cut(kept=(7, 4), window=(8, 5)),
    "cut last": Cut(kept=(0, 7), window=(0, 8)),
    "fewer kept than the capacity, padding": Cut(kept=(12,), window=(5,), padded=True),
    "fewer kept than seen": Cut(kept=(5,)),
    "no window": Cut(window=(0,)),
    "positions counted from rows that are kept": Cut(counted=True),
}

# Fixed caches of which old rows are shifted out.

ROWS = 8


@dataclass(frozen=True)
class Shifted:
    """The form of a decoder.

    Attributes:
        write: of the caches: "cat" (rows are cut off, new ones joined), "cut" (joined, then cut); or a look-alike:
            "oldest" (the oldest are kept), "whole" (attention reads what is cut).
        mask: over shifted rows: "own" (an input), "counted" (from positions), "late" (the same, without the oldest
            row), "none".
        length: S.
        layout: axes of the caches, "bnsd" or "bnds".
    """

    write: str = "cat"
    mask: str = "own"
    length: Dim = "sequence"
    layout: str = "bnsd"

    def decoder(self) -> Decoder:
        return Decoder(
            heads=2, sequence=self.length, layout=self.layout, lowest=-1e4, mask="none", scores=self._masked,
            write=self._written, rows=lambda layer, kind: (ROWS, ROWS),
        )  # fmt: skip

    def _written(self, g: Build, past: str, new: str, present: str) -> str:
        """Write to a cache; returns what attention reads."""
        if self.write == "cat":
            return joined(g, _slice(g, past, g.Unsqueeze(g.length, [0])), new, present)
        whole = joined(g, past, new)
        cut = g.Identity(_slice(g, whole, 0, ROWS) if self.write == "oldest" else _slice(g, whole, -ROWS), out=present)
        return whole if self.write == "whole" else cut

    def _masked(self, g: Build, scores: str) -> str:
        if self.mask == "none":
            return scores
        return g.Where(g.once("own", lambda: self._own(g)), scores, g.number(g.decoder.lowest))

    def _own(self, g: Build) -> str:
        if self.mask == "own":
            return g.input("mask", TensorProto.BOOL, ["batch", 1, self.length, ROWS])
        own = g.Unsqueeze(g.position_ids, [1, 3])  # the tokens in the last rows, up to each query's own
        tokens = g.Sub(g.ReduceMax(own, [2]), np.arange(ROWS)[::-1].copy())
        least = g.constant(1 if self.mask == "late" else 0)
        return g.And(g.GreaterOrEqual(tokens, least), g.LessOrEqual(tokens, own))


SHIFTED: dict[str, Shifted] = {
    "cat": Shifted(),
    "cat, one token": Shifted(length=1),
    "cat bnds": Shifted(layout="bnds"),
    "cut": Shifted("cut"),
    "counted": Shifted(mask="counted"),
    "oldest": Shifted("oldest"),
    "read whole": Shifted("whole", mask="none", length=1),
    "late": Shifted(mask="late"),
}

# Rings: ``cache[:, :, pos % L] = new``.

CAPACITY = 16
Visible = Callable[[Build, str, str], str]


def rows_up_to_own(g: Build, rows: str, own: str) -> str:
    """torch's ``arange(L) <= pos[:, None]``: after the end all rows, those of later tokens too."""
    return g.LessOrEqual(rows, own)


def rows_by_age(g: Build, rows: str, own: str) -> str:
    """A window by what rows hold: right in every step of one token."""
    age = g.Mod(g.Sub(own, rows), CAPACITY)
    return g.And(g.Less(age, 5), g.LessOrEqual(age, own))


def rows_by_number(g: Build, rows: str, own: str) -> str:
    """A window by the numbers of rows, which sees none after the end."""
    near = g.Greater(rows, g.Sub(own, 5))
    return g.And(rows_up_to_own(g, rows, own), near)


def ring(mask: Visible, length: Dim) -> Decoder:
    def places(g: Build) -> str:
        return g.once("pos", lambda: g.input("pos", TensorProto.INT64, [length]))

    def write(g: Build, past: str, new: str, present: str) -> str:
        first = [g.Transpose(tensor, perm=[2, 0, 1, 3]) for tensor in (past, new)]
        written = g.ScatterND(first[0], g.Unsqueeze(g.Mod(places(g), CAPACITY), [1]), first[1])
        return g.Transpose(written, out=present, perm=[1, 2, 0, 3])

    def visible(g: Build) -> str:
        return mask(g, g.constant(np.arange(CAPACITY)), g.Unsqueeze(places(g), [1]))

    return Decoder(
        kv_heads=4, embedded=True, apply="where", lowest=-1e9, positions="none", sequence=length, mask=visible,
        write=write, rows=lambda layer, kind: (CAPACITY, CAPACITY),
    )  # fmt: skip


def entries() -> Iterator[Entry]:
    cuts = {name: how.decoder() for name, how in CUTS.items()}
    yield from decoders("cut", cuts, capacity=40)
    circular: dict[str, Any] = {name: cuts[name] for name in ("plain", "cut last")}
    yield from decoders("cut, circular", circular, sliding="circular", window_chunk=8)
    yield from decoders("shifted", {name: how.decoder() for name, how in SHIFTED.items()}, None)
    rings = (rows_up_to_own, rows_by_age, rows_by_number)
    yield from decoders("ring", {f"{f.__name__}, {n}": ring(f, n) for f in rings for n in ("S", 1)}, None)
