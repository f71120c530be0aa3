"""A session finds what lies beside a model, as the command line does, and takes one prompt and settings by name."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy
import numpy.typing
import pytest

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

import onnx
from commands import invoke
from decoders import DecoderConfig, write_decoder
from foreign_decoders import make_foreign
from runtime.hash_runner import HashRunner
from runtime.tokenizers_in_code import byte_level
from serve.models import write_served

from trt_kvcache import DecodeSession, GenerationConfig, decoding
from trt_kvcache.decoding import CpuOptions, GpuOptions, Settings
from trt_kvcache.errors import OptionError, PromptError, TrtKvCacheError
from trt_kvcache.runtime.generation.settings import SYNONYMS

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HELLO = [{"role": "user", "content": "the cache"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return write_served(tmp_path_factory.mktemp("model"), capacity=64, template=TEMPLATE, **named)


def said_by_command(folder: Path, *arguments: str) -> dict[str, Any]:
    result = invoke("generate", folder, *arguments, "--json")
    found: dict[str, Any] = json.loads(result.stdout)["sequences"][0]
    return found


def test_text_in_text_out(folder: Path) -> None:
    """The tokens and the text of the command, with the tokenizer beside the model."""
    with DecodeSession.open(folder) as session:
        made = session.generate("the cache", max_new_tokens=9)
        (listed,) = session.generate(["the cache"], max_new_tokens=9)
        answer = session.chat(HELLO, max_new_tokens=9)
        assert session.config.eos_token_ids == (byte_level().token_to_id("</s>"),)
    found = said_by_command(folder, "--prompt", "the cache", "--max-new-tokens", "9")
    assert (made.tokens, made.text) == (listed.tokens, listed.text) == (found["tokens"], found["text"])
    assert (
        answer.tokens == said_by_command(folder, "--prompt", "the cache", "--chat", "--max-new-tokens", "9")["tokens"]
    )


def test_texts_end_where_the_model_says(folder: Path, tmp_path: Path) -> None:
    """Without a config, with one that names no end, by stream and by add; ``()`` is no end."""
    shutil.copy(folder / "model.onnx", tmp_path)
    with DecodeSession.open(tmp_path) as session:
        tokens = session.generate([5, 6, 7], max_new_tokens=8).tokens
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[2]]}))
    ended = tokens[: tokens.index(tokens[2]) + 1]
    config = GenerationConfig(max_new_tokens=8)
    with DecodeSession.open(tmp_path) as session:
        assert session.generate([5, 6, 7], max_new_tokens=8).tokens == ended
        assert session.generate([5, 6, 7], config).tokens == ended
        assert session.generate([[5, 6, 7]], config)[0].tokens == ended
        assert [event.token for event in session.stream([5, 6, 7], config)] == ended

        async def streamed() -> list[int | None]:
            return [event.token async for event in session.astream([5, 6, 7], max_new_tokens=8)]

        assert asyncio.run(streamed()) == ended
        session.add([5, 6, 7], config)
        assert [event.token for _ in ended for event in session.step()] == ended
        assert session.running == ()
        assert session.generate([5, 6, 7], config, eos_token_id=()).tokens == tokens
        other = GenerationConfig(max_new_tokens=8, eos_token_id=299)
        assert session.generate([5, 6, 7], other).tokens == tokens


def test_a_tokenizer_that_is_not_there_is_named_where_text_needs_it(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "model.onnx", tmp_path)
    with DecodeSession.open(tmp_path) as session:
        for call in (lambda: session.generate("text"), lambda: session.chat(HELLO)):
            with pytest.raises(PromptError, match=r"is text, and there is no .*tokenizer\.json; open the session"):
                call()
    (tmp_path / "tokenizer.json").write_text("{}")
    with DecodeSession.open(tmp_path) as session:
        with pytest.raises(PromptError, match=r"is text, and .*is not a tokenizer\.json that this"):
            session.generate("text")
        assert len(session.generate([1, 2], max_new_tokens=2).tokens) == 2
    with DecodeSession.open(folder, tokenizer=False) as session, pytest.raises(PromptError, match="there is no token"):
        session.generate("text")
    with DecodeSession(HashRunner(), type("Other", (), {"encode": None, "decode": str})()) as session:
        with pytest.raises(PromptError, match="needs a tokenizer with a chat template"):
            session.chat(HELLO)
        for messages in ("Hello", [], ["Hello"], None):
            with pytest.raises(PromptError, match="give a list of messages, such as"):
                session.chat(messages)  # type: ignore[arg-type]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("config", "capacity"),
    [
        ({}, 4096),
        ({"config.json": {"max_position_embeddings": 96}}, 96),
        ({"config.json": {"text_config": {"n_positions": 80}}}, 80),
        ({"genai_config.json": {"model": {"context_length": 72}}}, 72),
        ({"config.json": {"max_position_embeddings": 131072}}, 4096),
        (
            {"config.json": {"max_position_embeddings": True, "n_positions": -1}, "genai_config.json": {"model": []}},
            4096,
        ),
    ],
)
def test_caches_that_grow_get_a_capacity(tmp_path: Path, config: dict[str, Any], capacity: int) -> None:
    onnx.save(make_foreign("concat", DecoderConfig(vocab=300, layers=1)), tmp_path / "model.onnx")
    for name, content in config.items():
        (tmp_path / name).write_text(json.dumps(content))
    with DecodeSession.open(tmp_path) as session:
        assert session.cache.capacity == capacity
    with DecodeSession.open(tmp_path, capacity=40, cpu=CpuOptions(default_capacity=50)) as session:
        assert session.cache.capacity == 40


def test_a_capacity_that_nobody_gave_is_explained(tmp_path: Path) -> None:
    onnx.save(make_foreign("concat", DecoderConfig(layers=1)), tmp_path / "model.onnx")
    with pytest.raises(OptionError, match=r"^capacity is 9999999999; .* \(9999999999 is the default if capacity is"):
        DecodeSession.open(tmp_path, cpu=CpuOptions(default_capacity=9999999999))


def test_options_of_the_other_device_are_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="gpu is for engines, and .* is a model; leave it out"):
        DecodeSession.open(folder, gpu=GpuOptions(cuda_graphs=True))


def test_settings_are_those_of_the_config() -> None:
    later = {"Grammar": decoding.Grammar, "np": numpy, "npt": numpy.typing}  # not imported for the help of a command
    hints = typing.get_type_hints(GenerationConfig, localns=later)
    assert typing.get_type_hints(Settings, localns=later) == {
        field.name: hints[field.name] for field in fields(GenerationConfig)
    }
    assert set(SYNONYMS.values()) <= {*hints}
    assert not set(SYNONYMS) & {*hints}


class Tensor:
    """An array as torch has it: each entry is an array without axes."""

    def __init__(self, values: Any) -> None:
        self.values = numpy.asarray(values)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.values

    def __iter__(self) -> Iterator[Tensor]:
        return (Tensor(value) for value in self.values)

    def __len__(self) -> int:
        return len(self.values)


def test_prompts_may_be_tensors(tmp_path: Path) -> None:
    write_decoder(tmp_path / "model.onnx", DecoderConfig(vocab=60, capacity=32, layers=1))
    with DecodeSession.open(tmp_path) as session:
        expected = [session.generate(ids, max_new_tokens=3).tokens for ids in ([1, 2], [3, 4])]
        assert session.generate(Tensor([1, 2]), max_new_tokens=3).tokens == expected[0]
        several = session.generate(Tensor([[1, 2], [3, 4]]), max_new_tokens=3)
        assert [one.tokens for one in several] == expected


@pytest.mark.parametrize(("given", "said"), [
    ({"n": 2}, "'n' is not a generation setting: repeat the prompt in a list"),
    ({"num_return_sequences": 2}, "repeat the prompt in a list"),
    ({"stream": True}, "call session.stream, or session.stream_chat for messages"),
    ({"pad_token_id": 0}, "nothing is padded here; leave it out"),
    ({"use_cache": True}, "there are always caches"),
    ({"max_tokens": 3}, "did you mean max_new_tokens"),
    ({"config": {"max_new_tokens": 3}}, r"config is a dict; give its entries by name, as in generate\(prompt"),
    ({"config": type("GenerationConfig", (), {"__module__": "transformers.x"})()}, "is of transformers; save it"),
    ({"config": 3}, "config is int; give a GenerationConfig"),
    ({"prompts": [1.0, 2.0]}, r"a prompt must be a flat list of token ids \(whole numbers\); got float64 \[2\]"),
    ({"prompts": numpy.array([1.0, 2.0])}, r"got float64 \[2\]"),
    ({"logits_processor": lambda ids, scores: None}, "returned None, and a change in place has no effect"),
])  # fmt: skip
def test_what_other_libraries_take_names_what_to_do(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    write_decoder(tmp_path / "model.onnx", DecoderConfig(vocab=60, capacity=32, layers=1))
    with DecodeSession.open(tmp_path) as session, pytest.raises(TrtKvCacheError, match=said):
        session.generate(**{"prompts": [1, 2], **given})


def test_chats_stream(tmp_path: Path) -> None:
    write_served(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    with DecodeSession.open(tmp_path) as session:
        expected = session.chat(messages, max_new_tokens=5)
        events = list(session.stream_chat(messages, max_new_tokens=5))
    assert "".join(event.text for event in events) == expected.text
    assert events[-1].finish_reason == expected.finish_reason


def test_options_as_text_pass_type_checkers(tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text(
        "from trt_kvcache import BuildOptions, DecodeSession, PlanOptions\n"
        'PlanOptions(cache_dtype="int8", sliding="circular", target="tensorrt")\n'
        'BuildOptions(workspace="4GiB", compute_capabilities="sm80,sm90")\n'
        'DecodeSession.open("x", device="cpu")\n'
        'PlanOptions(cache_dtype="int9")  # type: ignore[arg-type]\n'
        'DecodeSession.open("x", device="gpu")  # type: ignore[arg-type]\n'
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), "text.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    checked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
