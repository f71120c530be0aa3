"""Cross-attention: what a decoder attends beside its own text, and which graph inputs that comes from.

    Q [B, N, S, D] <-- tokens
    past_key_values.0.encoder.key [B, N, S_enc, D] --> K --> Attention, or MatMul, Softmax, MatMul

Keys that come from inputs that the queries do not come from are no keys of the text: those inputs hold the output of an
encoder, or its keys and values, once per sequence. (Later layers' queries depend on them too, through the layers
before: an encoder's input stays one.) What masks such keys belongs to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from onnx import GraphProto, NodeProto

from trt_kvcache.importer.protos import FLOATS, is_op, names_read

if TYPE_CHECKING:
    from trt_kvcache.importer.interface.evidence import GraphIndex

__all__ = ["find_cross_attention"]

_BEFORE_SOFTMAX = ("Add", "Where", "Mul", "Div", "Cast", "Tanh")


def find_cross_attention(index: GraphIndex, carried: Set[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Find the cross-attention of a decoder.

    Args:
        index: of the model.
        carried: names of caches and states. A model without any is no decoder, and has no cross-attention.

    Returns:
        Names of the first outputs of its Attention nodes, and of the graph inputs that reach their keys, values, masks
        and lengths.
    """
    attentions: set[str] = set()
    constants: set[str] = set()
    if not carried:
        return frozenset(), frozenset()
    reached = _inputs_behind(index.graph)
    memory = {n for n in index.inputs if index.elem_type(n) in FLOATS and len(index.shape(n) or ()) >= 3}

    def beside_text(tensor: str, query: str) -> frozenset[str]:
        """The inputs that a tensor is computed from, if all of them come beside the text."""
        inputs = reached.get(tensor, frozenset())
        text = reached.get(query, frozenset()) - constants
        return frozenset() if inputs & (text | carried) else inputs

    for node, keys, masks in _attentions(index):
        query = node.input[0]
        sources = [beside_text(key, query) for key in keys]
        if not all(sources) or not all(names <= memory for names in sources):
            continue
        attentions.add(node.output[0])
        constants.update(*sources, *(beside_text(mask, query) for mask in masks))
    return frozenset(attentions), frozenset(constants)


def _attentions(index: GraphIndex) -> Iterator[tuple[NodeProto, list[str], list[str]]]:
    """Every attention, and every product of two activations: node, keys and values, masks and lengths."""
    for node in index.graph.node:
        if is_op(node, "Attention"):
            yield node, list(node.input[1:3]), [name for i, name in enumerate(node.input) if i in (3, 6) and name]
        elif is_op(node, "MatMul") and not any(index.is_fixed(name) for name in node.input):
            yield node, [node.input[1]], _masks(index, node.output[0])


def _masks(index: GraphIndex, scores: str) -> list[str]:
    """Tensors added to the scores of a decomposed attention, or selecting among them, on the way to its Softmax."""
    masks: list[str] = []
    while len(readers := index.readers.get(scores, [])) == 1:
        node = readers[0]
        if is_op(node, "Softmax"):
            return masks
        if not any(is_op(node, op) for op in _BEFORE_SOFTMAX):
            break
        if node.op_type in ("Add", "Where"):
            masks += [name for name in node.input if name != scores and not index.is_fixed(name)]
        scores = node.output[0]
    return []


def _inputs_behind(graph: GraphProto) -> dict[str, frozenset[str]]:
    """The graph inputs behind each tensor, by name; those of which only the shape is read do not count.

    The nodes must be in topological order, as ONNX demands.
    """
    sources = {value.name: frozenset([value.name]) for value in graph.input}
    for node in graph.node:
        names = set[str]() if is_op(node, "Shape") or is_op(node, "Size") else names_read(node)
        reached = frozenset[str]().union(*(sources.get(name, frozenset()) for name in names))
        sources.update((name, reached) for name in node.output)
    return sources
