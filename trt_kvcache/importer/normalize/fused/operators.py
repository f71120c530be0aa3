"""Caches that hide inside attention operators: which there are, and how each becomes TensorScatter and Attention.

com.microsoft::GroupQueryAttention                       gqa
com.microsoft::MultiHeadAttention                        mha
Attention with past_key and past_value (opset 23..)      in_op
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_graphsurgeon as gs

from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.fused.gqa import gqa_caches, is_gqa, prove_gqa
from trt_kvcache.importer.normalize.fused.held import HeldCache, Rewrite
from trt_kvcache.importer.normalize.fused.in_op import in_op_caches, is_in_op, prove_in_op
from trt_kvcache.importer.normalize.fused.mha import is_mha, mha_caches, prove_mha

_Find = Callable[[gs.Graph, gs.Node], list[HeldCache]]
_Prove = Callable[[gs.Graph, gs.Node, Sequence[HeldCache], Interface, Samples], Rewrite]

_KINDS: tuple[tuple[Callable[[gs.Node], bool], _Find, _Prove], ...] = (
    (is_gqa, gqa_caches, prove_gqa),
    (is_mha, mha_caches, prove_mha),
    (is_in_op, in_op_caches, prove_in_op),
)


def holds_cache(graph: gs.Graph) -> bool:
    """Whether some operator of the graph holds a cache.

    Raises:
        UnsupportedModelError: see `find_held`.
    """
    return any(is_kind(node) for node in graph.nodes for is_kind, _, _ in _KINDS)


def find_held(graph: gs.Graph) -> list[HeldCache]:
    """The caches inside operators, in graph order: of each operator keys, then values.

    Head counts and sizes that exporters leave as symbols are written into the shapes of the caches.

    Raises:
        UnsupportedModelError: an operator that holds a cache in a form without an equal in ONNX.
        InvalidModelError: shapes contradict each other.
    """
    return [
        cache for node in graph.nodes for is_kind, find, _ in _KINDS if is_kind(node) for cache in find(graph, node)
    ]


def prove_held(graph: gs.Graph, interface: Interface, samples: Samples) -> list[Rewrite]:
    """Prove each operator that holds a cache.

    Args:
        graph: the model as exported.
        interface: of it.
        samples: of it.

    Returns:
        The rewrites, to be called once everything is proven.

    Raises:
        UnsupportedModelError: an operator says what the canonical form cannot.
        InvalidModelError: shapes contradict each other.
    """
    return [
        prove(graph, node, find(graph, node), interface, samples)
        for node in graph.nodes
        for is_kind, find, prove in _KINDS
        if is_kind(node)
    ]
