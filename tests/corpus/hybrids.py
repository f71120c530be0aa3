"""Small decoders that keep more than attention caches, with their meaning in NumPy: everything again for every token.

`HYBRID`: attention over TensorScatter caches, a short causal convolution, and linear attention with decay.
`CROSS`: self-attention over TensorScatter caches, and cross-attention over what an encoder gives.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from graphs import Graph, renamed
from numpy.typing import NDArray
from onnx import TensorProto

from corpus import Entry, built

Array = NDArray[Any]

HEADS, SIZE, WIDTH, VOCAB, TAPS, CAPACITY = 2, 16, 32, 61, 3, 64
DECAY = 0.8
_FLOAT, _INT = TensorProto.FLOAT, TensorProto.INT64


def weights(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    square = [f"{layer}.{part}" for layer in ("a", "l", "b", "c", "d") for part in "qkvo"] + ["conv.o"]
    made = {name: rng.normal(0, 0.3, (WIDTH, WIDTH)) for name in square}
    made |= {
        "embed": rng.normal(0, 1, (VOCAB, WIDTH)), "place": rng.normal(0, 0.5, (CAPACITY, WIDTH)),
        "head": rng.normal(0, 1, (WIDTH, VOCAB)), "conv": rng.normal(0, 0.7, (WIDTH, TAPS)),
    }  # fmt: skip
    return {name: array.astype(np.float32) for name, array in made.items()}


class _Decoder:
    """A graph with the parts that both decoders have."""

    def __init__(self, batch: int | str = "batch", growing: bool = False) -> None:
        self.growing = growing
        self.graph, self.batch, self.weights = Graph(), batch, weights()
        g = self.graph
        g.input("input_ids", _INT, [batch, "sequence"])
        g.input("position_ids", _INT, [batch, "sequence"])
        if not growing:
            g.input("write_indices", _INT, [batch])
            g.input("nonpad_kv_seqlen", _INT, [batch])
        self.outputs: list[tuple[str, list[int | str]]] = []

    def weight(self, name: str, shape: Sequence[int] | None = None) -> str:
        array = self.weights[name]
        return self.graph.constant(array if shape is None else array.reshape(shape), np.float32)

    def embed(self) -> str:
        g = self.graph
        tokens = g.Gather(self.weight("embed"), "input_ids")
        return g.Add(tokens, g.Gather(self.weight("place"), "position_ids"))

    def project(self, x: str, name: str, heads: bool = True) -> str:
        y = self.graph.MatMul(x, self.weight(name))
        return self.split(y) if heads else y

    def split(self, x: str) -> str:
        x = self.graph.Reshape(x, [0, -1, HEADS, SIZE])
        return self.graph.Transpose(x, perm=[0, 2, 1, 3])

    def merge(self, x: str, y: str, name: str) -> str:
        """Add heads ``[B, N, S, H]`` to the residual stream."""
        y = self.graph.Transpose(y, perm=[0, 2, 1, 3])
        y = self.graph.Reshape(y, [0, -1, WIDTH])
        return self.graph.Add(x, self.graph.MatMul(y, self.weight(name)))

    def carry(self, name: str, shape: list[int | str]) -> str:
        self.outputs.append((name.replace("past", "present"), shape))
        return self.graph.input(name, _FLOAT, shape)

    def attention(self, x: str, layer: str) -> str:
        return self.growing_attention(x, layer) if self.growing else self.fixed_attention(x, layer)

    def growing_attention(self, x: str, layer: str) -> str:
        """The cache inside the operator, as long as the text."""
        parts, g = ("key", "value"), self.graph
        past = [g.input(f"past.{layer}.{part}", _FLOAT, [self.batch, HEADS, "P", SIZE]) for part in parts]
        self.outputs += [(f"present.{layer}.{part}", [self.batch, HEADS, "P + S", SIZE]) for part in parts]
        q, k, v = (self.project(x, f"{layer}.{part}") for part in "qkv")
        outputs = ["", *(f"present.{layer}.{part}" for part in parts)]
        return self.merge(x, g.Attention(q, k, v, "", *past, out=outputs, is_causal=1), f"{layer}.o")

    def fixed_attention(self, x: str, layer: str) -> str:
        g, shape = self.graph, [self.batch, HEADS, CAPACITY, SIZE]
        held = []
        for part in ("key", "value"):
            past = self.carry(f"past.{layer}.{part}", list(shape))
            inputs = [past, self.project(x, f"{layer}.{part[0]}"), "write_indices"]
            held.append(g.node("TensorScatter", inputs, past.replace("past", "present"), axis=2))
        q = self.project(x, f"{layer}.q")
        y = g.Attention(q, *held, "", "", "", "nonpad_kv_seqlen", is_causal=1)
        return self.merge(x, y, f"{layer}.o")

    def finish(self, x: str) -> onnx.ModelProto:
        self.graph.MatMul(x, self.weight("head"), out="logits")
        self.graph.output("logits", _FLOAT, [self.batch, "sequence", VOCAB])
        for name, shape in self.outputs:
            self.graph.output(name, _FLOAT, shape)
        return self.graph.model()


def hybrid_model(
    names: Mapping[str, str] | None = None, batch: int | str = "batch", convolution: bool = True, growing: bool = False
) -> onnx.ModelProto:
    """`HYBRID`.

    Args:
        names: of its states instead of past_conv.1, present_conv.1, past_recurrent.2 and present_recurrent.2.
        batch: size or symbol.
        convolution: by Conv; else by one product per tap.
        growing: the attention caches are as long as the text, and written inside Attention.
    """
    d = _Decoder(batch, growing)
    g = d.graph
    x = d.attention(d.embed(), "a")

    past = d.carry("past_conv.1", [batch, WIDTH, TAPS - 1])
    row = g.Concat(past, g.Transpose(x, perm=[0, 2, 1]), axis=2)
    end, last = g.constant([np.iinfo(np.int64).max]), g.constant([1 - TAPS])
    g.Slice(row, last, end, [2], out="present_conv.1")
    if convolution:
        y = g.Conv(row, d.weight("conv", (WIDTH, 1, TAPS)), group=WIDTH)
    else:
        taps = []
        for i in range(TAPS):
            stop = g.constant([i - TAPS + 1]) if i < TAPS - 1 else end
            part = g.Slice(row, [i], stop, [2])
            tap = g.constant(d.weights["conv"][:, i : i + 1], np.float32)
            taps.append(g.Mul(part, tap))
        y = g.Add(g.node("Add", taps[:2]), taps[2])
    y = g.Mul(y, g.Sigmoid(y))
    x = g.Add(x, g.MatMul(g.Transpose(y, perm=[0, 2, 1]), d.weight("conv.o")))

    state = d.carry("past_recurrent.2", [batch, HEADS, SIZE, SIZE])
    q, k, v = (d.project(x, f"l.{part}") for part in "qkv")
    length = g.Shape("input_ids", start=1, end=2)
    count = g.Squeeze(length)
    steps = g.Range(0, count, 1)
    age = g.Sub(g.Unsqueeze(steps, [1]), steps)  # [S, S]
    decay = g.constant(DECAY, np.float32)

    def power(exponent: str) -> str:
        return g.Pow(decay, g.Cast(exponent, to=_FLOAT))

    inside = g.Where(g.Less(age, 0), g.constant(0, np.float32), power(age))
    scores = g.Mul(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])), inside)
    since = g.Unsqueeze(power(g.Add(steps, 1)), [1])
    before = g.Mul(g.MatMul(q, state), since)
    y = g.Add(g.MatMul(scores, v), before)
    left = g.Unsqueeze(power(g.Sub(g.Sub(count, 1), steps)), [1])
    added = g.MatMul(g.Transpose(g.Mul(k, left), perm=[0, 1, 3, 2]), v)
    g.Add(g.Mul(state, power(length)), added, out="present_recurrent.2")
    model = d.finish(d.merge(x, y, "l.o"))
    return renamed(model, names or {})


def cross_model(
    kind: str = "keys", mask: str = "none", batch: int | str = "batch", growing: bool = False, plain: bool = False
) -> onnx.ModelProto:
    """`CROSS`.

    Args:
        kind: ``"keys"``: the encoder's keys and values go in for each layer; ``"hidden"``: its output does.
        mask: of the encoder's positions: ``"none"``, ``"ones"`` (int64 ``[B, S_enc]``) or ``"bool"``
            (``[B, 1, 1, S_enc]``).
        batch: size or symbol.
        growing: see `hybrid_model`.
        plain: cross-attention is MatMul, Softmax, MatMul, and its mask, added to the scores, is known by its name.
    """
    d = _Decoder(batch, growing)
    g, x, seen = d.graph, d.embed(), ""
    if mask == "ones":
        ones = g.input("encoder_attention_mask", _INT, [batch, "encoder_length"])
        seen = g.Unsqueeze(g.Cast(ones, to=TensorProto.BOOL), [1, 2])
    elif mask == "bool":
        seen = g.input("cross_attention_mask", TensorProto.BOOL, [batch, 1, 1, "encoder_length"])
    hidden = g.input("encoder_hidden_states", _FLOAT, [batch, "encoder_length", WIDTH]) if kind == "hidden" else ""
    for layer, cross in (("a", "c"), ("b", "d")):
        x = d.attention(x, layer)
        if hidden:
            held = [d.project(hidden, f"{cross}.{part}") for part in "kv"]
        else:
            shape = [batch, HEADS, "encoder_length", SIZE]
            held = [g.input(f"past_key_values.{layer}.encoder.{part}", _FLOAT, shape) for part in ("key", "value")]
        query = d.project(x, f"{cross}.q")
        if plain:
            bias = g.Where(seen, g.constant(0, np.float32), g.constant(-1e4, np.float32))
            scores = g.Add(g.MatMul(query, g.Transpose(held[0], perm=[0, 1, 3, 2])), bias)
            y = g.MatMul(g.Softmax(scores, axis=-1), held[1])
        else:
            y = g.Attention(query, *held, *([seen] if seen else []))
        x = d.merge(x, y, f"{cross}.o")
    return d.finish(x)


def encoder_constants(kind: str, mask: str, length: int, seed: int) -> dict[str, Array]:
    """An encoder's output for one sequence of `length` positions, the last third of them masked where it can be."""
    rng, w = np.random.default_rng(seed), weights()
    hidden = rng.normal(0, 1, (1, length, WIDTH)).astype(np.float32)
    given: dict[str, Array] = {"encoder_hidden_states": hidden}
    if kind == "keys":
        given = {
            f"past_key_values.{layer}.encoder.{part}": _heads(hidden[0] @ w[f"{cross}.{part[0]}"])[None]
            for layer, cross in (("a", "c"), ("b", "d"))
            for part in ("key", "value")
        }
    heard = np.arange(length) < max(1, length - length // 3)
    if mask == "ones":
        given["encoder_attention_mask"] = heard[None].astype(np.int64)
    elif mask == "bool":
        given["cross_attention_mask"] = heard[None, None, None]
    return given


def cross_logits(tokens: Sequence[int], mask: str, length: int, seed: int) -> Array:
    """``[V]`` after `tokens`, in float64."""
    w = {name: array.astype(float) for name, array in weights().items()}
    hidden = encoder_constants("hidden", "none", length, seed)["encoder_hidden_states"][0].astype(float)
    heard = hidden[: max(1, length - length // 3)] if mask != "none" else hidden
    x = w["embed"][list(tokens)] + w["place"][: len(tokens)]
    for layer, cross in (("a", "c"), ("b", "d")):
        x = x + _attend(x, x, w, layer, causal=True)
        x = x + _attend(x, heard, w, cross, causal=False)
    result: Array = (x @ w["head"])[-1]
    return result


def hybrid_logits(tokens: Sequence[int]) -> Array:
    """``[V]`` after `tokens`, in float64."""
    w = {name: array.astype(float) for name, array in weights().items()}
    x = w["embed"][list(tokens)] + w["place"][: len(tokens)]
    x = x + _attend(x, x, w, "a", causal=True)
    padded = np.concatenate([np.zeros((TAPS - 1, WIDTH)), x])
    y = sum(padded[i : i + len(x)] * w["conv"][:, i] for i in range(TAPS))
    x = x + (y / (1 + np.exp(-y))) @ w["conv.o"]
    q, k, v = (_heads(x @ w[f"l.{part}"]) for part in "qkv")
    state, rows = np.zeros((HEADS, SIZE, SIZE)), []
    for t in range(len(x)):
        state = DECAY * state + np.einsum("nh,ng->nhg", k[:, t], v[:, t])
        rows.append(np.einsum("nh,nhg->ng", q[:, t], state).reshape(-1))
    result: Array = ((x + np.array(rows) @ w["l.o"]) @ w["head"])[-1]
    return result


def greedy(logits: Any, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(tokens).argmax()))
    return tokens[len(prompt) :]


def write(path: Path, model: onnx.ModelProto) -> Path:
    onnx.save(model, path)
    return path


def _heads(x: Array) -> Array:
    return x.reshape(len(x), HEADS, SIZE).transpose(1, 0, 2)


def _attend(x: Array, memory: Array, w: Mapping[str, Array], layer: str, *, causal: bool) -> Array:
    q, k, v = (_heads(source @ w[f"{layer}.{part}"]) for part, source in (("q", x), ("k", memory), ("v", memory)))
    scores = np.einsum("nqh,nkh->nqk", q, k) * SIZE**-0.5
    if causal:
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    result: Array = np.einsum("nqk,nkh->qnh", shares, v).reshape(len(x), -1) @ w[f"{layer}.o"]
    return result


def entries() -> Iterator[Entry]:
    yield from built("cross", {"decomposed": partial(cross_model, "hidden", "ones", plain=True)})
    for growing in (False, True):
        models = {"products": partial(hybrid_model, convolution=False, growing=growing)}
        models |= {
            f"{k} {m}": partial(cross_model, k, m, growing=growing) for k, m in (("keys", "ones"), ("hidden", "bool"))
        }
        yield from built(f"hybrid, growing={growing}", models, **({"capacity": 24} if growing else {}))
