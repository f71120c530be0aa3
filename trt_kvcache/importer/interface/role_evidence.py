"""Finds the roles of inputs and outputs, and the meaning of their axes, from the graph alone, without names.

The input that looks up the embedding table holds the tokens. If an operand of a cache update or an Attention is an
unchanged input, the input has the role of this operand. Positions of text and image models (M-RoPE) have several planes
per token, such as time, height and width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from onnx import GraphProto, ModelProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import Dim, Role, TensorRole
from trt_kvcache.importer.operators import NORMS, VIEWS
from trt_kvcache.importer.protos import (
    FLOATS,
    INTEGERS,
    Array,
    Shape,
    elem_type_of,
    is_op,
    names_read,
    nested_scopes,
    shape_of,
)


@dataclass(frozen=True)
class Known:
    """Names of caches, states and cache updates, which are known before the search for roles.

    Attributes:
        caches: maps the name of a past (graph input) to that of its present (graph output).
        states: maps past to present in the same way for states, which are not caches.
        write_indices: names of tensors that are write indices of TensorScatter.
        update_lengths: names of cumulative lengths ``[B + 1]`` of packed updates.
        updates: meaning of each axis (as in `TensorRole.axes`) of the tensors written into caches, by name.
    """

    caches: dict[str, str]
    states: dict[str, str] = field(default_factory=dict)
    write_indices: frozenset[str] = frozenset()
    update_lengths: frozenset[str] = frozenset()
    updates: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fact:
    """A role that the graph shows, with the evidence; `certain` if the role overrides shipped name patterns."""

    role: Role
    reason: str
    certain: bool = True


_PRESERVING = {*VIEWS, "Cast", "Clip", "Expand", "Tile"}
_BOUNDS = {"Mod", "Min", "Max"}


class GraphIndex:
    """Index of a model's graph for fast lookups. It includes nodes in bodies of control flow."""

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
        """Return the shape of a tensor; None if unknown."""
        if name in self.constants:
            return tuple(int(dim) for dim in self.constants[name].dims)
        return shape_of(self.infos.get(name))

    def elem_type(self, name: str) -> int:
        """Return the element type of a tensor; ``UNDEFINED`` if unknown."""
        return int(self.constants[name].data_type) if name in self.constants else elem_type_of(self.infos.get(name))

    def weight(self, name: str) -> str | None:
        """Return the initializer of which a tensor is a transposed, cast or dequantized copy; None if there is none."""
        while name not in self.constants:
            node = self.producers.get(name)
            if node is None or node.op_type not in {*_PRESERVING, "DequantizeLinear"} or not node.input:
                return None
            name = node.input[0]
        return name

    def source(self, name: str) -> str | None:
        """Return the graph input of which a tensor is a reshaped, cast or clipped copy; None if there is none."""
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
        """Return `names` and all tensors that the graph computes from their numbers. The graph must be sorted."""
        found = set(names)
        for node in self.nodes:
            if node.op_type not in ("Shape", "Size") and not found.isdisjoint(names_read(node)):
                found.update(node.output)
        return found


def facts(index: GraphIndex, known: Known) -> dict[str, list[Fact]]:
    """Return the roles that the graph shows, by name of input or output, without caches and states."""
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
        # without this condition, it may be cross-attention
        if is_op(node, "Attention") and (not known.caches or node.input[1] in held):
            yield from ((t, Fact(Role.VALID_LENGTHS, "nonpad_kv_seqlen of Attention")) for t in node.input[6:7])
            yield from ((t, Fact(Role.MASK, "attn_mask of Attention", certain=False)) for t in node.input[3:4])


def _tokens(index: GraphIndex, known: Known) -> Iterator[tuple[str, Fact]]:
    """Find the input of tokens: it indexes a table with as many rows as there are logits, or the widest table."""
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
                reason = f"its width is the number of rows of the embedding table {list(shape)}"
                yield name, Fact(Role.LOGITS, reason, certain=False)


def fits(index: GraphIndex, name: str, role: Role) -> bool:
    """True if a tensor's dtype and rank allow the role."""
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


_UNKNOWN = "?"
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Cast", "Identity", "Dropout", "Tanh", "Clip")


def name_axes(roles: Sequence[TensorRole], index: GraphIndex, known: Known) -> tuple[TensorRole, ...]:
    """Return roles with `TensorRole.axes` filled in, even for fixed sizes; refuse unsupported orders of axes."""
    roles = [_with_all_logits(role, roles, index) for role in roles]
    batches = {r.shape[0] for r in roles if r.role is Role.CACHE and r.shape}
    batches |= {r.shape[0] for r in roles if r.role is Role.TOKENS and len(r.shape) > 1}
    symbols: dict[str, str] = {}

    def learn(shape: Shape | None, meanings: Iterable[str]) -> None:
        for dim, meaning in zip(shape or (), meanings, strict=False):
            if isinstance(dim, str) and dim != "?" and meaning != _UNKNOWN:
                symbols.setdefault(dim, meaning)

    layouts = [_layout(role, index, known, {}, batches) for role in roles]
    order = (Role.CACHE, Role.UPDATE_LENGTHS, Role.WRITE_INDICES, Role.VALID_LENGTHS, Role.TOKENS)
    for io, wanted in product(("input", "output"), order):  # outputs may hold only new rows, in another layout
        for role, layout in zip(roles, layouts, strict=True):
            if (role.io, role.role) == (io, wanted):
                learn(role.shape, layout)
    for name, meanings in known.updates.items():
        learn(index.shape(name), meanings)
    # Other roles have several possible layouts; the symbols known so far decide.
    for role in roles:
        learn(role.shape, _layout(role, index, known, symbols, batches))
    named = []
    for role in roles:
        dims = zip(role.shape, _layout(role, index, known, symbols, batches), strict=True)
        named.append(replace(role, axes=tuple(m if isinstance(d, int) else symbols.get(d, m) for d, m in dims)))
        _check_order(named[-1])
    return tuple(named)


def open_axes(role: TensorRole) -> TensorRole:
    """Return the role of a tensor with names for its dynamic axes only."""
    # Positions with several planes keep "batch": their shape does not show which axis it is.
    named = ("batch",) if role.role is Role.POSITIONS and len(role.shape) == 3 else ()
    dims = zip(role.shape, role.axes, strict=True)
    return replace(role, axes=tuple("" if isinstance(d, int) and (a not in named or d == 1) else a for d, a in dims))


def _check_order(role: TensorRole) -> None:
    """Raise `UnsupportedModelError` for positions and masks whose axes have an unsupported order."""
    axes = open_axes(role).axes
    if role.role is Role.POSITIONS and len(axes) > 1:
        rows, last = axes[:-1], axes[-1]
        known = last in ("", "sequence", "tokens") and rows.count("batch") < 2 and {*rows} <= {"", _UNKNOWN, "batch"}
        wrong = "" if known and len(axes) < 4 else "[length], [batch, length] and [planes, batch, length]"
    elif role.role is Role.MASK:  # the batch must be the first axis, and tokens only the axis of queries
        known = "batch" not in axes[1:] and "sequence" not in axes[:-2]
        wrong = "" if known else "[batch, heads, length, keys], or some of these axes in this order"
    else:
        return
    if wrong:
        shown = ", ".join(axis or "fixed" for axis in axes)
        raise UnsupportedModelError(
            f"the {role.role.value} '{role.name}' {list(role.shape)} has axes {shown}; the axes must be {wrong}: "
            "export the model this way"
        )


def _with_all_logits(role: TensorRole, roles: Sequence[TensorRole], index: GraphIndex) -> TensorRole:
    """Return the role of logits with a corrected shape. Some models declare one position, but compute all."""
    tokens = next((r for r in roles if r.role is Role.TOKENS and len(r.shape) > 1), None)
    if role.role is not Role.LOGITS or tokens is None or len(role.shape) != 3:
        return role
    length, declared = tokens.shape[1], role.shape[1]
    known = {d for r in roles if r is not role for d in r.shape}
    if declared != 1 and (isinstance(declared, int) or declared in known):
        return role
    if length == 1 or not _every_token(index, role.name, tokens.name):
        return role
    return replace(role, shape=(role.shape[0], length, role.shape[2]))


def _every_token(index: GraphIndex, logits: str, tokens: str) -> bool:
    """True if logits declared ``[batch, 1, vocab]`` are computed for every token: operators keep the axis of tokens."""
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
            ids = index.source(node.input[1])  # exporters add Reshapes in between
            if ids == tokens and len(index.shape(name) or ()) == 3 and axis == 1:
                return True
        if any(is_op(node, op) for op in _ELEMENTWISE):
            stack.extend((source, axis) for source in node.input)
        elif is_op(node, "Transpose"):
            perm = next((list(a.ints) for a in node.attribute if a.name == "perm"), [2, 1, 0])
            stack.append((node.input[0], perm[axis]))
        elif is_op(node, "MatMul"):
            for weight, source, row_axis in ((1, 0, 1), (0, 1, 2)):  # x @ W, and W @ x with transposed x
                if index.weight(node.input[weight]) and axis == row_axis:
                    stack.append((node.input[source], axis))
        elif node.op_type in (*NORMS, "LogSoftmax"):
            stack.append((node.input[0], axis))
    return False


def _layout(
    role: TensorRole, index: GraphIndex, known: Known, symbols: dict[str, str], batches: Collection[Dim]
) -> list[str]:
    rank = len(role.shape)
    packed = bool(known.update_lengths)
    first = symbols.get(str(role.shape[0])) if rank else None
    row = first or ("tokens" if packed else "sequence")
    axes: list[str]
    match role.role:
        case Role.OTHER if role.name in known.updates:
            axes = list(known.updates[role.name])
        case Role.CACHE | Role.STATE | Role.WRITE_INDICES | Role.VALID_LENGTHS:
            axes = ["batch"]
        case Role.CONSTANT:
            axes = ["batch", *["encoder"] * (rank - 1)]
        case Role.UPDATE_LENGTHS:
            axes = ["batch+1"]
        case Role.LOGITS:  # logits of all tokens of the step or only of the last one; only a symbol shows which
            axes = [first or ("tokens" if packed and rank == 2 else "batch")]
        case Role.POSITIONS if rank == 3:
            axes = list(axes_of_planes(role.name, role.shape, batches))
        case Role.TOKENS | Role.POSITIONS:
            axes = [row] if (rank if "int" in role.dtype else rank - 1) == 1 else ["batch", "sequence"]
        case Role.MASK if rank == 2:  # Attention aligns masks to the right; other masks start with B
            is_own = any(is_op(n, "Attention") and role.name in n.input[3:4] for n in index.nodes)
            axes = [first or ("sequence" if is_own else "batch"), "keys"]
        case Role.MASK if rank == 1:
            axes = ["keys"]
        case Role.MASK:
            axes = ["batch", *(["?"] * (rank - 3))] if rank > 3 else [first or "?"]
            axes += ["sequence", "keys"]
        case _:
            axes = []
    return (axes + [_UNKNOWN] * rank)[:rank]


def axes_of_planes(name: str, shape: Sequence[Dim], batches: Collection[Dim]) -> tuple[str, str, str]:
    """Return the axes of positions of rank 3: ``[K, B, S]`` or ``[B, K, S]``. `batches`: possible sizes of B."""
    fits = [axis for axis in (0, 1) if shape[axis] in batches and shape[axis] != "?"]
    fits = fits or [axis for axis in (0, 1) if isinstance(shape[1 - axis], int)]
    if len(fits) > 1:
        fits = [axis for axis in fits if shape[axis] == 1][-1:]
    if not fits:
        raise UnsupportedModelError(
            f"the positions '{name}' {list(shape)} have several planes, but the shape does not show which axis is the "
            "batch; it must be [planes, batch, length] or [batch, planes, length]: export with a dynamic batch that "
            "has the same name as the batch of the tokens"
        )
    plane = shape[1 - fits[0]]
    other = "" if isinstance(plane, int) else "?"
    return ("batch", other, "sequence") if fits[0] == 0 else (other, "batch", "sequence")


def place_positions(rows: Array, shape: tuple[int, ...], axes: Sequence[str]) -> Array:
    """Return positions ``[B, S]`` in the shape of a model's input, for proofs (recorded decodes) and verification.

    With several planes per token, only the first has these positions; the others get other numbers. So a comparison
    also covers image tokens, whose positions differ by plane. An input with a batch of 1 gets the first row.
    """
    batch = axes.index("batch") if "batch" in axes else None
    values = rows if batch is not None and shape[batch] == len(rows) else rows[:1]
    sizes = [1] * len(shape)
    sizes[-1] = values.shape[1]
    if batch is not None:
        sizes[batch] = len(values)
    values = values.reshape(sizes)
    for axis, size in enumerate(shape[:-1]):
        if axis != batch:
            values = values // np.arange(1, size + 1).reshape([-1, *[1] * (len(shape) - axis - 1)])
    return np.broadcast_to(values, shape)
