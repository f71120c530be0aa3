"""Attention of opset 23 to 25 that holds its cache: past_key and past_value in, present_key and present_value out.

    y, present_k, present_v = Attention(q, k, v, mask, past_k, past_v; is_causal=1)
    becomes
    present_k = TensorScatter(past_k, k [B, N, S, D], write_indices), the same of v
    y         = Attention(q [B, Hq, S, D], present_k, present_v, -, -, -, nonpad_kv_seqlen; is_causal=1)

With a past, `is_causal` counts it: query i sees key j where ``j <= P + i``. Measured on ONNX Runtime 1.31.1, opsets 23
to 26: so does its kernel, which also agrees with ONNX on masks beside is_causal and on the soft cap (before the mask).
It takes no mask shorter than P + S, where ONNX hides the missing keys; such masks are refused here too. A window
(`left_window_size`, opset 25) counts the keys before the query's own; ONNX Runtime does not know it yet.

Without a past, presents are the keys and values themselves, ``[B, N, S, D]``, as mobius-onnx's cross-attention gives
them:

    y, present_k, present_v = Attention(q, k, v)
    becomes
    y = Attention(q, k, v);  present_k = k, heads apart;  present_v = v, heads apart

Semantics: https://onnx.ai/onnx/operators/onnx__Attention.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.graph import Emitter, dims, input_or_none, is_op
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.mask_values import MaskKind, MaskUse
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Visibility
from trt_kvcache.importer.normalize.fused.contrib import become, used
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
)

_MASK, _PASTS, _LENGTHS, _PRESENTS, _SCORES = 3, (4, 5), 6, (1, 2), 3


def is_in_op(node: gs.Node) -> bool:
    """Whether a node is ONNX's Attention with a past."""
    return is_op(node, "Attention") and has_past(node, _PASTS)


def lower_presents(graph: gs.Graph) -> None:
    """Take, in place, presents away from each Attention that has no past: they are its keys and values.

    Raises:
        InvalidModelError: 3-D inputs without a number of heads.
        UnsupportedModelError: a width is unknown.
    """
    emitter = Emitter(graph)
    changed = False
    for node in [n for n in graph.nodes if is_op(n, "Attention") and not is_in_op(n)]:
        pairs = zip((1, 2), _PRESENTS, strict=True)
        wanted = [(node.inputs[i], node.outputs[p]) for i, p in pairs if used(graph, node, p)]
        if not wanted:
            continue
        outputs = list(node.outputs)
        node.outputs.clear()
        node.outputs.extend([outputs[0], *(gs.Variable.empty() for _ in outputs[1:3]), *outputs[3:]])
        for tensor, present in wanted:
            if _rank(node) == 3:
                heads = _heads_of(node, "kv_num_heads", 1)
                size = head_size(tensor, heads, node)
                result = split_heads(emitter, tensor, heads, size)
                batch, length = (None if d == "?" else d for d in (dims(tensor) or ("?", "?"))[:2])
                present.shape = [batch, heads, length, size]  # some exporters state that of the 3-D keys
            else:
                result = emitter.op("Identity", [tensor], "present")
            become(result, present)
        while node.outputs[-1].is_empty():
            node.outputs.pop()
        changed = True
    if changed:
        graph.toposort()


def in_op_caches(graph: gs.Graph, node: gs.Node) -> list[HeldCache]:
    """The caches of one Attention, with their shapes stated in the graph.

    Raises:
        UnsupportedModelError, InvalidModelError: see `held_caches`, or shapes contradict each other.
    """
    caches = held_caches(graph, node, _PASTS, _PRESENTS)
    heads = _heads_of(node, "kv_num_heads", 1)
    merged = _rank(node) == 3
    for cache, tensor in zip(caches, node.inputs[1:3], strict=True):
        state_cache_shape(cache, heads, head_size(tensor, heads if merged else 1, node, cache.past))
    return caches


def prove_in_op(
    graph: gs.Graph, node: gs.Node, caches: Sequence[HeldCache], interface: Interface, samples: Samples
) -> Rewrite:
    """Prove that the canonical form says what one Attention with a past says; returns the rewrite.

    Raises:
        UnsupportedModelError: its mask is none of the templates, or it gives its scores as an output.
        InvalidModelError: it has a past and nonpad_kv_seqlen.
    """
    if input_or_none(node, _LENGTHS) is not None:
        raise InvalidModelError(f"{label(node)} has both a past and nonpad_kv_seqlen, which ONNX forbids")
    if used(graph, node, _SCORES):
        raise UnsupportedModelError(
            f"{label(node)} gives its scores as an output (qk_matmul_output); supported is attention alone: export "
            "without it"
        )
    mask = input_or_none(node, _MASK)
    if mask is not None:
        _check_length(node, mask, samples)
    causal = bool(node.attrs.get("is_causal", 0))
    left, right = int(node.attrs.get("left_window_size", -1)), int(node.attrs.get("right_window_size", -1))
    if right > 0 and not causal:
        raise UnsupportedModelError(
            f"{label(node)} lets a query see {right} keys after its own (right_window_size); supported are windows "
            "that end with the query's own key"
        )
    masks = [MaskUse(mask, MaskKind.ADDED)] if mask is not None else []
    window = left + 1 if left >= 0 else None
    seen = visibility(node, masks, graph, interface, samples, causal=causal or right == 0, window=window)
    return partial(_rewrite, node=node, caches=caches, seen=seen)


def _check_length(node: gs.Node, mask: gs.Tensor, samples: Samples) -> None:
    for sample in samples.plain:
        shape = sample.probe.shape(mask.name)
        if shape is not None and shape[-1:] != (sample.total,):  # an unknown mask is refused as such
            raise UnsupportedModelError(
                f"the mask '{mask.name}' of {label(node)} has the shape {list(shape)} with {sample.past} tokens "
                f"in the cache and {sample.length} new ones; supported are masks over all of them, which are P + S"
            )


def _rewrite(canonical: Canonical, node: gs.Node, caches: Sequence[HeldCache], seen: Visibility) -> None:
    query, key, value = node.inputs[:3]
    kv_heads = _heads_of(node, "kv_num_heads", 1)
    scale = node.attrs.get("scale")
    softcap = float(node.attrs.get("softcap", 0.0))
    precision = int(node.attrs.get("softmax_precision", 0)) or None
    if _rank(node) == 4:
        size, merged = head_size(query, 1, node, node.inputs[_PASTS[0]]), None
        heads = Heads(query, key, value)
    else:
        query_heads = _heads_of(node, "q_num_heads", 0)
        size = head_size(query, query_heads, node, node.inputs[_PASTS[0]])
        value_size = head_size(value, kv_heads, node, node.inputs[_PASTS[1]])
        merged = query_heads * value_size
        heads = Heads(
            split_heads(canonical.emit, query, query_heads, size),
            split_heads(canonical.emit, key, kv_heads, size),
            split_heads(canonical.emit, value, kv_heads, value_size),
        )
    scale = float(scale) if scale is not None else size**-0.5
    rewrite_held(canonical, node, caches, heads, seen, scale, softcap, merged, precision)
    node.inputs.clear()


def _rank(node: gs.Node) -> int:
    if "q_num_heads" in node.attrs or "kv_num_heads" in node.attrs:
        return 3
    return 4


def _heads_of(node: gs.Node, attribute: str, index: int) -> int:
    """How many heads an input has: by attribute for 3-D inputs, by shape for 4-D ones."""
    if _rank(node) == 3:
        heads = int(node.attrs.get(attribute, 0))
        if heads < 1:
            raise InvalidModelError(f"{label(node)} has 3-D inputs and lacks {attribute}")
        return heads
    shape = dims(node.inputs[index]) or ("?",) * 4
    if len(shape) != 4 or not isinstance(shape[1], int):
        raise UnsupportedModelError(
            f"the number of heads of '{node.inputs[index].name}', which {label(node)} reads, is not in the model: "
            "export it with shapes"
        )
    return shape[1]
