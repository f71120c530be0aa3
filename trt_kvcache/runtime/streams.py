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
from trt_kvcache.runtime.loop import DecodeLoop, Outcome
from trt_kvcache.runtime.requests import ReadPrompt

__all__ = ["Streams", "in_a_thread"]

_Mailbox = deque[tuple[int, Outcome]]
_Waiting = deque[tuple[Continuation, ReadPrompt]]


class Streams:
    """Steps a loop, and brings each outcome to where it is waited for.

    Args:
        guard: of the session; held by whoever calls, but for `stream`, which takes it itself.
        cache: of the session.
        loop: over the same cache.

    """

    def __init__(self, guard: Guard, cache: KVCache, loop: DecodeLoop) -> None:
        self._guard, self._cache, self._loop = guard, cache, loop
        self._mailboxes: dict[int, _Mailbox] = {}
        self._outcomes: list[Outcome] = []  # of sequences that no stream added

    def advance(self) -> None:
        """One step of the loop; everybody's outcomes go to where they are waited for."""
        outcomes = self._loop.step()
        while outcomes:  # an interrupt leaves the rest for the next step
            slot, outcome = outcomes.popleft()
            mailbox = self._mailboxes.get(slot)
            if mailbox is None:
                self._outcomes.append(outcome)
                continue
            mailbox.append((slot, outcome))
            if isinstance(outcome, TrtKvCacheError) or outcome.finish_reason is not None:
                del self._mailboxes[slot]

    def step(self) -> list[TokenEvent]:
        """See `DecodeSession.step`."""
        if not any(isinstance(outcome, TrtKvCacheError) for outcome in self._outcomes):
            self.advance()
        for place, outcome in enumerate(self._outcomes):
            if isinstance(outcome, TrtKvCacheError):
                del self._outcomes[place]
                raise outcome
        events = [outcome for outcome in self._outcomes if isinstance(outcome, TokenEvent)]
        self._outcomes = []
        return events

    def cancel(self, slot: int) -> None:
        """End a sequence that runs; who waits for it hears of it."""
        ended = self._loop.remove(slot)
        mailbox = self._mailboxes.pop(slot, None)
        if mailbox is not None:
            mailbox.append((slot, ended.finish(FinishReason.CANCELLED)))

    def stream(self, continuations: Sequence[Continuation], prompts: Sequence[ReadPrompt]) -> Iterator[TokenEvent]:
        """The events of prompts, which take turns where rows are few. Closing it ends what is left of them."""
        waiting = deque(zip(continuations, prompts, strict=True))
        mailbox: _Mailbox = deque()
        mine: set[int] = set()
        try:
            while waiting or mine or mailbox:
                if not mailbox:
                    with self._guard:
                        self._join(waiting, mine, mailbox)
                        if not mailbox:  # another thread's step may have filled it meanwhile
                            self.advance()
                while mailbox:
                    slot, outcome = mailbox.popleft()
                    if isinstance(outcome, TrtKvCacheError):
                        mine.discard(slot)
                        raise outcome
                    if outcome.finish_reason is not None:
                        mine.discard(slot)
                    yield outcome
        finally:
            self._leave(mine)

    def _join(self, waiting: _Waiting, mine: set[int], mailbox: _Mailbox) -> None:
        """Give free rows to the prompts that wait."""
        while waiting and self._cache.free:
            continuation, prompt = waiting.popleft()
            slot = self._cache.acquire(constants=prompt.constants)
            prompt.append_to(self._cache.slot(slot))
            self._mailboxes[slot] = mailbox
            mine.add(slot)
            self._loop.add(slot, continuation, keep_slot=False)
        if waiting and not self._loop.slots:
            raise SlotError(
                f"all {self._cache.rows} rows hold sequences that do not run, so no row will ever be free for the "
                f"{len(waiting)} prompt(s) that wait; remove some, or open the session with a larger max_batch"
            )

    def _leave(self, mine: set[int]) -> None:
        """End what is left of a stream."""
        if not mine:
            return
        with suppress(SessionError), self._guard:  # there is nothing to end in a session that was closed meanwhile
            for slot in mine:
                if self._mailboxes.pop(slot, None) is not None and slot in self._loop.slots:
                    self._loop.remove(slot)
                    self._cache.release(slot)


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
        if step is not None and not step.done():  # cancelled: the iterator cannot be closed while it runs
            await asyncio.wait([step])
        close = getattr(events, "close", None)
        if close is not None:
            close()
