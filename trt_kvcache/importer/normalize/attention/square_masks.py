"""Masks over the new tokens alone: of models that take several tokens only while nothing is in the cache.

    Add(scores [B, N, S, P + S], mask [S, S])       becomes       Add(scores, Pad(mask) [S, P + S])

With P = 0 both are the same; with S = 1 the mask is a 0, that is added to all scores or to the last. In all other steps
the sizes do not fit and the model as exported fails, so that nothing says otherwise: every token in the cache is
visible there, as it is to a single one. OpenAI's Whisper masks so, and what is exported of it. That several tokens are
what they are one by one holds if nothing else follows from how many come at once, which is proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import INT64, NAME_PREFIX, Emitter, is_op, producer
from trt_kvcache.importer.normalize.evidence.probe import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.views import is_float_cast

__all__ = ["SINGLY", "hold_by_position", "pad_square_masks"]

SINGLY = (
    "the masks of the model as exported fit several tokens only while nothing is in its caches; here every step may "
    "bring several, each of which sees those before it"
)

_HINT = "mask_of_all"
_COMBINES = ("Where", "Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "MatMul")


def pad_square_masks(graph: gs.Graph, samples: Samples) -> bool:
    """Let, in place, masks over the new tokens be masks over all.

    Args:
        graph: of the model as exported.
        samples: of the same model.

    Returns:
        Whether there was one.
    """
    if not any(_is_chunk(sample) for sample in samples.plain):
        return False
    emit = Emitter(graph)
    found = [pair for node in graph.nodes if is_op(node, "Softmax") for pair in _masked(node, samples)]
    for node, place in found:
        mask = node.inputs[place]
        for sample in _steps(samples):
            _check(mask.name, sample)
        value = samples.plain[0].probe.value(mask.name)
        assert value is not None
        node.inputs[place] = _padded(emit, mask, node.inputs[1 - place], value.ndim)
    return bool(found)


def hold_by_position(graph: gs.Graph, samples: Samples) -> None:
    """See to it that what tokens are computed with is the same for all, or follows from their position alone.

    Args:
        graph: of the model with such masks over all tokens.
        samples: of the same model.

    Raises:
        UnsupportedModelError: something follows from how many come at once.
    """
    whole = samples.step(1, 0, samples.capacity)
    for node in graph.nodes:
        if not is_op(node, *_COMBINES) or whole.probe.value(node.outputs[0].name) is not None:
            continue
        for tensor in node.inputs:
            is_mask = tensor.is_empty() or tensor.name.startswith(NAME_PREFIX + _HINT)
            value = None if is_mask else whole.probe.value(tensor.name)
            if value is None or samples.blueprint.is_constant(tensor.name):
                continue
            axes = [axis for axis, size in enumerate(value.shape) if size == samples.capacity > 1]
            for sample in _steps(samples):
                _check_by_position(str(node.name), str(tensor.name), value, axes, sample)


def _steps(samples: Samples) -> list[Sample]:
    """Steps of one sequence, after several pasts and of several lengths."""
    lengths = [samples.fixed_length] if samples.fixed_length else [1, 2, 4]
    return [samples.step(1, p, s) for s in lengths for p in (0, 1, 5) if p + s <= samples.capacity]


def _check_by_position(node: str, name: str, whole: Array, axes: Sequence[int], sample: Sample) -> None:
    value = sample.probe.value(name)
    places = range(sample.past, sample.total)
    wanted = [whole, *(np.take(whole, places, axis) for axis in axes)]
    if value is None or not any(v.shape == value.shape and np.array_equal(v, value) for v in wanted):
        raise UnsupportedModelError(
            f"'{node}' computes tokens with '{name}', which is not the same with {sample.past} in the cache and "
            f"{sample.length} new as for each of them alone, and the masks fit several tokens only while nothing is in "
            "the cache; supported are such models if they do the same with one token as with several: export masks "
            "over all tokens"
        )


def _is_chunk(sample: Sample) -> bool:
    """Whether a step brings several tokens behind others."""
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
    """Whether a tensor is as long as all tokens, where a mask that does not fit has not made it unknown."""
    shape = sample.probe.shape(scores.name)
    return _is_chunk(sample) if shape is None else shape[-2:] == (sample.length, sample.total)


def _check(name: str, sample: Sample) -> None:
    value = sample.probe.value(name)
    if value is None or value.shape[-2:] != (sample.length,) * 2 or (sample.length == 1 and (value != 0).any()):
        raise UnsupportedModelError(
            f"the mask '{name}' is over the new tokens alone, and with {sample.length} of them "
            f"{'unknown' if value is None else list(value.shape)}; supported are masks [S, S], and 0 for a single one"
        )
    if np.triu(value == 0, 1).any():
        raise UnsupportedModelError(
            f"the mask '{name}' is over the new tokens alone, and does not hide later ones from earlier ones of "
            f"{sample.length}, as it is when they come one by one; supported are masks [S, S] that are causal"
        )


def _padded(emit: Emitter, mask: gs.Tensor, scores: gs.Tensor, rank: int) -> gs.Tensor:
    """A mask with zeros in front, for the tokens in the cache."""
    keys, new = (emit.op("Shape", [t], "keys", INT64, start=-1) for t in (scores, mask))
    past = emit.op("Sub", [keys, new], "past", INT64)
    pads = emit.op("Concat", [emit.ints([0] * (rank - 1)), past, emit.ints([0] * rank)], "pads", INT64, axis=0)
    made: gs.Tensor = emit.op("Pad", [mask, pads], _HINT)
    return made
