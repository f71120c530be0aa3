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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
        yield ProgressBars(progress).show


class ProgressBars:
    """One bar per phase that is under way; a phase inside another is indented under it and goes when it is done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._depth: dict[str, int] = {}

    def show(self, event: ProgressEvent) -> None:
        """Move the bar of the event's phase, and make it first where it is new."""
        if event.phase not in self._tasks:
            depth = self._depth.get(event.parent, -1) + 1 if event.parent else 0
            self._depth[event.phase] = depth
            self._tasks[event.phase] = self._progress.add_task("  " * depth + event.phase, total=event.steps)
        task = self._tasks[event.phase]
        self._progress.update(task, completed=event.step, total=event.steps)
        if event.step >= event.steps and self._depth[event.phase]:
            self._progress.remove_task(self._tasks.pop(event.phase))
