"""Opens and runs models in ONNX Runtime on the CPU, with time limits and errors of one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Timer
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from trt_kvcache.dtypes import PLAIN, array_dtype
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.native import Endable

Array = npt.NDArray[Any]

ORT_ERRORS = (
    ort_errors.EPFail, ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf, ort_errors.NoSuchFile, ort_errors.NotImplemented, ort_errors.RuntimeException,
)  # fmt: skip


SECONDS = 1800.0
"""Most seconds to open a model or to run a step."""


class RunError(Exception):
    """A model or a step cannot run. The message is the error of ONNX Runtime or ONNX, on one line."""


def one_line(error: Exception) -> str:
    """Return the error's text on one line, cut to about 400 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    # ONNX Runtime names the node first, then its own source file and C++ signature, then the error.
    return text if len(text) <= 400 else f"{text[:160]} ... {text[-240:]}"


def cpu_session(source: str | bytes, options: ort.SessionOptions, **more: Any) -> ort.InferenceSession:
    """Open a session of ONNX Runtime on the CPU that prints nothing."""
    options.log_severity_level = 4
    ort.set_default_logger_severity(4)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"], **more)


def lean_options(level: ort.GraphOptimizationLevel) -> ort.SessionOptions:
    """Return options for a session with small inputs of changing sizes, and with weights that stay in their files."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.enable_cpu_mem_arena = False
    # prepacking would copy the weights, which does not pay for so few rows
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def quiet_run() -> ort.RunOptions:
    """Return options for a run that prints nothing. They replace the options of the session."""
    options = ort.RunOptions()
    options.log_severity_level = 4
    return options


def open_in_time(source: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """Open a session of ONNX Runtime, whose constant folding may never end; a signal interrupts the call.

    Raises `RunError` if ONNX Runtime refuses the model, and `UnsupportedModelError` if opening takes over `SECONDS`.
    """
    return _in_time(lambda: cpu_session(source, options), lambda: options.set_load_cancellation_flag(True))


def run_in_time(session: ort.InferenceSession, names: Sequence[str], feeds: Mapping[str, Array]) -> list[Any]:
    """Return the outputs of a run in ONNX Runtime, which may never end; a signal interrupts the run.

    Raises `RunError` or `MemoryError` if the step cannot run, and `UnsupportedModelError` if it takes over `SECONDS`.
    """
    options = quiet_run()
    values: list[Any] = _in_time(
        lambda: session.run([*names], dict(feeds), options), lambda: setattr(options, "terminate", True)
    )
    return values


def _in_time(call: Callable[[], Any], stop: Callable[[], None]) -> Any:
    late = Timer(SECONDS, stop)
    late.daemon = True
    late.start()
    try:
        with Endable(stop):
            return call()
    except (*ORT_ERRORS, RuntimeError) as error:  # a failing node raises a plain RuntimeError
        if late.finished.is_set():
            raise UnsupportedModelError(
                f"the model took more than {SECONDS:g} s to open or for one step: it never ends, or needs a faster "
                "machine"
            ) from None
        if "bad_alloc" in str(error):
            raise MemoryError from None
        raise RunError(one_line(error)) from None
    finally:
        late.cancel()


class UnfusedSession:
    """Runs a model in ONNX Runtime (`backend`) node by node, because fusions would hide differences."""

    backend = f"ONNX Runtime {ort.__version__}"

    def __init__(self, model: ModelProto) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        try:
            self._session = cpu_session(model.SerializeToString(), options)
        except ORT_ERRORS as error:
            raise RunError(one_line(error)) from None
        self._types = {i.name: i.type for i in self._session.get_inputs()}
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._options = quiet_run()

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model, and return all outputs by name. Inputs are converted to the model's types."""
        inputs = {}
        for name, kind in self._types.items():
            if (dtype := kind.removeprefix("tensor(").removesuffix(")")) not in PLAIN:
                raise RunError(f"ONNX Runtime takes no inputs of type {kind} from Python")
            inputs[name] = np.ascontiguousarray(feeds[name], array_dtype(dtype))
        try:
            values = self._session.run(self._outputs, inputs, self._options)
        except ORT_ERRORS as error:
            raise RunError(one_line(error)) from None
        return dict(zip(self._outputs, values, strict=True))
