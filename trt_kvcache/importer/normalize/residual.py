"""Free what is left of a graph from the length of its past.

Once caches have a fixed capacity and attention is canonical, nothing else may know how long the text is, but for the
positions of the new tokens, which some exporters count from the length of a cache:

    Range(P, P + S) -> Unsqueeze -> [1, S]          becomes          write_indices + arange(S)  [B, S]

and a constant beside them. For those that look up a table at once, see `tables`; for those that skip pads, `counted`.
Whatever else still depends on it is refused by name. Which tensors depend on it is seen from samples that differ in
nothing but P.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions import load
from trt_kvcache.importer.graph import consumers, contains, elem_type, is_op, made_of_constants, replace_uses
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.counted import count_per_row
from trt_kvcache.importer.normalize.evidence.fixed import chosen_by_length
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.tables import gather_rows, shifted_positions
from trt_kvcache.importer.plan import OriginalRole

if TYPE_CHECKING:
    from trt_kvcache.importer.extensions.latent_attention import Positioned

Array = npt.NDArray[Any]

_FAR = 1 << 31  # no position
_COUNTED = (OriginalRole.PAST_LENGTH, OriginalRole.PADDING_MASK)


def free_positions(graph: gs.Graph, canonical: Canonical, interface: Interface, samples: Samples) -> set[int]:
    """Replace positions counted from the past, and refuse whatever else still depends on its length.

    Args:
        graph: its caches and attention are canonical already; dead nodes are gone.
        canonical: of the graph.
        interface: of the model as exported.
        samples: of the model as exported.

    Returns:
        Token ids that positions are counted with, such as that of pads; empty where tokens have no part in positions.

    Raises:
        UnsupportedModelError: a live node computes with the length of the past.
    """
    pair = samples.twins

    @cache
    def positioned() -> Positioned:
        made: Positioned = load("latent_attention").Positioned(graph, canonical, interface, samples)
        return made

    queue = [t for t in graph.inputs if t.name in interface.inputs and _is_source(interface, t.name)]
    updates = [n for n in graph.nodes if is_op(n, "TensorScatter")]
    caches = [t for n in updates for t in (n.inputs[0], n.outputs[0])]
    queue += [n.outputs[0] for n in updates]
    seen: set[str] = set()
    ids: set[int] = set()
    while queue:
        tensor = queue.pop(0)
        for node in consumers(tensor):
            if is_op(node, "TensorScatter") or (is_op(node, "Attention") and contains(node.inputs[1:], tensor)):
                continue
            if contains(caches, tensor) and is_op(node, "Transpose", "Reshape"):
                caches += node.outputs  # a view is as long
                queue += node.outputs
                continue
            if contains(caches, tensor) and not is_op(node, "Shape", "Size"):
                continue  # who reads what a cache holds is checked elsewhere
            for output in node.outputs:
                if output.name in seen or output.is_empty():
                    continue
                seen.add(output.name)
                if _is_cancelled(output, pair):
                    continue
                if counted := count_per_row(node, canonical, samples):
                    ids |= counted
                elif _may_look_up(node) and positioned().is_looked_up(node):
                    continue
                elif _follow(graph, node, output, canonical, pair, samples, positioned):
                    queue.append(output)
    graph.cleanup().toposort()
    return ids


def check_padding(graph: gs.Graph, interface: Interface) -> None:
    """Refuse a padding mask that something else than attention reads: who fills it from now on may make it longer.

    Args:
        graph: canonical; dead nodes are gone.
        interface: of the model as exported.

    Raises:
        UnsupportedModelError: naming the reader.
    """
    names = {t.name for t in interface.of(OriginalRole.PADDING_MASK)}
    for tensor in (t for t in graph.inputs if t.name in names):
        for node in consumers(tensor):
            if not is_op(node, "Attention", "Shape"):
                raise UnsupportedModelError(
                    f"{node.op} '{node.name}' reads the mask '{tensor.name}' and is no attention over a cache; "
                    "supported are masks that only attention and positions are made of"
                )


def _may_look_up(node: gs.Node) -> bool:
    """Whether a node may take rows by the caller's positions of a table that is as long as the text."""
    return is_op(node, "Gather") and not any(made_of_constants(tensor) for tensor in node.inputs)


def _is_source(interface: Interface, name: str) -> bool:
    role = interface.inputs[name].role
    return role in _COUNTED or role in (OriginalRole.GROWING_CACHE, OriginalRole.FIXED_CACHE)


def _follow(
    graph: gs.Graph,
    node: gs.Node,
    output: gs.Tensor,
    canonical: Canonical,
    pair: tuple[Sample, Sample],
    samples: Samples,
    positioned: Callable[[], Positioned],
) -> bool:
    """Whether what is computed from `output` still has to be looked at."""
    before, after = (s.probe.value(output.name) for s in pair)
    if before is None or after is None:
        if gather_rows(graph, node, canonical, samples) or positioned().meets_tokens(node):
            return False
        if positioned().holds(output):  # rows of a table that is too large to be evaluated
            return True
        if is_op(node, "If"):
            raise chosen_by_length(node, output, samples)
        raise UnsupportedModelError(
            f"{node.op} '{node.name}' computes '{output.name}' from the length of the cache together with weights or "
            "tokens; supported are caches that only attention reads, and positions counted from their length"
        )
    offset = _offset(output, samples)
    if offset is not None:
        # As late as possible: what follows may still spread [1, S] over the batch, which positions per row are already.
        after_all = [t for n in consumers(output) for t in n.outputs]
        if after_all and all(_offset(t, samples) is not None for t in after_all):
            return True
        if not _keeps_shapes(graph, output, offset, pair) and positioned().holds(output):
            return True  # of positions per row, what is made of them row by row may fit
        replace_uses(output, _positions(output, offset, canonical, pair[0]))
        return False
    if gather_rows(graph, node, canonical, samples):
        return False
    if contains(graph.outputs, output):
        raise UnsupportedModelError(
            f"the output '{output.name}' depends on the length of the cache, and is no count of its tokens: leave "
            "it out"
        )
    return True


def _keeps_shapes(graph: gs.Graph, output: gs.Tensor, offset: int, pair: tuple[Sample, Sample]) -> bool:
    """Whether all outputs keep their shapes with positions of its own for each row of the batch."""
    sample = pair[0]
    value, layout = sample.probe.value(output.name), _layout(output, offset, sample)
    if value is None or layout is None:
        return False
    shape = [1] * value.ndim
    shape[0], shape[layout[1]] = sample.batch, sample.length
    rows = sample.probe.given({output.name: np.broadcast_to(value[:1], shape)})
    shapes = [(sample.probe.shape(t.name), rows.shape(t.name)) for t in graph.outputs]
    return all(before is None or before == after for before, after in shapes)


def _is_cancelled(output: gs.Tensor, pair: tuple[Sample, Sample]) -> bool:
    """Whether a tensor has the same value whatever the past."""
    before, after = (s.probe.value(output.name) for s in pair)
    return before is not None and after is not None and np.array_equal(before, after)


def _offset(output: gs.Tensor, samples: Samples) -> int | None:
    """What a tensor of rank 2 or more holds beside P + arange(S) along its one axis of the new tokens.

    None where it is something else, or not the same in all samples.
    """
    first = samples.twins[0]
    value = first.probe.value(output.name)
    if value is None or not value.size or value.dtype.kind not in "iuf" or not abs(float(value.flat[0])) < _FAR:
        return None
    offset = int(value.flat[0]) - first.past
    return offset if all(_layout(output, offset, sample) is not None for sample in samples.twins) else None


def _layout(output: gs.Tensor, offset: int, sample: Sample) -> tuple[int, int] | None:
    """Rank, and the axis of the new tokens, where the value is positions and `offset` more."""
    value = sample.probe.value(output.name)
    if value is None or value.ndim < 2 or value.shape[0] not in (1, sample.batch):
        return None
    inner = [axis for axis in range(1, value.ndim) if value.shape[axis] != 1]
    if sample.length > 1 and (len(inner) != 1 or value.shape[inner[0]] != sample.length):
        return None
    if sample.length == 1 and inner:
        return None
    expected = sample.past + offset + np.arange(sample.length)
    axis = inner[0] if inner else 1
    shape = [1] * value.ndim
    shape[axis] = sample.length
    return (value.ndim, axis) if np.array_equal(value, np.broadcast_to(expected.reshape(shape), value.shape)) else None


def _positions(output: gs.Tensor, offset: int, canonical: Canonical, sample: Sample) -> gs.Variable:
    layout = _layout(output, offset, sample)
    assert layout is not None
    rank, axis = layout
    emit = canonical.emit
    positions = shifted_positions(canonical, offset)
    others = [i for i in range(1, rank) if i != axis]
    if others:
        positions = emit.op("Unsqueeze", [positions, emit.ints(others)], "positions_like")
    wanted = elem_type(output)
    if wanted not in (None, 0, elem_type(positions)):
        positions = emit.op("Cast", [positions], "positions_cast", wanted, to=wanted)
    return positions
