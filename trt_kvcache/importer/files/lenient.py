"""What ONNX Runtime takes and ONNX forbids, or itself trips over later, brought into the form that both ask for.

nodes in any order              its float16 converter appends the Casts of inputs and of operators kept in float32
no import of com.microsoft      its quantizers add operators of it
shapes stated for initializers  onnxruntime-genai states [] for a constant [1], which its optimizer makes an initializer
names of its own casts          its optimizer saves them, and gives them again when it loads what became of the model:
                                "Duplicate definition of name" (1.32)
"""

from __future__ import annotations

import heapq

from onnx import GraphProto, ModelProto

from trt_kvcache.importer.protos import Scope, iter_scopes, names_read, nested_scopes

_CONTRIB = "com.microsoft"
_CASTS = "InsertedPrecisionFreeCast_"


def make_strict(model: ModelProto) -> None:
    """Make, in place, strict ONNX of the above. What is wrong in another way stays for ONNX's checker to name."""
    for scope in iter_scopes(model):
        _sort(scope)
        _unstate(scope)
    used = {node.domain for scope in iter_scopes(model) for node in scope.node}
    if _CONTRIB in used - {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=_CONTRIB, version=1)


def rename_casts(graph: GraphProto) -> None:
    """Give, in place, what has the name of ONNX Runtime's own casts another one; inputs and outputs keep theirs."""
    kept = {value.name for value in (*graph.input, *graph.output)}

    def other(name: str) -> str:
        return f"trt_kvcache/{name}" if str(name).startswith(_CASTS) and name not in kept else name

    for scope in nested_scopes(graph):
        for node in scope.node:
            for names in (node.input, node.output):
                if any(other(name) != name for name in names):
                    names[:] = [other(name) for name in names]
        if isinstance(scope, GraphProto):
            for value in (*scope.initializer, *scope.value_info, *scope.input, *scope.output):
                if other(value.name) != value.name:
                    value.name = other(value.name)


def _unstate(scope: Scope) -> None:
    """Drop what is stated of the shapes of initializers, which have their own."""
    known = {tensor.name for tensor in scope.initializer} if isinstance(scope, GraphProto) else set()
    kept = [value for value in scope.value_info if value.name not in known]
    if len(kept) < len(scope.value_info):
        del scope.value_info[:]
        scope.value_info.extend(kept)


def _sort(scope: Scope) -> None:
    """Sort topologically; of the nodes that could come next, the one that came first does."""
    makers: dict[str, int] = {}
    for index, node in enumerate(scope.node):
        for name in node.output:
            makers.setdefault(name, index)
    needs = [{makers[name] for name in names_read(node) if name in makers} for node in scope.node]
    if all(not before or max(before) < index for index, before in enumerate(needs)):
        return
    readers: list[list[int]] = [[] for _ in needs]
    for index, before in enumerate(needs):
        for maker in before:
            readers[maker].append(index)
    missing = [len(before) for before in needs]
    ready = [index for index, count in enumerate(missing) if not count]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(order) == len(needs):  # else: a cycle
        places = {index: place for place, index in enumerate(order)}
        indices = iter(range(len(order)))
        scope.node.sort(key=lambda _: places[next(indices)])
