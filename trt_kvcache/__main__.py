"""The command line: ``trt-kvcache`` and ``python -m trt_kvcache``."""

from __future__ import annotations

import errno
import os
import sys

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command line on ``sys.argv``; never returns."""
    if sys.stderr is None:  # closed; what goes there must not go to stdout, where `print` would put it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stderr.write("error: the output cannot be written: stdout is closed\n")
        sys.exit(1)
    try:
        try:
            from trt_kvcache.cli.app import app

            app(prog_name="trt-kvcache")
        finally:
            sys.stdout.flush()  # what is short is written only now
    except KeyboardInterrupt:  # before or after a command; the commands' own are caught in the app
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    except OSError as error:
        # Files that commands write have errors of their own, with their names; what is left is stdout.
        if error.filename is not None or error.errno not in (*_FULL, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter tries again, and complains, on its way out
        if error.errno != errno.EPIPE:  # whoever reads has had enough, which is no error worth a line
            sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
