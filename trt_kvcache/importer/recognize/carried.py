"""Guesses from shapes which inputs and outputs are caches or states. Later, sample steps correct the guesses.

    past [B, N, P, D] -> present [B, N, T, D]         grows along the axis that differs
    past [B, N, L, D] -> present [B, N, L, D]         written in place, or state

State is not an attention cache: it is a tensor of fixed size that every step reads and replaces as a whole:

    past_conv [B, C, K] --> Concat(past_conv, x) --> Slice(the last K) --> present_conv [B, C, K]
    past_ssm  [B, N, D] --> Add(Mul(past_ssm, decay), k * v) -----------> present_ssm  [B, N, D]

A state is a floating-point input with an output of the same dtype and fixed shape (only the batch may be dynamic). The
names differ only in words such as past and present. If an input is named like a state, but no output that could be its
next value has such a name, the model is refused. TensorRT lets an output share the buffer of an input only in its cache
layer and in plugins (NvInfer.h, ``getAliasedInputTensor``), so a state needs two buffers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import Dim, StateUpdate
from trt_kvcache.importer.graph import (
    FLOATS,
    INT32,
    INT64,
    consumers,
    contains,
    dims,
    dtype_name,
    elem_type,
    input_or_none,
    inputs_behind,
    is_copy,
    is_op,
    producer,
)
from trt_kvcache.importer.recognize.records import Cache

_PASTS, _PRESENTS = (4, 5), (1, 2)
_TOKENS, _RANK = 2, 4  # axes of token ids, and of a cache with heads


def find_caches(graph: gs.Graph) -> list[Cache]:
    """Guess caches, in the order of the inputs: pair each present (output) with the nearest past (input) before it."""
    counted = {shape[1] for t in graph.inputs if elem_type(t) in (INT32, INT64) and len(shape := dims(t) or ()) == 2}
    left = {id(t): t for t in graph.inputs}
    found: dict[int, Cache] = {}
    # Outputs with an axis as long as the tokens come last: they may be logits.
    for present in sorted(graph.outputs, key=lambda t: sum(d in counted for d in dims(t) or ())):
        if producer(present) is None or dims(present) is None or is_copy(graph, present):
            continue
        fits = {id(t): axis for t in left.values() if (axis := _axis(t, present, counted)) is not None}
        past = _nearest(present, [left[i] for i in fits]) if fits else None
        if past is not None:
            axis = fits[id(past)]
            growing = dims(past) != dims(present) and not isinstance((dims(past) or ())[axis], int)
            found[id(past)] = Cache(past, present, axis, growing)
            del left[id(past)]
    caches = [found[id(t)] for t in graph.inputs if id(t) in found]
    ranks = {len(c.past.shape) for c in caches}
    return [c for c in caches if c.growing or len(c.past.shape) == max(ranks)]  # others are embeddings or state


def _nearest(present: gs.Tensor, pasts: Sequence[gs.Tensor]) -> gs.Tensor | None:
    """Return the past that is the fewest nodes away from a present. If several are, take the most similar name."""
    words = set(words_of(present.name))
    tensors, seen = [present], {id(present)}
    while tensors:
        reached = [t for t in pasts if id(t) in seen]
        if reached:
            return max(reached, key=lambda t: len(words.intersection(words_of(t.name))))
        before = [
            t for tensor in tensors for node in tensor.inputs if not is_op(node, "Shape", "Size") for t in node.inputs
        ]
        tensors = [t for t in {id(t): t for t in before}.values() if id(t) not in seen]
        seen.update(map(id, tensors))
    return None


def _axis(past: gs.Tensor, present: gs.Tensor, counted: Collection[Dim]) -> int | None:
    """Return the axis of cache rows, guessed from the shapes; None if past and present cannot be one cache."""
    one, two = dims(past) or (), dims(present) or ()
    rank = len(one)
    if elem_type(past) not in FLOATS or elem_type(past) != elem_type(present) or rank != len(two):
        return None
    if rank not in (3, 4) or (rank == 3 and one[1] in counted):  # embeddings [B, S, H]
        return None
    differing = [a for a in range(1, rank) if one[a] != two[a] or "?" in (one[a], two[a])]
    if any(isinstance(one[a], int) and isinstance(two[a], int) for a in differing):
        return None
    if len(differing) == 1:
        return differing[0]
    if differing:  # several axes may differ only because an exporter leaves their sizes open
        return next((a for a in (2, 1) if a in differing), None) if rank == 4 else None
    if rank == 3 and one[1] == 1:
        return None
    open_axes = [a for a in range(1, rank) if not isinstance(one[a], int)]
    if rank == 3 and open_axes:  # embeddings [B, S, H]
        return None
    return open_axes[0] if len(open_axes) == 1 else None if open_axes else rank - 2


def state_inner_sizes(graph: gs.Graph) -> None:
    """Fill in unknown numbers and sizes of heads in shapes of Attention caches, from the shapes of the new rows."""
    for node in graph.nodes:
        for past, present, update in _inner(node):
            start, end = past, present
            while (maker := producer(start)) is not None and is_op(maker, "Cast", "Identity"):
                start = maker.inputs[0]
            while not contains(graph.outputs, end):
                casts = [n for n in consumers(end) if is_op(n, "Cast", "Identity")]
                if len(casts) != 1:
                    break
                end = casts[0].outputs[0]
            if not contains(graph.inputs, start) or not contains(graph.outputs, end):
                raise UnsupportedModelError(
                    stack_in_words(graph)
                    or f"the cache '{past.name}' -> '{present.name}' of {node.op} '{node.name}' is not an input "
                    "and output of the model. The importer supports only caches that the caller passes in and gets "
                    "back: export the model with past and present"
                )
            for cache in (start, end):
                known, new = list(dims(cache) or ("?",) * 4), dims(update) or ("?",) * 4
                for axis in (1, 3) if len(known) == len(new) == 4 else ():
                    known[axis] = known[axis] if isinstance(known[axis], int) else new[axis]
                cache.shape = [None if dim == "?" else dim for dim in known]


def _inner(node: gs.Node) -> Iterator[tuple[gs.Tensor, gs.Tensor, gs.Tensor]]:
    if not is_op(node, "Attention"):
        return
    for index, output, update in zip(_PASTS, _PRESENTS, node.inputs[1:3], strict=True):
        past = input_or_none(node, index)
        if past is not None:
            yield past, node.outputs[output] if output < len(node.outputs) else gs.Variable.empty(), update


def stack_in_words(graph: gs.Graph) -> str:
    """Return an error message if one input contains the caches of several layers; otherwise an empty text."""
    tokens = (t for t in graph.inputs if elem_type(t) in (INT32, INT64) and len(dims(t) or ()) == _TOKENS)
    batches = {t.shape[0] for t in tokens if isinstance(t.shape[0], str)}
    ranks = {len(t.shape or ()) for t in graph.outputs}
    for t in graph.inputs:
        shape = t.shape or ()
        large = elem_type(t) in FLOATS and len(shape) >= _RANK and len(shape) in ranks
        if large and (len(shape) > _RANK or batches.intersection(shape[1:])):
            return (
                f"'{t.name}' {list(shape)} holds several caches in one tensor; each cache must be a separate tensor: "
                "export with optimum, or with torch and DynamicCache"
            )
    return ""


REASON = "every step replaces the whole tensor, and TensorRT aliases outputs with inputs only for KV caches and plugins"

_CALLED = {
    "past", "prev", "previous", "old", "initial", "state", "states", "cache", "conv", "ssm", "recurrent", "memory",
}  # fmt: skip
_DIRECTIONS = {
    "past", "present", "input", "output", "in", "out", "old", "new", "prev", "previous", "next", "updated", "initial",
    "final", "current",
}  # fmt: skip


def find_states(graph: gs.Graph, caches: set[str]) -> tuple[StateUpdate, ...]:
    """Find the states (tensors that every step replaces as a whole), in the order of the inputs."""
    floats = [t for t in graph.inputs if elem_type(t) in FLOATS and t.name not in caches and len(dims(t) or ()) >= 2]
    inputs = [t for t in floats if consumers(t) and all(isinstance(d, int) for d in (dims(t) or ())[1:])]
    outputs = [t for t in graph.outputs if t.name not in caches and producer(t) is not None]
    sources = inputs_behind(graph)
    alike = {past.name: [out for out in outputs if _same_kind(past, out)] for past in inputs}
    pairs = _match_names(inputs, alike)
    for past in (t for t in inputs if t.name not in pairs and _CALLED & set(words_of(t.name))):
        # the input is named like a state, but its only possible next value is not
        outs = [o.name for o in alike[past.name] if past.name in sources[o.name] and o.name not in pairs.values()]
        if outs:
            raise UnsupportedModelError(
                f"'{past.name}' looks like state that each step replaces. Its next value could be "
                f"{' or '.join(map(repr, outs))}, which has the same shape; in the export, rename the input and its "
                "output so that their names differ only in 'past' and 'present' (past_conv.0, present_conv.0)"
            )
    return tuple(
        StateUpdate(past.name, pairs[past.name], dtype_name(past), dims(past) or (), REASON)
        for past in inputs
        if past.name in pairs
    )


def _same_kind(past: gs.Tensor, present: gs.Tensor) -> bool:
    before, after = dims(past) or (), dims(present) or ()
    if elem_type(past) != elem_type(present) or len(before) != len(after) or before[1:] != after[1:]:
        return False
    open_batch = "?" in (before[0], after[0]) or (isinstance(before[0], str) and isinstance(after[0], str))
    tensor = present
    while (node := producer(tensor)) is not None and is_op(node, "Identity", "Cast"):
        tensor = node.inputs[0]
    return (before[0] == after[0] or open_batch) and tensor is not past


def _match_names(inputs: list[gs.Tensor], alike: dict[str, list[gs.Tensor]]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    keys = [_plain(past.name) for past in inputs]
    for past, key in zip(inputs, keys, strict=True):
        named = [out.name for out in alike[past.name] if _plain(out.name) == key]
        if key and len(named) == 1 and keys.count(key) == 1:
            pairs[past.name] = str(named[0])
    return pairs


def _plain(name: str) -> tuple[str, ...]:
    return tuple(word for word in words_of(name.replace("past_key_values", "past")) if word not in _DIRECTIONS)


def words_of(name: str) -> list[str]:
    """Return the words and numbers of a name: ``"past.0.Key"`` -> past, 0, key."""
    return [word.lower() for word in re.findall(r"[A-Za-z]+|\d+", name)]
