"""Bring tensors from one layout of the sizes of an attention into another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter
from trt_kvcache.importer.plan import Dim
from trt_kvcache.importer.recognize.layout import ATTENTION, Layout, order_of

_INT64 = int(onnx.TensorProto.INT64)
PLAIN: Layout = (("b",), ("n", "g"), ("s",), ("d",))
"""``[B, H, S, D]``."""


def is_plain(layout: Layout) -> bool:
    """True for ``[B, H, S, D]``."""
    order = order_of(layout)
    in_order = order == tuple(n for n in ATTENTION if n in order)
    return in_order and len(layout) == 4 and all(map(set.issuperset, map(set, PLAIN), layout))


def relaid(
    emit: Emitter, tokens: gs.Tensor, tensor: gs.Tensor, old: Layout, new: Layout, sizes: Mapping[str, int]
) -> gs.Tensor:
    """Reshape and transpose a tensor into another layout.

    Args:
        emit: of the graph.
        tokens: the input of the new tokens; its shape gives B and S.
        tensor: in the layout `old`.
        old: its layout.
        new: the layout of the result.
        sizes: of heads (n), queries for each (g), and numbers of a head (d).
    """
    named: dict[str, Dim] = {"b": "batch", "n": sizes["n"], "g": sizes["g"], "s": "sequence", "d": sizes["d"]}
    both = set(order_of(old)).intersection(order_of(new))  # sizes of 1 are in neither
    before, after = ([n for n in order_of(layout) if n in both] for layout in (old, new))
    if before != after:
        shape = emit_sizes(emit, tokens, tuple(named[n] for n in before))
        tensor = emit.op("Reshape", [tensor, shape], "axes")
        tensor = emit.op("Transpose", [tensor], "turned", perm=[before.index(n) for n in after])
    shape = emit_sizes(emit, tokens, tuple(_size([named[n] for n in axis]) for axis in new))
    return emit.op("Reshape", [tensor, shape], "laid")


def _size(axis: Sequence[Dim]) -> Dim:
    """The size of an axis with these parts; "?" if it combines batch or new tokens with another part."""
    if len(axis) == 1:
        return axis[0]
    return prod(d for d in axis if isinstance(d, int)) if all(isinstance(d, int) for d in axis) else "?"


def emit_sizes(emit: Emitter, tokens: gs.Tensor, dims: tuple[Dim, ...]) -> gs.Tensor:
    """Emit a shape, int64. A dimension is a number, "batch" or "sequence" (read from the tokens), or one "?" (-1)."""
    if "?" not in dims:
        last = max((i for i, d in enumerate(dims) if isinstance(d, str)), default=-1)
        dims = tuple("?" if i == last else d for i, d in enumerate(dims))

    def size(dim: Dim) -> gs.Tensor:
        if dim not in ("batch", "sequence"):
            return emit.ints([-1 if isinstance(dim, str) else dim])
        start = int(dim == "sequence")
        return emit.op("Shape", [tokens], "tokens_size", _INT64, start=start, end=start + 1)

    sizes: gs.Tensor = emit.once(
        ("sizes", dims), lambda: emit.op("Concat", [size(d) for d in dims], "sizes", _INT64, axis=0)
    )
    return sizes
