"""Position biases: relative ones and slopes.

T5: a learned number per head and bucket of distance, added to the scores.

    bucket[i, j] = f(j - (P + i));  bias = Transpose(Gather(table [buckets, H], bucket))  [1, H, S, P + S]

    becomes, over the rows of the cache that are in use

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

from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import FLOATS, INT64, Emitter, is_constant, is_op, producer
from trt_kvcache.importer.normalize.attention.masks import HIDDEN, Masks
from trt_kvcache.importer.normalize.evidence.probe import Array
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.planning.rows_in_use import emit_row_slice

__all__ = ["RelativeBias", "emit_bias", "take_off"]

_NEAR = 0.02  # as a share of the largest number, which is rounded in float16


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
    """The bias over all rows of the caches, ``[B, H, S, L]``; emitted once for all layers that share it.

    The rewrite cuts the rows where it begins: see `rows_in_use`.
    """

    def make() -> gs.Variable:
        query = emit.op("Unsqueeze", [positions, emit.ints([2])], "bias_query", INT64)
        rows = emit_row_slice(emit, emit.constant(np.arange(capacity, dtype=np.int64) + capacity - 1), 0, capacity)
        rows.dtype = np.int64
        distance = emit.op("Sub", [rows, query], "bias_distance", INT64)
        known = emit.op("Clip", [distance, emit.ints(0), emit.ints(capacity - 1)], "bias_index", INT64)
        bucket = emit.op("Gather", [emit.constant(bias.buckets), known], "bias_bucket", INT64, axis=0)
        values = emit.op("Gather", [bias.table, bucket], "bias_found", bias.elem_type, axis=0)
        return emit.op("Transpose", [values], "bias", bias.elem_type, perm=[0, 3, 1, 2])

    result: gs.Variable = emit.once(("bias", bias.table.name, bias.buckets.tobytes()), make)
    return result


def take_off(masks: Masks, samples: Samples) -> tuple[Masks, RelativeBias | None]:
    """The masks without a bias by distance; and the bias, if a table has it. Slopes stay with the masks.

    Raises:
        UnsupportedModelError: a table is looked up, and not by distance alone.
    """
    sample, name = samples.plain[0], "" if masks.tensor is None else str(masks.tensor.name)
    known = masks.scores.value(sample, name) is not None
    tables: dict[str, gs.Tensor] = {}
    unknown: set[str] = set()
    for tensor in masks.made_of(sample, all_of_it=known):
        node = producer(tensor)
        if node is not None and is_op(node, "Gather") and is_constant(node.inputs[0]):
            table = node.inputs[0]
            shape, kind = sample.probe.shape(table.name), sample.probe.elem_type(table.name)
            if kind in FLOATS and len(shape or ()) == 2 and not is_constant(node.inputs[1]):
                tables[str(table.name)] = table
        elif not known and is_constant(tensor) and sample.probe.elem_type(tensor.name) in FLOATS:
            unknown.add(str(tensor.name))
    masks = replace(masks, stand_ins=tuple((name, "zeros") for name in sorted({*tables, *unknown})))
    slopes = None
    if masks.scores.value(sample, name, masks.stand_ins) is not None and masks.is_biased(sample):
        slopes = _find_slopes(masks, samples)
    bias = _read_table(masks, next(iter(tables.values())), samples) if tables else None
    return replace(masks, slopes=slopes), bias


def _read_table(masks: Masks, table: gs.Tensor, samples: Samples) -> RelativeBias:
    """The bias of a weight ``[buckets, H]``: each place has a number of its own, and arrives where it is added."""
    last = samples.plain[-1]
    heads = (last.probe.shape(table.name) or (1, 1))[1]
    others = tuple(pair for pair in masks.stand_ins if pair[0] != table.name)
    zero, places = masks.added(last), replace(masks, stand_ins=others).added(last, (str(table.name), "places"))
    numbers = (places - zero)[..., : last.total]
    if numbers.shape[1] != heads or numbers.shape[3] < last.total or not np.isfinite(numbers[0, 0, -1]).all():
        raise UnsupportedModelError(
            f"what is added to the scores of '{masks.node}' looks up the weight '{table.name}' and is no bias that "
            "only depends on the head and on the distance of query and key; supported are relative position biases"
        )
    buckets = ((numbers[0, 0, -1] - 1) // heads).astype(np.int64)  # of the farthest key to the query's own
    return RelativeBias(table, buckets, last.probe.elem_type(table.name) or 1)


def _find_slopes(masks: Masks, samples: Samples) -> Array | None:
    """By how much what is added grows with each key: float32 ``[H or 1]``; None where it is too short to see."""
    last = samples.plain[-1]
    rows = masks.added(last)[0, :, -1, : last.total]
    if rows.shape[-1] < max(2, last.total):
        return None
    nearest = np.minimum(np.argmin(np.abs(rows), axis=1), last.total - 2)[:, None]  # where numbers are most exact
    here, after = (np.take_along_axis(rows, nearest + step, axis=1)[:, 0] for step in (0, 1))
    slopes: Array = (after - here).astype(np.float32)
    wanted = here[:, None] + slopes[:, None] * (np.arange(rows.shape[-1]) - nearest)
    other = np.abs(rows - wanted) > _NEAR * np.abs(rows).max()
    named = not last.own and not masks.has_sinks  # else somebody else says what there is beside the bias
    if named and np.any(other & (rows > HIDDEN)):
        head, key = np.argwhere(other & (rows > HIDDEN))[0]
        raise UnsupportedModelError(
            f"what is added to the scores of '{masks.node}' does not grow by one number with each key: with "
            f"{last.total} tokens, head {head} has {rows[head, key]:.4g} for key {key}, and {here[head]:.4g} for key "
            f"{nearest[head, 0]}; supported are masks, which hide keys altogether, and biases by distance (ALiBi, T5)"
        )
    if named and not slopes.any():
        level = masks.level(samples.plain[0])
        soft = level[(level > HIDDEN) & (level != 0)]
        raise UnsupportedModelError(
            f"what is added to the scores of '{masks.node}' tells keys apart by {soft[0]:.4g}, which hides none of "
            "them; supported are masks, which hide keys altogether, and biases by distance (ALiBi, T5)"
        )
    return slopes
