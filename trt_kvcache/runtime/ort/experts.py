"""Mixtures of experts as ONNX Runtime computes them fastest on the CPU: by the operators that they came from.

What TensorRT gets in the place of MoE and QMoE reads the bits of the chosen experts alone there. ONNX Runtime makes
floats of all experts at each step: of 32 experts of 512 x 512 in 4 bits, of which 4 are chosen, a token takes 37 ms
instead of 0.4, and 256 tokens 184 instead of 27; in float32 1.8 instead of 0.6, and 103 instead of 36 (1.31.1, one
thread of a busy machine).

The numbers are the same but for the order of sums, and where two experts of a token have equal scores: the operator
takes the last of them, as in the model as exported, TopK the first. MoE without normalize_routing_weights does not go
back: its kernel gives numbers that change with what else ONNX Runtime keeps in memory (beside GroupQueryAttention).
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, NodeProto, TensorProto

from trt_kvcache.importer.lower import CONTRIB
from trt_kvcache.importer.protos import names_read

__all__ = ["keep_experts"]

_EXPERTS = {"MoE": 2, "QMoE": 3}
"""The operand whose type a node computes in."""


def keep_experts(model: ModelProto, source: ModelProto) -> ModelProto:
    """Put the operators of the source back, float32 alone.

    Args:
        model: rewritten, its nodes sorted; not changed.
        source: what it was made from; external data of both lie in one folder.

    Returns:
        A model with the same inputs and outputs; the same object where no operator goes back.
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
    """True if a model computes a node's result from the node's tokens and logits, and from nothing else.

    Names are enough then: between tensors that were there before and are there now, the same stands as was put there.
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
