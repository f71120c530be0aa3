"""The least time that a decode step can take: the products of one token with the weights, and nothing else.

For scripts/bench_decode.py. A step reads every weight once, and does two operations with each: how fast a processor
reads its memory is what decides. Nothing that runs these products by ONNX Runtime decodes faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from trt_kvcache.importer import import_model
from trt_kvcache.runtime.ort.huge_pages import huge_pages

__all__ = ["Products"]


class Products:
    """One row times each weight matrix of a model, on ONNX Runtime, the weights in huge pages as a session has them.

    Args:
        model: a float32 decoder.
        threads: of ONNX Runtime; None: one per core.

    Attributes:
        outputs: what a step makes, `[1, N]` each, by the name that the product has in the rewritten model.

    Raises:
        ValueError: the model has no such product.
    """

    def __init__(self, model: Path, threads: int | None) -> None:
        graph = import_model(model).model.graph
        matrices = {w.name: w for w in graph.initializer if len(w.dims) == 2 and w.data_type == TensorProto.FLOAT}
        products = [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in matrices]
        if not products:
            raise ValueError(f"{model}: no MatMul with a float32 weight matrix")
        used = {node.input[1]: matrices[node.input[1]] for node in products}
        rows = {f"row_{w.dims[0]}": np.ones((1, w.dims[0]), np.float32) for w in used.values()}
        alone = helper.make_graph(
            [helper.make_node("MatMul", [f"row_{used[n.input[1]].dims[0]}", *n.input[1:]], n.output) for n in products],
            "products",
            [_row(name, row.size) for name, row in rows.items()],
            [_row(node.output[0], used[node.input[1]].dims[1]) for node in products],
            [*used.values()],
        )
        proto = helper.make_model(alone, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        if threads:
            options.intra_op_num_threads = threads
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.parent))
        with huge_pages():
            self._session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        for name, row in rows.items():
            self._binding.bind_cpu_input(name, row)
        self.outputs = {o.name: np.zeros(o.shape, np.float32) for o in self._session.get_outputs()}
        for name, made in self.outputs.items():
            self._binding.bind_output(name, "cpu", 0, made.dtype, made.shape, made.ctypes.data)

    def steps(self, count: int) -> Iterator[int]:
        """As many steps, which give no tokens."""
        for _ in range(count):
            self._session.run_with_iobinding(self._binding)
            yield -1


def _row(name: str, width: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width])
