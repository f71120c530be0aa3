"""Name the axes of graph inputs and outputs: batch, tokens of this step, keys, and so on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import product

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.interface.evidence import GraphIndex, Known
from trt_kvcache.importer.interface.mrope import axes_of_planes
from trt_kvcache.importer.operators import NORMS
from trt_kvcache.importer.plan import Dim, Role, TensorRole
from trt_kvcache.importer.protos import Shape, is_op

_UNKNOWN = "?"
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Cast", "Identity", "Dropout", "Tanh", "Clip")


def name_axes(roles: Sequence[TensorRole], index: GraphIndex, known: Known) -> tuple[TensorRole, ...]:
    """Fill in `TensorRole.axes`, also for fixed sizes.

    A symbol has the same meaning everywhere in the model. Tensors with a known layout, by their role, give each symbol
    its meaning. Their layouts also name sizes without a symbol.

    Raises:
        UnsupportedModelError: the axes of positions or of a mask have an unsupported order.
    """
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
    for io, wanted in product(("input", "output"), order):  # an output may hold new rows only, in another layout
        for role, layout in zip(roles, layouts, strict=True):
            if (role.io, role.role) == (io, wanted):
                learn(role.shape, layout)
    for name, meanings in known.updates.items():
        learn(index.shape(name), meanings)
    # The rest may be laid out in more than one way; the symbols known so far say which.
    for role in roles:
        learn(role.shape, _layout(role, index, known, symbols, batches))
    named = []
    for role in roles:
        dims = zip(role.shape, _layout(role, index, known, symbols, batches), strict=True)
        named.append(replace(role, axes=tuple(m if isinstance(d, int) else symbols.get(d, m) for d, m in dims)))
        _check_order(named[-1])
    return tuple(named)


def open_axes(role: TensorRole) -> TensorRole:
    """A copy of the role in which axes of fixed sizes have no name."""
    # Positions with several planes keep the name: their shape does not show which axis is the batch.
    named = ("batch",) if role.role is Role.POSITIONS and len(role.shape) == 3 else ()
    dims = zip(role.shape, role.axes, strict=True)
    return replace(role, axes=tuple("" if isinstance(d, int) and (a not in named or d == 1) else a for d, a in dims))


def _check_order(role: TensorRole) -> None:
    """Refuse positions and masks whose axes have another order than steps can fill.

    Raises:
        UnsupportedModelError: naming them.
    """
    axes = open_axes(role).axes
    if role.role is Role.POSITIONS and len(axes) > 1:
        rows, last = axes[:-1], axes[-1]
        known = last in ("", "sequence", "tokens") and rows.count("batch") < 2 and {*rows} <= {"", _UNKNOWN, "batch"}
        wrong = "" if known and len(axes) < 4 else "[length], [batch, length] and [planes, batch, length]"
    elif role.role is Role.MASK:  # a symbol of the batch after the first axis, or of the tokens beside the queries
        known = "batch" not in axes[1:] and "sequence" not in axes[:-2]
        wrong = "" if known else "[batch, heads, length, keys], and fewer of these in this order"
    else:
        return
    if wrong:
        shown = ", ".join(axis or "fixed" for axis in axes)
        raise UnsupportedModelError(
            f"the {role.role.value} '{role.name}' {list(role.shape)} has axes {shown}; supported are {wrong}: export "
            "it so"
        )


def _with_all_logits(role: TensorRole, roles: Sequence[TensorRole], index: GraphIndex) -> TensorRole:
    """Correct logits that the model declares for one token, or an unknown number, but computes for all tokens."""
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
    """True if the embeddings of all tokens reach the logits along their own axis.

    Exporters that trace one decode step may declare ``[batch, 1, vocab]``, or a new symbol, for logits that the graph
    computes as ``[batch, S, vocab]``. The graph shows it: element-wise operators, norms and products with weights keep
    the sequence axis. Along the residual stream they lead from the token embeddings to the logits, unless an operator
    picks a single token on the way.

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
            ids = index.source(node.input[1])  # exporters add reshapes that change nothing
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
    """The meaning of each axis of a tensor by its role; ``"?"`` if unknown."""
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
        case Role.LOGITS:  # of all tokens of the step, or of the last one: only a symbol tells
            axes = [first or ("tokens" if packed and rank == 2 else "batch")]
        case Role.POSITIONS if rank == 3:
            axes = list(axes_of_planes(role.name, role.shape, batches))
        case Role.TOKENS | Role.POSITIONS:
            axes = [row] if (rank if "int" in role.dtype else rank - 1) == 1 else ["batch", "sequence"]
        case Role.MASK if rank == 2:  # Attention's own broadcasts from the right; one that is computed on starts with B
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
