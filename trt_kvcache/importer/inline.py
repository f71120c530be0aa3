"""Flatten a model: model-local functions, and the If and Loop bodies that hide a cache update or an attention.

TensorRT's KV-cache layer needs the cache to be an input and the result an output of the network itself, and the
importer has to see every Attention node. Functions are inlined whatever they hold, because TensorRT's parser looks
operators up by name alone and prefers its own operator to the function of that name: a function ``my::Relu`` that
squares is built as a ReLU, without a word (measured, TensorRT for RTX 1.7.1). Control flow is inlined where the body
certainly runs exactly once:

    function call                          -> its body
    If(constant condition)                 -> the branch taken
    Loop(trip count 1, condition true)     -> its body

Any other body that hides a cache update or an attention is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx
import onnx.inliner

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS

HIDDEN_OPS = ("TensorScatter", "TRT_KVCacheUpdate", "Attention")


def inline_bodies(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Inline all functions, and the control flow that holds a cache update or an attention.

    Returns:
        The model (another object where functions were inlined) and the names of what was inlined.

    Raises:
        UnsupportedModelError: a cache update or an attention sits in a body that may run never or more than once, or a
            function is of another opset than the model.
    """
    done: list[str] = []
    if inlined := [f for f in model.functions if not _is_update(f)]:
        _check_opsets(model, inlined)
        functions = [(f.domain, f.name) for f in inlined]
        done += [f"function {domain}::{name}" for domain, name in functions]
        model = onnx.inliner.inline_selected_functions(model, functions)
        for node in model.graph.node:  # inputs that calls leave out: empty ones kill ONNX Runtime 1.31 in its fusions
            while node.input and not node.input[-1]:
                del node.input[-1]
    while (index := next((i for i, n in enumerate(model.graph.node) if _body_hides(n)), None)) is not None:
        done.append(_splice(model.graph, index))
    return model, tuple(done)


def _check_opsets(model: onnx.ModelProto, functions: Iterable[onnx.FunctionProto]) -> None:
    """ONNX's inliner knows no operators of two versions."""
    of_model = {entry.domain: entry.version for entry in model.opset_import}
    for function in functions:
        for entry in function.opset_import:
            if (known := of_model.get(entry.domain, entry.version)) != entry.version:
                raise UnsupportedModelError(
                    f"the function {function.domain}::{function.name} is of opset {entry.version} of "
                    f"'{entry.domain or 'ai.onnx'}', and the model of {known}; supported are functions of the model's "
                    "own opsets: export both with one"
                )


def _is_update(function: onnx.FunctionProto) -> bool:
    """Whether a function only says what an update of the caches means, which TensorRT does in place."""
    return function.name == "TRT_KVCacheUpdate" or (function.domain == NAMESPACE and function.name in OPERATORS)


def _is_hidden(node: onnx.NodeProto) -> bool:
    if node.op_type == "TRT_KVCacheUpdate":  # TensorRT's parser takes it in any domain
        return True
    return node.op_type in HIDDEN_OPS and node.domain in ("", "ai.onnx")


def _body_hides(node: onnx.NodeProto) -> bool:
    return any(_is_hidden(inner) for body in _bodies(node) for inner in _walk(body.node))


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _walk(nodes: object) -> Iterator[onnx.NodeProto]:
    for node in nodes:  # type: ignore[attr-defined]
        yield node
        for body in _bodies(node):
            yield from _walk(body.node)


def _splice(graph: onnx.GraphProto, index: int) -> str:
    """Replace the control-flow node at `index` by its body; returns what was done."""
    node = graph.node[index]
    label = f"{node.op_type} '{node.name or node.output[0]}'"
    hidden = sorted({n.op_type for body in _bodies(node) for n in _walk(body.node) if _is_hidden(n)})
    constants = _constants(graph)
    if node.op_type == "If":
        condition = constants.get(node.input[0])
        if condition is None:
            raise UnsupportedModelError(
                f"{label} holds {', '.join(hidden)} and its condition '{node.input[0]}' is not a constant: TensorRT's "
                "cache layer must run in every step; export without the branch"
            )
        wanted = "then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"
        body = next(a.g for a in node.attribute if a.name == wanted)
        bind: dict[str, str] = {}
        results = [o.name for o in body.output]
    elif node.op_type == "Loop":
        trips = constants.get(node.input[0]) if node.input[0] else None
        condition = constants.get(node.input[1]) if len(node.input) > 1 and node.input[1] else np.array(True)
        if trips is None or int(trips.reshape(-1)[0]) != 1 or condition is None or not bool(condition.reshape(-1)[0]):
            found = "no constant" if trips is None else f"a constant of {int(trips.reshape(-1)[0])}"
            raise UnsupportedModelError(
                f"{label} holds {', '.join(hidden)}; only a Loop that certainly runs once can be inlined (trip count "
                f"1, condition true), and this one has {found} trip count: unroll it in the export"
            )
        body = next(a.g for a in node.attribute if a.name == "body")
        carried = len(node.input) - 2
        if len(body.output) - 1 > carried:
            raise UnsupportedModelError(f"{label} holds {', '.join(hidden)} and has scan outputs: unroll it")
        zero = f"{label}/iteration"
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.int64), zero))
        always = f"{label}/condition"
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), always))
        bind = {body.input[0].name: zero, body.input[1].name: always}
        bind |= {b.name: given for b, given in zip(body.input[2:], node.input[2:], strict=True)}
        results = [o.name for o in body.output[1:]]
    else:
        raise UnsupportedModelError(
            f"{label} holds {', '.join(hidden)}: cache updates and attention inside a {node.op_type} body cannot be "
            "mapped to TensorRT's layers; unroll it in the export"
        )
    splice_body(graph, index, body, bind, results)
    return label


def splice_body(
    graph: onnx.GraphProto,
    index: int,
    body: onnx.GraphProto,
    bind: dict[str, str] | None = None,
    results: Sequence[str] | None = None,
) -> None:
    """Replace a control-flow node by a body that runs once.

    Args:
        graph: is changed.
        index: of the node.
        body: one of the node's.
        bind: names outside for the inputs of the body.
        results: names in the body of what the node gives; None: all outputs of the body.
    """
    node = graph.node[index]
    bind = dict(bind or {})
    results = [o.name for o in body.output] if results is None else results
    made = {name for n in body.node for name in n.output}
    outer = list(zip(results, node.output, strict=False))
    # What a node of the body makes gets its name outside at once; what passes through, or comes out twice, is copied.
    bind |= {inner: name for inner, name in reversed(outer) if name and inner in made}
    replacement = _renamed(body, f"{node.name or node.output[0]}/", bind)
    for inner, name in outer:
        given = bind.get(inner, replacement.names.get(inner, inner))
        if name and given != name:
            replacement.nodes.append(onnx.helper.make_node("Identity", [given], [name]))
    before, after = list(graph.node[:index]), list(graph.node[index + 1 :])
    del graph.node[:]
    graph.node.extend([*before, *replacement.nodes, *after])
    graph.initializer.extend(replacement.initializers)
    graph.value_info.extend(replacement.values)


class _Renamed:
    """A body with its own names prefixed, so that they cannot meet names outside."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.values: list[onnx.ValueInfoProto] = []


def _renamed(body: onnx.GraphProto, prefix: str, bind: dict[str, str]) -> _Renamed:
    result = _Renamed()
    own = {name for n in body.node for name in n.output if name} | {t.name for t in body.initializer}
    result.names = {name: prefix + name for name in own}
    names = {**result.names, **bind}
    for tensor in body.initializer:
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        copy.name = names[tensor.name]
        result.initializers.append(copy)
    for value in body.value_info:
        if value.name in result.names and value.name not in bind:
            typed = onnx.ValueInfoProto()
            typed.CopyFrom(value)
            typed.name = names[value.name]
            result.values.append(typed)
    for node in body.node:
        result.nodes.append(_rename_node(node, names, prefix))
    return result


def _rename_node(node: onnx.NodeProto, names: dict[str, str], prefix: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = prefix + node.name if node.name else ""
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    for body in _bodies(copy):
        _rename_outer_uses(body, names)
    return copy


def _rename_outer_uses(body: onnx.GraphProto, names: dict[str, str]) -> None:
    """Rename what a nested body captures from outside; its own names hide outer ones (ONNX forbids reuse)."""
    own = {i.name for i in body.input} | {t.name for t in body.initializer} | {o for n in body.node for o in n.output}
    visible = {old: new for old, new in names.items() if old not in own}
    for node in body.node:
        node.input[:] = [visible.get(name, name) for name in node.input]
        for nested in _bodies(node):
            _rename_outer_uses(nested, visible)
    for output in body.output:
        output.name = visible.get(output.name, output.name)


def _constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Scalar constants of the main graph by name."""
    found = {
        t.name: onnx.numpy_helper.to_array(t)
        for t in graph.initializer
        if t.data_location != onnx.TensorProto.EXTERNAL and int(np.prod(t.dims)) == 1
    }
    for node in graph.node:
        if node.op_type == "Constant" and len(node.attribute) == 1:
            attribute = node.attribute[0]
            if attribute.name == "value" and int(np.prod(attribute.t.dims)) == 1:
                found[node.output[0]] = onnx.numpy_helper.to_array(attribute.t)
            elif attribute.name == "value_int":
                found[node.output[0]] = np.array(attribute.i)
        elif node.op_type in ("Identity", "Cast") and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    inputs = {i.name for i in graph.input}  # an initializer that is also an input is only a default
    return {name: value for name, value in found.items() if name not in inputs}
