"""The command line: ``trt-kvcache`` and ``python -m trt_kvcache``."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TextIO

from trt_kvcache.cli.signals import INTERRUPTED, end_by_unwinding, last_words

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command line on ``sys.argv``, and end the process."""
    if sys.stderr is None:  # stderr is closed; messages must not go to stdout, where `print` would put them
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stderr.write("error: the output cannot be written: stdout is closed\n")
        sys.exit(1)
    for stream in (sys.stdout, sys.stderr):
        _encode(stream)
    _keep_stdout()
    end_by_unwinding()
    try:
        try:
            from trt_kvcache.cli.app import app

            app(prog_name="trt-kvcache")
        finally:
            sys.stdout.flush()  # short output is written only now
    except KeyboardInterrupt as error:  # before or after a command; the app catches it within a command
        message, status = last_words(error)
        sys.stderr.write(f"error: {message}\n")
        _leave(status)
    except SystemExit as error:
        if isinstance(error.code, int) and error.code > INTERRUPTED:
            _leave(error.code)
        raise
    except OSError as error:
        from trt_kvcache.child import is_broken

        # Commands catch errors of the files that they write; this one can only be an error of stdout.
        unread = is_broken(error)
        if error.filename is not None or not (unread or error.errno in _FULL):
            raise
        # Without this, the interpreter writes to stdout again at its end, and prints an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not unread:  # if the reader of a pipe has ended, it has read enough, which is no error
            sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        sys.exit(1)


def _encode(stream: TextIO) -> None:
    """Make a stream write an escape for a character that it cannot encode. On Windows, files and pipes get UTF-8."""
    if isinstance(stream, io.TextIOWrapper):
        if sys.platform == "win32" and not stream.isatty() and "PYTHONIOENCODING" not in os.environ:
            stream.reconfigure(encoding="utf-8")  # as JSON requires; files on Windows allow 256 characters by default
        stream.reconfigure(errors="backslashreplace")


def _keep_stdout() -> None:
    """Keep stdout for results: send to stderr what native libraries, such as TensorRT's logger, write to stdout."""
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and os.name == "posix":
        line = 1 if stream.line_buffering else -1
        sys.stdout = open(os.dup(1), "w", line, stream.encoding, stream.errors, closefd=False)  # noqa: SIM115
        os.dup2(2, 1)


def _leave(status: int) -> None:
    """End the process after all cleanup, without waiting for threads that still compute."""
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
