"""Positions that a decoder counts from its past or takes from its caller, and lengths that reach the hidden states."""

from collections.abc import Callable, Iterator
from typing import Any

from concat_graphs import Build, decoders, signal
from graphs import Dim
from onnx import TensorProto

from corpus import Entry

FLOAT = TensorProto.FLOAT
Index = Callable[[Build], str]
ROWS = 60  # of a table, unless it is to be too short
PAD = 1


def counted(g: Build, first: int = 0) -> str:
    """``[S]``: P + first and so on."""
    bounds = [g.Add(n, g.constant(first)) if first else n for n in (g.past, g.all)]
    return g.Range(*bounds, 1)


def front(g: Build, tensor: str) -> str:
    return g.Unsqueeze(tensor, [0])


def real(g: Build, dtype: int = TensorProto.INT32) -> str:
    """``[B, S]``: 1 where a token is no pad."""
    return g.Cast(g.Not(g.Equal(g.tokens, PAD)), to=dtype)


def beside_pads(g: Build, past: str, axis: int = 1, offset: int = PAD) -> str:
    """As M2M-100 counts: pads have the position of the pad."""
    tokens = real(g)
    all_in = g.Add(g.CumSum(tokens, axis), g.Cast(past, to=TensorProto.INT32))
    positions = g.Cast(g.Mul(all_in, tokens), to=TensorProto.INT64)
    return g.Add(positions, g.constant(offset)) if offset else positions


def looked_up(index: Index, rows: int = ROWS) -> Callable[[Build, str], str]:
    """Rows of a table added to the hidden states."""

    def after(g: Build, x: str) -> str:
        width = g.decoder.heads * g.decoder.size
        return g.Add(x, g.Gather(g.weight(rows, width), index(g), out="found", axis=0))

    return after


FOUND: dict[str, Index] = {
    "one for all": counted,
    "beside pads": lambda g: beside_pads(g, g.past),
    "beside pads, from 3": lambda g: beside_pads(g, g.Add(g.past, g.constant(3)), offset=0),
    "pads taken off": lambda g: g.Sub(g.Add(g.past, g.CumSum(real(g, TensorProto.INT64), 1)), 1),
    "given, from 2": lambda g: g.Add(g.position_ids, g.constant(2)),
}
LOOK_ALIKES: dict[str, Index] = {
    "an offset in long texts": lambda g: g.Add(
        front(g, counted(g)), g.Cast(g.Greater(g.past, 9), to=TensorProto.INT64)
    ),
    "an offset by the batch": lambda g: g.Add(counted(g), g.size_of(g.tokens, 0)),
    "one before": lambda g: counted(g, -1),
    "pads of the whole batch": lambda g: beside_pads(g, g.past, axis=0),
}


def summed(g: Build, x: str, found: str) -> str:
    return g.Add(x, g.ReduceSum(found, [0], keepdims=0))


def of_heads(g: Build, x: str, found: str) -> str:
    """``[B, H, S, D] + [S, D]``: with rows for each sequence, those would meet the heads."""
    heads = g.Transpose(g.Reshape(x, [0, 0, 2, -1]), perm=[0, 2, 1, 3])
    half = g.Slice(found, [0], [8], [1])
    back = g.Transpose(g.Add(heads, half), perm=[0, 2, 1, 3])
    return g.Reshape(back, [0, 0, -1])


def of_steps(g: Build, x: str, found: str) -> str:
    """``[S, B, H] + [S, 1, H]``."""
    turned = g.Transpose(x, perm=[1, 0, 2])
    more = g.Unsqueeze(found, [1])
    return g.Transpose(g.Add(turned, more), perm=[1, 0, 2])


def with_rows(read: Callable[[Build, str, str], str]) -> dict[str, Any]:
    return {"after": lambda g, x: read(g, x, g.Gather(g.weight(ROWS, 16), counted(g), axis=0))}


def other_frequencies_in_long_texts(g: Build, x: str) -> str:
    """Phi-3's long factors."""
    long = g.Greater(g.all, 16)
    return g.Mul(x, g.Where(long, g.number(3), g.number(1)))


def mask_shown(g: Build, x: str) -> str:
    """An output beside the logits."""
    g.Identity(g.to_scores(g.causal()), out="debug")
    g.output("debug", TensorProto.BOOL, [f"d{axis}" for axis in range(4)])
    return x


LENGTHS: dict[str, dict[str, Any]] = {
    "long factors": {"mask": "padding", "after": other_frequencies_in_long_texts},
    "mask shown": {"after": mask_shown},
}

# Several planes for each token (M-RoPE).

PLANES = 3


def planar(shape: list[Dim]) -> Any:
    """Each plane has its own share of the hidden state."""

    def after(g: Build, x: str) -> str:
        positions = g.input("position_ids", TensorProto.INT64, shape)
        planes = [g.Gather(positions, k, axis=0) for k in range(PLANES)]
        signals = [signal(g, p, w) for p, w in zip(planes, [6, 5, 5], strict=True)]
        return g.Add(x, g.node("Concat", signals, axis=-1))

    return after


def _looked_up(g: Build, x: str) -> str:
    positions = g.input("position_ids", TensorProto.INT64, [PLANES, "batch", "sequence"])
    for k in range(PLANES):
        rows = g.Gather(g.weight(20 - k, 16), g.Gather(positions, k, axis=0), axis=0)
        x = g.Add(x, rows)
    return x


def mask_by_the_last_plane(g: Build) -> str:
    """For text all planes are equal; for images such a mask is not causal."""
    positions = g.input("position_ids", TensorProto.INT64, [PLANES, "batch", "sequence"])
    queries = g.Unsqueeze(g.Gather(positions, 2, axis=0), [1, 3])
    return g.LessOrEqual(g.key_rows, queries)


MROPE: dict[str, dict[str, Any]] = {
    **{f"batch of {n}": {"after": planar([PLANES, n, "sequence"]), "batch": n} for n in (1, 3)},
    "tables": {"after": _looked_up},
    "a mask by the last": {"mask": mask_by_the_last_plane},
}


def entries() -> Iterator[Entry]:
    found: dict[str, dict[str, Any]] = {n: {"after": looked_up(i)} for n, i in FOUND.items()}
    found |= {n: {"after": looked_up(i, 200)} for n, i in LOOK_ALIKES.items()}
    found["one for all, batch of 1"] = {**found["one for all"], "batch": 1}
    found["one for all, one token"] = {**found["one for all"], "sequence": 1}
    found["beside pads, 25 rows"] = {"after": looked_up(FOUND["beside pads"], 25)}
    found |= {
        "rows of heads": with_rows(of_heads),
        "rows summed": with_rows(summed),
        "rows of steps": with_rows(of_steps),
    }
    yield from decoders("positions", {name: {"positions": "none", **how} for name, how in found.items()})
    yield from decoders("lengths", LENGTHS)
    yield from decoders("planes", {n: {"positions": "none", **how} for n, how in MROPE.items()})
