"""Caches that grow and are cut to their newest rows, as for attention of a window.

    past [B, N, min(P, R), D] --.
                                 Concat -- all that attention reads -- Slice(-R:) -> present [B, N, min(P + S, R), D]
    new  [B, N, S, D] ---------'

becomes a cache of all tokens; which of them a query sees is left to its mask. Where a token lies in past is no position
any more: row ``j`` of past and new rows together is token ``P - min(P, R) + j``. A past may also be cut before new rows
come to it, which changes nothing: it is no longer than that already.

How many rows are kept is seen in a step behind a past that is longer than any. That they are the newest ones, and as
many in other steps, is shown by the bounds of each Slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import consumers, is_op
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.candidate import Candidate, Geometry
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.views import static_layout
from trt_kvcache.importer.plan import OriginalRole

__all__ = ["find_kept", "find_short_masks", "is_cut", "prove_cut"]

_FAR = 64  # tokens beyond twice the capacity
_ADVICE = "cut the cache to a number of its newest rows that is the same in every step, Concat(past, new)[:, :, -R:]"


def is_cut(candidate: Candidate) -> bool:
    """Whether rows may be cut off between past and present."""
    return bool(candidate.growing and _slices(candidate))


def find_kept(candidates: Sequence[Candidate], samples: Samples) -> tuple[Candidate, ...]:
    """Say how many rows each cache keeps that is cut.

    Args:
        candidates: of a model.
        samples: of it, in which no past is cut.

    Raises:
        UnsupportedModelError: it is another number in other steps, or the rows are not the newest ones.
    """
    return tuple(replace(c, kept=_find(c, samples)) if is_cut(c) and not c.reason else c for c in candidates)


def _find(candidate: Candidate, samples: Samples) -> int | None:
    far = 2 * samples.capacity + _FAR
    counts: set[int] = set()
    for past, length in ((far, 1), (far + 7, 1), (far, 3)):
        sample = samples.step(1, past, samples.fixed_length or length)
        joined, rows = _rows(candidate, sample, past)
        if rows is None or joined is None:
            raise candidate.refusal(f"which rows {_named(candidate)} leaves cannot be computed from lengths", _ADVICE)
        if not rows.size or not np.array_equal(rows, np.arange(sample.total - rows.size, sample.total)):
            raise candidate.refusal(f"{_named(candidate)} does not leave the newest rows", _ADVICE)
        counts.add(-1 if rows.size == sample.total else int(rows.size))
    if len(counts) > 1:
        raise candidate.refusal(f"{_named(candidate)} leaves more rows in some steps than in others", _ADVICE)
    kept = counts.pop()
    return None if kept < 0 else kept


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


def prove_cut(candidate: Candidate, geometries: Sequence[Geometry]) -> None:
    """Show that present holds the newest rows of past and new ones together, and as many as past.

    Args:
        candidate: from `find_kept`.
        geometries: the samples.

    Raises:
        UnsupportedModelError: it does not.
    """
    for geometry in geometries:
        _check(candidate, geometry.step)


def _check(candidate: Candidate, sample: Sample) -> None:
    before = sample.held(candidate.kept)
    joined, rows = _rows(candidate, sample, before)
    after = before + sample.length if candidate.kept is None else min(before + sample.length, candidate.kept)
    wanted = np.arange(sample.total - after, sample.total)
    if joined is None or joined.size != before + sample.length or not np.array_equal(rows, wanted):  # type: ignore[arg-type]
        found = "rows that cannot be computed" if rows is None else f"{rows.size} rows"
        raise candidate.refusal(
            f"{_named(candidate)} leaves {found} in a step of {sample.length} tokens behind {sample.past}, of which "
            f"the cache holds {before}, where the newest {after} would be as many as in other steps",
            _ADVICE,
        )


def _rows(candidate: Candidate, sample: Sample, held: int) -> tuple[Array | None, Array | None]:
    """The tokens in past and new rows together, and in present, where past holds the newest `held` ones."""
    rows = _cut(candidate, candidate.views, np.arange(sample.past - held, sample.past), sample, ())
    if rows is None:
        return None, None
    joined = np.concatenate([rows, np.arange(sample.past, sample.total)])
    return joined, _cut(candidate, candidate.after, joined, sample, candidate.views)


def _cut(
    candidate: Candidate, nodes: Sequence[gs.Node], rows: Array, sample: Sample, before: Sequence[gs.Node]
) -> Array | None:
    """The tokens that are left behind `nodes`; None where that cannot be told."""
    for index, node in enumerate(nodes):
        if is_op(node, "Slice"):
            layout = static_layout((*before, *nodes[:index]), len(candidate.past.shape))
            values = [sample.probe.value(t.name) for t in node.inputs[1:]]
            if layout is None or len(values) < 3 or any(v is None or v.size != 1 for v in values):
                return None
            start, end, axis, *step = (int(v.reshape(())) for v in values if v is not None)
            if layout[axis] != (candidate.axis,) or step not in ([], [1]):
                return None
            rows = rows[start:end]
    return rows


def _slices(candidate: Candidate) -> list[gs.Node]:
    return [n for n in (*candidate.views, *candidate.after) if is_op(n, "Slice")]


def _named(candidate: Candidate) -> str:
    return " and ".join(f"Slice '{n.name}'" for n in _slices(candidate))
