"""Sizes that nothing says: the operator that makes them unknown, in words.

    counts = tokens per expert -> Range(0, counts[0]) -> Gather -> MatMul -> Concat over the experts -> next layer

Nothing says how long the result is, although it is the number of tokens in the end. TensorRT could not build it in
place either.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import producer
from trt_kvcache.importer.normalize.evidence.samples import Sample
from trt_kvcache.importer.planning.experts import EXPERTS

SIZES = (
    f"export sizes that follow from the number of tokens: {EXPERTS}; with transformers, give caches to "
    "DynamicCache(past, config=config), which counts the rows that it is given, and leave cumulative_length alone"
)
"""What to do about it."""


def why_unknown(tensor: gs.Tensor, sample: Sample) -> str:
    """Say why the shape of a tensor is unknown in a step."""
    name = tensor.name
    node = producer(tensor)
    while node is not None:
        unknown = [t for t in node.inputs if not t.is_empty() and sample.probe.shape(t.name) is None]
        before = producer(unknown[0]) if unknown else None
        if before is None:
            break
        node = before
    step = f"with {sample.past} tokens before {sample.length} new ones"
    if node is None:
        return f"nothing says the shape of '{name}' {step}"
    known = [(t.name, sample.probe.shape(t.name)) for t in node.inputs if not t.is_empty()]
    shapes = " and ".join(f"'{n}' {'' if shape is None else list(shape)}" for n, shape in known)
    return (
        f"nothing says the shape of '{name}' {step}: {node.op} '{node.name}' combines {shapes}, which do not "
        "fit each other, as where an exporter chose one side of a condition for good, or tokens or weights decide how "
        "much it gives"
    )
