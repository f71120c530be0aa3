"""Beam search over the slots of a session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import SlotError
from trt_kvcache.runtime.cache import KVCache
from trt_kvcache.runtime.encoders.constants import Constants
from trt_kvcache.runtime.events import TokenEvent
from trt_kvcache.runtime.generation.beam import beam_search, hypothesis_events
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.requests import ReadPrompt

__all__ = ["beam_events"]

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


class _Updater(Protocol):
    """The part of a session that beam search needs."""

    cache: KVCache

    @property
    def tokenizer(self) -> Any: ...

    def update(self, tokens: Mapping[int, Sequence[int]], keep: int = 1) -> dict[int, Logits]: ...


class _SlotBeams:
    """The live beams: the first slots of a fixed list."""

    def __init__(self, session: _Updater, slots: Sequence[int]) -> None:
        self._session, self._slots, self._live = session, list(slots), 1

    def step(self, tokens: Tokens) -> Logits:
        """Feed one token to each live beam."""
        live = self._slots[: self._live]
        logits = self._session.update({slot: [token] for slot, token in zip(live, tokens.tolist(), strict=True)})
        return np.stack([logits[slot][-1] for slot in live])

    def reorder(self, indices: Tokens) -> None:
        """Make beam i a copy of the former beam ``indices[i]``; slots without a beam keep unused contents."""
        chosen = indices.tolist()
        idle = [i for i in range(len(self._slots)) if i not in set(chosen)]
        self._session.cache.reorder([*chosen, *idle[: len(self._slots) - len(chosen)]], self._slots)
        self._live = len(chosen)


def beam_events(session: _Updater, prompts: Sequence[ReadPrompt], config: GenerationConfig) -> Iterator[TokenEvent]:
    """Yield the events of the best hypothesis for each prompt, one prompt after the other.

    Raises:
        SlotError: fewer rows are free than the search has beams.
        SessionError: a step failed.
    """
    if config.num_beams > session.cache.rows:
        raise SlotError(_few_rows(session.cache, config.num_beams, session.cache.free))
    for index, prompt in enumerate(prompts):
        slots: list[int] = []
        try:
            for _ in range(config.num_beams):
                _acquire(session, config, slots, prompt.constants)
            session.cache.put(slots[0], prompt.after(session.cache.slot(slots[0])))
            logits = session.update({slots[0]: []})[slots[0]][-1]
            free_tokens = session.cache.free_tokens(slots[0])
            ids = np.array(prompt.tokens, np.int64)
            best = beam_search(ids, logits, _SlotBeams(session, slots), config, free_tokens=free_tokens)[0]
            session.cache.give_back(slots)
        except BaseException:  # an interrupt may also come during give_back
            session.cache.give_back(slots)
            raise
        yield from hypothesis_events(best, index, config, session.tokenizer, ids)


def _acquire(session: _Updater, config: GenerationConfig, slots: list[int], constants: Constants) -> None:
    have = len(slots)
    try:
        session.cache.take(slots, constants=constants, adapter=config.adapter)
    except SlotError:
        raise SlotError(_few_rows(session.cache, config.num_beams, have)) from None


def _few_rows(cache: KVCache, beams: int, free: int) -> str:
    return (
        f"beam search with num_beams={beams} needs as many rows, and {min(free, cache.rows)} of {cache.rows} are free; "
        f"remove sequences, or open the session with a max_batch of {beams} or more"
    )
