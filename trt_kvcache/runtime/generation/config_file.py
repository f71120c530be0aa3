"""Reads transformers' ``generation_config.json`` into the fields of `GenerationConfig`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from trt_kvcache.arguments import shown
from trt_kvcache.engine.token_settings import load_settings
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.generation.generation_config import GenerationConfig, idle_settings

__all__ = ["read_config_file"]

_WITHOUT_EFFECT = {
    # Ids of other tokens, how transformers runs and what it returns: these do not change which tokens are chosen.
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config",
    "_commit_hash", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache",
    "low_memory", "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
    "remove_invalid_values",
}  # fmt: skip

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # Ways of choosing tokens that are not supported, and the values that turn them off.
    "constraints": (),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "force_words_ids": (),
    "guidance_scale": (1.0,),
    "max_time": (),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1.0,),
    "use_mtp": (False,),
    "watermarking_config": (),
}

_SAID = {"forced_decoder_ids", "max_length"}
"""Settings with messages of their own."""


def read_config_file(path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the file sets, with `changes` in place of the file's.

    Args:
        path: transformers' ``generation_config.json``.
        changes: fields of `GenerationConfig`.

    Warns:
        UserWarning: for settings without effect.

    Raises:
        OptionError: the file is unreadable, or asks for something that is not supported.
    """
    content = {key: value for key, value in load_settings(path).items() if value is not None}
    known = {field.name for field in fields(GenerationConfig)} - _WITHOUT_EFFECT
    strange = content.keys() - known - _WITHOUT_EFFECT - _UNSUPPORTED.keys() - _SAID
    if len(strange) > 1 and strange == content.keys():
        raise OptionError(
            f"{path} has none of the settings of a generation_config.json, but {', '.join(sorted(strange)[:4])}; give "
            "the file of that name"
        )
    for key in sorted(content.keys() - known - _WITHOUT_EFFECT):
        _check_other(path, key, content[key], changes)
    settings = {key: content[key] for key in known & content.keys()}
    if "sequence_bias" in settings:
        settings["sequence_bias"] = _sequence_bias(path, settings["sequence_bias"])
    settings.update(changes)
    # Models come with such files (a temperature without do_sample); transformers ignores the setting with a warning,
    # too.
    for switch, names in idle_settings(settings).items():
        for name in [name for name in names if name not in changes]:
            _warn(path, f"{name}={shown(settings.pop(name))} has no effect without {switch}; ignored")
    return settings


def _check_other(path: Path, key: str, value: Any, changes: Mapping[str, Any]) -> None:
    if key in _UNSUPPORTED:
        if (tuple(value) if isinstance(value, list) else value) not in _UNSUPPORTED[key]:
            raise OptionError(
                f"{path}: {key}={shown(value)} is not supported; remove it from the file, or do without it"
            )
    elif key == "forced_decoder_ids":
        raise OptionError(
            f"{path}: {key}={shown(value)} is not supported; give these tokens as the prompt, and remove it from the "
            "file"
        )
    elif key == "max_length":
        if "max_new_tokens" not in changes:
            _warn(path, f"max_length={value} counts the prompt too and is ignored; say max_new_tokens")
    else:
        _warn(path, f"{key} is not a setting of transformers' GenerationConfig; ignored")


def _sequence_bias(path: Path, value: Any) -> dict[tuple[int, ...], float]:
    """Return transformers' JSON form, ``[[[token, ...], bias], ...]``, as a mapping."""
    try:
        if not isinstance(value, list):
            raise TypeError
        return {tuple(int(token) for token in tokens): float(bias) for tokens, bias in value}
    except (TypeError, ValueError):
        raise OptionError(f"{path}: sequence_bias is {shown(value)}; supported: [[[token, ...], bias], ...]") from None


def _warn(path: Path, message: str) -> None:
    warnings.warn(f"{path}: {message}", UserWarning, stacklevel=2)
