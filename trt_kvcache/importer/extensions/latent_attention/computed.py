"""Keys and values that are computed from caches, row by row, as those of multi-head latent attention.

    latents [B, 1, T, r] -- MatMul, Reshape, Transpose, Split --> K without positions, V
    rotated [B, 1, T, d] -- Expand over the heads --------------> K with positions

To attention they are caches like any other: the search proves what is done with them. Once caches have their capacity
they are computed anew, from constants and from as many rows of the caches as are in use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions.latent_attention.rows import RowFunction, Rows
from trt_kvcache.importer.graph import FLOATS, elem_type, is_op
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import AttentionSite, Write
from trt_kvcache.importer.normalize.views import is_float_cast
from trt_kvcache.importer.operators import MOVES
from trt_kvcache.importer.planning.rows_in_use import emit_row_slice


@dataclass(frozen=True, eq=False)
class Computed:
    """Tensors that may be keys and values, computed from caches.

    Attributes:
        functions: all tensors computed from caches row by row.
        writes: a stand-in for each that may be keys or values: it is not written, but it is read like a cache.
        heads: of each of these, by name.
    """

    functions: Rows
    writes: tuple[Write, ...]
    heads: Mapping[str, int]

    def emit(self, name: str, emitted: dict[str, gs.Tensor], canonical: Canonical) -> gs.Tensor:
        """Compute a row function from the canonical caches; `emitted` gets the tensors of one attention so far."""
        return self.functions.emit(name, emitted, canonical, lambda leaf: _rows_in_use(leaf, canonical))

    def place(self, site: AttentionSite, canonical: Canonical) -> AttentionSite:
        """Compute what an attention reads of `writes` from the canonical caches; returns the attention over that.

        Raises:
            UnsupportedModelError: keys and values are of different heads.
        """
        sides = ((site.key, site.head_size), (site.value, site.value_size))
        heads = [self.heads.get(str(write.present.name)) or _heads_of(write, size) for write, size in sides]
        if heads[0] != heads[1] and self.heads.keys() & {write.present.name for write, _ in sides}:
            raise UnsupportedModelError(
                f"'{site.node}' attends to {heads[0]} heads of keys and {heads[1]} of values, and some are computed "
                "from a cache; supported are as many of both: repeat heads after they are computed"
            )
        emitted: dict[str, gs.Tensor] = {}

        def placed(write: Write, size: int) -> Write:
            name = str(write.present.name)
            if name not in self.heads:
                return write
            tensor = self.emit(name, emitted, canonical)
            shape = (canonical.batch, self.heads[name], canonical.capacity, size)
            canonical.known[tensor.name] = (elem_type(write.present) or 0, shape)
            return replace(write, present=tensor, axis=2)

        return replace(site, key=placed(site.key, site.head_size), value=placed(site.value, site.value_size))


def _heads_of(cache: Write, size: int) -> int:
    shape = list(cache.present.shape or [])
    if len(shape) == 3:
        return int(shape[2]) // size
    return int(shape[1] if cache.axis == 2 else shape[2])


def find_computed(graph: gs.Graph, writes: Sequence[Write], samples: Samples) -> Computed:
    """Find tensors that may be keys and values ``[B, N, T, D]`` in a sorted graph as exported.

    Where heads are only repeated, it is the tensor before that.
    """
    functions = Rows(graph, writes, samples)
    stand_ins: dict[str, Write] = {}
    heads: dict[str, int] = {}
    roots: dict[str, str] = {}  # what a tensor is moved from
    for name, function in functions.known.items():
        node = function.node
        if node is None or function.is_moved or not function.writes:
            continue
        if (is_op(node, *MOVES) or is_float_cast(node)) and node.inputs[0].name in roots:
            roots[name] = roots[node.inputs[0].name]
        count = _heads(function, samples)
        if count is None or (name in roots and _repeats(roots[name], name, samples)):
            continue
        roots[name] = name
        heads[name] = count
        tensor, leaf = function.tensor, function.writes[0]
        tensor.dtype = samples.plain[0].probe.elem_type(name)  # shape inference may not know it
        stand_ins[name] = Write(leaf.idiom, tensor, tensor, tensor, str(node.name), axis=2, growing=leaf.growing)
    return Computed(functions, tuple(stand_ins.values()), heads)


def _repeats(root: str, name: str, samples: Samples) -> bool:
    """True for another tensor with its heads repeated, which attention does by itself."""
    probe = samples.plain[0].probe
    shape, other = probe.shape(root), probe.shape(name)
    if shape is None or other is None or other[1] % shape[1]:
        return False
    numbers = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    moved = probe.with_values({root: numbers}).value(name)
    return moved is not None and np.array_equal(moved, np.repeat(numbers, other[1] // shape[1], axis=1))


def _heads(function: RowFunction, samples: Samples) -> int | None:
    """The heads of what may be keys or values; None where it is something else."""
    probes = [s.probe for s in samples.plain]
    shapes = [probe.shape(function.tensor.name) for probe in probes]
    heads = {shape[1] for shape in shapes if shape is not None and len(shape) == 4}
    if None in shapes or len(heads) != 1 or function.axes != (0, 2):
        return None
    alike = len({(w.growing, w.kept) for w in function.writes}) == 1
    return heads.pop() if alike and probes[0].elem_type(function.tensor.name) in FLOATS else None


def _rows_in_use(leaf: RowFunction, canonical: Canonical) -> gs.Tensor:
    """The rows in use of a cache."""
    write = leaf.writes[0]
    rows = (write.present.shape or ())[write.axis]
    return emit_row_slice(canonical.emit, write.present, write.axis, int(rows))
