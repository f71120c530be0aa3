"""Rewrite a prepared graph into one that TensorRT builds with the same meaning, as the plan says.

One file per rewrite. Each keeps the graph standard ONNX: ONNX Runtime gives the original's numbers.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer import extensions
from trt_kvcache.importer.graph import Emitter
from trt_kvcache.importer.plan import CachePlan, Route
from trt_kvcache.importer.rewrite.attention import rewrite_attention
from trt_kvcache.importer.rewrite.caches import rewrite_caches
from trt_kvcache.importer.rewrite.repeats import copy_repeats
from trt_kvcache.importer.rewrite.spans import add_spans, cut_logits, declare_logits, relax_masks

__all__ = ["rewrite_graph"]


def rewrite_graph(graph: gs.Graph, plan: CachePlan) -> None:
    """Apply `plan` to the graph that it was made from, in place."""
    emitter = Emitter(graph)
    relax_masks(graph, plan)
    add_spans(graph, plan)
    cut_logits(graph, emitter, plan)
    views = rewrite_caches(emitter, plan)
    rewrite_attention(graph, emitter, plan, views)
    if any(cache.route is Route.PLUGIN for cache in plan.caches):
        extensions.load("plugin_route").rewrite_updates(graph, emitter, plan)
    copy_repeats(graph, emitter)
    declare_logits(graph, plan)
    graph.cleanup(remove_unused_graph_inputs=False).toposort()
