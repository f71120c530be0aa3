"""Take a guard for queries that see no key into the attention that it guards.

    Where(ReduceSum(mask visible) < 1, 0, attention)        becomes        attention

PyTorch's exporter writes it because its attention gives zero there. ONNX's gives zero as well where the mask is bool,
and a causal query sees its own key at least. Left in the graph, the guard would count the keys of a mask that is gone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import consumers, elem_type, is_op
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Visibility

Array = npt.NDArray[Any]


def unguarded(output: gs.Tensor, visibility: Visibility, samples: Samples) -> gs.Tensor:
    """What an attention gives behind its guard; `output` itself where there is none that can be proven.

    Args:
        output: the result of the attention as exported.
        visibility: which keys its queries see.
        samples: of the model as exported.
    """
    readers = consumers(output)
    if len(readers) != 1 or not is_op(readers[0], "Where") or readers[0].inputs[2] is not output:
        return output
    condition, zeros, _ = readers[0].inputs
    given = samples.plain[0].probe.value(zeros.name)
    if given is None or np.any(given != 0):
        return output
    masked = visibility.own is not None and elem_type(visibility.own) == onnx.TensorProto.BOOL
    if not (visibility.causal or visibility.by_position or masked):
        return output
    if not all(_is_guard(condition, visibility, sample) for sample in samples.plain):
        return output
    return readers[0].outputs[0]


def _is_guard(condition: gs.Tensor, visibility: Visibility, sample: Sample) -> bool:
    """Whether a condition is true exactly for the queries that see no key."""
    own = visibility.own
    if own is None:
        value = _value(condition, visibility, sample)
        return value is not None and not value.any()
    mask = sample.own[own.name].copy()
    mask[..., 0, :] = False  # a query that sees nothing
    value = sample.probe.given({own.name: mask}).value(condition.name)
    blind = ~mask.any(-1, keepdims=True)
    return value is not None and value.shape == blind.shape and bool(np.all(value == blind))


def _value(condition: gs.Tensor, visibility: Visibility, sample: Sample) -> Array | None:
    """The condition; a position bias takes part with numbers in place of its weights, which must not matter."""
    if visibility.bias is None:
        return sample.probe.value(condition.name)
    name = visibility.bias.table.name
    shape = sample.probe.shape(name)
    kind = sample.probe.elem_type(name)
    if shape is None or kind is None:
        return None
    tables = [np.full(shape, number).astype(onnx.helper.tensor_dtype_to_np_dtype(kind)) for number in (-5, 0, 7)]
    values = [sample.probe.given({name: table}).value(condition.name) for table in tables]
    first = values[0]
    same = first is not None and all(v is not None and np.array_equal(v, first) for v in values)
    return first if same else None
