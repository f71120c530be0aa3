"""Whether a model gives logits of every token of a step, where its declared output does not say so.

Exporters that trace one step of decoding declare ``[batch, 1, vocab]`` for what the graph computes as ``[batch, S,
vocab]``, or a symbol that stands nowhere else. The graph tells: element-wise operators, norms and products with weights
keep the sequence axis, and by the residual stream they lead from the embeddings of the tokens to the logits, unless
something picks a token on the way.
"""

from __future__ import annotations

from trt_kvcache.importer.protos import is_op
from trt_kvcache.importer.roles.structure import GraphIndex

__all__ = ["every_token"]

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Cast", "Identity", "Dropout", "Tanh", "Clip")
_FIRST = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "LogSoftmax")


def every_token(index: GraphIndex, logits: str, tokens: str) -> bool:
    """Whether the embeddings of all tokens reach the logits along their own axis.

    Args:
        index: of the model.
        logits: name of the output ``[B, ?, V]``.
        tokens: name of the input ``[B, S]`` or ``[B, S, H]``.
    """
    seen: set[tuple[str, int]] = set()
    stack = [(logits, 1)]
    while stack:
        name, axis = stack.pop()
        if name == tokens and axis == 1:
            return True
        node = index.producers.get(name)
        if node is None or (name, axis) in seen:
            continue
        seen.add((name, axis))
        if is_op(node, "Gather") and index.weight(node.input[0]):
            ids = index.sources(node.input[1], index.follow_values)  # exporters reshape them to what they are
            if ids == {tokens: True} and len(index.shape(name) or ()) == 3 and axis == 1:
                return True
        if any(is_op(node, op) for op in _ELEMENTWISE):
            stack.extend((source, axis) for source in node.input)
        elif is_op(node, "Transpose"):
            perm = next((list(a.ints) for a in node.attribute if a.name == "perm"), [2, 1, 0])
            stack.append((node.input[0], perm[axis]))
        elif is_op(node, "MatMul"):
            for weight, source, kept in ((1, 0, 1), (0, 1, 2)):  # x @ W, and W @ x of what is transposed
                if index.weight(node.input[weight]) and axis == kept:
                    stack.append((node.input[source], axis))
        elif node.op_type in _FIRST:
            stack.append((node.input[0], axis))
    return False
