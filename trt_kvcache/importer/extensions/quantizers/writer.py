"""Write new nodes and constants that replace nodes of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, helper, numpy_helper


class Writer:
    """Collects `nodes`; constants go into the main graph, where bodies read them too."""

    def __init__(self, graph: GraphProto, prefix: str) -> None:
        self.nodes: list[NodeProto] = []
        self._graph, self._prefix, self._count = graph, prefix, 0

    def op(self, op: str, inputs: Sequence[str], output: str = "", name: str = "", **attributes: Any) -> str:
        """Adds a node; returns its output, which is `output` or has a new name."""
        output = output or self.name(op.lower())
        self.nodes.append(helper.make_node(op, inputs, [output], name or output, **attributes))
        return output

    def constant(self, value: Any, kind: int | None = None) -> str:
        """A constant, of the ONNX element type `kind`, or of its array's."""
        name = self.name("constant")
        array = np.asarray(value)
        self._graph.initializer.append(
            numpy_helper.from_array(array, name)
            if kind is None
            else helper.make_tensor(name, kind, array.shape, array.reshape(-1).tolist())
        )
        return name

    def name(self, hint: str) -> str:
        """A new name."""
        self._count += 1
        return f"trt_kvcache/{self._prefix}_{hint}_{self._count}"

    def taken(self) -> list[NodeProto]:
        """The nodes, which others follow."""
        nodes, self.nodes = self.nodes, []
        return nodes
