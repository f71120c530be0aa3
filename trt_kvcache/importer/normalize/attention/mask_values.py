"""What the masks of one attention let its queries see, by their values on one sample of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import producer
from trt_kvcache.importer.normalize.evidence.samples import Sample
from trt_kvcache.importer.normalize.findings import Write

Array = npt.NDArray[Any]

HIDDEN = -1e3
"""What is added to hidden scores is at most this: GPT-2's exporters add -1e4, others the lowest number or -inf."""


class MaskKind(Enum):
    """How a tensor hides keys."""

    ADDED = "added"
    """Added to the scores: 0 or very low."""
    VISIBLE = "visible"
    """True where a key is visible."""
    HIDDEN = "hidden"
    """True where a key is hidden."""


@dataclass(frozen=True, eq=False)
class MaskUse:
    """One mask of an attention. Several hide what any of them hides.

    Attributes:
        factor: what scores and mask are scaled by together, as CodeGen and GPT-J do: ``(Q K^T + mask) / sqrt(D)``.
        lowest: the largest number that replaces a hidden score, before the factor.
        slanted: it adds slopes to the scores of visible keys.
    """

    tensor: gs.Tensor
    kind: MaskKind
    factor: float = 1.0
    lowest: float = -np.inf
    slanted: bool = False


@dataclass(frozen=True, eq=False)
class Masks:
    """All that hides keys from the queries of one attention.

    Attributes:
        node: the attention's name, for messages.
        uses: its masks.
        is_causal: the operator hides the keys behind the query by itself: with `write`, ONNX Attention without a past,
            aligned to the upper left corner; without, an operator that counts the past.
        write: of the cache of keys; None: the operator holds it, and it grows.
        in_use: of a cache of a fixed length, it reads the rows that hold tokens only.
    """

    node: str
    uses: tuple[MaskUse, ...]
    is_causal: bool
    write: Write | None
    in_use: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the masks."""
        return [use.tensor.name for use in self.uses]

    @property
    def kept(self) -> int | None:
        """How many rows the cache of keys is cut to; None: it is not cut."""
        return None if self.write is None else self.write.kept

    def rows(self, sample: Sample) -> int:
        """How many keys there are."""
        if self.write is None or self.in_use:
            return sample.total
        if self.write.growing:
            return self.write.rows(sample)
        past = sample.probe.shape(self.write.past.name)
        return sample.total if past is None else past[self.write.axis]

    def visible(self, sample: Sample) -> Array:
        """What the queries see: bool, broadcast to ``[B, 1 or H, S, keys]``; all tokens if the cache is cut.

        Raises:
            UnsupportedModelError: weights or tokens take part, the shapes do not fit, or a mask is a bias.
        """
        total = self.rows(sample)
        parts: list[Array] = []
        for use in self.uses:
            part = self._part(use, sample)
            if part.ndim and 1 < part.shape[-1] < total:  # ONNX's Attention hides the keys behind a short mask
                part = np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, total - part.shape[-1])])
            parts.append(part)
            total = max(total, part.shape[-1] if part.ndim else 1)
        if self.is_causal:
            parts.append(np.tri(sample.length, total, sample.past if self.write is None else 0, dtype=bool))
        if self.kept is not None:
            total = self.rows(sample)
        try:
            shape = np.broadcast_shapes((sample.batch, 1, sample.length, total), *(p.shape for p in parts))
            if 0 in shape:  # it would equal whatever it is compared with
                raise ValueError
        except ValueError:
            raise UnsupportedModelError(
                f"the masks of '{self.node}' have the shapes {', '.join(str(list(p.shape)) for p in parts)} in a step "
                f"of {sample.length} tokens behind {sample.past}; supported are masks that broadcast to "
                f"[B, heads, S, P + S]: here [{sample.batch}, heads, {sample.length}, {total}]"
            ) from None
        visible = np.ones(shape, bool)
        for part in parts:
            visible &= part
        visible = self.in_order(visible, sample)
        if self.kept is not None:  # the newest tokens: no query sees those that are cut off
            visible = np.pad(visible, [(0, 0)] * 3 + [(sample.total - total, 0)])
        return visible

    def in_order(self, mask: Array, sample: Sample) -> Array:
        """A mask over all keys with those of tokens first, in their order, before rows that hold nothing."""
        room = None if self.write is None else self.write.room
        if room is None or not mask.ndim or mask.shape[-1] != room + sample.length:
            return mask
        rows = np.arange(room + sample.length)
        return mask[..., [*rows[: sample.past], *rows[room:], *rows[sample.past : room]]]

    def _part(self, use: MaskUse, sample: Sample) -> Array:
        """One mask as bool, True where a key is visible."""
        value = sample.probe.value(use.tensor.name)
        if value is None:
            raise UnsupportedModelError(
                f"the mask '{use.tensor.name}' of '{self.node}' cannot be evaluated from lengths and masks alone: "
                f"{_unknown(use.tensor, sample)} take part in it; supported are causal, padding and window masks, and "
                "the caller's own"
            )
        if use.lowest * use.factor > HIDDEN:
            raise UnsupportedModelError(
                f"'{self.node}' scales masked scores by {use.factor:g}, so that hidden ones are "
                f"{use.lowest * use.factor:g}; supported is at most {HIDDEN:g}: export the mask with the lowest number "
                "of its type"
            )
        if use.kind is MaskKind.HIDDEN:
            return ~value.astype(bool)
        if use.kind is MaskKind.VISIBLE or value.dtype == np.bool_:
            return value.astype(bool)
        visible = value > HIDDEN / use.factor
        if not use.slanted and np.any(visible & (value != 0)):
            raise UnsupportedModelError(
                f"'{use.tensor.name}' adds numbers other than 0 and the lowest to the scores of '{self.node}' (a "
                "position bias); supported are causal, padding and window masks, and the caller's own"
            )
        return np.asarray(visible)


def _unknown(tensor: gs.Tensor, sample: Sample) -> str:
    """What a tensor without a value is made of: inputs that only the caller knows, or else weights."""
    names: set[str] = set()
    seen, waiting = {tensor.name}, [tensor]
    while waiting:
        node = producer(waiting.pop())
        for given in () if node is None else node.inputs:
            if given.name in seen or sample.probe.value(given.name) is not None:
                continue
            seen.add(given.name)
            waiting.append(given)
            if producer(given) is None and not isinstance(given, gs.Constant):
                names.add(given.name)
    if not names:
        return "weights (such as a learned position bias)"
    return (
        f"values of {', '.join(repr(name) for name in sorted(names))} (such as a mask that the text decides, or images "
        "whose tokens see each other)"
    )


def is_low(value: Array | None) -> bool:
    """Whether numbers hide the scores that they stand for, or are added to."""
    return value is not None and value.size > 0 and bool(np.all(value.astype(np.float64) <= HIDDEN))


def hides_any(value: Array | None) -> bool:
    """Whether some scores are hidden by what is added to them."""
    return value is not None and bool(np.any(value <= HIDDEN))


def is_biased(value: Array | None) -> bool:
    """Whether weights take part in what is added to the scores, or numbers that are neither 0 nor very low."""
    return value is None or bool(np.any((value > HIDDEN) & (value != 0)))
