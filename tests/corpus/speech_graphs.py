"""A speech decoder whose caches of a fixed length are stacked by layers, and its encoder: as sherpa-onnx has Whisper.

k = cache[i, :, :offset + S]; k[:, -S:] = new; attention over k; cache[i, :, :offset + S] = k
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from graphs import Graph
from numpy.typing import NDArray
from onnx import TensorProto, helper

from corpus import Entry, built

Array = NDArray[Any]
VOCAB, WIDTH, HEADS, LAYERS, HEARD = 19, 8, 2, 2, 5
_FLOAT, _INT = TensorProto.FLOAT, TensorProto.INT64
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Speech:
    """The differences between such decoders.

    Attributes:
        write: ``"front"``: as above; ``"rows"``: the new rows go to the cache, of which attention reads as much.
        mask: ``"square"``: over the new tokens alone, which fits S = 1 and offset = 0; ``"all"``: over all.
        first: the row that the front begins with.
        back: rows of the front that are not put back.
        single: what the mask holds for a single token,
        later: and for those after a token.
        index_columns: numbers of an index: of batch and row, or of the numbers of a row as well.
        room: rows of a cache.
        scrambled: rows are put back where others were.
        hears: there is an encoder.
    """

    write: str = "front"
    mask: str = "square"
    first: int = 0
    back: int = 0
    single: float = 0.0
    later: float = -np.inf
    index_columns: int = 3
    room: int = 6
    scrambled: bool = False
    hears: bool = True


def make_decoder(how: Speech = Speech()) -> onnx.ModelProto:
    """The decoder, of random weights."""
    g, rng = Graph(), np.random.default_rng(5)
    tokens = g.input("tokens", _INT, ["n_audio", "n_tokens"])
    caches = [g.input(f"in_n_layer_self_{kind}_cache", _FLOAT, [LAYERS, "n_audio", how.room, WIDTH]) for kind in "kv"]
    cross = [g.input(f"n_layer_cross_{kind}", _FLOAT, [LAYERS, "n_audio", HEARD, WIDTH]) for kind in "kv" if how.hears]
    offset = g.input("offset", _INT, [1])
    length = g.Shape(tokens, start=1, end=2)
    end = g.Add(offset, length)
    places = g.Slice(_weight(g, rng, how.room, WIDTH), offset, end, [0])
    table = _weight(g, rng, VOCAB, WIDTH)
    x = g.Add(g.Gather(table, tokens), places)
    hidden = np.triu(np.full((how.room, how.room), how.later, np.float32), 1)
    hidden[0, 0] = how.single
    mask = g.constant(hidden, np.float32)
    first = g.constant([0]) if how.mask == "square" else offset
    mask = g.Slice(mask, first, length if how.mask == "square" else end, [0])
    mask = g.Slice(mask, g.constant([0]), length if how.mask == "square" else end, [1])
    for layer in range(LAYERS):
        normed, read = _norm(g, x), []
        for i in range(2):
            new = g.MatMul(normed, _weight(g, rng, WIDTH, WIDTH))
            front, caches[i] = _written(g, how, caches[i], layer, offset, end, length, new)
            read.append(front)
        query = g.MatMul(normed, _weight(g, rng, WIDTH, WIDTH))
        x = g.Add(x, _attention(g, rng, query, *read, mask))
        if not how.hears:
            continue
        query = g.MatMul(_norm(g, x), _weight(g, rng, WIDTH, WIDTH))
        heard = [g.Gather(t, layer, axis=0) for t in cross]
        x = g.Add(x, _attention(g, rng, query, *heard))
    turned = g.Transpose(_norm(g, x), perm=[0, 2, 1])
    g.Transpose(g.MatMul(table, turned), out="logits", perm=[0, 2, 1])
    g.output("logits", _FLOAT, ["logits_dim_0", "logits_dim_1", VOCAB])
    for kind, cache in zip("kv", caches, strict=True):
        g.Identity(cache, out=f"out_n_layer_self_{kind}_cache")
        g.output(f"out_n_layer_self_{kind}_cache", _FLOAT, [LAYERS, "n_audio", how.room, WIDTH])
    return g.model(17)


def make_encoder() -> onnx.ModelProto:
    """The audio ``[B, HEARD, WIDTH]`` becomes the keys and values of every layer."""
    g, rng = Graph(), np.random.default_rng(6)
    x = g.Tanh(g.input("mel", _FLOAT, ["n_audio", HEARD, WIDTH]))
    for kind in "kv":
        made = [g.MatMul(x, _weight(g, rng, WIDTH, WIDTH)) for _ in range(LAYERS)]
        apart = [g.Unsqueeze(t, [0]) for t in made]
        g.node("Concat", apart, f"n_layer_cross_{kind}", axis=0)
        g.output(f"n_layer_cross_{kind}", _FLOAT, [LAYERS, "n_audio", HEARD, WIDTH])
    return g.model(17)


def _weight(g: Graph, rng: np.random.Generator, *shape: int) -> str:
    return g.constant(rng.normal(0, 0.5, shape), np.float32)


def _norm(g: Graph, x: str) -> str:
    ones, zeros = (g.constant(np.full(WIDTH, n), np.float32) for n in (1, 0))
    return g.LayerNormalization(x, ones, zeros)


def _written(
    g: Graph, how: Speech, cache: str, layer: int, offset: str, end: str, length: str, new: str
) -> tuple[str, str]:
    """The part of a layer's cache that attention reads, and the caches of all layers after the step."""
    one, zero = g.constant([1]), g.constant([0])
    own = g.Gather(cache, layer, axis=0)
    rows = _range(g, offset, end)
    if how.write == "rows":
        whole = g.ScatterND(cache, _index(g, how, new, rows, layer), new)
        own = g.Gather(whole, layer, axis=0)
        return g.Slice(own, zero, end, one), whole
    front = g.Slice(own, [how.first], end, one)
    count = g.Shape(front, start=1, end=2)
    last = _range(g, g.Sub(count, length), count)  # the last S of the front, wherever it begins
    front = g.ScatterND(front, _index(g, how, new, last), new)
    kept = front if not how.back else g.Slice(front, [how.back], [_FAR], one)
    put = g.Shape(kept, start=1, end=2)
    rows = _range(g, g.constant([how.back]), g.Add(put, [how.back]))
    spread = g.Expand(kept, g.Shape(kept))  # as TorchScript has it
    index = _index(g, how, kept, rows, layer, turned=how.scrambled)
    if how.scrambled:
        spread = g.Reshape(spread, g.Shape(g.Transpose(kept, perm=[1, 0, 2])))
    return front, g.ScatterND(cache, index, spread)


def _range(g: Graph, start: str, end: str) -> str:
    start, end = (g.Squeeze(t, [0]) for t in (start, end))
    return g.Range(start, end, 1)


def _index(g: Graph, how: Speech, like: str, rows: str, layer: int | None = None, *, turned: bool = False) -> str:
    """Where the rows of ``[B, R, WIDTH]`` go: batch, row and perhaps number, after the layer if there is one."""
    zero, columns = g.constant([0]), how.index_columns
    shape = g.Shape(like, start=0, end=columns)
    batch = _range(g, zero, g.Shape(like, start=0, end=1))
    parts = [g.Reshape(batch, [-1, 1, 1][:columns])]
    parts.append(g.Reshape(rows, [1, -1, 1][:columns]))
    if columns > 2:
        parts.append(g.constant(np.arange(WIDTH).reshape(1, 1, -1)))
    if layer is not None:
        parts.insert(0, g.constant(np.full([1] * columns, layer)))
    spread = [g.Expand(part, shape) for part in parts]
    spread = [g.Transpose(part, perm=[1, 0, 2]) for part in spread] if turned else spread
    return g.node("Concat", [g.Unsqueeze(part, [-1]) for part in spread], axis=-1)


def _attention(g: Graph, rng: np.random.Generator, query: str, key: str, value: str, mask: str = "") -> str:
    shape = g.constant([0, 0, HEADS, -1])
    scale = g.constant((WIDTH // HEADS) ** -0.25, np.float32)

    def split(tensor: str, *perm: int) -> str:
        return g.Transpose(g.Reshape(tensor, shape), perm=perm)

    q, k = (g.Mul(split(t, *p), scale) for t, p in ((query, (0, 2, 1, 3)), (key, (0, 2, 3, 1))))
    scores = g.MatMul(q, k)
    scores = g.Add(scores, mask) if mask else scores
    made = g.MatMul(g.Softmax(scores, axis=-1), split(value, 0, 2, 1, 3))
    flat = g.Reshape(g.Transpose(made, perm=[0, 2, 1, 3]), [0, 0, WIDTH])
    return g.MatMul(flat, _weight(g, rng, WIDTH, WIDTH))


def rows_added() -> onnx.ModelProto:
    model = make_decoder(Speech(mask="all"))
    node = next(n for n in model.graph.node if n.op_type == "ScatterND")
    node.attribute.append(helper.make_attribute("reduction", "add"))
    return model


def one_sequence() -> onnx.ModelProto:
    model = make_decoder()
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in ("n_audio", "logits_dim_0"):
                dim.dim_value = 1
    return model


def entries() -> Iterator[Entry]:
    how: tuple[dict[str, Any], ...] = (
        {}, {"write": "rows"}, {"mask": "all"}, {"first": 1}, {"back": 1}, {"scrambled": True}, {"later": 0.0},
        {"mask": "all", "index_columns": 2}, {"write": "rows", "mask": "all"}, {"room": 24}, {"room": 33},
        {"single": -1.0, "room": 9}, {"write": "rows", "hears": False},
    )  # fmt: skip
    yield from built("speech", {str(h): (lambda h=h: make_decoder(Speech(**h))) for h in how})
    yield from built("speech", {"rows_added": rows_added})
    yield from built("speech", {"make_decoder, one sequence": one_sequence})
