"""Position biases: relative ones and slopes.

T5: a learned number per head and bucket of distance, added to the scores.

    bucket[i, j] = f(j - (P + i));  bias = Transpose(Gather(table [buckets, H], bucket))  [1, H, S, P + S]

    becomes, over the rows of the cache

    buckets  = f(-(L - 1)), ..., f(0)                     [L], a constant
    distance = Clip(j - position[b, i] + L - 1, 0, L - 1)  [B, S, L]
    bias     = Transpose(Gather(table, Gather(buckets, distance)))  [B, H, S, L]

The buckets are evaluated, the table (a weight) is not read. Keys after the query are hidden by causality, so that only
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

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import INT64, Emitter, is_op, made_of_constants, producer
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.views import is_float_cast

Array = npt.NDArray[Any]

_MOVES = ("Transpose", "Unsqueeze", "Squeeze", "Reshape", "Slice", "Identity", "Expand")
_ULPS = 4  # by which two numbers of a row may be off, of the largest


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


def find_bias(node: str, tensor: gs.Tensor, samples: Samples) -> RelativeBias | None:
    """Guess the relative position bias that is added to scores; None where no table takes part.

    Args:
        node: name of the attention, for messages.
        tensor: the bias as exported.
        samples: of the model as exported.

    Raises:
        UnsupportedModelError: a table takes part, and the bias has no column for each head and key.
    """
    gather = _gather_behind(tensor)
    if gather is None:
        return None
    table, shape = gather.inputs[0], samples.plain[0].probe.shape(gather.inputs[0].name)
    if shape is None or len(shape) != 2:
        return None
    # The table with a number of its own in every place: what arrives at the scores says where it was taken from.
    numbers = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    last = samples.plain[-1]
    value = last.probe.given({table.name: numbers}).value(tensor.name)
    if value is None or value.ndim != 4 or value.shape[1] != shape[1] or value.shape[3] < last.total:
        raise UnsupportedModelError(
            f"'{tensor.name}', which is added to the scores of '{node}', looks up the weight '{table.name}' and is no "
            "bias that only depends on the head and on the distance of query and key; supported are relative position "
            "biases"
        )
    buckets = (value[0, 0, -1, : last.total] // shape[1]).astype(np.int64)  # of the farthest key to the query's own
    return RelativeBias(table, buckets, samples.plain[0].probe.elem_type(tensor.name) or 1)


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


def _gather_behind(tensor: gs.Tensor) -> gs.Node | None:
    """The lookup that a tensor is a view of."""
    while (node := producer(tensor)) is not None:
        if (
            is_op(node, "Gather")
            and made_of_constants(node.inputs[0])  # as it is, or dequantized
            and not isinstance(node.inputs[1], gs.Constant)
        ):
            return node
        if not is_op(node, *_MOVES) and not is_float_cast(node):
            return None
        tensor = node.inputs[0]
    return None


def find_slopes(tensor: gs.Tensor, samples: Samples, *, shifted: bool) -> Array | None:
    """Guess by how much what is added to scores grows with each key; None where it does not grow evenly.

    Args:
        tensor: ``[B or 1, H or 1, S or 1, T]``, or what broadcasts to it.
        samples: of the model as exported.
        shifted: it may add one more number to all of a row; else it adds nothing to the score of a query's own key.

    Returns:
        The slopes, float32 ``[H or 1]``.
    """
    slopes: Array | None = None
    for sample in samples.few[::-1]:
        value = sample.probe.value(tensor.name)
        if value is None or value.ndim > 4 or value.dtype.kind != "f" or not value.size:
            return None
        rows = value[(None,) * (4 - value.ndim)][..., -1, : sample.total].astype(np.float64)  # [B, H, T], of the last
        if rows.shape[-1] < max(2, sample.total) or not np.isfinite(rows).all():
            return None
        if slopes is None:  # next to 0, where numbers are as exact as they get
            nearest = np.minimum(np.argmin(np.abs(rows[0]), axis=1), sample.total - 2)[:, None]
            here, after = (np.take_along_axis(rows[0], nearest + step, axis=1)[:, 0] for step in (0, 1))
            slopes = (after - here).astype(np.float32)
        expected = slopes.astype(np.float64)[:, None] * np.arange(1 - sample.total, 1)
        shift = rows[..., -1:] if shifted else 0.0
        allowed = _ULPS * float(np.finfo(value.dtype).eps) * np.abs(rows).max(axis=-1, keepdims=True)
        if rows.shape[1] != len(slopes) or np.any(np.abs(rows - shift - expected) > allowed):
            return None
    return slopes
