"""Cross-attention: what a decoder attends beside its own text, and which graph inputs that comes from.

    Q [B, N, S, D] <-- tokens
    past_key_values.0.encoder.key [B, N, S_enc, D] --> K --> Attention, or MatMul, Softmax, MatMul

Keys that come from inputs that the queries do not come from are no keys of the text: those inputs hold the output of an
encoder, or its keys and values, given once per sequence. (Later layers' queries depend on them too, through the layers
before: an input that was found stays found.) What masks such keys belongs to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import FLOATS, consumers, dims, elem_type, is_op

__all__ = ["CrossAttention", "find_cross_attention", "inputs_behind"]


@dataclass(frozen=True)
class CrossAttention:
    """What was found.

    Attributes:
        nodes: names of the Attention nodes.
        constants: names of the graph inputs behind their keys, values, masks and lengths.
    """

    nodes: frozenset[str]
    constants: frozenset[str]


def find_cross_attention(graph: gs.Graph, carried: set[str]) -> CrossAttention:
    """Find the cross-attention of a decoder.

    Args:
        graph: of the model.
        carried: names of caches and states. A model without any is no decoder, and has none here.
    """
    nodes: set[str] = set()
    constants: set[str] = set()
    if not carried:
        return CrossAttention(frozenset(), frozenset())
    behind = inputs_behind(graph)
    memory = {str(t.name) for t in graph.inputs if elem_type(t) in FLOATS and len(dims(t) or ()) >= 3}

    def given(tensor: gs.Tensor, query: gs.Tensor) -> frozenset[str]:
        """The inputs behind a tensor, if all of them are given beside the text."""
        found = behind.get(str(tensor.name), frozenset())
        text = behind.get(str(query.name), frozenset()) - constants
        return frozenset() if found & (text | carried) else found

    for node, query, keys, masks in _attentions(graph):
        found = [given(key, query) for key in keys]
        if not all(found) or not all(names <= memory for names in found):
            continue
        if is_op(node, "Attention"):
            nodes.add(str(node.name))
        constants.update(*found, *(given(mask, query) for mask in masks))
    return CrossAttention(frozenset(nodes), frozenset(constants))


def _attentions(graph: gs.Graph) -> Iterator[tuple[gs.Node, gs.Tensor, list[gs.Tensor], list[gs.Tensor]]]:
    """Every attention, and every product of two activations: node, queries, keys and values, masks and lengths."""
    for node in graph.nodes:
        if is_op(node, "Attention"):
            masks = [node.inputs[i] for i in (3, 6) if i < len(node.inputs) and not node.inputs[i].is_empty()]
            yield node, node.inputs[0], list(node.inputs[1:3]), masks
        elif is_op(node, "MatMul") and not any(isinstance(t, gs.Constant) for t in node.inputs):
            yield node, node.inputs[0], [node.inputs[1]], _masks(node.outputs[0])


def _masks(scores: gs.Tensor) -> list[gs.Tensor]:
    """What is added to the scores of a decomposed attention, or selects among them, on the way to its Softmax."""
    masks: list[gs.Tensor] = []
    while len(readers := consumers(scores)) == 1:
        node = readers[0]
        if is_op(node, "Softmax"):
            return masks
        if not is_op(node, "Add", "Where", "Mul", "Div", "Cast", "Tanh"):
            break
        if is_op(node, "Add", "Where"):
            masks += [t for t in node.inputs if t is not scores and not isinstance(t, gs.Constant)]
        scores = node.outputs[0]
    return []


def inputs_behind(graph: gs.Graph) -> dict[str, frozenset[str]]:
    """The graph inputs behind each tensor, by name; those of which only the shape is read do not count.

    The nodes must be in topological order, as ONNX demands.
    """
    found = {str(t.name): frozenset([str(t.name)]) for t in graph.inputs}
    for node in graph.nodes:
        names = () if is_op(node, "Shape", "Size") else _reads(node)
        behind = frozenset[str]().union(*(found.get(name, frozenset()) for name in names))
        found.update((str(t.name), behind) for t in node.outputs)
    return found


def _reads(node: gs.Node) -> Iterator[str]:
    """Names of what a node reads, in its nested graphs too."""
    yield from (str(t.name) for t in node.inputs)
    for body in (value for value in node.attrs.values() if isinstance(value, gs.Graph)):
        for inner in body.nodes:
            yield from _reads(inner)
        yield from (str(t.name) for t in body.outputs)
