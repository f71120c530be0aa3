"""Opens and runs models with ONNX Runtime on the CPU, and turns its errors into errors of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper

from trt_kvcache.cpu import ORT_ERRORS, cpu_session, one_line, quiet_run
from trt_kvcache.errors import SessionError, UnsupportedModelError
from trt_kvcache.importer.weights import for_session
from trt_kvcache.native import Endable

Array = np.ndarray[Any, np.dtype[Any]]
_T = TypeVar("_T")


def bind(side: Any, name: str, array: Array) -> None:
    """Bind a C-contiguous array, which the caller keeps alive; `side` is `bind_input` or `bind_output` of IOBinding."""
    side(name, "cpu", 0, helper.np_dtype_to_tensor_dtype(array.dtype), list(array.shape), array.ctypes.data)


class CpuSession:
    """A model that ONNX Runtime runs on the CPU. Signals such as Ctrl-C, or the interpreter's end, interrupt a run."""

    def __init__(self, session: Any, name: str) -> None:
        self._session, self._name = session, name
        self._options = quiet_run()
        # This is the default. If it is not set, onnxruntime looks for it in each run, which takes 40 us (1.32.0).
        self._options.add_run_config_entry("gpu_graph_id", "0")
        self._endable = Endable(self._end)
        self.inputs: list[Any] = session.get_inputs()
        self.outputs: list[Any] = session.get_outputs()

    def binding(self) -> Any:
        """Return a new IOBinding, which tells ONNX Runtime the memory of a run's inputs and outputs."""
        return self._session.io_binding()

    def run(self, names: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        """Run the model, and return the outputs called `names`. Raises `SessionError` if the run fails."""
        return self._call(lambda: self._session.run(list(names), dict(feed), self._options))

    def run_bound(self, binding: Any) -> None:
        """Run the model with the arrays of an IOBinding. Raises `SessionError` if the run fails."""
        self._call(lambda: self._session.run_with_iobinding(binding, self._options))

    def _call(self, call: Callable[[], _T]) -> _T:
        try:
            with self._endable:
                return call()
        except (*ORT_ERRORS, RuntimeError) as error:  # a failing node raises a plain RuntimeError (measured on 1.31.1)
            raise SessionError(f"{self._name} failed: {one_line(error)}") from None
        except MemoryError:
            raise SessionError(f"{self._name} failed: out of memory") from None

    def _end(self) -> None:
        self._options.terminate = True


def open_on_cpu(
    model: str | ModelProto,
    path: Path,
    advice: str,
    *,
    threads: int | None = None,
    spinning: bool = True,
    name: str | None = None,
) -> CpuSession:
    """Open a model with ONNX Runtime on the CPU. Raises `UnsupportedModelError` if ONNX Runtime cannot run it.

    Args:
        model: path of the model; or the model itself, with external data relative to the folder of `path`.
        path: path of the model's file.
        advice: what to do if ONNX Runtime cannot run it.
        threads: number of threads; None: one per core.
        spinning: let threads spin while they wait: short steps become faster, but other programs get less time.
        name: name of the model for messages; None: the path.
    """
    options = ort.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source = for_session(model, path.parent, options) if isinstance(model, ModelProto) else model
    try:
        with Endable(lambda: options.set_load_cancellation_flag(True)):
            session = cpu_session(source, options)
    except (*ORT_ERRORS, MemoryError) as error:
        raise UnsupportedModelError(
            f"{path}: ONNX Runtime {ort.__version__} cannot run it on the CPU: {one_line(error)}; {advice}"
        ) from None
    return CpuSession(session, name or str(path))


def input_dtype(value: Any) -> np.dtype[Any]:
    """Return the dtype of a session's input or output, whose type is a text such as ``"tensor(float16)"``."""
    name = value.type.removeprefix("tensor(").removesuffix(")")
    return helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(name.upper()))
