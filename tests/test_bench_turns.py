"""Ways that take turns: where they run, what of it is measured, and what stops it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import bench_turns
import pytest
from bench_turns import Worker, take_turns


def process() -> Iterator[int]:
    while True:
        yield os.getpid()


def slow_after_a_rest() -> Iterator[int]:
    """In turns of 1, 3, 3 and 3 steps."""
    for number in range(10):
        time.sleep(0.3 if number in (0, 1, 4, 7) else 0)
        yield number


def failing() -> Iterator[int]:
    yield 0
    raise ValueError("no more")


def ending() -> Iterator[int]:
    yield 0
    os._exit(3)


def spinning() -> Iterator[int]:
    def spin() -> None:
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()
    return process()


def test_each_has_a_process_that_lives_from_turn_to_turn_and_no_longer() -> None:
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, process)) for name in ("a", "b")}
        given, times = take_turns(workers, 8, 3, 1)
        found = {name: set(ids) for name, ids in given.items()}
    assert {len(ids) for ids in found.values()} == {1}
    assert len(found["a"] | found["b"] | {os.getpid()}) == 3
    # 1 step, then turns of 3, 3 and 1 of which the first warms up and each step but the first of a turn is measured.
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    for (pid,) in found.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_follows_a_rest_is_not_measured() -> None:
    with Worker("a", slow_after_a_rest) as worker:
        given, times = take_turns({"a": worker}, 10, 3, 1)
    assert given == {"a": [*range(10)]}
    assert len(times["a"]) == 4
    assert max(times["a"]) < 0.3


@pytest.mark.parametrize(
    ("way", "words"), [(failing, "a: ValueError: no more"), (ending, "a: its process ended, exit code 3")]
)
def test_a_way_that_fails_ends_it(way: object, words: str) -> None:
    with Worker("a", way) as worker:  # type: ignore[arg-type]
        assert worker.run(1).given == [0]
        with pytest.raises(SystemExit, match=words):
            worker.run(1)


def test_a_way_that_dies_while_it_waits_ends_it() -> None:
    with Worker("a", process) as worker:
        os.kill(worker.run(1).given[0], signal.SIGKILL)
        worker._process.join()
        with pytest.raises(SystemExit, match="a: its process ended, exit code -9"):
            worker.run(1)


@pytest.mark.slow
def test_who_disturbs_the_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_turns, "MOST_IDLE", 0.005)  # on a machine that is busy already
    words = r"a uses \d+% of a processor while others have turns"
    with Worker("a", spinning) as one, Worker("b", process) as other, pytest.raises(SystemExit, match=words):
        take_turns({"a": one, "b": other}, 11, 1, 0)
