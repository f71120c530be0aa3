"""Masks over the new tokens alone: of models that take several tokens only while nothing is in the cache.

    Add(scores [B, N, S, P + S], mask [S, S])       becomes       Add(scores, Pad(mask) [S, P + S])

With P = 0 both are the same; with S = 1 the mask is a 0, that is added to all scores or to the last. In all other steps
the sizes do not fit and the model as exported fails, so that nothing says otherwise: every token in the cache is
visible there, as it is to a single one. OpenAI's Whisper masks so, and what is exported of it. The check gives such an
original its tokens one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT64, Emitter, is_op, producer
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.views import is_float_cast

__all__ = ["SINGLY", "pad_square_masks"]

SINGLY = (
    "the masks of the model as exported fit several tokens only while nothing is in its caches; here every step may "
    "bring several, each of which sees those before it"
)


def pad_square_masks(graph: gs.Graph, samples: Samples) -> bool:
    """Let, in place, masks over the new tokens be masks over all; returns if there was one."""
    if not any(_is_chunk(sample) for sample in samples.plain):
        return False
    emit = Emitter(graph)
    found = [pair for node in graph.nodes if is_op(node, "Softmax") for pair in _masked(node, samples)]
    for node, place in found:
        mask = node.inputs[place]
        value = samples.plain[0].probe.value(mask.name)
        assert value is not None
        node.inputs[place] = _padded(emit, mask, node.inputs[1 - place], value.ndim)
    return bool(found)


def _is_chunk(sample: Sample) -> bool:
    """True if a step brings several tokens behind others."""
    return sample.past > 0 and sample.length > 1


def _masked(softmax: gs.Node, samples: Samples) -> Iterator[tuple[gs.Node, int]]:
    """The Add before a softmax whose operand at this place is a mask over the new tokens."""
    node = producer(softmax.inputs[0])
    while node is not None and (is_op(node, "Identity") or is_float_cast(node)):
        node = producer(node.inputs[0])
    if node is None or not is_op(node, "Add"):
        return
    for place in (0, 1):
        scores = node.inputs[1 - place]
        mask = node.inputs[place]
        if all(_is_square(mask, sample) and _are_scores(scores, sample) for sample in samples.plain):
            yield node, place
            return


def _is_square(mask: gs.Tensor, sample: Sample) -> bool:
    value = sample.probe.value(mask.name)
    if value is None or value.ndim < 2 or value.shape[-2:] != (sample.length,) * 2:
        return False
    return sample.length > 1 or bool((value == 0).all())


def _are_scores(scores: gs.Tensor, sample: Sample) -> bool:
    """True if a tensor is as long as all tokens, where a mask that does not fit has not made it unknown."""
    shape = sample.probe.shape(scores.name)
    return _is_chunk(sample) if shape is None else shape[-2:] == (sample.length, sample.total)


def _padded(emit: Emitter, mask: gs.Tensor, scores: gs.Tensor, rank: int) -> gs.Tensor:
    """A mask with zeros in front, for the tokens in the cache."""
    keys, new = (emit.op("Shape", [t], "keys", INT64, start=-1) for t in (scores, mask))
    past = emit.op("Sub", [keys, new], "past", INT64)
    pads = emit.op("Concat", [emit.ints([0] * (rank - 1)), past, emit.ints([0] * rank)], "pads", INT64, axis=0)
    made: gs.Tensor = emit.op("Pad", [mask, pads], "mask_of_all")
    return made
