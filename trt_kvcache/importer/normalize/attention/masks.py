"""Say what a mask means, by its values: causal, a window, padding, or the caller's own.

Exporters build masks from lengths in too many ways to match the operators. So the mask is evaluated on samples and
compared with templates. For query ``i`` of row ``b``, key row ``j``, P tokens in the cache and S new ones:

    causal    j <= P + i
    window    j > P + i - W, beside causal
    bounded   j < P + S only: every token sees every other
    padding   the padding mask has a one at [b, j], beside one of these
    own       exactly what the caller's mask over the rows of the cache says

A mask of scores must be 0 where a key is visible and (nearly) the lowest number where it is not: a bias is no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions import load
from trt_kvcache.importer.graph import is_op, producer
from trt_kvcache.importer.normalize.attention.bias import RelativeBias, find_bias
from trt_kvcache.importer.normalize.attention.mask_values import (
    HIDDEN,
    MaskKind,
    Masks,
    MaskUse,
    hides_any,
    is_biased,
    is_low,
)
from trt_kvcache.importer.normalize.attention.own_masks import check_own_mask, find_own_mask
from trt_kvcache.importer.normalize.attention.slopes import find_slopes
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Visibility, Write
from trt_kvcache.importer.normalize.interface import Interface

Array = npt.NDArray[Any]


def classify(
    node: str,
    uses: Sequence[MaskUse],
    is_causal: bool,
    graph: gs.Graph,
    interface: Interface,
    samples: Samples,
    write: Write | None = None,
    *,
    sinks: bool = False,
    in_use: bool = False,
) -> Visibility:
    """Say which keys the queries of one attention see.

    Args:
        node: its name, for messages.
        uses: all of its masks.
        is_causal: the operator hides the keys behind the query by itself (see `Masks`).
        graph: of the model as exported.
        interface: of the model as exported.
        samples: of it.
        write: of the cache of keys; None: the operator holds it, and it grows.
        in_use: it reads the rows of a cache of a fixed length that hold tokens only.
        sinks: logits stand beside the scores, so that what is added to all scores of a row counts.

    Raises:
        UnsupportedModelError: the mask is none of the templates.
    """
    rest, bias, slopes = _split_bias(node, uses, samples, sinks=sinks)
    masks = Masks(node, tuple(rest), is_causal, write, in_use)
    own = find_own_mask(masks, graph, interface, samples)
    if write is not None and write.room is not None and (bias is not None or slopes is not None):
        raise UnsupportedModelError(
            f"'{node}' adds a position bias to the scores of the cache '{write.past.name}', whose past always has "
            f"{write.room} rows, so that new tokens are not where they lie; supported are such caches without a bias"
        )
    if own is not None:
        if bias is not None or slopes is not None:
            raise UnsupportedModelError(
                f"'{node}' has a relative position bias beside the caller's own mask '{own.name}'; supported is one of "
                "both"
            )
        return _own(masks, own, samples)
    if _is_bounded(masks, samples):
        return _in_ring(masks, Visibility(causal=False, bias=bias, slopes=slopes), samples)
    window = _window(masks, samples)
    _hold_padding(masks, window, samples)
    return _in_ring(masks, Visibility(window=window, bias=bias, slopes=slopes), samples)


def _in_ring(masks: Masks, visibility: Visibility, samples: Samples) -> Visibility:
    """The same over a circular cache, whose rows are not in the order of the tokens after its end."""
    if masks.write is None or not masks.write.circular:
        return visibility
    made: Visibility = load("ring_windows").check_ring(masks, visibility, samples)
    return made


def check_bias(node: str, visibility: Visibility) -> Visibility:
    """Refuse a position bias where a query sees keys behind its own position: it is proven for the others only.

    Raises:
        UnsupportedModelError: naming the attention.
    """
    if (visibility.bias is not None or visibility.slopes is not None) and not visibility.causal:
        raise UnsupportedModelError(
            f"'{node}' adds a relative position bias to its scores and is not causal; supported are biases of "
            "causal attention"
        )
    return visibility


def hold_low(tensor: gs.Tensor, samples: Samples) -> None:
    """See to it that a tensor hides scores in every step.

    Raises:
        UnsupportedModelError: it does not.
    """

    def low(sample: Sample) -> None:
        if not is_low(sample.probe.value(tensor.name)):
            raise UnsupportedModelError(
                f"'{tensor.name}' stands for scores that are hidden, and is not below {HIDDEN:g} with {sample.past} "
                f"tokens in the cache and {sample.length} new; supported are masks that hide at every length"
            )

    samples.hold(low)


def _own(masks: Masks, own: gs.Tensor, samples: Samples) -> Visibility:
    """The caller's own mask, and the operator's causality beside it where it counts the past."""
    if masks.write is not None and masks.kept is not None:
        raise UnsupportedModelError(
            f"'{masks.node}' has the caller's own mask '{own.name}' over the cache '{masks.write.past.name}', of which "
            f"only the newest {masks.kept} rows are kept; supported are masks that follow from lengths there"
        )
    counts = masks.is_causal and masks.write is None
    check_own_mask(replace(masks, is_causal=masks.is_causal and not counts), own, samples)
    return Visibility(causal=counts, own=own, bounded=False)  # both hold, as in the operator


def _is_bounded(masks: Masks, samples: Samples) -> bool:
    """Whether every token sees every other. Where S is 1, causal is the same."""
    seen = [(sample, masks.visible(sample)) for sample in samples.plain]
    if all(_same(visible, _causal(sample, visible.shape[-1])) for sample, visible in seen):
        return False
    return all(_same(visible, _bounded(sample, visible.shape[-1])) for sample, visible in seen)


def _window(masks: Masks, samples: Samples) -> int | None:
    """The window of a mask that is causal; None: all keys up to the query's own are visible."""
    seen = [(sample, masks.visible(sample)) for sample in samples.plain]
    window: int | None = None
    if not all(_same(visible, _causal(sample, visible.shape[-1])) for sample, visible in seen):
        longest, visible = max(seen, key=lambda pair: pair[0].total)
        window = int(visible[..., -1, :].sum(-1).max())
        if window < 1 or not all(_same(v, _causal(s, v.shape[-1], window)) for s, v in seen):
            raise UnsupportedModelError(_unknown(masks, longest, visible))
    return window


def _hold_padding(masks: Masks, window: int | None, samples: Samples) -> None:
    """See to it that a causal mask hides what the padding mask hides, or does so nowhere."""

    def pads(hides: bool, sample: Sample) -> bool:
        if sample.held(masks.kept) < sample.past:
            return True  # exporters may count padding from the first row that is left; nothing is padded here
        visible = masks.visible(sample)
        expected = _causal(sample, visible.shape[-1], window)
        if hides:
            assert sample.padding is not None
            expected = expected & _extend(sample.padding, visible.shape[-1])[:, None, None, :]
            visible = visible & expected.any(-1, keepdims=True)  # a query that sees nothing is no token of a text
        return _same(visible, expected)

    def check(sample: Sample) -> None:
        if not pads(hides, sample):
            raise UnsupportedModelError(
                f"the mask of '{masks.node}' does not hide what the padding mask hides (batch {sample.batch}, "
                f"{sample.past} tokens in the cache, {sample.length} new); supported are masks that hide padded tokens "
                "and nothing else"
            )

    hides = all(pads(True, sample) for sample in samples.padded) or not all(pads(False, s) for s in samples.padded)
    samples.hold(check, padded=True)


def _split_bias(
    node: str, uses: Sequence[MaskUse], samples: Samples, *, sinks: bool
) -> tuple[list[MaskUse], RelativeBias | None, Array | None]:
    """Tell position biases from masks: relative ones and slopes. Sums are taken apart."""
    left: list[MaskUse] = []
    biases: list[RelativeBias] = []
    slopes: Array | None = None
    pending = list(uses)
    while pending:
        use = pending.pop(0)
        maker = producer(use.tensor)
        biased = use.kind is MaskKind.ADDED and is_biased(samples.plain[0].probe.value(use.tensor.name))
        if biased and maker is not None and is_op(maker, "Add"):
            pending += [replace(use, tensor=tensor) for tensor in maker.inputs]
        elif biased and maker is not None and is_op(maker, "Where") and (parts := _parts(maker, samples)) is not None:
            pending += [replace(part, factor=use.factor) for part in parts]
        elif biased and (found := find_slopes(node, use.tensor, samples, shifted=not sinks)) is not None:
            slopes = found * np.float32(use.factor) + (0 if slopes is None else slopes)
            if hides_any(samples.plain[0].probe.value(use.tensor.name)):
                left.append(replace(use, factor=1.0, slanted=True))
        elif biased and use.factor == 1 and (bias := find_bias(node, use.tensor, samples)) is not None:
            biases.append(bias)
        else:
            left.append(use)
    if len(biases) + (slopes is not None) > 1:
        raise UnsupportedModelError(f"'{node}' adds several position biases to its scores; supported is one")
    return left, biases[0] if biases else None, slopes


def _parts(where: gs.Node, samples: Samples) -> list[MaskUse] | None:
    """The mask and the bias of ``Where(visible, bias, lowest)`` or ``Where(hidden, lowest, bias)``."""
    condition, yes, no = where.inputs
    low = [is_low(samples.plain[0].probe.value(t.name)) for t in (yes, no)]
    if sum(low) != 1:
        return None
    kind, bias, lowest = (MaskKind.VISIBLE, yes, no) if low[1] else (MaskKind.HIDDEN, no, yes)
    hold_low(lowest, samples)
    return [MaskUse(condition, kind), MaskUse(bias, MaskKind.ADDED)]


def _causal(sample: Sample, keys: int, window: int | None = None) -> Array:
    rows, last = np.arange(keys)[None, :], sample.past + np.arange(sample.length)[:, None]
    visible = rows <= last
    if window is not None:
        visible &= rows > last - window
    return np.asarray(visible[None, None])


def _bounded(sample: Sample, keys: int) -> Array:
    return np.broadcast_to(np.arange(keys) < sample.total, (1, 1, sample.length, keys))


def _same(visible: Array, template: Array) -> bool:
    return bool(np.all(visible == template))


def _extend(padding: Array, keys: int) -> Array:
    """The padding mask over `keys` rows; those beyond it hold no token."""
    extended = np.zeros((len(padding), keys), bool)
    extended[:, : min(keys, padding.shape[1])] = padding[:, :keys] != 0
    return extended


def _unknown(masks: Masks, sample: Sample, visible: Array) -> str:
    row = visible.reshape(-1, visible.shape[-1])[-1]
    seen = np.flatnonzero(row)
    span = f"{len(seen)} of {len(row)} keys, from {seen[0]} to {seen[-1]}" if len(seen) else "no key"
    cut = ""
    if masks.write is not None and masks.kept is not None:
        cut = (
            f". The cache '{masks.write.past.name}' keeps its newest {masks.kept} rows: supported is a window of at "
            f"most {masks.kept + 1} tokens over it, which hides from each query of a step what others have lost"
        )
    if masks.write is not None and masks.write.room is not None:
        cut = (
            f". The past of the cache '{masks.write.past.name}' always has {masks.write.room} rows: supported are "
            "masks that hide those that hold no token, by a padding mask or the caller's own, and nothing else"
        )
    batch = f", in a batch of {sample.batch}" if sample.batch > 3 else ""
    return (
        f"the mask of '{masks.node}' is none of the supported ones (causal, padding, window, the caller's own): with "
        f"{sample.past} tokens in the cache and {sample.length} new{batch}, the last query sees {span}{cut}"
    )
