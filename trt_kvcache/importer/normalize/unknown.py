"""Reasons why nothing says the shape of a tensor in a step."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import is_op, producer
from trt_kvcache.importer.normalize.evidence.probe import Shape
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.planning.experts import EXPERTS

__all__ = ["why_apart", "why_unfit", "why_unknown"]

_SIZES = (
    f"export sizes that follow from the number of tokens: {EXPERTS}; with transformers, give caches to "
    "DynamicCache(past, config=config), which counts the rows that it is given, and leave cumulative_length alone"
)
_ONE = (
    "expand what is there once to the batch, or export with a batch of 1; rows of a trained prefix are given as the "
    "past of the first step"
)
_BROADCAST = ("Add", "And", "Mul", "Sub", "Where")  # what a mask meets scores by
_FITTED = ("Add", "Div", "Expand", "MatMul", "Mul", "Sub", "Unsqueeze", "Where")  # operators whose inputs have to fit
_ANY = "export with a past of any length P, and masks of P + S keys"


def why_unfit(graph: gs.Graph, samples: Samples) -> str:
    """Words on sizes for which the model does not run in a step after others; empty where it may run."""
    for sample in (step for step in samples.plain if step.past):
        for node in (n for n in graph.nodes if is_op(n, "Concat", *_BROADCAST)):
            shapes = [sample.probe.shape(t.name) for t in (*node.inputs, *node.outputs) if not t.is_empty()]
            if shapes[-1] is not None or None in shapes[:-1]:
                continue
            why, advice = why_unknown(node.outputs[0], sample)
            if advice in (_ONE, _ANY):
                return f"{why}; {advice}"
    return ""


def why_unknown(tensor: gs.Tensor, sample: Sample) -> tuple[str, str]:
    """The operator that makes the shape of a tensor unknown in a step, in words, and what to do.

        counts = tokens per expert -> Range(0, counts[0]) -> Gather -> MatMul -> Concat over the experts -> next layer

    Nothing says how long the result is, although it is the number of tokens in the end.
    """
    node = _first_unknown(tensor, sample)
    step = f"nothing says the shape of '{tensor.name}' with {sample.past} tokens before {sample.length} new ones"
    if node is None:
        return step, _SIZES
    known = [(t.name, sample.probe.shape(t.name)) for t in node.inputs if not t.is_empty()]
    said = f"{step}: {_combined(node, sample)}"
    differing = _differing_sizes([shape for _, shape in known if shape])
    if is_op(node, "Concat") and {1, sample.batch} in differing:
        return f"{said}: it joins what is there once to {sample.batch} sequences", _ONE
    # The shapes of a Concat are apart along its own axis, too.
    fixed = [max(sizes) for sizes in differing if sample.total in sizes and max(sizes) > sample.total]
    if fixed and not is_op(node, "Concat"):
        total = f"{sample.past} tokens and {sample.length} new ones are {sample.total} keys"
        return f"{said}: {total}, and the model has {fixed[0]} in each step, as with a past of {fixed[0]} - S", _ANY
    chosen = (
        "as where an exporter chose one side of a condition for good, or tokens or weights decide how much it gives"
    )
    return f"{said}, {chosen}", _SIZES


def why_apart(tensor: gs.Tensor, sample: Sample) -> str:
    """Words on the operator whose inputs do not fit each other, so that a tensor has no shape; empty: none is known."""
    node = _first_unknown(tensor, sample)
    if node is None or not is_op(node, *_FITTED) or any(sample.probe.shape(t.name) is None for t in node.inputs):
        return ""
    return f"{_combined(node, sample)}, with {sample.past} tokens before {sample.length} new ones"


def _first_unknown(tensor: gs.Tensor, sample: Sample) -> gs.Node | None:
    """The first operator on the way to a tensor without a shape that makes one of shapes that are known."""
    node, unknown = producer(tensor), [tensor]
    while unknown and (before := producer(unknown[0])) is not None:
        node = before
        unknown = [t for t in node.inputs if not t.is_empty() and sample.probe.shape(t.name) is None]
    return node


def _combined(node: gs.Node, sample: Sample) -> str:
    known = [(t.name, sample.probe.shape(t.name)) for t in node.inputs if not t.is_empty()]
    shapes = " and ".join(f"'{n}' {'' if shape is None else list(shape)}" for n, shape in known)
    return f"{node.op} '{node.name}' combines {shapes}, which do not fit each other"


def _differing_sizes(shapes: Sequence[Shape]) -> list[set[int]]:
    """Sizes of one axis, counted from the last, that are not the same for two shapes."""
    rank = max(map(len, shapes), default=0)
    sizes = [{shape[-axis] for shape in shapes if len(shape) >= axis} for axis in range(1, rank + 1)]
    return [pair for pair in sizes if len(pair) == 2]
