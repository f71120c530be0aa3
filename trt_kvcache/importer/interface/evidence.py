"""Evidence of the graph for the roles of its inputs and outputs. Names are not looked at.

The method: find the places whose meaning is defined (the index of a Gather on the embedding table, the position input
of RotaryEmbedding, the tensors that the cache updates and Attention nodes name), and walk back from each to the graph
inputs. What matters is what happens to the values on the way: an input that arrives unchanged *is* the tensor of that
role; one that others are added to only takes part in computing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from onnx import GraphProto, ModelProto, NodeProto

from trt_kvcache.importer.operators import VIEWS
from trt_kvcache.importer.plan import Role
from trt_kvcache.importer.protos import (
    FLOATS,
    INTEGERS,
    Shape,
    attribute_graphs,
    elem_type_of,
    is_op,
    names_read,
    nested_scopes,
    shape_of,
)


@dataclass(frozen=True)
class Known:
    """Caches and states, known before roles are looked for, as tensor names.

    Attributes:
        caches: past -> present, graph inputs and outputs.
        states: past -> present of state that is no cache, graph inputs and outputs.
        sequence_axis: past -> axis of its sequence, never negative.
        write_indices: used as TensorScatter's write indices.
        update_lengths: cumulative lengths ``[B + 1]`` of packed updates.
        updates: written into a cache -> what each of its axes is, as in `TensorRole.axes`.
    """

    caches: dict[str, str]
    states: dict[str, str] = field(default_factory=dict)
    sequence_axis: dict[str, int] = field(default_factory=dict)
    write_indices: frozenset[str] = frozenset()
    update_lengths: frozenset[str] = frozenset()
    updates: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """One reason to give an input or output a role.

    Attributes:
        exact: the values arrive unchanged where the role's meaning is defined.
    """

    role: Role
    exact: bool
    reason: str


# The first input's values pass unchanged; the other inputs are shapes, axes and bounds.
_PRESERVING = {*VIEWS, "Cast", "Clip", "Expand", "Tile"}
_ORDERING = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
_PRODUCTS = {"MatMul", "Gemm", "MatMulInteger"}
# From positions to the factors of a rotary embedding.
_TURNING = {
    *_PRESERVING, "Add", "Concat", "Cos", "Div", "Einsum", "Gather", "MatMul", "Mul", "Neg", "Sin", "Slice", "Split",
    "Sub",
}  # fmt: skip
_CAPPING = {*_PRESERVING, "Mul", "Div", "Add", "Tanh", "Slice", "Gather", "LogSoftmax"}

Follow = Callable[[NodeProto], Iterable[tuple[str, bool]]]
"""For a node on the way back: the inputs to go on with, and whether their values come through unchanged."""


class GraphIndex:
    """Lookups in a model whose graph is read many times; nodes in bodies of control flow count."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = graph = model.graph
        scopes = list(nested_scopes(graph))
        self.nodes = [node for scope in scopes for node in scope.node]
        self.constants = {t.name: t for scope in scopes if isinstance(scope, GraphProto) for t in scope.initializer}
        self.inputs = {info.name: info for info in graph.input if info.name not in self.constants}
        self.infos = {info.name: info for info in (*graph.value_info, *graph.input, *graph.output)}
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self.readers: dict[str, list[NodeProto]] = {}
        self._fixed: set[str] = set(self.constants)
        self._valueless: set[str] = set(self.constants)
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
            self._classify(node)

    def _classify(self, node: NodeProto) -> None:
        has_body = any(True for attribute in node.attribute for _ in attribute_graphs(attribute))
        if not has_body and all(name in self._fixed for name in node.input if name):
            self._fixed.update(node.output)
        if is_op(node, "Shape") or is_op(node, "Size") or (not has_body and all(map(self.is_valueless, node.input))):
            self._valueless.update(node.output)

    def is_fixed(self, name: str) -> bool:
        """True if the tensor is a constant, or computed from constants alone."""
        return name in self._fixed

    def is_valueless(self, name: str) -> bool:
        """True if no input's values reach the tensor: constants, and what is computed from shapes, such as a Range."""
        return not name or name in self._valueless

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor as far as it is known."""
        if name in self.constants:
            return tuple(int(dim) for dim in self.constants[name].dims)
        return shape_of(self.infos.get(name))

    def elem_type(self, name: str) -> int:
        """The element type, ``UNDEFINED`` where unknown."""
        return int(self.constants[name].data_type) if name in self.constants else elem_type_of(self.infos.get(name))

    def weight(self, name: str) -> str | None:
        """The initializer of a tensor: the tensor itself, or before it is reordered, cast or dequantized."""
        while name not in self.constants:
            node = self.producers.get(name)
            if node is None or node.op_type not in {*_PRESERVING, "DequantizeLinear"} or not node.input:
                return None
            name = node.input[0]
        return name

    def sources(self, tensor: str, follow: Follow) -> dict[str, bool]:
        """The graph inputs behind a tensor; True where one path leaves the values unchanged."""
        inputs: dict[str, bool] = {}
        seen: set[tuple[str, bool]] = set()
        stack = [(tensor, True)]
        while stack:
            state = stack.pop()
            name, unchanged = state
            if state in seen or self.is_valueless(name):
                continue
            seen.add(state)
            if name in self.inputs:
                inputs[name] = inputs.get(name, False) or unchanged
            elif (node := self.producers.get(name)) is not None:
                stack.extend((before, unchanged and same) for before, same in follow(node))
        return inputs

    def follow_values(self, node: NodeProto) -> Iterator[tuple[str, bool]]:
        """Step back over any operator. Modulo, minimum and maximum with a constant count as unchanged: a bound."""
        if node.op_type in _PRESERVING:
            yield node.input[0], True
            return
        bounded = node.op_type in {"Mod", "Min", "Max"} and sum(not self.is_fixed(name) for name in node.input) == 1
        yield from ((name, bounded) for name in names_read(node))

    def follow_positions(self, node: NodeProto) -> Iterator[tuple[str, bool]]:
        """Step back as `follow_values`, over a constant offset, table lookups and products with frequencies as well."""
        if is_op(node, "Gather") and self.is_valueless(node.input[0]):
            yield node.input[1], True
        elif node.op_type in {"Add", "Sub"} and any(self._is_fixed_scalar(name) for name in node.input):
            yield from ((name, True) for name in node.input)
        elif node.op_type in {"Mul", "MatMul", "Div", "Einsum", "Cos", "Sin"}:
            one_source = sum(not self.is_valueless(name) for name in node.input) == 1
            yield from ((name, one_source) for name in node.input)
        elif is_op(node, "Concat") and len(set(node.input)) == 1:
            yield node.input[0], True
        else:
            yield from self.follow_values(node)

    def follow_mask(self, node: NodeProto) -> Iterator[tuple[str, bool]]:
        """Step back as `follow_values`, but not over comparisons: what is compared with keys are positions."""
        if node.op_type not in _ORDERING or any(self._is_fixed_scalar(name) for name in node.input):
            yield from self.follow_values(node)

    def _is_fixed_scalar(self, name: str) -> bool:
        shape = self.shape(name)
        return self.is_fixed(name) and shape is not None and all(dim == 1 for dim in shape)


@dataclass(frozen=True)
class _Table:
    """A lookup ``table[index]`` with a constant 2-D float table."""

    index: str
    rows: int
    columns: int


def collect_evidence(index: GraphIndex, known: Known, cross: frozenset[str]) -> dict[str, list[Evidence]]:
    """Everything that the graph says, by name of the graph input or output. Caches are left to the caller.

    Args:
        index: of the model.
        known: its caches and states.
        cross: first outputs of the Attention nodes that attend beside the text.
    """
    evidence: dict[str, list[Evidence]] = {}

    def add(name: str, role: Role, exact: bool, reason: str) -> None:
        if name not in known.caches and name not in known.states and fits(index, name, role, is_own=name in masks):
            evidence.setdefault(name, []).append(Evidence(role, exact, reason))

    def add_sources(tensor: str, role: Role, follow: Follow, reason: str) -> None:
        for name, unchanged in index.sources(tensor, follow).items():
            if unchanged:
                add(name, role, True, reason)

    attentions = [n for n in index.nodes if is_op(n, "Attention") and n.output[0] not in cross]
    masks = sorted({name for node in attentions for name in node.input[3:4]})
    lengths = sorted({name for node in attentions for name in node.input[6:7]})
    for names, role, reason in (
        (sorted(known.write_indices), Role.WRITE_INDICES, "write_indices of TensorScatter"),
        (lengths, Role.VALID_LENGTHS, "nonpad_kv_seqlen of Attention"),
        (sorted(known.update_lengths), Role.UPDATE_LENGTHS, "lengths of a packed update"),
    ):
        for tensor in names:
            add_sources(tensor, role, index.follow_values, reason)
    for tensor in masks:
        add_sources(tensor, Role.MASK, index.follow_mask, "attn_mask of Attention")
    for tensor in lengths:
        for name in index.sources(tensor, index.follow_values):
            add(name, Role.MASK, False, "valid lengths are counted from it")

    width, hidden = _add_logits(index, known, add)

    # Sines are taken of a timestep, too, and token types index a table: positions turn queries and keys.
    def add_positions(tensors: Iterable[str]) -> set[str]:
        every = [index.sources(tensor, index.follow_positions) for tensor in tensors]
        turning = {n for inputs in every for n, unchanged in inputs.items() if unchanged and _turns(index, n)}
        for name in turning:
            add(name, Role.POSITIONS, True, "positions of the rotary embedding")
        return turning

    turning, tables = add_positions(_rotary_angles(index)), _tables(index)
    others = [t for t in tables if turning.isdisjoint(index.sources(t.index, index.follow_values))]
    tokens = _token_tables(others, width, hidden)
    lengths_of_caches = [(index.shape(past) or ())[axis : axis + 1] for past, axis in known.sequence_axis.items()]
    capacity = max((rows for length in lengths_of_caches for rows in length if isinstance(rows, int)), default=0)
    for table in tables:
        if table in tokens:
            size = f"the embedding table [{table.rows}, {table.columns}]"
            add_sources(table.index, Role.TOKENS, index.follow_values, f"index into {size}")
    add_positions(table.index for table in tables if table not in tokens and table.rows >= capacity)
    if hidden is not None and not tokens:
        for name in index.inputs:
            shape = index.shape(name)
            if shape is not None and len(shape) in (2, 3) and shape[-1] == hidden and index.elem_type(name) in FLOATS:
                add(name, Role.TOKENS, False, f"embeddings of width {hidden}, and no token ids")
    return evidence


def fits(index: GraphIndex, name: str, role: Role, *, is_own: bool) -> bool:
    """True if dtype and rank are such that the tensor can play the role at all; `is_own`: it is attention's mask."""
    shape, is_float = shape_of(index.infos[name]), index.elem_type(name) in FLOATS
    if shape is None:
        return False
    if role is Role.MASK:
        return len(shape) >= (1 if is_own else 2)
    if role is Role.LOGITS or (role is Role.TOKENS and is_float):
        return is_float and len(shape) in (2, 3)
    if index.elem_type(name) not in INTEGERS:
        return False
    if role is Role.TOKENS:
        return len(shape) in (1, 2)
    return len(shape) <= (3 if role is Role.POSITIONS else 1) or (len(shape) == 2 and 1 in shape)


def _add_logits(
    index: GraphIndex, known: Known, add: Callable[[str, Role, bool, str], None]
) -> tuple[int | None, int | None]:
    """Find outputs of a product with a weight that widens; returns vocabulary and hidden size of the widest."""
    presents = set(known.caches.values())
    products = [
        (sizes, value.name)
        for value in index.graph.output
        if value.name not in presents and (sizes := _widening_product(index, value.name))
    ]
    if not products:
        return None, None
    width, hidden = max(sizes for sizes, _ in products)
    for sizes, name in products:
        if sizes[0] == width:
            add(name, Role.LOGITS, False, f"made by a product that widens {hidden} to {width}")
    return width, hidden


def _widening_product(index: GraphIndex, output: str) -> tuple[int, int] | None:
    """(width, hidden size) of an output that a product with a larger weight makes, but for scaling and capping."""
    shape, name = index.shape(output), output
    if not shape or not isinstance(shape[-1], int):
        return None
    while (node := index.producers.get(name)) is not None:
        if node.op_type in _PRODUCTS:
            before = index.shape(node.input[0])
            is_weight = any(index.weight(operand) for operand in node.input[1:])
            if not is_weight or not before or not isinstance(before[-1], int) or before[-1] >= shape[-1]:
                return None
            return shape[-1], before[-1]
        values = [operand for operand in node.input if not index.is_valueless(operand)]
        if node.op_type not in _CAPPING or len(values) != 1:
            return None
        name = values[0]
    return None


def _tables(index: GraphIndex) -> list[_Table]:
    """Every lookup in a constant 2-D float table whose index comes from graph inputs."""
    tables = []
    for node in index.nodes:
        if node.op_type != "Gather" or index.is_valueless(node.input[1]):
            continue
        weight = index.weight(node.input[0])
        shape = index.shape(node.input[0]) or (index.shape(weight) if weight else None)
        is_float = weight is not None and index.elem_type(node.output[0]) in {*FLOATS, 0}
        if is_float and shape is not None and len(shape) == 2 and all(isinstance(dim, int) for dim in shape):
            tables.append(_Table(node.input[1], int(shape[0]), int(shape[1])))
    return tables


def _token_tables(tables: list[_Table], vocabulary: int | None, hidden: int | None) -> list[_Table]:
    """Token embeddings: as many rows as the logits are wide, else as wide as the hidden state, else widest."""
    for candidates in (
        [table for table in tables if table.rows == vocabulary],
        [table for table in tables if table.columns == hidden],
        tables if hidden is None else [],
    ):
        if candidates:
            largest = max((table.columns, table.rows) for table in candidates)
            return [table for table in candidates if (table.columns, table.rows) == largest or table.rows == vocabulary]
    return []


def _rotary_angles(index: GraphIndex) -> list[str]:
    """The tensors that hold rotary positions or angles, of RotaryEmbedding (cos, sin, positions), Cos and Sin."""
    names: dict[str, None] = {}
    for node in index.nodes:
        rotary, angles = node.op_type == "RotaryEmbedding", is_op(node, "Cos") or is_op(node, "Sin")
        inputs = node.input[1:4] if rotary else node.input[:1] if angles else ()
        names.update(dict.fromkeys(name for name in inputs if not index.is_valueless(name)))
    return list(names)


def _turns(index: GraphIndex, name: str) -> bool:
    """True if an input turns queries and keys: ``x * cos + rotated(x) * sin``, or RotaryEmbedding."""
    products: set[str] = set()
    seen: set[str] = set()
    stack = [name]
    while stack:
        tensor = stack.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        for node in index.readers.get(tensor, ()):
            if node.op_type == "RotaryEmbedding" and tensor in node.input[1:4]:
                return True
            others = [other for other in node.input if other != tensor and not index.is_valueless(other)]
            if node.op_type in _TURNING and seen.issuperset(others):
                stack.extend(node.output)
            elif is_op(node, "Mul"):
                products.update(node.output)
    sums = [node for product in products for node in index.readers.get(product, ()) if node.op_type in {"Add", "Sub"}]
    return any(products.issuperset(node.input) for node in sums)
