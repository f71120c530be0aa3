"""Caches of W rows that models shift: the oldest rows go out in front as new ones come, and those of tokens are last.

    present = Concat(past[:, :, S:], new)                  token t after a step of T tokens: row t - T + W
    mask    [B, 1, S, W], the caller's own or by lengths

becomes a ring, in which no row moves, and a mask over it:

    present = TensorScatter(past, new, write_indices, mode=circular)             token t: row t mod W
    visible = emit_visible(window=W, rows=W)                                     bool [B, 1, S, W]

Both hold the same tokens after each step, also while the window fills, and in steps of several tokens, the first of
which then see less than W.
"""

from __future__ import annotations

import numpy as np

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize.attention.masks import Masks
from trt_kvcache.importer.normalize.candidate import FOR_GOOD
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Visibility


def check_shifted(masks: Masks, samples: Samples) -> Visibility:
    """Guess that the queries of one attention see the tokens in a shifted cache, up to their own.

    Raises:
        UnsupportedModelError: the mask shows something else.
    """
    assert masks.write is not None
    seen = []
    for step in samples.few:
        visible = masks.visible(step)
        tokens = step.total - visible.shape[-1] + np.arange(visible.shape[-1])
        own = step.past + np.arange(step.length)[:, None]
        seen.append(bool(np.all(visible == ((tokens >= 0) & (tokens <= own)))))
    if not all(seen):
        step, rows = samples.few[0], masks.visible(samples.few[0])
        raise UnsupportedModelError(
            f"the rows of the cache '{masks.write.past.name}' move in every step, and the mask of '{masks.node}' shows "
            f"the last query {int(rows[..., -1, :].sum(-1).max())} of {rows.shape[-1]} rows with {step.past} tokens in "
            f"the cache and {step.length} new; supported are masks that show the tokens, which lie in the last rows: "
            f"give the mask [B, 1, S, W] as an input. {FOR_GOOD}"
        )
    return Visibility(causal=False, bounded=False)
