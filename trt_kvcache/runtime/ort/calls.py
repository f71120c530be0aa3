"""ONNX Runtime as the runtime calls it: how models are opened and run, memory that it is given, what it raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from trt_kvcache.errors import SessionError, UnsupportedModelError
from trt_kvcache.importer.files.links import without_links

__all__ = ["ORT_ERRORS", "bind", "input_dtype", "one_line", "open_on_cpu", "run_on_cpu", "type_name"]

Array = np.ndarray[Any, np.dtype[Any]]

ORT_ERRORS = (
    ort_errors.EPFail, ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf, ort_errors.NoSuchFile, ort_errors.NotImplemented, ort_errors.RuntimeException,
)  # fmt: skip


def one_line(error: Exception) -> str:
    """The message of an error, shortened in its middle where it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    # ONNX Runtime names the node first, then its own source file and C++ signature, then what is wrong.
    return text if len(text) <= 400 else f"{text[:160]} ... {text[-240:]}"


def bind(side: Any, name: str, array: Array) -> None:
    """Give ONNX Runtime the memory of an array.

    Args:
        side: ``bind_input`` or ``bind_output`` of an IOBinding.
        name: of the tensor.
        array: C-contiguous; the caller keeps it.
    """
    side(name, "cpu", 0, helper.np_dtype_to_tensor_dtype(array.dtype), list(array.shape), array.ctypes.data)


def open_on_cpu(
    model: str | ModelProto, path: Path, advice: str, *, threads: int | None = None, spinning: bool = True
) -> Any:
    """Open a model.

    Args:
        model: its path; or the model itself, with external data relative to the folder of `path`.
        path: of its file.
        advice: what to do where ONNX Runtime cannot run it.
        threads: None: one per core.
        spinning: threads spin while they wait, which makes short steps shorter, and takes the processor from others.

    Raises:
        UnsupportedModelError: ONNX Runtime cannot run it.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions
    if threads is not None:
        options.intra_op_num_threads = threads
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source: str | bytes
    if isinstance(model, ModelProto):
        linked, folder = without_links(model, path.parent)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        source = linked.SerializeToString()
    else:
        source = model
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        raise UnsupportedModelError(
            f"{path}: ONNX Runtime {ort.__version__} cannot run it on the CPU: {one_line(error)}; {advice}"
        ) from None


def run_on_cpu(session: Any, path: Path, names: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
    """Run a model that stands before a decoder.

    Raises:
        SessionError: it failed.
    """
    try:
        made: list[Array] = session.run(list(names), dict(feed))
    except (*ORT_ERRORS, RuntimeError) as error:
        raise SessionError(f"{path} failed: {one_line(error)}") from None
    return made


def type_name(value: Any) -> str:
    """Of an input or output of a session, as ONNX Runtime says it: ``"float16"``."""
    name: str = value.type.removeprefix("tensor(").removesuffix(")")
    return name


def input_dtype(value: Any) -> np.dtype[Any]:
    """Of an input or output of a session."""
    return helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(type_name(value).upper()))
