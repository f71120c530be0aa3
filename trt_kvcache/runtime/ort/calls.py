"""ONNX Runtime as the runtime calls it: how models are opened and run, memory that it is given, what it raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper

from trt_kvcache.cpu import ORT_ERRORS, cpu_session, one_line, quiet_run
from trt_kvcache.errors import SessionError, UnsupportedModelError
from trt_kvcache.importer.files.links import for_session
from trt_kvcache.native import Endable

__all__ = ["CpuSession", "bind", "input_dtype", "open_on_cpu", "type_name"]

Array = np.ndarray[Any, np.dtype[Any]]
_T = TypeVar("_T")


def bind(side: Any, name: str, array: Array) -> None:
    """Give ONNX Runtime the memory of an array.

    Args:
        side: ``bind_input`` or ``bind_output`` of an IOBinding.
        name: of the tensor.
        array: C-contiguous; the caller keeps it.
    """
    side(name, "cpu", 0, helper.np_dtype_to_tensor_dtype(array.dtype), list(array.shape), array.ctypes.data)


class CpuSession:
    """A model that ONNX Runtime runs on the CPU. Whoever waits for it, a signal and the end of the interpreter end it.

    Args:
        session: of ONNX Runtime.
        name: of what fails, for messages.
    """

    def __init__(self, session: Any, name: str) -> None:
        self._session, self._name = session, name
        self._options = quiet_run()
        # The default. Where it is not set, onnxruntime asks for it at each run, and takes 40 us to see that (1.32.0).
        self._options.add_run_config_entry("gpu_graph_id", "0")
        self._endable = Endable(self._end)
        self.inputs: list[Any] = session.get_inputs()
        self.outputs: list[Any] = session.get_outputs()

    def binding(self) -> Any:
        """An IOBinding."""
        return self._session.io_binding()

    def run(self, names: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        """The outputs of these names.

        Raises:
            SessionError: it failed.
        """
        return self._call(lambda: self._session.run(list(names), dict(feed), self._options))

    def run_bound(self, binding: Any) -> None:
        """Run with the memory that was bound.

        Raises:
            SessionError: it failed.
        """
        self._call(lambda: self._session.run_with_iobinding(binding, self._options))

    def _call(self, call: Callable[[], _T]) -> _T:
        try:
            with self._endable:
                return call()
        except (*ORT_ERRORS, RuntimeError) as error:  # a plain RuntimeError where a node fails (measured on 1.31.1)
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
    """Open a model.

    Args:
        model: its path; or the model itself, with external data relative to the folder of `path`.
        path: of its file.
        advice: what to do where ONNX Runtime cannot run it.
        threads: None: one per core.
        spinning: threads spin while they wait, which makes short steps shorter, and takes the processor from others.
        name: of what fails, for messages; None: the path.

    Raises:
        UnsupportedModelError: ONNX Runtime cannot run it.
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


def type_name(value: Any) -> str:
    """The type of an input or output of a session, as ONNX Runtime says it: ``"float16"``."""
    name: str = value.type.removeprefix("tensor(").removesuffix(")")
    return name


def input_dtype(value: Any) -> np.dtype[Any]:
    """The dtype of an input or output of a session."""
    return helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(type_name(value).upper()))
