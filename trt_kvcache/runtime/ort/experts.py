"""Keeps mixtures of experts as the operators they were exported with, which ONNX Runtime computes fastest on the CPU.

For TensorRT, MoE and QMoE are rewritten so that only the bits of the chosen experts are read. ONNX Runtime converts all
experts of this form to floats in each step. With 32 experts of 512 x 512 in 4 bits, 4 of them chosen, a token takes 37
ms instead of 0.4, and 256 tokens 184 instead of 27; in float32 1.8 instead of 0.6, and 103 instead of 36 (1.31.1, one
thread of a busy machine).

The results are the same except for the order of sums, and for ties between two experts of a token: the operator takes
the last expert, as in the model as exported; TopK takes the first. MoE without normalize_routing_weights stays
rewritten: the results of its kernel change with other data that ONNX Runtime keeps in memory (beside
GroupQueryAttention).
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, NodeProto, TensorProto

from trt_kvcache.importer.lower import CONTRIB
from trt_kvcache.importer.protos import names_read

__all__ = ["keep_experts"]

_EXPERTS = {"MoE": 2, "QMoE": 3}
"""Index of the operand whose type the node computes in."""


def keep_experts(model: ModelProto, source: ModelProto) -> ModelProto:
    """Replace rewritten experts with the operators of the source, in float32 only.

    Args:
        model: the rewritten model, its nodes sorted; not changed.
        source: the model that it was made from; external data of both lie in one folder.

    Returns:
        A model with the same inputs and outputs; the same object if no operator is replaced.
    """
    weights = {tensor.name: tensor for tensor in source.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    fitting = {
        str(node.output[0]): node
        for node in source.graph.node
        if node.domain == CONTRIB and node.op_type in _EXPERTS and _fits(node, weights, makers, model)
    }
    if not fitting:
        return model
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.value_info[:]
    nodes = [fitting.get(next(iter(node.output), ""), node) for node in model.graph.node]
    live = {value.name for value in model.graph.output}
    live_nodes: list[NodeProto] = []
    for node in reversed(nodes):
        if live & {*node.output}:
            live_nodes.append(node)
            live |= names_read(node)
    del result.graph.node[:]
    result.graph.node.extend(reversed(live_nodes))
    own = [tensor for tensor in model.graph.initializer if tensor.name in live]
    taken = {tensor.name for tensor in own}
    needed = {name for node in fitting.values() for name in node.input[2:]} - taken - {""}
    del result.graph.initializer[:]
    result.graph.initializer.extend([*own, *(weights[name] for name in sorted(needed))])
    if all(entry.domain != CONTRIB for entry in result.opset_import):
        result.opset_import.add(domain=CONTRIB, version=1)
    return result


def _fits(
    node: NodeProto, weights: Mapping[str, TensorProto], makers: Mapping[str, NodeProto], model: ModelProto
) -> bool:
    """Return True if a model computes a node's result from the node's tokens and logits, and from nothing else.

    Comparing names is enough: a rewrite keeps the names of tensors that it keeps.
    """
    if node.op_type == "MoE" and not any(a.name == "normalize_routing_weights" and a.i == 1 for a in node.attribute):
        return False
    kind = weights.get(node.input[_EXPERTS[node.op_type]]) if len(node.input) > _EXPERTS[node.op_type] else None
    if kind is None or kind.data_type != TensorProto.FLOAT or any(n and n not in weights for n in node.input[2:]):
        return False
    own = {tensor.name: (tensor.data_type, [*tensor.dims]) for tensor in model.graph.initializer}
    if any((stored := own.get(n)) and stored != (weights[n].data_type, [*weights[n].dims]) for n in node.input[2:]):
        return False
    ends, pending, seen = {*node.input[:2]}, [str(node.output[0])], set()
    while pending:
        name = pending.pop()
        if name in seen or name in own:
            continue
        seen.add(name)
        if name in ends:
            continue
        if name not in makers:
            return False
        pending += names_read(makers[name])
    return ends <= seen
