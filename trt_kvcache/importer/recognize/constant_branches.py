"""Replace indices and conditions that are the same in every step with constants.

    repeat_interleave(cos, 2)       NonZero(Range(n) < 2) -> GatherND          becomes      constant -> GatherND
    LongRoPE                        If(Shape(mask)[1] > 128, long, short)      becomes      short, up to 128 tokens
    states of transformers.js       If(Shape(x)[1] == 1, one, several)         becomes      several

TorchScript writes the first form if n is a dimension that never changes. TensorRT for RTX has no NonZero. If the model
always takes the same branch, removing the If also removes inputs that only its condition reads, such as the mask. A
branch for steps of one token is dropped: the other branch must give the same numbers, and the check compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from trt_kvcache.importer.protos import is_op
from trt_kvcache.importer.recognize.sample_steps import Sample, Samples
from trt_kvcache.importer.simplify import splice_body
from trt_kvcache.importer.steps.probe import Array

_LARGEST = 1 << 16  # elements of a constant


def fold_fixed(samples: Samples) -> onnx.ModelProto | None:
    """Replace each NonZero that is the same in every step with a constant, and each fixed If with one of its branches.

    An If is fixed if it takes the same branch in every step, or in every step of several tokens.

    Returns a new model, or None if the function replaces nothing.
    """
    graph = samples.blueprint.model.graph
    outputs = {value.name for value in graph.output}
    names = {node.output[0] for node in graph.node if is_op(node, "NonZero") and node.output[0] not in outputs}
    chosen = {node.input[0] for node in graph.node if is_op(node, "If")}
    names |= chosen
    # The check runs only one size of an axis of unknown meaning. So a value that depends on such an axis is not fixed.
    batch, past, length = samples.few[0].batch, samples.few[0].past, samples.few[0].length
    steps = (*samples.plain, *samples.wrapped, samples.step(batch, past, length, other=None)) if names else ()
    fixed = {name: value for name in names if (value := _same(name, steps)) is not None}
    several = [step for step in steps if step.length > 1]
    fixed |= {n: value for n in chosen - fixed.keys() if several and (value := _same(n, several)) is not None}
    if not fixed:
        return None
    model = onnx.ModelProto()
    model.CopyFrom(samples.blueprint.model)
    graph = model.graph
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if is_op(node, "If") and node.input[0] in fixed:
            wanted = "then_branch" if fixed[node.input[0]].reshape(-1)[0] else "else_branch"
            splice_body(graph, index, next(a.g for a in node.attribute if a.name == wanted))
        elif is_op(node, "NonZero") and node.output[0] in fixed:
            graph.initializer.append(numpy_helper.from_array(fixed[node.output[0]], node.output[0]))
            del graph.node[index]
    return model


def _same(name: str, steps: Sequence[Sample]) -> Array | None:
    """The value of a small tensor, if it is the same in all steps."""
    first, *others = (step.probe.value(name) for step in steps)
    if first is None or first.size > _LARGEST or first.dtype.kind not in "iub":
        return None
    return first if all(value is not None and np.array_equal(first, value) for value in others) else None
