"""Beam search over one prompt. Each live beam (an unfinished candidate text) has a batch row of the cache.

The algorithm is that of transformers' ``generate`` with ``num_beams`` (measured against 5.23), but live beams are not
padded to `num_beams`: there may be fewer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import SessionError, SlotError
from trt_kvcache.runtime.adapters import Adapters
from trt_kvcache.runtime.cache_rows import CacheRows
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.processors import log_softmax, process
from trt_kvcache.runtime.generation.sampling import highest
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.loop import DecodeLoop
from trt_kvcache.runtime.requests import ReadPrompt
from trt_kvcache.runtime.streams import Streams
from trt_kvcache.runtime.text.incremental import TextStream, TokenDecoder

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Hypothesis:
    """A finished candidate text of a beam search.

    Attributes:
        tokens: the new tokens, including the end token.
        logprobs: natural logarithm of each token's probability under the model's own distribution.
        score: sum of the log-probabilities (after the rules of `GenerationConfig`) / length ** length_penalty.
        finish_reason: EOS, LENGTH or CAPACITY.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class _Beam:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float


def beam_search(
    prompt: Tokens, logits: Logits, decoder: _LiveBeams, config: GenerationConfig, *, free_tokens: int | None = None
) -> list[Hypothesis]:
    """Find the likeliest continuations of a prompt; return at most `num_beams` hypotheses, the best one first.

    Args:
        prompt: int64 token ids, already in the caches, in the decoder's only batch row.
        logits: the model's scores after the prompt, float32 ``[V]``.
        decoder: computes and reorders the beams.
        config: the settings; `num_beams` of at least 1, and no sampling.
        free_tokens: tokens that still fit into the caches; None: no limit. One token more than these can be chosen,
            because the last token is not written to the caches.

    Raises:
        SessionError: the logits have NaN or infinity, or the settings forbid every token.
    """
    most, at_most = config.max_new_tokens, FinishReason.LENGTH
    if free_tokens is not None and free_tokens + 1 < most:
        most, at_most = free_tokens + 1, FinishReason.CAPACITY
    live = [_Beam((), (), 0.0)]
    ended: list[Hypothesis] = []
    scores = logits[np.newaxis]
    for length in range(1, most + 1):
        ranked = _expand(live, scores, prompt, config)
        if not ranked and not ended:
            raise SessionError("no token is left: the settings, such as sequence_bias, min_new_tokens, forbid them all")
        parents: list[int] = []
        beams: list[_Beam] = []
        for rank, (parent, beam) in enumerate(ranked):
            reason = FinishReason.EOS if beam.tokens[-1] in config.eos_token_ids else at_most
            if reason is FinishReason.EOS or length == most:
                # Candidates of lower rank serve only to keep enough beams live; they do not become hypotheses.
                if rank < config.num_beams:
                    score = beam.total / length**config.length_penalty
                    ended.append(Hypothesis(beam.tokens, beam.logprobs, score, reason))
            elif len(beams) < config.num_beams:
                parents.append(parent)
                beams.append(beam)
        ended = sorted(ended, key=lambda hypothesis: -hypothesis.score)[: config.num_beams]
        if not beams or _is_over(beams[0], ended, length, most, config):
            break
        if parents != list(range(len(live))):
            decoder.reorder(np.array(parents, dtype=np.int64))
        live = beams
        scores = decoder.step(np.array([beam.tokens[-1] for beam in live], dtype=np.int64))
    return ended


def hypothesis_events(
    hypothesis: Hypothesis, sequence: int, config: GenerationConfig, tokenizer: TokenDecoder | None, prompt: Tokens
) -> Iterator[TokenEvent]:
    """Yield the events of a hypothesis, one for each token, as if the tokens had been generated one by one.

    `prompt` has the tokens before the new text; they decide whether the new text starts with a space.
    """
    text = None if tokenizer is None else TextStream(tokenizer, prompt)
    for at, (token, logprob) in enumerate(zip(hypothesis.tokens, hypothesis.logprobs, strict=True), start=1):
        reason = hypothesis.finish_reason if at == len(hypothesis.tokens) else None
        piece = "" if text is None or reason is FinishReason.EOS else text.push(token)
        if text is not None and reason is not None:
            piece += text.flush()
        yield TokenEvent(sequence, token, piece, logprob if config.output_logprobs else None, reason)


def _expand(live: list[_Beam], logits: Logits, prompt: Tokens, config: GenerationConfig) -> list[tuple[int, _Beam]]:
    """Extend each live beam by its likeliest tokens. Return the best as pairs (index of the old beam, new beam).

    The best beam comes first. At least `num_beams` beams in the list have not ended.
    """
    if not np.isfinite(logits.max(axis=-1)).all():
        raise SessionError("the model's logits hold NaN or infinity: it overflowed, or its weights are damaged")
    own = log_softmax(logits)
    # transformers applies the rules to log-probabilities here; for greedy decoding and sampling, to logits.
    ruled = [
        process(row, np.concatenate([prompt, np.array(beam.tokens, dtype=np.int64)]), len(beam.tokens), config)
        for row, beam in zip(own, live, strict=True)
    ]
    if config.renormalize_logits:
        ruled = [log_softmax(row) if row.max() > -np.inf else row for row in ruled]
    totals = np.stack(ruled) + np.array([[beam.total] for beam in live])
    values, count = totals.ravel(), (1 + len(config.eos_token_ids)) * config.num_beams
    best = highest(values, min(count, values.size))
    best = best[values[best] > -np.inf]
    best = best[np.argsort(-values[best], kind="stable")][:count]  # the highest first; equal values by index
    expanded = []
    for parent, token in (divmod(flat, totals.shape[1]) for flat in best.tolist()):
        beam = live[parent]
        logprobs = (*beam.logprobs, float(own[parent, token]))
        expanded.append((parent, _Beam((*beam.tokens, token), logprobs, float(totals[parent, token]))))
    return expanded


def _is_over(best: _Beam, ended: list[Hypothesis], length: int, most: int, config: GenerationConfig) -> bool:
    """Return True if no live beam can beat the hypotheses in `ended`; `best` is the likeliest live beam."""
    if len(ended) < config.num_beams:
        return False
    if config.early_stopping is True:
        return True
    attainable = most if config.early_stopping == "never" and config.length_penalty > 0 else length
    return bool(best.total / attainable**config.length_penalty <= ended[-1].score)


def beam_events(
    rows: CacheRows, loop: DecodeLoop, guard: Guard, adapters: Adapters, streams: Streams,
    prompts: Sequence[ReadPrompt], config: GenerationConfig, tokenizer: TokenDecoder | None,
) -> Generator[TokenEvent]:  # fmt: skip
    """Search with beams for each prompt in turn, and yield the events of its best hypothesis.

    Raises `SlotError` if fewer batch rows are free than the search has beams, `SessionError` if a step failed.
    """
    for index, prompt in enumerate(prompts):
        slots, reader = list[int](), streams.reader()
        ids = np.array(prompt.tokens, np.int64)
        try:
            with guard.lock, guard.idle:
                streams.end_gone()
                free = min(rows.free, rows.count)
                if config.num_beams > free:
                    raise SlotError(
                        f"beam search with num_beams={config.num_beams} needs as many rows, and {free} of "
                        f"{rows.count} are free; remove sequences, or open the session with a max_batch of "
                        f"{config.num_beams} or more"
                    )
                adapter = adapters.find(config.adapter)
                for _ in range(config.num_beams):
                    slots.append(rows.take(constants=prompt.constants, adapter=adapter))
                    reader.slots.add(slots[-1])
            beams = _LiveBeams(guard, rows, loop, slots)
            logits = beams.update([prompt])[0]
            best = beam_search(ids, logits, beams, config, free_tokens=rows.free_tokens(slots[0]))[0]
        finally:
            streams.leave(reader)
        yield from hypothesis_events(best, index, config, tokenizer, ids)


class _LiveBeams:
    """Computes the next logits of the live beams, each in a batch row: at first one beam, later up to `num_beams`."""

    def __init__(self, guard: Guard, rows: CacheRows, loop: DecodeLoop, slots: Sequence[int]) -> None:
        self._guard, self._rows, self._loop = guard, rows, loop
        self._slots, self._live = list(slots), 1

    def step(self, tokens: Tokens) -> Logits:
        """Append one token to each of R live beams, int64 ``[R]``; return the next logits, float32 ``[R, V]``."""
        return self.update([ReadPrompt([token]) for token in tokens.tolist()])

    def reorder(self, indices: Tokens) -> None:
        """Make beam `i` a copy of the former beam ``indices[i]``; there are then ``len(indices)`` live beams."""
        chosen = indices.tolist()
        idle = [i for i in range(len(self._slots)) if i not in set(chosen)]
        with self._guard.lock, self._guard.idle:
            self._rows.reorder([*chosen, *idle[: len(self._slots) - len(chosen)]], self._slots)
        self._live = len(chosen)

    def update(self, prompts: Sequence[ReadPrompt]) -> Logits:
        """Append tokens to each live beam; return the logits after them, float32 ``[R, V]``."""
        live = self._slots[: self._live]
        with self._guard.lock, self._guard.idle:
            logits = self._loop.update(dict(zip(live, prompts, strict=True)), 1)
        return np.stack([logits[slot][-1] for slot in live])
