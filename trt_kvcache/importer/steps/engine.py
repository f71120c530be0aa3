"""Engines on the CPU: ONNX Runtime without optimizations; if it refuses, ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

Array = npt.NDArray[Any]

ORT_ERRORS = (
    ort_errors.EPFail, ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf, ort_errors.NoSuchFile, ort_errors.NotImplemented, ort_errors.RuntimeException,
)  # fmt: skip
_REFERENCE_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


class EngineError(Exception):
    """An engine refused a model or a step; the text is the engine's own, on one line."""


class Engine(Protocol):
    """A loaded part of a model.

    Attributes:
        engine: name of the engine.
    """

    engine: str

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs by name.

        Raises:
            EngineError: the engine cannot run it.
        """
        ...


class OrtEngine:
    """ONNX Runtime, node by node: fusions would hide differences."""

    engine = f"ONNX Runtime {ort.__version__}"

    def __init__(self, model: onnx.ModelProto) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        try:
            self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except ORT_ERRORS as error:
            raise EngineError(one_line(error)) from None
        self._types = {i.name: i.type for i in self._session.get_inputs()}
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._options = ort.RunOptions()
        self._options.log_severity_level = 4

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs by name; feeds take the types of the inputs."""
        given = {name: _as(feeds[name], kind) for name, kind in self._types.items()}
        try:
            values = self._session.run(self._outputs, given, self._options)
        except ORT_ERRORS as error:
            raise EngineError(one_line(error)) from None
        return dict(zip(self._outputs, values, strict=True))


class ReferenceEngine:
    """ONNX's reference evaluator (https://onnx.ai/onnx/api/reference.html): slow, and right by definition."""

    engine = f"ONNX reference evaluator {onnx.__version__}"

    def __init__(self, model: onnx.ModelProto) -> None:
        # Imported here: it loads every operator of ONNX, and few models need it.
        from onnx.reference import ReferenceEvaluator

        self._kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
        try:
            self._evaluator = ReferenceEvaluator(model)
        except _REFERENCE_ERRORS as error:
            raise EngineError(one_line(error)) from None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs by name."""
        dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in self._kinds.items()}
        try:
            with np.errstate(all="ignore"):  # numbers that are not finite are compared, not warned of
                values = self._evaluator.run(None, {n: np.asarray(feeds[n], dtype) for n, dtype in dtypes.items()})
        except _REFERENCE_ERRORS as error:
            raise EngineError(one_line(error)) from None
        return dict(zip(self._evaluator.output_names, values, strict=True))


def open_engine(model: onnx.ModelProto, trial: Mapping[str, Array] | None, *, strict: bool = False) -> Engine:
    """The first engine that runs the trial step.

    Args:
        model: to run.
        trial: inputs of a step.
        strict: ONNX's inference has to find nothing wrong with a model that ONNX Runtime refuses: NumPy takes operands
            of two types, and any size below 0.

    Raises:
        EngineError: no engine runs it; the text is ONNX Runtime's.
    """
    try:
        engine = OrtEngine(model)
        if trial:
            engine.run(trial)
    except EngineError as error:
        if not trial:
            raise
        try:
            if strict:
                onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
            evaluator = ReferenceEngine(model)
            evaluator.run(trial)
        except (EngineError, onnx.shape_inference.InferenceError, ValueError):  # ValueError: a type that there is not
            raise error from None
        return evaluator
    return engine


def one_line(error: Exception) -> str:
    """The error's text on one line, cut to a readable length."""
    text = " ".join(str(error).split()) or type(error).__name__
    # ONNX Runtime names the node first, then its own source file and C++ signature, then what is wrong.
    return text if len(text) <= 400 else f"{text[:160]} ... {text[-240:]}"


_DTYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64, "tensor(bool)": np.bool_,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(int16)": np.int16, "tensor(int8)": np.int8,
    "tensor(uint64)": np.uint64, "tensor(uint32)": np.uint32, "tensor(uint16)": np.uint16, "tensor(uint8)": np.uint8,
}  # fmt: skip


def _as(values: Array, kind: str) -> Array:
    if kind not in _DTYPES:
        raise EngineError(f"ONNX Runtime takes no inputs of type {kind} from Python")
    return np.ascontiguousarray(values, _DTYPES[kind])
