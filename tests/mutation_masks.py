"""Decoders whose masks hide keys by large numbers, drawn at random: what overflows is refused, or equal.

Sums, products and casts of such numbers leave the range of their type: -inf, or NaN if the model subtracts or
multiplies them. By hand: ``PYTHONPATH=tests:tests/corpus python tests/mutation_masks.py --seeds 0:500``.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from concat_graphs import MASKS, TYPES, Build, Decoder, make_decoder
from mutation_trials import judge
from onnx import TensorProto

from trt_kvcache.importer.plan import PlanOptions

CAPACITY = 24
_LOWEST = (-1e4, -3e4, -6e4, -65504.0, -1e9, -3e38, float(np.finfo(np.float32).min), -np.inf)


def overflowing(seed: int) -> Decoder:
    """The decoder of a seed."""
    rng = random.Random(seed)
    form = rng.choice(("add", "where", "product", "twice", "cast", "scaled", "shifted", "minimum", "double"))
    lowest, kind = rng.choice(_LOWEST), rng.choice(("past", "past", "padding", "positions"))
    dtype = rng.choice((np.float16, np.float16, np.float32))

    def hidden(g: Build, scores: str) -> str:
        return g.node("Add", [scores, g.once("bias", lambda: _bias(g, form, lowest, MASKS[kind](g)))])

    def hide(g: Build, scores: str) -> str:
        visible = g.once("visible", lambda: MASKS[kind](g))
        if form == "where":
            return g.node("Where", [visible, scores, _number(g, lowest)])
        if form == "minimum":
            ends = g.node("Where", [visible, _number(g, -lowest), _number(g, lowest)])
            return g.node("Min", [scores, ends])
        if form == "shifted":  # scores times 1 or 0, and the number taken off
            kept = g.node("Cast", [visible], to=_code(g))
            off = g.node("Mul", [_number(g, -lowest), g.node("Sub", [_number(g, 1), kept])])
            return g.node("Sub", [g.node("Mul", [scores, kept]), off])
        if form == "scaled":
            return g.node("Div", [hidden(g, scores), _number(g, rng.choice((0.5, 0.125, 2.0)))])
        return hidden(g, scores)

    return Decoder(
        layers=rng.choice((1, 2)), dtype=dtype, mask="none", masked=hide, upcast=rng.random() < 0.4,
        guard=rng.random() < 0.3, window=rng.choice((0, 0, 5)), sinks=rng.choice(("", "", "", "weight")),
        softcap=rng.choice((0.0, 0.0, 20.0)), kv_heads=rng.choice((2, 4)),
        scale=rng.choice(("scores", "q", "both")),
    )  # fmt: skip


def _bias(g: Build, form: str, lowest: float, visible: str) -> str:
    """What is added to scores."""
    code = _code(g)
    if form == "product":
        hidden = g.node("Cast", [g.node("Not", [visible])], to=code)
        return g.node("Mul", [hidden, _number(g, lowest)])
    if form in ("cast", "double"):
        wide = np.float64 if form == "double" else np.float32
        with np.errstate(over="ignore"):
            chosen = g.node("Where", [visible, g.constant(0, wide), g.constant(lowest, wide)])
        return g.node("Cast", [chosen], to=code)
    bias = g.node("Where", [visible, _number(g, 0), _number(g, lowest)])
    return g.node("Add", [bias, bias]) if form == "twice" else bias


def _code(g: Build) -> int:
    return TensorProto.FLOAT if g.decoder.upcast else TYPES[g.decoder.dtype]


def _number(g: Build, value: float) -> str:
    with np.errstate(over="ignore"):
        return g.number(value)


def trial(seed: int) -> tuple[str, str]:
    """A word for what becomes of a seed's decoder, and its reason; see `mutation_trials.judge`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(make_decoder(overflowing(seed)), path)
        return judge(path, PlanOptions(capacity=CAPACITY))


def main() -> None:
    """Draws decoders and prints one line for each, and the number of each word."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0:20", help="FIRST:LAST")
    first, last = map(int, parser.parse_args().seeds.split(":"))
    words: Counter[str] = Counter()
    for seed in range(first, last):
        word, reason = trial(seed)
        words[word] += 1
        sys.stdout.write("\t".join((word, str(seed), " | ".join(reason.splitlines()[-4:]))) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(words)}\n")


if __name__ == "__main__":
    main()
