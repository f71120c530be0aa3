"""Reports the progress of long work to the listener (a function given to `listening`), if there is one.

    with phase("decoding with the original", len(steps)) as done:
        for step in steps:
            ...
            done()

Work in another thread reports progress only if that thread runs in a copy of the context (`contextvars`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ProgressEvent:
    """The progress of one phase of a build, or of other long work. Phases nest.

    Attributes:
        phase: name of the phase. In a build: a stage of this package, or a phase of TensorRT (IProgressMonitor).
        parent: the phase that contains it, or None.
        step, steps: `step` of `steps` steps are done.
        finished: True if the phase is over, even if some steps were not needed.
    """

    phase: str
    parent: str | None
    step: int
    steps: int
    finished: bool = False


Listener = Callable[[ProgressEvent], None]
_listener: ContextVar[Listener | None] = ContextVar("trt_kvcache_listener", default=None)
_parent: ContextVar[str | None] = ContextVar("trt_kvcache_phase", default=None)


def listener() -> Listener | None:
    """Return the function that receives progress now; None if there is none."""
    return _listener.get()


@contextmanager
def listening(heard: Listener) -> Iterator[None]:
    """Within the ``with`` block, call the function `heard` with each progress event."""
    token = _listener.set(heard)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(event: ProgressEvent) -> None:
    """Report a progress event of another process or library; without a parent, it belongs to the running phase."""
    _send(event if event.parent else replace(event, parent=_parent.get()))


@contextmanager
def phase(name: str, steps: int = 1) -> Iterator[Callable[[], None]]:
    """Announce a phase of work that lasts as long as the ``with`` block; yield a function to call after each step.

    `steps` is the number of steps: 1 if progress within the phase is unknown.
    """
    parent, at = _parent.get(), 0

    def done() -> None:
        nonlocal at
        at += 1
        _send(ProgressEvent(name, parent, at, steps))

    _send(ProgressEvent(name, parent, 0, steps))
    token = _parent.set(name)
    try:
        yield done
    finally:
        _parent.reset(token)
        _send(ProgressEvent(name, parent, at, steps, finished=True))


def _send(event: ProgressEvent) -> None:
    heard = _listener.get()
    if heard is not None:
        heard(event)
