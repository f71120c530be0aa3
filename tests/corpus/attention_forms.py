"""Attention over Concat caches with something more in it, which the scale, the cap or the mask can say, or none can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from concat_graphs import (
    Build,
    _attend,
    _masked,
    beside_sinks,
    decoders,
    sink_column,
    without_sinks,
)
from merged_graphs import Merged
from onnx import TensorProto, helper

from corpus import Entry

FLOAT = TensorProto.FLOAT
LOWEST = float(np.finfo(np.float32).min)
CODEGEN: dict[str, Any] = {"scale": "none", "lowest": LOWEST}


def times(factor: float, by: str = "Mul") -> Any:
    return lambda g, tensor: g.node(by, [tensor, g.number(factor if by == "Mul" else 1 / factor)])


def of_length(g: Build, tensor: str) -> str:
    """Times log(P + S + 2)."""
    total = g.Cast(g.Add(g.all, 2), to=FLOAT)
    return g.Mul(tensor, g.Log(total))


def tanh(g: Build, tensor: str) -> str:
    return g.Tanh(tensor)


def heads(*order: int) -> Any:
    return lambda g, tensor: g.Gather(tensor, order, axis=1)


def at_least(lowest: float) -> Any:
    return lambda g, scores: g.Max(scores, g.number(lowest))


def _guarded(g: Build, weights: str) -> str:
    """As ONNX Runtime's optimizer leaves PyTorch's guard in float16."""
    asked = g.IsNaN(g.Cast(weights, to=TensorProto.FLOAT16))
    return g.Where(asked, g.number(0.0), weights)


def _without_largest(g: Build, scores: str) -> str:
    return g.Sub(scores, g.ReduceMax(scores, [-1], keepdims=1))


def _guard_empty_rows(g: Build, query: str, keys: str, values: str, *, fewer: str) -> str:
    """Zeros for queries that see `fewer` keys than one."""
    output = _attend(g, query, keys, values)
    visible = "mask" if g.decoder.mask == "own" else g.to_scores(g.causal())
    seen = g.ReduceSum(g.Cast(visible, to=TensorProto.FLOAT), [-1], keepdims=1)
    return g.Where(g.node(fewer, [seen, g.number(1.0)]), g.number(0.0), output)


def _last_rows(count: int) -> Any:
    return lambda g, t: g.Slice(t, *(g.constant([n]) for n in (-count, 2**31, 2)))


def _integers(g: Build, tensor: str) -> str:
    return g.Cast(g.Cast(tensor, to=TensorProto.INT32), to=TensorProto.FLOAT)


def _chosen(g: Build, scores: str) -> str:
    """As torch.cond between scores and softmax is exported."""
    branches = [
        helper.make_graph([helper.make_node(op, [scores], [f"{scores}_{op}"])], op, [], [value])
        for op in ("Neg", "Identity")
        for value in [helper.make_tensor_value_info(f"{scores}_{op}", TensorProto.FLOAT, None)]
    ]
    choice = g.Greater(g.ReduceMax("input_ids", keepdims=0), 3)
    return g.If(choice, then_branch=branches[0], else_branch=branches[1])


def _tiled_by_shape(g: Build, tensor: str) -> str:
    """As paddle2onnx 2.1 writes repeat_interleave of an axis that it does not know: more repeats than axes."""
    sizes = g.Gather(g.Shape(tensor), [1])
    twos = g.Expand([2], sizes)
    return g.Tile(tensor, g.Concat([1], twos, [1, 1], axis=0))


FORMS: dict[str, dict[str, Any]] = {
    "guard of another type": {"weights": _guarded, "softcap": 5.0},
    "less the largest": {"masked": _without_largest},
    "keys capped and upcast": {"softcap": 5.0, "scale": "k", "dtype": np.float16, "upcast": True},
    "one head, broadcast": {"kv_heads": 1, "repeat": "none"},
    "bsnd, positions from the past": {"layout": "bsnd", "positions": "past"},
    "two sequences, always": {"batch": 2, "positions": "past"},
    "a sequence, padding": {"batch": 1, "mask": "padding", "positions": "padding"},
    "four tokens at a time": {"sequence": 4, "positions": "past"},
    "no pattern in names": {"names": ("past_x{layer}{kind}", "y{layer}{kind}")},
    "as opset 24": {"opset": 24, "mask": "padding", "window": 5, "layers": 2},
    "guard of empty rows": {"attend": partial(_guard_empty_rows, fewer="Less")},
    "guard of empty rows, own mask": {"attend": partial(_guard_empty_rows, fewer="Less"), "mask": "own"},
    "guard of rows of one key": {"attend": partial(_guard_empty_rows, fewer="LessOrEqual")},
    "tanh": {"scores": tanh, "positions": "none"},
    "tanh, no mask": {"scores": tanh, "positions": "none", "mask": "none"},
    "a floor below all scores": {"scores": at_least(-1e4)},
    "more keys than values": {
        "keys": lambda g, t: g.Mul(t, g.constant(range(4), np.float32)),
        "layout": "bsnd",
    },
    "a choice between branches": {"scores": _chosen},
    "scores grow with the text": {"scores": of_length},
    "scores negated": {"scores": times(-1)},
    "keys times 0": {"keys": times(0)},
    "a temperature that lifts the mask": {"masked": times(3e-4), "lowest": -1e4},
    "a cap after the mask": {"masked": tanh},
    "Relu": {"scores": lambda g, t: g.Relu(t)},
    "heads reversed": {"keys": heads(3, 2, 1, 0)},
    "last 6 rows": {"keys": _last_rows(6), "values": _last_rows(6), "mask": "none"},
    "repeated keys cut to integers": {"keys": _integers},
    "more repeats than axes": {"keys": _tiled_by_shape},
}

# Scores that are scaled after their mask: the same attention if the mask still hides.


def _zeros_and_low(g: Build, lowest: float) -> str:
    return g.Where(g.to_scores(g.causal()), g.number(0.0), g.number(lowest))


SCALED: dict[str, dict[str, Any]] = {
    "half": {"masked": times(0.5, "Div")},
    "half precision": {"dtype": np.float16, "masked": times(1 / 16), "lowest": -65504.0},
    "twice": {"masked": lambda g, s: times(0.5)(g, times(0.5, "Div")(g, s))},
    "a floor as well": {"masked": lambda g, s: times(0.5)(g, at_least(-1e5)(g, s)), "lowest": -65504.0},
    "masked again": {
        "masked": lambda g, s: g.Add(times(0.5)(g, s), _zeros_and_low(g, -1e4)),
        "lowest": -65504.0,
    },
    "heads in batch": {"kv_heads": 4, "attend": Merged("none", scale="none"), "scores": times(0.5), "lowest": -65504.0},
    "-1e4 over 4": {"lowest": -1e4, "masked": times(0.25)},
    "-1e4 over 20": {"lowest": -1e4, "masked": times(0.05)},
    "a floor that comes up": {"masked": lambda g, s: times(0.05)(g, at_least(-1e4)(g, s))},
    "negative": {"masked": times(-0.5)},
    "own numbers": {"mask": "own", "own_type": np.float32, "masked": times(0.5, "Div")},
    "capped after": {"masked": lambda g, s: tanh(g, times(0.5)(g, s))},
}

# Sinks: a logit for each head beside the scores.


def _beside(column: Callable[[Build, str], str]) -> dict[str, Any]:
    return {
        "masked": lambda g, scores: beside_sinks(g, scores, column(g, scores)),
        "weights": without_sinks,
    }


def _of_tokens(g: Build, scores: str) -> str:
    """The first score of each query."""
    return without_sinks(g, scores, 0, 1)


def _of_length(g: Build, scores: str) -> str:
    return g.Mul(sink_column(g, scores), g.Cast(g.all, to=FLOAT))


def _heads_turned(g: Build, scores: str) -> str:
    """A weight whose logits are not in the order of the heads."""
    rows = g.Unsqueeze(g.size_of(scores, 2), [0])
    shape = g.Concat([1, 4], rows, [1], axis=0)
    turned = g.Transpose(g.Reshape(g.constant(np.arange(4.0), np.float32), [2, 2]))
    column = g.Expand(g.Reshape(turned, [1, 4, 1, 1]), shape)
    batch = g.Concat(g.Unsqueeze(g.size_of(scores, 0), [0]), [4], rows,
                              [1], axis=0)  # fmt: skip
    return g.Expand(column, batch)


def _zero_row(g: Build, values: str) -> str:
    """One row more, so that a column of sinks that is not dropped has something to weigh."""
    return g.Pad(values, [0, 0, 0, 0, 0, 0, 1, 0])


def near_in_turns(g: Build, scores: str) -> str:
    """A window in every other layer, as Gemma and gpt-oss have it."""
    if g.layer % 2:
        return scores
    far = g.LessOrEqual(g.key_rows, g.Sub(g.query_rows, 4))
    return g.Where(g.to_scores(far), g.number(-1e4), scores)


SINKS: dict[str, dict[str, Any]] = {
    "one head": {"sinks": "weight", "kv_heads": 1, "repeat": "none"},
    "one query head": {"sinks": "weight", "heads": 1, "kv_heads": 1},
    "capped": {"sinks": "weight", "softcap": 3.0},
    "a window": {"sinks": "weight", "window": 5, "layers": 2},
    "padding": {"sinks": "weight", "mask": "padding", "positions": "padding"},
    "own mask": {"sinks": "weight", "mask": "own"},
    "own mask, added": {"sinks": "weight", "mask": "own", "own_type": np.float32},
    "Where": {"sinks": "weight", "apply": "where", "layout": "flat"},
    "two sequences": {"sinks": "weight", "batch": 2, "positions": "past"},
    "one token": {"sinks": "zero", "sequence": 1},
    "float16": {"sinks": "weight", "dtype": np.float16},
    "float16, upcast": {"sinks": "weight", "dtype": np.float16, "upcast": True, "size": 16},
    "windows in turns": {"sinks": "weight", "layers": 2, "scores": near_in_turns},
    "in another order than their weight": _beside(_heads_turned),
    "of the scores": _beside(_of_tokens),
    "of the length": _beside(_of_length),
    "not dropped": {**_beside(sink_column), "weights": lambda g, w: w, "values": _zero_row},
    "before the scores": {
        "masked": lambda g, scores: g.Concat(sink_column(g, scores), scores, axis=-1),
        "weights": lambda g, w: without_sinks(g, w, 1, 2**31),
    },
}

# Products in float32 over caches of float16, as where queries are too large for it.


def in_wide(*products: str, size: float = 1.0, operator: bool = False, to: Any = np.float32) -> Callable[..., str]:
    """Attention with products of "scores", of "values" or of both in a wider type, and queries `size` times as large.

    The softmax is in that type, or in float32.
    """
    kind = {
        np.float16: TensorProto.FLOAT16, np.float32: FLOAT, np.float64: TensorProto.DOUBLE,
        ml_dtypes.bfloat16: TensorProto.BFLOAT16,
    }  # fmt: skip

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
    "products, large queries": {"attend": in_wide("scores", "values", size=20_000.0)},
    "scores": {"attend": in_wide("scores", size=20_000.0), "layout": "bsnd"},
    "values": {"attend": in_wide("values"), "layout": "flat"},
    "an operator": {"attend": in_wide("scores", "values", size=20_000.0, operator=True), "opset": 24},
    "double products": {"attend": in_wide("scores", "values", size=20_000.0, to=np.float64)},
    "bfloat16 products": {"attend": in_wide("scores", "values", size=20_000.0, to=ml_dtypes.bfloat16)},
    "double scores": {"attend": in_wide("scores", size=20_000.0, to=np.float64)},
    "a double softmax": {"attend": in_wide(to=np.float64)},
}


def mixed(g: Build, tensor: str, by: str = "MatMul") -> str:
    """Scores or weights of every head from those of all heads, as in talking heads; ``[B, H, S, T]``."""
    if by == "Einsum":
        return g.Einsum(tensor, g.weight(4, 4), equation="bhst,hg->bgst")
    if by == "Conv":
        return g.Conv(tensor, g.weight(4, 4, 1, 1))
    last = g.Transpose(tensor, perm=[0, 2, 3, 1])
    return g.Transpose(g.MatMul(last, g.weight(4, 4)), perm=[0, 3, 1, 2])


Function = Callable[[Build, str], str]


def weighed_by(function: Function) -> Callable[[Build, str, str, str], str]:
    """Attention whose weights are another function of the scores than their softmax, or spelled in another way."""

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        scores = g.Mul(g.MatMul(query, g.Transpose(keys, perm=[0, 1, 3, 2])), g.number(0.5))
        return g.MatMul(function(g, _masked(g, scores)), values)

    return attend


def written_out(most: int = -1, total: int = -1, op: str = "ReduceSum") -> Function:
    """Softmax in five operators: the axes along which it takes the largest, and the sum."""

    def softmax(g: Build, scores: str) -> str:
        power = g.Exp(g.Sub(scores, g.ReduceMax(scores, [most])))
        return g.Div(power, g.node(op, [power, g.constant([total])]))

    return softmax


SOFTMAX: dict[str, dict[str, Any]] = {
    "as it is": {"attend": weighed_by(written_out()), "layers": 2},
    "the sum along rows": {"attend": weighed_by(written_out(total=2)), "layers": 2},
    "the largest along rows": {"attend": weighed_by(written_out(most=2)), "layers": 2},
    "the mean": {"attend": weighed_by(written_out(op="ReduceMean")), "layers": 2},
    "float16": {
        "attend": weighed_by(written_out()),
        "mask": "padding",
        "apply": "where",
        "dtype": np.float16,
        "size": 8,
    },
}


def in_turn(g: Build, tensor: str, by: str = "Tile") -> str:
    """2 heads of a cache as 0, 1, 0, 1; repeat_interleave gives 0, 0, 1, 1."""
    if by == "Tile":
        return g.Tile(tensor, [1, 2, 1, 1])
    if by == "Gather":
        return g.Gather(tensor, [0, 1, 0, 1], axis=1)
    spread = g.Expand(g.Unsqueeze(tensor, [1]), [1, 2, 1, 1, 1])
    return g.Reshape(spread, [0, 4, -1, g.decoder.size])


IN_TURN: dict[str, dict[str, Any]] = {
    by: {"repeat": "none", "keys": partial(in_turn, by=by), "values": partial(in_turn, by=by)}
    for by in ("Tile", "Gather", "Expand")
}


def after_prefix(g: Build, tensor: str) -> str:
    """Rows of a trained prefix before those of the tokens, of one sequence."""
    return g.Concat(g.weight(1, 4, 3, g.decoder.size), tensor, axis=2)


def seen_prefix(g: Build) -> str:
    """A causal mask with which all queries see the first 5 rows, too."""
    return g.to_scores(g.Or(g.causal(), g.Less(g.key_rows, 5)))


def over_64(g: Build) -> str:
    """A mask of 64 keys in each step, of which the new ones are the last S: it fits a past of 64 - S."""
    rows = g.Range(g.Sub(64, g.length), 64, 1)
    return g.to_scores(g.LessOrEqual(g.constant(np.arange(64)), g.Unsqueeze(rows, [1])))


OTHER_SIZES: dict[str, dict[str, Any]] = {
    "a prefix of one sequence": {"keys": after_prefix, "values": after_prefix, "mask": "none", "layers": 2},
    "a prefix, batch of 1": {
        "keys": after_prefix,
        "values": after_prefix,
        "mask": "none",
        "layers": 2,
        "repeat": "none",
        "kv_heads": 4,
        "batch": 1,
    },
    "a past of 64 - S": {"mask": over_64, "layers": 2},
    "a past of 64 - S, one layer": {"mask": over_64},
    "a prefix of one sequence, one layer": {"keys": after_prefix, "values": after_prefix, "mask": "none"},
    "a prefix by its mask": {"mask": seen_prefix, "layers": 2},
}

NO_ATTENTION: dict[str, dict[str, Any]] = {
    **{
        f"weights by {name}": {"attend": weighed_by(lambda g, scores, op=name: g.node(op, [scores]))}
        for name in ("Sigmoid", "Relu", "Identity")
    },
    **{f"weights mixed by {name}": {"weights": partial(mixed, by=name)} for name in ("MatMul", "Einsum", "Conv")},
    "scores mixed": {"scores": mixed, "layers": 2},
}


def entries() -> Iterator[Entry]:
    yield from decoders("attention", FORMS)
    yield from decoders("no attention", NO_ATTENTION)
    yield from decoders("heads in turn", IN_TURN)
    yield from decoders("other sizes", OTHER_SIZES)
    half: dict[str, Any] = {"dtype": np.float16, "upcast": True, "layers": 2, "size": 8}
    yield from decoders("float32 over float16", {name: half | how for name, how in WIDE.items()})
    yield from decoders("scaled mask", {name: {**CODEGEN, **how} for name, how in SCALED.items()})
    yield from decoders("sinks", SINKS)
    ring = {name: SINKS[name] for name in ("a window", "windows in turns")}
    yield from decoders("sinks, circular", ring, sliding="circular", window_chunk=4)
    yield from decoders("softmax", SOFTMAX)
