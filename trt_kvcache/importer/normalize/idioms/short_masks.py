"""Padding masks of caches that are cut to their newest rows: over the rows that are kept, not over all tokens."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import consumers
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.plan import OriginalRole

__all__ = ["find_short_masks"]


def find_short_masks(graph: gs.Graph, interface: Interface, samples: Samples) -> dict[str, int]:
    """Padding masks over the rows that are kept and the new ones, and not over all tokens: what fits says which.

    Args:
        graph: of the model. Not changed.
        interface: of it.
        samples: of it.

    Returns:
        Rows that are kept, by name of the mask.
    """
    found: dict[str, int] = {}
    for tensor in interface.of(OriginalRole.PADDING_MASK):
        mask = next(t for t in graph.inputs if t.name == tensor.name)
        for kept in samples.kept:
            sample = samples.step(2, kept + 3, samples.fixed_length or 2)
            given = sample.probe.value(tensor.name)
            if tensor.axes[-1] == "total" and given is not None and not _fits(mask, sample, given):
                if _fits(mask, sample, given[:, -kept - sample.length :]):
                    found[tensor.name] = kept
                break
    return found


def _fits(mask: gs.Tensor, sample: Sample, value: Array) -> bool:
    """Whether a mask of this size goes with what it meets."""
    probe = sample.probe.given({mask.name: value})
    pending, seen = [mask], {mask.name}
    while pending:
        for node in consumers(pending.pop()):
            inputs = [t for t in node.inputs if not t.is_empty()]
            if any(probe.value(t.name) is None for t in inputs):
                continue
            for output in node.outputs:
                if probe.value(output.name) is None:
                    return False
                if output.name not in seen:
                    seen.add(output.name)
                    pending.append(output)
    return True
