"""Edits a model into canonical form: TensorScatter nodes update caches, and Attention nodes read them.

canonical_nodes    emits the nodes of the canonical form, with masks and biases
computed_keys      emits keys and values that are computed from caches
past_lengths       replaces positions, and other tensors that depend on the length of the past
ring_windows       makes caches of windowed attention circular
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.cache_plan import PlanOptions, Sliding
from trt_kvcache.importer.emit.canonical_nodes import Canonical, Findings
from trt_kvcache.importer.emit.computed_keys import Computed
from trt_kvcache.importer.emit.past_lengths import NOTE, check_readers, drop_copies, free_positions, free_shapes
from trt_kvcache.importer.emit.ring_windows import Rings, make_circular, slide
from trt_kvcache.importer.graph import INT32, INT64, consumers, contains, elem_type, tidy
from trt_kvcache.importer.interface.exported_interface import find_changes
from trt_kvcache.importer.recognize import Recognized, recognize
from trt_kvcache.importer.recognize.records import Attention
from trt_kvcache.importer.recognize.sample_steps import Samples

__all__ = ["normalize"]

FLOAT16, BFLOAT16 = int(onnx.TensorProto.FLOAT16), int(onnx.TensorProto.BFLOAT16)


def normalize(
    model: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    options: PlanOptions,
    usual: int,
    folder: Path | None,
) -> tuple[onnx.ModelProto, Findings | None]:
    """Return the model with caches in canonical form, and `Findings`; the same model and None if nothing changes.

    `model` is flat, with named nodes, and is not changed; `weights` are its detached weights. `usual` is the capacity
    to use if neither the options nor the model give one. Raises `UnsupportedModelError` for an unsupported cache or
    attention, and `OptionError` if the capacity contradicts the model.
    """
    if any(node.op_type in ("TensorScatter", "TRT_KVCacheUpdate") for node in model.graph.node):
        return slide(model, options, usual) if options.sliding is Sliding.CIRCULAR else (model, None)
    recognized = recognize(model, weights, options, usual, folder)
    return (model, None) if recognized is None else canonical_form(recognized, options)


def canonical_form(recognized: Recognized, options: PlanOptions) -> tuple[onnx.ModelProto, Findings]:
    """Edit the graph into canonical form, and remove operators that only the exported caches needed."""
    graph, interface, samples = recognized.graph, recognized.interface, recognized.samples
    tokens = next(t for t in graph.inputs if t.name == interface.tokens)
    canonical = Canonical(graph, tokens, recognized.caches[0].past, samples.capacity)
    sources = [c for a in recognized.attentions for c in a.computed_from]
    computed = Computed(graph, sources, samples) if sources else None
    for cache in recognized.caches:
        canonical.write(cache)
    for attention in recognized.attentions:
        canonical.attend(
            attention if computed is None or not attention.computed_from else computed.place(attention, canonical)
        )
    counts, copies = _drop_counts(graph, samples), drop_copies(graph)
    tidy(graph)
    check_readers(graph)
    free_shapes(graph, canonical.emit, interface, samples)
    tidy(graph, sort=False)
    by_tokens = free_positions(graph, canonical, interface, samples)  # sorts the graph
    rings = Rings({}, ())
    if options.sliding is Sliding.CIRCULAR:
        rings = make_circular(graph, canonical.emit, samples.capacity, options.window_chunk)
    # Drop inputs that nothing reads any more: only the exported caches needed them.
    graph.inputs = [t for t in graph.inputs if consumers(t) or contains(graph.outputs, t) or t is tokens]

    model: onnx.ModelProto = gs.export_onnx(graph)
    del model.graph.value_info[:]
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = max(opset.version, canonical.opset)
    model.ir_version = max(recognized.model.ir_version, 10)
    for name, (kind, shape) in canonical.known.items():
        named = [None if d == "?" else d for d in shape]
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, named))
    shifted = {
        a.mask.own.name: a.key.window_rows for a in recognized.attentions if a.key.shifted and a.mask.own is not None
    }
    tensors = tuple(replace(t, window_rows=shifted.get(t.name, t.window_rows)) for t in interface.tensors)
    changes = find_changes(tensors, model, counts, copies)
    notes = (
        *_own_masks(recognized.attentions),
        *_narrower(recognized.attentions),
        *((NOTE,) if by_tokens else ()),
        *rings.notes,
    )
    roles = (*interface.roles, *canonical.added)
    open_capacity = None if interface.fixed_capacity(options.capacity) else samples.capacity
    return model, Findings(
        canonical.written, {}, changes, tensors, roles, interface.states, notes, rings.longest, open_capacity
    )


def _own_masks(attentions: Sequence[Attention]) -> list[str]:
    own = [a.mask.own for a in attentions if not a.key.shifted]
    names = dict.fromkeys(mask.name for mask in own if mask is not None)
    return [
        f"the mask '{name}' remains an input: a session fills it with a causal mask. If the model was trained with a "
        "window, only this mask can apply the window"
        for name in names
    ]


def _narrower(attentions: Sequence[Attention]) -> list[str]:
    """Return a note if the rewrite computes float32 attention weights in the narrower type of the caches."""
    kinds = {elem_type(a.key.past) for a in attentions if a.wide_weights and not a.wide}
    return [
        f"the attention weights (results of softmax) are float32 in the exported model, but {name} here, which rounds "
        f"each weight by at most {share} %; products of queries and keys keep their types"
        for kind, name, share in ((FLOAT16, "float16", "0.05"), (BFLOAT16, "bfloat16", "0.4"))
        if kind in kinds
    ]


def _drop_counts(graph: gs.Graph, samples: Samples) -> set[str]:
    """Remove outputs that return the number of tokens, which callers know. Return the names of the outputs."""

    def counts(tensor: gs.Tensor) -> bool:
        values = [(step, step.probe.value(tensor.name)) for step in samples.plain]
        return all(value is not None and bool((value == step.total).all()) for step, value in values)

    counters = {str(t.name) for t in graph.outputs if elem_type(t) in (INT32, INT64) and counts(t)}
    graph.outputs = [t for t in graph.outputs if t.name not in counters]
    return counters
