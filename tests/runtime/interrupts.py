"""Ctrl-C at a chosen line of the package."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupted(after: int, *files: str) -> Iterator[list[int]]:
    """Send SIGINT once, as Ctrl-C does, at a line that the package comes to within the block.

    Args:
        after: how many lines it comes to by then; nothing is sent where it is 0 or less.
        files: parts of paths: lines of other files do not count; none: all count.

    Yields:
        A list with the lines that are left.
    """
    left = [after]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if "trt_kvcache" not in name:
            return None  # such as the driver's and TensorRT's own calls, which no signal interrupts
        left[0] -= event == "line" and (not files or any(part in name for part in files))
        if left[0] == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
            return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace if after > 0 else None)
    try:
        yield left
    finally:
        sys.settrace(before)
