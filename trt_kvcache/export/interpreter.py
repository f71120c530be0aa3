"""Runs Python programs in the interpreter of another environment, which imports torch once for all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from trt_kvcache.progress import phase

__all__ = ["Interpreter"]

_FORKS = str(Path(__file__).with_name("forks.py"))
_SHARED = ("torch", "transformers.modeling_utils", "transformers.masking_utils")
_ENDED = re.compile(r"\0(-?\d+)\n")  # the line after a program: its exit code
_LINE = 80  # characters of a line of output that are shown as progress


class Interpreter:
    """The interpreter of an environment with exporters, as a ``with`` block.

    Each program runs in a fork of a process that has imported `modules`.
    """

    def __init__(self, python: str, modules: Sequence[str] = ()) -> None:
        self.python = python
        self._modules = (*_SHARED, *modules)
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Interpreter:
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stderr.close()

    def run(self, words: Sequence[str], title: str, seconds: float | None = None) -> tuple[int, str]:
        """Run a Python program, and show the newest line of its stdout as progress; return its exit code and stderr.

        `words` are the interpreter's arguments, such as ``["-m", "module", "argument"]``. If the time limit ended the
        program, stderr says only this.
        """
        late = threading.Event()

        def end() -> None:
            late.set()
            self._kill()

        start = self._stderr.seek(0, os.SEEK_END)
        timer = threading.Timer(seconds or 0, end)
        try:
            with phase(title):
                if seconds is not None:
                    timer.start()
                code = self._code_of(words)
        except BaseException:
            self._end()
            raise
        finally:
            timer.cancel()
        self._stderr.seek(start)
        return code, f"it took more than {seconds or 0:.0f} s, and was ended" if late.is_set() else self._stderr.read()

    def _code_of(self, words: Sequence[str]) -> int:
        """Let the child fork and run a program. Return the program's exit code, or the child's if the child ended."""
        if self._child is not None and self._child.poll() is not None:
            self._end()
        child = self._child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{json.dumps([*words])}\n")
        child.stdin.flush()
        with ExitStack() as step:
            for line in child.stdout:
                if ended := _ENDED.fullmatch(line):
                    return int(ended[1])
                if line.strip():
                    step.close()
                    step.enter_context(phase(line.strip()[:_LINE]))
        self._end()
        return child.returncode or 1  # the child ended without an exit code of the program

    def _start(self) -> subprocess.Popen[str]:
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            [self.python, _FORKS, *self._modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            env={**os.environ, **offline, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}, encoding="utf-8",
            errors="replace", start_new_session=True,
        )  # fmt: skip

    def _end(self) -> None:
        self._kill()
        if self._child is not None:
            with self._child:
                pass  # closes the pipes, and waits for the child
        self._child = None

    def _kill(self) -> None:
        child = self._child
        if child is None or child.poll() is not None:
            return
        if sys.platform == "win32":
            child.kill()
        else:
            os.killpg(child.pid, signal.SIGKILL)
