"""Position biases: relative ones and slopes.

T5: a learned number per head and bucket of distance, added to the scores.

    bucket[i, j] = f(j - (P + i));  bias = Transpose(Gather(table [buckets, H], bucket))  [1, H, S, P + S]

    becomes, over the rows of the cache

    buckets  = f(-(L - 1)), ..., f(0)                     [L], a constant
    distance = Clip(j - position[b, i] + L - 1, 0, L - 1)  [B, S, L]
    bias     = Transpose(Gather(table, Gather(buckets, distance)))  [B, H, S, L]

The table (a weight) is not read. Keys after the query are hidden by causality, so that only
distances up to 0 count.

ALiBi: a score loses a number per head with each token that its key lies before the query.

    BLOOM, Falcon   slopes [H] * (CumSum(padding mask) - 1)           [B, H, 1, T]
    MPT             slopes [H] * (0, -1, -2, ...) up to the last key  [H, 1, T]

become ``slopes * (j - i)`` for query position ``i`` and key row ``j``: the same up to one number for each row of the
scores, which a softmax does not see, unless sinks stand beside them. The slopes are read off the values. ONNX's
Attention has no slopes: until its mask is built, an Attention of the importer carries them as one input more, `SLOPES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT64, Emitter

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A bias that only depends on head and distance.

    Attributes:
        table: the weight ``[buckets, H]``.
        buckets: row of the table for distances ``-(L - 1) .. 0``, int64 ``[L]``.
        elem_type: ONNX element type of the bias.
    """

    table: gs.Tensor
    buckets: Array
    elem_type: int


def emit_bias(emit: Emitter, bias: RelativeBias, positions: gs.Tensor, capacity: int) -> gs.Variable:
    """The bias over all rows of the caches, ``[B, H, S, L]``; made once for all layers that share it."""

    def make() -> gs.Variable:
        query = emit.op("Unsqueeze", [positions, emit.ints([2])], "bias_query", INT64)
        rows = emit.constant(np.arange(capacity, dtype=np.int64) + capacity - 1)
        distance = emit.op("Sub", [rows, query], "bias_distance", INT64)
        known = emit.op("Clip", [distance, emit.ints(0), emit.ints(capacity - 1)], "bias_index", INT64)
        bucket = emit.op("Gather", [emit.constant(bias.buckets), known], "bias_bucket", INT64, axis=0)
        found = emit.op("Gather", [bias.table, bucket], "bias_found", bias.elem_type, axis=0)
        return emit.op("Transpose", [found], "bias", bias.elem_type, perm=[0, 3, 1, 2])

    made: gs.Variable = emit.once(("bias", bias.table.name, bias.buckets.tobytes()), make)
    return made
