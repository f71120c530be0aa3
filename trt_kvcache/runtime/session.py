"""A decode session: a model that is ready to run, its caches, and the sequences in them."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError, PromptError, SessionError, SlotError, TrtKvCacheError
from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.runtime.beam_slots import beam_events
from trt_kvcache.runtime.cache import KVCache
from trt_kvcache.runtime.config import GenerationConfig
from trt_kvcache.runtime.constants import Constants
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.events import TokenEvent
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.loop import DecodeLoop, Outcome
from trt_kvcache.runtime.open import open_runner, open_tokenizer
from trt_kvcache.runtime.requests import Generation, Given, GivenAll, Prompt, PromptReader, check_config, for_each
from trt_kvcache.runtime.runner import Runner

__all__ = ["DecodeSession", "Generation", "Prompt"]

_GREEDY = GenerationConfig()


class DecodeSession:
    """Decodes with one model. Use it in a ``with`` block, or close it.

        with DecodeSession.open("model.onnx") as session:
            for event in session.stream([[1, 2, 3]], GenerationConfig(max_new_tokens=64)):
                print(event.token)

    Any method may be called from any thread: one lock serializes the steps, and sequences of all threads share them.
    Sequences that fail or end leave the others alone.

    Args:
        runner: executes the steps; the session closes it.
        tokenizer: turns text into tokens and back, see `trt_kvcache.runtime.tokenizer`.

    Attributes:
        cache: the caches, and what may be done to them.
    """

    def __init__(self, runner: Runner, tokenizer: Any = None) -> None:
        self._guard = Guard()
        self._runner = runner
        self._tokenizer = tokenizer
        self.cache = KVCache(runner, self._guard)
        self._reader = PromptReader(runner.vocab, self.cache.capacity, tokenizer)
        self._loop = DecodeLoop(runner, self.cache)
        # Outcomes of sequences that a stream added wait for that stream, those of all others for step().
        self._mailboxes: dict[int, deque[tuple[int, Outcome]]] = {}
        self._outcomes: list[Outcome] = []

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str = "auto",
        tokenizer: str | os.PathLike[str] | Any = None,
        max_batch: int | None = None,
        max_chunk: int | None = None,
        **options: Any,
    ) -> DecodeSession:
        """Open an engine or a model.

        Args:
            path: an engine that ``trt-kvcache build`` wrote, or an ``.onnx`` file, which runs on the CPU.
            device: ``"cpu"``, ``"cuda"``, or ``"auto"``: what the file is for.
            tokenizer: path of a ``tokenizer.json``, or an object that encodes and decodes; None: token ids only.
            max_batch: most sequences at a time; None: what the engine was built for, or what fits.
            max_chunk: most tokens of one sequence per step (CPU); None: what the engine was built for, or 512.
            options: for the runner: ``capacity`` (of caches that grow or have a symbolic length), ``plan_options``,
                ``threads`` on the CPU; ``gpu``, ``cuda_graphs``, ``kernel_cache`` on a GPU.

        Raises:
            OptionError: the file cannot run on that device, or an option is not known there.
            ModelError, ManifestError, BackendError, SessionError: the model or engine cannot be used here.
        """
        reader = open_tokenizer(tokenizer)
        return cls(open_runner(path, device, {"max_batch": max_batch, "max_chunk": max_chunk, **options}), reader)

    @property
    def name(self) -> str:
        """What runs where."""
        return self._runner.name

    @property
    def plan(self) -> CachePlan:
        """Of the model."""
        return self._runner.plan

    @property
    def vocab(self) -> int:
        """Token ids are 0 to ``vocab - 1``."""
        return self._runner.vocab

    @property
    def max_batch(self) -> int:
        """Most sequences at a time."""
        return self._runner.max_batch

    @property
    def max_chunk(self) -> int:
        """Most tokens of one sequence in one step; longer prompts take several."""
        return self._runner.max_chunk

    @property
    def tokenizer(self) -> Any:
        """What turns text into tokens and back, or None."""
        return self._tokenizer

    # --- whole generations

    def generate(
        self, prompts: Sequence[Prompt], config: GenerationConfig = _GREEDY, constants: GivenAll = None
    ) -> list[Generation]:
        """Continue every prompt to its end.

        Args:
            prompts: texts or token ids; more than fit at a time take turns.
            config: for all of them.
            constants: what the model reads beside each prompt, see `Given`.

        Returns:
            One result per prompt, in order.

        Raises:
            PromptError: a prompt is empty, or has token ids that the model does not know; or constants do not fit it.
            CapacityError: a prompt is longer than the cache.
            OptionError: the config does not fit the model.
            SlotError: no row is free, and none will be.
            SessionError: the session is closed, or a step failed.
        """
        with self._guard:  # a closed session says so at the call
            checked, given = self._read(prompts, config, constants)
        results = [Generation(prompt) for prompt in checked]
        if config.num_beams > 1:
            for event in beam_events(self, checked, config, given):
                results[event.sequence].take(event)
            return results
        continuations = self._continuations(checked, config)
        for event in self._stream(continuations, checked, given):
            results[event.sequence].take(event)
        for result, continuation in zip(results, continuations, strict=True):
            result.speculation = continuation.speculation
        return results

    def stream(
        self, prompts: Sequence[Prompt], config: GenerationConfig = _GREEDY, constants: GivenAll = None
    ) -> Iterator[TokenEvent]:
        """Continue every prompt; events come as tokens do, `TokenEvent.sequence` is the index of the prompt.

        Prompts are checked at once, nothing runs before the first event is asked for. Closing the iterator ends its
        sequences and frees their slots.

        Raises:
            See `generate`.
        """
        with self._guard:  # a closed session says so at the call
            checked, given = self._read(prompts, config, constants)
        if config.num_beams > 1:  # which knows its tokens only at the end
            return beam_events(self, checked, config, given)
        return self._stream(self._continuations(checked, config), checked, given)

    async def astream(
        self, prompts: Sequence[Prompt], config: GenerationConfig = _GREEDY, constants: GivenAll = None
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio: steps run in a thread. Cancelling the task ends its sequences after that step."""
        events = self.stream(prompts, config, constants)
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

    # --- continuous batching

    def add(
        self,
        prompt: Prompt = (),
        config: GenerationConfig = _GREEDY,
        *,
        slot: int | None = None,
        keep: bool = False,
        index: int = 0,
        constants: Given | None = None,
    ) -> int:
        """Let a sequence join: `step` advances it from now on, and its slot is freed at its end.

        Args:
            prompt: text or token ids; may be empty where `slot` holds tokens that are not in its cache yet.
            config: how to continue it.
            slot: continue this one, which does not run: the prompt comes after its tokens. None: a new slot.
            keep: the slot stays when the sequence ends, with its tokens and caches.
            index: of its random stream among sequences of one seed.
            constants: what the model reads beside the text of a new slot, see `Given`; other slots have theirs.

        Returns:
            The slot; `TokenEvent.sequence` of its events.

        Raises:
            PromptError, CapacityError, OptionError, SlotError, SessionError: see `generate`; nothing has changed then.
        """
        if config.num_beams > 1:
            raise OptionError("sequences that are added run step by step; for beam search use generate")
        if slot is not None and constants is not None:
            raise OptionError(f"slot {slot} was given its constants when it was made; leave them out")
        with self._guard:
            check_config(config, self.plan)
            before = [] if slot is None else self.cache.idle(slot).tokens
            new = self._reader.read(prompt)
            waits = slot is not None and self.cache.slot(slot).pending > 0
            if not new and not waits:
                raise PromptError("the prompt is empty; it needs at least one token")
            tokens = [*before, *new]
            self._reader.check_length(tokens, "the prompt" if slot is None else f"slot {slot} with the prompt")
            continuation = Continuation(0 if slot is None else slot, tokens, config, self._tokenizer, index=index)
            if slot is None:
                slot = self.cache.acquire(tokens, constants)
                continuation.sequence = slot
            else:
                self.cache.slot(slot).tokens.extend(new)
            self._loop.add(slot, continuation, keep_slot=keep)
            return slot

    def step(self) -> list[TokenEvent]:
        """Advance all sequences once; the events of those that `add` brought.

        Raises:
            SessionError: the session is closed, or the step of a sequence failed; that sequence has ended, and the next
                call gives the events of the others.
        """
        with self._guard:
            if not any(isinstance(o, TrtKvCacheError) for o in self._outcomes):
                self._advance()
            for place, outcome in enumerate(self._outcomes):
                if isinstance(outcome, TrtKvCacheError):
                    del self._outcomes[place]
                    raise outcome
            outcomes, self._outcomes = self._outcomes, []
            return [outcome for outcome in outcomes if isinstance(outcome, TokenEvent)]

    @property
    def running(self) -> tuple[int, ...]:
        """Slots that `step` advances."""
        with self._guard:
            return self._loop.slots

    def remove(self, slot: int) -> None:
        """End a sequence, running or not, and free its slot.

        Raises:
            SlotError: the slot is not in use.
        """
        with self._guard:
            if self.cache.slot(slot).running:
                self._loop.remove(slot)
            self.cache.release(slot)
            self._mailboxes.pop(slot, None)

    def update(self, tokens: Mapping[int, Sequence[int]], keep: int = 1) -> dict[int, npt.NDArray[np.float32]]:
        """Write tokens to slots and return the model's scores: for callers that choose tokens themselves.

        Slots come from ``session.cache.acquire()`` or ``fork``. Long updates are split into steps.

        Args:
            tokens: ids by slot, at least one each, or none where the slot has tokens that wait.
            keep: logits of how many of the last positions are returned.

        Returns:
            float32 ``[min(keep, positions written), V]`` by slot.

        Raises:
            PromptError, CapacityError, SlotError, SessionError: see `generate`; a refused update writes nothing.
        """
        with self._guard:
            checked = {}
            for slot, ids in tokens.items():
                held = self.cache.idle(slot)
                checked[slot] = self._reader.read(ids)
                if not checked[slot] and not held.pending:
                    raise PromptError(f"slot {slot}: no tokens to write; give at least one")
                self._reader.check_length([*held.tokens, *checked[slot]], f"slot {slot}")
            return self._loop.update(checked, keep)

    # --- the end

    def close(self) -> None:
        """Free everything; every later call is refused. Closing again does nothing."""
        with self._guard.ending() as first:
            if first:
                self._runner.close()

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _read(
        self, prompts: Sequence[Prompt], config: GenerationConfig, constants: GivenAll
    ) -> tuple[list[list[int]], list[Constants]]:
        """Token ids and constants of every prompt."""
        check_config(config, self.plan)
        checked = self._reader.read_all(prompts)
        return checked, [self.cache.read_constants(given) for given in for_each(checked, constants)]

    def _stream(
        self, continuations: Sequence[Continuation], prompts: Sequence[list[int]], given: Sequence[Constants]
    ) -> Iterator[TokenEvent]:
        waiting = deque(zip(continuations, prompts, given, strict=True))
        mailbox: deque[tuple[int, Outcome]] = deque()
        mine: set[int] = set()
        try:
            while waiting or mine or mailbox:
                if not mailbox:
                    with self._guard:
                        self._join(waiting, mine, mailbox)
                        if not mailbox:  # another thread's step may have filled it meanwhile
                            self._advance()
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

    def _join(
        self,
        waiting: deque[tuple[Continuation, list[int], Constants]],
        mine: set[int],
        mailbox: deque[tuple[int, Outcome]],
    ) -> None:
        """Give free rows to the prompts that wait."""
        while waiting and self.cache.free:
            continuation, prompt, given = waiting.popleft()
            slot = self.cache.acquire(prompt, given)
            self._mailboxes[slot] = mailbox
            mine.add(slot)
            self._loop.add(slot, continuation, keep_slot=False)
        if waiting and not self._loop.slots:
            raise SlotError(
                f"all {self.max_batch} rows hold sequences that do not run, so no row will ever be free for the "
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
                    self.cache.release(slot)

    def _advance(self) -> None:
        """One step of the loop; everybody's outcomes go to where they are waited for."""
        for slot, outcome in self._loop.step():
            mailbox = self._mailboxes.get(slot)
            if mailbox is None:
                self._outcomes.append(outcome)
                continue
            mailbox.append((slot, outcome))
            if isinstance(outcome, TrtKvCacheError) or outcome.finish_reason is not None:
                del self._mailboxes[slot]

    def _continuations(self, prompts: Sequence[list[int]], config: GenerationConfig) -> list[Continuation]:
        return [Continuation(i, prompt, config, self._tokenizer) for i, prompt in enumerate(prompts)]
