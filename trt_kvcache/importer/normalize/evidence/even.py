"""Operands that say how a view is arranged, at every length: shapes, bounds and indices that grow evenly.

    Reshape(x, [B, N, P + S, D])    Slice(x, 0, P + S)    Expand(x, [B, N, 4, P + S, D])    =  a + b * P + c * S

What a chain of such operators does is shown by numbers in a few steps. In all others it does the same if its operands
go on as they did: with the amounts that the few steps show, learnt from them. In batches a number stays, or is as many
times as large as there are sequences: in all of them, or in none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples

_FAR = 1 << 40


def operands(nodes: Iterable[gs.Node]) -> tuple[gs.Tensor, ...]:
    """What decides how views arrange their first input, constants left out."""
    found = {t.name: t for node in nodes for t in node.inputs[1:] if not t.is_empty()}
    return tuple(t for t in found.values() if not isinstance(t, gs.Constant))


@dataclass(frozen=True, eq=False)
class _Growth:
    """What the numbers of a tensor are in each step.

    Attributes:
        slopes: what each of them is with the sizes of a step of one sequence, int64 ``[numbers, sizes]``.
        per_sequence: which are as many times as large as there are sequences, bool ``[numbers]``.
    """

    slopes: Array
    per_sequence: Array

    @property
    def content(self) -> Hashable:
        return self.slopes.shape, self.slopes.tobytes(), self.per_sequence.tobytes()

    def at(self, sample: Sample, samples: Samples) -> Array:
        one = self.slopes @ samples.sizes(sample.past, sample.length)
        return np.asarray(np.where(self.per_sequence, sample.batch * one, one))


def hold_even(tensors: Sequence[gs.Tensor], samples: Samples, where: str) -> None:
    """See to it that operands of views grow evenly with P and S.

    Args:
        tensors: the operands.
        samples: of the model as exported.
        where: what they are part of, for messages.

    Raises:
        UnsupportedModelError: one does not.
    """
    for tensor in tensors:
        if samples.blueprint.is_constant(tensor.name):
            continue
        values = [sample.probe.value(tensor.name) for sample in samples.learning]
        known = [value for value in values if value is not None]
        slopes = _slopes(known, samples) if len(known) == len(values) else None
        growth = None if slopes is None else _Growth(slopes, _per_sequence(tensor.name, slopes, samples))

        def goes_on(sample: Sample, name: str = tensor.name, growth: _Growth | None = growth) -> None:
            value = sample.probe.value(name)
            if value is None or growth is None or not np.array_equal(_bounded(value), growth.at(sample, samples)):
                shown = "unknown" if value is None else value.reshape(-1)[:8].tolist()
                raise UnsupportedModelError(
                    f"'{name}', which arranges {where}, is {shown} with {sample.past} tokens in the cache and "
                    f"{sample.length} new{f' in a batch of {sample.batch}' if sample.batch > 1 else ''}, and something "
                    "else at other lengths; supported are shapes and bounds that grow evenly with both"
                )

        content = (
            None
            if growth is None
            else (growth.slopes.shape, *(a.tobytes() for a in (growth.slopes, growth.per_sequence)))
        )
        samples.promise([tensor.name], ("even", content), goes_on)


def _slopes(values: Sequence[Array], samples: Samples) -> Array | None:
    """What each number is with the sizes of a step, int64 ``[numbers, sizes]``; None where they have no one size."""
    if len({value.shape for value in values}) != 1:
        return None
    sizes = np.stack([samples.sizes(step.past, step.length) for step in samples.learning])
    sizes = sizes * np.array([1, *(np.ptp(sizes[:, 1:], axis=0) > 0)])  # what never varies is part of the constant
    targets = np.stack([_bounded(value) for value in values])
    return np.asarray(np.rint(np.linalg.lstsq(sizes, targets, rcond=None)[0]).astype(np.int64).T)


def _per_sequence(name: str, slopes: Array, samples: Samples) -> Array:
    """Which numbers grow with the batch, bool ``[numbers]``."""
    sample = samples.beside
    value, one = sample.probe.value(name), slopes @ samples.sizes(sample.past, sample.length)
    if value is None or value.size != len(one):
        return np.zeros(len(one), bool)
    return np.asarray(_bounded(value) != one)


def _bounded(value: Array) -> Array:
    """Numbers in a row; the largest ones, which stand for an end that is far enough, as smaller ones."""
    return np.asarray(np.minimum(np.maximum(value.reshape(-1).astype(np.int64), -_FAR), _FAR))
