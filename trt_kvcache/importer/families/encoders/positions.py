"""Checks that an encoder's tables have enough rows for the positions of a source.

TensorRT returns arbitrary numbers, without an error, for a lookup after the end of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import onnx

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.interface import table_rows
from trt_kvcache.importer.prepare import detach_weights
from trt_kvcache.importer.protos import int_attribute, is_op, shape_of
from trt_kvcache.importer.steps.probe import Blueprint, Probe

_IDS = (0, 1, 2, 3)
"""Token ids of which whole sources are made. One of the first ids is padding, whose positions differ."""

_PAIRS, _LARGEST = 1 << 20, 1 << 24
"""Limits on the number of indices.

More than `_PAIRS` indices are relative positions, one for each pair of tokens. `_LARGEST` is enough for the pairs of
4,096 tokens.
"""


def most_ids(model: onnx.ModelProto) -> int | None:
    """Return the number of valid token ids; None if no input indexes a table of known size."""
    rows = [table_rows(model, v.name) for v in model.graph.input if len(shape_of(v) or ()) == 2]
    return min((n for n in rows if n is not None), default=None)


def count_positions(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int]
) -> int | None:
    """Return the length of an encoder's output for given input shapes; None if the output shapes are unknown."""
    shell, weights = detach_weights(model)
    probe = Probe(Blueprint(shell, weights), shapes, {})
    counts = [shape[axis] for name, axis in axes.items() if (shape := probe.shape(name)) is not None]
    return max(counts, default=None)


def check_positions(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `OptionError` if a table has too few rows for the source, or if the source is too long to check."""
    shell, weights = detach_weights(model)
    blueprint = Blueprint(shell, weights)
    tables = {t.name: tuple(t.dims) for t in shell.graph.initializer}
    lookups = [n for n in shell.graph.node if is_op(n, "Gather") and n.input[0] in tables and n.input[1] not in tables]
    inputs = {v.name: v for v in shell.graph.input}
    for token in _IDS:
        values = {
            name: np.full(shape, 1 if "mask" in name else token, onnx.helper.tensor_dtype_to_np_dtype(kind))
            for name, shape in shapes.items()
            if "int" in onnx.TensorProto.DataType.Name(kind := inputs[name].type.tensor_type.elem_type).lower()
        }
        probe = Probe(blueprint, shapes, values)
        for node in lookups:
            table, index = node.input[:2]
            axis = int_attribute(node, "axis")
            count = prod(probe.shape(index) or (0,))
            if count > _PAIRS and token != _IDS[0]:
                continue
            rows = probe.value(index) if count <= _LARGEST else None
            if count <= _LARGEST and (rows is None or not rows.size or int(rows.max()) < tables[table][axis]):
                continue
            takes = f"reads {count} rows (too many to check)" if rows is None else f"reads row {int(rows.max())}"
            sizes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise OptionError(
                f"a source of {sizes} {takes} of '{table}', which has {tables[table][axis]} rows: allow only shorter "
                "sources (--max-encoder, --maxShapes)"
            )
