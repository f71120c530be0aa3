"""The decode loop: feeds token ids to a runner, and chooses the next ones from the logits, for many sequences at once.

Each step writes some waiting tokens of each sequence: a part of a prompt, or the last chosen token and guesses. The
result of a sequence does not depend on the others. While some sequences decode, a budget limits the prompt tokens of a
step, so that a long prompt does not stall the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import CapacityError, SessionError, TrtKvCacheError
from trt_kvcache.runtime.adapters import AdapterSlots
from trt_kvcache.runtime.buffers import why_no_return
from trt_kvcache.runtime.cache_rows import CacheRows
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.embeddings import Embeddings, embed_step
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.generation.token_masks import Mask, Masks, all_tokens
from trt_kvcache.runtime.requests import ReadPrompt
from trt_kvcache.runtime.runner import Logits, Runner, StepBatch
from trt_kvcache.runtime.slot import Slot
from trt_kvcache.runtime.step_inputs import StepInputs
from trt_kvcache.runtime.token_inputs import stack_positions

if TYPE_CHECKING:
    from trt_kvcache.runtime.draft import DraftModel


ASSISTED = 4
"""Tokens that a draft model guesses at a time by default."""

PREFILL_BUDGET = {"cpu": 16, "gpu": 256}
"""Most prompt tokens in a step in which other sequences decode, by device.

On two cores, SmolLM2-135M with 8 rows takes 2.6 times as long for such a step as without a prompt, and hardly less with
fewer tokens: each piece of a prompt reads all weights again. The value for GPUs is an estimate, not measured.
"""

Outcome = TokenEvent | TrtKvCacheError
"""The result of a step for one sequence: an event, or the error that ended the sequence."""

Outcomes = list[tuple[int, Outcome]]
"""Pairs of a slot and its outcome, in the order in which they happened."""


@dataclass(frozen=True)
class _Piece:
    """Consecutive tokens of one sequence that a step writes to the cache.

    Attributes:
        tokens: tokens of the sequence that are not in the cache yet, and then guesses of the next tokens.
        guesses: number of guesses at the end of `tokens`.
        keep: number of last positions whose logits are needed.
    """

    slot: int
    row: int
    start: int
    tokens: Sequence[int]
    guesses: int
    keep: int

    @property
    def waiting(self) -> int:
        return len(self.tokens) - self.guesses


@dataclass(frozen=True)
class Run:
    """A sequence that the decode loop continues.

    Attributes:
        keep_slot: True if the slot stays in use at the end of the sequence.
        outcomes: the list to which each event or error of the sequence is appended at once.
        client: the owner of the sequence; waiting clients get batch rows in turn.
    """

    slot: int
    continuation: Continuation
    keep_slot: bool
    outcomes: Outcomes
    client: Hashable


class DecodeLoop:
    """Generates the next tokens of all sequences that were added to it, step by step.

    Args:
        runner: executes the steps.
        rows: the sequences in the caches of this runner.
        embeddings: embeddings of token ids; None for models that take the ids.
        draft: the draft model, which guesses tokens; or None.
        prefill_budget: most prompt tokens in a step that also decodes other sequences.
        pause: called between two steps of a long `update`; it may raise an error.
    """

    def __init__(
        self,
        runner: Runner,
        rows: CacheRows,
        embeddings: Embeddings | None = None,
        draft: DraftModel | None = None,
        prefill_budget: int | None = None,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner, self._draft, self._embeddings = runner, draft, embeddings
        self._cache, self._adapters, self._pause = rows, AdapterSlots(runner), pause
        self._runs: dict[int, Run] = {}
        self._turns: dict[Hashable, int] = {}  # for each client: a count that rises when it comes, or gets a batch row
        inputs = StepInputs(runner.plan)
        self._uniform, self._max_rows = inputs.uniform, inputs.max_rows or runner.max_batch
        self._max_logits = runner.max_logits or runner.max_chunk
        self._no_drafts = why_no_drafts(runner)
        self._budget = prefill_budget or PREFILL_BUDGET["cpu" if runner.home is None else "gpu"]

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of the sequences that the loop continues."""
        return tuple(self._runs)

    def add(
        self, slot: int, entry: Slot, continuation: Continuation, outcomes: Outcomes, *, keep_slot: bool,
        client: Hashable = None,
    ) -> None:  # fmt: skip
        """Set the state of a slot to `entry`, and continue its sequence. `keep_slot`: do not free the slot at the end.

        If sequences wait for batch rows, clients get rows in turn. If `client` is None, the sequence is its own client.
        """
        config = continuation.config
        continuation.speculation.impossible = self._no_drafts
        if self._draft is not None and not config.prompt_lookup_num_tokens:
            continuation.assisted = ASSISTED if config.num_assistant_tokens is None else config.num_assistant_tokens
        client = object() if client is None else client
        if entry.row >= 0 or client not in self._turns:
            self._turns[client] = self._now()
        self._runs[slot] = Run(slot, continuation, keep_slot, outcomes, client)
        self._cache.slots[slot] = replace(entry, running=True)

    def remove(self, slot: int) -> Run:
        """Stop continuing the sequence in a slot, and return its `Run`. The slot keeps its tokens and caches."""
        self._cache.slot(slot).running = False
        return self._runs.pop(slot)

    def give_row(self) -> None:
        """Give free batch rows to waiting sequences. The client that has waited longest for a row comes first."""
        known = {run.client for run in self._runs.values()}
        self._turns = {client: turn for client, turn in self._turns.items() if client in known}
        waiting = [run for run in self._runs.values() if self._cache.slot(run.slot).row < 0]
        while waiting:
            run = min(waiting, key=lambda run: self._turns[run.client])
            waiting.remove(run)
            with self._alone(run.slot):
                if not self._cache.give_row(run.slot):
                    return
                self._turns[run.client] = self._now()

    def _now(self) -> int:
        return max(self._turns.values(), default=0) + 1

    def step(self) -> None:
        """Compute the next tokens of every decoding sequence, and parts of some prompts.

        If no sequence decodes, every prompt advances by as much as fits into a step of the runner. A sequence that
        fails ends with its error; other sequences continue.
        """
        seated = self._with_adapters()
        for run in seated:
            if not self._cache.slot(run.slot).length:
                with self._alone(run.slot):
                    self._cache.recall(run.slot)
        guesses = self._guess([run for run in seated if run.slot in self._runs])
        for group in self._rounds([run for run in seated if run.slot in self._runs], guesses):
            self._advance(group)

    def _advance(self, group: list[_Piece]) -> None:
        """Run one step for a group of batch rows, and choose their next tokens.

        If the step fails, repeat it for each batch row alone: only the sequence whose step fails again ends.
        """
        again = len(group) > 1
        try:
            counts = [self._runs[piece.slot].continuation.looks_at for piece in group if piece.keep]
            highest = 0 if 0 in counts else max(counts, default=0)  # 0: a sequence needs all scores
            batch = self._batch(group, highest=highest, masks=self._masks(group))
            again = again and not self._runner.plan.states  # the failed step may have replaced the state of some rows
            logits = self._write(group, batch)
        except Exception as error:  # noqa: BLE001 - it may concern some of these sequences only
            for piece in group:
                if again:
                    self._advance([piece])
                elif piece.slot in self._runs:
                    self._fail(piece.slot, error)
            return
        interrupt: BaseException | None = None
        for piece, scores in zip(group, logits, strict=True):
            if piece.keep:
                interrupt = self._choose(piece, scores[len(scores) - piece.keep :]) or interrupt
        if interrupt is not None:  # such as a KeyboardInterrupt in a caller's logits processor
            raise interrupt

    @contextmanager
    def _alone(self, slot: int) -> Iterator[None]:
        """Run the ``with`` block for one sequence; an error in it ends this sequence only."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - bugs, too: the caller of the sequence gets the error
            self._fail(slot, error)

    def _with_adapters(self) -> list[Run]:
        """Return the sequences that have a batch row and, if needed, an adapter slot. Earlier sequences come first."""
        seated = [run for run in self._runs.values() if self._cache.slot(run.slot).row >= 0]
        placed = self._adapters.reserve(self._cache.slot(run.slot).adapter for run in seated)
        return [run for run in seated if self._cache.slot(run.slot).adapter in placed]

    def update(self, tokens: Mapping[int, ReadPrompt], keep: int) -> dict[int, npt.NDArray[np.float32]]:
        """Append tokens to slots that are not generating, and write them to the cache, in as many steps as needed.

        Return the logits of the last positions by slot, float32 ``[min(keep, new tokens), V]``. If a step fails, the
        slots are restored, as far as their caches allow; a slot whose state is unknown is removed.
        """
        self._with_adapters()
        before = {name: self._cache.slot(name) for name in tokens}
        logits: dict[int, list[npt.NDArray[np.float32]]] = {name: [] for name in tokens}
        try:
            for name, more in tokens.items():
                self._cache.slots[name] = more.after(self._cache.slot(name))
            names, rows = list(tokens), self._cache.count
            for together in (names[at : at + rows] for at in range(0, len(names), rows)):
                for name in together:
                    self._cache.with_row(name, together)
                self._cache.compact()
                for name in together:
                    self._cache.recall(name, keep)
                while pieces := [self._piece(name, keep) for name in together if self._cache.slot(name).pending]:
                    for group in self._groups(pieces):
                        self._pause()
                        for piece, scores in zip(group, self._write(group, self._batch(group)), strict=True):
                            logits[piece.slot].append(scores[len(scores) - piece.keep :].astype(np.float32))
            for name in tokens:
                self._cache.remember(name)
        except BaseException:
            for name, saved in before.items():
                if name not in self._cache:
                    continue
                if self._cache.slot(name).length > saved.length:
                    with suppress(CapacityError):  # a circular cache that has wrapped meanwhile cannot go back
                        self._cache.crop(name, saved.length)
                slot = self._cache.slot(name)
                slot = slot.truncated(slot.length)
                if slot.length == saved.length:
                    slot.tokens, slot.embeds, slot.positions = saved.tokens, saved.embeds, saved.positions
                    slot.by_ids = saved.by_ids
                self._cache.slots[name] = slot
            raise
        return {name: np.concatenate(parts) for name, parts in logits.items()}

    def _guess(self, runs: Iterable[Run]) -> dict[int, list[int]]:
        guesses: dict[int, list[int]] = {}
        asked: dict[int, tuple[Continuation, int]] = {}
        for run in runs:
            text = run.continuation
            if not (text.assisted or text.config.prompt_lookup_num_tokens) or self._cache.slot(run.slot).pending > 1:
                continue
            with self._alone(run.slot):
                free_tokens = self._cache.free_tokens(run.slot)
                most = min(self._cache.largest_update(run.slot), self._max_logits) - 1
                most = most if free_tokens is None else min(most, free_tokens)
                if not text.assisted:
                    guesses[run.slot] = text.draft(most).tolist()
                elif count := text.guesses(most):
                    asked[run.slot] = text, count
        if asked and self._draft is not None:
            guesses |= self._draft.guess(asked, self._cache)
        # Ids whose embeddings the caller gives may have no embedding, and a draft may score more ids than there are.
        vocab = self._runner.vocab
        return {s: list(takewhile(lambda t: t < vocab and self._has_embedding(t), g)) for s, g in guesses.items()}

    def _rounds(self, runs: Sequence[Run], guesses: Mapping[int, list[int]]) -> Iterator[list[_Piece]]:
        """Yield the groups of tokens that the runner computes step by step: decoding sequences first, then prompts.

        If a prompt's batch row lies between decoding rows, their step also writes one token of the prompt: without
        its row, they would need two steps. The budget limits the other prompt tokens; the least recently written
        prompt comes first. A prompt that the model must see in one step is never split.
        """
        prompts = [run.slot for run in runs if run.slot in self._runs and self._cache.slot(run.slot).pending > 1]
        decoding = [run.slot for run in runs if run.slot in self._runs and run.slot not in prompts]
        last = [self._last_token(slot, guesses.get(slot, [])) for slot in decoding]
        if not decoding or not prompts:
            yield from self._groups([*self._pieces(prompts), *last])
            return
        prompts.sort(key=lambda slot: self._cache.slot(slot).used)
        rows = [self._cache.slot(slot).row for slot in decoding]
        between = [slot for slot in prompts if min(rows) < self._cache.slot(slot).row < max(rows)]
        whole = self._runner.plan.prefill_in_one_step
        yield from self._groups([*([] if whole else self._pieces(between, most=1)), *last])
        left = self._budget
        for slot in prompts:
            if left > 0 and slot in self._runs:  # a sequence that is no longer here ended with an error
                for piece in self._pieces([slot], most=None if whole else left):
                    left -= len(piece.tokens)
                    yield [piece]

    def _pieces(self, slots: Iterable[int], most: int | None = None) -> list[_Piece]:
        pieces = []
        for slot in slots:
            with self._alone(slot):
                pieces.append(self._piece(slot, most=most))
        return pieces

    def _last_token(self, name: int, draft: list[int]) -> _Piece:
        slot = self._cache.slot(name)
        return _Piece(name, slot.row, slot.length, [slot.tokens[-1], *draft], len(draft), 1 + len(draft))

    def _piece(self, name: int, keep: int = 1, most: int | None = None) -> _Piece:
        """Return the next tokens of a slot to write, as many as fit into a step; the last `keep` need logits."""
        slot = self._cache.slot(name)
        unwanted = max(0, slot.pending - keep)
        count = min(slot.pending, self._cache.largest_update(name), unwanted + self._max_logits, most or slot.pending)
        wanted = max(0, count - unwanted)
        if self._runner.plan.prefill_in_one_step and count < slot.pending:
            raise CapacityError(
                f"slot {name} has {slot.pending} tokens to write in one step, because tokens see each other in this "
                f"model, but a step returns the logits of at most {self._max_logits} positions; give a smaller keep"
            )
        return _Piece(name, slot.row, slot.length, slot.tokens[slot.length : slot.length + count], 0, wanted)

    def _groups(self, pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
        """Group neighboring batch rows that write the same number of tokens, because one step computes them."""
        group: list[_Piece] = []
        for piece in sorted(pieces, key=lambda p: p.row):
            if group and not self._fits(group, piece):
                yield group
                group = []
            group.append(piece)
        if group:
            yield group

    def _fits(self, group: list[_Piece], piece: _Piece) -> bool:
        last = group[-1]
        one, other = (self._cache.slot(p.slot) for p in (piece, last))
        fits = piece.row == last.row + 1 and len(piece.tokens) == len(last.tokens) and len(group) < self._max_rows
        if not fits or one.constants.sizes != other.constants.sizes:
            return False
        if not self._uniform:  # otherwise the tokens of all rows must have the same positions
            return True
        stacked = stack_positions([one.positions, other.positions], [piece.start, last.start], len(piece.tokens))
        return piece.start == last.start and (stacked is None or bool((stacked[0] == stacked[1]).all()))

    def _masks(self, group: list[_Piece]) -> Masks | None:
        """Return the masks of allowed tokens for each position whose logits are needed; None if no grammar is used."""
        texts = [self._runs[piece.slot].continuation for piece in group]
        masked = [piece.keep > 0 and text.masked for piece, text in zip(group, texts, strict=True)]
        if not any(masked):
            return None
        keep = max(piece.keep for piece in group)

        def read(words: int) -> Mask:
            masks = all_tokens((len(group), keep, words))
            for row in np.flatnonzero(masked):
                piece = group[row]
                masks[row, keep - piece.keep :] = texts[row].masks(piece.tokens[piece.waiting :], words)
            return masks

        return read

    def _batch(self, group: list[_Piece], *, highest: int = 0, masks: Masks | None = None) -> StepBatch:
        slots = [self._cache.slot(piece.slot) for piece in group]
        tokens = np.array([piece.tokens for piece in group], np.int64)
        starts = [piece.start for piece in group]
        embeds = None
        if self._embeddings is not None:
            embeds = embed_step(self._embeddings, tokens, starts, [slot.embeds for slot in slots])
        return StepBatch(
            first_row=group[0].row,
            tokens=tokens,
            starts=np.array(starts, np.int64),
            keep=max(piece.keep for piece in group),
            constants=tuple(slot.constants for slot in slots if slot.constants.arrays),
            embeds=embeds,
            positions=stack_positions([slot.positions for slot in slots], starts, tokens.shape[1]),
            highest=highest,
            masks=masks,
            adapters=self._adapters.place([slot.adapter for slot in slots]),
        )

    def _write(self, group: list[_Piece], batch: StepBatch) -> Logits:
        """Run a step. Return logits ``[R, positions needed, V]``, or only the highest scores of each position."""
        for piece in group:
            self._cache.note_touched(piece.slot, piece.start + batch.length)
        try:
            logits = self._runner.step(batch)
        except BaseException as error:
            # Caches may be written a second time. State may already be the new one, unless the runner itself reports
            # the failure.
            if self._runner.plan.states and not isinstance(error, TrtKvCacheError):
                for piece in group:
                    if piece.slot in self._runs:
                        self._fail(piece.slot, error)
                    self._cache.drop(piece.slot)
            raise
        for piece in group:
            self._cache.note_written(piece.slot, piece.waiting, piece.guesses)
        return logits

    def _choose(self, piece: _Piece, logits: Logits) -> BaseException | None:
        """Choose the next tokens of a sequence: its guesses as long as they are right, and one more token.

        An error ends the sequence; the error is returned if it is not an `Exception`, such as KeyboardInterrupt.
        """
        run, slot = self._runs[piece.slot], piece.slot
        told: list[TokenEvent] = []  # not read from `outcomes`: the stream's own thread may empty that at any time
        token, free_tokens, known, failure = -1, None, True, None
        try:
            for event in run.continuation.verify(piece.tokens[piece.waiting :], logits):
                told.append(event)
                run.outcomes.append((slot, event))
        except BaseException as error:  # noqa: BLE001 - tokens chosen before it are reported, and stay in the slot
            failure = error
        try:
            token = self._note_told(piece, told)
            self._cache.remember(slot)
            free_tokens, known = self._cache.free_tokens(slot), failure is not None or self._has_embedding(token)
        except Exception as error:  # noqa: BLE001 - it ends this sequence only
            failure = failure or error
        if run.continuation.finish_reason is not None and any(event.finish_reason is not None for event in told):
            self._finish(slot)
        elif failure is not None:
            self._fail(slot, failure)
        elif free_tokens is not None and free_tokens < 0:
            self._end(slot, self.last(run, FinishReason.CAPACITY))
        elif not known:
            self._end(slot, SessionError(
                f"the model chose token {token}, which has no embedding; forbid it (sequence_bias), or give embeddings "
                "that have one, such as the checkpoint's table"
            ))  # fmt: skip
        return None if isinstance(failure, Exception) else failure

    def _note_told(self, piece: _Piece, events: Sequence[TokenEvent]) -> int:
        """Append the tokens of `events` (correct guesses, and one more token) to the slot; return the last, or -1."""
        tokens = [event.token for event in events if event.token is not None]
        right = max(0, len(tokens) - 1)
        self._cache.note_chosen(piece.slot, tokens[:right], piece.guesses - right, tokens[right:])
        return tokens[-1] if tokens else -1

    def last(self, run: Run, reason: FinishReason) -> Outcome:
        """End a sequence at its caller's request, and return its last event or error."""
        try:
            return run.continuation.finish(reason)
        except Exception as error:  # noqa: BLE001 - such as the tokenizer's, in text that was held back
            return as_outcome(error)

    def _has_embedding(self, token: int) -> bool:
        return self._embeddings is None or self._embeddings.missing([token]) is None

    def _fail(self, slot: int, error: BaseException) -> None:
        self._end(slot, as_outcome(error))

    def _end(self, slot: int, outcome: Outcome) -> None:
        self._runs[slot].outcomes.append((slot, outcome))
        self._finish(slot)

    def _finish(self, slot: int) -> None:
        if not self.remove(slot).keep_slot:
            self._cache.drop(slot)


def as_outcome(error: BaseException) -> TrtKvCacheError:
    """Return the error to report for a failed sequence; other packages' errors become a `SessionError`."""
    if isinstance(error, TrtKvCacheError):
        return error
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    if not isinstance(error, Exception):
        return SessionError(f"the sequence was interrupted: {said}; start it again")
    if isinstance(error, MemoryError):
        made = SessionError("too little memory is free for the sequence; lower max_batch or max_chunk, or end others")
    else:  # a bug; its text may come from anywhere, so the message leaves it out; the cause has it, with its trace
        made = SessionError(f"the sequence failed by a bug: {type(error).__name__}; please report it with its trace")
    made.__cause__ = error
    return made


def why_no_drafts(runner: Runner) -> str:
    """Return why a model cannot verify guesses (this needs logits of several positions per step); empty if it can."""
    if why := why_no_return(runner.plan, rings=False):
        return why
    if runner.max_logits == 1 and runner.plan.logits_span is None:
        return "the model gives the logits of the last position only: export it with logits of all positions"
    if runner.max_logits == 1:
        return "the engine gives the logits of one position: build it with --max-logits 2 or more"
    if runner.max_chunk == 1:
        return "a step takes only one token: use a model that takes several, or a larger max_chunk"
    return ""
