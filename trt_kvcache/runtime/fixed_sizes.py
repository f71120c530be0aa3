"""Pads the steps of a model whose batch, or whose number of tokens per step, is fixed at more than one.

Such a model computes all of its rows and tokens in each step. Rows that do not take part compute some token at the
start of their caches; their former contents are restored afterwards. Padding tokens lie after those of the step, where
causal attention hides them; their rows are zeroed after the step. The results of real rows and tokens are the same as
without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.generation.token_masks import Mask, Masks, all_tokens
from trt_kvcache.runtime.runner import Array, Runner, StepBatch
from trt_kvcache.runtime.step_inputs import StepInputs


@contextmanager
def whole_step(runner: Runner, inputs: StepInputs, batch: StepBatch) -> Iterator[StepBatch]:
    """Yield the step that the model takes instead of `batch`, padded to its fixed sizes; undo the padding afterwards.

    Args:
        runner: runs the step within the block.
        inputs: inputs of the model.
        batch: the step that is asked for.
    """
    rows, length = inputs.fixed_rows or batch.rows, inputs.fixed_length or batch.length
    if (rows, length) == (batch.rows, batch.length):
        yield batch
        return
    first = batch.first_row if rows == batch.rows else 0
    taking_part = slice(batch.first_row - first, batch.first_row - first + batch.rows)
    tokens = np.zeros((rows, length), np.int64)
    tokens[taking_part, : batch.length] = batch.tokens
    starts = np.full(rows, batch.starts[0] if inputs.uniform else 0)
    starts[taking_part] = batch.starts
    constants = list(batch.constants[:1] * rows)
    constants[taking_part] = batch.constants
    keep = batch.keep and length - batch.length + batch.keep  # padding comes after the tokens
    beside = (taking_part.start, rows - taking_part.stop), (0, length - batch.length)
    embeds, positions = batch.embeds, batch.positions
    if embeds is not None:
        embeds = np.pad(embeds, (*beside, (0, 0)))
    # positions of a token of the step: all rows agree if the model takes one position for all
    if positions is not None:
        positions = np.pad(positions, (beside[0], (0, 0), beside[1]), "edge")
    adapters = None if batch.adapters is None else np.pad(batch.adapters, beside[0])
    whole = replace(
        batch, first_row=first, tokens=tokens, starts=starts, constants=tuple(constants), keep=keep, embeds=embeds,
        positions=positions, adapters=adapters, masks=_whole_masks(batch, rows, keep, taking_part),
    )  # fmt: skip
    idle = [row for row in range(first, first + rows) if not 0 <= row - batch.first_row < batch.rows]
    names = [buffer.past for buffer in carried_buffers(runner.plan)]
    saved = [
        (name, row, runner.read_row(name, row, int(starts[row - first]) + length)) for name in names for row in idle
    ]
    try:
        yield whole
    finally:
        for name, row, data in saved:
            runner.write_row(name, row, data)
        if length > batch.length:
            for i, start in enumerate(batch.starts):
                runner.zero_rows(batch.first_row + i, int(start) + batch.length, int(start) + length)


def _whole_masks(batch: StepBatch, rows: int, keep: int, taking_part: slice) -> Masks | None:
    asked = batch.masks
    if asked is None:
        return None

    def read(words: int) -> Mask:
        masks = all_tokens((rows, keep, words))
        masks[taking_part, : batch.keep] = asked(words)
        return masks

    return read


def asked_logits(logits: Array, batch: StepBatch, whole: StepBatch) -> Array:
    """Return the logits that `batch` asks for from those of the whole step, ``[R, keep, V]``."""
    if whole is batch:
        return logits
    first = batch.first_row - whole.first_row
    rows = logits[first : first + batch.rows]
    return rows[:, : batch.keep]
