"""Attention over Concat caches in the ways that exporters write it, and what only looks like it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from concat_graphs import MASKS, Build, Decoder, _masked, beside_sinks, decoders, sink_column, without_sinks
from onnx import TensorProto, helper

from corpus import Entry

FLOAT = TensorProto.FLOAT


def of_length(g: Build, tensor: str) -> str:
    """Times log(P + S + 2)."""
    total = g.Cast(g.Add(g.all, 2), to=FLOAT)
    return g.Mul(tensor, g.Log(total))


def _last_rows(count: int) -> Any:
    return lambda g, t: g.Slice(t, *(g.constant([n]) for n in (-count, 2**31, 2)))


def _chosen(g: Build, scores: str) -> str:
    """As torch.cond between scores and softmax is exported."""
    branches = [
        helper.make_graph([helper.make_node(op, [scores], [f"{scores}_{op}"])], op, [], [value])
        for op in ("Neg", "Identity")
        for value in [helper.make_tensor_value_info(f"{scores}_{op}", FLOAT, None)]
    ]
    choice = g.Greater(g.ReduceMax("input_ids", keepdims=0), 3)
    return g.If(choice, then_branch=branches[0], else_branch=branches[1])


def after_prefix(g: Build, tensor: str) -> str:
    """Rows of a trained prefix before those of the tokens, of one sequence."""
    return g.Concat(g.weight(1, 4, 3, g.decoder.size), tensor, axis=2)


FORMS: dict[str, dict[str, Any]] = {
    "a choice between branches": {"scores": _chosen},
    "scores grow with the text": {"scores": of_length},
    "a temperature that lifts the mask": {"masked": lambda g, s: g.Mul(s, g.number(3e-4)), "lowest": -1e4},
    "last 6 rows": {"keys": _last_rows(6), "values": _last_rows(6), "mask": "none"},
    "a prefix, batch of 1": {
        "keys": after_prefix, "values": after_prefix, "mask": "none", "layers": 2, "repeat": "none", "kv_heads": 4,
        "batch": 1,
    },
}  # fmt: skip

# Sinks: a logit for each head beside the scores.


def _of_length(g: Build, scores: str) -> str:
    column = g.Mul(sink_column(g, scores), g.Cast(g.all, to=FLOAT))
    return beside_sinks(g, scores, column)


def near_in_turns(g: Build, scores: str) -> str:
    """A window in every other layer, as Gemma and gpt-oss have it."""
    if g.layer % 2:
        return scores
    far = g.LessOrEqual(g.key_rows, g.Sub(g.query_rows, 4))
    return g.Where(g.to_scores(far), g.number(-1e4), scores)


SINKS: dict[str, dict[str, Any]] = {
    "own mask, added": {"sinks": "weight", "mask": "own", "own_type": np.float32},
    "windows in turns": {"sinks": "weight", "layers": 2, "scores": near_in_turns},
    "of the length": {"masked": _of_length, "weights": without_sinks},
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


def squares(g: Build) -> str:
    rows = g.Sub(g.key_rows, g.query_rows)
    return times_slopes(g, g.to_scores(g.Mul(rows, rows)))


def one_key_off(g: Build) -> str:
    """At one length alone."""
    here = g.Where(g.Equal(g.past, 17), g.number(0.01), g.number(0.0))
    return g.Sub(distance(g), g.Where(g.Equal(g.key_rows, 4), here, g.number(0.0)))


def added(make: Callable[[Build], str]) -> Callable[[Build, str], str]:
    return lambda g, scores: g.Add(scores, g.once("alibi", lambda: make(g)))


ALIBI: dict[str, dict[str, Any]] = {
    "counted": {"scores": added(counted), "mask": "padding"},
    "distance": {"scores": added(distance), "mask": "padding"},
    "a window": {"scores": added(counted), "window": 5},
    "squares": {"scores": added(squares)},
    "one key off at one length": {"scores": added(one_key_off)},
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


def along_rows(g: Build, query: str, keys: str, values: str) -> str:
    """A softmax in five operators whose sum is taken along the queries."""
    scores = g.Mul(g.MatMul(query, g.Transpose(keys, perm=[0, 1, 3, 2])), g.number(0.5))
    scores = _masked(g, scores)
    power = g.Exp(g.Sub(scores, g.ReduceMax(scores, [-1])))
    return g.MatMul(g.Div(power, g.ReduceSum(power, [2])), values)


# Batch and heads in one axis, as exports of torch.bmm and torch.baddbmm have it.


@dataclass(frozen=True)
class Merged:
    """The form of an attention over ``[B*H, ...]``: the `attend` of a `concat_graphs.Decoder`.

    Attributes:
        softmax: the softmax, too, runs over ``[B, H, S, T]``, as in BLOOM; else the mask alone, as in BART and OPT.
        scaled: what is scaled: "query" or "scores", both merged.
        rows: B * H of a trace with one sequence, which keys and values keep; 0: computed.
    """

    softmax: bool = False
    scaled: str = "query"
    rows: int = 0

    def __call__(self, g: Build, query: str, keys: str, values: str) -> str:
        query, keys, values = merge(g, query), self._merge(g, keys), self._merge(g, values)
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

    def _merge(self, g: Build, tensor: str) -> str:
        return g.Reshape(tensor, np.array([self.rows, -1, g.decoder.size])) if self.rows else merge(g, tensor)


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
    "traced with a batch of one": {"attend": Merged(rows=4)},
}

# Keys and values that are computed from the caches, as by multi-head latent attention.

Change = Callable[[Build, str], str]


def unchanged(g: Build, tensor: str) -> str:
    return tensor


@dataclass(frozen=True)
class Latent:
    """Attention whose two caches are latents ``[B, 1, T, D]`` and what is rotated of the keys, ``[B, 1, T, D]``.

    One product gives keys and values of each head side by side.

    Attributes:
        norm: of the latents, after the cache.
        quantized: the weight has 8 bits.
        keys: changes the keys, for functions that only look right.
    """

    norm: bool = False
    quantized: bool = False
    keys: Change = unchanged

    def __call__(self, g: Build, query: str, latents: str, rotated: str) -> str:
        heads, size = g.decoder.heads, g.decoder.size
        both = self._heads_of(g, self._normed(g, latents) if self.norm else latents)
        names = [f"{both}_keys", f"{both}_values"]
        g.Split(both, [size, size], out=names, axis=3)
        spread = g.Expand(rotated, [1, heads, 1, 1])
        keys = self.keys(g, g.Concat(names[0], spread, axis=-1))
        return Decoder().attend(g, g.MatMul(query, g.weight(size, 2 * size)), keys, names[1])

    def _normed(self, g: Build, latents: str) -> str:
        mean = g.ReduceMean(g.Pow(latents, g.number(2.0)), [-1], keepdims=1)
        root = g.Sqrt(g.Add(mean, g.number(1e-5)))
        return g.Mul(g.Mul(latents, g.Reciprocal(root)), g.weight(g.decoder.size))

    def _heads_of(self, g: Build, latents: str) -> str:
        """``[B, H, T, 2 * D]``."""
        shape = g.decoder.size, 2 * g.decoder.heads * g.decoder.size
        if self.quantized:
            numbers = np.random.default_rng(5).integers(-99, 99, shape)
            weight = g.DequantizeLinear(g.constant(numbers, np.int8), g.number(0.01))
        else:
            weight = g.weight(*shape)
        sizes = g.Concat(_size(g, g.tokens, 0), g.Unsqueeze(g.all, [0]), [-1, 2 * g.decoder.size], axis=0)
        return g.Transpose(g.Reshape(g.MatMul(latents, weight), sizes), perm=[0, 2, 1, 3])


def mean_over_rows(g: Build, tensor: str) -> str:
    return g.Sub(tensor, g.ReduceMean(tensor, [2], keepdims=1))


def by_the_tokens(g: Build, tensor: str) -> str:
    seen = g.ReduceMax(g.Cast(g.tokens, to=1), keepdims=0)
    return g.Mul(tensor, g.Add(seen, g.constant(1.0, np.float32)))


def debugged(g: Build, x: str) -> str:
    computed = g.MatMul(g.presents[0], g.weight(g.decoder.size, 3))
    g.ReduceSum(computed, out="debug", keepdims=0)
    g.output("debug", 1, [])
    return x


LATENT: dict[str, dict[str, Any]] = {
    "plain": {"attend": Latent()},
    "norm": {"attend": Latent(norm=True)},
    "own mask": {"attend": Latent(), "mask": "own"},
    "weights of 8 bits": {"attend": Latent(quantized=True)},
    "mean over rows, keys": {"attend": Latent(keys=mean_over_rows)},
    "by the tokens, keys": {"attend": Latent(keys=by_the_tokens)},
    "debugged": {"attend": Latent(), "after": debugged},
}


def entries() -> Iterator[Entry]:
    yield from decoders("attention", FORMS)
    half: dict[str, Any] = {"dtype": np.float16, "upcast": True, "layers": 2, "size": 8}
    yield from decoders("float32 over float16", {"products": half | WIDE["products"]})
    yield from decoders("softmax", {"the sum along rows": {"attend": along_rows, "layers": 2}})
    yield from decoders("sinks", SINKS)
    yield from decoders("slopes", ALIBI)
    yield from decoders("merged", {name: {"kv_heads": 4, **how} for name, how in BMM.items()})
    one: dict[str, Any] = {"kv_heads": 1, "repeat": "none"}
    yield from decoders("latent", {name: one | how for name, how in LATENT.items()})
