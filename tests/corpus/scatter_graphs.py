"""Models of TensorScatter caches without attention, drawn at random: one seed, one model.

past of any rank, axis, type and mode; update as it comes or computed; TensorScatter(past, update, write_indices);
views of past and present beside it: Slice, Gather, Transpose, Reshape, Cast, sums, and the past itself
"""

import math
import random
from collections.abc import Iterator
from typing import Any

from graphs import Dim, Graph
from onnx import TensorProto
from plain_graphs import Plain

from corpus import Entry, built
from trt_kvcache.importer.cache_plan import CacheLayout, Fallback, PlanOptions, Target

FLOAT, HALF, BFLOAT, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL
INT8, UINT8, INT32, INT64 = TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64
FLOATS = (FLOAT, HALF, BFLOAT)
DTYPES = (*FLOATS * 3, *(BOOL, INT8, INT32, INT64) * 2, UINT8, TensorProto.DOUBLE)
VIEWS = (
    "past", "past copy", "view of past", "turned", "flat", "rows", "last row", "rows by index", "heads", "shape",
    "sum", "cast", "sum of both", "update", "product",
)  # fmt: skip
"""Outputs beside the present; several of them read past or present."""


class _Maker(Graph):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.batch: Dim = rng.choice(("B", "B", "B", 2, 1))
        self.length: Dim = rng.choice(("S", "S", "S", 1, 2, 3))
        self.capacity = rng.choice((6, 8, 9, 12))
        self.indices = rng.choice(("input", "input", "input", "input", "int32", "one", "expanded", "none", "computed"))
        if self.indices == "one":  # one for each sequence
            self.batch = 1
        self.count = rng.choice((1, 1, 1, 2, 3))
        self.views = [rng.sample(VIEWS, rng.choice((0, 0, 1, 1, 2))) for _ in range(self.count)]
        self.modes = [rng.choice(("linear", "linear", "circular")) for _ in range(self.count)]
        if rng.random() < 0.7:
            self.modes = self.modes[:1] * self.count
        self.parts: dict[str, str] = {}
        self.axes: dict[str, int] = {}
        self.presents: dict[str, str] = {}

    def take(self, name: str, part: str, dtype: int, shape: list[Dim]) -> str:
        self.parts[name] = part
        return self.input(name, dtype, shape)

    def write_indices(self) -> str:
        kind, batch = self.indices, self.batch
        if kind == "none":
            return ""
        if kind == "int32":
            return self.Cast(self.take("write_indices", "start", INT32, [batch]), to=INT64)
        if kind in ("one", "expanded"):
            one = self.take("write_indices", "start", INT64, [1])
            return one if kind == "one" else self.Expand(one, self.Shape("update.0", start=0, end=1))
        start = self.take("write_indices", "start", INT64, [batch])
        return self.Sub(self.Add(start, 1), 1) if kind == "computed" else start

    def cache(self, place: int) -> None:
        rng = self.rng
        dtype = rng.choice(DTYPES)
        rank = rng.choice((2, 3, 3, 4, 4, 4, 5, 6))
        axis = rng.randrange(1, rank)
        shape: list[Dim] = [self.batch, *(rng.choice((1, 2, 3, 4)) for _ in range(rank - 1))]
        shape[axis] = self.capacity
        update = list(shape)
        update[axis] = self.length
        past, present = f"cache.{place}", f"present.{place}"
        self.take(past, "past", dtype, shape)
        new = self.take(f"update.{place}", "values", dtype, update)
        if place == 0:
            self.write = self.write_indices()
        if dtype in FLOATS and rng.random() < 0.3:
            new = rng.choice((self.Neg, lambda x: self.Mul(x, x), lambda x: self.Add(x, x)))(new)
        elif rng.random() < 0.2:
            new = self.Identity(new)
        named = axis if rng.random() < 0.5 else axis - rank
        attributes: dict[str, Any] = {} if named == -2 and rng.random() < 0.5 else {"axis": named}
        if self.modes[place] != "linear" or rng.random() < 0.2:
            attributes["mode"] = self.modes[place]
        inputs = [past, new] + ([self.write] if self.write else [])
        if rng.random() < 0.05:
            self.node("TensorScatter", inputs, f"middle.{place}", **attributes)
            inputs[0] = f"middle.{place}"
        self.node("TensorScatter", inputs, present, **attributes)
        self.output(present, dtype, shape)
        self.axes[past], self.presents[past] = axis, present
        for view in self.views[place]:
            self.view(view, f"view_{place}_{view.replace(' ', '_')}", past, new, present, dtype, shape, axis)

    def view(
        self, view: str, name: str, past: str, new: str, present: str, dtype: int, shape: list[Dim], axis: int
    ) -> None:  # fmt: skip
        rng, rank = self.rng, len(shape)
        read = past if view == "view of past" or rng.random() < 0.2 else present
        is_number = dtype in FLOATS

        def give(tensor: str, kind: int, dims: list[Dim]) -> None:
            self.Identity(tensor, out=name)
            self.output(name, kind, dims)

        def with_rows(rows: int) -> list[Dim]:
            return [rows if i == axis else d for i, d in enumerate(shape)]

        if view == "past":
            self.output(past, dtype, shape)
        elif view == "past copy":
            give(past, dtype, shape)
        elif view in ("view of past", "turned"):
            perm = [0, *rng.sample(range(1, rank), rank - 1)]
            give(self.Transpose(read, perm=perm), dtype, [shape[i] for i in perm])
        elif view == "flat":
            give(self.Reshape(read, [0, -1]), dtype, [shape[0], math.prod(int(d) for d in shape[1:])])
        elif view == "rows":
            give(self.Slice(read, [1], [4], [axis]), dtype, with_rows(3))
        elif view == "last row":
            give(self.Gather(read, self.constant([-1]), axis=axis), dtype, with_rows(1))
        elif view == "rows by index":
            if "rows" not in self.parts:
                self.take("rows", "rows", INT64, [3])
            give(self.Gather(read, "rows", axis=axis), dtype, with_rows(3))
        elif view == "heads":
            other = rng.choice([i for i in range(1, rank) if i != axis] or [axis])
            give(self.Gather(read, self.constant(0), axis=other), dtype, [d for i, d in enumerate(shape) if i != other])
        elif view == "shape":
            give(self.Shape(read), INT64, [rank])
        elif view == "sum" and is_number:
            give(self.ReduceSum(read, [axis], keepdims=1), dtype, with_rows(1))
        elif view == "cast":
            to = FLOAT if dtype != FLOAT else HALF
            give(self.Cast(read, to=to), to, shape)
        elif view == "sum of both" and is_number:
            give(self.Add(past, present), dtype, shape)
        elif view == "update":
            give(new, dtype, [self.length if i == axis else d for i, d in enumerate(shape)])
        elif view == "product" and is_number:
            give(self.Mul(present, present), dtype, shape)

    def make(self) -> Plain:
        rng = self.rng
        for place in range(self.count):
            self.cache(place)
        options = PlanOptions()
        if rng.random() < 0.5:
            options = PlanOptions(
                target=rng.choice((Target.TENSORRT_RTX, Target.TENSORRT)),
                cache_layout=rng.choice((CacheLayout.AUTO, CacheLayout.PRESERVE)),
                attention_span=rng.random() < 0.75,
                fallback=rng.choice((Fallback.AUTO, Fallback.FUNCTIONAL, Fallback.CONTRACT)),
            )
        return Plain(
            seed=self.seed, odd=tuple(dict.fromkeys(v for views in self.views for v in views)),
            model=self.model(rng.choice((24, 24, 25))), options=options, parts=self.parts, masks={}, axes=self.axes,
            presents=self.presents, capacity=self.capacity, batch=self.batch if isinstance(self.batch, int) else None,
            length=self.length if isinstance(self.length, int) else None, indexed=bool(self.write),
            same=self.indices in ("one", "expanded", "none"), short=False, room=self.capacity,
            circular=set(self.modes) == {"circular"}, faint=False,
        )  # fmt: skip


def scatter_plain(seed: int) -> Plain:
    return _Maker(seed).make()


def entries() -> Iterator[Entry]:
    for seed in range(8):
        plain = scatter_plain(seed)
        yield from built("scatter", {str(seed): lambda plain=plain: plain.model}, **vars(plain.options))
