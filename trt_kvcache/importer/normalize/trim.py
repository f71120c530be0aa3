"""Take away what only crosses a model: outputs that are an input again, and shapes read off inputs that go.

    Identity(cross_key) -> present.cross_key            gone, both ends: the caller has it
    Shape(attention_mask) -> [B]                        Shape(tokens) -> [B]

Exporters hand caches of cross-attention through a decoder unchanged, and read the batch size off whatever input comes
first.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT64, Emitter, consumers, contains, is_op, producer, replace_uses
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.views import static_layout, trace_back
from trt_kvcache.importer.plan import OriginalRole

_LOST = (OriginalRole.PADDING_MASK, OriginalRole.PAST_LENGTH, OriginalRole.POSITIONS)


def drop_copies(graph: gs.Graph) -> set[str]:
    """Take away, in place, outputs that are a graph input unchanged; returns their names."""
    copies = {str(t.name) for t in graph.outputs if _is_copy(graph, t)}
    graph.outputs = [t for t in graph.outputs if t.name not in copies]
    return copies


def _is_copy(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    while (node := producer(tensor)) is not None and is_op(node, "Identity"):
        tensor = node.inputs[0]
    return producer(tensor) is None and contains(graph.inputs, tensor)


def free_shapes(graph: gs.Graph, emit: Emitter, interface: Interface) -> None:
    """Read B and S off the tokens, in place, where only the shape of an input is read that is on its way out.

    Args:
        graph: canonical; dead nodes are gone.
        emit: of the graph.
        interface: of the model as exported.
    """
    tokens = next(t for t in graph.inputs if t.name == interface.tokens)
    for tensor in interface.of(*_LOST):
        known = next((t for t in graph.inputs if t.name == tensor.name), None)
        readers = consumers(known) if known is not None else []
        if not readers or not all(is_op(n, "Shape") for n in readers):
            continue
        sizes = [_size(emit, tokens, size, axis) for size, axis in zip(tensor.shape, tensor.axes, strict=True)]
        if any(size is None for size in sizes):
            continue
        for node in readers:
            taken = sizes[int(node.attrs.get("start", 0)) : int(node.attrs.get("end", len(sizes)))]
            if taken:
                shape = emit.op("Concat", taken, "shape", INT64, axis=0) if len(taken) > 1 else taken[0]
                replace_uses(node.outputs[0], shape)


def lift_shapes(graph: gs.Graph, emit: Emitter) -> None:
    """Read sizes, in place, off caches themselves, not off views: a view is a reader of its own, which has to run.

    Shape(Transpose(cache))  becomes  Gather(Shape(cache))
    """
    for node in [n for n in graph.nodes if is_op(n, "Shape")]:
        tensor, views = trace_back(node.inputs[0])
        is_cache = any(is_op(n, "TensorScatter") for n in (producer(tensor), *consumers(tensor)) if n is not None)
        order = static_layout(views, len(tensor.shape)) if views and is_cache else None
        if order is None:
            continue
        taken = list(order)[int(node.attrs.get("start", 0)) : int(node.attrs.get("end", len(order)))]
        sizes, output = emit.op("Shape", [tensor], "sizes", INT64), node.outputs[0]
        node.outputs.clear()
        made = gs.Node("Gather", emit.name("sizes:Gather"), {"axis": 0}, [sizes, emit.ints(taken)], [output])
        graph.nodes.append(made)
    graph.cleanup().toposort()


def _size(emit: Emitter, tokens: gs.Tensor, size: int | str, axis: str) -> gs.Tensor | None:
    """One dimension as int64 ``[1]``."""
    if isinstance(size, int):
        return emit.ints([size])
    if axis not in ("batch", "sequence"):
        return None
    start = 0 if axis == "batch" else 1
    made: gs.Tensor = emit.once(
        ("size", axis), lambda: emit.op("Shape", [tokens], f"{axis}_size", INT64, start=start, end=start + 1)
    )
    return made
