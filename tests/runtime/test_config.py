"""Settings are checked when they are made, and transformers' files mean here what they mean there."""

import json
import math
import warnings
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.hash_runner import HashRunner

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.engine.engine_folder import settings_beside
from trt_kvcache.errors import OptionError, TrtKvCacheError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, above max_new_tokens 8"),
        ({"do_sample": 1}, "do_sample is 1; it must be True or False"),
        ({"do_sample": True, "temperature": 0.0}, "for the most probable token do not sample"),
        ({"do_sample": True, "top_p": 0.0}, "top_p is 0.0; supported: above 0 and at most 1"),
        ({"do_sample": True, "min_p": -0.1}, "min_p is -0.1"),
        ({"temperature": 0.7}, r"temperature=0.7 has no effect without do_sample=True"),
        ({"top_k": 3, "top_p": 0.5}, r"top_k=3, top_p=0.5 has no effect"),
        ({"length_penalty": 2.0}, "length_penalty=2.0 has no effect without num_beams above 1"),
        ({"early_stopping": "always"}, 'supported: True, False or "never"'),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is \[1, -1\]"),
        ({"stop_strings": ["a", ""]}, "stop_strings is .*; supported: texts of at least one character"),
        ({"seed": -1}, "seed is -1"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2 cannot be combined with do_sample"),
        ({"num_beams": 2, "do_sample": True, "top_k": 0, "top_p": 0.5}, "combined with top_k=0 and top_p=0.5, which"),
        ({"num_beams": 2, "prompt_lookup_num_tokens": 3}, "cannot be combined with prompt_lookup_num_tokens"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens is 0"),
        ({"min_length": -1}, "min_length is -1"),
        ({"bad_words_ids": [5]}, r"bad_words_ids is \[5\]; supported: runs of token ids, such as \[\[5\], \[7, 8\]\]"),
        ({"bad_words_ids": [[-5]]}, "supported: runs of token ids"),
        ({"suppress_tokens": [-5]}, r"suppress_tokens is \[-5\]; supported: token ids, 0 or more"),
        ({"forced_bos_token_id": [1]}, r"forced_bos_token_id is \[1\]; it must be a whole number"),
        ({"forced_eos_token_id": -1}, "forced_eos_token_id is -1"),
        ({"forced_eos_token_id": [2, 3], "suppress_tokens": [1, 2, 3]}, r"is \[2, 3\], which suppress_tokens forbids"),
        ({"exponential_decay_length_penalty": (0.5, 1.5)}, "exponential_decay_length_penalty is"),
        ({"exponential_decay_length_penalty": (5, 0.0)}, "a factor above 0"),
        ({"logits_processor": 5}, "logits_processor is 5; supported: a function, or several"),
        ({"top_logprobs": 3}, "top_logprobs=3 has no effect without output_logprobs=True"),
        ({"top_logprobs": -1, "output_logprobs": True}, "top_logprobs is -1; it must be at least 0"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf; it must be a finite number"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1'; it must be a finite number"),
        ({"renormalize_logits": True}, "renormalize_logits=True has no effect without num_beams above 1"),
        ({"sequence_bias": {(): 1.0}}, "sequence_bias is"),
        ({"sequence_bias": {1: math.inf}}, "sequence_bias is .*inf"),
        ({"sequence_bias": [1, 2]}, "sequence_bias is"),
    ],
    ids=str,
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GenerationConfig(**settings)


NONE = {
    "beyond float64": 10**400, "below": -(10**400), "beyond decimals": 10**5000, "nan": math.nan, "inf": math.inf,
    "-inf": -math.inf, "switch": True, "NumPy's": np.bool_(True), "huge": 1e300, "as much below": -1e300,
    "next to nothing": 5e-324, "text": "1", "bytes": b"1", "None": None, "complex": 1j,
    "list": [1],
}  # fmt: skip
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
)
WHOLE = ("max_new_tokens", "min_new_tokens", "min_length", "top_k", "no_repeat_ngram_size", "seed", "num_beams",
         "prompt_lookup_num_tokens", "max_matching_ngram_size")  # fmt: skip
IDS = ("eos_token_id", "forced_bos_token_id", "forced_eos_token_id")


@pytest.mark.parametrize("value", NONE.values(), ids=NONE)
def test_numbers_that_are_none(value: Any) -> None:
    """Each is refused by the name of its setting, or decodes: none ends in a trace after the first tokens."""
    settings = [{name: value} for name in (*NUMBERS, *WHOLE, *IDS)]
    settings += [{"exponential_decay_length_penalty": pair} for pair in ((1, value), (value, 1.5), (value, value))]
    settings += [{"sequence_bias": {5: value}}, {"suppress_tokens": [value]}, {"bad_words_ids": [[value]]}]
    for setting in settings:
        (name,) = setting
        beams = {"num_beams": 2} if name == "length_penalty" else {}
        drawn = {"do_sample": True} if name in ("temperature", "top_k", "top_p", "min_p", "seed") else {}
        try:
            config = GenerationConfig(**{"max_new_tokens": 3, **beams, **drawn, **setting})
        except OptionError as error:
            said = str(error)
        else:
            said = name
            with DecodeSession(HashRunner()) as session, suppress(TrtKvCacheError):
                session.generate([[1, 2]], config)
        assert name in said
        assert len(said) < 400


def test_numbers_of_any_type_are_plain_ones() -> None:
    """A byte's 255 has no number above it, and NumPy's or a Fraction's are no numbers of JSON."""
    config = GenerationConfig(
        max_new_tokens=np.uint8(255), temperature=Fraction(1, 2), top_p=np.float16(0.5), do_sample=True,
        seed=np.int8(3), exponential_decay_length_penalty=[np.uint8(0), 2],
    )  # fmt: skip
    values = (config.max_new_tokens, config.temperature, config.top_p, config.seed)
    assert [type(value) for value in values] == [int, float, float, int]
    assert config.exponential_decay_length_penalty == (0, 2.0)
    with DecodeSession(HashRunner()) as session:
        assert len(session.generate([[1, 2]], replace(config, max_new_tokens=5))[0].tokens) == 5


def written(folder: Path, settings: object) -> Path:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


CHAT = {
    "_from_model_config": True, "bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128009],
    "pad_token_id": None, "temperature": 0.6, "top_p": 0.9, "num_return_sequences": 1, "suppress_tokens": [],
    "sequence_bias": [[[7, 8], -2.5]], "transformers_version": "5.23.0",
}  # fmt: skip
SPEECH: dict[str, Any] = {
    "bad_words_ids": [[58100]], "begin_suppress_tokens": [220, 50257], "early_stopping": True,
    "forced_bos_token_id": 0, "forced_eos_token_id": 2, "length_penalty": 2.0, "min_length": 56,
    "no_repeat_ngram_size": 3, "num_beams": 4, "renormalize_logits": True, "suppress_tokens": [1, 7],
}  # fmt: skip


def test_files_of_transformers(tmp_path: Path) -> None:
    """As shipped with chat models, and with BART, Marian and Whisper: nothing is said of settings that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat = GenerationConfig.from_file(written(tmp_path, CHAT), max_new_tokens=9, temperature=0.5)
        speech = GenerationConfig.from_file(written(tmp_path, SPEECH))
    assert chat == GenerationConfig(
        max_new_tokens=9, do_sample=True, temperature=0.5, top_p=0.9, top_k=50, eos_token_id=[128001, 128009],
        sequence_bias={(7, 8): -2.5},
    )  # fmt: skip
    assert speech == GenerationConfig(**SPEECH)
    path = written(tmp_path, {"temperature": 0.9})  # counts once sampling is on
    assert GenerationConfig.from_file(path, do_sample=True).temperature == 0.9
    with pytest.raises(OptionError, match="temperature=0.5 has no effect"):
        GenerationConfig.from_file(written(tmp_path, {}), temperature=0.5)


def test_what_files_beside_a_model_say_of_its_tokens(tmp_path: Path) -> None:
    """The way to draw tokens is a choice; the tokens that end a text are none."""
    model = tmp_path / "model.onnx"
    assert settings_beside(model) == {}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"eos_token_id": [1, 2], "vocab_size": 9}}))
    assert settings_beside(model) == settings_beside(tmp_path) == {"eos_token_id": [1, 2]}
    written(
        tmp_path,
        {"do_sample": True, "top_p": 0.9, "eos_token_id": [1, 106], "suppress_tokens": [5], "bad_words_ids": None},
    )
    assert settings_beside(model) == {"eos_token_id": [1, 106], "suppress_tokens": [5]}
    config = GenerationConfig.for_model(str(model), suppress_tokens=[6], max_new_tokens=3)
    assert config == GenerationConfig(eos_token_id=[1, 106], suppress_tokens=[6], max_new_tokens=3)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(OptionError, match="generation_config.json is not JSON"):
        settings_beside(model)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "llama", "eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": 2}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [1, 106]}}, {"eos_token_id": [1, 106]}),
        ({"eos_token_id": 3, "text_config": {"eos_token_id": 2}}, {"eos_token_id": 3}),
        ({"decoder": {"eos_token_id": 2, "vocab_size": 9}, "text_config": []}, {"eos_token_id": 2}),
        ({"forced_eos_token_id": 4, "bad_words_ids": [[5]]}, {"forced_eos_token_id": 4, "bad_words_ids": [[5]]}),
        ({"model_type": "llama"}, {}),
    ],
    ids=str,
)
def test_config_json_counts_where_there_is_no_generation_config(
    config: dict[str, Any], found: dict[str, Any], tmp_path: Path
) -> None:
    """As in transformers; what onnxruntime-genai made of it counts more."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = tmp_path / "model.onnx"
    assert settings_beside(model) == found
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"eos_token_id": 8}}))
    assert settings_beside(model) == {**found, "eos_token_id": 8}
    written(tmp_path, {"suppress_tokens": [5]})
    assert settings_beside(model) == {"eos_token_id": 8, "suppress_tokens": [5]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, "temperature=0.9 has no effect without do_sample=True; ignored"),
        ({"max_length": 4096}, "max_length=4096 is ignored, because it counts the prompt, too; use max_new_tokens"),
        ({"frobnicate": 1}, "frobnicate is not a setting of transformers"),
    ],
    ids=str,
)
def test_what_has_no_effect_is_said(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, settings)
    with pytest.warns(UserWarning, match="ignored") as said:
        config = GenerationConfig.from_file(path)
    assert config == GenerationConfig()
    assert message in str(said[0].message)
    assert str(path) in str(said[0].message)


@pytest.mark.parametrize("file", ["generation_config.json", "genai_config.json", "config.json"])
def test_a_wrong_value_in_a_file_is_told_with_its_name(file: str, tmp_path: Path) -> None:
    """Unless another value counts."""
    settings = {"eos_token_id": "</s>", "suppress_tokens": [3]}
    (tmp_path / file).write_text(json.dumps({"model": settings} if "genai" in file else settings))
    model = tmp_path / "model.onnx"
    with pytest.raises(OptionError, match=rf"{file}: eos_token_id is '</s>'; supported: a token id"):
        GenerationConfig.for_model(model)
    assert GenerationConfig.for_model(model, eos_token_id=4).suppress_tokens == (3,)
    with pytest.raises(OptionError, match="^top_p=0.5 has no effect"):
        GenerationConfig.for_model(model, eos_token_id=4, top_p=0.5)
    if file != "generation_config.json":
        written(tmp_path, {"eos_token_id": 4})
        assert GenerationConfig.for_model(model).eos_token_ids == (4,)
    else:
        with pytest.raises(OptionError, match=rf"{file}: eos_token_id is '</s>'"):
            GenerationConfig.from_file(tmp_path / file)
        with pytest.raises(OptionError, match="^seed is -1"):
            GenerationConfig.from_file(tmp_path / file, seed=-1)


NONE_OF_IT = "has none of the settings of a generation_config.json, but .*model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds list"),
        ('{"sequence_bias": {"78": 1}}', "sequence_bias is"),
        (None, "cannot be read"),
        ('{"typical_p": 0.9}', "typical_p=.* is not supported"),
        ('{"forced_decoder_ids": [[1, null], [2, 50359]]}', "forced_decoder_ids=.* is not supported"),
        ('{"num_beam_groups": 2}', "num_beam_groups=.* is not supported"),
        ('{"guidance_scale": 1.5}', "guidance_scale=.* is not supported"),
        ('{"penalty_alpha": 0.6}', "penalty_alpha=.* is not supported"),
        ('{"version": "1.0", "truncation": null, "added_tokens": [], "model": {}}', NONE_OF_IT),
        ('{"model": {}, "search": {}}', NONE_OF_IT),
    ],
)
def test_files_that_cannot_be_used(text: str | None, message: str, tmp_path: Path) -> None:
    """Broken, of another kind, or with other ways of choosing tokens."""
    path = tmp_path / "generation_config.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=message):
        GenerationConfig.from_file(path)
