"""Updates of a cache that only look like one, and caches that somebody reads beside attention."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from concat_graphs import Build, Decoder, decoders, joined, make_decoder
from graphs import Dim, Graph, renamed
from onnx import TensorProto

from corpus import Entry, built

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
HEADS, SIZE, CAPACITY = 2, 4, 16
BNSD: tuple[Dim, ...] = ("B", HEADS, CAPACITY, SIZE)
PAST, PRESENT = ("B", HEADS, "P", SIZE), ("B", HEADS, "T", SIZE)
FAR = 1 << 40

Idiom = Callable[[Graph, str, str], str]
Case = tuple[Idiom, dict[str, Any]]

# Models with one cache update each.
#
# hidden [B, S, N * D] -- MatMul, Reshape --> new [B, S, N, D]
# past, new, pos -- the idiom --> present


def update_model(
    idiom: Idiom,
    shape: Sequence[Dim] = BNSD,
    pos: Sequence[Dim] | None = (),
    length: Dim = "S",
    present: Sequence[Dim] | None = None,
) -> onnx.ModelProto:
    """A model whose cache `past` of this shape is updated by `idiom`.

    Args:
        idiom: is given the graph, ``past`` and ``new`` ``[B, S, N, D]``; returns the tensor that becomes `present`.
        shape: of the past.
        pos: shape of the int64 input ``pos``; None: there is none.
        length: S.
        present: shape of the present, if it is not that of the past.
    """
    graph = Graph()
    hidden = graph.input("hidden", FLOAT, ["B", length, HEADS * SIZE])
    if pos is not None:
        graph.input("pos", INT, pos)
    past = graph.input("past", FLOAT, shape)
    weight = np.random.default_rng(7).standard_normal((HEADS * SIZE, HEADS * SIZE))
    new = graph.Reshape(graph.MatMul(hidden, graph.constant(weight, np.float32)), [0, 0, HEADS, SIZE], out="new")
    graph.Identity(idiom(graph, past, new), out="present")
    graph.output("present", FLOAT, list(present or shape))
    return graph.model(24)


def turned(g: Graph, tensor: str, *perm: int) -> str:
    return g.Transpose(tensor, perm=list(perm))


def heads_first(g: Graph, new: str) -> str:
    return turned(g, new, 0, 2, 1, 3)


def positions(g: Graph, start: str = "pos") -> str:
    """``start + 0 .. S - 1``, ``[S]``."""
    steps = g.Range(g.constant(0), g.Gather(g.Shape("hidden"), 1), 1)
    return g.Add(steps, start)


def index_copy(rows: Callable[[Graph], str] = positions) -> Idiom:
    """torch's index_copy on the sequence axis of ``[B, N, L, D]``: ScatterND between Transposes."""

    def idiom(g: Graph, past: str, new: str) -> str:
        data, update = turned(g, past, 2, 0, 1, 3), turned(g, new, 1, 0, 2, 3)
        written = g.ScatterND(data, g.Unsqueeze(rows(g), [-1]), update, out="written")
        return turned(g, written, 1, 2, 0, 3)

    return idiom


def concat(g: Graph, past: str, new: str) -> str:
    return g.Concat(past, heads_first(g, new), axis=2)


def by_beams(g: Graph, past: str, new: str) -> str:
    return concat(g, g.Gather(past, g.input("beams", INT, ["B"]), axis=0), new)


def doubled(g: Graph, past: str, new: str) -> str:
    """A blend by one-hot vectors that writes each new row times 2."""
    rows = np.arange(CAPACITY).reshape(1, 1, -1, 1)
    hot = g.Cast(g.Equal(g.constant(rows), g.Reshape("pos", [-1, 1, 1, 1])), to=FLOAT)
    cold = g.Sub(g.constant(1, np.float32), hot)
    fresh = g.Mul(heads_first(g, new), g.Mul(hot, g.constant(2, np.float32)))
    return g.Add(g.Mul(past, cold), fresh)


def by_a_mask(g: Graph, past: str, new: str) -> str:
    return g.Where(g.input("chosen", TensorProto.BOOL, ["B", 1, CAPACITY, 1]), heads_first(g, new), past)


def lost_write(g: Graph, past: str, new: str) -> str:
    """Keys of an encoder go through unchanged; those of the shape of the written ones have lost their write."""
    g.Identity(g.input("cross", FLOAT, BNSD), out="present_cross")
    g.output("present_cross", FLOAT, BNSD)
    return index_copy()(g, past, new)


def reversed_rows(g: Graph) -> str:
    return g.Slice(positions(g), *(g.constant([v]) for v in (-1, -FAR, 0, -1)))


CASES: dict[str, Case] = {
    "beside a lost write": (lost_write, {}),
    "a past of one length": (
        concat, {"shape": ("B", HEADS, 15, SIZE), "pos": None, "present": BNSD, "length": 1},
    ),
    "a mask": (by_a_mask, {"pos": None, "length": 1}),
    "new rows times 2": (doubled, {"pos": ("B",), "length": 1}),
    "the row after the next": (index_copy(lambda g: g.Add(positions(g), 1)), {}),
    "every second row": (index_copy(lambda g: g.Mul(positions(g), 2)), {}),
    "reversed": (index_copy(reversed_rows), {}),
}  # fmt: skip

# Decoders whose caches somebody reads beside attention, or whose update is none.


def present_shown(g: Build, x: str) -> str:
    g.Identity(g.presents[0], out="debug")
    g.output("debug", FLOAT, [f"d{axis}" for axis in range(4)])
    return x


def mixed_past(g: Build, x: str) -> str:
    return g.Add(x, g.ReduceMean(g.pasts[0], keepdims=0))


def probabilities(g: Build, x: str) -> str:
    softmax = next(n for n in g.nodes if n.op_type == "Softmax")
    g.output(softmax.output[0], FLOAT, ["a", "b", "c", "d"])
    return x


def read_before(g: Build, past: str, new: str, present: str) -> str:
    """Attention reads the keys as they were before this step."""
    whole = joined(g, past, new, present)
    return whole if g.part else past


def new_rows_first(g: Build, past: str, new: str, present: str) -> str:
    return joined(g, past, new, present) if g.part else joined(g, new, past, present)


def entries() -> Iterator[Entry]:
    yield from built("one update", {n: partial(update_model, idiom, **how) for n, (idiom, how) in CASES.items()})
    grows: dict[str, Any] = {"shape": PAST, "pos": None, "present": PRESENT}
    yield from built("one update", {"beams": partial(update_model, by_beams, **grows)}, capacity=CAPACITY)
    readers = {
        "present shown": present_shown, "past in the hidden states": mixed_past, "probabilities shown": probabilities,
    }  # fmt: skip
    yield from decoders("reader", {name: {"after": after} for name, after in readers.items()})
    updates = {"attention_over_past": read_before, "new_rows_first": new_rows_first}
    how: dict[str, Any] = {"repeat": "tile", "mask": "positions"}
    yield from decoders("update", {name: {**how, "write": write} for name, write in updates.items()})
    named = {"an input of that name": lambda: renamed(make_decoder(Decoder()), {"position_ids": "write_indices"})}
    yield from built("update", named, capacity=24)
    yield from built("no capacity", {"plain": lambda: make_decoder(Decoder())})
