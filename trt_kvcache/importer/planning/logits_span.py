"""Plans to compute logits only for the last positions of a step, with a Slice before the last product.

    attention -> Add -> norm -> x [B, S, H] -> MatMul -> softcap -> logits [B, S, V]
                                `- becomes x[:, S - K :]

A prefill needs only the logits of one position. Logits of all positions would take 7 to 60 % of all multiplications
(by number of weights), and gigabytes. If operators after the Slice are unknown here, the model computes all logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from trt_kvcache.importer.cache_plan import InterfaceChange, LogitPositions, LogitsSpan, PlanOptions, Role, TensorRole
from trt_kvcache.importer.graph import contains, dims, free_name, inputs_behind, is_op, producer, small_constant
from trt_kvcache.importer.operators import NORMS

_OTHERS = "the last product is followed by operations other than factors, a bias, a softcap or a softmax"
_ELEMENTWISE = ("Add", "Cast", "Clip", "Div", "Identity", "Mul", "Sub", "Tanh")


def plan_logits(graph: gs.Graph, roles: Sequence[TensorRole], options: PlanOptions) -> tuple[LogitsSpan | None, str]:
    """Return the plan of the logits span (tensor to cut to the last positions), or None and the reason."""
    logits = _only(roles, Role.LOGITS, "output")
    tokens = _only(roles, Role.TOKENS, "input")
    if options.logits is LogitPositions.ALL or logits is None or not _several(logits, tokens):
        return None, ""
    if "tokens" in logits.axes:
        return None, _note(logits, "the tokens of all sequences are packed into one axis")
    output = next(t for t in graph.outputs if t.name == logits.name)
    product = _last_product(graph, output)
    if product is None:
        return None, _note(logits, _OTHERS)
    tensor, nodes = product
    taken = {str(name) for name in graph.tensors()} | {str(d) for r in roles for d in r.shape}
    name = free_name("logits_span", taken)
    return LogitsSpan(name, name, logits.name, str(tensor.name), 1, tuple(str(node.name) for node in nodes)), ""


def _only(roles: Sequence[TensorRole], role: Role, io: str) -> TensorRole | None:
    matches = [r for r in roles if r.role is role and r.io == io]
    return matches[0] if len(matches) == 1 else None


def _several(logits: TensorRole, tokens: TensorRole | None) -> bool:
    """True if the model returns logits for every token of a step, and a step may have several tokens."""
    if "tokens" in logits.axes:
        return True
    if len(logits.shape) != 3 or tokens is None or len(tokens.shape) < 2:
        return False
    return logits.axes[1] == "sequence" or (logits.shape[1] == tokens.shape[1] != 1 and logits.axes[1] == "")


def _note(logits: TensorRole, why: str) -> str:
    return f"'{logits.name}' still has the logits of all positions of a step: {why}"


def role_of(span: LogitsSpan) -> TensorRole:
    """Return the plan entry for the added input whose length is the number of positions with logits."""
    return TensorRole(span.name, "input", Role.SPAN, "int64", (span.symbol,), "added", ("kept",))


def with_span(role: TensorRole, span: LogitsSpan | None) -> TensorRole:
    """Return the role of an output. In the rewritten model, `logits_span` sets the number of logits positions."""
    if span is None or role.name != span.output or role.io != "output":
        return role
    return replace(role, shape=(role.shape[0], span.symbol, role.shape[2]), axes=(role.axes[0], "kept", role.axes[2]))


def change_of(role: TensorRole, span: LogitsSpan) -> InterfaceChange:
    """Return the entry of the plan's `changes` for the logits. `role` describes the exported logits."""
    names = {"batch": "B", "sequence": "S"}
    old = [names.get(a, str(d)) for d, a in zip(role.shape, role.axes, strict=True)]
    new = [old[0], span.symbol, old[2]]
    why = f"only the last positions, as many as the length of {span.name}; --logits all keeps all positions"
    return InterfaceChange("output", f"{role.name} [{', '.join(old)}]", f"{role.name} [{', '.join(new)}]", why)


def _last_product(graph: gs.Graph, output: gs.Tensor) -> tuple[gs.Tensor, list[gs.Node]] | None:
    """Return the input ``[B, S, H]`` of the last MatMul with a weight, and the nodes from there to the logits."""
    sources = inputs_behind(graph)

    def is_fixed(tensor: gs.Tensor) -> bool:
        return tensor.is_empty() or not sources.get(str(tensor.name))

    def products(tensor: gs.Tensor) -> Iterator[gs.Tensor]:
        node = producer(tensor)
        if node is not None and is_op(node, "MatMul"):
            yield from node.inputs[:1] if is_fixed(node.inputs[1]) else ()
        elif node is not None and _keeps_positions(node, [t for t in node.inputs if is_fixed(t)]):
            for before in (t for t in node.inputs if not is_fixed(t)):
                yield from products(before)

    for start in products(output):
        if len(dims(start) or ()) != 3:
            continue
        tail: dict[int, gs.Node] = {}
        pending = [output]
        while pending:
            tensor = pending.pop()
            node = producer(tensor)
            if node is None:
                break
            is_product = is_op(node, "MatMul") and is_fixed(node.inputs[1])
            if not is_product and not _keeps_positions(node, [t for t in node.inputs if is_fixed(t)]):
                break
            if tensor is not output and contains(graph.outputs, tensor):
                break
            tail[id(node)] = node
            pending += [t for t in node.inputs if t is not start and not is_fixed(t)]
        else:
            inner = [t for node in tail.values() for t in node.outputs]
            if all(id(reader) in tail for t in inner for reader in t.outputs):
                readers = [node for node in tail.values() if contains(node.inputs, start)]
                return _before_factor(graph, start, readers, is_fixed) or (start, readers)
    return None


def _before_factor(
    graph: gs.Graph, start: gs.Tensor, readers: list[gs.Node], is_fixed: Callable[[gs.Tensor], bool]
) -> tuple[gs.Tensor, list[gs.Node]] | None:
    """If an operator that treats each position alone (such as a norm) made `start`, return its input, to slice this."""
    node = producer(start)
    if node is None or contains(graph.outputs, start) or {*map(id, start.outputs)} != {*map(id, readers)}:
        return None
    others = [t for t in node.inputs if not is_fixed(t)]
    by_position = _keeps_positions(node, [t for t in node.inputs if is_fixed(t)]) or (
        is_op(node, *NORMS) and int(node.attrs.get("axis", -1)) in (-1, 2) and len(node.outputs) == 1
    )
    return (others[0], [node]) if by_position and len(others) == 1 and len(dims(others[0]) or ()) == 3 else None


def _keeps_positions(node: gs.Node, fixed: Sequence[gs.Tensor]) -> bool:
    """True if a node after the Slice surely computes each position separately; `fixed` are its constant inputs."""
    if is_op(node, *_ELEMENTWISE):  # constants must not have different numbers for different positions
        rank = len(dims(node.outputs[0]) or ())
        shapes = [() if t.is_empty() else dims(t) for t in fixed]
        ranks = {len(dims(t) or ()) for t in node.inputs if not contains(fixed, t)}
        return (
            rank == 3
            and ranks == {3}
            and all(shape is not None and (len(shape) < 2 or shape[-2] == 1) for shape in shapes)
        )
    if is_op(node, "Softmax", "LogSoftmax"):
        return int(node.attrs.get("axis", -1)) in (-1, len(dims(node.outputs[0]) or ()) - 1)
    if is_op(node, "Reshape"):  # into blocks, as `lower.matmul_nbits` does to correct zero points
        shape = small_constant(node.inputs[1])
        return shape is not None and len(shape) > 2 and not shape[:2].any()
    if is_op(node, "ReduceSum"):
        axes = small_constant(node.inputs[1]) if len(node.inputs) > 1 else None
        return axes is not None and [int(a) for a in axes.reshape(-1)] in ([-1], [len(dims(node.inputs[0]) or ()) - 1])
    return False
