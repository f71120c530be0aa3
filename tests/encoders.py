"""Encoders for `hybrids.cross_model`, and first steps, as exporters write them; the meaning is `hybrids.cross_logits`.

The encoder gives what it hears, half of it, or of token ids their rows of a table.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from graphs import Graph
from hybrids import HEADS, SIZE, VOCAB, WIDTH, encoder_constants, weights
from numpy.typing import NDArray
from onnx import TensorProto, helper

Array = NDArray[Any]
CROSS = (("a", "c"), ("b", "d"))
_FLOAT, _INT = TensorProto.FLOAT, TensorProto.INT64


def heard(length: int, seed: int) -> Array:
    """float32 ``[1, length, WIDTH]``, of which the encoder makes what `encoder_constants` has."""
    hidden: Array = encoder_constants("hidden", "none", length, seed)["encoder_hidden_states"] * 2
    return hidden


def table() -> Array:
    """float32 ``[V, WIDTH]`` of the encoder of token ids."""
    made: Array = np.random.default_rng(8).normal(size=(VOCAB, WIDTH)).astype(np.float32)
    return made


def encoder(
    path: Path,
    *,
    ids: bool = False,
    mask: bool = False,
    keys: str = "",
    dtype: int = _FLOAT,
    hidden: str = "last_hidden_state",
    more: Sequence[str] = (),
) -> Path:
    """Write an encoder.

    Args:
        path: of the file.
        ids: it takes token ids, not features.
        mask: it takes ``attention_mask``, which scales what it gives: 0 where it is 0.
        keys: it gives keys and values by names such as ``present.a.encoder.key``, with this for ``present``.
        dtype: of all that it gives.
        hidden: name of its output.
        more: names of further outputs of that shape.
    """
    g = Graph()
    if ids:
        g.input("input_ids", _INT, ["batch", "length"])
        x = g.Gather(g.constant(table(), np.float32), "input_ids")
    else:
        g.input("input_features", _FLOAT, ["batch", "length", WIDTH])
        x = g.Mul("input_features", g.constant(0.5, np.float32))
    if mask:
        g.input("attention_mask", _INT, ["batch", "length"])
        ones = g.Unsqueeze(g.Cast("attention_mask", to=_FLOAT), [2])
        x = g.Mul(x, ones)
    for name in (hidden, *more):
        g.Cast(x, out=name, to=dtype)
        g.output(name, dtype, ["batch", "length", WIDTH])
    if keys:
        _keys(g, x, keys)
    onnx.save(g.model(), path)
    return path


def strided_encoder(path: Path) -> Path:
    """Write a layer of a transformer after a convolution that halves the length, as encoders of speech are exported.

    It takes ``input_features`` ``[B, WIDTH, length]``.
    """
    rng, g = np.random.default_rng(4), Graph()

    def number(value: float) -> str:
        return g.constant(value, np.float32)

    def weight(*shape: int) -> str:
        return g.constant(rng.normal(0, shape[0] ** -0.5, shape), np.float32)

    def normalized(x: str) -> str:
        return g.LayerNormalization(x, g.constant(np.ones(WIDTH), np.float32), weight(WIDTH), axis=-1)

    def gelu(x: str) -> str:
        erf = g.Erf(g.Div(x, number(2**0.5)))
        return g.Mul(g.Mul(x, number(0.5)), g.Add(erf, number(1)))

    def heads(x: str, perm: Sequence[int]) -> str:
        rows = g.MatMul(x, weight(WIDTH, WIDTH))
        return g.Transpose(g.Reshape(rows, [0, -1, HEADS, SIZE]), perm=perm)

    g.input("input_features", _FLOAT, ["batch", WIDTH, "length"])
    kernel = g.constant(rng.normal(0, 0.1, (WIDTH, WIDTH, 3)), np.float32)
    x = g.Conv("input_features", kernel, weight(WIDTH), kernel_shape=[3], strides=[2], pads=[1, 1])
    x = g.Transpose(gelu(x), perm=[0, 2, 1])
    y = normalized(x)
    scores = g.Mul(g.MatMul(heads(y, [0, 2, 1, 3]), heads(y, [0, 2, 3, 1])), number(SIZE**-0.5))
    y = g.MatMul(g.Softmax(scores, axis=-1), heads(y, [0, 2, 1, 3]))
    y = g.Reshape(g.Transpose(y, perm=[0, 2, 1, 3]), [0, -1, WIDTH])
    x = g.Add(x, g.MatMul(y, weight(WIDTH, WIDTH)))
    y = gelu(g.MatMul(normalized(x), weight(WIDTH, 2 * WIDTH)))
    x = g.Add(x, g.MatMul(y, weight(2 * WIDTH, WIDTH)))
    g.Identity(normalized(x), out="last_hidden_state")
    g.output("last_hidden_state", _FLOAT, ["batch", "half", WIDTH])
    onnx.save(g.model(), path)
    return path


def first_step(path: Path, *, shape_of: str = "input_ids", merged: bool = False, reads: str = "") -> Path:
    """Write the first step of a decoder, whose logits are of no use to anybody here.

    Args:
        path: of the file.
        shape_of: the input whose first axis keys and values take their own from; "" for none.
        merged: a branch of a model with both steps.
        reads: what keys and values depend on beside the encoder's output: an input, or nothing.
    """
    g = Graph()
    given = [("input_ids", _INT, ["batch", "S"]), ("encoder_attention_mask", _INT, ["batch", "length"]),
             ("encoder_hidden_states", _FLOAT, ["batch", "length", WIDTH])]  # fmt: skip
    given += [("speaker", _FLOAT, ["batch", 1, 1])] if reads == "speaker" else []
    for name, dtype, shape in given:
        g.input(name, dtype, shape)  # type: ignore[arg-type]
    x = "encoder_hidden_states"
    if reads:
        read = reads
        if reads == "input_ids":
            first = g.Slice("input_ids", [0], [1], [1])
            read = g.Unsqueeze(g.Cast(first, to=_FLOAT), [2])
        x = g.Add(x, read)
    rows = g.Shape(shape_of, start=0, end=1) if shape_of else g.constant([0])
    _keys(g, x, "present", rows)
    ids = g.Cast("input_ids", to=_FLOAT)
    g.Unsqueeze(ids, [2], out="logits")
    g.output("logits", _FLOAT, ["batch", "S", 1])
    if not merged:
        onnx.save(g.model(), path)
        return path
    bodies = []
    past = "past_key_values.a.decoder.key"
    for name in ("with_past", "first"):
        body = Graph()
        body.initializers, body.nodes = list(g.initializers), list(g.nodes)
        body.outputs = [helper.make_value_info(v.name, v.type) for v in g.outputs]
        if name == "with_past":  # reads the past, and gives no keys and values of an encoder
            body.initializers, body.nodes = [], []
            empty = body.constant(np.zeros((0, HEADS, 1, SIZE)), np.float32)
            for value in g.outputs[:-1]:
                body.Identity(empty, out=value.name)
            body.ReduceSum(past, [3], out="logits", keepdims=0)
        bodies.append(helper.make_graph(body.nodes, name, [], body.outputs, body.initializers))
    outer = Graph()
    outer.inputs = list(g.inputs)
    outer.input(past, _FLOAT, ["batch", HEADS, "P", SIZE])
    outer.input("use_cache_branch", TensorProto.BOOL, [1])
    outer.outputs = list(g.outputs)
    outer.If("use_cache_branch", out=[v.name for v in g.outputs], then_branch=bodies[0], else_branch=bodies[1])
    onnx.save(outer.model(), path)
    return path


def _keys(g: Graph, x: str, present: str, rows: str = "") -> None:
    """Keys and values of every layer, ``[B, N, S_enc, H]``."""
    w = weights()
    for layer, cross in CROSS:
        for part in ("key", "value"):
            y = g.MatMul(x, g.constant(w[f"{cross}.{part[0]}"], np.float32))
            shape = g.Concat(rows or g.constant([0]), [-1, HEADS, SIZE], axis=0)
            name = f"{present}.{layer}.encoder.{part}"
            g.Transpose(g.Reshape(y, shape), out=name, perm=[0, 2, 1, 3])
            g.output(name, _FLOAT, ["batch", HEADS, "length", SIZE])
