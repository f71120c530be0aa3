"""The time that a child process may take: of a processor, or five times as much of a clock."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest

from trt_kvcache.child import Child

SECONDS = 0.1


def idle() -> float:
    return 0.0


def child_that_worked(worked: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> Child:
    """A child without a process."""
    child = Child.__new__(Child)
    child._answers = queue.Queue()
    monkeypatch.setattr(child, "_worked", worked)
    return child


def test_a_busy_machine_gives_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_that_worked(idle, monkeypatch)
    answer = threading.Timer(3 * SECONDS, child._answers.put, [b"late"])
    answer.start()
    assert child._next(SECONDS, child.begin()) == b"late"


def test_processor_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_that_worked(time.monotonic, monkeypatch)
    with pytest.raises(queue.Empty):
        child._next(SECONDS, child.begin())


def test_a_child_that_does_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_that_worked(idle, monkeypatch)
    begun = child.begin()
    with pytest.raises(queue.Empty):
        child._next(SECONDS, begun)
    assert time.monotonic() - begun.at >= 4 * SECONDS
