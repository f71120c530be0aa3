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
                reason = reasons.get(update.inputs[0].name)
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
