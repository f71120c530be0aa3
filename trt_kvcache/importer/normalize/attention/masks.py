"""Guess what a mask means, by its values: causal, a window, a bias, or the caller's own.

Exporters build masks from lengths in too many ways to match the operators. So the mask is evaluated in two steps and
compared with templates. For query ``i`` of row ``b``, key row ``j``, P tokens in the cache and S new ones:

    causal    j <= P + i
    window    j > P + i - W, beside causal
    bounded   j < P + S only: every token sees every other
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
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.bias import RelativeBias, find_bias, find_slopes
from trt_kvcache.importer.normalize.attention.mask_values import (
    MaskKind,
    Masks,
    MaskUse,
    hides_any,
    is_biased,
    is_low,
)
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Visibility, Write
from trt_kvcache.importer.plan import OriginalRole

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
    """Guess which keys the queries of one attention see.

    Args:
        node: its name, for messages.
        uses: all of its masks.
        is_causal: the operator hides the keys after the query by itself (see `Masks`).
        graph: of the model as exported.
        interface: of the model as exported.
        samples: of it.
        write: of the cache of keys; None: the operator holds it, and it grows.
        in_use: it reads the rows of a cache of a fixed length that hold tokens only.
        sinks: logits stand beside the scores, so that a number added to all scores of a row counts.

    Raises:
        UnsupportedModelError: the mask is none of the templates.
    """
    rest, bias, slopes = _split_bias(node, uses, samples, sinks=sinks)
    masks = Masks(node, tuple(rest), is_causal, write, in_use)
    own = _find_own(masks, graph, interface, samples)
    if own is None:
        return _in_ring(masks, replace(_template(masks, samples), bias=bias, slopes=slopes), samples)
    if bias is not None or slopes is not None:
        raise UnsupportedModelError(
            f"'{node}' has a relative position bias beside the caller's own mask '{own.name}'; supported is one of both"
        )
    return _own(masks, own, samples)


def _in_ring(masks: Masks, visibility: Visibility, samples: Samples) -> Visibility:
    """The same over a circular cache, whose rows are not in the order of the tokens after its end."""
    if masks.write is None or not masks.write.circular:
        return visibility
    made: Visibility = load("ring_windows").check_ring(masks, visibility, samples)
    return made


def check_bias(node: str, visibility: Visibility) -> Visibility:
    """Refuse a position bias where a query sees keys after its own position: it is made for the others only.

    Raises:
        UnsupportedModelError: naming the attention.
    """
    if (visibility.bias is not None or visibility.slopes is not None) and not visibility.causal:
        raise UnsupportedModelError(
            f"'{node}' adds a relative position bias to its scores and is not causal; supported are biases of "
            "causal attention"
        )
    return visibility


def _template(masks: Masks, samples: Samples) -> Visibility:
    """The first template that the masks are in two steps; where S is 1, causal and bounded are the same."""
    seen = [(sample, masks.visible(sample)) for sample in samples.few]
    longest, visible = seen[-1]
    window = max(1, int(visible[..., -1, :].sum(-1).max()))
    for guess in (Visibility(), Visibility(causal=False), Visibility(window=window)):
        if all(np.all(given == _drawn(guess, sample, given.shape[-1])) for sample, given in seen):
            return guess
    raise UnsupportedModelError(_unknown(masks, longest, visible))


def _drawn(template: Visibility, sample: Sample, keys: int) -> Array:
    """A template as a mask, ``[S, keys]``."""
    rows, last = np.arange(keys)[None, :], sample.past + np.arange(sample.length)[:, None]
    visible = rows <= last if template.causal else rows + 0 * last < sample.total
    return visible if template.window is None else visible & (rows > last - template.window)


def _find_own(masks: Masks, graph: gs.Graph, interface: Interface, samples: Samples) -> gs.Tensor | None:
    """The input with the caller's own mask, if the values of one reach the attention.

    Raises:
        UnsupportedModelError: those of several do.
    """
    sample = samples.plain[0]
    found: list[str] = []
    for tensor in interface.of(OriginalRole.MASK):
        value = sample.probe.value(tensor.name)
        assert value is not None
        changed = sample.probe.given({tensor.name: np.random.default_rng(1).permuted(value, axis=-1)})
        pairs = [(sample.probe.value(name), changed.value(name)) for name in masks.names]
        if any(x is not None and y is not None and not np.array_equal(x, y) for x, y in pairs):
            found.append(tensor.name)
    if len(found) > 1:
        raise UnsupportedModelError(
            f"the mask of '{masks.node}' is made of several inputs ({', '.join(found)}); supported is one mask of the "
            "caller's own"
        )
    return next((t for t in graph.inputs if t.name in found), None)


def _own(masks: Masks, own: gs.Tensor, samples: Samples) -> Visibility:
    """The caller's own mask, and the operator's causality beside it where it counts the past.

    Masks that a caller may give need not be causal, and those of the check are: so values are compared here.
    """
    if masks.write is not None and masks.kept is not None:
        raise UnsupportedModelError(
            f"'{masks.node}' has the caller's own mask '{own.name}' over the cache '{masks.write.past.name}', of which "
            f"only the newest {masks.kept} rows are kept; supported are masks that follow from lengths there"
        )
    counts = masks.is_causal and masks.write is None
    masks = replace(masks, is_causal=masks.is_causal and not counts)
    for sample in samples.few:
        visible, given = masks.visible(sample), masks.in_order(sample.own[own.name], sample)
        fits = all(n in (1, m) for n, m in zip(given.shape[::-1], visible.shape[::-1], strict=False))
        if not fits or not np.all(visible == given):
            raise UnsupportedModelError(
                f"the mask of '{masks.node}' is made of the input '{own.name}' and of something else; supported is the "
                "caller's own mask as it stands, or a causal, padding or window mask"
            )
    value = samples.plain[0].probe.value(own.name)
    assert value is not None
    if value.dtype.kind not in "bf":
        raise UnsupportedModelError(
            f"the mask '{own.name}' of '{masks.node}' is {value.dtype}; supported is the caller's own mask as bool, or "
            "as numbers to add to the scores"
        )
    return Visibility(causal=counts, own=own, bounded=False)  # both hold, as in the operator


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
        elif biased and (found := find_slopes(use.tensor, samples, shifted=not sinks)) is not None:
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
    for kind, bias, tensor in ((MaskKind.VISIBLE, yes, no), (MaskKind.HIDDEN, no, yes)):
        low = samples.plain[0].probe.value(tensor.name)
        if low is not None and is_low(low) and not is_low(samples.plain[0].probe.value(bias.name)):
            return [MaskUse(condition, kind, lowest=float(low.max())), MaskUse(bias, MaskKind.ADDED)]
    return None


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
