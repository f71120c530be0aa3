"""Accepts settings of `GenerationConfig` as keyword arguments, and gives advice on names from other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from trt_kvcache.arguments import is_number
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.generation.generation_config import GenerationConfig, LogitsProcessor
from trt_kvcache.runtime.generation.token_masks import Grammar

_SAMPLING = {"temperature", "top_k", "top_p", "min_p"}
_GREEDY = {f.name: f.default for f in fields(GenerationConfig) if f.name in {"do_sample", "seed", *_SAMPLING}}


class Settings(TypedDict, total=False):
    """Fields of `GenerationConfig`; their meanings are documented there."""

    max_new_tokens: int
    min_new_tokens: int
    min_length: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    sequence_bias: Mapping[int | tuple[int, ...], float]
    bad_words_ids: Sequence[Sequence[int]]
    suppress_tokens: Sequence[int]
    begin_suppress_tokens: Sequence[int]
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor]
    grammar: Grammar | None
    eos_token_id: int | Sequence[int] | None
    stop_strings: str | Sequence[str] | None
    seed: int | None
    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    renormalize_logits: bool
    output_logprobs: bool
    top_logprobs: int
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int
    num_assistant_tokens: int | None
    adapter: str | None


def changed(config: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """Return a copy of `config` with some settings changed. Sampling settings turn `do_sample` on, unless it is given.

    ``temperature=0`` means greedy decoding, and resets the other sampling settings. Raises `OptionError` if there is no
    such setting, a value is illegal, or two values contradict each other.
    """
    known = [f.name for f in fields(GenerationConfig)]
    for name in settings:
        if name not in known:
            if said := _ELSEWHERE.get(name):
                raise OptionError(f"'{name}' is not a generation setting: {said}")
            near = SYNONYMS.get(name) or next(iter(get_close_matches(name, known, 1)), "")
            advice = f"did you mean {near}?" if near else "see GenerationConfig"
            raise OptionError(f"'{name}' is not a generation setting; {advice}")
    return replace(config, **with_sampling(settings))


def with_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with ``do_sample=True`` added if there are sampling settings, but no `do_sample`.

    ``temperature=0`` adds the settings of greedy decoding instead.
    """
    if "do_sample" in settings or not _SAMPLING & settings.keys():
        return dict(settings)
    temperature = settings.get("temperature")
    if is_number(temperature) and temperature == 0:
        return {**settings, **_GREEDY}
    return {"do_sample": True, **settings}


_ELSEWHERE = {
    **dict.fromkeys(("n", "num_return_sequences"), "repeat the prompt in a list, with do_sample=True"),
    **dict.fromkeys(("stream", "streamer"), "call session.stream, or session.stream_chat for messages"),
    **dict.fromkeys(("pad_token_id", "padding", "attention_mask"), "nothing is padded here; leave it out"),
    **dict.fromkeys(("use_cache", "cache_implementation", "past_key_values"), "there are always caches; leave it out"),
    **dict.fromkeys(
        ("return_dict_in_generate", "output_scores"), "results are always objects; for scores set output_logprobs"
    ),
    **dict.fromkeys(
        ("typical_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), "this kind of sampling is not supported"
    ),
}
"""Names from transformers, vLLM and OpenAI that are not settings here, each with advice on what to use instead."""

SYNONYMS = {
    "max_tokens": "max_new_tokens", "max_length": "max_new_tokens", "n_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens", "stop": "stop_strings", "logit_bias": "sequence_bias", "best_of": "num_beams",
    "lora": "adapter", "adapter_name": "adapter", "lora_request": "adapter",
    "beam_width": "num_beams", "sample": "do_sample", "logprobs": "output_logprobs", "random_seed": "seed",
    "temp": "temperature",
    "stop_token_ids": "eos_token_id", "token_mask": "grammar", "response_format": "grammar", "end_id": "eos_token_id",
}  # fmt: skip
"""Other names of these settings, as vLLM, transformers, TensorRT-LLM and OpenAI's API use them."""
