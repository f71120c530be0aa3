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
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import is_op, producer
from trt_kvcache.importer.normalize.bias import RelativeBias, find_bias
from trt_kvcache.importer.normalize.findings import Visibility, Write
from trt_kvcache.importer.normalize.interface import Interface
from trt_kvcache.importer.normalize.samples import Sample, Samples
from trt_kvcache.importer.normalize.slopes import find_slopes
from trt_kvcache.importer.plan import OriginalRole

Array = npt.NDArray[Any]

_HIDDEN = -1e3  # GPT-2's exporters add -1e4, others the lowest finite number or -inf
_SEED = 1


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
        factor: what the scores are scaled by behind it: of slopes, which are scaled as well.
        slanted: it adds slopes to the scores of visible keys.
    """

    tensor: gs.Tensor
    kind: MaskKind
    factor: float = 1.0
    slanted: bool = False


def classify(
    node: str,
    masks: Sequence[MaskUse],
    is_causal: bool,
    graph: gs.Graph,
    interface: Interface,
    samples: Samples,
    write: Write | None = None,
    *,
    sinks: bool = False,
) -> Visibility:
    """Say which keys the queries of one attention see.

    Args:
        node: its name, for messages.
        masks: all of its masks.
        is_causal: the operator hides the keys behind the query by itself: with `write`, ONNX Attention without a past,
            aligned to the upper left corner; without, an operator that counts the past.
        graph: of the model as exported.
        interface: of the model as exported.
        samples: of it.
        write: of the cache of keys; None: the operator holds it, and it grows.
        sinks: logits stand beside the scores, so that what is added to all scores of a row counts.

    Raises:
        UnsupportedModelError: the mask is none of the templates.
    """
    masks, bias, slopes = _split_bias(node, masks, samples, sinks=sinks)
    own = _own_mask(node, masks, graph, interface, samples)
    counts = is_causal and write is None
    names = [use.tensor.name for use in masks]
    key = (
        *((use.kind, use.slanted) for use in masks),
        is_causal,
        counts,
        write is None or write.growing,
        write and write.kept,
    )
    if own is not None and (bias is not None or slopes is not None):
        raise UnsupportedModelError(
            f"'{node}' has a relative position bias beside the caller's own mask '{own.name}'; supported is one of both"
        )
    if own is not None and write is not None and write.kept is not None:
        raise UnsupportedModelError(
            f"'{node}' has the caller's own mask '{own.name}' over the cache '{write.past.name}', of which only the "
            f"newest {write.kept} rows are kept; supported are masks that follow from lengths there"
        )
    if own is not None:
        _check_own(node, masks, is_causal and not counts, own, samples, write)
        return Visibility(causal=counts, own=own, bounded=False)  # both hold, as in the operator

    def sees(bounded: bool, window: int | None, sample: Sample) -> None:
        visible = _visible(node, masks, is_causal, sample, write)
        keys = visible.shape[-1]
        if not _same(visible, _bounded(sample, keys) if bounded else _causal(sample, keys, window)):
            raise UnsupportedModelError(_unknown(node, sample, visible, write))

    seen = [(s, _visible(node, masks, is_causal, s, write)) for s in samples.plain]
    window: int | None = None
    causal = all(_same(v, _causal(s, v.shape[-1])) for s, v in seen)
    if not causal and all(_same(v, _bounded(s, v.shape[-1])) for s, v in seen):
        samples.promise(names, ("bounded", *key), partial(sees, True, None))
        return Visibility(causal=False, bias=bias, slopes=slopes)
    if not causal:
        sample, visible = max(seen, key=lambda pair: pair[0].total)
        window = int(visible[..., -1, :].sum(-1).max())
        if window < 1 or not all(_same(v, _causal(s, v.shape[-1], window)) for s, v in seen):
            raise UnsupportedModelError(_unknown(node, sample, visible, write))
    samples.promise(names, ("causal", window, *key), partial(sees, False, window))

    def pads(hides: bool, sample: Sample) -> bool:
        if write is not None and sample.held(write.kept) < sample.past:
            return True  # exporters may count padding from the first row that is left; nothing is padded here
        visible = _visible(node, masks, is_causal, sample, write)
        expected = _causal(sample, visible.shape[-1], window)
        if hides:
            assert sample.padding is not None
            expected = expected & _extend(sample.padding, visible.shape[-1])[:, None, None, :]
            visible = visible & expected.any(-1, keepdims=True)  # a query that sees nothing is no token of a text
        return _same(visible, expected)

    def check_padding(sample: Sample) -> None:
        if not pads(hides, sample):
            raise UnsupportedModelError(
                f"the mask of '{node}' does not hide what the padding mask hides (batch {sample.batch}, {sample.past} "
                f"tokens in the cache, {sample.length} new); supported are masks that hide padded tokens and nothing "
                "else"
            )

    hides = all(pads(True, sample) for sample in samples.padded) or not all(pads(False, s) for s in samples.padded)
    samples.hold(names, ("padded", hides, window, *key), check_padding, padded=True)
    return Visibility(window=window, bias=bias, slopes=slopes)


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


def _split_bias(
    node: str, masks: Sequence[MaskUse], samples: Samples, *, sinks: bool
) -> tuple[list[MaskUse], RelativeBias | None, Array | None]:
    """Tell position biases from masks: relative ones and slopes. Sums are taken apart."""
    left: list[MaskUse] = []
    biases: list[RelativeBias] = []
    slopes: Array | None = None
    pending = list(masks)
    while pending:
        use = pending.pop(0)
        maker = producer(use.tensor)
        biased = use.kind is MaskKind.ADDED and _is_biased(samples.plain[0].probe.value(use.tensor.name))
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


def is_low(value: Array | None) -> bool:
    """Whether numbers hide the scores that they stand for, or are added to."""
    return value is not None and value.size > 0 and bool(np.all(value.astype(np.float64) <= _HIDDEN))


def hold_low(tensor: gs.Tensor, samples: Samples) -> None:
    """See to it that a tensor hides scores in every step.

    Raises:
        UnsupportedModelError: it does not.
    """

    def low(sample: Sample) -> None:
        if not is_low(sample.probe.value(tensor.name)):
            raise UnsupportedModelError(
                f"'{tensor.name}' stands for scores that are hidden, and is not below {_HIDDEN:g} with {sample.past} "
                f"tokens in the cache and {sample.length} new; supported are masks that hide at every length"
            )

    samples.hold([tensor.name], "low", low)


def hides_any(value: Array | None) -> bool:
    """Whether some scores are hidden by what is added to them."""
    return value is not None and bool(np.any(value <= _HIDDEN))


def _is_biased(value: Array | None) -> bool:
    """Whether weights take part in what is added to the scores, or numbers that are neither 0 nor very low."""
    return value is None or bool(np.any((value > _HIDDEN) & (value != 0)))


def _visible(node: str, masks: Sequence[MaskUse], is_causal: bool, sample: Sample, write: Write | None) -> Array:
    """What the queries of one attention see: bool, broadcast to ``[B, 1 or H, S, keys]``, all tokens if cut."""
    total = _rows(sample, write)
    parts: list[Array] = []
    for use in masks:
        value = sample.probe.value(use.tensor.name)
        if value is None:
            raise UnsupportedModelError(
                f"the mask '{use.tensor.name}' of '{node}' cannot be evaluated from lengths and masks alone: weights "
                "or tokens take part in it (such as a learned position bias); supported are causal, padding and "
                "window masks, and the caller's own"
            )
        part = _as_visible(node, use, value)
        if part.ndim and 1 < part.shape[-1] < total:  # ONNX's Attention hides the keys behind a short mask
            part = np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, total - part.shape[-1])])
        parts.append(part)
        total = max(total, part.shape[-1] if part.ndim else 1)
    if is_causal:
        parts.append(np.tri(sample.length, total, sample.past if write is None else 0, dtype=bool))
    try:
        if write is not None and write.kept is not None:
            total = _rows(sample, write)
        shape = np.broadcast_shapes((sample.batch, 1, sample.length, total), *(p.shape for p in parts))
    except ValueError:
        raise UnsupportedModelError(
            f"the masks of '{node}' have the shapes {', '.join(str(list(p.shape)) for p in parts)} in a step of "
            f"{sample.length} tokens behind {sample.past}; supported are masks that broadcast to [B, heads, S, P + S]: "
            f"here [{sample.batch}, heads, {sample.length}, {total}]"
        ) from None
    visible = np.ones(shape, bool)
    for part in parts:
        visible &= part
    if write is not None and write.kept is not None:  # the newest tokens: no query sees those that are cut off
        visible = np.pad(visible, [(0, 0)] * 3 + [(sample.total - total, 0)])
    return visible


def _rows(sample: Sample, write: Write | None) -> int:
    """How many keys there are."""
    past = None if write is None or write.growing else sample.probe.shape(write.past.name)
    if write is not None and write.growing:
        return write.rows(sample)
    return sample.total if write is None or past is None else past[write.axis]


def _as_visible(node: str, use: MaskUse, value: Array) -> Array:
    if use.kind is MaskKind.HIDDEN:
        return ~value.astype(bool)
    if use.kind is MaskKind.VISIBLE or value.dtype == np.bool_:
        return value.astype(bool)
    numbers = value.astype(np.float64)
    visible = numbers > _HIDDEN
    if np.any(numbers[visible] != 0) and not use.slanted:
        raise UnsupportedModelError(
            f"'{use.tensor.name}' adds numbers other than 0 and the lowest to the scores of '{node}' (a position "
            "bias); supported are causal, padding and window masks, and the caller's own"
        )
    return np.asarray(visible)


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


def _own_mask(
    node: str, masks: Sequence[MaskUse], graph: gs.Graph, interface: Interface, samples: Samples
) -> gs.Tensor | None:
    """The input with the caller's own mask, if the values of one reach the attention."""
    sample = samples.plain[0]
    found: list[str] = []
    for tensor in interface.of(OriginalRole.MASK):
        changed = sample.probe.given({tensor.name: _flipped(sample, tensor.name)})
        for use in masks:
            before, after = sample.probe.value(use.tensor.name), changed.value(use.tensor.name)
            if before is not None and after is not None and not np.array_equal(before, after):
                found.append(tensor.name)
                break
    if len(set(found)) > 1:
        raise UnsupportedModelError(
            f"the mask of '{node}' is made of several inputs ({', '.join(found)}); supported is one mask of the "
            "caller's own"
        )
    return next((t for t in graph.inputs if t.name == found[0]), None) if found else None


def _flipped(sample: Sample, name: str) -> Array:
    value = sample.probe.value(name)
    assert value is not None
    flipped = np.random.default_rng(_SEED).permuted(sample.own[name], axis=-1)
    if value.dtype.kind == "f":
        return np.where(flipped, 0, np.finfo(np.float16).min).astype(value.dtype)
    return flipped.astype(value.dtype)


def _check_own(
    node: str, masks: Sequence[MaskUse], is_causal: bool, own: gs.Tensor, samples: Samples, write: Write | None
) -> None:
    def stands(sample: Sample) -> None:
        visible = _visible(node, masks, is_causal, sample, write)
        given = sample.own[own.name]
        fits = all(n in (1, m) for n, m in zip(given.shape[::-1], visible.shape[::-1], strict=False))
        fits = fits and all(_arrives(use, own, sample) for use in added)
        if not fits or not _same(visible, np.broadcast_to(given, visible.shape)):
            raise UnsupportedModelError(
                f"the mask of '{node}' is made of the input '{own.name}' and of something else; supported is the "
                "caller's own mask as it stands, or a causal, padding or window mask"
            )

    added = [use for use in masks if use.kind is MaskKind.ADDED and _arrives(use, own, samples.plain[0])]
    for sample in samples.plain:
        stands(sample)
    key = (*((use.kind, use.slanted) for use in masks), is_causal, write is None or write.growing, len(added))
    samples.promise([use.tensor.name for use in masks], ("own", own.name, *key), stands)
    value = samples.plain[0].probe.value(own.name)
    assert value is not None
    if value.dtype.kind not in "bf":
        raise UnsupportedModelError(
            f"the mask '{own.name}' of '{node}' is {value.dtype}; supported is the caller's own mask as bool, or as "
            "numbers to add to the scores"
        )
    if value.dtype.kind == "f":
        _check_added(node, masks, own, samples.plain[0])


def _arrives(use: MaskUse, own: gs.Tensor, sample: Sample) -> bool:
    """Whether the very numbers of the caller's own mask are added to the scores."""
    given, added = sample.probe.value(own.name), sample.probe.value(use.tensor.name)
    if given is None or added is None or given.dtype.kind != "f" or given.ndim > added.ndim:
        return False
    fits = all(n in (1, m) for n, m in zip(given.shape[::-1], added.shape[::-1], strict=False))
    return fits and bool(np.all(added == given))


def _check_added(node: str, masks: Sequence[MaskUse], own: gs.Tensor, sample: Sample) -> None:
    """Show that whatever numbers the caller's own mask holds are added to the scores."""
    given = sample.probe.value(own.name)
    assert given is not None
    numbers = -np.random.default_rng(_SEED).integers(1, 100, given.shape).astype(given.dtype)
    probe = sample.probe.given({own.name: numbers})
    for use in masks:
        before, after = sample.probe.value(use.tensor.name), probe.value(use.tensor.name)
        if use.kind is not MaskKind.ADDED or before is None or after is None or np.array_equal(before, after):
            continue
        if not np.array_equal(after, np.broadcast_to(numbers, after.shape)):
            raise UnsupportedModelError(
                f"the mask '{own.name}' does not come to the scores of '{node}' as it is given; supported is the "
                "caller's own mask, added to the scores"
            )


def _unknown(node: str, sample: Sample, visible: Array, write: Write | None) -> str:
    row = visible.reshape(-1, visible.shape[-1])[-1]
    seen = np.flatnonzero(row)
    span = f"{len(seen)} of {len(row)} keys, from {seen[0]} to {seen[-1]}" if len(seen) else "no key"
    cut = ""
    if write is not None and write.kept is not None:
        cut = (
            f". The cache '{write.past.name}' keeps its newest {write.kept} rows: supported is a window of at most "
            f"{write.kept + 1} tokens over it, which hides from each query of a step what others have lost"
        )
    return (
        f"the mask of '{node}' is none of the supported ones (causal, padding, window, the caller's own): with "
        f"{sample.past} tokens in the cache and {sample.length} new, the last query sees {span}{cut}"
    )
