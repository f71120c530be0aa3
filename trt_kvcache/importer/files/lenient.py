"""What ONNX Runtime takes and ONNX forbids, brought into the form that ONNX asks for.

nodes in any order              its float16 converter appends the Casts of inputs and of operators kept in float32
no import of com.microsoft      its quantizers add operators of it
"""

from __future__ import annotations

import heapq

from onnx import ModelProto

from trt_kvcache.importer.protos import Scope, iter_scopes, names_read

_CONTRIB = "com.microsoft"


def make_strict(model: ModelProto) -> None:
    """Sort nodes and add the import, in place. What is wrong in another way stays for ONNX's checker to name."""
    for scope in iter_scopes(model):
        _sort(scope)
    used = {node.domain for scope in iter_scopes(model) for node in scope.node}
    if _CONTRIB in used - {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=_CONTRIB, version=1)


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
