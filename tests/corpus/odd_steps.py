"""Models that are right in most steps and wrong in some: masks, factors, positions, padding, rows. All are refused.

Recognizers look at few steps and guess; the check runs both models on both sides of every number in the graph.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from concat_graphs import Build, _attend, decoders
from onnx import TensorProto

from corpus import Entry

Odd = Callable[[Build], str]


def equal(what: str, number: int) -> Odd:
    return lambda g: g.Equal(getattr(g, what), number)


def above(what: str, number: int) -> Odd:
    return lambda g: g.Greater(getattr(g, what), number)


def both(one: Odd, other: Odd) -> Odd:
    return lambda g: g.And(one(g), other(g))


ODD: dict[str, Odd] = {
    "P": equal("past", 17),
    "T": equal("all", 23),
    "P and S": both(equal("past", 9), equal("length", 4)),
    "P and T": both(equal("past", 19), equal("all", 30)),
    "long after some": both(above("length", 11), above("past", 6)),
    "S": equal("length", 7),
    "long": above("length", 40),
}


def choose(g: Build, odd: Odd, here: float, elsewhere: float) -> str:
    """A number that is another one in odd steps."""
    return g.Where(odd(g), g.number(here), g.number(elsewhere))


def masked(odd: Odd) -> dict[str, Any]:
    """The last key is hidden in odd steps."""

    def mask(g: Build) -> str:
        last = g.Equal(g.key_rows, g.Sub(g.all, 1))
        hidden = g.And(last, odd(g))
        return g.to_scores(g.And(g.causal(), g.Not(hidden)))

    return {"mask": mask}


def scaled(odd: Odd) -> dict[str, Any]:
    """Scores are doubled in odd steps."""
    return {"scores": lambda g, tensor: g.Mul(tensor, choose(g, odd, 2.0, 1.0))}


def shifted(odd: Odd) -> dict[str, Any]:
    """Positions are one more in odd steps."""

    def after(g: Build, x: str) -> str:
        rows = g.Transpose(g.query_rows, perm=[1, 0])
        more = g.Cast(odd(g), to=TensorProto.INT64)
        column = g.Unsqueeze(g.Add(rows, more), [-1])
        return g.Add(x, g.Cast(column, to=TensorProto.FLOAT))

    return {"positions": "none", "after": after}


def seen(form: str) -> Callable[[Odd], dict[str, Any]]:
    """The number in the place of hidden scores is not low in odd steps."""

    def make(odd: Odd) -> dict[str, Any]:
        def scores(g: Build, tensor: str) -> str:
            lowest = choose(g, odd, 0.0, -1e4)
            visible = g.to_scores(g.causal())
            if form == "visible":
                return g.Where(visible, tensor, lowest)
            return g.Max(g.Where(visible, tensor, g.number(-1e4)), lowest)

        return {"mask": "none", "scores": scores}

    return make


def own_scaled(odd: Odd) -> dict[str, Any]:
    """The caller's mask hides the same keys, but other numbers of a caller between 0 and the lowest are scaled."""

    def scores(g: Build, tensor: str) -> str:
        mask = g.input("mask", TensorProto.FLOAT, ["batch", 1, "sequence", "total"])
        return g.Add(tensor, g.Mul(mask, choose(g, odd, 0.5, 1.0)))

    return {"mask": "none", "scores": scores}


def pick(g: Build, odd: Odd, one: Sequence[int], other: Sequence[int]) -> str:
    """Numbers that are `one` in odd steps, and `other` in all others."""
    return g.Where(odd(g), one, other)


def turned(g: Build, tensor: str, odd: Odd, how: str) -> str:
    """Keys ``[B, H, T, D]``, scrambled in odd steps."""
    end = 2**31
    if how == "heads":  # of one group, so that each keeps its shape
        return g.Gather(tensor, pick(g, odd, [2, 3, 0, 1], [0, 1, 2, 3]), axis=1)
    axis = {"rows": 2, "channels": 3}[how]
    bounds = [pick(g, odd, [-1], [0]), pick(g, odd, [-end], [end]), g.constant([axis]), pick(g, odd, [-1], [1])]
    return g.Slice(tensor, *bounds)


def read(which: str, how: str) -> Callable[[Odd], dict[str, Any]]:
    """Caches are read in another order in odd steps."""
    return lambda odd: {which: lambda g, tensor: turned(g, tensor, odd, how)}


def guarded(odd: Odd) -> dict[str, Any]:
    """Attention whose guard closes in odd steps, and where a query sees nothing."""

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        output = _attend(g, query, keys, values)
        counts = g.ReduceSum(g.Cast("mask", to=TensorProto.FLOAT), [-1], keepdims=1)
        blind = g.Less(counts, g.number(0.5))
        return g.Where(g.Or(blind, odd(g)), g.number(0.0), output)

    return {"mask": "own", "attend": attend}


FORMS: dict[str, Callable[[Odd], dict[str, Any]]] = {
    "mask": masked,
    "factor": scaled,
    "positions": shifted,
    **{f"lowest, {form}": seen(form) for form in ("visible", "Max")},
    "own mask": own_scaled,
    **{f"{how} of {which}": read(which, how) for how in ("heads", "channels", "rows") for which in ("keys", "values")},
    "guard": guarded,
}
BY_STEP_ALONE = ("positions", "guard")
"""Tensors that depend on S alone may stay in the graph here."""


def cancelling(past: int) -> dict[str, Any]:
    """Rows of the past less a position, at that position: 0 as exported; the capacity less it after the rewrite."""

    def after(g: Build, x: str) -> str:
        first = g.Gather(g.position_ids, [0], axis=1)  # [B, 1], of each row its own
        there = g.Cast(g.Equal(first, past), to=TensorProto.INT64)
        nothing = g.Mul(there, g.Sub(g.past, past))
        as_x = g.Unsqueeze(g.Cast(nothing, to=TensorProto.FLOAT), [2])
        return g.Add(x, as_x)

    return {"after": after}


def counting(at: int) -> dict[str, Any]:
    """A counter of tokens that says one number."""

    def after(g: Build, x: str) -> str:
        counter = g.input("position_ids", TensorProto.INT64, [])
        there = g.Cast(g.Equal(counter, at), to=TensorProto.FLOAT)
        return g.Add(x, there)

    return {"positions": "none", "after": after}


def entries() -> Iterator[Entry]:
    forms = {
        f"{form}, {name}": make(odd)
        for form, make in FORMS.items()
        for name, odd in ODD.items()
        if form not in BY_STEP_ALONE or name not in ("S", "long")
    }
    yield from decoders("odd", forms, capacity=60)
    yield from decoders("odd", {f"cancels at {n}": cancelling(n) for n in (0, 3, 10)}, capacity=60)
    yield from decoders("odd", {f"counts at {n}": counting(n) for n in (0, 7, 39)}, capacity=40)
