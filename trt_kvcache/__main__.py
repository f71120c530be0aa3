"""The command line: ``trt-kvcache`` and ``python -m trt_kvcache``."""

from __future__ import annotations

from trt_kvcache.cli.app import app


def main() -> None:
    """Run the command line on ``sys.argv``; never returns."""
    app(prog_name="trt-kvcache")


if __name__ == "__main__":
    main()
