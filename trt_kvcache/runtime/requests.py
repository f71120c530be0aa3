"""Checks the prompts of a session before anything runs, and defines the results of `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.arguments import as_list, is_whole, shown
from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import OptionError, PromptError
from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.runtime.buffers import why_no_return
from trt_kvcache.runtime.cache_rows import CacheRows
from trt_kvcache.runtime.embeddings import Embeddings, embedded_input, is_float
from trt_kvcache.runtime.encoders.constants import NO_CONSTANTS, ConstantInputs, Constants
from trt_kvcache.runtime.events import FinishReason, SpeculationStats, TokenEvent
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.runner import Runner
from trt_kvcache.runtime.slot import Slot
from trt_kvcache.runtime.token_inputs import Array, PositionInput, read_ids

Prompt = str | Sequence[int] | npt.NDArray[np.int64]
"""A prompt: token ids, or a text if the session has a tokenizer."""

ConstantValues = Mapping[str, npt.NDArray[Any]] | Constants
"""Inputs beside the tokens, such as an encoder's output: an array ``[1, ...]`` for each input's name."""

ConstantsAll = Sequence[ConstantValues] | None
"""For each prompt in order: values of the inputs beside the tokens; None for models that have no such inputs."""

EmbedsAll = Sequence[npt.NDArray[Any] | None] | None
"""Embeddings ``[S, H]`` for the tokens of each prompt, in order; None for a prompt that has only ids."""

PositionsAll = Sequence[npt.ArrayLike | None] | None
"""For each prompt in order: positions ``[S]``, or ``[planes, S]`` (M-RoPE: 3 planes); None if they are consecutive."""


@dataclass
class Generation:
    """The result of one prompt.

    Attributes:
        prompt: token ids of the prompt.
        tokens: new tokens, including the one that ended the sequence.
        text: text of the new tokens; empty without a tokenizer.
        logprobs: log-probability of each new token, if `GenerationConfig.output_logprobs` is set.
        top_logprobs: for each new token, the most probable tokens and their log-probabilities, if
            `GenerationConfig.top_logprobs` is set.
        finish_reason: why the sequence ended.
        speculation: counts of guessed and accepted tokens.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def take(self, event: TokenEvent) -> None:
        """Add the token, text and other data of one event to the result."""
        if event.token is not None:
            self.tokens.append(event.token)
        if event.logprob is not None:
            self.logprobs.append(event.logprob)
        if event.top_logprobs:
            self.top_logprobs.append(event.top_logprobs)
        self.text += event.text
        self.finish_reason = event.finish_reason


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """One prompt after all checks, in the form that the decode loop takes.

    Attributes:
        embeds: ``[S, H]`` in the model's dtype, in place of the tokens' embeddings; None: they are looked up.
        positions: int64 ``[planes, S]`` (planes: positions per token); None: the next positions.
        constants: inputs of the model that stay the same in all steps of this prompt.
    """

    tokens: list[int]
    embeds: Array | None = None
    positions: npt.NDArray[np.int64] | None = None
    constants: Constants = NO_CONSTANTS

    def after(self, slot: Slot) -> Slot:
        """Return a copy of `slot` with the tokens of this prompt appended. These are not in the cache yet."""
        return slot.appended(self.tokens, self.embeds, self.positions)


class PromptReader:
    """Checks the prompts of callers, and turns texts into token ids. Without a tokenizer, messages contain `why`."""

    def __init__(
        self, runner: Runner, rows: CacheRows, embeddings: Embeddings | None, tokenizer: Any, why: str = ""
    ) -> None:
        self._runner, self._rows, self._tokenizer, self._why = runner, rows, tokenizer, why
        self._constants = ConstantInputs(runner.plan, runner.home)
        self._embeddings, self._tensor = embeddings, embedded_input(runner.plan)
        self._positions = PositionInput(runner.plan)

    @property
    def vocab(self) -> int:
        """Size of the usable vocabulary: token ids are 0 to ``vocab - 1``."""
        return self._runner.vocab if self._embeddings is None else min(self._runner.vocab, self._embeddings.rows)

    def takes(self, token: int) -> bool:
        """Return True if a prompt may have this token id although the caller gives no embedding for it."""
        known = is_whole(token) and 0 <= token < self.vocab
        return known and (self._embeddings is None or self._embeddings.missing([token]) is None)

    def read_all(
        self, prompts: Sequence[Prompt], constants: ConstantsAll, inputs_embeds: EmbedsAll, positions: PositionsAll
    ) -> list[ReadPrompt]:
        """Check several prompts, none empty, and their other inputs; return them in order.

        Raises `PromptError` as `read` does, or if other inputs and prompts differ in number; `CapacityError` if a
        prompt is too long.
        """
        entries = "prompts, each a text or a list of token ids"
        prompts = as_list(prompts, "prompts", entries, PromptError)
        embeds = for_each(prompts, inputs_embeds, "inputs_embeds", "an array or None")
        places = for_each(prompts, positions, "positions", "an array or None")
        checked = [self.read(*v) for v in zip(prompts, embeds, places, strict=True)]
        for i, prompt in enumerate(checked):
            if not prompt.tokens:
                raise PromptError(f"prompt {i} is empty; it needs at least one token")
            self.after(Slot(-1), prompt, f"prompt {i}")
        beside = [self._constants.read(v) for v in for_each(checked, constants, "constants", "a mapping")]
        return [replace(prompt, constants=v) for prompt, v in zip(checked, beside, strict=True)]

    def read_added(
        self, slot: int | None, prompt: Prompt, constants: Any, inputs_embeds: Any, positions: Any
    ) -> tuple[ReadPrompt, Slot]:
        """Check a prompt to append to a slot (None: a new slot). Return it, and the state of the slot after that.

        Raises `PromptError` (see `read`; or there is nothing to run), `CapacityError` (slot and prompt are too long) or
        `SlotError` (the slot is not in use, or is generating).
        """
        entry = Slot(-1) if slot is None else self._rows.idle(slot)
        new = self.read(prompt, inputs_embeds, positions)
        if not new.tokens and not entry.pending:
            raise PromptError("the prompt is empty; it needs at least one token")
        if slot is None:
            new = replace(new, constants=self._constants.read(constants))
        return new, self.after(entry, new, "the prompt" if slot is None else f"slot {slot} with the prompt")

    def read_updates(
        self, tokens: Mapping[int, Prompt], inputs_embeds: Mapping[int, Any], positions: Mapping[int, Any]
    ) -> dict[int, ReadPrompt]:
        """Check the tokens that a caller wants to write to slots. Return them by slot. Errors: see `read_added`."""
        for name, mapping in (("tokens", tokens), ("inputs_embeds", inputs_embeds), ("positions", positions)):
            if not isinstance(mapping, Mapping):
                raise PromptError(f"{name} is {shown(mapping)}; give a mapping from slots to their values")
        if unknown := [slot for slot in (*inputs_embeds, *positions) if slot not in tokens]:
            raise PromptError(f"slot {unknown[0]} has embeddings or positions, but no tokens; give token ids, too")
        checked = {}
        for slot, ids in tokens.items():
            entry = self._rows.idle(slot)
            checked[slot] = self.read(ids, inputs_embeds.get(slot), positions.get(slot))
            if not checked[slot].tokens and not entry.pending:
                raise PromptError(f"slot {slot}: no tokens to write; give at least one")
            self.after(entry, checked[slot], f"slot {slot}")
        return checked

    def after(self, entry: Slot, prompt: ReadPrompt, what: str) -> Slot:
        """Return the state of a slot with a prompt appended. Raises `CapacityError` if it exceeds the cache."""
        after = prompt.after(entry)
        self._rows.check(after, what)
        return after

    def read(self, prompt: Prompt, inputs_embeds: Any, positions: Any) -> ReadPrompt:
        """Check one prompt, which may be empty. Return its token ids together with its other inputs.

        Raises `PromptError` if the prompt is not text or a flat list of known ids, a tokenizer is missing, or
        embeddings or positions do not fit the tokens or the model.
        """
        if isinstance(prompt, str):
            prompt = self.text_tokenizer("a prompt").encode(prompt)
        tokens = read_ids(prompt, self._runner.vocab)
        if inputs_embeds is None:
            self._check_embeddings(tokens)
        embeds = None if inputs_embeds is None else self._embeds(inputs_embeds, len(tokens))
        places = None if positions is None else self._positions.read(positions, len(tokens))
        return ReadPrompt(tokens, embeds, places)

    def _check_embeddings(self, tokens: Sequence[int]) -> None:
        missing = None if self._embeddings is None else self._embeddings.missing(tokens)
        if missing is None:
            return
        if missing >= self.vocab:
            raise PromptError(f"token id {missing} is out of range; there are embeddings for 0 to {self.vocab - 1}")
        raise PromptError(
            f"token id {missing} has no embedding of its own: an image or sound stands in its place; give "
            "inputs_embeds, with the outputs of the model's encoders"
        )

    def text_tokenizer(self, what: str) -> Any:
        """Return the tokenizer. Raises `PromptError` if there is none; `what` names the text that needs it."""
        if self._tokenizer is None:
            raise PromptError(f"{what} is text, and {self._why}; open the session with --tokenizer, or give token ids")
        return self._tokenizer

    def _embeds(self, values: Any, count: int) -> Array:
        if self._tensor is None:
            raise PromptError("the prompt has inputs_embeds, but the model takes token ids; leave them out")
        array, width = np.asarray(values), self._tensor.shape[-1]
        array = array[0] if array.ndim == 3 and len(array) == 1 else array
        if array.shape != (count, width) or not is_float(array.dtype):
            raise PromptError(
                f"inputs_embeds are {array.dtype} {list(array.shape)}; for a prompt of {count} ids the model takes "
                f"{self._tensor.dtype} [{count}, {width}]: one embedding for each id. This includes the ids of "
                "images, which are only placeholders"
            )
        with np.errstate(over="ignore"):  # overflows are found below; a copy, because the caller may change the array
            embeds = np.array(array, array_dtype(self._tensor.dtype), order="C")
        if not np.isfinite(embeds).all():
            raise PromptError(
                f"inputs_embeds hold NaN or infinity as {embeds.dtype}; give numbers that the model can read"
            )
        return embeds


def is_one(prompts: object) -> bool:
    """Return True for one prompt (a text or a flat list of token ids); False for a list of prompts."""
    if hasattr(prompts, "__array__"):  # arrays of NumPy and tensors of torch
        return np.ndim(np.asarray(prompts)) == 1 and np.asarray(prompts).dtype.kind in "iuf"
    if isinstance(prompts, Sequence) and not isinstance(prompts, (str, bytes)):
        return any(isinstance(entry, (int, float, np.number)) for entry in prompts)
    return isinstance(prompts, str)


def check_config(config: object, plan: CachePlan, *, draft: bool) -> None:
    """Raise `OptionError` if `config` is not a GenerationConfig, or asks for guesses that this model cannot use.

    `draft` is True if there is a draft model. A model with state cannot take wrong guesses back.
    """
    if not isinstance(config, GenerationConfig):
        kind = type(config)
        if isinstance(config, Mapping):
            said = "a dict; give its entries by name, as in generate(prompt, **settings)"
        elif kind.__name__ == "GenerationConfig":
            library = kind.__module__.partition(".")[0]
            said = f"of {library}; save it, and give trt_kvcache.GenerationConfig.from_file(FILE)"
        else:
            said = f"{kind.__name__}; give a GenerationConfig"
        raise OptionError(f"config is {said}")
    if config.prompt_lookup_num_tokens and (why := why_no_return(plan, rings=False)):
        raise OptionError(
            f"prompt_lookup_num_tokens must be able to take wrong guesses back, but {why}; generate without it"
        )
    if config.num_assistant_tokens and not draft:
        raise OptionError(
            f"num_assistant_tokens is {config.num_assistant_tokens}, but the session has no draft model; open it "
            "with draft=..., or leave it out"
        )


def for_each(prompts: Sequence[Any], values: Sequence[Any] | None, name: str, entry: str) -> Sequence[Any]:
    """Return `values`, or one None per prompt if it is None. Raises `PromptError` if there is not one per prompt."""
    if values is None:
        return [None] * len(prompts)
    several = [] if isinstance(values, Mapping) else as_list(values, name, f"{entry} for each prompt", PromptError)
    if len(several) != len(prompts):
        amount = "one mapping" if isinstance(values, Mapping) else f"{len(several)} entries"
        raise PromptError(f"{name} is {amount} for {len(prompts)} prompt(s); give a list with {entry} for each prompt")
    return several
