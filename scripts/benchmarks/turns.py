"""Runs several ways to do one thing in turns: in this process, or each in a process of its own.

In one process it matters who came first: a session measured 3 to 10 % slower than the same one opened second, because
of where its memory lay.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)

REST = 0.1
"""Seconds at the end of a turn: threads that find no more work spin for tens of milliseconds before they sleep."""

MOST_IDLE = 0.05
"""Largest share of a processor that a way may use between its turns; a larger share disturbs the others."""

Steps = Iterator[Any]
"""The results of a way, one step after the other."""


def interleave(ways: Mapping[Key, Callable[[], list[Any]]], turns: int) -> dict[Key, list[Any]]:
    """Let each way take `turns` turns, in an order that changes from round to round; return its measurements."""
    found: dict[Key, list[Any]] = {key: [] for key in ways}
    order, shuffle = [*ways], random.Random(0).shuffle
    for _ in range(turns):
        shuffle(order)
        for key in order:
            found[key] += ways[key]()
    return found


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], list[float]]:
    """Return a way for `interleave` that runs `work` and measures its seconds."""

    def turn() -> list[float]:
        begin = clock()
        work()
        return [clock() - begin]

    return turn


@dataclass(frozen=True)
class Turn:
    """Results of steps, their seconds, the time `waited` since the turn before, and the processor time `busy` in it."""

    given: list[Any]
    seconds: list[float]
    waited: float
    busy: float


class Worker:
    """A way in a process of its own, which ends with the ``with`` block. `make` can be pickled, and is called there."""

    def __init__(self, name: str, make: Callable[[], Steps]) -> None:
        spawned = multiprocessing.get_context("spawn")  # a new Python, without the state of this process
        self._name = name
        self._pipe, other = spawned.Pipe()
        self._process = spawned.Process(target=_serve, args=(other, make), daemon=True)
        self._process.start()
        other.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join()

    def run(self, count: int) -> Turn:
        """Take a turn of `count` steps; raise `SystemExit` if the way failed."""
        try:
            self._pipe.send(count)
            answer: Turn | str = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise SystemExit(f"{self._name}: its process ended, exit code {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise SystemExit(f"{self._name}: {answer}")
        return answer


def _serve(pipe: Connection, make: Callable[[], Steps]) -> None:
    steps: Steps | None = None
    since = time.perf_counter(), time.process_time()
    try:
        while True:
            count = pipe.recv()
            waited, busy = time.perf_counter() - since[0], time.process_time() - since[1]
            steps = steps or make()
            turn = Turn([], [], waited, busy)
            for _ in range(count):
                start = time.perf_counter()
                turn.given.append(next(steps))
                turn.seconds.append(time.perf_counter() - start)
            time.sleep(REST)
            since = time.perf_counter(), time.process_time()
            pipe.send(turn)
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - whoever asked for the turn says it
        pipe.send(f"{type(error).__name__}: {error}")


def take_turns(
    workers: dict[str, Worker], count: int, burst: int, skipped: int
) -> tuple[dict[str, list[Any]], dict[str, list[float]]]:
    """Run all ways side by side, in random order, in turns of `burst` steps; return their results and seconds by step.

    The first two turns warm up; their steps and the first `skipped` of every turn, which meet cold caches and sleeping
    threads, are not returned. Raises `SystemExit` if a way failed, or keeps a processor busy during the turns of
    others.
    """
    given = {name: worker.run(1).given for name, worker in workers.items()}
    times: dict[str, list[float]] = {name: [] for name in workers}
    waited, busy = dict.fromkeys(workers, 0.0), dict.fromkeys(workers, 0.0)
    order, shuffle = [*workers.items()], random.Random(0).shuffle
    for number in range(0, count - 1, burst):
        shuffle(order)  # no way always runs after the same other way
        for name, worker in order:
            turn = worker.run(min(burst, count - 1 - number))
            given[name] += turn.given
            waited[name] += turn.waited
            busy[name] += turn.busy
            if number:
                times[name] += turn.seconds[skipped:]
    for name in workers:
        share = busy[name] / (waited[name] + 1)  # + 1 s, because a short run shows nothing
        if share > MOST_IDLE:
            raise SystemExit(f"{name} uses {share:.0%} of a processor while others have turns: the times mean nothing")
    return given, times
