"""A decoder with hand-made weights that continues what it has seen: its right answer is known without running it.

After ``... a b ... a`` it says ``b``: an induction head. Layer 0 looks one position back and fetches the token there.
Layer 1 looks for the place whose *previous* token is the current one, and says the token at that place. Both layers
live off their caches alone (there is no residual stream around them), so a row that is lost, stale, doubled or in the
wrong place gives a wrong token.

Token 0 begins every prompt: the first position has no token before it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from graphs import Graph
from onnx import TensorProto

VOCAB = 32
_BITS = 12  # of a position, as +1 and -1: the product of two codes is 12 for equal positions, and at most 10 else
_SHARP = 20.0


def write_copier(
    path: Path, *, capacity: int, mode: str = "linear", sequence: int | str = "S", heads_major: bool = False
) -> Path:
    """Write the model; inputs as those of scripts/decoders.py in its mobius form, or with 4-D caches.

    Args:
        path: of the model.
        capacity: rows of each cache.
        mode: ``"linear"`` or ``"circular"``; circular models of several tokens per step take `attn_mask`.
        sequence: tokens per step: 1 or a symbol.
        heads_major: caches are ``[B, 1, S_max, H]`` instead of ``[B, S_max, H]``.
    """
    g = Graph()
    masked = mode == "circular" and sequence != 1
    ids = g.input("input_ids", TensorProto.INT64, ["B", sequence])
    positions = g.input("position_ids", TensorProto.INT64, ["B", sequence])
    indices = g.input("write_indices", TensorProto.INT64, ["B"])
    lengths = "" if masked else g.input("nonpad_kv_seqlen", TensorProto.INT64, ["B"])
    mask = g.input("attn_mask", TensorProto.BOOL, ["B", 1, sequence, capacity]) if masked else ""

    rows = np.arange(-1, 4096)
    codes = np.where(rows[:, None] >> np.arange(_BITS) & 1, 1.0, -1.0)
    one_hot = g.node("Gather", [g.constant(np.eye(VOCAB), np.float32), ids])
    here = g.node("Gather", [g.constant(codes[1:], np.float32), positions])
    before = g.node("Gather", [g.constant(codes[:-1], np.float32), positions])

    def attend(layer: int, q: str, k: str, v: str) -> str:
        presents = []
        for name, new, size in (("key", k, _BITS if layer == 0 else VOCAB), ("value", v, VOCAB)):
            shape = ["B", 1, capacity, size] if heads_major else ["B", capacity, size]
            past = g.input(f"{name}_cache.{layer}", TensorProto.FLOAT, shape)
            g.output(f"updated_{name}_cache.{layer}", TensorProto.FLOAT, shape)
            if heads_major:
                new = g.node("Unsqueeze", [new, g.constant([1])])
            axis = 2 if heads_major else 1
            out = f"updated_{name}_cache.{layer}"
            presents.append(g.node("TensorScatter", [past, new, indices], out, axis=axis, mode=mode))
        attributes = {"scale": _SHARP, "is_causal": int(mode == "linear")}
        if heads_major:
            q = g.node("Unsqueeze", [q, g.constant([1])])
        else:
            attributes |= {"q_num_heads": 1, "kv_num_heads": 1}
        inputs = [q, *presents, mask, "", "", lengths]
        while not inputs[-1]:
            inputs.pop()
        out = g.node("Attention", inputs, **attributes)
        return g.node("Squeeze", [out, g.constant([1])]) if heads_major else out

    previous = attend(0, before, here, one_hot)
    g.node("Mul", [attend(1, one_hot, previous, one_hot), g.constant(10.0, np.float32)], "logits")
    g.output("logits", TensorProto.FLOAT, ["B", sequence, VOCAB])
    onnx.save(g.model(), path)
    return path


def prompt(cycle: list[int], rounds: float = 1.5) -> list[int]:
    """Token 0, and a cycle of different tokens so many times, at least once and one token more."""
    count = max(int(len(cycle) * rounds), len(cycle) + 1)
    return [0, *(cycle * (int(rounds) + 1))[:count]]


def answer(cycle: list[int], written: list[int], count: int) -> list[int]:
    """The right `count` tokens after `written`, whose last tokens are of the cycle."""
    at = cycle.index(written[-1]) + 1
    return [cycle[(at + i) % len(cycle)] for i in range(count)]
