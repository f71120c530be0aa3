"""Decoders whose caches grow by Concat and are cut to their newest rows, as layers with a window have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from concat_graphs import Build, Decoder, _attend, decoders, joined
from graphs import Dim
from onnx import TensorProto

from corpus import Entry

FAR = 2**31


@dataclass(frozen=True)
class Cut:
    """The form of a decoder.

    Attributes:
        kept: rows that each layer keeps; 0: all.
        window: tokens that each layer sees, its own included; 0: all.
        cut: name in `CUTS`: how rows are cut off.
        mask: name in `MASKS`: what the masks are made of; "": there are none.
        values: rows that values keep more than keys.
        attention: "plain" operators, or "fused".
        layout: of the caches, "bnsd" or "bsnd".
        sequence: S where it is fixed, or a symbol.
        reads: "all" rows, or what is left of them after the "cut".
        counted: the layer from whose rows positions are counted; None: they are an input.
    """

    kept: tuple[int, ...] = (7,)
    window: tuple[int, ...] = (8,)
    cut: str = "slice"
    mask: str = "lengths"
    values: int = 0
    attention: str = "plain"
    layout: str = "bnsd"
    sequence: Dim = "sequence"
    reads: str = "all"
    counted: int | None = None

    def decoder(self) -> Decoder:
        fused = self.attention == "fused"
        return Decoder(
            layers=len(self.kept), layout=self.layout, sequence=self.sequence, mask="none", scale="none",
            repeat="none" if fused else "gather", opset=24 if fused else 18, attend=self._fused if fused else _attend,
            scores=self._hide, write=self._write, positions="input" if self.counted is None else self._positions,
            rows=lambda layer, kind: (f"past_{layer}_{kind}", f"after_{layer}_{kind}"),
        )  # fmt: skip

    def _positions(self, g: Build) -> str:
        assert self.counted is not None
        return g.Unsqueeze(g.Range(*_ends(g, self.counted), 1), [0])

    def _mask(self, g: Build) -> str:
        return MASKS[self.mask](g, self.window[g.layer]) if self.mask else ""

    def _hide(self, g: Build, scores: str) -> str:
        mask = self._mask(g)
        return g.Where(mask, scores, g.number(g.decoder.lowest)) if mask else scores

    def _fused(self, g: Build, query: str, keys: str, values: str) -> str:
        mask = self._mask(g)
        return g.Attention(query, keys, values, *([mask] if mask else []))

    def _write(self, g: Build, past: str, new: str, present: str) -> str:
        kept = self.kept[g.layer]
        if not kept:
            return joined(g, past, new, present)
        kept += self.values * present.endswith("value")
        whole = joined(g, _slice(g, past, -kept) if self.cut == "twice" else past, new)
        g.Identity(CUTS[self.cut](g, whole, kept), out=present)
        return whole if self.reads == "all" else present


def _slice(
    g: Build, tensor: str, start: str | int, end: str | int = FAR, axis: int | None = None, step: int = 1
) -> str:
    bounds = [b if isinstance(b, str) else g.constant([b]) for b in (start, end)]
    return g.Slice(tensor, *bounds, [g.axis if axis is None else axis], [step])


def _rows(g: Build, tensor: str) -> str:
    """``[1]``."""
    return g.Shape(tensor, start=g.axis, end=g.axis + 1)


def _ends(g: Build, layer: int) -> tuple[str, str]:
    """P and P + S of a layer."""
    held = g.size_of(g.pasts[2 * layer], g.axis)
    return held, g.Add(held, g.length)


def _computed(g: Build, joined: str, kept: int) -> str:
    """From Max(T - R, 0) on."""
    return _slice(g, joined, g.Max(g.Sub(_rows(g, joined), [kept]), [0]))


def _chosen(g: Build, joined: str, kept: int) -> str:
    """From Where(T > R, T - R, 0) on."""
    total, rows = _rows(g, joined), g.constant([kept])
    return _slice(g, joined, g.Where(g.Greater(total, rows), g.Sub(total, rows), [0]))


CUTS: dict[str, Callable[[Build, str, int], str]] = {
    "slice": lambda g, joined, kept: _slice(g, joined, -kept),
    "twice": lambda g, joined, kept: _slice(g, _slice(g, joined, -kept - 3), -kept),
    "computed": _computed,
    "chosen": _chosen,
    "the oldest rows": lambda g, joined, kept: _slice(g, joined, 0, kept),
    "backwards": lambda g, joined, kept: _slice(g, joined, -1, -kept - 1, step=-1),
    "heads": lambda g, joined, kept: _slice(g, joined, -2, axis=3 - g.axis),
    "by the update": lambda g, joined, kept: _slice(g, joined, g.Neg(g.Add(g.length, [kept]))),
    "by a position": lambda g, joined, kept: _slice(g, joined, g.Neg(_slice(
        g, g.Reshape(g.position_ids, [-1]), 0, 1, axis=0))),
}  # fmt: skip


def _spread(g: Build, window: int, keys: str, queries: str) -> str:
    """Causal, and in the window: bool ``[.., S, T]`` from positions of keys and queries."""
    near = g.LessOrEqual(keys, queries)
    return g.And(near, g.Greater(keys, g.Sub(queries, window))) if window else near


def _lengths(g: Build, window: int) -> str:
    """Positions counted from the first row that is left."""
    held, total = _ends(g, g.layer)
    keys, queries = g.Range(0, total, 1), g.Range(held, total, 1)
    return _spread(g, window, g.Unsqueeze(keys, [0, 1, 2]), g.Unsqueeze(queries, [0, 1, 3]))


def _positions(g: Build, window: int) -> str:
    """Positions of tokens: the last rows are the newest ones."""
    _, total = _ends(g, g.layer)
    last = _slice(g, g.position_ids, -1, axis=1)  # [B, 1]
    keys = g.Add(last, g.Sub(g.Range(0, total, 1), g.Sub(total, 1)))
    return _spread(g, window, g.Unsqueeze(keys, [1, 2]), g.Unsqueeze(g.position_ids, [1, 3]))


def _padded(g: Build, window: int, newest: bool | None) -> str:
    """The padding mask over the newest rows, or over the first ones; None: it has no others."""
    total = g.Unsqueeze(_ends(g, g.layer)[1], [0])
    ends = (g.Neg(total), FAR) if newest else (0, total)
    part = g.padding if newest is None else _slice(g, g.padding, *ends, axis=1)
    seen = g.Cast(part, to=TensorProto.BOOL)
    return g.And(g.Unsqueeze(seen, [1, 2]), _lengths(g, window))


MASKS: dict[str, Callable[[Build, int], str]] = {
    "lengths": _lengths,
    "positions": _positions,
    "padding": lambda g, window: _padded(g, window, newest=True),
    "padding of the rows": lambda g, window: _padded(g, window, newest=None),
    "padding from the first": lambda g, window: _padded(g, window, newest=False),
}

FORMS: dict[str, Cut] = {
    "a window of two": Cut(kept=(1,), window=(2,)),
    "a large window": Cut(kept=(15,), window=(16,)),
    "more kept than seen": Cut(kept=(11,), window=(6,)),
    "every layer": Cut(kept=(7, 7), window=(8, 8)),
    "windows of their own": Cut(kept=(7, 4), window=(8, 5)),
    "cut first": Cut(kept=(7, 0), window=(8, 0)),
    "cut last": Cut(kept=(0, 7), window=(0, 8)),
    "a window that is not cut": Cut(kept=(7, 0), window=(8, 8)),
    "a computed start": Cut(cut="computed", kept=(7, 0), window=(8, 0)),
    "a chosen start": Cut(cut="chosen"),
    "positions": Cut(mask="positions", kept=(7, 0), window=(8, 0)),
    "padding": Cut(mask="padding", kept=(7, 0), window=(8, 0)),
    "padding from the first row": Cut(mask="padding from the first"),
    "padding of the rows that are kept": Cut(mask="padding of the rows", kept=(7, 7), window=(8, 8)),
    "fewer kept than the capacity, padding": Cut(mask="padding of the rows", kept=(12,), window=(5,)),
    "another layout": Cut(layout="bsnd", kept=(7, 0), window=(8, 0)),
    "fused by positions": Cut(attention="fused", mask="positions"),
    # One token at a time sees what is kept and itself, mask or not; several would see more than a window.
    "one token, no window": Cut(sequence=1, window=(0,)),
    "one token, no mask": Cut(sequence=1, window=(0,), mask=""),
    "one token, fused, no mask": Cut(sequence=1, window=(0, 0), kept=(7, 0), mask="", attention="fused"),
    "one token, fewer kept than the window": Cut(sequence=1, kept=(5,)),
    "positions counted from a layer that keeps all": Cut(kept=(7, 0), window=(8, 0), counted=1),
    "a cut that leaves all heads": Cut(cut="heads", kept=(0,)),
    "as long as the capacity": Cut(kept=(40,), window=(41,)),
    "longer than the capacity": Cut(kept=(80,), window=(81,)),
    "much longer": Cut(kept=(4095,), window=(4096,), cut="computed"),
    "not cut within the capacity, no window": Cut(kept=(40,), window=(0,)),
    "fewer kept than seen": Cut(kept=(5,)),
    "no window": Cut(window=(0,)),
    "no mask": Cut(mask=""),
    "positions counted from rows that are kept": Cut(counted=0),
    "attention over the rest": Cut(reads="cut", mask=""),
    **{f"kept {n - 1}": Cut(kept=(n - 1, 0), window=(n, 0), mask="positions") for n in (2, 9, 10)},
}


def entries() -> Iterator[Entry]:
    how: list[dict[str, Any]] = [{"cut": c} for c in CUTS] + [{"mask": m} for m in MASKS]
    how += [{"attention": "fused"}, {"layout": "bsnd"}, {"kept": (0, 7), "window": (0, 8)}, {"sequence": 1}]
    how += [{"values": 1}, {"reads": "cut"}]
    cuts = {str(h): Cut(**h).decoder() for h in how}
    forms = {n: h.decoder() for n, h in FORMS.items()}
    at_the_end = {n: m for n, m in forms.items() if n.startswith("kept")}
    rings = {n: m for n, m in cuts.items() if "attention" in n or "kept" in n or n == "{'mask': 'lengths'}"}
    yield from decoders("cut", cuts)
    yield from decoders("cut", forms, capacity=40)
    yield from decoders("cut, capacity 9", at_the_end, capacity=9)
    yield from decoders("cut, circular", rings, sliding="circular", window_chunk=8)
