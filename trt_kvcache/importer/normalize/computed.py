"""Emit keys and values that a graph computes from caches row by row, as multi-head latent attention does.

    latents [B, 1, T, r] -- MatMul, Reshape, Transpose, Split --> K without positions, V
    rotated [B, 1, T, d] -- Expand over the heads --------------> K with positions

Once caches have a fixed capacity, the graph computes keys and values again from constants and the cache rows in use.
Plain attention over these keys and values remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import elem_type
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.rows import RowFunction, Rows
from trt_kvcache.importer.planning.rows_in_use import emit_row_slice
from trt_kvcache.importer.recognize.records import Attention, Cache
from trt_kvcache.importer.recognize.samples import Samples


class Computed:
    """Computes keys and values from canonical caches.

    Args:
        graph: sorted, as exported.
        caches: of the model.
        samples: of the model.
    """

    def __init__(self, graph: gs.Graph, caches: Sequence[Cache], samples: Samples) -> None:
        self._rows = Rows(graph, caches, samples)

    def place(self, attention: Attention, canonical: Canonical) -> Attention:
        """Emit the keys and values of an attention; returns the plain attention over them.

        Raises:
            UnsupportedModelError: keys or values are not computed row by row.
        """
        emitted: dict[str, gs.Tensor] = {}
        key, value = (
            self._placed(cache, attention, size, emitted, canonical)
            for cache, size in ((attention.key, attention.sizes["d"]), (attention.value, attention.sizes["v"]))
        )
        return replace(attention, key=key, value=value)

    def _placed(
        self, cache: Cache, attention: Attention, size: int, emitted: dict[str, gs.Tensor], canonical: Canonical
    ) -> Cache:
        name = str(cache.present.name)
        if name not in self._rows.known:
            raise UnsupportedModelError(
                f"'{name}', which '{attention.name}' attends to, is computed from caches"
                + (f", and {self._rows.broken}" if self._rows.broken else "")
                + "; supported are keys and values that are computed row by row with constants"
            )
        tensor = self._rows.emit(name, emitted, canonical, lambda leaf: _rows_in_use(leaf, canonical))
        kind = elem_type(cache.present) or elem_type(attention.computed_from[0].past) or 0
        if cache.axis == 3:
            tensor = canonical.emit.op("Transpose", [tensor], "rows_first", kind, perm=[0, 1, 3, 2])
        tensor.dtype = kind
        shape = (canonical.batch, attention.sizes["n"], canonical.capacity, size)
        canonical.known[tensor.name] = (kind, shape)
        return replace(cache, past=tensor, present=tensor, axis=2)


def _rows_in_use(leaf: RowFunction, canonical: Canonical) -> gs.Tensor:
    """Slice a cache to its rows in use."""
    cache = leaf.writes[0]
    rows = (cache.present.shape or ())[cache.axis]
    return emit_row_slice(canonical.emit, cache.present, cache.axis, int(rows))
