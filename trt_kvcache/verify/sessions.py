"""Runners of models on the CPU: ONNX Runtime, or ONNX's own reference evaluator where ONNX Runtime cannot."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import ModelProto

from trt_kvcache.cpu import ORT_ERRORS, RunError, UnfusedSession, cpu_session, one_line, quiet_run
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.files.links import for_session, without_links
from trt_kvcache.importer.steps.sessions import ReferenceSession
from trt_kvcache.native import Endable
from trt_kvcache.verify.memory import Weights, weigh

Array = npt.NDArray[Any]

_REFERENCE_LIMIT = 64 << 20  # bytes of weights; the reference evaluator is plain numpy and holds them all
_SLOWER = ["MatMulScaleFusion"]  # a product with a scale has no kernel for one row (1.32.0), and takes 4 times as long
_PATIENCE = 2.0  # seconds, for what was interrupted to end
SECONDS = 1800.0
"""The longest that a model may take to open, or for a step: what takes longer may never end."""


class OrtSession:
    """ONNX Runtime on the CPU. Weights are mapped from their files where they are large.

    Attributes:
        backend: name and version.

    Args:
        model: path of a model, or a model whose external data are in `folder`.
        folder: of the external data.
        weights: its weights.
        free_bytes: bytes that converted weights may take.
    """

    backend = UnfusedSession.backend

    def __init__(self, model: Path | ModelProto, folder: Path, weights: Weights, free_bytes: int) -> None:
        options = ort.SessionOptions()
        # Where ONNX Runtime fuses a product with a DequantizeLinear, it rounds the other side to 8 bits by default.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        if weights.rounds:
            # Roundings keep their places in the model: fusions round at other places, and break float8
            # (1.31.1). Without them quantized weights are held as float32, so models with no more than these keep them.
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        # Threads that spin while they wait take the processor from whatever else runs: with the short steps here, twice
        # the processor time on two busy cores, and no less time altogether.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Caches are large and come in many sizes, which an arena would all keep.
        options.enable_cpu_mem_arena = False
        if not weights.packed and not weights.half:
            # Packed copies of weights take as much memory again, which is not mapped, and 1.4 s of processor time for a
            # GB; products with the few rows of a step take little longer without them. Weights that are converted
            # give way to their packed copies.
            options.add_session_config_entry("session.disable_prepacking", "1")
        if weights.converted > free_bytes:
            # Weights that folding would convert once are converted at each step then; the session opens at once.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            # The default order converts many weights before any of them is used.
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        source = for_session(model, folder, options) if isinstance(model, ModelProto) else str(model)
        self._session = _interruptible(
            lambda: cpu_session(source, options, disabled_optimizers=_SLOWER),
            lambda _: options.set_load_cancellation_flag(True),
        )
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array], into: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """All outputs by name.

        Args:
            feeds: all inputs by name.
            into: contiguous arrays for large outputs that have the shapes of these, by name: new memory for each would
                take longer than the copy. Outputs of other shapes get new arrays.
        """
        options = quiet_run()
        if into:
            binding = self._bind(feeds, into)
            # An output of another shape is a plain RuntimeError (1.32.0).
            with suppress(RunError, RuntimeError):
                outputs = _interruptible(
                    lambda: self._session.run_with_iobinding(binding, options) or binding.get_outputs(),
                    lambda _: setattr(options, "terminate", True),
                )
                return {n: into[n] if n in into else v.numpy() for n, v in zip(self._outputs, outputs, strict=True)}
        values = _interruptible(
            lambda: self._session.run(self._outputs, dict(feeds), options),
            lambda _: setattr(options, "terminate", True),
        )
        return dict(zip(self._outputs, values, strict=True))

    def _bind(self, feeds: Mapping[str, Array], into: Mapping[str, Array]) -> Any:
        binding = self._session.io_binding()
        for name, values in feeds.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values)))
        for name in self._outputs:
            if name in into:
                binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(into[name]))
            else:
                binding.bind_output(name)
        return binding


class Reference:
    """ONNX's own evaluator, which NumPy computes.

    Attributes:
        backend: name and version.
    """

    backend = ReferenceSession.backend

    def __init__(self, model: ModelProto, folder: Path) -> None:
        linked, folder = without_links(model, folder)
        loaded = ModelProto()
        loaded.CopyFrom(linked)
        onnx.load_external_data_for_model(loaded, str(folder))
        self._evaluator = ReferenceSession(loaded)

    def run(self, feeds: Mapping[str, Array], into: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """All outputs by name, in new arrays."""
        outputs: dict[str, Array] = _interruptible(lambda: self._evaluator.run(feeds), _raise_in)
        return outputs


Runner = OrtSession | Reference


def _raise_in(thread: Thread) -> None:
    """Raise an exception between two steps of Python in another thread."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeoutError))


def _interruptible(call: Callable[[], Any], stop: Callable[[Thread], None]) -> Any:
    """The result of a call that runs a model; for large models it can take minutes.

    An interrupt reaches the main thread between Python's own steps, so the call gets a thread of its own, which `stop`
    ends soon: a run after the next node, a session after the next of its optimizations. Nobody waits long for that.

    Raises:
        RunError: ONNX Runtime refuses.
        UnsupportedModelError: it takes more than `SECONDS`.
    """
    results: list[Any] = []
    failed: list[BaseException] = []
    over = Event()

    def work() -> None:
        try:
            with Endable(lambda: stop(thread)):
                results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            failed.append(error)
        finally:
            over.set()

    thread = Thread(target=work, name="model", daemon=True)
    thread.start()
    try:
        # A thread whose `join` is interrupted counts as ended from then on (Python 3.11).
        in_time = over.wait(SECONDS)
    except KeyboardInterrupt:
        stop(thread)
        over.wait(_PATIENCE)
        raise
    if not in_time:
        stop(thread)
        over.wait(_PATIENCE)
        raise UnsupportedModelError(
            f"the model took more than {SECONDS:g} s to open or for one step: it never ends, or needs a faster machine"
        )
    thread.join()
    try:
        for error in failed:
            raise error
    except ORT_ERRORS as error:
        raise RunError(one_line(error)) from None
    return results.pop()


def open_session(
    model: ModelProto,
    folder: Path,
    trial: Mapping[str, Array],
    free_bytes: int,
    *,
    path: Path | None = None,
    reference: bool = True,
) -> tuple[Runner, str | None]:
    """The first session that runs the trial step, and why ONNX Runtime was not it.

    Args:
        model: the model.
        folder: of its external data.
        trial: feeds of one step.
        free_bytes: bytes that weights which ONNX Runtime converts may take.
        path: of the same model as a file, which ONNX Runtime then reads by itself.
        reference: the reference evaluator may run it.

    Raises:
        RunError: none runs it; the text is ONNX Runtime's.
    """
    weights = weigh(model)
    try:
        session = OrtSession(path or model, folder, weights, free_bytes)
        session.run(trial)
    except RunError as error:
        if not reference or weights.size > _REFERENCE_LIMIT:
            raise
        refusal = error
    else:
        return session, None
    try:
        evaluator = Reference(model, folder)
        evaluator.run(trial)
    except RunError as error:
        raise RunError(f"{refusal}; the ONNX reference evaluator: {error}") from None
    return evaluator, str(refusal)
