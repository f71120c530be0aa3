"""Guess what is added to scores: a mask by lengths, the caller's own, a bias by distance, sinks.

Exporters build masks in too many ways to match the operators. So all products of queries and keys are given as 0: what
a softmax reads then is what is added to its scores, and nothing else. It is seen in two steps and compared with
templates. For query ``i`` of row ``b``, key row ``j``, P tokens in the cache and S new ones:

    causal    j <= P + i
    window    j > P + i - W, beside causal
    bounded   j < P + S only: every token sees every other
    own       exactly what the caller's mask over the rows of the cache says

A number that is the same for all keys of a query is nothing to a softmax. Up to such numbers, what is added is 0 where
a key is visible and (nearly) the lowest number where it is not; or a bias, as T5 and BLOOM have it. With one
key more than there are, the last column holds sinks, as gpt-oss has them: a logit for each head, whose share of the
softmax goes nowhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import extensions
from trt_kvcache.importer.graph import is_op, producer
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.candidate import FOR_GOOD
from trt_kvcache.importer.normalize.evidence.probe import Probe
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Sinks, Visibility, Write
from trt_kvcache.importer.plan import OriginalRole

if TYPE_CHECKING:
    from trt_kvcache.importer.extensions.position_biases import RelativeBias

Array = npt.NDArray[Any]
_StandIn = tuple[str, str]  # the name of a tensor, and what its value is: see `ZeroScores`

HIDDEN = -1e3  # what is added to hidden scores is at most this: GPT-2's exporters add -1e4, others the lowest number
_ROUNDED = -1.0  # what is left of slopes in float16
_VANISHES = -104.0  # exp of it is 0 in float32; a bias that grows with the distance has smaller numbers, too


def _without_vanishing(level: Array, most: float = 0.0) -> Array:
    """Numbers that are added to scores, with -inf for those of a mask that is scaled with the scores.

    `most`: numbers above it, up to 0, are 0.
    """
    if np.any((level > _VANISHES) & (level < most)):
        return level
    return np.where(level <= _VANISHES, -np.inf, level)


class ZeroScores:
    """Steps of a model in which products of queries and keys are 0.

    Equal layers are evaluated once: they are given the same zeros, in one step for all.

    Args:
        products: names of the products.
    """

    def __init__(self, products: Sequence[str] = ()) -> None:
        self._products = products
        self._steps: dict[Hashable, tuple[Sample, Probe]] = {}
        self._zeros: dict[Hashable, Array] = {}

    def value(self, sample: Sample, name: str, stand_ins: Sequence[_StandIn] = ()) -> Array | None:
        """A tensor in a step; None where tokens take part in it.

        Args:
            sample: the step.
            name: of the tensor.
            stand_ins: other tensors that have a value: "zeros"; "places" (1, 2, 3, ...); "permuted" (their own numbers,
                in another order of the last axis).
        """
        # Elementwise operators take one row of zeros for all heads, as large as the mask then makes it.
        value = self._probe(sample, tuple(stand_ins), whole=False).value(name)
        if value is None and self._products:
            value = self._probe(sample, tuple(stand_ins), whole=True).value(name)
        return value

    def _probe(self, sample: Sample, stand_ins: tuple[_StandIn, ...], *, whole: bool) -> Probe:
        key = (id(sample), stand_ins, whole)
        if key not in self._steps:
            values = {name: _filled(sample.probe, name, how) for name, how in stand_ins}
            for name in self._products:
                if shape := sample.probe.shape(name):
                    sizes = shape if whole else (*(1 for _ in shape[:-2]), *shape[-2:])
                    kind = _dtype(sample.probe, name)
                    values[name] = self._zeros.setdefault((sizes, kind), np.zeros(sizes, kind))
            self._steps[key] = (sample, sample.probe.with_values(values) if values else sample.probe)
        return self._steps[key][1]


def _dtype(probe: Probe, name: str) -> np.dtype[Any]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(probe.elem_type(name) or onnx.TensorProto.FLOAT))


def _filled(probe: Probe, name: str, how: str) -> Array:
    if how == "permuted":
        value = probe.value(name)
        assert value is not None
        return np.random.default_rng(1).permuted(value, axis=-1)
    shape = probe.shape(name) or ()
    if how == "zeros":
        return np.zeros(shape, _dtype(probe, name))
    return np.arange(1, prod(shape) + 1).reshape(shape).astype(_dtype(probe, name))


@dataclass(frozen=True, eq=False)
class Masks:
    """All that is added to the scores of one attention.

    Attributes:
        node: the attention's name, for messages.
        tensor: what the softmax reads, or the mask of an operator; None: there is none.
        scores: steps in which the scores are 0.
        is_causal: the operator hides the keys after the query by itself: with `write`, ONNX Attention without a past,
            aligned to the upper left corner; without, an operator that counts the past.
        write: of the cache of keys; None: the operator holds it, and it grows.
        in_use: of a cache of a fixed length, it reads the rows that hold tokens only.
        has_sinks: there is one column more than there are keys.
        product: the scores; None: `tensor` is a mask.
        stand_ins: weights that are taken as 0.
        slopes: float32 ``[H or 1]``, of a position bias, that are taken off; None: none.
    """

    node: str
    tensor: gs.Tensor | None
    scores: ZeroScores
    is_causal: bool = False
    write: Write | None = None
    in_use: bool = False
    has_sinks: bool = False
    product: gs.Tensor | None = None
    stand_ins: tuple[_StandIn, ...] = ()
    slopes: Array | None = None

    @property
    def kept(self) -> int | None:
        """Rows that the cache of keys is cut to; None: it is not cut."""
        return None if self.write is None or self.write.shifted else self.write.kept

    def rows(self, sample: Sample) -> int:
        """The number of keys."""
        if self.write is None or self.in_use:
            return sample.total
        if self.write.growing:
            return self.write.rows(sample)
        past = sample.probe.shape(self.write.past.name)
        return sample.total if past is None else past[self.write.axis]

    def added(self, sample: Sample, *stand_ins: _StandIn) -> Array:
        """The numbers added to scores: float64 ``[B or 1, H or 1, S or 1, keys]``, with a column of sinks.

        Raises:
            UnsupportedModelError: tokens take part.
        """
        if self.tensor is None:
            return np.zeros((1, 1, 1, 1))
        value = self.scores.value(sample, self.tensor.name, (*self.stand_ins, *stand_ins))
        if value is None:
            raise UnsupportedModelError(
                f"the mask of '{self.node}' cannot be evaluated from lengths and masks alone: "
                f"{self._unknown(sample)} take part in it; supported are causal, padding and window masks, and the "
                "caller's own"
            )
        numbers = np.where(value, 0.0, -np.inf) if value.dtype == np.bool_ else value.astype(np.float64)
        if self.product is None:
            return numbers[(None,) * (4 - numbers.ndim)]
        batch = 1 if numbers.shape[0] == 1 else sample.batch
        if numbers.size % (batch * sample.length * numbers.shape[-1] or 1):
            raise UnsupportedModelError(
                f"the scores of '{self.node}' have the shape {list(numbers.shape)} in a step of {sample.length} tokens "
                f"of {sample.batch} sequences; supported are scores with a row for each sequence, head and token"
            )
        added: Array = numbers.reshape(batch, -1, sample.length, numbers.shape[-1])
        return added

    def level(self, sample: Sample) -> Array:
        """The same for keys alone, with 0 for the key that it is largest for, unless it hides all."""
        added = self.added(sample)
        keys = added[..., :-1] if self.has_sinks else added
        most = keys.max(axis=-1, keepdims=True, initial=-np.inf)
        return _without_vanishing(keys - np.where((most > HIDDEN) & np.isfinite(most), most, 0))

    def is_biased(self, sample: Sample) -> bool:
        """True if visible keys are told apart by what is added to their scores."""
        level = self.level(sample)
        return bool(np.any((level > HIDDEN) & (level != 0)))

    def visible(self, sample: Sample) -> Array:
        """The keys that queries see: bool, broadcast to ``[B, 1 or H, S, keys]``; all tokens if the cache is cut.

        Raises:
            UnsupportedModelError: weights or tokens take part, or the shapes do not fit.
        """
        total = self.rows(sample)
        level = self.level(sample)
        if 1 < level.shape[-1] < total:  # ONNX's Attention hides the keys after a short mask
            level = np.pad(level, [(0, 0)] * 3 + [(0, total - level.shape[-1])], constant_values=-np.inf)
        if self.slopes is not None:
            own = sample.past + np.arange(sample.length)[:, None]
            level = level - self.slopes.astype(np.float64)[:, None, None] * (np.arange(level.shape[-1]) - own)
            level = _without_vanishing(level, _ROUNDED)
        visible = level > HIDDEN
        if self.kept is None:
            total = max(total, visible.shape[-1])
        try:
            if self.is_causal:
                visible = visible & np.tri(sample.length, total, sample.past if self.write is None else 0, dtype=bool)
            shape = np.broadcast_shapes((sample.batch, 1, sample.length, total), visible.shape)
            if 0 in shape:  # it would equal whatever it is compared with
                raise ValueError
        except ValueError:
            raise UnsupportedModelError(
                f"the mask of '{self.node}' has the shape {list(visible.shape)} in a step of {sample.length} tokens "
                f"after {sample.past}; supported are masks that broadcast to [B, heads, S, P + S]: here "
                f"[{sample.batch}, heads, {sample.length}, {total}]"
            ) from None
        visible = self.in_order(np.broadcast_to(visible, shape), sample)
        if self.kept is not None:  # the newest tokens: no query sees those that are cut off
            visible = np.pad(visible, [(0, 0)] * 3 + [(sample.total - total, 0)])
        return visible

    def in_order(self, mask: Array, sample: Sample) -> Array:
        """A mask over all keys with those of tokens first, in their order, before rows that hold nothing."""
        fixed_rows = None if self.write is None else self.write.fixed_rows
        if fixed_rows is None or not mask.ndim or mask.shape[-1] != fixed_rows + sample.length:
            return mask
        rows = np.arange(fixed_rows + sample.length)
        return mask[..., [*rows[: sample.past], *rows[fixed_rows:], *rows[sample.past : fixed_rows]]]

    def _unknown(self, sample: Sample) -> str:
        """The sources of a tensor without a value: inputs that only the caller knows, or else weights."""
        names = {
            str(tensor.name)
            for tensor in self.made_of(sample)
            if producer(tensor) is None and not isinstance(tensor, gs.Constant)
        }
        if not names:
            return "weights (such as a learned position bias), or sizes that do not fit,"
        return (
            f"values of {', '.join(repr(name) for name in sorted(names))} (such as a mask that the text decides, or "
            "images whose tokens see each other)"
        )

    def made_of(self, sample: Sample, *, all_of_it: bool = False) -> Iterator[gs.Tensor]:
        """The tensors that what is added is made of, without the scores: those that have no value, or all."""
        pending = [] if self.tensor is None else [self.tensor]
        seen = {"" if self.product is None else self.product.name}
        while pending:
            tensor = pending.pop()
            if tensor.name in seen or not (all_of_it or self.scores.value(sample, tensor.name, self.stand_ins) is None):
                continue
            seen.add(tensor.name)
            yield tensor
            node = producer(tensor)
            pending += [] if node is None or is_op(node, "Shape", "Size") else node.inputs  # no values go on


def sinks_of(masks: Masks, heads: int, samples: Samples) -> Sinks:
    """Guess the logit of each head that stands beside the scores.

    Raises:
        UnsupportedModelError: there are no numbers that do not depend on the text.
    """
    sample, name = samples.plain[0], "" if masks.tensor is None else str(masks.tensor.name)

    def seen(*stand_ins: _StandIn) -> Array | None:
        if masks.scores.value(sample, name, stand_ins) is None:
            return None
        added = replace(masks, stand_ins=()).added(sample, *stand_ins)[0, :, -1]
        return np.broadcast_to(added[:, -1] - added[:, :-1].max(axis=-1), heads)

    for tensor in masks.made_of(sample, all_of_it=True):
        if isinstance(tensor, gs.Constant) and prod(tensor.shape) == heads:
            column = seen((str(tensor.name), "places"))
            if column is not None and np.array_equal(column, np.arange(1, heads + 1)):
                return tensor
    if (column := seen()) is None:
        raise UnsupportedModelError(
            f"the column beside the scores of '{masks.node}' is no sink (no value); supported is one logit for each "
            "head, a weight or a constant, that does not depend on the text"
        )
    return column.astype(np.float32)


def classify(masks: Masks, graph: gs.Graph, interface: Interface, samples: Samples) -> Visibility:
    """Guess which keys the queries of one attention see, from all that is added to its scores.

    Raises:
        UnsupportedModelError: the mask is none of the templates.
    """
    bias: RelativeBias | None = None
    sample = samples.plain[0]
    if masks.tensor is not None:
        added = masks.scores.value(sample, str(masks.tensor.name))
        if added is None or masks.is_biased(sample):
            masks, bias = extensions.position_biases.take_off(masks, samples)
    own = _find_own(masks, graph, interface, samples)
    if own is None:
        if masks.write is not None and masks.write.shifted:
            return extensions.ring_windows.check_shifted(masks, samples)
        visibility = replace(_template(masks, samples), bias=bias, slopes=masks.slopes)
        if masks.write is None or not masks.write.circular:
            return visibility
        return extensions.ring_windows.check_ring(masks, visibility, samples)
    if bias is not None or masks.slopes is not None:
        raise UnsupportedModelError(
            f"'{masks.node}' has a relative position bias beside the caller's own mask '{own.name}'; supported is one "
            "of both"
        )
    return _own(masks, own, samples)


def _template(masks: Masks, samples: Samples) -> Visibility:
    """The first template that the masks are in a few steps; where S is 1, causal and bounded are the same."""
    seen = [(sample, masks.visible(sample)) for sample in samples.few]
    longest, visible = seen[-1]
    window = max(1, int(visible[..., -1, :].sum(-1).max()))
    first = [s for s in samples.plain if not s.past and s.length > 1][
        :1
    ]  # shows tokens that see later ones there alone
    for guess in (Visibility(), Visibility(causal=False), Visibility(window=window)):
        if all(np.all(visible == _drawn(guess, sample, visible.shape[-1])) for sample, visible in seen):
            for sample, visible in ((s, masks.visible(s)) for s in first):
                if other := _difference([(sample, visible)], guess):
                    raise UnsupportedModelError(_no_template(masks, sample, visible, other))
            return guess
    before, after = (masks.visible(sample) for sample in samples.twins)
    still = masks.write is not None and not masks.write.growing and np.array_equal(before, after) and not after.all()
    other = _difference(seen, Visibility(window=window))
    raise UnsupportedModelError(_no_template(masks, longest, visible, other) + f". {FOR_GOOD}" * still)


def _drawn(template: Visibility, sample: Sample, keys: int) -> Array:
    """A template as a mask, ``[S, keys]``."""
    rows, last = np.arange(keys)[None, :], sample.past + np.arange(sample.length)[:, None]
    visible = rows <= last if template.causal else rows + 0 * last < sample.total
    return visible if template.window is None else visible & (rows > last - template.window)


def _find_own(masks: Masks, graph: gs.Graph, interface: Interface, samples: Samples) -> gs.Tensor | None:
    """The first input with a mask of the caller's own whose values reach the attention."""
    sample = samples.plain[0]
    names = (
        tensor.name
        for tensor in interface.of(OriginalRole.MASK)
        if not np.array_equal(masks.added(sample, (tensor.name, "permuted")), masks.added(sample))
    )
    name = next(names, None)
    return next((t for t in graph.inputs if t.name == name), None)


def _own(masks: Masks, own: gs.Tensor, samples: Samples) -> Visibility:
    """The caller's own mask, and the operator's causality beside it where it counts the past.

    Masks that a caller may give need not be causal, and those of the check are: so values are compared here.
    """
    counts = masks.is_causal and masks.write is None
    masks = replace(masks, is_causal=masks.is_causal and not counts)
    for sample in samples.few:
        visible, own_mask = masks.visible(sample), masks.in_order(sample.own[own.name], sample)
        fits = all(n in (1, m) for n, m in zip(own_mask.shape[::-1], visible.shape[::-1], strict=False))
        if not fits or not np.all(visible == own_mask):
            raise UnsupportedModelError(
                f"the mask of '{masks.node}' is made of the input '{own.name}' and of something else; supported is the "
                "caller's own mask as it stands, or a causal, padding or window mask"
            )
    return Visibility(causal=counts, own=own, bounded=False)  # both hold, as in the operator


def _difference(seen: Sequence[tuple[Sample, Array]], window: Visibility) -> str:
    """Words on the first query that sees other keys than a window would show it, if the last query looks like one."""
    for sample, visible in seen:
        drawn = _drawn(window, sample, visible.shape[-1])
        if np.array_equal(visible[0, 0, -1], drawn[-1]):
            wrong = np.flatnonzero((visible[0, 0] != drawn).any(-1))
            if len(wrong):
                return f", and query {wrong[0]} of the step {_span(visible[0, 0, wrong[0]])}"
    return ""


def _span(row: Array) -> str:
    """The keys that a query sees, in words."""
    seen = np.flatnonzero(row)
    return f"sees {len(seen)} of {len(row)} keys, from {seen[0]} to {seen[-1]}" if len(seen) else "sees no key"


def _no_template(masks: Masks, sample: Sample, visible: Array, other: str) -> str:
    heads = np.flatnonzero((visible != visible[:, :1]).any(axis=(0, 2, 3)))
    if len(heads):
        return (
            f"heads of '{masks.node}' have different masks: with {sample.past} tokens in the cache and {sample.length} "
            f"new, the last query of head 0 {_span(visible[0, 0, -1])}, and that of head {heads[0]} "
            f"{_span(visible[0, heads[0], -1])}; supported is one mask for all heads of an attention"
        )
    hint = ""
    if masks.write is not None and masks.kept is not None:
        hint = (
            f". The cache '{masks.write.past.name}' keeps its newest {masks.kept} rows: supported is a window of at "
            f"most {masks.kept + 1} tokens over it, which hides from each query of a step what others have lost"
        )
    if masks.write is not None and masks.write.fixed_rows is not None:
        hint = (
            f". The past of the cache '{masks.write.past.name}' always has {masks.write.fixed_rows} rows: supported "
            "are masks that hide those that hold no token, by a padding mask or the caller's own, and nothing else"
        )
    batch = f", in a batch of {sample.batch}" if sample.batch > 3 else ""
    return (
        f"the mask of '{masks.node}' is none of the supported ones (causal, padding, window, the caller's own): with "
        f"{sample.past} tokens in the cache and {sample.length} new{batch}, the last query "
        f"{_span(visible[-1, -1, -1])}{other}{hint}"
    )
