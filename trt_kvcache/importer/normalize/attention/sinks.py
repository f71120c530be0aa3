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
from trt_kvcache.importer.graph import dims, input_or_none, is_op, producer
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
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
    axes = input_or_none(largest, 1)
    if axes is not None and not samples.blueprint.is_constant(axes.name):
        return False
    shapes = [sample.probe.shape(node.inputs[1].name) for sample in samples.plain]
    return all(shape is not None and shape[-1:] == (1,) for shape in shapes)  # one number for all keys of a query


def read_sinks(name: str, column: gs.Tensor, heads: int, samples: Samples) -> Sinks:
    """Prove that a tensor is a logit for each head, whatever the text is.

    Args:
        name: of the attention, for messages.
        column: ``[B, H, S, 1]``, beside the scores.
        heads: H.
        samples: of the model as exported.

    Raises:
        UnsupportedModelError: it is something else.
    """
    source = column
    while (node := producer(source)) is not None and (is_op(node, *_MOVES) or is_float_cast(node)):
        source = node.inputs[0]
    size = int(np.prod([d if isinstance(d, int) else 0 for d in dims(source) or (0,)]))
    if isinstance(source, gs.Constant) and size == heads:
        numbers = np.arange(1, heads + 1, dtype=np.float32).reshape(source.shape)
        for sample in samples.plain:
            value = sample.probe.given({source.name: numbers}).value(column.name)
            _check(name, column, value, numbers.reshape(-1), sample)
        return source
    first = samples.plain[0].probe.value(column.name)
    logits = np.zeros(0) if first is None or first.ndim != 4 else np.broadcast_to(first[0, :, 0, 0], heads)

    def stays(sample: Sample) -> None:
        _check(name, column, sample.probe.value(column.name), logits, sample)

    samples.hold(stays)
    return logits


def _check(name: str, column: gs.Tensor, value: Array | None, logits: Array, sample: Sample) -> None:
    rows = (sample.batch, len(logits), sample.length, 1)
    if value is not None and value.shape == rows and bool(np.all(value == logits[:, None, None])):
        return
    raise UnsupportedModelError(
        f"'{column.name}', which stands beside the scores of '{name}', is no sink with {sample.past} tokens in the "
        f"cache and {sample.length} new ({'no value' if value is None else f'shape {list(value.shape)}'}, expected "
        f"{list(rows)}); supported is one logit for each head, a weight or a constant, that does not depend on the text"
    )


def drops_sink(node: gs.Node, samples: Samples) -> bool:
    """Whether a Slice of probabilities takes all of them but the last, which is the sink's."""
    bounds = [input_or_none(node, index) for index in range(1, 5)]
    for sample in samples.plain:
        rank = len(sample.probe.shape(node.inputs[0].name) or ())
        values = [None if t is None else sample.probe.value(t.name) for t in bounds]
        if any(t is not None and (v is None or v.size != 1) for t, v in zip(bounds, values, strict=True)):
            return False
        start, end, axis, step = (None if v is None else int(v.reshape(())) for v in values)
        columns = (sample.probe.shape(node.inputs[0].name) or (0,))[-1]
        taken = range(columns)[slice(start, end, step)]
        if axis not in (-1, rank - 1) or taken != range(columns - 1):
            return False
    return True
