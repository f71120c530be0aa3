"""Objects that TensorRT calls back: logger, progress monitor, writer of the engine, error recorder.

Their base classes belong to the TensorRT module in use, so the classes are created after it is imported. Each build has
its own logger in Python. Opened engines share one logger of TensorRT, and report errors through an ``IErrorRecorder``:

- TensorRT uses the first logger of a process until no runtime or builder is left. With a logger per engine, it would
  call the first engine's logger even after Python freed it (measured on TensorRT for RTX 1.7.1).
- TensorRT for RTX compiles kernels in its own threads. A logger in Python would deadlock: these threads would wait
  for Python's lock. The thread that destroys the context holds this lock, and waits for these threads.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, BinaryIO

from blake3 import blake3

from trt_kvcache.engine.build_process import Line, Log, Node, Progress, Send
from trt_kvcache.progress import ProgressEvent

# TensorRT for RTX 1.7.1 logs each node that it parses, at verbose severity: "Parsing node: name [Op]".
_NODE = "arsing node: "

# Log lines that say nothing new in a build that succeeds: a warning for every int64 input (the manifest has the
# dtypes), the missing driver of a machine without a GPU, and logits_span, whose contents are unused on purpose.
_NOISE = ("has Int64 binding", "CUDA driver version is insufficient", "Input Tensor logits_span")


def make_listeners(trt: Any, send: Send, log: str | None = None) -> tuple[Any, Any]:
    """Return a logger and a progress monitor; `send` gets their warnings, errors, parsed nodes and progress.

    The logger's method `words` returns all errors on one line; errors in `_NOISE` only if there are no others.
    `log` is a file for all messages of TensorRT; ``"-"``: send all messages as events, too.
    """
    file = open(log, "w", encoding="utf-8") if log not in (None, "-") else None  # noqa: SIM115 - ends with the process

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: dict[str, None] = {}
            self.warnings: dict[str, None] = {}
            self.aside: dict[str, None] = {}

        def log(self, severity: Any, message: str) -> None:
            if log is not None:
                line = f"[{str(severity).rpartition('.')[2]}] {message}"
                if file is None:
                    send(Line(line))
                else:
                    file.write(f"{line}\n")
                    file.flush()  # so that the line is not lost in a crash
            if severity == trt.ILogger.VERBOSE:
                if _NODE in message:
                    send(Node(message.partition(_NODE)[2]))
                return
            if severity == trt.ILogger.INFO:
                return
            message = " ".join(message.split())
            error = severity != trt.ILogger.WARNING
            if any(noise in message for noise in _NOISE):
                if error:
                    self.aside[message] = None
                return
            seen = self.errors if error else self.warnings
            if message not in seen:
                seen[message] = None
                send(Log(error, message))

        def words(self) -> str:
            return "; ".join(self.errors or self.aside) or "it gives no reason"

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: dict[str, tuple[str | None, int]] = {}
            self.lock = threading.Lock()

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            with self.lock:
                self.phases[phase] = (parent, steps)
            send(Progress(ProgressEvent(phase, parent, 0, steps)))

        def step_complete(self, phase: str, step: int) -> bool:
            parent, steps = self.phases.get(phase, (None, step + 1))
            send(Progress(ProgressEvent(phase, parent, step + 1, steps)))
            return True

        def phase_finish(self, phase: str) -> None:
            with self.lock:
                parent, steps = self.phases.pop(phase, (None, 0))
            send(Progress(ProgressEvent(phase, parent, steps, steps, finished=True)))

    return Logger(), Monitor()


def make_writer(trt: Any, file: BinaryIO) -> Any:
    """Return a stream writer for TensorRT that writes to a file and computes the BLAKE3 of the bytes.

    Check the writer's `error` after the build: TensorRT for RTX 1.7.1 reports success even after a short write.
    """

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.size = 0
            self.digest = blake3(max_threads=blake3.AUTO)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                file.write(data)
            except OSError as error:
                self.error = error
                return 0
            self.digest.update(data)
            self.size += len(data)
            return len(data)

    return Writer()


def native_logger(module: Any) -> Any:
    """Return the logger of a TensorRT module. It prints errors if no error recorder is set."""
    return _logger(module.Logger)


@cache  # kept for the life of the process: TensorRT keeps its address
def _logger(kind: Any) -> Any:
    return kind(kind.ERROR)


def make_recorder(module: Any) -> Any:
    """Return an ``IErrorRecorder`` for a runtime or builder. Its method `take` returns the errors as text."""

    class Recorder(module.IErrorRecorder):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IErrorRecorder.__init__(self)
            self._errors: list[tuple[Any, str]] = []

        def report_error(self, code: Any, description: str) -> bool:
            self._errors.append((code, description))
            return False  # not fatal: the call that failed also reports the error by its result

        def get_num_errors(self) -> int:
            return len(self._errors)

        def get_error_code(self, index: int) -> Any:
            return self._errors[index][0]

        def get_error_desc(self, index: int) -> str:
            return self._errors[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            self._errors.clear()

        def take(self) -> str:
            """Return the errors since the last call on one line, without duplicates."""
            words = dict.fromkeys(" ".join(text.split()) for _, text in self._errors)
            self._errors.clear()
            return "; ".join(words) or "it gives no reason"

    return Recorder()
