"""The caller's side of the build process: start it, feed it, listen to it, and end it in every case."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

import trt_kvcache
from trt_kvcache import errors
from trt_kvcache.child import unless_ended
from trt_kvcache.engine.protocol import (
    STAGES,
    Bug,
    Done,
    Event,
    Failed,
    Job,
    Line,
    Log,
    Node,
    Progress,
    Stage,
)
from trt_kvcache.errors import BuildError, TrtKvCacheError
from trt_kvcache.progress import ProgressEvent
from trt_kvcache.words import visible

WORKER = (sys.executable, "-m", "trt_kvcache.engine.worker")
"""The command of the build process; its argument is the file that it writes."""

_GRACE = 3.0  # seconds for the child to end by itself, once its pipe is closed
_CRASH = 0xC0000000  # exit codes of Windows from here on are unhandled exceptions
_ROOT = Path(trt_kvcache.__file__).parents[1]
if sys.platform == "win32":
    _GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    _GROUP = 0


@dataclass
class _Heard:
    """The child's messages so far, for the report if it dies."""

    stage: str = STAGES[0]
    node: str | None = None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run_worker(
    job: Job,
    model: Callable[[], bytes],
    progress: Callable[[ProgressEvent], None] | None = None,
    command: Sequence[str] | None = None,
) -> tuple[Done, tuple[str, ...]]:
    """Do a job in a child process.

    Args:
        job: the engine to build.
        model: returns the rewritten model's bytes; called once, so that they are freed while the child works.
        progress: called in this thread for every event; an exception from it (as from Ctrl-C) ends the child.
        command: the child's command line without its argument, if it is not `WORKER`.

    Returns:
        The result, and TensorRT's warnings.

    Raises:
        BuildError: TensorRT refused the model, or its process died.
        OutputError: the engine could not be written.
    """
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            [*(command or WORKER), job.engine],  # the child removes it if this process dies early
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=_ROOT,  # where python -m finds this very package
            # Ctrl-C at a terminal reaches this process only, which then ends the child.
            start_new_session=True,
            creationflags=_GROUP,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        heard = _Heard()
        outcome: Done | None = None
        try:
            _feed(child.stdin, job, model)
            outcome = _listen(child.stdout, heard, progress)
            if outcome is not None:
                _take_over(child.stdin)
        finally:
            _end(child)
        if outcome is None:
            raise BuildError(_death_message(job, heard, child.returncode, stderr))
    return outcome, tuple(heard.warnings)


def _feed(stdin: IO[bytes], job: Job, model: Callable[[], bytes]) -> None:
    data = model()
    with unless_ended():  # it died early: the exit code says why
        stdin.write(msgspec.json.encode(job) + b"\n%d\n" % len(data))
        stdin.write(data)
        stdin.flush()


def _take_over(stdin: IO[bytes]) -> None:
    """Tell the child to leave the engine where it is."""
    with unless_ended():
        stdin.write(b"+")
        stdin.flush()


def _listen(stdout: IO[bytes], heard: _Heard, progress: Callable[[ProgressEvent], None] | None) -> Done | None:
    """Follow the child to its end. Returns its result, or None if it died without a message."""
    decoder = msgspec.json.Decoder(Event)

    def report(event: ProgressEvent) -> None:
        if progress is not None:
            progress(event)

    for line in stdout:
        if not line.startswith(b"{"):
            continue  # printed while Python started, before the child could divert it
        match decoder.decode(line):
            case Stage(name):
                if name != heard.stage:
                    report(ProgressEvent(heard.stage, None, 1, 1, finished=True))
                heard.stage = name
                report(ProgressEvent(name, None, 0, 1))
            case Node(name):
                heard.node = name
            case Progress(event):
                report(event)
            case Line(text):
                sys.stderr.write(f"{visible(text)}\n")
            case Log(error, message):
                (heard.errors if error else heard.warnings).append(message)
            case Failed(kind, message):
                error_class = getattr(errors, kind)
                assert issubclass(error_class, TrtKvCacheError)
                raise error_class(message)
            case Bug(traceback):
                raise RuntimeError(f"the build process failed:\n{traceback}")
            case Done() as done:
                report(ProgressEvent(heard.stage, None, 1, 1, finished=True))
                return done
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Close the child's stdin, so that it removes its file and ends; kill it if it does not."""
    assert child.stdin is not None
    assert child.stdout is not None
    with unless_ended():
        child.stdin.close()
    try:
        child.wait(_GRACE)
    except BaseException as error:  # a second Ctrl-C too
        child.kill()
        child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        child.stdout.close()


def _death_message(job: Job, heard: _Heard, status: int, stderr: IO[bytes]) -> str:
    """Return a message about a child that died without giving a reason."""
    stderr.seek(0)
    lines = [line for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    killed_by = signal.Signals(-status).name if status < 0 else ""
    how = f"was killed by {killed_by}" if killed_by else f"ended with exit code {status:{'#x' if status > 255 else ''}}"
    where = f"while {heard.stage}"
    if heard.stage == STAGES[1] and heard.node is not None:
        where += f", at node {heard.node}"
    words = "; ".join([*heard.errors[-3:], *lines[-2:]])
    if killed_by == "SIGKILL":
        advice = "; it was probably out of memory: free some, or build on a larger machine"
    elif killed_by or status >= _CRASH:
        advice = "; that is a crash inside TensorRT: change this part of the model, or try another version of TensorRT"
    else:
        advice = ""
    return f"the process of {job.title} {how} {where}{advice}{f' (its last words: {words})' if words else ''}"
