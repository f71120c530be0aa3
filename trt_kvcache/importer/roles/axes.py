"""What each dynamic size of the graph inputs and outputs is: batch, tokens of this step, keys, and so on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import product

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import Dim, Role, TensorRole
from trt_kvcache.importer.protos import Shape, is_op
from trt_kvcache.importer.roles.mrope import axes_of_planes
from trt_kvcache.importer.roles.structure import GraphFacts, GraphIndex

_UNKNOWN = "?"
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Cast", "Identity", "Dropout", "Tanh", "Clip")
_FIRST = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "LogSoftmax")


def name_axes(roles: Sequence[TensorRole], index: GraphIndex, facts: GraphFacts) -> tuple[TensorRole, ...]:
    """Fill in `TensorRole.axes`.

    A size that the model gives a symbol means the same wherever the symbol stands; what each symbol means comes from
    the tensors whose layout is known by their role. Those layouts also name the sizes that have no symbol.

    Raises:
        UnsupportedModelError: the axes of positions are in no order that is known here.
    """
    roles = [_with_all_logits(role, roles, index) for role in roles]
    batches = {r.shape[0] for r in roles if r.role is Role.CACHE and r.shape}
    batches |= {r.shape[0] for r in roles if r.role is Role.TOKENS and len(r.shape) > 1}
    symbols: dict[str, str] = {}

    def learn(shape: Shape | None, meanings: Iterable[str]) -> None:
        for dim, meaning in zip(shape or (), meanings, strict=False):
            if isinstance(dim, str) and dim != "?" and meaning != _UNKNOWN:
                symbols.setdefault(dim, meaning)

    layouts = [_layout(role, facts, {}, batches) for role in roles]
    order = (Role.CACHE, Role.UPDATE_LENGTHS, Role.WRITE_INDICES, Role.VALID_LENGTHS, Role.TOKENS)
    for io, wanted in product(("input", "output"), order):  # an output may hold new rows only, in another layout
        for role, layout in zip(roles, layouts, strict=True):
            if (role.io, role.role) == (io, wanted):
                learn(role.shape, layout)
    for node in index.nodes:
        if is_op(node, "TensorScatter") and node.input[0] in facts.sequence_axis:
            shape = index.shape(node.input[1])
            axis = facts.sequence_axis[node.input[0]]
            learn(shape, ["batch", *(["?"] * (axis - 1)), "sequence"])
    for name, meanings in facts.updates.items():
        learn(index.shape(name), meanings)
    # The rest may be laid out in more than one way; the symbols known so far say which.
    for role in roles:
        learn(role.shape, _layout(role, facts, symbols, batches))
    named = [replace(role, axes=_axes(role, _layout(role, facts, symbols, batches), symbols)) for role in roles]
    for role in named:
        _check_positions(role)
        _check_mask(role)
    return tuple(named)


def _check_positions(role: TensorRole) -> None:
    """Refuse positions whose axes are not one of the batch at most, before one of the tokens.

    Raises:
        UnsupportedModelError: naming them.
    """
    if role.role is not Role.POSITIONS or len(role.axes) < 2:
        return
    rows, last = role.axes[:-1], role.axes[-1]
    known = (last in ("", "sequence", "tokens"), rows.count("batch") < 2, {*rows} <= {"", _UNKNOWN, "batch"})
    if not all(known) or len(role.axes) > 3:
        raise UnsupportedModelError(
            f"the positions '{role.name}' {list(role.shape)} have axes {', '.join(a or 'fixed' for a in role.axes)}; "
            "supported are [length], [batch, length] and [planes, batch, length]: export them so"
        )


def _check_mask(role: TensorRole) -> None:
    """Refuse masks with a symbol of the batch behind the first axis, or one of the tokens elsewhere than of queries.

    Raises:
        UnsupportedModelError: naming them.
    """
    if role.role is not Role.MASK:
        return
    tokens = [place - len(role.axes) for place, axis in enumerate(role.axes) if axis == "sequence"]
    if "batch" in role.axes[1:] or any(place not in (-1, -2) for place in tokens):
        found = ", ".join(axis or "fixed" for axis in role.axes)
        raise UnsupportedModelError(
            f"the mask '{role.name}' {list(role.shape)} has axes {found}; supported "
            "are [batch, heads, length, keys], and fewer of these in this order: export it so"
        )


def _with_all_logits(role: TensorRole, roles: Sequence[TensorRole], index: GraphIndex) -> TensorRole:
    """Logits that are declared for one token, or for as many as nothing says, and computed for all."""
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
    """Whether the embeddings of all tokens reach the logits along their own axis.

    Exporters that trace one step of decoding declare ``[batch, 1, vocab]`` for what the graph computes as ``[batch, S,
    vocab]``, or a symbol that stands nowhere else. The graph tells: element-wise operators, norms and products with
    weights keep the sequence axis, and by the residual stream they lead from the embeddings of the tokens to the
    logits, unless something picks a token on the way.

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


def _axes(role: TensorRole, layout: Sequence[str], symbols: dict[str, str]) -> tuple[str, ...]:
    # Of positions with several planes, not even a fixed size says which axis is the batch.
    kept = ("batch",) if role.role is Role.POSITIONS and len(role.shape) == 3 else ()
    return tuple(
        (meaning if meaning in kept and dim != 1 else "") if isinstance(dim, int) else symbols.get(dim, meaning)
        for dim, meaning in zip(role.shape, layout, strict=True)
    )


def _layout(role: TensorRole, facts: GraphFacts, symbols: dict[str, str], batches: Collection[Dim]) -> list[str]:
    """What each axis of a tensor is by its role, ``"?"`` where that says nothing."""
    rank = len(role.shape)
    packed = bool(facts.update_lengths)
    first = symbols.get(str(role.shape[0])) if rank else None
    row = first or ("tokens" if packed else "sequence")
    known: list[str]
    match role.role:
        case Role.OTHER if role.name in facts.updates:
            known = list(facts.updates[role.name])
        case Role.CACHE | Role.STATE | Role.WRITE_INDICES | Role.VALID_LENGTHS:
            known = ["batch"]
        case Role.CONSTANT:
            known = ["batch", *["encoder"] * (rank - 1)]
        case Role.UPDATE_LENGTHS:
            known = ["batch+1"]
        case Role.TOKENS | Role.POSITIONS | Role.LOGITS:
            indexed = rank if "int" in role.dtype else rank - 1
            if role.role is Role.POSITIONS and rank == 3:
                known = list(axes_of_planes(role.name, role.shape, batches))
            elif role.role is Role.LOGITS:  # of all tokens of the step, or of the last one: only a symbol tells
                known = [first or ("tokens" if packed and rank == 2 else "batch")]
            else:
                known = [row] if indexed == 1 else ["batch", "sequence"]
        case Role.MASK:
            known = _mask_layout(role, facts, first)
        case _:
            known = []
    return (known + [_UNKNOWN] * rank)[:rank]


def _mask_layout(role: TensorRole, facts: GraphFacts, first: str | None) -> list[str]:
    """Attention's own mask broadcasts to ``[B, N, S, keys]`` from the right; one that is computed on starts with B."""
    rank = len(role.shape)
    if rank == 2:
        direct = role.name in facts.masks
        return [first or ("sequence" if direct else "batch"), "keys"]
    return ["batch", *(["?"] * (rank - 3)), "sequence", "keys"] if rank > 3 else [first or "?", "sequence", "keys"]
