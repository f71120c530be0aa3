"""Positions that are counted from the past and from the tokens of a step: pads have none of their own, as in M2M-100.

    counted = CumSum(tokens != pad, axis=1)  [B, S]
    Add(counted, P)               becomes               Add(counted, write_indices  [B, 1])

The tokens stay what they are: pads among the new tokens are counted as before, and those of earlier steps are rows of
the cache as before. So each sequence has the positions that it has in the model as exported with a past of its length.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT32, INT64, elem_type, is_op, producer, small_constant
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples

NOTE = (
    "positions are counted with the tokens of a step, and skip some, such as pads; as in the model as exported, those "
    "of earlier steps count all the same, so that a text with pads in it depends on how it is split into steps"
)
_IDS = (0, 1, 2, 3)  # where pads and such are, mostly
_LARGEST_ID = 1 << 20
_NEAR = 200  # nodes that are looked at for ids


def count_per_row(node: gs.Node, canonical: Canonical, samples: Samples) -> set[int]:
    """Let a node add the length of each sequence's own past to ``[B, S]``, if it provably adds P to numbers of tokens.

    Args:
        node: anything; its inputs are replaced.
        canonical: gives the lengths.
        samples: what is proven on.

    Returns:
        Token ids that count in some other way than most, as far as they are seen; empty where nothing was done.
    """
    if not is_op(node, "Add", "Sub") or elem_type(canonical.tokens) not in (INT32, INT64):
        return set()
    looked_at = samples.twins
    known = [all(s.probe.value(t.name) is not None for s in looked_at) for t in node.inputs]
    if sorted(known) != [False, True]:
        return set()
    place = known.index(True)
    tensor, ids = node.inputs[place], _ids(node)
    offset = _offset(tensor, looked_at)
    if offset is None or not all(_is_counted(node, s, canonical.tokens.name, sorted(ids)) for s in looked_at):
        return set()
    emit = canonical.emit
    count = emit.op("Unsqueeze", [canonical.write_indices, emit.ints([1])], "first_position", INT64)
    if offset:
        count = emit.op("Add", [count, emit.ints(offset)], "shifted_position", INT64)
    kind = elem_type(tensor) or looked_at[0].probe.elem_type(tensor.name)
    if kind not in (None, INT64):
        count = emit.op("Cast", [count], "position_cast", kind, to=kind)
    node.inputs[place] = count
    return ids


def draw(ids: Collection[int], shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Random tokens, int64."""
    return rng.choice(sorted(ids), shape)


def _is_counted(node: gs.Node, sample: Sample, tokens: str, ids: list[int]) -> bool:
    """Whether a node makes integers ``[B, S]`` of tokens, lengths and constants alone."""
    given = sample.probe.given({tokens: np.resize(ids, (sample.batch, sample.length)).astype(np.int64)})
    value = given.value(node.outputs[0].name)
    return value is not None and value.shape == (sample.batch, sample.length) and value.dtype.kind in "iu"


def _offset(tensor: gs.Tensor, samples: tuple[Sample, ...]) -> int | None:
    """What is added to P in a tensor of one element; None where it holds something else."""
    value = samples[0].probe.value(tensor.name)
    if value is None or value.size != 1 or value.dtype.kind not in "iu":
        return None
    offset = int(value.item()) - samples[0].past
    return offset if all(_holds(tensor, offset, s) for s in samples) else None


def _holds(tensor: gs.Tensor, offset: int, sample: Sample) -> bool:
    value = sample.probe.value(tensor.name)
    return value is not None and value.size == 1 and value.item() == sample.past + offset


def _ids(node: gs.Node) -> set[int]:
    """Integers that take part in what a node computes, as far as they may be tokens."""
    found, pending, seen = set(_IDS), [node], {id(node)}
    while pending and len(seen) < _NEAR:
        for tensor in pending.pop().inputs:
            value, maker = small_constant(tensor, 16), producer(tensor)
            if value is not None and value.dtype.kind in "iu":
                found.update(int(n) for n in value.flat if 0 <= n < _LARGEST_ID)
            elif maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                pending.append(maker)
    return found
