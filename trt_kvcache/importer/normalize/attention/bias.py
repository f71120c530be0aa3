"""Relative position bias, as T5 has it: a learned number per head and bucket of distance, added to the scores.

    bucket[i, j] = f(j - (P + i));  bias = Transpose(Gather(table [buckets, H], bucket))  [1, H, S, P + S]

    becomes, over the rows of the cache

    buckets  = f(-(L - 1)), ..., f(0)                     [L], a constant
    distance = Clip(j - position[b, i] + L - 1, 0, L - 1)  [B, S, L]
    bias     = Transpose(Gather(table, Gather(buckets, distance)))  [B, H, S, L]

The buckets are evaluated, the table (a weight) is not read. Keys behind the query are hidden by causality, so that only
distances up to 0 count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import INT64, Emitter, is_op, made_of_constants, producer
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.views import is_float_cast

Array = npt.NDArray[Any]

_MOVES = ("Transpose", "Unsqueeze", "Squeeze", "Reshape", "Slice", "Identity", "Expand")


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
    """Prove that a tensor that is added to scores is a relative position bias; None where no table takes part.

    Args:
        node: name of the attention, for messages.
        tensor: the bias as exported.
        samples: of the model as exported.

    Raises:
        UnsupportedModelError: a table takes part, and the bias is something else.
    """
    gather = _gather_behind(tensor)
    if gather is None:
        return None
    table, shape = gather.inputs[0], samples.plain[0].probe.shape(gather.inputs[0].name)
    if shape is None or len(shape) != 2:
        return None
    # The table with a number of its own in every place: what arrives at the scores says where it was taken from.
    numbers = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    seen = [(s, _evaluate(s, tensor, table, numbers)) for s in samples.plain]
    last, values = seen[-1]
    buckets = _last_row(values, last, shape)

    if buckets is None or not all(_agrees(value, sample, buckets, numbers) for sample, value in seen):
        raise UnsupportedModelError(
            f"'{tensor.name}', which is added to the scores of '{node}', looks up the weight '{table.name}' and is "
            "no bias that only depends on the head and on the distance of query and key; supported are relative "
            "position biases"
        )
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


def _evaluate(sample: Sample, tensor: gs.Tensor, table: gs.Tensor, numbers: Array) -> Array | None:
    value = sample.probe.given({table.name: numbers}).value(tensor.name)
    return value if value is not None and value.ndim == 4 and value.shape[0] in (1, sample.batch) else None


def _last_row(value: Array | None, sample: Sample, shape: tuple[int, ...]) -> Array | None:
    """The buckets that the last query sees, from the farthest key to its own."""
    if value is None or value.shape[1] != shape[1] or value.shape[3] < sample.total:
        return None
    row = value[0, 0, -1, : sample.total]
    return (row // shape[1]).astype(np.int64) if sample.total == sample.capacity else None


def _agrees(value: Array | None, sample: Sample, buckets: Array, numbers: Array) -> bool:
    if value is None or value.shape[2] != sample.length:
        return False
    rows = np.arange(value.shape[3])[None, :] - (sample.past + np.arange(sample.length))[:, None]
    behind = rows <= 0
    expected = numbers[buckets[np.clip(rows + sample.capacity - 1, 0, sample.capacity - 1)]]  # [S, keys, H]
    expected = np.moveaxis(expected, -1, 0)
    return bool(np.all((value == expected) | ~behind))
