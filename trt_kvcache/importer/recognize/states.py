"""State that is no attention cache: a tensor of fixed size that every step reads and replaces as a whole.

    past_conv [B, C, K] --> Concat(past_conv, x) --> Slice(the last K) --> present_conv [B, C, K]
    past_ssm  [B, N, D] --> Add(Mul(past_ssm, decay), k * v) -----------> present_ssm  [B, N, D]

A state is a floating-point graph input that the model reads, with a graph output of the same dtype and the same fixed
shape (only the first axis, the batch, may be open). The operators between them do not matter. Names pair inputs and
outputs: they differ only in words such as past and present (RWKV replaces its last token without reading it). The
importer refuses an input that is named like state if the model computes an output with another name from it.

Attention caches may have the shape of state. Their readers tell them apart: a scatter into the input, an attention
operator, a product of two activations that reads rows concatenated to the input, or a product under a Softmax.

Nothing is rewritten. TensorRT lets an output share the buffer of an input in its cache layer and in plugins only
(NvInfer.h, ``getAliasedInputTensor``), so that state needs two buffers.
"""

from __future__ import annotations

import re

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import (
    FLOATS,
    consumers,
    dims,
    dtype_name,
    elem_type,
    inputs_behind,
    is_constant,
    is_op,
    producer,
)
from trt_kvcache.importer.plan import StateUpdate

__all__ = ["find_states"]

REASON = "replaced as a whole by every step: TensorRT aliases an output with an input for KV caches and plugins only"

_VIEWS = ("Transpose", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Cast", "Expand", "Slice", "Flatten")
_WRITES = ("TensorScatter", "ScatterND", "ScatterElements", "Scatter")
_UPDATES = (*_VIEWS, "Mul", "Div", "Add", "Sub", "Where")
_SCORES = (*_UPDATES, "Tanh", "Clip", "Max", "Min")
_CALLED = {
    "past", "prev", "previous", "old", "initial", "state", "states", "cache", "conv", "ssm", "recurrent", "memory",
}  # fmt: skip
_DIRECTIONS = {
    "past", "present", "input", "output", "in", "out", "old", "new", "prev", "previous", "next", "updated", "initial",
    "final", "current",
}  # fmt: skip


def find_states(graph: gs.Graph, caches: set[str]) -> tuple[StateUpdate, ...]:
    """Find the state of a graph, in the order of its inputs.

    Args:
        graph: of the model, with shapes inferred.
        caches: names of graph inputs and outputs that are attention caches.

    Raises:
        UnsupportedModelError: an output could be the next value of an input, and has another name.
    """
    read = [t for t in graph.inputs if t.name not in caches and consumers(t)]
    inputs = [t for t in read if _is_state_like(t) and not _is_cache_like(t)]
    outputs = [t for t in graph.outputs if t.name not in caches and producer(t) is not None]
    sources = inputs_behind(graph)
    alike = {past.name: [out for out in outputs if _same_kind(past, out)] for past in inputs}
    pairs = _match_names(inputs, alike)
    fits = {past: [str(out.name) for out in outs if past in sources[out.name]] for past, outs in alike.items()}
    _refuse_open(inputs, fits, pairs)
    return tuple(
        StateUpdate(past.name, pairs[past.name], dtype_name(past), dims(past) or (), REASON)
        for past in inputs
        if past.name in pairs
    )


def _is_state_like(tensor: gs.Tensor) -> bool:
    """True if a graph input is floating-point, has rank 2 or more, and only its batch axis may be open."""
    shape = dims(tensor)
    return elem_type(tensor) in FLOATS and len(shape or ()) >= 2 and all(isinstance(d, int) for d in (shape or ())[1:])


def _same_kind(past: gs.Tensor, present: gs.Tensor) -> bool:
    """True if an output could be the next value of an input: same type and shape, and not the input unchanged."""
    before, after = dims(past) or (), dims(present) or ()
    if elem_type(past) != elem_type(present) or len(before) != len(after) or before[1:] != after[1:]:
        return False
    open_batch = "?" in (before[0], after[0]) or (isinstance(before[0], str) and isinstance(after[0], str))
    tensor = present
    while (node := producer(tensor)) is not None and is_op(node, "Identity", "Cast"):
        tensor = node.inputs[0]
    return (before[0] == after[0] or open_batch) and tensor is not past


def _is_cache_like(past: gs.Tensor) -> bool:
    """True if an input has the readers of an attention cache."""
    for tensor in _reached([past], _VIEWS):
        for node in consumers(tensor):
            if is_op(node, *_WRITES) and node.inputs[0] is tensor:
                return True
            if "Attention" in node.op:
                return True
            if is_op(node, "Concat"):
                rows = _reached(node.outputs, _VIEWS)
                if _products(rows) or any("Attention" in reader.op for row in rows for reader in consumers(row)):
                    return True
    scores = _reached([node.outputs[0] for node in _products(_reached([past], _UPDATES))], _SCORES)
    return any(is_op(node, "Softmax") for tensor in scores for node in consumers(tensor))


def _products(tensors: list[gs.Tensor]) -> list[gs.Node]:
    """Products of one of these tensors with another activation."""
    readers = [node for tensor in tensors for node in consumers(tensor) if is_op(node, "MatMul", "Einsum")]
    return [node for node in readers if not any(map(is_constant, node.inputs))]


def _reached(tensors: list[gs.Tensor], ops: tuple[str, ...]) -> list[gs.Tensor]:
    """These tensors, and all tensors computed from them by these operators."""
    reached = list(tensors)
    seen = {id(tensor) for tensor in reached}
    for tensor in reached:
        for node in consumers(tensor):
            if is_op(node, *ops) and id(node.outputs[0]) not in seen:
                seen.add(id(node.outputs[0]))
                reached.append(node.outputs[0])
    return reached


def _match_names(inputs: list[gs.Tensor], alike: dict[str, list[gs.Tensor]]) -> dict[str, str]:
    """Map past to present names that differ only in their direction, if no other tensor has that name."""
    pairs: dict[str, str] = {}
    keys = [_plain(past.name) for past in inputs]
    for past, key in zip(inputs, keys, strict=True):
        named = [out.name for out in alike[past.name] if _plain(out.name) == key]
        if key and len(named) == 1 and keys.count(key) == 1:
            pairs[past.name] = str(named[0])
    return pairs


def _plain(name: str) -> tuple[str, ...]:
    """The words of a name without direction words such as past and present."""
    return tuple(word for word in words_of(name.replace("past_key_values", "past")) if word not in _DIRECTIONS)


def words_of(name: str) -> list[str]:
    """The words and numbers of a name."""
    return [word.lower() for word in re.findall(r"[A-Za-z]+|\d+", name)]


def _refuse_open(inputs: list[gs.Tensor], fits: dict[str, list[str]], pairs: dict[str, str]) -> None:
    """Refuse an input that is named like state if an output of another name could be its next value.

    Raises:
        UnsupportedModelError: naming both.
    """
    for past in inputs:
        outs = [name for name in fits[past.name] if name not in pairs.values()]
        if past.name not in pairs and outs and _CALLED & set(words_of(past.name)):
            raise UnsupportedModelError(
                f"'{past.name}' looks like state that each step replaces, and could become "
                f"{' or '.join(map(repr, outs))}, of the same shape; name them alike but for past and present "
                "(past_conv.0, present_conv.0) in the export"
            )
