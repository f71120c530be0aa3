"""Shows progress bars on stderr during long work, and removes them at the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from trt_kvcache.cli.output import console, uncovered, visible
from trt_kvcache.progress import ProgressEvent, listening

_USUAL = {"building the engine": ", usually a minute"}
"""Usual durations of phases in which TensorRT's own bar stands still most of the time."""


@contextmanager
def show_progress() -> Iterator[None]:
    """Show the progress of phases during the ``with`` block, if stderr is a terminal that can redraw lines."""
    out = console(sys.stderr)
    if not out.is_interactive:
        yield
        return
    bars = ProgressBars(out)
    uncovered.append(bars.removed)
    try:
        with listening(bars.show):
            yield
    finally:
        uncovered.pop()
        bars.close()


class ProgressBars:
    """Progress bars: one for each running phase, indented under its parent phase.

    Attributes:
        progress: the drawn bars; None while no phase runs.
    """

    def __init__(self, out: Console) -> None:
        self.progress: Progress | None = None
        self._out = out
        self._tasks: dict[str, tuple[TaskID, int]] = {}
        self._lock = threading.Lock()

    def show(self, event: ProgressEvent) -> None:
        """Start, move or remove the bar of the event's phase."""
        with self._lock:
            if not event.finished:
                self._move(self.progress or self._start(), event)
            elif self.progress is not None and event.phase in self._tasks:
                self.progress.remove_task(self._tasks.pop(event.phase)[0])
                if not self._tasks:
                    self._stop()

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Remove all bars from the terminal within the ``with`` block."""
        with self._lock:
            if self.progress is not None:
                self.progress.stop()
            try:
                yield
            finally:
                if self.progress is not None:
                    self.progress.start()

    def close(self) -> None:
        """Remove all bars."""
        with self._lock:
            self._stop()

    def _move(self, progress: Progress, event: ProgressEvent) -> None:
        total = event.steps if event.steps > 1 else None  # a phase of one step has no progress to show
        if event.phase not in self._tasks:
            depth = self._tasks[event.parent][1] + 1 if event.parent in self._tasks else 0
            name = visible(event.phase) + _USUAL.get(event.phase, "")
            task = progress.add_task("  " * depth + name, total=total, done="")
            self._tasks[event.phase] = (task, depth)
        done = f"{event.step} of {event.steps}" if total else ""
        progress.update(self._tasks[event.phase][0], completed=event.step, done=done)

    def _start(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"))
        # Do not redirect stdout; lines on stderr appear above the bars.
        self.progress = Progress(
            *columns, TimeElapsedColumn(), console=self._out, transient=True, redirect_stdout=False
        )
        self.progress.start()
        return self.progress

    def _stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        self.progress = None
        self._tasks.clear()
