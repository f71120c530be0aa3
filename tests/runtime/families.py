"""One corpus of small decoders: for each family how its model is written, and what its numbers are, recomputed.

The reference of a family computes the whole text again for every token, without any cache: in NumPy and float64; for
stored exports, with the model as exported in ONNX Runtime.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from decoders import DecoderConfig, write_decoder
from foreign_decoders import make_foreign
from hybrids import cross_logits, cross_model, encoder_constants, hybrid_logits, hybrid_model, write
from numpy.typing import NDArray
from onnx import numpy_helper
from runtime.embedded_models import MODELS, Recomputed, cut
from runtime.engines import open_engine, runner_on, write_engine

from trt_kvcache import DecodeSession, PlanOptions
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import CacheDtype, CacheLayout, Fallback, Target
from trt_kvcache.importer.check import Checked
from trt_kvcache.runtime.ort import ort_runner

Array = NDArray[Any]
PROMPTS = ([5, 9, 3], [1, 2, 4, 8, 16, 32, 3, 6, 12, 24, 48], [60], list(range(10, 29)), [7] * 5)
LENGTHS = (6, 6, 11, 1, 6)
"""What the encoder gives for each prompt, in positions."""
DEVICES = ("cpu", "gpu", "gpu without graphs")


class Twin:
    """A decoder of scripts/decoders.py in plain NumPy, of any form.

    Args:
        path: a float32 decoder.
        config: of the decoder.
        levels: of the integers that rows of keys and values are rounded to; 0: they are not.
    """

    def __init__(self, path: Path, config: DecoderConfig, levels: int = 0) -> None:
        self.config = config
        self.levels = levels
        self.weights = {t.name: numpy_helper.to_array(t).astype(float) for t in onnx.load(path).graph.initializer}

    def logits(self, tokens: Sequence[int], places: Array | None = None) -> Array:
        """``[V]`` after `tokens` at `places`. Circular models see the last `capacity` tokens, linear ones all."""
        c, w = self.config, self.weights
        x, length = w["embed.weight"][list(tokens)], len(tokens)
        position = np.arange(length)
        seen = position[:, None] >= position[None, :]
        if c.mode == "circular":
            assert isinstance(c.capacity, int)
            seen &= position[:, None] - position[None, :] < c.capacity
        angles = position if places is None else places
        for i in range(c.layers):
            p = f"layers.{i}"
            normed = _norm(x, w[f"{p}.attention_norm.weight"])
            q = self._rotate((normed @ w[f"{p}.q.weight"]).reshape(length, c.query_heads, c.head_size), angles)
            k = self._rotate((normed @ w[f"{p}.k.weight"]).reshape(length, c.kv_heads, c.head_size), angles)
            v = (normed @ w[f"{p}.v.weight"]).reshape(length, c.kv_heads, c.value_size)
            k, v = self._rounded(k), self._rounded(v)
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

    def _rounded(self, rows: Array) -> Array:
        if not self.levels:
            return rows
        rows = turned(rows)
        scale = np.abs(rows).max(-1, keepdims=True) / self.levels
        return turned(np.round(rows / scale) * scale)

    def _rotate(self, x: Array, places: Array) -> Array:
        cos, sin = (self.weights[f"rotary.{part}"][places, None, :] for part in ("cos", "sin"))
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def turned(rows: Array) -> Array:
    """Rows ``[..., H]`` after a fast Walsh-Hadamard transform of each block of the largest power of two in H."""
    block = 1
    made = rows.astype(np.float64)
    while made.shape[-1] % (2 * block) == 0:
        pairs = made.reshape(*rows.shape[:-1], -1, 2, block)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        made = (np.stack([first + second, first - second], -2) / 2**0.5).reshape(rows.shape)
        block *= 2
    return made


def _norm(x: Array, scale: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


DEFAULT = PlanOptions()
Logits = Callable[[list[int], Array, int], Array]
"""``[V]`` after tokens at places ``[planes, S]``, of the sequence of this number."""


@dataclass(frozen=True)
class Made:
    """A family's model, its reference, and what sequence `i` is given beside its tokens (arguments of `add`)."""

    model: Path
    logits: Logits
    given: Callable[[int], dict[str, Any]] = field(default=lambda i: {})
    session: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """Makes a family in a folder, and opens it; `state`: it keeps state, which no crop takes back."""

    make: Callable[[Path], Made]
    options: PlanOptions = DEFAULT
    max_batch: int | None = 3
    max_chunk: int = 8
    build: dict[str, Any] = field(default_factory=dict)
    state: bool = False
    devices: tuple[str, ...] = DEVICES


class Corpus:
    """Families, each made once, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made = cache(self._made)
        self._engine = cache(self._built)
        self._imported = cache(lambda name: import_model(self.made(name).model, FAMILIES[name].options))

    def _made(self, name: str) -> Made:
        folder = self._folder / name
        folder.mkdir()
        return FAMILIES[name].make(folder)

    def _built(self, name: str, backend: str) -> Path:
        family, made = FAMILIES[name], self.made(name)
        model = made.model.with_name(f"{backend}.onnx")
        model.write_bytes(made.model.read_bytes())
        return write_engine(model, options=family.options, backend=backend, max_chunk=family.max_chunk, **family.build)

    def open(self, name: str, device: str = "cpu", **options: Any) -> DecodeSession:
        """A session with these options, every row of its caches full of large numbers."""
        family, made = FAMILIES[name], self.made(name)
        if device == "cpu":
            batch, chunk = family.max_batch, family.max_chunk
            with patch.object(
                ort_runner,
                "import_unchecked",
                lambda *_, **__: (copy.deepcopy(self._imported(name)), SimpleNamespace(result=Checked)),
            ):
                runner = runner_on(device, made.model, max_batch=batch, max_chunk=chunk)
        else:
            backend = "tensorrt-rtx" if device == "gpu" else "tensorrt"
            runner = open_engine(self._engine(name, backend), backend=backend, cuda_graphs=device == "gpu")
        rng = np.random.default_rng(1)
        for one in runner.plan.caches:
            for row in range(runner.max_batch):
                held = runner.read_row(one.past, row, one.capacity)
                runner.write_row(one.past, row, rng.choice([-1e4, 1e4], held.shape).astype(held.dtype))
        return DecodeSession(runner, **made.session, **options)


@dataclass
class Text:
    """Tokens of sequence `i`, and where they stand, ``[planes, S]``; `most`: how many it ever had."""

    made: Made
    i: int
    tokens: list[int] = field(default_factory=list)
    places: Array = field(default_factory=lambda: np.zeros((1, 0), np.int64))
    most: int = 0

    @classmethod
    def of(cls, made: Made, i: int) -> Text:
        text = cls(made, i)
        text.extend(PROMPTS[i], made.given(i).get("positions"))
        return text

    def extend(self, tokens: Sequence[int], places: Any = None) -> None:
        """More tokens, by default after the largest place before them."""
        if places is None:
            first = int(self.places.max()) + 1 if self.places.size else 0
            places = np.arange(first, first + len(tokens))
        places = np.atleast_2d(places)
        planes = max(len(places), len(self.places))
        self.places = np.concatenate([np.broadcast_to(p, (planes, p.shape[1])) for p in (self.places, places)], axis=1)
        self.tokens += tokens
        self.most = max(self.most, len(self.tokens))

    take = extend

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self) -> Text:
        return replace(self, tokens=[*self.tokens], places=self.places.copy())

    def scored(self, logits: Array) -> None:
        """Check the scores that a session gives after the tokens."""
        expected = self.logits()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3 * np.abs(expected).max())

    def chosen(self, token: int) -> None:
        """Check that a token is the likeliest one, or as likely as rounding tells."""
        expected = self.logits()
        assert expected[token] >= expected.max() - 1e-3 * np.abs(expected).max()

    def cut(self, length: int) -> None:
        """Keep the first tokens."""
        del self.tokens[length:]
        self.places = self.places[:, :length]

    def logits(self) -> Array:
        """``[V]`` after the tokens."""
        return self.made.logits(self.tokens, self.places, self.i)

    def greedy(self, count: int) -> list[int]:
        """The `count` likeliest tokens, which become part of the text."""
        for _ in range(count):
            self.extend([int(self.logits().argmax())])
        return self.tokens[len(self.tokens) - count :]


def _twin(config: DecoderConfig, folder: Path, *, levels: int = 0) -> Made:
    model = write_decoder(folder / "model.onnx", config)
    twin = Twin(model, config, levels)
    return Made(model, lambda tokens, places, i: twin.logits(tokens))


def _placed(config: DecoderConfig, folder: Path) -> Made:
    """Without its embedding: some prompts as ids, some as embeddings, some at places of their own."""
    forms = cut(write_decoder(folder / "whole.onnx", config), folder)
    twin = Twin(folder / "whole.onnx", config)

    def given(i: int) -> dict[str, Any]:
        embeds = {"inputs_embeds": forms.table[PROMPTS[i]]} if i % 2 else {}
        return embeds | ({"positions": [2 * j + 1 for j in range(len(PROMPTS[i]))]} if i else {})

    session = {"embeddings": forms.table}
    return Made(forms.embeds, lambda tokens, places, i: twin.logits(tokens, places[0]), given, session)


def _planes(folder: Path) -> Made:
    """A stored export with M-RoPE: three places for each token."""
    forms = cut(MODELS / "ort-genai" / "qwen3vl_cpu_fp32" / "model.onnx", folder)
    original = Recomputed(forms.embeds)

    def given(i: int) -> dict[str, Any]:
        embeds = {"inputs_embeds": forms.table[PROMPTS[i]]} if i % 2 else {}
        places = np.cumsum(np.random.default_rng(i).integers(0, 3, (3, len(PROMPTS[i]))), axis=1)
        return embeds | ({"positions": places} if i % 3 else {})

    def logits(tokens: list[int], places: Array, i: int) -> Array:
        return original.logits(forms.table[tokens], np.broadcast_to(places, (3, len(tokens))))

    return Made(forms.embeds, logits, given, {"embeddings": forms.table})


def _shifted(config: DecoderConfig, folder: Path) -> Made:
    """A cache whose rows the model moves in every step."""
    onnx.save(make_foreign("shift", config), folder / "model.onnx")
    twin = Twin(write_decoder(folder / "twin.onnx", config), config)
    return Made(folder / "model.onnx", lambda tokens, places, i: twin.logits(tokens))


def _hybrid(folder: Path, **options: Any) -> Made:
    model = write(folder / "model.onnx", hybrid_model(**options))
    return Made(model, lambda tokens, places, i: hybrid_logits(tokens))


def _crossed(kind: str, mask: str, folder: Path, **options: Any) -> Made:
    model = write(folder / "model.onnx", cross_model(kind, mask, **options))
    return Made(
        model, lambda tokens, places, i: cross_logits(tokens, mask, LENGTHS[i], i),
        lambda i: {"constants": encoder_constants(kind, mask, LENGTHS[i], i)},
    )  # fmt: skip


def _stored(name: str, folder: Path) -> Made:
    """A stored export whose caches grow, with token ids and a padding mask."""
    forms = cut(MODELS / name / "model.onnx", folder)
    original = Recomputed(forms.embeds)
    return Made(forms.ids, lambda tokens, places, i: original.logits(forms.table[tokens], places))


def _whole(name: str, folder: Path) -> Made:
    """The same with its embedding, which the graph may read more than once."""
    model = folder / "model.onnx"
    onnx.save(onnx.load(MODELS / name / "model.onnx"), model)
    original = Recomputed(model)
    return Made(model, lambda tokens, places, i: original.logits(np.array(tokens), places))


BASE = DecoderConfig(capacity=48, vocab=128)
CIRCULAR = replace(BASE, mode="circular", capacity=12)
FUNCTIONAL, CONTRACT = PlanOptions(fallback=Fallback.FUNCTIONAL), PlanOptions(fallback=Fallback.CONTRACT)
GROWING = PlanOptions(capacity=64)


def _quantized(config: DecoderConfig, kind: CacheDtype, options: PlanOptions = DEFAULT, **more: Any) -> Family:
    levels = {CacheDtype.INT8: 127, CacheDtype.INT4: 7}[kind]
    return Family(partial(_twin, config, levels=levels), replace(options, cache_dtype=kind), **more)


def _decoder(config: DecoderConfig, options: PlanOptions = DEFAULT, **more: Any) -> Family:
    return Family(partial(_twin, config), options, **more)


FAMILIES = {
    "mobius": _decoder(BASE),
    "heads-major": _decoder(replace(BASE, form="heads-major")),
    "seq-major": _decoder(replace(BASE, form="seq-major", value_head_size=8)),
    "five-d": _decoder(replace(BASE, form="five-d")),
    "softcap": _decoder(replace(BASE, softcap=5.0)),
    "preserve": _decoder(BASE, PlanOptions(cache_layout=CacheLayout.PRESERVE)),
    "no span": _decoder(BASE, PlanOptions(attention_span=False)),
    "float mask": _decoder(replace(BASE, mask="float")),
    "bool mask, no lengths": _decoder(replace(BASE, mask="bool", lengths=False, causal=False)),
    "logits of two": _decoder(BASE, build={"max_logits": 2}),
    "growing": Family(partial(_stored, "optimum/llama"), GROWING),
    "shared caches": Family(partial(_whole, "mobius/gemma4_dynamic_f32_gqa"), GROWING),
    "batch 1": _decoder(replace(BASE, batch=1), max_batch=3, devices=DEVICES[:1]),
    "batch 3": _decoder(replace(BASE, batch=3), max_batch=None),
    "one token": _decoder(replace(BASE, sequence=1), max_chunk=1),
    "four tokens": _decoder(replace(BASE, sequence=4), max_chunk=4),
    "batch 3, four tokens": _decoder(replace(BASE, batch=3, sequence=4), max_batch=None, max_chunk=4),
    "circular": _decoder(replace(CIRCULAR, capacity=16), CONTRACT),
    "circular, functional": _decoder(CIRCULAR, FUNCTIONAL),
    "circular, plugin": _decoder(CIRCULAR, PlanOptions(target=Target.TENSORRT), devices=DEVICES[:1]),
    "circular, one token": _decoder(replace(CIRCULAR, sequence=1), max_chunk=1),
    "circular, heads-major": _decoder(replace(CIRCULAR, form="heads-major", capacity=16), CONTRACT),
    "circular, batch 3": _decoder(replace(CIRCULAR, capacity=16, batch=3), CONTRACT, max_batch=None),
    "circular, shifted": Family(partial(_shifted, replace(CIRCULAR, capacity=16)), CONTRACT),
    "int8 caches": _quantized(replace(BASE, capacity=64), CacheDtype.INT8),
    "int4 caches": _quantized(replace(BASE, form="heads-major", capacity=64), CacheDtype.INT4),
    "int8 caches, circular": _quantized(replace(CIRCULAR, capacity=32), CacheDtype.INT8, CONTRACT, devices=DEVICES[:2]),
    "embeddings": Family(partial(_placed, BASE)),
    "embeddings, batch 3": Family(partial(_placed, replace(BASE, batch=3, sequence=4)), max_batch=None, max_chunk=4),
    "planes": Family(_planes, GROWING),
    "hybrid": Family(_hybrid, state=True),
    "hybrid, growing": Family(partial(_hybrid, growing=True), GROWING, state=True),
    "hybrid, no convolution": Family(partial(_hybrid, growing=True, convolution=False), GROWING, state=True),
    "hybrid, batch 1": Family(partial(_hybrid, batch=1), state=True, devices=DEVICES[:1]),
    "cross keys": Family(partial(_crossed, "keys", "none"), build={"max_encoder": 12}),
    "cross keys, ones": Family(partial(_crossed, "keys", "ones"), build={"max_encoder": 12}),
    "cross keys, mask": Family(partial(_crossed, "keys", "bool"), build={"max_encoder": 12}),
    "cross hidden": Family(partial(_crossed, "hidden", "none"), build={"max_encoder": 12}),
    "cross hidden, mask": Family(partial(_crossed, "hidden", "bool"), build={"max_encoder": 12}),
    "cross, growing": Family(partial(_crossed, "keys", "bool", growing=True), GROWING, build={"max_encoder": 12}),
}
CASES = [(name, device) for name, family in FAMILIES.items() for device in family.devices]
