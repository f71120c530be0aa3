"""Whose outcome is whose: streams share the steps of one loop with each other and with ``DecodeSession.step``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress

from trt_kvcache.errors import SessionError, SlotError, TrtKvCacheError
from trt_kvcache.runtime.cache import KVCache
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.loop import DecodeLoop, Outcomes
from trt_kvcache.runtime.requests import ReadPrompt

__all__ = ["Streams", "in_a_thread"]

_Waiting = deque[tuple[Continuation, ReadPrompt]]


class Streams:
    """Steps a loop, and keeps each outcome where it is waited for.

    Args:
        guard: of the session; held by whoever calls, but for `step` and `stream`, which take it themselves.
        cache: of the session.
        loop: over the same cache.

    Attributes:
        added: outcomes of sequences that no stream added.
    """

    def __init__(self, guard: Guard, cache: KVCache, loop: DecodeLoop) -> None:
        self._guard, self._cache, self._loop = guard, cache, loop
        self.added: Outcomes = []
        self._left: set[int] = set()  # slots of streams that nobody reads any more

    def step(self) -> list[TokenEvent]:
        """See `DecodeSession.step`."""
        events: list[TokenEvent] = []
        try:
            with self._guard.lock, self._guard.idle:
                self._collect(events)
            return events
        except BaseException:  # an interrupt: the next step gives what this one kept from whoever waits for it
            queued = {id(outcome) for _, outcome in self.added}
            self.added[:0] = [(event.sequence, event) for event in events if id(event) not in queued]
            raise

    def _collect(self, events: list[TokenEvent]) -> None:
        if not any(isinstance(outcome, TrtKvCacheError) for _, outcome in self.added):
            self._advance()
        for place, (slot, outcome) in enumerate(self.added):
            if isinstance(outcome, TrtKvCacheError):
                del self.added[place]
                outcome.sequence = slot
                raise outcome
        events += [outcome for _, outcome in self.added if isinstance(outcome, TokenEvent)]
        del self.added[:]

    def cancel(self, slot: int) -> None:
        """End a sequence that runs; who waits for it hears of it."""
        run = self._loop.remove(slot)
        if run.outcomes is not self.added:
            run.outcomes.append((slot, self._loop.last(run, FinishReason.CANCELLED)))

    @property
    def untold(self) -> tuple[int, ...]:
        """Slots of added sequences with outcomes that `step` did not give yet: steps of streams brought them."""
        return tuple(dict.fromkeys(slot for slot, _ in self.added))

    def forget(self, slot: int) -> None:
        """Drop outcomes of an added sequence that steps of streams brought, and that `step` did not give yet."""
        self.added[:] = [outcome for outcome in self.added if outcome[0] != slot]

    def stream(self, continuations: Sequence[Continuation], prompts: Sequence[ReadPrompt]) -> Iterator[TokenEvent]:
        """The events of prompts, which take turns where rows are few. Closing it ends what is left of them."""
        waiting = deque(zip(continuations, prompts, strict=True))
        mailbox: Outcomes = []
        mine: set[int] = set()
        try:
            while waiting or mine or mailbox:
                if not mailbox:
                    with self._guard.lock, self._guard.idle:
                        self._join(waiting, mine, mailbox)
                        if not mailbox:  # another thread's step may have filled it meanwhile
                            self._advance()
                while mailbox:
                    slot, outcome = mailbox.pop(0)
                    if isinstance(outcome, TrtKvCacheError):
                        mine.discard(slot)
                        raise outcome
                    if outcome.finish_reason is not None:
                        mine.discard(slot)
                    yield outcome
        finally:
            self._leave(mine)

    def _join(self, waiting: _Waiting, mine: set[int], mailbox: Outcomes) -> None:
        """Give free rows to the prompts that wait."""
        if not waiting:
            return
        known = set(self._cache.slots)
        try:
            while waiting and self._cache.free:
                continuation, prompt = waiting.popleft()
                slot = self._cache.acquire(constants=prompt.constants, adapter=continuation.config.adapter)
                mine.add(slot)
                self._loop.add(slot, prompt.after(self._cache.slot(slot)), continuation, mailbox, keep_slot=False)
        except BaseException:  # an interrupt, before anybody knows of the slot
            for slot in set(self._cache.slots) - known - set(self._loop.slots):
                self._cache.release(slot)
            raise
        if waiting and not self._loop.slots:
            raise SlotError(
                f"{self._cache.max_sequences} sequences that do not run leave no room for the {len(waiting)} prompt(s) "
                "that wait, and never will; remove some, or open the session with a larger max_batch or max_sequences"
            )

    def _advance(self) -> None:
        """One step of the loop."""
        self._end_left()
        self._loop.give_row()
        self._cache.compact()
        with self._guard.stepping, self._guard.open:  # what is raised on the way out of the second gives back the first
            self._loop.step()

    def _leave(self, mine: set[int]) -> None:
        """End what is left of a stream: now, or before the next step where one is under way that collects garbage."""
        if not mine:
            return
        with suppress(SessionError), self._guard.lock, self._guard.open:  # of a session that was closed meanwhile
            self._left |= mine
            if not self._guard.stepping.locked():
                self._end_left()

    def _end_left(self) -> None:
        while self._left:
            slot = min(self._left)
            if slot in self._loop.slots:
                self._loop.remove(slot)
            if slot in self._cache:
                self._cache.release(slot)
            self._left.discard(slot)  # last: what an interrupt left is ended before the next step


async def in_a_thread(events: Iterator[TokenEvent]) -> AsyncGenerator[TokenEvent, None]:
    """The events of a stream, each waited for in a thread; closing it closes the stream after the step under way."""
    step: asyncio.Task[TokenEvent | None] | None = None
    try:
        while True:
            step = asyncio.create_task(asyncio.to_thread(next, events, None))
            event = await asyncio.shield(step)
            if event is None:
                return
            yield event
    finally:
        if step is None or step.done():
            _close(events)
        else:  # cancelled: the iterator cannot be closed while it runs
            step.add_done_callback(lambda task: _give_up(task, events))
            await asyncio.wait([step])


def _give_up(step: asyncio.Task[TokenEvent | None], events: Iterator[TokenEvent]) -> None:
    """After a step that nobody waits for any more; asyncio complains of errors that nobody has looked at."""
    if not step.cancelled():
        step.exception()
    _close(events)


def _close(events: Iterator[TokenEvent]) -> None:
    close = getattr(events, "close", None)
    if close is not None:
        close()
