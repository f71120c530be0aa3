"""Emit masks and biases that an Attention of the canonical form needs beside its attributes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import BOOL, FLOAT, INT64, Emitter
from trt_kvcache.importer.planning.rows_in_use import emit_row_slice
from trt_kvcache.importer.recognize.records import Array


def emit_visible(
    emit: Emitter, write_indices: gs.Tensor, lengths: gs.Tensor | None, query: gs.Tensor, window: int, rows: int
) -> gs.Variable:
    """Emit the rows of a ring that queries see, bool ``[B, 1, S, R]``, once for all equal attentions.

    Args:
        emit: of the graph.
        write_indices: int64 ``[B]``, tokens before the step.
        lengths: int64 ``[B]``, 0 for a batch row that takes no part in the step; None: all batch rows take part.
        query: ``[B, H, S, D]``, or a tensor with S as its axis 1. Equal symbols for S, or equal names, share a mask.
        window: W.
        rows: R.
    """
    length_of = query.shape[2] if query.shape is not None and len(query.shape) == 4 else query.name

    def op(name: str, inputs: Sequence[gs.Tensor], hint: str, dtype: int = INT64, **attrs: int) -> gs.Variable:
        return emit.op(name, inputs, hint, dtype, **attrs)

    def make() -> gs.Variable:
        axis = 2 if query.shape is None or len(query.shape) == 4 else 1
        shape = op("Shape", [query], "window_queries", start=axis, end=axis + 1)
        length = op("Squeeze", [shape], "window_new_tokens")
        steps = op("Range", [emit.ints(0), length, emit.ints(1)], "window_steps")
        first = op("Unsqueeze", [write_indices, emit.ints([1, 2, 3])], "window_first")
        position = op("Add", [first, op("Unsqueeze", [steps, emit.ints([0, 1, 3])], "window_step")], "window_position")
        last = op("Add", [first, op("Sub", [length, emit.ints(1)], "window_last_step")], "window_last")
        slots = emit.constant(np.arange(rows, dtype=np.int64).reshape(1, 1, 1, rows))
        age = op("Mod", [op("Sub", [last, slots], "window_distance"), emit.ints(rows)], "window_age")
        newest = op("Sub", [last, age], "window_newest")
        written = op("GreaterOrEqual", [newest, emit.ints(0)], "window_written", BOOL)
        past = op("LessOrEqual", [newest, position], "window_past", BOOL)
        oldest = op("Sub", [position, emit.ints(window)], "window_oldest")
        near = op("Greater", [newest, oldest], "window_near", BOOL)
        visible = op("And", [op("And", [written, past], "window_known", BOOL), near], "window_visible", BOOL)
        if lengths is None:
            return visible
        valid = op("Unsqueeze", [lengths, emit.ints([1, 2, 3])], "window_valid")
        return op("And", [visible, op("Greater", [valid, emit.ints(0)], "window_in_use", BOOL)], "window_rows", BOOL)

    return emit.once(("window", write_indices.name, lengths and lengths.name, length_of, window, rows), make)


def emit_by_position(emit: Emitter, positions: gs.Variable, rows: int) -> gs.Variable:
    """Emit a mask that shows rows up to the position of each query: bool ``[B, 1, S, rows]``; positions ``[B, S]``.

    Positions keep growing after the end of a circular cache, where each row holds a token. The lengths that sessions
    give stay at L there: a mask by lengths shows query ``i`` of S only rows ``j <= L - S + i``; a mask by positions
    shows all rows.
    """

    def make() -> gs.Variable:
        numbers = emit.constant(np.arange(rows, dtype=np.int64).reshape(1, 1, 1, rows))
        own = emit.op("Unsqueeze", [positions, emit.ints([1, 3])], "ring_position", INT64)
        return emit.op("LessOrEqual", [numbers, own], "ring_visible", BOOL)

    return emit.once(("ring", positions.name, rows), make)


def emit_bias(emit: Emitter, bias: Array, positions: gs.Tensor) -> gs.Variable:
    """Emit a bias by distance over all rows of the caches, float32 ``[B, H, S, L]``, once for all equal layers.

    The rewrite slices it to the rows in use, see `rows_in_use`.

    Args:
        emit: of the graph.
        bias: float32 ``[L, H]``, for distances of key and query ``-(L - 1) .. 0``.
        positions: int64 ``[B, S]``.
    """
    rows = len(bias)

    def make() -> gs.Variable:
        index = emit.op("Add", [_distance(emit, positions, rows), emit.ints(rows - 1)], "bias_row", INT64)
        known = emit.op("Clip", [index, emit.ints(0), emit.ints(rows - 1)], "bias_index", INT64)
        values = emit.op("Gather", [emit.constant(bias), known], "bias_found", FLOAT, axis=0)
        return emit.op("Transpose", [values], "bias", FLOAT, perm=[0, 3, 1, 2])

    result: gs.Variable = emit.once(("bias", bias.tobytes()), make)
    return result


def emit_slopes(emit: Emitter, slopes: Array, positions: gs.Tensor, rows: int) -> gs.Variable:
    """Emit slopes times distances, as `emit_bias`: in float32, where distances are exact.

    Args:
        emit: of the graph.
        slopes: float32 ``[H]``.
        positions: int64 ``[B, S]``.
        rows: L.
    """

    def make() -> gs.Variable:
        distance = emit.op("Unsqueeze", [_distance(emit, positions, rows), emit.ints([1])], "slope_distance", INT64)
        wide = emit.op("Cast", [distance], "slope_distance", FLOAT, to=FLOAT)
        return emit.op("Mul", [wide, emit.constant(slopes.reshape(1, -1, 1, 1))], "slanted", FLOAT)

    result: gs.Variable = emit.once(("slopes", slopes.tobytes()), make)
    return result


def _distance(emit: Emitter, positions: gs.Tensor, rows: int) -> gs.Variable:
    """Emit key position minus query position for all rows of the caches, int64 ``[B, S, L]``."""
    query = emit.op("Unsqueeze", [positions, emit.ints([2])], "bias_query", INT64)
    keys = emit_row_slice(emit, emit.constant(np.arange(rows, dtype=np.int64)), 0, rows)
    keys.dtype = np.int64
    return emit.op("Sub", [keys, query], "bias_distance", INT64)
