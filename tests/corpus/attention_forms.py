"""Attention over Concat caches in the ways that exporters write it, and what only looks like it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from concat_graphs import MASKS, Build, _masked, decoders
from onnx import TensorProto

from corpus import Entry

FLOAT = TensorProto.FLOAT


# Sinks: a logit for each head beside the scores.


def near_in_turns(g: Build, scores: str) -> str:
    """A window in every other layer, as Gemma and gpt-oss have it."""
    if g.layer % 2:
        return scores
    far = g.LessOrEqual(g.key_rows, g.Sub(g.query_rows, 4))
    return g.Where(g.to_scores(far), g.number(-1e4), scores)


SINKS: dict[str, dict[str, Any]] = {
    "own mask, added": {"sinks": "weight", "mask": "own", "own_type": np.float32},
    "windows in turns": {"sinks": "weight", "layers": 2, "scores": near_in_turns},
}

# Biases that grow with each key, as exporters write ALiBi.

SLOPES = np.array([0.7071068, 0.3, 1.1, 0.05])  # no powers of two: products are rounded


def times_slopes(g: Build, rows: str) -> str:
    """Integers ``[.., .., S or 1, T]`` times slopes."""
    column = g.constant(SLOPES.reshape(1, -1, 1, 1), np.float32)
    return g.Mul(column, g.Cast(rows, to=FLOAT))


def counted(g: Build) -> str:
    """BLOOM: ``(CumSum(padding) - 1) * padding``, ``[B, H, 1, T]``."""
    places = g.Sub(g.CumSum(g.padding, 1), 1)
    return times_slopes(g, g.Unsqueeze(g.Mul(places, g.padding), [1, 2]))


def distance(g: Build) -> str:
    return times_slopes(g, g.to_scores(g.Sub(g.key_rows, g.query_rows)))


def added(make: Callable[[Build], str]) -> Callable[[Build, str], str]:
    return lambda g, scores: g.Add(scores, g.once("alibi", lambda: make(g)))


ALIBI: dict[str, dict[str, Any]] = {
    "counted": {"scores": added(counted), "mask": "padding"},
    "distance": {"scores": added(distance), "mask": "padding"},
}

# Products in float32 over caches of float16, as where queries are too large for it.


def in_wide(*products: str, size: float = 1.0, operator: bool = False, to: Any = np.float32) -> Callable[..., str]:
    """Attention with products of "scores", of "values" or of both in a wider type, and queries `size` times as large.

    The softmax is in that type, or in float32.
    """
    kind = {np.float16: TensorProto.FLOAT16, np.float32: FLOAT, np.float64: TensorProto.DOUBLE}

    def cast(g: Build, tensor: str, product: str) -> str:
        return g.Cast(tensor, to=kind[to if product in products else np.float16])

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        number = to if "scores" in products else np.float16
        query = g.Mul(cast(g, query, "scores"), g.constant(size, number))
        keys, factor = cast(g, keys, "scores"), g.decoder.size**-0.5 / size
        if operator:
            seen = g.to_scores(g.causal())
            output = g.Attention(query, keys, cast(g, values, "values"), seen, scale=factor)
        else:
            scores = g.Mul(g.MatMul(query, g.Transpose(keys, perm=[0, 1, 3, 2])), g.constant(factor, number))
            scores = _masked(g, g.Cast(scores, to=FLOAT))
            scores = g.Cast(scores, to=kind[to]) if to is np.float64 else scores
            output = g.MatMul(cast(g, g.Softmax(scores, axis=-1), "values"), cast(g, values, "values"))
        return g.Cast(output, to=TensorProto.FLOAT16)

    return attend


WIDE: dict[str, dict[str, Any]] = {
    "products": {"attend": in_wide("scores", "values")},
    "scores": {"attend": in_wide("scores", size=20_000.0), "layout": "bsnd"},
    "an operator": {"attend": in_wide("scores", "values", size=20_000.0, operator=True), "opset": 24},
    "double products": {"attend": in_wide("scores", "values", size=20_000.0, to=np.float64)},
}


# Batch and heads in one axis, as exports of torch.bmm and torch.baddbmm have it.


@dataclass(frozen=True)
class Merged:
    """The form of an attention over ``[B*H, ...]``: the `attend` of a `concat_graphs.Decoder`.

    Attributes:
        softmax: the softmax, too, runs over ``[B, H, S, T]``, as in BLOOM; else the mask alone, as in BART and OPT.
        scaled: what is scaled: "query" or "scores", both merged.
    """

    softmax: bool = False
    scaled: str = "query"

    def __call__(self, g: Build, query: str, keys: str, values: str) -> str:
        query, keys, values = (merge(g, tensor) for tensor in (query, keys, values))
        factor = g.constant(g.decoder.size**-0.5, g.decoder.dtype)
        if self.scaled == "query":
            query = g.Mul(query, factor)
        scores = g.MatMul(query, g.Transpose(keys, perm=[0, 2, 1]))
        if self.scaled == "scores":
            scores = g.Mul(factor, scores)
        visible = g.once("mask", lambda: MASKS[str(g.decoder.mask)](g))
        scores = g.Add(separate(g, scores), g.Where(visible, g.number(0), g.number(g.decoder.lowest)))
        weights = g.Softmax(scores if self.softmax else merge(g, scores), axis=-1)
        return separate(g, g.MatMul(merge(g, weights) if self.softmax else weights, values))


def _size(g: Build, tensor: str, axis: int) -> str:
    return g.Unsqueeze(g.size_of(tensor, axis), [0])


def merge(g: Build, tensor: str) -> str:
    """``[B, H, X, Y]`` -> ``[B*H, X, Y]``."""
    rows = g.Mul(_size(g, g.tokens, 0), [g.decoder.heads])
    return g.Reshape(tensor, g.Concat(rows, *(_size(g, tensor, axis) for axis in (2, 3)), axis=0))


def separate(g: Build, tensor: str) -> str:
    """``[B*H, X, Y]`` -> ``[B, H, X, Y]``."""
    shape = [_size(g, g.tokens, 0), g.constant([g.decoder.heads]), *(_size(g, tensor, axis) for axis in (1, 2))]
    return g.Reshape(tensor, g.node("Concat", shape, axis=0))


BMM: dict[str, dict[str, Any]] = {
    "BART": {"mask": "padding", "attend": Merged()},
    "BLOOM": {"mask": "padding", "positions": "padding", "attend": Merged(softmax=True, scaled="scores")},
}

# Keys and values that are computed from the caches, as by multi-head latent attention.


def entries() -> Iterator[Entry]:
    yield from decoders("sinks", SINKS)
    yield from decoders("slopes", ALIBI)
    yield from decoders("merged", {name: {"kv_heads": 4, **how} for name, how in BMM.items()})
