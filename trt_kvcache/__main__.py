"""The command line: ``trt-kvcache`` and ``python -m trt_kvcache``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line on ``sys.argv``; never returns."""
    try:
        from trt_kvcache.cli.app import app

        app(prog_name="trt-kvcache")
    except KeyboardInterrupt:  # before or after a command; the commands' own are caught in the app
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
