"""Tables that an encoder looks up by positions: a lookup behind their end gives anything, and TensorRT says nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.index_limits import table_rows
from trt_kvcache.importer.normalize.blueprint import Blueprint
from trt_kvcache.importer.normalize.probe import Probe
from trt_kvcache.importer.prepare import detach_weights
from trt_kvcache.importer.protos import is_op, shape_of

__all__ = ["check_positions", "most_ids"]

_IDS = (0, 1, 2, 3)
"""Of a whole source: exporters pad with one of the first, which has a place of its own."""


def most_ids(model: onnx.ModelProto) -> int | None:
    """Token ids are below; None: nothing is known to be looked up by an input."""
    rows = [table_rows(model, v.name) for v in model.graph.input if len(shape_of(v) or ()) == 2]
    return min((n for n in rows if n is not None), default=None)


def check_positions(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Look up the positions of a source.

    Args:
        model: of the encoder, flat; not changed.
        shapes: of all its inputs.

    Raises:
        OptionError: a table ends before the source does.
    """
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
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            rows, found = tables[node.input[0]][axis], probe.value(node.input[1])
            if found is not None and found.size and int(found.max()) >= rows:
                sizes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
                raise OptionError(
                    f"a source of {sizes} takes row {int(found.max())} of '{node.input[0]}', which has {rows}: allow "
                    "shorter ones (--max-encoder, --maxShapes)"
                )
