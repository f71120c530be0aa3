"""Delivers the events of sequences to their callers: streams, and ``DecodeSession.step``, share one decode loop."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import suppress

from trt_kvcache.errors import SessionError, SlotError, TrtKvCacheError
from trt_kvcache.runtime.adapters import Adapters
from trt_kvcache.runtime.cache_rows import CacheRows
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.loop import DecodeLoop, Outcomes
from trt_kvcache.runtime.requests import ReadPrompt


class Reader:
    """Holds the cache slots of one stream, so that they are freed even if Ctrl-C interrupts the stream's generator.

    `Streams.leave` frees the slots. If it was interrupted, `Streams.end_gone` frees them later: a weak reference to
    this object tells that the generator is gone.

    Attributes:
        slots: slots of the sequences that have not ended. A slot is added in the ``guard.idle`` block that takes it, so
            that Ctrl-C cannot come in between.
    """

    def __init__(self) -> None:
        self.slots: set[int] = set()


class Streams:
    """Runs the steps of a decode loop, and keeps each event or error for the stream or caller that waits for it.

    Callers hold the session's lock (`guard`), except for `step` and `stream`, which take it themselves. Events of
    sequences added by `DecodeSession.add` wait in `unclaimed`.
    """

    def __init__(self, guard: Guard, rows: CacheRows, loop: DecodeLoop, adapters: Adapters) -> None:
        self._guard, self._rows, self._loop, self._adapters = guard, rows, loop, adapters
        self.unclaimed: Outcomes = []
        self._readers: list[tuple[weakref.ref[Reader], set[int]]] = []

    def step(self) -> list[TokenEvent]:
        """Run a step, and return the events of sequences that do not belong to a stream; see `DecodeSession.step`."""
        events: list[TokenEvent] = []
        try:
            with self._guard.lock, self._guard.idle:
                self._collect(events)
            return events
        except BaseException:  # such as a signal that waited: the next step returns the events of this one
            queued = {id(outcome) for _, outcome in self.unclaimed}
            self.unclaimed[:0] = [(event.sequence, event) for event in events if id(event) not in queued]
            raise

    def _collect(self, events: list[TokenEvent]) -> None:
        if not any(isinstance(outcome, TrtKvCacheError) for _, outcome in self.unclaimed):
            self._advance()
        for place, (slot, outcome) in enumerate(self.unclaimed):
            if isinstance(outcome, TrtKvCacheError):
                del self.unclaimed[place]
                outcome.sequence = slot
                raise outcome
        events += [outcome for _, outcome in self.unclaimed if isinstance(outcome, TokenEvent)]
        del self.unclaimed[:]

    def cancel(self, slot: int) -> None:
        """End a running sequence. The sequence's stream gets an event with the reason `CANCELLED`."""
        run = self._loop.remove(slot)
        if run.outcomes is not self.unclaimed:
            run.outcomes.append((slot, self._loop.last(run, FinishReason.CANCELLED)))

    @property
    def untold(self) -> tuple[int, ...]:
        """Slots of sequences (added by `DecodeSession.add`) with events that `step` has not returned yet."""
        return tuple(dict.fromkeys(slot for slot, _ in self.unclaimed))

    def forget(self, slot: int) -> None:
        """Drop the events of a sequence (added by `DecodeSession.add`) that `step` has not returned yet."""
        self.unclaimed[:] = [outcome for outcome in self.unclaimed if outcome[0] != slot]

    def stream(self, continuations: Sequence[Continuation], prompts: Sequence[ReadPrompt]) -> Generator[TokenEvent]:
        """Generate for several prompts, and yield their events. Closing the iterator ends unfinished sequences."""
        waiting = deque(zip(continuations, prompts, strict=True))
        mailbox: Outcomes = []
        reader = self.reader()
        try:
            while waiting or reader.slots or mailbox:
                if not mailbox:
                    with self._guard.lock, self._guard.idle:
                        self._join(waiting, reader.slots, mailbox)
                        if not mailbox:  # another thread's step may have filled it meanwhile
                            self._advance()
                while mailbox:
                    slot, outcome = mailbox.pop(0)
                    if isinstance(outcome, TrtKvCacheError):
                        reader.slots.discard(slot)
                        raise outcome
                    if outcome.finish_reason is not None:
                        reader.slots.discard(slot)
                    yield outcome
        finally:
            self.leave(reader)

    def reader(self) -> Reader:
        """Return a new `Reader` for one stream. Only the stream may hold it: its sequences end with the reader."""
        reader = Reader()
        self._readers.append((weakref.ref(reader), reader.slots))
        return reader

    def end_gone(self) -> None:
        """End the sequences of deleted readers. The caller holds the lock, and no step is running (``guard.idle``)."""
        for known in [*self._readers]:
            if known[0]() is None:
                self._end(known[1])
                self._readers.remove(known)

    def leave(self, reader: Reader) -> None:
        """End the unfinished sequences of a reader. If the loop is running a step, the next step ends them instead."""
        with suppress(SessionError), self._guard.lock, self._guard.idle:  # unless the session was closed meanwhile
            self._end(reader.slots)

    def _join(self, waiting: deque[tuple[Continuation, ReadPrompt]], mine: set[int], mailbox: Outcomes) -> None:
        """Take slots for waiting prompts, and add their sequences to the loop; `SlotError` if no row will be free."""
        self.end_gone()
        while waiting and self._rows.free:
            continuation, prompt = waiting.popleft()
            adapter = self._adapters.find(continuation.config.adapter)
            slot = self._rows.take(constants=prompt.constants, adapter=adapter)
            mine.add(slot)
            self._loop.add(slot, prompt.after(self._rows.slot(slot)), continuation, mailbox, keep_slot=False)
        if waiting and not self._loop.slots:
            raise SlotError(
                f"{len(waiting)} prompt(s) would wait forever, because "
                f"{self._rows.max_sequences or self._rows.count} sequences that are not running hold all rows; "
                "remove some, or open the session with a larger max_batch or max_sequences"
            )

    def _advance(self) -> None:
        self.end_gone()
        self._loop.give_row()
        self._rows.compact()
        with self._guard.stepping, self._guard.open:  # an error of `open` unlocks `stepping`
            self._loop.step()

    def _end(self, slots: set[int]) -> None:
        while slots:
            slot = slots.pop()
            if slot in self._loop.slots:
                self._loop.remove(slot)
            self._rows.drop(slot)


async def in_a_thread(events: Generator[TokenEvent]) -> AsyncGenerator[TokenEvent, None]:
    """Yield the events of a stream, each computed in a thread. Closing waits for the current step."""
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
            events.close()
        else:  # cancelled: the iterator cannot be closed while it runs
            step.add_done_callback(lambda task: _give_up(task, events))
            await asyncio.wait([step])


def _give_up(step: asyncio.Task[TokenEvent | None], events: Generator[TokenEvent]) -> None:
    """Close a stream after its last step. Fetch the step's exception, so that asyncio does not log it."""
    if not step.cancelled():
        step.exception()
    events.close()
