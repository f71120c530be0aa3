"""Take a guard for queries that see no key into the attention that it guards.

    Where(ReduceSum(mask visible) < 1, 0, attention)        becomes        attention

PyTorch's exporter writes it because its attention gives zero there. ONNX's gives zero as well where the mask is bool,
and a causal query sees its own key at least. Left in the graph, the guard would count the keys of a mask that is gone.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import BOOL, consumers, elem_type, is_op
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Visibility


def unguarded(output: gs.Tensor, visibility: Visibility, samples: Samples) -> gs.Tensor:
    """What an attention gives after its guard; `output` itself where there is none.

    Args:
        output: the result of the attention as exported.
        visibility: which keys its queries see.
        samples: of the model as exported.
    """
    readers = consumers(output)
    if len(readers) != 1 or not is_op(readers[0], "Where") or readers[0].inputs[2] is not output:
        return output
    condition, zeros, _ = (samples.plain[0].probe.value(t.name) for t in readers[0].inputs)
    if zeros is None or np.any(zeros != 0) or (condition is None and visibility.bias is None):
        return output
    masked = visibility.own is not None and elem_type(visibility.own) == BOOL
    if not (visibility.causal or visibility.by_position or masked):
        return output
    return readers[0].outputs[0]
