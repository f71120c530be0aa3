"""Runs a session for many requests: one thread steps the session, and each request waits for its own events."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from trt_kvcache.errors import SessionError, TrtKvCacheError
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.loop import as_outcome
from trt_kvcache.runtime.session import DecodeSession

_log = logging.getLogger(__name__)


class QueueFullError(TrtKvCacheError):
    """A request would exceed the number of sequences that may wait."""


class EndingError(SessionError):
    """The server ends or a step hangs; sequences that still run end unfinished."""


@dataclass(frozen=True)
class Work:
    """The token ids of a prompt. Prompts with equal seeds and equal `index` draw the same random numbers."""

    tokens: list[int]
    index: int = 0


class _Request:
    """The sequences of one client's request, and the queue of their events and errors."""

    def __init__(self, works: Sequence[Work], config: GenerationConfig) -> None:
        self.works, self.config, self.loop = works, config, asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[int, TokenEvent | TrtKvCacheError]] = asyncio.Queue()
        self.came, self.gone = time.perf_counter(), False


@dataclass(eq=False)
class _Run:
    """A sequence in the session, which runs or waits for a batch row. `place` is its index in the request."""

    request: _Request
    place: int
    tokens: int  # number of tokens in the cache, including the newest
    waits: bool = True
    last: float = 0.0  # time of its last token


_Outcomes = list[tuple[_Request, int, TokenEvent | TrtKvCacheError]]


class ServingCore:
    """Runs the requests of any number of clients on one session, in a thread. It uses all batch rows of the session.

    Requests get free rows in turn. Tokens that a slow client has not read wait in memory, and delay no other request.

    Args:
        session: the session; it stays open, and no other code may call its `step` or `add` at the same time.
        max_queue: most sequences that wait for a batch row.
        name: name of the model in the metrics.
        step_limit: seconds after which a running step counts as hanging: its requests get an `EndingError`.
    """

    def __init__(
        self, session: DecodeSession, *, max_queue: int = 256, name: str = "model", step_limit: float = 300
    ) -> None:
        self.session, self.rows, self.max_queue, self.step_limit = session, session.max_batch, max_queue, step_limit
        self._since: float | None = None  # start time of the running step
        self._changed = threading.Condition()
        self._came: list[_Request] = []  # requests since the last turn
        self._runs: dict[int, _Run] = {}  # sequences by slot
        self._closed = False
        self.metrics = Metrics(name, lambda: self.running, lambda: self.waiting, lambda: self.cache_usage)
        self._thread = threading.Thread(target=self._work, name="serving", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the core takes requests."""
        return self._thread.is_alive() and not self._closed and not self.hangs

    @property
    def hangs(self) -> bool:
        """True if the running step has taken more than `step_limit` seconds."""
        since = self._since
        return since is not None and time.perf_counter() - since > self.step_limit

    @property
    def running(self) -> int:
        """Number of sequences that have a batch row."""
        with self._changed:
            return sum(not run.waits for run in self._runs.values())

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a batch row."""
        with self._changed:
            return sum(run.waits for run in self._runs.values()) + sum(len(request.works) for request in self._came)

    @property
    def cache_usage(self) -> float:
        """Share of the caches that holds tokens, 0 to 1. If caches have no capacity: the share of batch rows in use."""
        capacity = self.session.cache.capacity
        with self._changed:
            lengths = [run.tokens for run in self._runs.values() if not run.waits]
        if capacity is None:
            return len(lengths) / self.rows
        return sum(min(tokens, capacity) for tokens in lengths) / (self.rows * capacity)

    async def events(
        self, works: Sequence[Work], config: GenerationConfig
    ) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        """Continue the prompts of one request; yield, for each new token, the index in `works` and the event.

        Closing the iterator ends the sequences that still run. If one fails, its error is raised, and all end.

        Raises:
            QueueFullError: the queue has no room for all prompts; then no prompt runs.
            EndingError: the core is closed, or hangs.
        """
        request = self._submit(works, config)
        left = len(works)
        try:
            while left:
                try:
                    async with asyncio.timeout(self.step_limit):
                        place, outcome = await request.events.get()
                except TimeoutError:
                    self._refuse_to_hang()
                    continue
                if isinstance(outcome, TrtKvCacheError):
                    raise outcome
                left -= outcome.finish_reason is not None
                yield place, outcome
        finally:
            self._leave(request)

    def close(self) -> None:
        """End all sequences with an `EndingError`, and then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(1 if self.hangs else None)

    def _refuse_to_hang(self) -> None:
        if self.hangs:
            raise EndingError(f"a step has run for more than {self.step_limit:g} seconds; restart the server")

    def _submit(self, works: Sequence[Work], config: GenerationConfig) -> _Request:
        self._refuse_to_hang()
        request = _Request(works, config)
        with self._changed:
            if self._closed:
                raise EndingError("the server is shutting down; ask again later")
            busy = len(self._runs) + sum(len(other.works) for other in self._came)
            most = self.rows + self.max_queue
            if busy + len(works) > most:
                raise QueueFullError(f"{busy} sequences run or wait (at most {most} can); ask again later")
            self._came.append(request)
            self._changed.notify()
        self.metrics.prompt_tokens.inc(sum(len(work.tokens) for work in works))
        return request

    def _leave(self, request: _Request) -> None:
        """Mark a request whose events nobody reads any more. The next step of the core frees its batch rows."""
        with self._changed:
            request.gone = True
            if request in self._came:
                self._came.remove(request)
            self._changed.notify()

    # --- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._runs or self._came or self._closed)
            outcomes: _Outcomes = []
            if self._closed:
                self._end_all(EndingError("the server ended before the answer was complete; ask again later"), outcomes)
                _deliver(outcomes)
                return
            self._since = time.perf_counter()
            try:
                self._turn(outcomes)
            except Exception as error:  # noqa: BLE001 - ends all present sequences; later requests run
                _log.exception("a step failed")
                bug = SessionError(f"a step failed: {type(error).__name__}")
                self._end_all(error if isinstance(error, TrtKvCacheError) else bug, outcomes)
            self._since = None
            _deliver(outcomes)

    def _turn(self, outcomes: _Outcomes) -> None:
        """Free the batch rows of abandoned requests, add new requests, and advance all sequences by one step."""
        for slot in [slot for slot, run in self._runs.items() if run.request.gone]:
            self._end(slot, "abort")
        with self._changed:
            came, self._came = self._came, []
        for request, place, work in _in_turn(came):
            try:
                slot = self.session.add(work.tokens, request.config, index=work.index, client=request)
            except Exception as error:  # noqa: BLE001 - ends this sequence only, even if it is a bug
                outcomes.append((request, place, _said(error)))
                continue
            with self._changed:
                self._runs[slot] = _Run(request, place, len(work.tokens))
        self._note_waiting()
        if not self._runs:
            return
        try:
            events = self.session.step()
        except TrtKvCacheError as error:
            if error.sequence is None:  # it concerns all sequences, such as a closed session
                raise
            if run := self._end(error.sequence, "error"):
                outcomes.append((run.request, run.place, _said(error)))
            return
        now = time.perf_counter()
        self._note_waiting()
        for event in events:
            if (run := self._runs.get(event.sequence)) is None:  # its request was abandoned
                continue
            outcomes.append((run.request, run.place, event))
            if event.token is not None:
                self._count(run, now)
            if event.finish_reason is not None:
                self._end(event.sequence, str(FinishReason(event.finish_reason).value))

    def _note_waiting(self) -> None:
        waiting = set(self.session.cache.offloaded)
        with self._changed:
            for slot, run in self._runs.items():
                run.waits = slot in waiting

    def _count(self, run: _Run, now: float) -> None:
        self.metrics.tokens.inc()
        if run.last:
            self.metrics.between_tokens.observe(now - run.last)
        else:
            self.metrics.first_token.observe(now - run.request.came)
        run.last = now
        run.tokens += 1

    def _end(self, slot: int, reason: str) -> _Run | None:
        with self._changed:
            run = self._runs.pop(slot, None)
        if run is not None:
            self.metrics.finished(reason, time.perf_counter() - run.request.came)
            self._remove(slot)
        return run

    def _remove(self, slot: int) -> None:
        try:
            if slot in self.session.running:
                self.session.remove(slot)
        except TrtKvCacheError:  # it has just ended, or the session is closed
            return
        except Exception:  # noqa: BLE001 - a bug; other sequences continue
            _log.exception("a sequence could not be removed")

    def _end_all(self, error: TrtKvCacheError, outcomes: _Outcomes) -> None:
        for slot, run in [*self._runs.items()]:
            outcomes.append((run.request, run.place, error))
            self._end(slot, "error")
        with suppress(TrtKvCacheError):  # the session is closed
            for slot in self.session.running:  # later requests get all rows
                self._remove(slot)
        with self._changed:
            outcomes += [(request, place, error) for request in self._came for place in range(len(request.works))]
            self._came.clear()


def _said(error: Exception) -> TrtKvCacheError:
    """Convert the error of a sequence to an error for the client. If it is a bug, log its trace."""
    told = as_outcome(error)
    if told.__cause__ is not None and not isinstance(told.__cause__, TrtKvCacheError):
        _log.error("a sequence failed: %s", type(told.__cause__).__name__, exc_info=told.__cause__)
    return told


def _in_turn(requests: Sequence[_Request]) -> Iterator[tuple[_Request, int, Work]]:
    for place, works in enumerate(zip_longest(*(request.works for request in requests))):
        yield from ((request, place, work) for request, work in zip(requests, works, strict=True) if work is not None)


def _deliver(outcomes: _Outcomes) -> None:
    """Send each event or error to the request that waits for it, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, _Outcomes] = defaultdict(list)
    for outcome in outcomes:
        by_loop[outcome[0].loop].append(outcome)
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, mine)
        except RuntimeError:  # the event loop is closed: nobody reads the events
            for request, _, _ in mine:
                request.gone = True


def _put(outcomes: _Outcomes) -> None:
    for request, place, outcome in outcomes:
        request.events.put_nowait((place, outcome))


_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class Metrics:
    """The counters and histograms of a serving core, for Prometheus. Times are in seconds.

    `running`, `waiting` and `usage` are functions for the present numbers. `first_token` collects times from the
    arrival of a request to the first token of each of its sequences, `between_tokens` from one token of a sequence to
    the next.
    """

    def __init__(
        self, model: str, running: Callable[[], int], waiting: Callable[[], int], usage: Callable[[], float]
    ) -> None:
        self._registry, self._model = CollectorRegistry(), model
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("num_requests_running", "Sequences that have a row of the caches.", running),
            ("num_requests_waiting", "Sequences that wait for a row.", waiting),
            ("kv_cache_usage_perc", "Part of the caches that holds tokens; 1 is all.", usage),
        )
        for name, text, ask in gauges:
            Gauge(_name(name), text, ["model_name"], registry=self._registry).labels(model).set_function(ask)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.tokens = self._counter("generation_tokens", "Tokens generated.")
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST)
        self.between_tokens = self._histogram("inter_token_latency_seconds", "One token to the next.", _BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to end of a sequence.", _WHOLE)
        self._ended = Counter(
            _name("request_success"), "Sequences ended.", ["model_name", "finished_reason"], registry=self._registry
        )

    def finished(self, reason: str, seconds: float) -> None:
        """Record that a sequence has ended, `seconds` after its request arrived."""
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_name(name), text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(_name(name), text, ["model_name"], registry=self._registry, buckets=buckets)
        return made.labels(self._model)


def _name(stem: str) -> str:
    return f"trt_kvcache:{stem}"
