"""A live bar of a build, from TensorRT's own progress monitor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trt_kvcache.cli.output import console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from trt_kvcache.engine.build import ProgressEvent


@contextmanager
def build_progress() -> Iterator[Callable[[ProgressEvent], None] | None]:
    """Show bars on stderr while a build runs; yields what to give it as `progress`, None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
        yield ProgressBars(progress).show


class ProgressBars:
    """One bar per phase that is under way, indented under the phase that it is part of."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, tuple[TaskID, int]] = {}

    def show(self, event: ProgressEvent) -> None:
        """Move the bar of the event's phase: new ones appear, finished ones go."""
        if event.finished:
            if event.phase in self._tasks:
                self._progress.remove_task(self._tasks.pop(event.phase)[0])
            return
        total = event.steps if event.steps > 1 else None  # of one step there is nothing to tell but that it runs
        if event.phase not in self._tasks:
            depth = self._tasks[event.parent][1] + 1 if event.parent in self._tasks else 0
            self._tasks[event.phase] = (self._progress.add_task("  " * depth + event.phase, total=total), depth)
        self._progress.update(self._tasks[event.phase][0], completed=event.step)
