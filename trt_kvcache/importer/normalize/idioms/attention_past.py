"""Attention that holds its cache: past_key and past_value in, present_key and present_value out.

    y, present_k, present_v = Attention(q, k, v, mask, past_k, past_v; is_causal=1)
    becomes
    present_k = TensorScatter(past_k, k [B, N, S, D], write_indices), the same of v
    y         = Attention(q [B, Hq, S, D], present_k, present_v, -, -, -, nonpad_kv_seqlen; is_causal=1)

ONNX Runtime's GroupQueryAttention, MultiHeadAttention and Attention became such operators before, see
`lower.fused_attention`, which says in private attributes what they were.

With a past, `is_causal` counts it: query i sees key j where ``j <= P + i``. Measured on ONNX Runtime 1.31.1, opsets 23
to 26: so does its kernel, which also agrees with ONNX on masks beside is_causal and on the soft cap (before the mask).
A window (`left_window_size`, opset 25) counts the keys before the query's own; ONNX Runtime does not know it yet.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import SINKS, consumers, contains, dims, elem_type, input_or_none, is_op
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.masks import Masks, ZeroScores, classify
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import AttentionSite, Visibility, Write
from trt_kvcache.importer.normalize.views import is_float_cast, trace_back

_MASK, _PASTS, _PRESENTS = 3, (4, 5), (1, 2)


def find_inner_caches(graph: gs.Graph) -> list[Write]:
    """The caches ``[B, N, L, D]`` inside operators, in graph order: of each operator keys, then values.

    Head counts and sizes that exporters leave as symbols are written into the shapes of the caches.

    Raises:
        UnsupportedModelError: a cache is no input or output of the graph.
    """
    return [cache for node in graph.nodes if has_inner_caches(node) for cache in _caches(graph, node)]


def read_inner_attentions(graph: gs.Graph, interface: Interface, samples: Samples) -> tuple[AttentionSite, ...]:
    """Read each operator that holds a cache, and guess which keys its queries see.

    Raises:
        UnsupportedModelError: a mask is none of the templates.
    """
    return tuple(_site(node, graph, interface, samples) for node in graph.nodes if has_inner_caches(node))


def _site(node: gs.Node, graph: gs.Graph, interface: Interface, samples: Samples) -> AttentionSite:
    left, right = (int(node.attrs.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    seen = Visibility(causal=bool(node.attrs.get("is_causal", 0)) or right == 0, window=left + 1 if left >= 0 else None)
    mask = input_or_none(node, _MASK)
    if mask is not None:
        masked = classify(Masks(node.name, mask, ZeroScores(), seen.causal), graph, interface, samples)
        windows = [w for w in (seen.window, masked.window) if w is not None]
        seen = replace(masked, window=min(windows, default=None), bounded=True)
    query, output = node.inputs[0], node.outputs[0]
    key, value = _caches(graph, node)
    shape, last = dims(query) or ("?",) * 4, (dims(value.update) or ("?",))[-1]
    if isinstance(shape[1], str) or isinstance(shape[3], str) or isinstance(last, str):
        raise UnsupportedModelError(
            f"the queries {list(shape)} of {key.idiom} '{node.name}' have unknown heads: export the model with shapes"
        )
    scale = float(node.attrs.get("scale", float(shape[3]) ** -0.5))
    kind = elem_type(query) or elem_type(key.past) or 0
    return AttentionSite(
        node.name, output, query, key, value, scale, float(node.attrs.get("softcap", 0.0)), seen, shape[1], shape[3],
        last, kind, kind, input_or_none(node, SINKS), precision=int(node.attrs.get("softmax_precision", 0)),
    )  # fmt: skip


def has_inner_caches(node: gs.Node) -> bool:
    """True if an operator holds a cache."""
    return is_op(node, "Attention") and any(input_or_none(node, index) is not None for index in _PASTS)


def _caches(graph: gs.Graph, node: gs.Node) -> list[Write]:
    idiom = str(node.attrs.get("operator", node.op))
    writes = []
    for index, output, update in zip(_PASTS, _PRESENTS, node.inputs[1:3], strict=True):
        past = input_or_none(node, index)
        past = None if past is None else trace_back(past)
        present = node.outputs[output] if output < len(node.outputs) else gs.Variable.empty()
        if not contains(graph.outputs, present):  # converters leave caches in another type than operators
            casts = [n.outputs[0] for n in consumers(present) if is_float_cast(n)]
            present = next((t for t in casts if contains(graph.outputs, t)), present)
        if past is None or not contains(graph.inputs, past) or not contains(graph.outputs, present):
            shown = f"'{past.name if past is not None else ''}' -> '{present.name}'"
            raise UnsupportedModelError(
                f"the cache {shown} of {idiom} '{node.name}' is no input and output of the model; supported are caches "
                "that the caller gives and takes back: export the model with past and present"
            )
        _state_shape(past, update)
        _state_shape(present, update)
        before, after = (dims(past) or ())[2:3], (dims(present) or ())[2:3]
        grows = (not before or before != after or before == ("?",)) and not node.attrs.get("ring", 0)
        writes.append(Write(idiom, past, present, update, node.name, axis=2, growing=grows))
    return writes


def _state_shape(cache: gs.Tensor, update: gs.Tensor) -> None:
    """Write number and size of heads into a cache's shape where the exporter left symbols."""
    known, new = list(dims(cache) or ("?",) * 4), dims(update) or ("?",) * 4
    for axis in (1, 3) if len(known) == len(new) == 4 else ():
        known[axis] = known[axis] if isinstance(known[axis], int) else new[axis]
    cache.shape = [None if dim == "?" else dim for dim in known]
