"""What goes into a session, checked before anything runs, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import CapacityError, OptionError, PromptError
from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.runtime.config import GenerationConfig
from trt_kvcache.runtime.constants import Constants
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.speculation import SpeculationStats

__all__ = ["Generation", "Given", "GivenAll", "Prompt", "PromptReader", "check_config", "for_each"]

Prompt = str | Sequence[int] | npt.NDArray[np.int64]
"""A text, where the session has a tokenizer, or token ids."""

Given = Mapping[str, npt.NDArray[Any]] | Constants
"""What a model reads beside the text, such as the output of an encoder: an array ``[1, ...]`` by name of the input."""

GivenAll = Sequence[Given] | None
"""That of each prompt, in order; None for models that read nothing else."""


@dataclass
class Generation:
    """All that became of one prompt.

    Attributes:
        prompt: its token ids.
        tokens: the new ones, with the one that ended the sequence.
        text: of the new tokens; empty without a tokenizer.
        logprobs: per token, where `GenerationConfig.output_logprobs` asks for them.
        finish_reason: why it ended.
        speculation: how well drafts did.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def take(self, event: TokenEvent) -> None:
        """Append an event."""
        if event.token is not None:
            self.tokens.append(event.token)
        if event.logprob is not None:
            self.logprobs.append(event.logprob)
        self.text += event.text
        self.finish_reason = event.finish_reason


class PromptReader:
    """Turns prompts into token ids that the model knows.

    Args:
        vocab: token ids are 0 to ``vocab - 1``.
        capacity: most tokens of a sequence, or None.
        tokenizer: for texts, or None.
    """

    def __init__(self, vocab: int, capacity: int | None, tokenizer: Any) -> None:
        self._vocab, self._capacity, self._tokenizer = vocab, capacity, tokenizer

    def read_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of several prompts, none of them empty.

        Raises:
            PromptError, CapacityError: see `read` and `check_length`.
        """
        if isinstance(prompts, str) or any(isinstance(p, (int, np.integer)) for p in prompts):
            raise PromptError("prompts is one prompt; give a list of prompts, each a text or a list of token ids")
        checked = [self.read(prompt) for prompt in prompts]
        for i, tokens in enumerate(checked):
            if not tokens:
                raise PromptError(f"prompt {i} is empty; it needs at least one token")
            self.check_length(tokens, f"prompt {i}")
        return checked

    def read(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt, which may be empty.

        Raises:
            PromptError: a text without a tokenizer, no flat list of integers, or an id that the model does not know.
        """
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise PromptError("a prompt is text, and there is no tokenizer; open the session with one, or give ids")
            prompt = self._tokenizer.encode(prompt)
        try:
            array = np.asarray(prompt)
        except ValueError:
            raise PromptError("a prompt is a nested list; token ids are a flat list of integers") from None
        if array.size == 0:
            return []
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise PromptError(f"a prompt is {array.dtype} {list(array.shape)}; token ids are a flat list of integers")
        wrong = array[(array < 0) | (array >= self._vocab)]
        if wrong.size:
            raise PromptError(f"token id {int(wrong[0])} is out of range; the model has 0 to {self._vocab - 1}")
        ids: list[int] = array.tolist()
        return ids

    def check_length(self, tokens: Sequence[int], what: str) -> None:
        """Refuse more tokens than a cache holds.

        Raises:
            CapacityError: see above.
        """
        if self._capacity is not None and len(tokens) > self._capacity:
            raise CapacityError(
                f"{what} has {len(tokens)} tokens, and a sequence may have {self._capacity}; shorten it, or use a "
                "model with a larger capacity"
            )


def check_config(config: GenerationConfig, plan: CachePlan) -> None:
    """Refuse what a model cannot do.

    Raises:
        OptionError: tokens are guessed, and the model has state that cannot go back.
    """
    if config.prompt_lookup_num_tokens and plan.states:
        raise OptionError(
            f"prompt_lookup_num_tokens guesses tokens and takes wrong ones back, and the model keeps state "
            f"('{plan.states[0].past}') that every step replaces for good; generate without it"
        )


def for_each(prompts: Sequence[Sequence[int]], constants: GivenAll) -> Sequence[Given | None]:
    """The constants of each prompt.

    Raises:
        PromptError: there are more or fewer than prompts.
    """
    if constants is None:
        return [None] * len(prompts)
    if isinstance(constants, Mapping) or len(constants) != len(prompts):
        found = "one mapping" if isinstance(constants, Mapping) else f"{len(constants)} entries"
        raise PromptError(
            f"constants is {found} for {len(prompts)} prompt(s); give a list with a mapping for each prompt"
        )
    return constants
