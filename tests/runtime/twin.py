"""The decoders of scripts/decoders.py in plain NumPy and without any cache: the whole prefix again for every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from decoders import DecoderConfig
from numpy.typing import NDArray
from onnx import numpy_helper

Array = NDArray[Any]


class Twin:
    """Full recomputation in float64.

    Args:
        path: a float32 decoder that scripts/decoders.py made, of any form.
        config: what it was made from.
    """

    def __init__(self, path: Path, config: DecoderConfig) -> None:
        self.config = config
        self.weights = {t.name: numpy_helper.to_array(t).astype(float) for t in onnx.load(path).graph.initializer}

    def logits(self, tokens: Sequence[int]) -> Array:
        """``[V]`` after `tokens`. Circular models see the last `capacity` tokens, linear ones all."""
        c, w = self.config, self.weights
        x, length = w["embed.weight"][list(tokens)], len(tokens)
        position = np.arange(length)
        seen = position[:, None] >= position[None, :]
        if c.mode == "circular":
            assert isinstance(c.capacity, int)
            seen &= position[:, None] - position[None, :] < c.capacity
        for i in range(c.layers):
            p = f"layers.{i}"
            normed = _norm(x, w[f"{p}.attention_norm.weight"])
            q = self._rotate((normed @ w[f"{p}.q.weight"]).reshape(length, c.query_heads, c.head_size))
            k = self._rotate((normed @ w[f"{p}.k.weight"]).reshape(length, c.kv_heads, c.head_size))
            v = (normed @ w[f"{p}.v.weight"]).reshape(length, c.kv_heads, c.value_size)
            k, v = (np.repeat(t, c.query_heads // c.kv_heads, axis=1) for t in (k, v))
            scores = np.einsum("qnh,knh->nqk", q, k) * c.head_size**-0.5
            if c.softcap:
                scores = c.softcap * np.tanh(scores / c.softcap)
            scores = np.where(seen, scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            attended = np.einsum("nqk,knh->qnh", shares, v).reshape(length, -1)
            x = x + attended @ w[f"{p}.o.weight"]
            normed = _norm(x, w[f"{p}.mlp_norm.weight"])
            gate = normed @ w[f"{p}.gate.weight"]
            x = x + (gate / (1 + np.exp(-gate)) * (normed @ w[f"{p}.up.weight"])) @ w[f"{p}.down.weight"]
        result: Array = (_norm(x, w["norm.weight"]) @ w["head.weight"])[-1]
        return result

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest tokens after a prompt, one after the other."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]

    def _rotate(self, x: Array) -> Array:
        cos, sin = (self.weights[f"rotary.{part}"][: len(x), None, :] for part in ("cos", "sin"))
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _norm(x: Array, scale: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
