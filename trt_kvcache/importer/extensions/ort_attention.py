"""Attention of ONNX Runtime, which projects its input itself and holds keys and values in one tensor.

    y, present = com.microsoft::Attention(x, w, bias, mask, past [2, B, N, P, H], attention_bias)

        becomes

    q, k, v = Split(MatMul(x, w))
    y, present_k, present_v = com.microsoft::MultiHeadAttention(q, k, v, bias, mask, attention_bias, past[0], past[1])
    present = Concat(Unsqueeze(present_k), Unsqueeze(present_v))

which `stacked_caches` takes apart, and `mha` proves. The attributes of both mean the same, and so do masks and biases.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#commicrosoftattention.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import Emitter, contains, dims, input_or_none, is_op, producer
from trt_kvcache.importer.normalize.fused.contrib import CONTRIB
from trt_kvcache.importer.normalize.fused.held import PROJECTED, label

_BIAS, _MASK, _PAST, _SCORE_BIAS, _SHARED = 2, 3, 4, 5, 6
_SAME = ("num_heads", "scale", "unidirectional", "mask_filter_value")


def standardize(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The same model with MultiHeadAttention in the place of ONNX Runtime's Attention.

    Args:
        model: flat, of opset 13 at least. Not changed.

    Raises:
        UnsupportedModelError: an Attention rotates, shares a buffer, or takes a past that is no graph input.
    """
    graph: gs.Graph = gs.import_onnx(model)
    emitter = Emitter(graph)
    for node in [n for n in graph.nodes if n.op == "Attention" and n.domain == CONTRIB]:
        _check(graph, node)
        _project(emitter, node)
    graph.cleanup(remove_unused_graph_inputs=False).toposort()
    made: onnx.ModelProto = gs.export_onnx(graph)
    made.ir_version = model.ir_version
    return made, ()


def _check(graph: gs.Graph, node: gs.Node) -> None:
    past, width = _source(input_or_none(node, _PAST)), (dims(node.inputs[1]) or ("?",))[-1]
    if node.attrs.get("do_rotary", 0):
        found, advice = "rotates queries and keys (do_rotary)", "rotary embedding outside of it"
    elif node.attrs.get("past_present_share_buffer", 0) or input_or_none(node, _SHARED) is not None:
        found, advice = "keeps its past in a shared buffer (past_present_share_buffer)", "pasts that grow"
    elif past is not None and not contains(graph.inputs, past):
        found, advice = f"takes the past '{past.name}', which is no graph input", "caches that the caller gives"
    elif past is not None and (len(past.shape or ()) != 5 or past.shape[0] not in (2, None, "?")):
        found, advice = f"takes a past of the shape {list(dims(past) or ())}", "pasts [2, B, N, P, H]"
    elif not isinstance(width, int):
        found, advice = f"has weights '{node.inputs[1].name}' of unknown width", "weights with a shape"
    else:
        return
    raise UnsupportedModelError(f"{CONTRIB}::{label(node)} {found}; supported are {advice}: export the model so")


def _source(past: gs.Tensor | None) -> gs.Tensor | None:
    """The tensor in front of Casts of a past, as converters to float16 write them for caches that they keep."""
    while past is not None and (maker := producer(past)) is not None and is_op(maker, "Cast"):
        past = maker.inputs[0]
    return past


def _project(emit: Emitter, node: gs.Node) -> None:
    x, weight = node.inputs[:2]
    sizes = [int(n) for n in node.attrs.get("qkv_hidden_sizes", [])] or [int(weight.shape[-1]) // 3] * 3
    projected = emit.op("MatMul", [x, weight], PROJECTED)
    parts = [gs.Variable(emit.name(f"{PROJECTED}_{kind}"), dtype=x.dtype) for kind in "qkv"]
    split = emit.name(f"{PROJECTED}:Split")
    emit.graph.nodes.append(gs.Node("Split", split, {"axis": -1}, [projected, emit.ints(sizes)], parts))
    absent = gs.Variable.empty()
    given = {index: input_or_none(node, index) or absent for index in (_BIAS, _MASK, _SCORE_BIAS)}
    inputs = [*parts, given[_BIAS], given[_MASK], given[_SCORE_BIAS]]
    outputs, presents = [node.outputs[0]], node.outputs[1:2]
    past = input_or_none(node, _PAST)
    if past is not None and (source := _source(past)) is not None:
        source.shape = [2, *source.shape[1:]]
        inputs += [emit.op("Gather", [past, emit.ints(place)], "past", axis=0) for place in (0, 1)]
    node.outputs.clear()
    node.inputs.clear()
    if presents and not presents[0].is_empty():
        outputs += [gs.Variable(emit.name("present"), dtype=x.dtype) for _ in "kv"]
        rows = [emit.op("Unsqueeze", [part, emit.ints([0])], "present_row") for part in outputs[1:]]
        name = emit.name("present:Concat")
        emit.graph.nodes.append(gs.Node("Concat", name, {"axis": 0}, rows, [presents[0]]))
    attrs = {key: node.attrs[key] for key in _SAME if key in node.attrs}
    emit.graph.nodes.append(gs.Node("MultiHeadAttention", node.name, attrs, inputs, outputs, domain=CONTRIB))
