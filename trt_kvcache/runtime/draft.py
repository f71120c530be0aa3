"""Speculation with a second, smaller model: it guesses the next tokens, and the model checks them in one step."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Mapping
from pathlib import Path

from trt_kvcache.errors import OptionError, TrtKvCacheError
from trt_kvcache.model_paths import engine_in, is_model
from trt_kvcache.runtime.buffers import why_no_return
from trt_kvcache.runtime.cache_rows import CacheRows
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.embeddings import EmbeddingsSource, embedded_input, find_embeddings, open_embeddings
from trt_kvcache.runtime.encoders.constants import ConstantInputs
from trt_kvcache.runtime.loop import DecodeLoop, Outcomes, as_outcome, why_no_drafts
from trt_kvcache.runtime.open import CpuOptions, RunnerOptions, open_runner
from trt_kvcache.runtime.runner import Runner
from trt_kvcache.runtime.slot import sequence_capacity
from trt_kvcache.runtime.token_inputs import common_length


class DraftModel:
    """A smaller model that guesses the main model's next tokens, with the main model's settings and random numbers.

    The draft model has a cache of its own, with the sequences for which it guessed recently. `close` closes its runner.
    Raises `OptionError` if the runner's model cannot be a draft model.
    """

    def __init__(self, runner: Runner, embeddings: EmbeddingsSource = None) -> None:
        self._runner, plan = runner, runner.plan
        if why := why_no_return(plan, rings=True):
            raise OptionError(
                f"the draft cannot take back tokens that were rejected: {why}; use another draft, such as one with "
                "linear caches"
            )
        if constants := ConstantInputs(plan).tensors:
            raise OptionError(
                f"the draft also reads input '{constants[0].name}', which only its own encoder can make; use a "
                "draft whose only input is the text"
            )
        self._cache = CacheRows(runner)
        opened = open_embeddings(embeddings, plan, runner.vocab)
        # the model waits for all guesses anyway
        self._loop = DecodeLoop(runner, self._cache, opened, prefill_budget=sys.maxsize)
        self._slots: dict[int, int] = {}  # the draft's slot for each slot of the model; least recently used first

    @property
    def name(self) -> str:
        """Runtime and device of the draft model, as text."""
        return self._runner.name

    def check(self, runner: Runner) -> None:
        """Raise `OptionError` if the main model has another vocabulary, or cannot check guesses."""
        check_target(runner)
        if runner.vocab != self._runner.vocab:
            raise OptionError(
                f"the draft has a vocabulary of {self._runner.vocab} tokens, but the model has {runner.vocab}; use "
                "a draft with the model's own vocabulary, such as a smaller one of its family"
            )

    def guess(self, asked: Mapping[int, tuple[Continuation, int]], alive: Container[int]) -> dict[int, list[int]]:
        """Guess the next tokens of several sequences together. Return the guesses by slot of the main model.

        `asked` maps each slot to its sequence and the most tokens to guess; `alive` are all slots of the main model. If
        the draft model fails, the sequences continue without guesses; `SpeculationStats.impossible` says why.
        """
        outcomes: Outcomes = []
        guesses: dict[int, list[int]] = {slot: [] for slot in asked}
        try:
            for slot in [slot for slot in self._slots if slot not in alive]:
                self._release(self._slots.pop(slot))
            for slot, (continuation, count) in asked.items():
                self._begin(slot, continuation, count, asked, outcomes)
            while self._loop.slots:
                self._cache.compact()
                self._loop.step()
        except Exception as error:  # noqa: BLE001 - the slots are in an unknown state
            for name in [*self._cache.slots]:
                self._release(name)
            self._slots.clear()
            outcomes[:] = [(slot, as_outcome(error)) for slot in asked]
        names = {name: slot for slot, name in self._slots.items()}
        for name, outcome in outcomes:
            if isinstance(outcome, TrtKvCacheError):
                slot = names.get(name, name)
                asked[slot][0].speculation.impossible = f"the draft failed: {outcome}"
                guesses[slot] = []
            elif outcome.token is not None:
                guesses[names[name]].append(outcome.token)
        return guesses

    def close(self) -> None:
        """Free all memory."""
        self._runner.close()

    def _begin(
        self, slot: int, continuation: Continuation, count: int, keep: Collection[int], outcomes: Outcomes
    ) -> None:
        """Copy a sequence's tokens to its slot in the draft model's cache, and let the draft model continue there."""
        if slot not in self._slots:
            if not self._cache.free:
                others = [other for other in self._slots if other not in keep]
                if not others:
                    return  # the draft has fewer rows than the model, so it makes no guesses for this sequence now
                self._release(self._slots.pop(others[0]))
            self._slots[slot] = self._cache.take()
        name = self._slots[slot] = self._slots.pop(slot)
        text: list[int] = continuation.tokens.tolist()
        entry = self._cache.slot(name)
        same = min(common_length(entry.tokens, text), entry.length, len(text) - 1)
        self._cache.crop(name, same)
        after = self._cache.slot(name).appended(text[same:])
        free = self._cache.free_after(after)
        if free is not None and free < 0:
            continuation.speculation.impossible = (
                f"the cache of the draft holds at most {self._cache.capacity} tokens; use a draft with a larger "
                "capacity"
            )
            return
        self._loop.add(name, after, continuation.guesser(count), outcomes, keep_slot=True)

    def _release(self, name: int) -> None:
        if name in self._loop.slots:
            self._loop.remove(name)
        self._cache.drop(name)


def check_target(runner: Runner) -> None:
    """Raise `OptionError` if the model cannot check the guesses of a draft model."""
    if why := why_no_drafts(runner):
        raise OptionError(f"a draft cannot help this model: {why}; leave draft out")


def open_draft(path: Path, runner: Runner, options: RunnerOptions) -> DraftModel:
    """Open a model or an engine as a draft model. If the file fixes no capacity, the draft model gets the main one's.

    `runner` and `options` belong to the main model. `DecodeSession.open` lists the errors.
    """
    check_target(runner)
    path = engine_in(path)
    if is_model(path):
        threads = None if options.cpu is None else options.cpu.threads
        cpu = CpuOptions(threads, sequence_capacity(runner))
        opened = open_runner(path, RunnerOptions(max_batch=runner.max_batch, cpu=cpu))
    else:
        opened = open_runner(path, RunnerOptions(check=options.check, gpu=options.gpu))
    try:
        embeddings = find_embeddings(path) if embedded_input(opened.plan) is not None else None
        draft = DraftModel(opened, embeddings)
        draft.check(runner)
        return draft
    except BaseException:
        opened.close()
        raise
