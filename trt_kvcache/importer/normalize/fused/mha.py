"""MultiHeadAttention of ONNX Runtime, with and without a past.

    com.microsoft::MultiHeadAttention(q, k, v, bias, key_padding_mask, attention_bias, past_k, past_v; unidirectional=1)
    becomes
    q, k, v = q + bias[:N*D], k + bias[N*D:2*N*D], v + bias[2*N*D:], heads apart [B, N, S, D]
    present = TensorScatter(past, k or v, write_indices)
    output  = Attention(q, present_k, present_v; is_causal=1), heads merged

and without a past, as cross-attention and encoders have it,

    output  = Attention(q, k, v, attention_bias), heads merged

Measured on ONNX Runtime 1.31.1 (CPU): `unidirectional` counts the past, as ONNX's is_causal does; new rows follow the
past; masks are added to the scores. Masks are proven to be one of the templates of `masks`; a key_padding_mask must
hide nothing but padding.

Attention (its cache is K and V in one tensor) was made one before, see `ort_attention`. Refused by name:
DecoderMaskedMultiHeadAttention (its cache is one reordered buffer), packed inputs, shared buffers and beams.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.graph import Emitter, dims, input_or_none
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.mask_values import MaskKind, MaskUse
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Visibility
from trt_kvcache.importer.normalize.fused.contrib import CONTRIB, become, used
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
    was_attention,
)

_BIAS, _PADDING, _SCORE_BIAS, _PASTS, _SHARED, _BEAMS = 3, 4, 5, (6, 7), 8, 9
_PRESENTS, _SCORES = (1, 2), 3

_OTHERS = {
    "DecoderMaskedMultiHeadAttention": "keeps its keys in one shared, reordered buffer",
    "DecoderMaskedSelfAttention": "keeps its keys in one shared, reordered buffer",
    "PackedMultiHeadAttention": "packs the sequences of a batch into one",
    "PagedAttention": "keeps its cache in pages",
    "SparseAttention": "attends blocks of its cache",
}


def is_mha(node: gs.Node) -> bool:
    """Whether a node is ONNX Runtime's MultiHeadAttention with a past.

    Raises:
        UnsupportedModelError: it is one of its relatives, which have no form in ONNX's operators.
    """
    if node.domain != CONTRIB:
        return False
    if node.op in _OTHERS:
        raise UnsupportedModelError(
            f"{CONTRIB}::{label(node)} {_OTHERS[node.op]}; supported are GroupQueryAttention and MultiHeadAttention: "
            "export or optimize the model for these"
        )
    return node.op == "MultiHeadAttention" and has_past(node, _PASTS)


def lower_mha(graph: gs.Graph) -> None:
    """Replace, in place, each MultiHeadAttention without a past by ONNX's Attention. It needs opset 23.

    Raises:
        UnsupportedModelError: an option has no form in ONNX's Attention.
    """
    emitter = Emitter(graph)
    plain = [n for n in graph.nodes if n.op == "MultiHeadAttention" and n.domain == CONTRIB and not has_past(n, _PASTS)]
    for node in plain:
        _check_options(graph, node)
        if input_or_none(node, _PADDING) is not None:
            raise UnsupportedModelError(
                f"{label(node)} has a {_padding_of(node)} and no past; supported is attention_bias: export the mask as "
                "one"
            )
        for index in _PRESENTS:
            if used(graph, node, index):
                raise UnsupportedModelError(
                    f"{label(node)} gives a present '{node.outputs[index].name}' and takes no past; supported are "
                    "decoders that are given their caches: export the model with past"
                )
        count, size = _sizes(node)
        heads = _heads(emitter, node, count, size)
        bias = input_or_none(node, _SCORE_BIAS)
        inputs = [heads.query, heads.key, heads.value] + ([bias] if bias is not None else [])
        causal, scale = int(bool(node.attrs.get("unidirectional", 0))), _scale(node, size)
        output = node.outputs[0]
        node.outputs.clear()
        node.inputs.clear()
        result = emitter.op("Attention", inputs, "attention", is_causal=causal, scale=scale)
        rows = emitter.op("Transpose", [result], "attention_rows", perm=[0, 2, 1, 3])
        become(emitter.op("Reshape", [rows, emitter.ints([0, 0, -1])], "attention_merged"), output)
    if plain:
        graph.nodes[:] = [node for node in graph.nodes if not any(node is old for old in plain)]
        graph.toposort()


def mha_caches(graph: gs.Graph, node: gs.Node) -> list[HeldCache]:
    """The caches of one MultiHeadAttention, with their shapes stated in the graph.

    Raises:
        UnsupportedModelError, InvalidModelError: see `held_caches`, or shapes contradict each other.
    """
    caches = held_caches(graph, node, _PASTS, _PRESENTS)
    _check_options(graph, node)
    heads, size = _sizes(node)
    for cache in caches:
        state_cache_shape(cache, heads, size)
    return caches


def prove_mha(
    graph: gs.Graph, node: gs.Node, caches: Sequence[HeldCache], interface: Interface, samples: Samples
) -> Rewrite:
    """Prove that the canonical form says what one MultiHeadAttention says; returns the rewrite.

    Raises:
        UnsupportedModelError: a mask is none of the templates, or an option has no form in ONNX's Attention.
    """
    padding = input_or_none(node, _PADDING)
    if padding is not None:
        _check_padding(node, padding, samples)
    bias = input_or_none(node, _SCORE_BIAS)
    masks = [MaskUse(bias, MaskKind.ADDED)] if bias is not None else []
    causal = bool(node.attrs.get("unidirectional", 0))
    seen = visibility(node, masks, graph, interface, samples, causal=causal)
    return partial(_rewrite, node=node, caches=caches, seen=seen)


def _check_options(graph: gs.Graph, node: gs.Node) -> None:
    found = None
    if input_or_none(node, _SHARED) is not None or input_or_none(node, _BEAMS) is not None:
        found = (
            "takes past_sequence_length or cache_indirection (a shared buffer, beams); supported are pasts that grow"
        )
    elif used(graph, node, _SCORES):
        found = "gives its scores as an output (qk); supported is attention alone"
    elif input_or_none(node, 1) is None or input_or_none(node, 2) is None:
        found = "has packed inputs; supported are query, key and value apart"
    if found is not None:
        raise UnsupportedModelError(f"{label(node)} {found}: export without it")


def _padding_of(node: gs.Node) -> str:
    return "mask_index" if was_attention(node) else "key_padding_mask"


def _sizes(node: gs.Node) -> tuple[int, int]:
    """Number and size of heads."""
    heads = int(node.attrs.get("num_heads", 0))
    if heads < 1:
        raise InvalidModelError(f"{label(node)} has num_heads={heads}")
    return heads, head_size(node.inputs[0], heads, node, input_or_none(node, _PASTS[0]))


def _check_padding(node: gs.Node, padding: gs.Tensor, samples: Samples) -> None:
    def hides_padding(sample: Sample) -> None:
        value = sample.probe.value(padding.name)
        hides = np.ones((sample.batch, sample.total), bool) if sample.padding is None else sample.padding != 0
        if value is None or not np.array_equal(value != 0, hides):
            raise UnsupportedModelError(
                f"{_padding_of(node)} '{padding.name}' of {label(node)} hides something else than the padding mask of "
                f"the model (batch {sample.batch}, {sample.past} tokens in the cache, {sample.length} new); supported "
                "are masks [B, P + S] that hide padded tokens and nothing else"
            )

    samples.hold(hides_padding)
    samples.hold(hides_padding, padded=True)


def _rewrite(canonical: Canonical, node: gs.Node, caches: Sequence[HeldCache], seen: Visibility) -> None:
    count, size = _sizes(node)
    heads = _heads(canonical.emit, node, count, size)
    rewrite_held(canonical, node, caches, heads, seen, _scale(node, size), 0.0, count * size)
    node.inputs.clear()


def _scale(node: gs.Node, size: int) -> float:
    return float(node.attrs.get("scale", 0.0)) or size**-0.5


def _heads(emitter: Emitter, node: gs.Node, count: int, size: int) -> Heads:
    """The biased inputs as ``[B, N, S, D]``; keys and values that have that form already pass."""
    bias = input_or_none(node, _BIAS)
    parts: list[gs.Tensor] = []
    start = 0
    for tensor in node.inputs[:3]:
        shape = dims(tensor)
        if shape is None or len(shape) not in (3, 4):
            raise UnsupportedModelError(
                f"'{tensor.name}' of {label(node)} has the shape {list(shape or ())}; supported are [B, S, N*D] and, "
                "for keys and values, [B, N, S, D]"
            )
        past = input_or_none(node, _PASTS[0])
        part, total = tensor, count * (size if len(shape) == 4 else head_size(tensor, count, node, past))
        if len(shape) == 3:
            if bias is not None:
                bounds = [emitter.ints([start]), emitter.ints([start + total]), emitter.ints([0])]
                part = emitter.op("Add", [tensor, emitter.op("Slice", [bias, *bounds], "bias")], "biased")
                part.shape = tensor.shape
            part = split_heads(emitter, part, count, total // count)
        start += total
        parts.append(part)
    return Heads(*parts)
