"""What reads a cache once it is canonical: its update, attention, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import consumers, contains, is_op
from trt_kvcache.importer.planning.rows_in_use import is_cut as is_cut_to_use


def check_readers(graph: gs.Graph, reasons: Mapping[str, str]) -> None:
    """Refuse a cache that something else than attention reads.

    Args:
        graph: canonical; dead nodes are gone.
        reasons: by name of a cache, why what is computed from it are no keys and values.

    Raises:
        UnsupportedModelError: naming the reader.
    """
    for update in [n for n in graph.nodes if is_op(n, "TensorScatter")]:
        for tensor in (update.inputs[0], update.outputs[0]):
            reader = _other_reader(graph, tensor)
            if reader is not None:
                reason = _choice(graph, tensor) or reasons.get(update.inputs[0].name)
                raise UnsupportedModelError(
                    f"{reader.op} '{reader.name}' reads the cache '{update.inputs[0].name}' and is no attention that "
                    f"the importer can prove{f' ({reason})' if reason else ''}; supported are caches that only "
                    "attention reads, as they are or computed row by row with constants"
                )


def _other_reader(graph: gs.Graph, tensor: gs.Tensor) -> gs.Node | None:
    """A node that reads a cache, or a view of one, and is neither its update nor attention over it."""
    for node in consumers(tensor):
        is_read = is_op(node, "Attention") and node.inputs[0] is not tensor
        if is_read or is_op(node, "TensorScatter", "Shape") or is_cut_to_use(node):
            continue
        is_view = is_op(node, "Transpose", "Reshape") and bool(consumers(node.outputs[0]))
        if not is_view or contains(graph.outputs, node.outputs[0]) or _other_reader(graph, node.outputs[0]):
            return node
    return None


def _choice(graph: gs.Graph, cache: gs.Tensor) -> str:
    """What decides, while the model runs, over what becomes of a cache up to the softmax of its scores; or nothing."""
    bodies: dict[str, set[str]] = {}
    for node, body in ((n, b) for n in graph.nodes for b in n.attrs.values() if isinstance(b, gs.Graph)):
        read = bodies.setdefault(node.name, set())
        read |= {t.name for inner in body.nodes for t in inner.inputs} | {t.name for t in body.outputs}
    nodes = [node for node in graph.nodes if node.name in bodies]
    pending, seen = [cache], set[str]()
    while pending and nodes:
        tensor = pending.pop()
        seen.add(tensor.name)
        for node in nodes:
            if contains(node.inputs, tensor) or tensor.name in bodies[node.name]:
                return f"{node.op} '{node.name}' behind it chooses or repeats while the model runs: export one branch"
        for node in consumers(tensor):
            if not is_op(node, "Softmax", "Shape"):
                pending += [t for t in node.outputs if t.name not in seen]
    return ""
