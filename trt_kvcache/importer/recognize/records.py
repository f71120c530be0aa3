"""Data classes that describe recognized caches and attentions. `emit` makes TensorScatter and Attention from them.

A layout lists for each axis of a tensor the sizes whose product is the axis' length: the batch ``b``, the heads of keys
``n``, the query heads ``g`` that share one key head, the new tokens ``s``, and the head size ``d``:

    [B, S, H * D]  is  ((b,), (s,), (n, g, d))

The layout of a cache leaves out the axis of its rows: ``[B * N, P, D]`` is ``((b, n), (d,))``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

import onnx_graphsurgeon as gs

from trt_kvcache.importer.protos import Array

Layout = tuple[tuple[str, ...], ...]
ATTENTION = ("b", "n", "g", "s", "d")
"""The order of sizes in queries and results of ONNX's Attention: ``[B, H, S, D]`` with H = n * g."""


def order_of(layout: Layout) -> tuple[str, ...]:
    """Return the names of the sizes in a layout, in the order of the tensor's axes."""
    return tuple(size for axis in layout for size in axis)


def layouts(shape: Sequence[int], sizes: Mapping[str, int]) -> Iterator[Layout]:
    """Yield every layout that a shape can have: ``[6]``, n = 3, d = 2 -> (n, d), (d, n). Sizes of 1 are left out."""
    names = [name for name, size in sizes.items() if size != 1]
    if prod(shape) != prod(sizes.values()):
        return
    for order in permutations(names):
        rest, layout = list(order), []
        for dim in shape:
            axis: list[str] = []
            while prod(sizes[n] for n in axis) < dim and rest:
                axis.append(rest.pop(0))
            if prod(sizes[n] for n in axis) != dim:
                break
            layout.append(tuple(axis))
        else:
            yield tuple(layout)


def brought(values: Array, layout: Layout, sizes: Mapping[str, int], order: Sequence[str]) -> Array:
    """Reshape and transpose a tensor of this layout: one axis for each size in `order` (1 if `layout` lacks it)."""
    own = order_of(layout)
    axes = values.reshape([sizes[n] for n in own])
    axes = axes.transpose([own.index(n) for n in order if n in own])
    result: Array = axes.reshape([sizes[n] if n in own else 1 for n in order])
    return result


class RecognizeError(Exception):
    """Raised if a cache or an attention has an unsupported form. The message says which form."""


class AdvisedError(RecognizeError):
    """A `RecognizeError` whose message also says what to do."""


class UnknownError(AdvisedError):
    """Raised if the meaning of an integer input, such as positions, is unknown. Its argument is the input's name."""

    def __str__(self) -> str:
        return f"cannot tell what the input '{self.args[0]}' holds in a step; give its role with --config"


class FartherError(Exception):
    """Raised if the part cut out around an attention is too small: it must also compute one of the tensors `args`."""


class ComputedError(RecognizeError):
    """Raised if keys and values of an attention are computed from `caches`. `query` is the name of its queries."""

    def __init__(self, query: str, caches: Sequence[Cache]) -> None:
        super().__init__(
            f"keys and values are computed from the cache '{caches[0].past.name}', as in latent attention (MLA)"
        )
        self.query, self.caches = query, tuple(caches)


@dataclass(frozen=True, eq=False)
class Cache:
    """A cache, and how a step writes its new rows.

    Attributes:
        past: the graph input.
        present: the graph output.
        axis: the axis of the rows. Other axes: batch, heads, head size; one axis may combine the last two.
        growing: True if past has one row for each token, and present has S rows more; False if both have the same size.
        window_rows: the number of newest rows that past and present keep at most; None: they keep all rows.
        shifted: True if past and present always have `window_rows` rows, with the newest token in the last row.
        circular: True if token t is in row t modulo the number of rows.
        positions: names of the graph inputs that give the rows to write.
        update: the tensor of the new rows; None until a test step has shown it. It is also None for keys or values
            computed from caches: then `past` and `present` are the computed tensor.
        perm: permutation that brings the axes of `update` into the order of the cache's axes.
    """

    past: gs.Tensor
    present: gs.Tensor
    axis: int
    growing: bool
    window_rows: int | None = None
    shifted: bool = False
    circular: bool = False
    positions: tuple[str, ...] = ()
    update: gs.Tensor | None = None
    perm: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees: query ``i`` sees key row ``j`` if all conditions below hold.

    Attributes:
        causal: ``j <= write_index + i``.
        window: ``j > write_index + i - window``: a query sees this many keys, including its own; None: no limit.
        own: the model's mask input over the cache rows, bool (True = visible) or added to the scores; None: no mask.
        bounded: True if rows from ``write_index + S`` on are hidden. A causal mask always hides these rows.
        slopes: float32 ``[H]``; slope times (key position minus query position) is added to scores; None: no slopes.
        bias: float32 ``[L, H]``, added to scores, for key minus query positions ``-(L - 1) .. 0``; None: no bias.
    """

    causal: bool = True
    window: int | None = None
    own: gs.Tensor | None = None
    bounded: bool = True
    slopes: Array | None = None
    bias: Array | None = None


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention over a cache of keys and a cache of values.

    Attributes:
        name: name of the node that computes the result.
        query, result: tensors of queries and result; `query_layout` and `result_layout` describe their axes.
        sizes: key heads (n), query heads for each key head (g), size of a query head (d) and of a value head (v).
        scale, softcap: scale and softcap of the scores; softcap 0: there is no softcap.
        sinks: float32 ``[H]``, an extra logit in each head's softmax; None: no sinks.
        query_type, result_type: ONNX element types.
        wide: True if caches are not float32, and keys or values are cast to float32 before they are multiplied.
        wide_weights: True if scores or attention weights are float32.
        computed_from: caches from which keys and values are computed, row by row; empty: keys and values are caches.
    """

    name: str
    query: gs.Tensor
    result: gs.Tensor
    query_layout: Layout
    result_layout: Layout
    key: Cache
    value: Cache
    sizes: Mapping[str, int]
    scale: float
    softcap: float
    mask: Mask
    sinks: Array | None
    query_type: int
    result_type: int
    wide: bool
    wide_weights: bool
    computed_from: tuple[Cache, ...] = ()

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The caches of keys and values that the attention reads."""
        return self.computed_from or (self.key, self.value)

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.sizes["n"] * self.sizes["g"]
