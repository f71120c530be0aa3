"""GroupQueryAttention, which the onnxruntime-genai builder and ONNX Runtime's optimizers write.

    com.microsoft::GroupQueryAttention(qkv, -, -, past_k, past_v, seqlens_k, total, cos, sin; do_rotary=1)
    becomes
    q, k, v   = Split(qkv), heads apart [B, N, S, D]
    q, k      = RMSNormalization(q), RMSNormalization(k)            with q_norm_weight, k_norm_weight
    q, k      = RotaryEmbedding(q, cos, sin, write_indices + arange(S)), the same of k
    present   = TensorScatter(past, k or v, write_indices)
    output    = Attention(q, present_k, present_v; is_causal=1, left_window_size=local_window_size - 1), heads merged
                with head_sink as its sinks; with smooth_softmax=1, sinks of 0

Measured on ONNX Runtime 1.31.1 (CPU): new rows go to ``seqlens_k + 1 - S``, per row of the batch, which is also the
first position; a local window of W lets a query see itself and W - 1 keys before; the soft cap comes before bias and
masks, and leaves the sinks alone; head_sink counts beside smooth_softmax=1, too, which does nothing then; with
position_ids, a first prompt counts on from its first one and later steps take them as they are, so that only contiguous
ones mean the same in both. Its CPU kernel refuses q_norm_weight and k_norm_weight; their meaning is that of the
operator's page.

With sliding_window_cache, the operator's buffers drop what its window has left behind, if they are shorter than the
text; the numbers are the same as with a linear cache (measured, buffers of the window's length and more), which is what
it becomes here. ``--sliding circular`` makes a ring of it again.

``seqlens_k`` and ``total_sequence_length`` are proven to be P + S - 1 and P + S, or are inputs, which mean that by the
operator's definition: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, OptionError, UnsupportedModelError
from trt_kvcache.importer.graph import consumers, contains, dims, elem_type, input_or_none
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.mask_values import MaskKind, MaskUse
from trt_kvcache.importer.normalize.attention.sinks import Sinks
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Visibility
from trt_kvcache.importer.normalize.fused.contrib import CONTRIB, FLOAT, used
from trt_kvcache.importer.normalize.fused.held import (
    Heads,
    HeldCache,
    Rewrite,
    has_past,
    head_size,
    held_caches,
    label,
    rewrite_held,
    split_heads,
    state_cache_shape,
    visibility,
    width,
)
from trt_kvcache.importer.normalize.fused.rotary import rotate

_PASTS, _PRESENTS = (3, 4), (1, 2)
_SEQLENS, _TOTAL, _COS, _SIN, _POSITIONS, _BIAS = 5, 6, 7, 8, 9, 10
_SINK, _K_SCALE, _V_SCALE, _Q_NORM, _K_NORM = 11, 12, 13, 14, 15


def is_gqa(node: gs.Node) -> bool:
    """Whether a node is ONNX Runtime's GroupQueryAttention."""
    return bool(node.op == "GroupQueryAttention" and node.domain == CONTRIB)


def gqa_caches(graph: gs.Graph, node: gs.Node) -> list[HeldCache]:
    """The caches of one GroupQueryAttention, with their shapes stated in the graph.

    Raises:
        UnsupportedModelError: it has none.
        UnsupportedModelError, InvalidModelError: see `held_caches`, or shapes contradict each other.
    """
    if not has_past(node, _PASTS):
        raise UnsupportedModelError(
            f"{label(node)} has no past_key and past_value; supported are decoders that are given their caches: export "
            "the model with past"
        )
    caches = held_caches(graph, node, _PASTS, _PRESENTS)
    if node.attrs.get("sliding_window_cache", 0):
        caches = [replace(cache, growing=False) for cache in caches]
    sizes = _sizes(node)
    for cache in caches:
        state_cache_shape(cache, sizes.kv_heads, sizes.head_size)
    return caches


@dataclass(frozen=True)
class _Sizes:
    heads: int
    kv_heads: int
    head_size: int
    packed: bool


def _sizes(node: gs.Node) -> _Sizes:
    heads, kv_heads = int(node.attrs.get("num_heads", 0)), int(node.attrs.get("kv_num_heads", 0))
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise InvalidModelError(f"{label(node)} has num_heads={heads} and kv_num_heads={kv_heads}")
    given = [t for t in (input_or_none(node, 1), input_or_none(node, 2)) if t is not None]
    if len(given) == 1:
        raise InvalidModelError(f"{label(node)} has only one of key and value")
    if not given:
        size = head_size(node.inputs[0], heads + 2 * kv_heads, node, node.inputs[_PASTS[0]])
        return _Sizes(heads, kv_heads, size, packed=True)
    size = head_size(node.inputs[0], heads, node, node.inputs[_PASTS[0]])
    for tensor, past in zip(given, node.inputs[3:5], strict=True):
        if head_size(tensor, kv_heads, node, past) != size:
            raise InvalidModelError(
                f"'{tensor.name}' of {label(node)} is {width(tensor, node)} wide, which is not {kv_heads} heads of "
                f"{size}"
            )
    return _Sizes(heads, kv_heads, size, packed=False)


def prove_gqa(
    graph: gs.Graph, node: gs.Node, caches: Sequence[HeldCache], interface: Interface, samples: Samples
) -> Rewrite:
    """Prove that the canonical form says what one GroupQueryAttention says; returns the rewrite.

    Raises:
        UnsupportedModelError: an option has no form in ONNX's Attention, or lengths are not what they have to be.
        OptionError: the capacity is more than the rows of the rotary tables.
    """
    _check_options(graph, node)
    for cache in caches:
        if elem_type(cache.past) != elem_type(node.inputs[0]) and elem_type(node.inputs[0]):
            raise UnsupportedModelError(
                f"the cache '{cache.past.name}' of {label(node)} has another type than its queries (a quantized "
                "cache); supported are float caches of the model's own type"
            )
    _check_lengths(graph, node, samples)
    _check_table(node, samples.plain[0].capacity)
    causal = bool(node.attrs.get("causal", 1))
    window = int(node.attrs.get("local_window_size", -1))
    ring = int(node.attrs.get("sliding_window_cache", 0))
    if window == 0 or window < -1 or (window > 0 and not causal) or (ring and window < 1):
        raise InvalidModelError(
            f"{label(node)} has local_window_size={window}, causal={int(causal)} and sliding_window_cache={ring}; a "
            "window holds at least the query's own key, is causal, and is what a sliding cache needs"
        )
    bias = input_or_none(node, _BIAS)
    masks = [MaskUse(bias, MaskKind.ADDED)] if bias is not None else []
    sizes = _sizes(node)
    seen = visibility(
        node,
        masks,
        graph,
        interface,
        samples,
        causal=causal,
        window=window if window > 0 else None,
        sinks=_sinks(node, sizes.heads) is not None,
    )
    return partial(_rewrite, node=node, caches=caches, sizes=sizes, seen=seen)


def _check_table(node: gs.Node, capacity: int) -> None:
    """Refuse rotary tables that end before the caches do: what lies behind their end is not defined."""
    rows = (dims(node.inputs[_COS]) or ("?",))[0] if node.attrs.get("do_rotary", 0) else "?"
    if isinstance(rows, int) and rows < capacity:
        raise OptionError(
            f"--capacity is {capacity}, but {label(node)} has rotary tables of {rows} positions: give at most "
            f"--capacity {rows}, or export with a longer context"
        )


def _check_options(graph: gs.Graph, node: gs.Node) -> None:
    found = None
    sinks = input_or_none(node, _SINK)
    if sinks is not None and (not isinstance(sinks, gs.Constant) or dims(sinks) != (node.attrs.get("num_heads"),)):
        found = (
            f"has the sinks '{sinks.name}' {list(dims(sinks) or ())}; supported is a weight with one logit for each of "
            "its heads"
        )
    elif (
        input_or_none(node, _K_SCALE) is not None
        or input_or_none(node, _V_SCALE) is not None
        or any(node.attrs.get(name, "NONE") not in ("NONE", b"NONE", "") for name in ("k_quant_type", "v_quant_type"))
    ):
        found = "has quantized caches; supported are float caches"
    elif used(graph, node, 3):
        found = "gives its scores as an output (qk_output); supported is attention alone"
    elif (input_or_none(node, _Q_NORM) is None) != (input_or_none(node, _K_NORM) is None):
        raise InvalidModelError(f"{label(node)} has only one of q_norm_weight and k_norm_weight")
    if found is not None:
        raise UnsupportedModelError(f"{label(node)} {found}: export without it")
    if node.attrs.get("do_rotary", 0):
        cos = input_or_none(node, _COS)
        if cos is None or input_or_none(node, _SIN) is None:
            raise InvalidModelError(f"{label(node)} has do_rotary=1 and no cos_cache or sin_cache")
        width(cos, node)


def _check_lengths(graph: gs.Graph, node: gs.Node, samples: Samples) -> None:
    for index, name, less in ((_SEQLENS, "seqlens_k", 1), (_TOTAL, "total_sequence_length", 0)):
        tensor = input_or_none(node, index)
        if tensor is None:
            raise InvalidModelError(f"{label(node)} has no {name}")
        if contains(graph.inputs, tensor) and samples.plain[0].probe.value(tensor.name) is None:
            continue

        def counts(sample: Sample, name: str = name, tensor: gs.Tensor = tensor, less: int = less) -> None:
            value = sample.probe.value(tensor.name)
            if value is None or not np.array_equal(value.reshape(-1), np.full(value.size, sample.total - less)):
                shown = "unknown" if value is None else value.reshape(-1).tolist()
                raise UnsupportedModelError(
                    f"{name} '{tensor.name}' of {label(node)} is {shown} with {sample.past} tokens in the cache and "
                    f"{sample.length} new ones; supported is their sum{' - 1' * less}, for every row"
                )

        samples.hold(counts)
    positions = input_or_none(node, _POSITIONS)
    if positions is None or not node.attrs.get("do_rotary", 0):
        return

    def counts_on(sample: Sample) -> None:
        value = sample.probe.value(positions.name)
        expected = np.broadcast_to(sample.past + np.arange(sample.length), (sample.batch, sample.length))
        if value is None or not np.array_equal(value, expected):
            raise UnsupportedModelError(
                f"position_ids '{positions.name}' of {label(node)} do not count on from the tokens in the cache; ONNX "
                "Runtime reads only the first one of a first prompt, so that no other ids have one meaning"
            )

    samples.hold(counts_on)


def _rewrite(canonical: Canonical, node: gs.Node, caches: Sequence[HeldCache], sizes: _Sizes, seen: Visibility) -> None:
    heads = _rotated(canonical, node, _normalized(canonical, node, _heads(canonical, node, sizes)), sizes)
    scale = float(node.attrs.get("scale", 0.0)) or sizes.head_size**-0.5
    softcap = float(node.attrs.get("softcap", 0.0))
    lengths = [t for t in node.inputs[_SEQLENS : _TOTAL + 1] if contains(canonical.graph.inputs, t)]
    merged = sizes.heads * sizes.head_size
    rewrite_held(canonical, node, caches, heads, seen, scale, softcap, merged, sinks=_sinks(node, sizes.heads))
    node.inputs.clear()
    dead = [t for t in lengths if not consumers(t)]
    canonical.graph.inputs = [t for t in canonical.graph.inputs if not contains(dead, t)]


def _sinks(node: gs.Node, heads: int) -> Sinks | None:
    given = input_or_none(node, _SINK)
    if given is None and int(node.attrs.get("smooth_softmax", 0)) == 1:
        return np.zeros(heads, np.float32)
    return given


def _heads(canonical: Canonical, node: gs.Node, sizes: _Sizes) -> Heads:
    emit = canonical.emit
    counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    parts = list(node.inputs[:3])
    if sizes.packed:
        packed = node.inputs[0]
        widths = [n * sizes.head_size for n in counts]
        parts = [gs.Variable(emit.name(hint), dtype=packed.dtype) for hint in ("query", "key", "value")]
        for part, size in zip(parts, widths, strict=True):
            part.shape = [*list(packed.shape or (None, None))[:2], size]
        split = gs.Node("Split", emit.name("qkv:Split"), {"axis": -1}, [packed, emit.ints(widths)], parts)
        canonical.graph.nodes.append(split)
    return Heads(*(split_heads(emit, t, n, sizes.head_size) for t, n in zip(parts, counts, strict=True)))


def _normalized(canonical: Canonical, node: gs.Node, heads: Heads) -> Heads:
    query_weight, key_weight = input_or_none(node, _Q_NORM), input_or_none(node, _K_NORM)
    if query_weight is None or key_weight is None:
        return heads
    epsilon = float(node.attrs.get("qk_norm_epsilon", 1e-6))
    normalized = []
    for tensor, weight in ((heads.query, query_weight), (heads.key, key_weight)):
        y = canonical.emit.op("RMSNormalization", [tensor, weight], "head_norm", axis=-1, epsilon=epsilon,
                              stash_type=FLOAT)  # fmt: skip
        y.shape = tensor.shape
        normalized.append(y)
    return Heads(normalized[0], normalized[1], heads.value)


def _rotated(canonical: Canonical, node: gs.Node, heads: Heads, sizes: _Sizes) -> Heads:
    if not node.attrs.get("do_rotary", 0):
        return heads
    cos, sin = node.inputs[_COS], node.inputs[_SIN]
    given = input_or_none(node, _POSITIONS)
    positions = given if given is not None else canonical.positions()
    rotary = 2 * width(cos, node)
    rotary = 0 if rotary == sizes.head_size else rotary
    interleaved = bool(node.attrs.get("rotary_interleaved", 0))
    query, key = (
        rotate(canonical.emit, t, cos, sin, positions, interleaved=interleaved, rotary_dim=rotary)
        for t in (heads.query, heads.key)
    )
    return Heads(query, key, heads.value)
