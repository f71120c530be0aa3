"""What TensorRT reports while engines are open.

Not through a logger of ours, as building does (`trt_kvcache.engine.listeners`):

- The first logger of a process is everybody's until no runtime or builder is left, also after its own runtime is gone:
  with two engines open and the first one closed, TensorRT would call a logger that Python has freed (measured on
  TensorRT for RTX 1.7.1: the address stays).
- A logger in Python is called for every word. TensorRT for RTX compiles kernels in threads of its own; one that reports
  would wait for Python's lock, and the thread that takes its context apart holds the lock and waits for it.

So the logger is TensorRT's own, one for the life of the process, and errors come through an ``IErrorRecorder``, which
takes them out of the log.
"""

from __future__ import annotations

from functools import cache
from typing import Any

__all__ = ["make_recorder", "native_logger"]


def native_logger(module: Any) -> Any:
    """The logger for ``Runtime`` and ``Builder`` of a TensorRT module. It prints errors that no recorder takes."""
    return _logger(module.Logger)


@cache  # for good: TensorRT keeps its address
def _logger(kind: Any) -> Any:
    return kind(kind.ERROR)


def make_recorder(module: Any) -> Any:
    """An ``IErrorRecorder`` for the ``error_recorder`` of a runtime or builder; `take` gives what was reported."""

    class Recorder(module.IErrorRecorder):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IErrorRecorder.__init__(self)
            self._errors: list[tuple[Any, str]] = []

        def report_error(self, code: Any, description: str) -> bool:
            self._errors.append((code, description))
            return False  # not fatal: what was called says by itself that it failed

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
            """What was reported since the last call, each once, on one line."""
            words = dict.fromkeys(" ".join(text.split()) for _, text in self._errors)
            self._errors.clear()
            return "; ".join(words) or "it gives no reason"

    return Recorder()
