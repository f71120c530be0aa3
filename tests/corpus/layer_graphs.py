"""Several attentions in one graph: what they share, caches in unusual places, and forms on which TensorRT crashes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import onnx
from graphs import Dim, Graph
from onnx import TensorProto

from corpus import Entry, built

FLOAT, HALF, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
CAPACITY = 16


class Layers(Graph):
    """A graph with the inputs that all layers of a decoder share."""

    def __init__(self, dtype: int = HALF, length: Dim = "S", lengths: str = "valid") -> None:
        super().__init__()
        self.dtype, self.length = dtype, length
        for name in filter(None, ("write_indices", lengths)):
            self.input(name, TensorProto.INT64, ["B"])

    def cache(
        self, name: str, size: int = 16, capacity: int = CAPACITY, mode: str = "linear", *, flat: bool = False
    ) -> str:
        """Update one cache of two heads, ``[B, N, L, H]`` or flat, ``[B, L, N * H]``; returns present."""

        def shape(tokens: Dim) -> list[Dim]:
            return ["B", tokens, 2 * size] if flat else ["B", 2, tokens, size]

        past = self.input(f"past_{name}", self.dtype, shape(capacity))
        new = self.input(f"new_{name}", self.dtype, shape(self.length))
        self.output(f"present_{name}", self.dtype, shape(capacity))
        return self.TensorScatter(past, new, "write_indices", out=f"present_{name}", axis=1 if flat else 2, mode=mode)

    def caches(self, name: int = 0, **how: Any) -> tuple[str, str]:
        return self.cache(f"k.{name}", **how), self.cache(f"v.{name}", **how)

    def query(self, name: str = "query", heads: int = 4) -> str:
        return self.input(name, self.dtype, ["B", heads, self.length, 16])

    def attend(
        self, query: str, caches: Sequence[str], out: str = "y", shape: Sequence[Dim] = (), **attrs: Any
    ) -> None:
        """One Attention whose result is a graph output."""
        attrs = {"is_causal": 1} | attrs
        self.Attention(query, *caches, "", "", "", attrs.pop("lengths", "valid"), out=out, **attrs)
        self.output(out, self.dtype, shape or ["B", "N", self.length, "H"])


def layers(*how: dict[str, Any], opset: int = 24, capacities: Sequence[int] = ()) -> onnx.ModelProto:
    """One layer for each mapping, which holds attributes of its attention."""
    g = Layers()
    for i, attrs in enumerate(how):
        caches = g.caches(i, capacity=capacities[i] if capacities else CAPACITY)
        g.attend(g.query(f"query_{i}"), caches, f"y{i}", **attrs)
    return g.model(opset)


def shared(readers: int, *, caches: bool, query: bool, dtype: int = HALF, softcap: int = -1) -> onnx.ModelProto:
    """Attentions over the same caches, with the same query, or both; that of the number `softcap` has one."""
    g = Layers(dtype)
    held = [g.caches(i) for i in range(1 if caches else readers)]
    queries = [g.query(f"query_{i}") for i in range(1 if query else readers)]
    for i in range(readers):
        attrs = {"softcap": 5.0} if i == softcap else {}
        g.attend(queries[i % len(queries)], held[i % len(held)], f"y{i}", **attrs)
    return g.model()


def parts(*, one_cache: bool) -> onnx.ModelProto:
    """One attention for each group of heads, over slices of one wide query: not the same query several times."""
    g = Layers()
    wide = g.query(heads=32)
    one = g.caches() if one_cache else None
    for i in range(8):
        g.attend(g.Slice(wide, [4 * i], [4 * i + 4], [1]), one or g.caches(i), f"y{i}")
    return g.model()


def wide_values(*, flat: bool) -> onnx.ModelProto:
    g = Layers()
    caches = g.cache("k", 16, flat=flat), g.cache("v", 32, flat=flat)
    if not flat:
        g.attend(g.query(), caches)
        return g.model()
    query = g.input("query", HALF, ["B", "S", 64])
    g.attend(query, caches, "y", ["B", "S", 128], q_num_heads=4, kv_num_heads=2)
    return g.model()


def other_heads() -> onnx.ModelProto:
    """Attentions take flat caches for other numbers of heads, and no layout serves both."""
    g = Layers()
    caches, query = g.caches(flat=True), g.input("query", HALF, ["B", "S", 64])
    few = g.Slice(query, [0], [32], [2])
    for i, (heads, given, width) in enumerate(((2, few, 32), (1, query, 64))):
        g.attend(given, caches, f"y{i}", ["B", "S", width], q_num_heads=2, kv_num_heads=heads)
    return g.model()


def other_reader() -> onnx.ModelProto:
    g = Layers()
    caches, query = g.caches(flat=True), g.input("query", HALF, ["B", "S", 64])
    g.attend(query, caches, "y", ["B", "S", 64], is_causal=0, q_num_heads=4, kv_num_heads=2)
    g.ReduceMax(caches[0], [2], out="peak", keepdims=0)
    g.output("peak", HALF, ["B", CAPACITY])
    return g.model()


def last_query() -> onnx.ModelProto:
    """Attentions of different numbers of queries do not share a causal mask."""
    g = Layers()
    caches, query = g.caches(), g.query()
    g.attend(query, caches, "all_rows")
    g.attend(g.Slice(query, [-1], [2**31], [2]), caches, "last_row", ["B", 4, 1, 16])
    return g.model()


def computed_lengths() -> onnx.ModelProto:
    """No input bounds them."""
    g = Layers()
    caches, query = g.caches(), g.query()
    g.attend(query, caches, lengths=g.Add("write_indices", g.Shape(query, start=2, end=3)))
    return g.model()


def circular(length: Dim) -> onnx.ModelProto:
    """A window as a ring: lengths alone say which rows are valid."""
    g = Layers(length=length)
    g.attend(g.query(), g.caches(mode="circular"), is_causal=0)
    return g.model()


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "three that are alike": partial(layers, {}, {}, {}),
    "two capacities": partial(layers, {}, {}, capacities=(CAPACITY, 24)),
    "three geometries": partial(layers, {}, {"is_causal": 0}, {"left_window_size": 3}, opset=25),
    **{f"{f.__name__}": f for f in (other_heads, other_reader, last_query, computed_lengths)},
    **{f"wide values, flat={flat}": partial(wide_values, flat=flat) for flat in (False, True)},
    **{f"circular, {length}": partial(circular, length) for length in (1, "S")},
}
CRASHES: dict[str, Callable[[], onnx.ModelProto]] = {
    **{f"{n} attentions over one cache": partial(shared, n, caches=True, query=False) for n in (2, 6)},
    **{f"{n} attentions with one query": partial(shared, n, caches=False, query=True) for n in (2, 5)},
    "5 attentions with one query over one cache": partial(shared, 5, caches=True, query=True),
    **{f"one cache read in two ways, one query={q}": partial(shared, 3, caches=True, query=q, softcap=1)
       for q in (False, True)},
    **{f"parts of one projection, one cache={one}": partial(parts, one_cache=one) for one in (False, True)},
}  # fmt: skip
"""Forms on which TensorRT's own build crashes."""


def entries() -> Iterator[Entry]:
    yield from built("layers", MODELS | CRASHES)
    yield from built("layers, functional", {"circular, S": MODELS["circular, S"]}, fallback="functional")
    other = {
        f"{TensorProto.DataType.Name(dtype)}, {name}": partial(shared, 3, caches=True, query=True, dtype=dtype, **how)
        for dtype in (FLOAT, BF16)
        for name, how in (("alike", {}), ("in two ways", {"softcap": 1}))
    }
    yield from built("layers", other)
