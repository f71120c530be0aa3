"""Attention sinks, as gpt-oss has them: a logit per head beside the scores, whose share of the softmax goes nowhere.

    x = Concat(scores [B, H, S, T], Expand(sinks [H]) [B, H, S, 1])
    Softmax(x - ReduceMax(x))[..., :T] @ V

A sink of 0 in every head is ONNX Runtime's smooth_softmax. ONNX's Attention has no sinks: until it is lowered, an
Attention of the importer carries them as one input more, `SINKS`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import input_or_none, is_op, producer
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.views import is_float_cast

Array = npt.NDArray[Any]
Sinks: TypeAlias = "gs.Tensor | Array"
"""The logits ``[H]``: a weight with as many elements, in whatever shape, or numbers."""

_MOVES = ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Transpose", "Slice")


def joined(tensor: gs.Tensor, samples: Samples) -> gs.Node | None:
    """The Concat of scores and sinks that a Softmax is over, or None.

    Args:
        tensor: what the Softmax reads. That its largest number is taken off before makes no difference.
        samples: of the model as exported.
    """
    node = producer(peeled(tensor, samples))
    if node is None or not is_op(node, "Concat") or len(node.inputs) != 2:
        return None
    shape = samples.plain[0].probe.shape(node.outputs[0].name)
    return node if int(node.attrs["axis"]) in (-1, len(shape or ()) - 1) else None


def peeled(tensor: gs.Tensor, samples: Samples) -> gs.Tensor:
    """A tensor before its largest number in each row was taken off, which a Softmax does itself."""
    while (node := producer(tensor)) is not None:
        if not is_op(node, "Identity") and not is_float_cast(node) and not _takes_off_largest(node, samples):
            break
        tensor = node.inputs[0]
    return tensor


def _takes_off_largest(node: gs.Node, samples: Samples) -> bool:
    largest = producer(node.inputs[1]) if is_op(node, "Sub") else None
    if largest is None or not is_op(largest, "ReduceMax") or largest.inputs[0] is not node.inputs[0]:
        return False
    shape = samples.plain[0].probe.shape(node.inputs[1].name)
    return shape is not None and shape[-1:] == (1,)  # one number for all keys of a query


def read_sinks(name: str, column: gs.Tensor, heads: int, samples: Samples) -> Sinks:
    """Guess the logit of each head.

    Args:
        name: of the attention, for messages.
        column: ``[B, H, S, 1]``, beside the scores.
        heads: H.
        samples: of the model as exported.

    Raises:
        UnsupportedModelError: there are no numbers that do not depend on the text.
    """
    source = column
    while (node := producer(source)) is not None and (is_op(node, *_MOVES) or is_float_cast(node)):
        source = node.inputs[0]
    if isinstance(source, gs.Constant) and int(np.prod(source.shape)) == heads:
        return source
    value = samples.plain[0].probe.value(column.name)
    if value is None or value.ndim != 4 or value.shape[1] not in (1, heads):
        raise UnsupportedModelError(
            f"'{column.name}', which stands beside the scores of '{name}', is no sink "
            f"({'no value' if value is None else f'shape {list(value.shape)}'}); supported is one logit for each head, "
            "a weight or a constant, that does not depend on the text"
        )
    return np.broadcast_to(value[0, :, 0, 0], heads)


def drops_sink(node: gs.Node, samples: Samples) -> bool:
    """Whether a Slice of probabilities takes all of them but the last, which is the sink's."""
    sample = samples.plain[0]
    shapes = [sample.probe.shape(t.name) or (0,) for t in (node.inputs[0], node.outputs[0])]
    starts = input_or_none(node, 1)
    start = None if starts is None else sample.probe.value(starts.name)
    return shapes[1] == (*shapes[0][:-1], shapes[0][-1] - 1) and start is not None and not start.any()
