"""Bare loops over IOBinding, and only the products with weights: the benchmarks compare sessions with these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.cache_plan import Role
from trt_kvcache.runtime.ort.huge_pages import huge_pages
from trt_kvcache.runtime.step_inputs import SPAN_BUCKET


def open_session(model: str | bytes, threads: int | None, folder: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or 0
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Loop:
    """Steps of one sequence: past and present of each cache are one buffer, which the model updates in place.

    `original` is a path of the model as exported, with TensorScatter caches, to run in place of the rewritten one.
    `rebind`: bind inputs in every step, as a loop with growing caches must; otherwise once per span.
    `buffers` has each cache by the name of its past, ``[1, ...]``, zeros.
    """

    def __init__(
        self, imported: ImportedModel, threads: int | None, *, original: Path | None = None,
        folder: Path | None = None, rebind: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self._rebind = imported.plan, rebind
        model = str(original) if original else imported.model.SerializeToString()
        self._session = open_session(model, threads, None if original else folder)
        inputs = {value.name for value in self._session.get_inputs()}
        self._roles = {t.name: t.role for t in self.plan.tensors if t.name in inputs and t.role is not Role.CACHE}
        self._kept = self.plan.logits_span.name if self.plan.logits_span and original is None else None
        self._capacity = max((span.capacity for span in self.plan.spans), default=0)
        self._vocab = next(value.shape[-1] for value in self._session.get_outputs() if value.name == "logits")
        self._bound: dict[tuple[int, int], tuple[Any, dict[str, np.ndarray]]] = {}
        self.buffers = {}
        for cache in self.plan.caches:
            shape = cache.logical_shape if original else cache.physical_shape
            self.buffers[cache.past] = np.zeros(
                [1 if isinstance(d, str) else d for d in shape], array_dtype(cache.dtype)
            )

    def step(self, tokens: Sequence[int], start: int) -> np.ndarray:
        """Write tokens after `start` others; return the logits of the last one, ``[V]``, valid until the next step."""
        end = start + len(tokens)
        span = min(-(-end // SPAN_BUCKET) * SPAN_BUCKET, self._capacity)
        if self._rebind:
            self._bound.clear()
        binding, arrays = self._bind(len(tokens), span)
        values: dict[Role, Any] = {
            Role.TOKENS: tokens, Role.POSITIONS: range(start, end), Role.WRITE_INDICES: start, Role.VALID_LENGTHS: end,
        }  # fmt: skip
        for name, role in self._roles.items():
            if role in values:
                arrays[name][0] = values[role]
        self._session.run_with_iobinding(binding)
        logits: np.ndarray = arrays["logits"][0, -1]
        return logits

    def _bind(self, length: int, span: int) -> tuple[Any, dict[str, np.ndarray]]:
        """Return binding and arrays for updates of `length` tokens."""
        if (length, span) not in self._bound:
            arrays: dict[str, np.ndarray] = {}
            for name, role in self._roles.items():
                if role is Role.SPAN:
                    arrays[name] = np.zeros(1, np.int64) if name == self._kept else np.arange(span)
                else:
                    arrays[name] = np.zeros((1, length) if role in (Role.TOKENS, Role.POSITIONS) else 1, np.int64)
            logits = np.zeros((1, length if self._kept is None else 1, self._vocab), np.float32)
            presents = [(cache.present, self.buffers[cache.past]) for cache in self.plan.caches]
            binding = self._session.io_binding()
            for name, array in (*arrays.items(), *self.buffers.items()):
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            for name, array in (("logits", logits), *presents):
                binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            self._bound[length, span] = (binding, arrays | {"logits": logits})
        return self._bound[length, span]

    def greedy(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """Decode greedily after a prompt; yield `count` tokens, one per step."""
        tokens, start = list(prompt), 0
        for _ in range(count):
            logits = self.step(tokens, start)
            start += len(tokens)
            tokens = [int(logits.argmax())]
            yield tokens[0]


class Products:
    """One row times each weight matrix of a float32 model: the least that a decode step has to do.

    A step reads every weight once: the speed of memory decides. Weights are in huge pages as a session has them.
    `outputs` are the products ``[1, N]`` by the names in the rewritten model. Raises `ValueError` if the model has
    none.
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
        with huge_pages():
            self._session = open_session(proto.SerializeToString(), threads, model.parent)
        self._binding = self._session.io_binding()
        for name, row in rows.items():
            self._binding.bind_cpu_input(name, row)
        self.outputs = {o.name: np.zeros(o.shape, np.float32) for o in self._session.get_outputs()}
        for name, made in self.outputs.items():
            self._binding.bind_output(name, "cpu", 0, made.dtype, made.shape, made.ctypes.data)

    def steps(self, count: int) -> Iterator[int]:
        """Run `count` steps. They compute no tokens, and yield -1."""
        for _ in range(count):
            self._session.run_with_iobinding(self._binding)
            yield -1


def _row(name: str, width: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width])
