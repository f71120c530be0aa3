"""What the operators that hold a cache have in common: GroupQueryAttention, MultiHeadAttention, Attention with a past.

output, present_k, present_v = Operator(q, k, v, past_k, past_v, ...)
becomes
present_k = TensorScatter(past_k, k [B, N, S, D], write_indices)
present_v = TensorScatter(past_v, v [B, N, S, Dv], write_indices)
output    = Attention(q [B, Hq, S, D], present_k, present_v, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.graph import (
    NAME_PREFIX,
    Emitter,
    consumers,
    contains,
    dims,
    elem_type,
    input_or_none,
    is_op,
    producer,
)
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.mask_values import MaskUse
from trt_kvcache.importer.normalize.attention.masks import check_bias, classify
from trt_kvcache.importer.normalize.attention.sinks import Sinks
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Visibility
from trt_kvcache.importer.normalize.fused.contrib import become

PROJECTED = "projected"
"""What emitted names begin with around ONNX Runtime's Attention."""

Rewrite = Callable[[Canonical], None]
"""Edits the graph as proven before."""


@dataclass(frozen=True, eq=False)
class HeldCache:
    """A cache ``[B, N, L, D]`` that an operator takes and gives back.

    Attributes:
        past: the graph input.
        present: the graph output.
        growing: past holds as many rows as there are tokens, present more; else both are one buffer.
        idiom: the operator, for the plan.
        node: name of the operator's node, for messages.
        axis: the sequence axis.
        positions: names of the graph inputs that say where the rows go; none, lengths are the operator's own matter.
    """

    past: gs.Tensor
    present: gs.Tensor
    growing: bool
    idiom: str
    node: str
    axis: int | None = 2
    positions: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Heads:
    """Queries, and the new keys and values, as ``[B, heads, S, head size]``."""

    query: gs.Tensor
    key: gs.Tensor
    value: gs.Tensor


def label(node: gs.Node) -> str:
    """The node in a message, as the model as exported has it."""
    return f"{'Attention' if was_attention(node) else node.op} '{node.name}'"


def was_attention(node: gs.Node) -> bool:
    """Whether a MultiHeadAttention stands in the place of ONNX Runtime's Attention (see `ort_attention`)."""
    maker = producer(node.inputs[0]) if node.op == "MultiHeadAttention" and node.inputs else None
    return maker is not None and str(maker.name).startswith(f"{NAME_PREFIX}{PROJECTED}")


def has_past(node: gs.Node, pasts: Sequence[int]) -> bool:
    """Whether one of an operator's inputs `pasts`, past_key and past_value, is given."""
    return any(input_or_none(node, index) is not None for index in pasts)


def held_caches(graph: gs.Graph, node: gs.Node, pasts: Sequence[int], presents: Sequence[int]) -> list[HeldCache]:
    """The caches of one operator: keys, then values.

    Args:
        graph: the model as exported.
        node: the operator.
        pasts: indices of its inputs past_key and past_value.
        presents: indices of its outputs present_key and present_value.

    Raises:
        UnsupportedModelError: a past is no graph input of its own, or a present no graph output.
        InvalidModelError: one past is missing.
    """
    if any(input_or_none(node, index) is None for index in pasts):
        raise InvalidModelError(f"{label(node)} has only one of past_key and past_value")
    found = []
    for past_index, present_index in zip(pasts, presents, strict=True):
        past = node.inputs[past_index]
        present = node.outputs[present_index] if present_index < len(node.outputs) else gs.Variable.empty()
        if not contains(graph.inputs, past):
            raise UnsupportedModelError(
                f"the past '{past.name}' of {label(node)} is no graph input; supported are caches that the caller "
                "gives and receives: export the model with its caches as inputs and outputs"
            )
        if not contains(graph.outputs, present):
            raise UnsupportedModelError(
                f"the cache '{past.name}' of {label(node)} has no graph output for what is written to it: export the "
                "model with its present caches as outputs"
            )
        others = [n for n in consumers(past) if n is not node and not is_op(n, "Shape")]
        if others or sum(t is past for t in node.inputs) > 1:
            reader = label(others[0]) if others else f"{label(node)} twice"
            raise UnsupportedModelError(
                f"the cache '{past.name}' of {label(node)} is read by {reader}; supported are caches that one operator "
                "alone updates and reads"
            )
        found.append(HeldCache(past, present, _grows(past, present), node.op, node.name))
    return found


def _grows(past: gs.Tensor, present: gs.Tensor) -> bool:
    before, after = (dims(past) or ())[2:3], (dims(present) or ())[2:3]
    return not before or before != after or before == ("?",)


def state_cache_shape(cache: HeldCache, heads: int, size: int) -> None:
    """Write number and size of heads into a cache's shape where the exporter left symbols.

    Raises:
        InvalidModelError: the shape says something else.
    """
    for tensor in (cache.past, cache.present):
        shape = list(dims(tensor) or ("?",) * 4)
        if len(shape) != 4:
            raise InvalidModelError(f"the cache '{tensor.name}' of '{cache.node}' has rank {len(shape)} instead of 4")
        for axis, known in ((1, heads), (3, size)):
            if isinstance(shape[axis], int) and shape[axis] != known:
                raise InvalidModelError(
                    f"the cache '{tensor.name}' of '{cache.node}' has size {shape[axis]} on axis {axis}, and the "
                    f"operator's inputs say {known}"
                )
            shape[axis] = known
        tensor.shape = [None if dim == "?" else dim for dim in shape]


def width(tensor: gs.Tensor, node: gs.Node) -> int:
    """The last dimension of an operator's input.

    Raises:
        UnsupportedModelError: the model does not say it.
    """
    last = (dims(tensor) or ("?",))[-1]
    if not isinstance(last, int):
        raise UnsupportedModelError(
            f"the width of '{tensor.name}', which {label(node)} reads, is not in the model: export it with shapes"
        )
    return last


def head_size(tensor: gs.Tensor, heads: int, node: gs.Node, past: gs.Tensor | None = None) -> int:
    """The size of each of `heads` heads that lie side by side in a tensor's last dimension.

    Args:
        tensor: ``[B, S, heads * size]``.
        heads: how many lie there.
        node: the operator that reads it.
        past: a cache ``[B, N, L, size]``, whose shape counts where that of `tensor` is unknown.

    Raises:
        UnsupportedModelError: the width is unknown.
        InvalidModelError: the heads do not divide it.
    """
    known = (dims(past) or ("?",))[-1] if past is not None else "?"
    if isinstance(known, int) and not isinstance((dims(tensor) or ("?",))[-1], int):
        return known
    size = width(tensor, node)
    if heads < 1 or size % heads:
        raise InvalidModelError(f"'{tensor.name}' of {label(node)} is {size} wide, which {heads} heads do not divide")
    return size // heads


def split_heads(emitter: Emitter, tensor: gs.Tensor, heads: int, size: int) -> gs.Tensor:
    """``[B, S, N*H]`` -> ``[B, N, S, H]``."""
    split = emitter.op("Reshape", [tensor, emitter.ints([0, 0, heads, size])], "split_heads")
    result = emitter.op("Transpose", [split], "heads", perm=[0, 2, 1, 3])
    shape = dims(tensor) or ("?", "?")
    result.shape = [None if d == "?" else d for d in (shape[0], heads, shape[1], size)]
    return result


def visibility(
    node: gs.Node,
    masks: Sequence[MaskUse],
    graph: gs.Graph,
    interface: Interface,
    samples: Samples,
    *,
    causal: bool,
    window: int | None = None,
    sinks: bool = False,
) -> Visibility:
    """Which keys an operator's queries see, by its masks and by what it does of itself.

    Args:
        node: the operator.
        masks: its masks over past and new keys.
        graph: the model as exported.
        interface: of it.
        samples: of it.
        causal: the operator hides keys behind the query's own position, which counts the past.
        window: the operator hides all but so many keys up to the query's own; None: it does not.
        sinks: logits stand beside the scores.

    Raises:
        UnsupportedModelError: see `masks.classify`.
    """
    if not masks:
        return Visibility(causal=causal, window=window)
    found = classify(node.name, masks, causal, graph, interface, samples, sinks=sinks)
    windows = [w for w in (window, found.window) if w is not None]
    seen = replace(found, window=min(windows) if windows else None, bounded=True)
    return check_bias(node.name, seen)


def rewrite_held(
    canonical: Canonical,
    node: gs.Node,
    caches: Sequence[HeldCache],
    heads: Heads,
    seen: Visibility,
    scale: float,
    softcap: float = 0.0,
    merged: int | None = None,
    precision: int | None = None,
    sinks: Sinks | None = None,
) -> None:
    """Put TensorScatter and Attention in the place of an operator.

    Args:
        canonical: emits them.
        node: the operator; it is left without outputs.
        caches: keys, values.
        heads: what goes into them.
        seen: which keys a query sees.
        scale: of the scores.
        softcap: of the scores; 0: none.
        merged: the width of a result ``[B, S, Hq*Dv]``; None: the result is ``[B, Hq, S, Dv]``.
        precision: ONNX element type that the softmax is computed in; None: that of the queries.
        sinks: logits beside the scores; None: none.
    """
    output = node.outputs[0]
    node.outputs.clear()
    for cache, update in zip(caches, (heads.key, heads.value), strict=True):
        canonical.scatter(cache.past, update, cache.present, 2, "linear", cache.idiom)
    emit = canonical.emit
    result = output
    if merged is not None:
        result = gs.Variable(emit.name("attention_heads"), dtype=elem_type(output) or heads.query.dtype)
    key, value = (cache.present for cache in caches)
    canonical.attention(result, heads.query, key, value, seen, scale, softcap, node.name, sinks)
    if precision is not None:
        result.inputs[0].attrs["softmax_precision"] = precision
    if merged is not None:
        rows = emit.op("Transpose", [result], "attention_rows", perm=[0, 2, 1, 3])
        become(emit.op("Reshape", [rows, emit.ints([0, 0, merged])], "attention_merged"), output)
