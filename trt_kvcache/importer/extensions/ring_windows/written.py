"""Visibility after the end of a circular cache, where rows are not in the order of the tokens any more.

Up to the end a mask means the same as over any cache. After it every row holds a token, of which the lengths that
sessions give say only that there are L: masked by these, query ``i`` of S sees rows ``j <= L - S + i``, which are all
of them in a step of one token. The mask of an export by positions, ``arange(L) <= pos``, lets each query of a longer
step see them all, so it becomes a mask by positions here too:

    visible = arange(L) <= write_indices + i                    bool [B, 1, S, L]
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import BOOL, INT64, Emitter
from trt_kvcache.importer.normalize.attention.masks import Masks
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Visibility


def check_ring(masks: Masks, visibility: Visibility, samples: Samples) -> Visibility:
    """Guess the keys that the canonical attention has to show, so that it goes on after the end as the original does.

    Returns:
        `visibility` where it holds after the end, too.

    Raises:
        UnsupportedModelError: it does not, and not every row is visible there either.
    """
    assert masks.write is not None
    steps = [step for step in samples.wrapped if step.past >= samples.capacity >= step.length]
    seen = [(step, masks.visible(step)) for step in steps]
    if all(bool(np.all(rows == _counted(step, visibility))) for step, rows in seen):
        return visibility
    for step, rows in seen:
        if visibility.window is not None or not rows.all():
            least = int(rows.sum(-1).min())
            raise UnsupportedModelError(
                f"the cache '{masks.write.past.name}' is circular, and after the end of its {samples.capacity} rows a "
                f"query of '{masks.node}' sees {least} of {rows.shape[-1]} keys ({step.past} tokens in the cache and "
                f"{step.length} new); supported are masks that show every row there, and the caller's own: give the "
                "mask [B, 1, S, L] as an input"
            )
    return replace(visibility, causal=False, by_position=True)


def emit_by_position(emit: Emitter, positions: gs.Variable, rows: int) -> gs.Variable:
    """Rows up to the position of each query: bool ``[B, 1, S, rows]``; positions ``[B, S]`` go on after the end."""

    def make() -> gs.Variable:
        numbers = emit.constant(np.arange(rows, dtype=np.int64).reshape(1, 1, 1, rows))
        own = emit.op("Unsqueeze", [positions, emit.ints([1, 3])], "ring_position", INT64)
        return emit.op("LessOrEqual", [numbers, own], "ring_visible", BOOL)

    return emit.once(("ring", positions.name, rows), make)


def _counted(step: Sample, visibility: Visibility) -> np.ndarray:
    """The keys that lengths of at most L let the queries see: bool ``[S, L]``."""
    rows = np.arange(step.capacity)[None, :]
    last = step.capacity - step.length + np.arange(step.length)[:, None]
    visible = rows <= last if visibility.causal else rows >= 0
    if visibility.window is not None:
        visible = visible & (rows > last - visibility.window)
    return np.asarray(visible)
