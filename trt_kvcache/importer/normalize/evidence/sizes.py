"""Sizes that data decide: refused where new rows of a cache have them.

    counts = tokens per expert -> Range(0, counts[0]) -> Gather -> MatMul -> Concat over the experts -> next layer

Nothing says how long what comes behind is, although it is the number of tokens in the end. TensorRT could not build it
in place either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import producer
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.evidence.probe import COUNTS
from trt_kvcache.importer.normalize.evidence.reach import reach
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.planning.experts import EXPERTS

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Where", "And", "Or")


def check_sizes(candidates: Sequence[Candidate], samples: Samples) -> None:
    """Refuse new rows of a cache of which nothing says the shape because data decide it.

    Raises:
        UnsupportedModelError: naming the operator.
    """
    sample = samples.plain[0]
    for candidate in candidates:
        for update in candidate.updates:
            found = _decided_by_data(update, sample)
            if found is not None:
                node, operand = found
                _check_fit(node, sample)
                raise UnsupportedModelError(
                    f"{node.op} '{node.name}' gives as many numbers as '{operand.name}' says, which tokens or weights "
                    f"decide, and the new rows '{update.name}' of the cache '{candidate.past.name}' come behind it; "
                    f"supported are models whose sizes follow from the number of tokens: {EXPERTS}"
                )


def _check_fit(node: gs.Node, sample: Sample) -> None:
    """Refuse an operator that fails in a step, since the sizes of what it combines do not fit each other."""
    if node.op == "Tile":
        shape, times = sample.probe.shape(node.inputs[0].name), sample.probe.value(node.inputs[1].name)
        if shape is not None and times is not None and times.size != len(shape):
            raise UnsupportedModelError(
                f"{node.op} '{node.name}' repeats {list(shape)} by {times.tolist()}, which is not one number for each "
                "axis, so that the model as exported cannot run it; supported are models that run: write what it was "
                "made of in another way (repeat_interleave, by paddle2onnx: unsqueeze, expand and reshape)"
            )
    shapes = [sample.probe.shape(t.name) for t in node.inputs if not t.is_empty()]
    known = [shape for shape in shapes if shape is not None]
    if node.op not in _ELEMENTWISE or len(known) < len(shapes):
        return
    try:
        np.broadcast_shapes(*known)
    except ValueError:
        raise UnsupportedModelError(
            f"{node.op} '{node.name}' combines {' and '.join(str(list(shape)) for shape in known)} in a step of "
            f"{sample.length} tokens behind {sample.past}, which do not fit each other, so that the model as exported "
            "cannot run it; supported are steps of any number of tokens, with masks over all tokens, or over the new "
            "ones where a single one's is 0"
        ) from None


def _decided_by_data(tensor: gs.Tensor, sample: Sample) -> tuple[gs.Node, gs.Tensor] | None:
    """The operator that makes the shape of a tensor unknown, and the operand by which it does; None: none does."""
    while (node := producer(tensor)) is not None and sample.probe.shape(tensor.name) is None:
        before = [t for t in node.inputs if not t.is_empty() and sample.probe.shape(t.name) is None]
        if before:
            tensor = before[0]
            continue
        operands = node.inputs[:1] if node.op in COUNTS else [t for t in node.inputs if not t.is_empty()]
        for operand in operands:
            if sample.probe.value(operand.name) is None and _is_data(operand):
                return node, operand
        return None
    return None


def _is_data(tensor: gs.Tensor) -> bool:
    found = reach(tensor)
    return bool(found.weights or found.inputs)
