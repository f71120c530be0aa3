"""Facts of the graph about its inputs and outputs, independent of their names.

The input that looks up the embedding table holds the tokens. If an operand of a cache update or an Attention comes
unchanged from an input, the operand's meaning is the role of that input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onnx import GraphProto, ModelProto

from trt_kvcache.importer.operators import VIEWS
from trt_kvcache.importer.plan import Role
from trt_kvcache.importer.protos import (
    FLOATS,
    INTEGERS,
    Shape,
    elem_type_of,
    is_op,
    names_read,
    nested_scopes,
    shape_of,
)


@dataclass(frozen=True)
class Known:
    """Names of caches and states, known before the search for roles.

    Attributes:
        caches: past -> present, graph inputs and outputs.
        states: past -> present of state that is no cache, graph inputs and outputs.
        write_indices: used as TensorScatter's write indices.
        update_lengths: cumulative lengths ``[B + 1]`` of packed updates.
        updates: tensor written into a cache -> meaning of each axis, as in `TensorRole.axes`.
    """

    caches: dict[str, str]
    states: dict[str, str] = field(default_factory=dict)
    write_indices: frozenset[str] = frozenset()
    update_lengths: frozenset[str] = frozenset()
    updates: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fact:
    """A role that the graph gives to an input or output.

    Attributes:
        certain: the fact overrides shipped name patterns.
    """

    role: Role
    reason: str
    certain: bool = True


_PRESERVING = {*VIEWS, "Cast", "Clip", "Expand", "Tile"}
_BOUNDS = {"Mod", "Min", "Max"}


class GraphIndex:
    """Index of a model's graph for repeated lookups; includes nodes in bodies of control flow."""

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        scopes = list(nested_scopes(graph))
        self.nodes = [node for scope in scopes for node in scope.node]
        self.constants = {t.name: t for scope in scopes if isinstance(scope, GraphProto) for t in scope.initializer}
        self.inputs = {info.name: info for info in graph.input if info.name not in self.constants}
        self.outputs = {info.name: info for info in graph.output}
        self.infos = {info.name: info for info in (*graph.value_info, *graph.input, *graph.output)}
        self.producers = {name: node for node in self.nodes for name in node.output if name}

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor as far as it is known."""
        if name in self.constants:
            return tuple(int(dim) for dim in self.constants[name].dims)
        return shape_of(self.infos.get(name))

    def elem_type(self, name: str) -> int:
        """The element type, ``UNDEFINED`` where unknown."""
        return int(self.constants[name].data_type) if name in self.constants else elem_type_of(self.infos.get(name))

    def weight(self, name: str) -> str | None:
        """The initializer from which a tensor comes by reordering, casting or dequantizing only; else None."""
        while name not in self.constants:
            node = self.producers.get(name)
            if node is None or node.op_type not in {*_PRESERVING, "DequantizeLinear"} or not node.input:
                return None
            name = node.input[0]
        return name

    def source(self, name: str) -> str | None:
        """The graph input from which a tensor comes with only its shape, type or bounds changed; else None."""
        while name not in self.inputs:
            node = self.producers.get(name)
            if node is None:
                return None
            open_inputs = [n for n in node.input if self.weight(n) is None]
            if node.op_type in _PRESERVING:
                name = node.input[0]
            elif node.op_type in _BOUNDS and len(open_inputs) == 1:
                name = open_inputs[0]
            else:
                return None
        return name

    def reached(self, names: set[str]) -> set[str]:
        """These tensors, and all tensors computed from their numbers, in a sorted graph."""
        found = set(names)
        for node in self.nodes:
            if node.op_type not in ("Shape", "Size") and not found.isdisjoint(names_read(node)):
                found.update(node.output)
        return found


def facts(index: GraphIndex, known: Known) -> dict[str, list[Fact]]:
    """Roles that the graph shows, by name of the input or output, without caches and states."""
    found: dict[str, list[Fact]] = {}
    for tensor, fact in (*_named_by_operators(index, known), *_tokens(index, known)):
        name = tensor if tensor in index.outputs else index.source(tensor)
        if name is None or name in known.caches or name in known.states or not fits(index, name, fact.role):
            continue
        if fact.role not in {other.role for other in found.get(name, [])}:
            found.setdefault(name, []).append(fact)
    return found


def _named_by_operators(index: GraphIndex, known: Known) -> Iterator[tuple[str, Fact]]:
    for tensor in sorted(known.write_indices):
        yield tensor, Fact(Role.WRITE_INDICES, "write_indices of TensorScatter")
    for tensor in sorted(known.update_lengths):
        yield tensor, Fact(Role.UPDATE_LENGTHS, "lengths of a packed update")
    held = index.reached({*known.caches, *known.caches.values()})
    for node in index.nodes:
        if is_op(node, "Attention") and (not known.caches or node.input[1] in held):  # others attend beside the text
            yield from ((t, Fact(Role.VALID_LENGTHS, "nonpad_kv_seqlen of Attention")) for t in node.input[6:7])
            yield from ((t, Fact(Role.MASK, "attn_mask of Attention", certain=False)) for t in node.input[3:4])


def _tokens(index: GraphIndex, known: Known) -> Iterator[tuple[str, Fact]]:
    """Find the tokens: they index a table with as many rows as the logits are wide, else the widest table."""
    presents = set(known.caches.values())
    outputs = {n: index.shape(n) or () for n in index.outputs if n not in presents and index.elem_type(n) in FLOATS}
    tables = []
    for node in index.nodes:
        weight = index.weight(node.input[0]) if is_op(node, "Gather") and index.source(node.input[1]) else None
        shape = (index.shape(node.input[0]) or index.shape(weight) or ()) if weight is not None else ()
        if len(shape) == 2 and index.elem_type(node.output[0]) in {*FLOATS, 0}:
            tables.append((shape, node.input[1]))
    widths = {shape[-1] for shape in outputs.values() if len(shape) > 1}
    wide = [table for table in tables if table[0][0] in widths]
    widest = max((shape[::-1] for shape, _ in tables), default=None)
    for shape, tensor in wide or [table for table in tables if table[0][::-1] == widest]:
        yield tensor, Fact(Role.TOKENS, f"index into the embedding table {list(shape)}", certain=bool(wide))
        for name, width in outputs.items():
            if width[-1:] == shape[:1]:
                reason = f"as wide as the embedding table {list(shape)} has rows"
                yield name, Fact(Role.LOGITS, reason, certain=False)


def fits(index: GraphIndex, name: str, role: Role) -> bool:
    """True if the tensor's dtype and rank allow the role."""
    shape, is_float = shape_of(index.infos[name]), index.elem_type(name) in FLOATS
    if shape is None:
        return False
    if role in (Role.MASK, Role.CONSTANT, Role.ZEROS, Role.OTHER):
        return True
    if role is Role.LOGITS or (role is Role.TOKENS and is_float):
        return is_float and len(shape) in (2, 3)
    if index.elem_type(name) not in INTEGERS:
        return False
    if role is Role.TOKENS:
        return len(shape) in (1, 2)
    return len(shape) <= (3 if role is Role.POSITIONS else 1) or (len(shape) == 2 and 1 in shape)
