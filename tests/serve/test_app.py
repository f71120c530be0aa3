"""The API in one process: every answer is that of the same request alone, and what cannot be done is refused."""

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed (extra: serve)")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra: serve)")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from serve.asgi import Reply, ask
from serve.models import TEMPLATE, write_said, write_served
from tokenizers import decoders

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import OptionError, SessionError
from trt_kvcache.serve.core import ServingCore, Work
from trt_kvcache.serve.service import Service

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def service(rows: DecodeSession) -> Iterator[Service]:
    service = Service(rows, "tiny", max_queue=100)
    yield service
    service.core.close()
    assert not rows.cache.slots


@pytest.fixture(scope="module")
def ids_only(folder: Path) -> Iterator[DecodeSession]:
    with DecodeSession.open(folder, max_batch=2, tokenizer=False) as session:
        yield session


@pytest.fixture
def by_ids(ids_only: DecodeSession) -> Iterator[Service]:
    """Without a tokenizer, and without a queue."""
    service = Service(ids_only, "tiny", max_queue=0)
    yield service
    service.core.close()


def post(service: Service, body: Any, path: str = TEXT, **how: Any) -> Reply:
    return asyncio.run(ask(service.app, path, body, **how))


def text_of(reply: Reply) -> str:
    """The text of the one choice, whole or streamed, chat or completion."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    (choice,) = reply.data["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


SAMPLED = {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
GREEDY = {"temperature": 0}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GREEDY, {}),
    (SAMPLED, SAMPLED),
    ({"seed": 3}, {"seed": 3, "do_sample": True, "top_k": 0}),
    (GREEDY | {"stop": ["e", "the"]}, {"stop_strings": ["e", "the"]}),
    (GREEDY | {"logit_bias": {"70": 100}}, {"sequence_bias": {70: 100.0}}),
    (GREEDY | {"ignore_eos": True, "top_k": -1}, {"eos_token_id": ()}),
    (GREEDY | {"presence_penalty": 0.5, "frequency_penalty": -1}, {"presence_penalty": 0.5, "frequency_penalty": -1.0}),
]


@pytest.mark.parametrize(("fields", "settings"), CASES)
def test_answers_are_those_of_the_session(
    service: Service, alone: DecodeSession, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = alone.generate("the cache", max_new_tokens=12, **settings)
    body = {"prompt": "the cache", "max_tokens": 12, **fields}
    whole, streamed = post(service, body), post(service, body | {"stream": True})
    assert whole.status == streamed.status == 200
    assert text_of(whole) == text_of(streamed) == expected.text
    given = {"prompt_tokens": len(expected.prompt), "completion_tokens": len(expected.tokens)}
    assert whole.data["usage"] == given | {"total_tokens": sum(given.values())}

    messages = [{"role": "user", "content": "hi"}]
    spoken = alone.chat(messages, max_new_tokens=9, **settings)
    body = {"messages": messages, "max_completion_tokens": 9, **fields}
    whole, streamed = post(service, body, CHAT), post(service, body | {"stream": True}, CHAT)
    assert text_of(whole) == text_of(streamed) == spoken.text
    reason = {"eos": "stop", "stop": "stop", "length": "length"}[spoken.finish_reason or ""]
    assert whole.data["choices"][0]["finish_reason"] == reason
    assert streamed.chunks[-1]["choices"][0]["finish_reason"] == reason
    assert streamed.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_the_models_own_sampling_is_the_default(tmp_path: Path) -> None:
    """As its ``generation_config.json`` says, `do_sample` or not; a request may say otherwise."""
    own = {"temperature": 1.7, "top_p": 0.8, "top_k": 5, "repetition_penalty": 1.3}
    (write_served(tmp_path) / "generation_config.json").write_text(json.dumps({**own, "min_p": None}))
    with DecodeSession.open(tmp_path, max_batch=2) as session:
        service = Service(session, "own")
        for asked, changed in (({}, {}), ({"top_k": -1, "temperature": 3.0}, {"top_k": 0, "temperature": 3.0})):
            expected = session.generate("the cache", max_new_tokens=12, seed=5, **own | changed)
            body = {"prompt": "the cache", "max_tokens": 12, "seed": 5}
            assert text_of(post(service, body | asked)) == expected.text
            plain = {"temperature": 1, "top_p": 1, "top_k": -1, "repetition_penalty": 1}
            assert text_of(post(service, body | plain)) != expected.text
        greedy = session.generate("the cache", max_new_tokens=12, repetition_penalty=1.3)
        assert text_of(post(service, {"prompt": "the cache", "max_tokens": 12, "temperature": 0})) == greedy.text
        assert asyncio.run(ask(service.app, "/v1/models", None)).data["data"][0]["sampling"] == own
        service.core.close()
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(OptionError, match=r"generation_config.json: top_p is 7.0; supported: above 0"):
        DecodeSession.open(tmp_path)


def test_a_model_that_names_no_sampling_gets_the_usual_one(tmp_path: Path) -> None:
    (write_served(tmp_path) / "generation_config.json").unlink()
    with DecodeSession.open(tmp_path, max_batch=2) as session:
        service = Service(session, "own")
        expected = session.generate("the cache", max_new_tokens=12, seed=5, temperature=0.8, min_p=0.05, top_k=0)
        assert text_of(post(service, {"prompt": "the cache", "max_tokens": 12, "seed": 5})) == expected.text
        card = asyncio.run(ask(service.app, "/v1/models", None)).data["data"][0]
        assert card["sampling"] == {"temperature": 0.8, "min_p": 0.05}
        service.core.close()


def test_tokens_of_texts_and_texts_of_tokens(service: Service, by_ids: Service, alone: DecodeSession) -> None:
    tokens = alone.tokenizer.encode("the cache")
    asked = post(service, {"prompt": "the cache", "model": "tiny"}, "/tokenize")
    assert asked.data == {"tokens": tokens, "count": len(tokens), "max_model_len": 512}
    assert post(service, {"tokens": tokens}, "/detokenize").data == {"prompt": "the cache"}
    messages = [{"role": "user", "content": "hi"}]
    assert post(service, {"messages": messages}, "/tokenize").data["tokens"] == alone.render_chat(messages)
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({}, "/tokenize", "give either prompt or messages"),
        ({"prompt": "x", "messages": messages}, "/tokenize", "give either prompt or messages"),
        ({"prompt": "x", "colour": 1}, "/tokenize", "unknown field `colour`"),
        ({"tokens": [300]}, "/detokenize", "token id 300 is out of range"),
        ({"tokens": "x"}, "/detokenize", "Expected `array`"),
    ]
    for given, path, said in refused:
        reply = post(service, given, path)
        assert (reply.status, said in reply.error["message"]) == (400, True), reply.body
    assert "no tokenizer" in post(by_ids, {"prompt": "x"}, "/tokenize").error["message"]
    locked = Service(alone, "tiny", ["key"])
    assert post(locked, {"prompt": "x"}, "/tokenize").status == 401
    locked.core.close()


def test_each_request_is_a_line_of_a_log_without_its_text(rows: DecodeSession) -> None:
    lines: list[str] = []
    service = Service(rows, "tiny", ["secret"], max_queue=100, told=lines.append)
    key = {"authorization": "Bearer secret"}
    body = GREEDY | {"prompt": [1, 2, 3], "max_tokens": 5, "n": 1}
    post(service, body, headers=key)
    post(service, HELLO | {"stream": True, "max_tokens": 4, "n": 2}, CHAT, headers=key)
    post(service, body | {"n": 0}, headers=key)
    post(service, body)
    post(service, HELLO | {"stream": True, "max_tokens": 400}, CHAT, headers=key, leaves_after=3)
    post(service, None, "/health")
    service.core.close()
    rate = r", the first after \d+\.\d\d s, \d+\.\d tokens/s; \d+\.\d\d s"
    wanted = (
        r"POST /v1/completions 200: 3 prompt tokens, 5 new" + rate,
        r"POST /v1/chat/completions 200: \d+ prompt tokens, 8 new" + rate,
        r"POST /v1/completions 400: Expected `int` >= 1 - at `\$\.n`; \d+\.\d\d s",
        r"POST /v1/completions 401; \d+\.\d\d s",
        r"POST /v1/chat/completions 200 \(the client went away\): \d+ prompt tokens, \d+ new.* s",
    )
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(pattern, line), line


def test_choices_prompts_and_echo(service: Service, alone: DecodeSession) -> None:
    """`n` choices draw as the prompts of one call do; each prompt of a list as if it were alone."""
    body = {"prompt": ["the", "and the"], "n": 2, "seed": 5, "top_k": 30, "max_tokens": 6, "echo": True}
    choices = post(service, body).data["choices"]
    expected = []
    for prompt in ("the", "and the"):
        made = alone.generate([prompt, prompt], max_new_tokens=6, top_k=30, seed=5)
        expected += [prompt + one.text for one in made]
    assert [choice["text"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    streamed = [""] * 4
    for chunk in post(service, body | {"stream": True}).chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == expected


FACE = "🙂".encode()
SAID = ["<s>", "<user>", "<assistant>", "▁Hello", "▁true", "true", "▁world", *(f"<0x{byte:02X}>" for byte in FACE)]


@pytest.mark.parametrize("decoder", ["replace", "metaspace"])
def test_tokens_of_logprobs_joined_are_the_text(tmp_path: Path, decoder: str) -> None:
    """Pieces with their spaces, as SentencePiece has them, and the bytes of a character of four tokens."""
    space = decoders.Metaspace() if decoder == "metaspace" else decoders.Replace("▁", " ")
    last = [] if decoder == "metaspace" else [decoders.Strip(" ", 1, 0)]
    made = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), *last])
    write_said(tmp_path, SAID, decoder=made, template="<assistant>")
    with DecodeSession.open(tmp_path, max_batch=1) as session:
        service = Service(session, "m")
        body = GREEDY | {"max_tokens": len(SAID) - 3}
        choice = post(service, body | {"prompt": [2], "logprobs": 2}).data["choices"][0]
        chat = body | {"messages": [{"role": "user", "content": ""}], "logprobs": True, "top_logprobs": 2}
        entries = post(service, chat, CHAT).data["choices"][0]["logprobs"]["content"]
        service.core.close()
    named = choice["logprobs"]
    assert choice["text"] == "Hello truetrue world🙂"
    names = ["Hello", " true", "true", " world", *(f"bytes:\\x{byte:02x}" for byte in FACE)]
    assert named["tokens"] == [entry["token"] for entry in entries] == names
    assert named["text_offset"][:5] == [0, 5, 10, 14, 20]
    assert [set(top) for top in named["top_logprobs"][1:3]] == [{" true", "true"}, {"true", " world"}]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["text"]
    assert all(len({one["token"] for one in entry["top_logprobs"]}) == 2 for entry in entries)


def test_logprobs_ids_and_usage_of_a_stream(service: Service, alone: DecodeSession) -> None:
    expected = alone.generate("the", max_new_tokens=5, output_logprobs=True)
    asked = GREEDY | {"max_tokens": 5, "return_token_ids": True}
    whole = post(service, asked | {"prompt": "the", "logprobs": 0}).data["choices"][0]
    assert whole["token_ids"] == expected.tokens
    assert whole["prompt_token_ids"] == expected.prompt
    assert whole["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert whole["logprobs"]["text_offset"][0] == 0

    prompt = "<user>the<assistant>"
    expected = alone.generate(alone.tokenizer.encode(prompt, special_tokens=False), max_new_tokens=5,
                              output_logprobs=True)  # fmt: skip
    body = asked | {"messages": [{"role": "user", "content": [{"type": "text", "text": "the"}]}], "logprobs": True}
    chunks = post(service, body | {"stream": True, "stream_options": {"include_usage": True}}, CHAT).chunks
    assert [token for chunk in chunks for c in chunk["choices"] for token in c["token_ids"]] == expected.tokens
    said = [one for chunk in chunks for c in chunk["choices"] for one in c["logprobs"]["content"]]
    assert [one["logprob"] for one in said] == pytest.approx(expected.logprobs, abs=1e-4)
    assert all(one["top_logprobs"] == [] for one in said)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_without_a_tokenizer_there_are_ids(by_ids: Service, alone: DecodeSession) -> None:
    expected = alone.generate([5, 6, 7], max_new_tokens=4, output_logprobs=True)
    choice = post(by_ids, GREEDY | {"prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 0}).data["choices"][0]
    assert choice["token_ids"] == expected.tokens
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected.tokens]
    for body, path, said in (
        ({"prompt": "text"}, TEXT, "no tokenizer"),
        ({"messages": [{"role": "user", "content": "x"}]}, CHAT, "there is no tokenizer"),
        ({"prompt": [1], "stop": "x"}, TEXT, "stop needs a tokenizer"),
        ({"prompt": [1], "echo": True}, TEXT, "echo needs a tokenizer"),
    ):
        reply = post(by_ids, body, path)
        assert (reply.status, said in reply.error["message"]) == (400, True), reply.body


HELLO = {"messages": [{"role": "user", "content": "x"}]}
REFUSED: list[tuple[str, dict[str, Any], str, str | None]] = [
    (TEXT, {}, "missing required field `prompt`", "prompt"),
    (TEXT, {"prompt": ""}, "empty", "prompt"),
    (TEXT, {"prompt": [300]}, "token id 300 is out of range", "prompt"),
    (TEXT, {"prompt": [-1]}, "token id -1", "prompt"),
    (TEXT, {"prompt": [1.5]}, "give a text", "prompt"),
    (TEXT, {"prompt": [1] * 513}, "513 tokens, and the model takes 512", "prompt"),
    (TEXT, {"prompt": ["x"] * 105}, "105 sequences", "n"),
    (TEXT, {"prompt": "x", "n": 0}, "n", "n"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, ">= 1", "max_tokens"),
    (TEXT, {"prompt": "x", "temperature": -1}, ">= 0", "temperature"),
    (TEXT, {"prompt": "x", "top_p": -0.1}, ">= 0", "top_p"),
    (TEXT, {"prompt": "x", "seed": -2}, ">= -1", "seed"),
    (TEXT, {"prompt": "x", "logit_bias": {"300": 1}}, "'300' is not a token id", "logit_bias"),
    (TEXT, {"prompt": "x", "logit_bias": {"1": 101}}, "<= 100", "logit_bias"),
    (TEXT, {"prompt": "x", "stop": [""]}, "stop", "stop"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "<= 20", "logprobs"),
    (TEXT, {"prompt": "x", "logprobs": 0, "echo": True}, "tokens of the prompt have no logprobs", "echo"),
    (TEXT, {"prompt": "x", "best_of": 2}, "not ranked", "best_of"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "not filled in", "suffix"),
    (TEXT, {"prompt": "x", "presence_penalty": 2.5}, "<= 2", "presence_penalty"),
    (TEXT, {"prompt": "x", "colour": 1}, "unknown field `colour`", "colour"),
    (CHAT, {"messages": []}, "length >= 1", "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "supported: system", "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "content is missing", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text", "messages"),
    (CHAT, HELLO | {"tools": [{"type": "function"}]}, "missing required field `function`", "function"),
    (CHAT, HELLO | {"functions": [{"name": "f"}]}, "former names of tools", "functions"),
    (CHAT, HELLO | {"response_format": {"type": "json_object"}}, "the model names none", "response_format"),
    (TEXT, {"prompt": "x", "guided_regex": "a"}, "give structured_outputs: {'regex': ...}", "guided_regex"),
    (CHAT, HELLO | {"logprobs": False, "top_logprobs": 3}, "top_logprobs needs logprobs", "top_logprobs"),
    (CHAT, HELLO | {"logprobs": True, "top_logprobs": 21}, "<= 20", "top_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "the model takes 512", "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "parts of type text", "messages"),
    (CHAT, HELLO | {"tool_choice": "required"}, "there are no tools", "tools"),
    (
        CHAT,
        HELLO | {"continue_final_message": True, "add_generation_prompt": True},
        "set add_generation_prompt to",
        "continue_final_message",
    ),
    (CHAT, HELLO | {"chat_template_kwargs": {"messages": []}}, "messages cannot be given", "messages"),
]


def test_what_cannot_be_done_is_refused(service: Service) -> None:
    for path, body, said, param in REFUSED:
        for stream in ({}, {"stream": True}):
            reply = post(service, body | stream, path)
            assert reply.status == 400, (body, reply.body)
            assert said in reply.error["message"], (body, reply.body)
            assert reply.error["param"] == param, (body, reply.body)
    harmless = {
        "response_format": {"type": "text"},
        "tools": [],
        "presence_penalty": 0.0,
        "top_logprobs": 0,
        "user": "u",
    }
    assert post(service, HELLO | harmless | {"max_tokens": 1}, CHAT).status == 200
    assert post(service, b"{", TEXT).error["code"] == "invalid_json"
    assert post(service, b"[" * 100_000, TEXT).status == 400
    assert post(service, b"[1]", TEXT).status == 400
    assert post(service, {"prompt": "x"}, headers={"content-type": "text/plain"}).status == 415
    assert post(service, b'{"prompt": "' + b"x" * (4 << 20) + b'"}').status == 413
    assert post(service, {"prompt": "x", "model": "gpt-4"}).status == 404
    assert post(service, {}, "/v1/embeddings").status == 404
    assert "model makes text" in post(service, {}, "/v1/embeddings").error["message"]
    assert post(service, {}, "/v1/nothing").error["message"] == "POST /v1/nothing: Not Found"
    assert post(service, None, TEXT).status == 405


ALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It writes whatever it knows, and joins arguments as text."""


def earlier(**fields: Any) -> dict[str, Any]:
    """An answer that is sent back."""
    return {"messages": [*HELLO["messages"], {"role": "assistant", "content": "c", **fields}, *HELLO["messages"]]}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": arguments, "parsed_arguments": None}}
    return earlier(content=None, refusal=None, tool_calls=[call])


GIVEN: list[tuple[dict[str, Any], str]] = [
    *((HELLO | {name: None}, "<user>x<assistant>") for name in (
        "prediction", "prompt_cache_retention", "reasoning_effort", "verbosity", "web_search_options", "tools")),
    *((earlier(**{name: None}), "<user>x<assistant>c<user>x<assistant>") for name in (
        "annotations", "reasoning_content", "audio", "function_call", "tool_calls", "anything")),
    (earlier(annotations=[], refusal=None), "<user>x<assistant>c<user>x<assistant>"),
    (earlier(reasoning_content="r"), "<user>x<assistant>rc<user>x<assistant>"),
    (earlier(reasoning="r"), "<user>x<assistant>rc<user>x<assistant>"),
    (earlier(content=[{"type": "refusal", "refusal": "no", "text": None}]), "<user>x<assistant>no<user>x<assistant>"),
    (called(""), "<user>x<assistant>w{}<user>x<assistant>"),
    (called('{"a":1}'), '<user>x<assistant>w{"a":1}<user>x<assistant>'),
    (HELLO | {"chat_template_kwargs": {"mood": "!"}}, "<user>x!<assistant>"),
    (HELLO | {"add_generation_prompt": False}, "<user>x"),
    ({"messages": earlier()["messages"][:2], "continue_final_message": True, "add_generation_prompt": False},
     "<user>x<assistant>c"),
    *((HELLO | fields, "<user>x<assistant>") for fields in (
        {"verbosity": "medium"}, {"prompt_cache_retention": "in_memory"}, {"prompt_cache_retention": "in-memory"},
        {"reasoning_effort": "low"}, {"reasoning_effort": "none"}, {"store": False}, {"n": 1.0}, {"seed": 7.0},
        {"top_k": 4.0}, {"max_completion_tokens": 2.56e2}, {"temperature": 1},
        {"top_logprobs": 2.0, "logprobs": True})),
    (HELLO | {"reasoning_effort": "low", "chat_template_kwargs": {"mood": "!"}}, "<user>x!<assistant>"),
    (HELLO | {"chat_template_kwargs": {"mood": 1.0}}, "<user>x1.0<assistant>"),  # a value, as it is written
    ({"messages": [HELLO["messages"][0] | {"id": "7", "opts": {"visible": False}, "_meta": {}, "name": "a"}]},
     "<user>x<assistant>"),
    (HELLO | {"stream_options": None, "response_format": {"type": "text", "json_schema": None}}, "<user>x<assistant>"),
]  # fmt: skip
"""Requests of clients and frameworks, and the prompts that they make."""


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = write_served(tmp_path_factory.mktemp("talking"), template=ALL)
    with DecodeSession.open(folder, max_batch=1) as session:
        service = Service(session, "m")
        yield service
        service.core.close()


def prompt_of(service: Service, body: dict[str, Any]) -> str:
    reply = post(service, body | {"max_tokens": 1, "return_token_ids": True}, CHAT)
    assert reply.status == 200, (body, reply.body)
    tokenizer: Any = service._session.tokenizer
    return str(tokenizer.decode(reply.data["prompt_token_ids"]))


@pytest.mark.parametrize(("body", "prompt"), GIVEN)
def test_fields_that_clients_send(talking: Service, body: dict[str, Any], prompt: str) -> None:
    assert prompt_of(talking, body) == prompt


def test_an_answer_can_be_sent_back(talking: Service) -> None:
    """As it came, and as OpenAI's client writes it."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    came = post(talking, HELLO | GREEDY | {"max_tokens": 3}, CHAT).data
    held = openai.types.chat.ChatCompletion.model_validate(came).choices[0].message.model_dump()
    for answer in (came["choices"][0]["message"], held):
        assert prompt_of(talking, {"messages": [*HELLO["messages"], answer, *HELLO["messages"]]}).endswith(
            "<user>x<assistant>"
        )


def test_numbers_that_say_nothing_or_all(talking: Service) -> None:
    """A seed of -1 is none, and top_p of 0 leaves the most probable token."""
    greedy = text_of(post(talking, HELLO | GREEDY | {"max_tokens": 6}, CHAT))
    assert text_of(post(talking, HELLO | {"top_p": 0, "seed": 3, "max_tokens": 6}, CHAT)) == greedy
    assert post(talking, HELLO | {"seed": -1, "max_tokens": 6}, CHAT).status == 200
    assert post(talking, HELLO | GREEDY | {"top_p": 0, "max_tokens": 6}, CHAT).status == 200
    body = b"\xef\xbb\xbf" + json.dumps(HELLO | {"max_tokens": 1}).encode()
    assert post(talking, body, CHAT).status == 200


def test_whole_numbers_are_spelled_as_clients_do(talking: Service) -> None:
    """JSON has one kind of number; token ids, too."""
    (wanted,) = post(talking, GREEDY | {"prompt": [1, 2], "max_tokens": 3}).data["choices"]
    (found,) = post(talking, b'{"prompt": [1.0, 2e0], "max_tokens": 3.0, "temperature": 0.0, "best_of": 1.0}').data[
        "choices"
    ]
    assert found == wanted
    for body in (HELLO | {"n": 1.5}, HELLO | {"max_tokens": 1e300}, HELLO | {"n": "1"}, HELLO | {"seed": True}):
        assert post(talking, body, CHAT).status == 400


def test_a_stream_without_obfuscation(talking: Service) -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    asked = HELLO | {"max_tokens": 2, "stream": True}
    assert post(talking, asked | {"stream_options": options}, CHAT).chunks[-1]["usage"]["completion_tokens"] == 2
    refused = post(talking, asked | {"stream_options": {"include_obfuscation": True}}, CHAT)
    assert (refused.status, refused.error["param"]) == (400, "stream_options")


def test_effort_reaches_templates_that_read_it(tmp_path: Path) -> None:
    template = TEMPLATE + "{{ reasoning_effort }}{{ enable_thinking }}"
    with DecodeSession.open(write_served(tmp_path / "m", template=template), max_batch=1) as session:
        service = Service(session, "m")
        assert prompt_of(service, HELLO | {"reasoning_effort": "high"}).endswith("high")
        assert prompt_of(service, HELLO | {"reasoning_effort": "none"}).endswith("noneFalse")
        asked = HELLO | {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
        assert prompt_of(service, asked).endswith("noneTrue")
        service.core.close()


def test_the_reason_of_a_refusal_is_logged_without_the_text(tmp_path: Path) -> None:
    """Nor what quotes it: the template's own words, schemas, settings. No name breaks a line."""
    lines: list[str] = []
    template = "{{ raise_exception('no: ' + messages[0].content) }}"
    with DecodeSession.open(write_served(tmp_path / "m", template=template), max_batch=1) as session:
        service = Service(session, "m", told=lines.append)
        secret = [{"role": "user", "content": "secret"}]
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "secret"}}}
        for path, body, reason in (
            (TEXT, {"prompt": "secret", "best_of": 2}, "best_of: sequences are not ranked"),
            (TEXT, {"prompt": "secret" * 100}, "the prompt has 600 tokens, and the model takes 512"),
            (TEXT, {"prompt": "secret", "response_format": schema}, "response_format: no grammar can be made of it"),
            (TEXT, {"prompt": "secret", "stop": "secret" * 200}, "stop: give at most 16 texts"),
            (TEXT, {"prompt": "secret", "model": "b"}, "there is no model 'b'"),
            (CHAT, {"messages": secret}, "messages: the chat template does not take them"),
            (
                CHAT,
                {"messages": [{"role": "user", "content": {"secret": 1}}]},
                "Expected `str | array | null`, got `obj",
            ),
            (CHAT, {"messages": secret, "tools": [{"type": "secret"}]}, "Invalid enum value '...' - at"),
            (TEXT, {"prompt": "secret", "a\nb\x1b" + "c" * 300: 1}, "unknown field `a?b?ccc"),
            ("/tokenize", {"messages": secret}, "messages: the chat template does not take them"),
        ):
            reply = post(service, body, path)
            assert 400 <= reply.status < 500
            assert lines[-1].startswith(f"POST {path} {reply.status}: ")
            assert reason in lines[-1]
            assert "secret" not in lines[-1]
            assert len(lines[-1]) < 260
            assert lines[-1].isprintable()
        service.core.close()


def test_keys(alone: DecodeSession) -> None:
    service = Service(alone, "tiny", ["one", "twö"])
    try:
        for header, status in (
            ({}, 401), ({"authorization": "Bearer two"}, 401), ({"authorization": "Basic one"}, 401),
            ({"authorization": "Bearer one"}, 200), ({"authorization": "bearer twö"}, 200),
        ):  # fmt: skip
            assert post(service, None, "/v1/models", headers=header).status == status
        assert post(service, None, "/health").status == 200
    finally:
        service.core.close()


def test_models_health_version_and_metrics(service: Service) -> None:
    post(service, GREEDY | {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True})
    (card,) = post(service, None, "/v1/models").data["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 512)
    assert post(service, None, "/v1/models/tiny").data == card
    assert post(service, None, "/ready").data == {"status": "ready"}
    assert "version" in post(service, None, "/version").data
    lines = post(service, None, "/metrics").body.decode().splitlines()
    numbers = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for name, expected in (
        ("prompt_tokens_total", 3), ("generation_tokens_total", 5), ("time_to_first_token_seconds_count", 1),
        ("inter_token_latency_seconds_count", 4), ("num_requests_running", 0), ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 0),
    ):  # fmt: skip
        assert float(numbers[f'trt_kvcache:{name}{{model_name="tiny"}}']) == expected


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_many_at_once_are_each_right(rows: DecodeSession, alone: DecodeSession, count: int) -> None:
    """None is lost, and none is another's, while some clients leave and one reads slowly."""
    rng = random.Random(count)
    bodies: list[dict[str, Any]] = []
    for i in range(count):
        prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 20))]
        body = {"prompt": prompt, "max_tokens": rng.randrange(1, 10), "return_token_ids": True}
        bodies.append(body | ({"temperature": 0} if i % 2 else {"seed": i, "top_k": 20}) | {"stream": i % 3 == 0})

    async def run(service: Service) -> list[Reply]:
        leaving = [ask(service.app, TEXT, body, leaves_after=i % 3) for i, body in enumerate(bodies[: count // 6])]
        staying = [ask(service.app, TEXT, body, pause=0.01 if i == 0 else 0) for i, body in enumerate(bodies)]
        mixed = [*leaving, *staying]
        order = rng.sample(range(len(mixed)), len(mixed))
        tasks = {at: asyncio.create_task(mixed[at]) for at in order}
        replies = [await tasks[at] for at in range(len(mixed))]
        return replies[len(leaving) :]

    service = Service(rows, "tiny", max_queue=2 * count)
    try:
        replies = asyncio.run(run(service))
        assert idle(service.core)
    finally:
        service.core.close()
    assert not rows.cache.slots
    for body, reply in zip(bodies, replies, strict=True):
        settings = {"seed": body["seed"], "top_k": 20} if "seed" in body else {}
        expected = alone.generate(body["prompt"], max_new_tokens=body["max_tokens"], **settings).tokens
        parts = reply.chunks if body["stream"] else [reply.data]
        assert [token for part in parts for token in part["choices"][0]["token_ids"]] == expected


def idle(core: ServingCore) -> bool:
    return soon(lambda: core.running == core.waiting == 0)


def soon(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


LONG = GREEDY | {"prompt": [1], "max_tokens": 80, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize(("stream", "leaves_after"), [(False, 0), (True, 0), (True, 1)])
def test_a_client_that_leaves_frees_its_row(service: Service, stream: bool, leaves_after: int) -> None:
    post(service, LONG | {"stream": stream, "n": 8}, leaves_after=leaves_after)
    assert idle(service.core)
    ended = [line for line in service.core.metrics.text().decode().splitlines() if 'finished_reason="length"' in line]
    assert not ended


def test_beyond_the_queue_is_429(by_ids: Service) -> None:
    async def run() -> list[Reply]:
        return await asyncio.gather(*(ask(by_ids.app, TEXT, LONG) for _ in range(5)))

    replies = asyncio.run(run())
    assert sorted(reply.status for reply in replies) == [200, 200, 429, 429, 429]
    refused = next(reply for reply in replies if reply.status == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.error["code"] == "queue_full"
    assert post(by_ids, LONG | {"n": 3}).status == 400  # would never fit


def test_requests_take_turns(alone: DecodeSession) -> None:
    """A request of one sequence does not wait for all of a request of many."""
    ended: list[str] = []

    async def run(core: ServingCore) -> None:
        async def one(name: str, count: int) -> None:
            config = GenerationConfig(max_new_tokens=8, eos_token_id=())
            async for _, event in core.events([Work([1, 2])] * count, config):
                if event.finish_reason:
                    ended.append(name)

        await asyncio.gather(one("many", 20), one("single", 1))

    core = ServingCore(alone)
    asyncio.run(run(core))
    core.close()
    assert ended.index("single") <= 2


def test_a_step_that_fails_ends_its_sequence_alone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = service.core.session.tokenizer.decode

    def fails(tokens: Any) -> str:
        if len(tokens) > 3:
            raise ValueError("a bad tokenizer")
        return str(decode(tokens))

    async def run() -> list[Reply]:
        short = ask(service.app, TEXT, GREEDY | {"prompt": [1], "max_tokens": 1, "ignore_eos": True})
        return list(await asyncio.gather(ask(service.app, TEXT, LONG), short, ask(service.app, TEXT, LONG)))

    monkeypatch.setattr(service.core.session.tokenizer, "decode", fails)
    replies = asyncio.run(run())
    assert [reply.status for reply in replies] == [500, 200, 500]
    assert "the tokenizer failed" in replies[0].error["message"]
    monkeypatch.undo()
    assert post(service, LONG).status == 200


def test_a_bug_in_a_step_is_told_and_the_next_request_runs(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(service.core.session, "step", broken)
    reply = post(service, LONG)
    assert (reply.status, "secret" in reply.body.decode()) == (500, False)
    monkeypatch.undo()
    assert post(service, LONG).status == 200


def of(prompt: list[int], **more: Any) -> dict[str, Any]:
    return GREEDY | {"prompt": prompt, "max_tokens": 6, "ignore_eos": True} | more


def fails_for(owner: Any, name: str, mine: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a method raise a bug for some calls."""
    real = getattr(owner, name)

    def call(*args: Any, **more: Any) -> Any:
        if mine(*args):
            raise RuntimeError("secret")
        return real(*args, **more)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("name", ["add", "remove"])
def test_a_bug_of_one_request_ends_no_other(name: str, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    session = service.core.session
    alone = [post(service, of(prompt)).data["choices"] for prompt in ([1, 2], [3, 4])]
    slots: list[int] = []
    fails_for(session, "add", lambda tokens, *_: name == "add" and tokens == [9, 9], monkeypatch)
    fails_for(session, "remove", lambda slot: name == "remove" and not slots.append(slot), monkeypatch)  # type: ignore[func-returns-value]

    async def run() -> list[Reply]:
        bad = of([9, 9], **({} if name == "add" else {"stream": True, "max_tokens": 200}))
        leaves = {} if name == "add" else {"leaves_after": 1}
        good = [ask(service.app, TEXT, of(prompt)) for prompt in ([1, 2], [3, 4])]
        return list(await asyncio.gather(good[0], ask(service.app, TEXT, bad, **leaves), good[1]))

    first, bad, last = asyncio.run(run())
    assert [first.data["choices"], last.data["choices"]] == alone
    assert "secret" not in bad.body.decode()
    assert name == "remove" or (bad.status, "failed by a bug: RuntimeError" in bad.error["message"]) == (500, True)
    assert post(service, of([1, 2])).data["choices"] == alone[0]
    monkeypatch.undo()
    for slot in slots:
        if slot in session.cache:
            session.remove(slot)


def test_an_error_of_nobody_leaves_nothing_for_later_clients(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes as long as a sequence of that time is there, even one that was not ended with the others."""
    session = service.core.session
    alone = post(service, of([1, 2])).data["choices"]
    stuck = session.add([5], GenerationConfig(max_new_tokens=400, eos_token_id=()))  # nobody waits for it
    compact = session._rows.compact

    def fails() -> None:
        if stuck in session.cache:
            raise SessionError("rows cannot be moved")
        compact()

    monkeypatch.setattr(session._rows, "compact", fails)

    failed = post(service, of([1, 2]))
    assert (failed.status, failed.error["message"]) == (500, "rows cannot be moved")
    assert post(service, of([1, 2])).data["choices"] == alone


def test_a_step_that_hangs_is_told_and_holds_up_nobody_after_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, step = threading.Event(), service.core.session.step

    def hangs() -> Any:
        go_on.wait()
        return step()

    async def run() -> list[Reply]:
        waiting = [asyncio.create_task(ask(service.app, TEXT, LONG)) for _ in range(6)]  # of which four have a row
        replies = [await task for task in waiting]
        return [*replies, await ask(service.app, TEXT, LONG), await ask(service.app, "/health")]

    service.core.step_limit = 0.2
    monkeypatch.setattr(service.core.session, "step", hangs)
    *replies, health = asyncio.run(run())
    go_on.set()
    assert [reply.status for reply in replies] == [503] * 7
    assert all("a step has run for more than 0.2 seconds" in reply.error["message"] for reply in replies)
    assert (health.status, health.data) == (503, {"status": "a step hangs"})
    assert idle(service.core)
    assert post(service, None, "/health").status == 200
    assert post(service, LONG).status == 200


@pytest.mark.parametrize(("origins", "origin", "allowed"), [
    ((), "https://a.example", None), (("https://a.example", "http://localhost:3000"), "https://a.example", "https://a.example"),
    (("https://a.example",), "https://b.example", None), (("*",), "https://b.example", "*"),
])  # fmt: skip
def test_pages_of_other_servers(
    alone: DecodeSession, origins: tuple[str, ...], origin: str, allowed: str | None
) -> None:
    """Browsers ask for leave first, without the key; the answers to requests say the same, refusals too."""
    service = Service(alone, "tiny", ["secret"], origins=origins)
    try:
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        leave = asyncio.run(ask(service.app, TEXT, method="OPTIONS", headers=asked))
        refused = asyncio.run(ask(service.app, TEXT, {"prompt": [1]}, headers={"origin": origin}))
    finally:
        service.core.close()
    assert (leave.status == 200) is (allowed is not None)
    assert leave.headers.get("access-control-allow-origin") == allowed
    assert (refused.status, refused.headers.get("access-control-allow-origin")) == (401, allowed)


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/", "https://a.example/page", "ftp://a", "https://u@a", ""]
)
def test_what_is_no_origin(alone: DecodeSession, origin: str) -> None:
    with pytest.raises(OptionError, match="is not an origin; give scheme, host and port alone"):
        Service(alone, "tiny", origins=[origin])


def test_the_end_is_told(service: Service) -> None:
    async def run() -> tuple[Reply, Reply, Reply]:
        running = asyncio.create_task(ask(service.app, TEXT, LONG | {"stream": True}, pause=0.001))
        while not service.core.running:
            await asyncio.sleep(0)
        service.draining = True
        new, ready = await ask(service.app, TEXT, LONG), await ask(service.app, "/ready")
        await asyncio.to_thread(service.core.close)
        return new, ready, await running

    new, ready, running = asyncio.run(run())
    assert (new.status, new.error["code"], ready.status) == (503, "ending", 503)
    assert running.status in (200, 503)
    assert b"the server ended before" in running.body
    assert b"[DONE]" not in running.body
    with pytest.raises(SessionError, match="the server is shutting down"):
        asyncio.run(anext(service.core.events([Work([1])], GenerationConfig())))


VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 0.5, 1e-300, 1e300, 2**63, 2**70, 10**400, "", "x", "日本", "\ud800", [], [1],
    ["x"], [[1], "x"], [None], {}, {"1": 5}, {"1": -100}, {"type": "text"}, [{"role": "user", "content": "x"}],
    [{"role": "user"}], {"include_usage": True}, [299, 0],
]  # fmt: skip
FIELDS = [
    "model", "prompt", "messages", "n", "seed", "stop", "temperature", "top_p", "max_tokens", "max_completion_tokens",
    "logit_bias", "stream", "stream_options", "top_k", "min_p", "repetition_penalty", "ignore_eos", "return_token_ids",
    "logprobs", "top_logprobs", "echo", "user", "tools", "response_format", "presence_penalty", "best_of", "other",
    "structured_outputs", "tool_choice",
]  # fmt: skip


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_request_is_an_error_of_the_server(service: Service, count: int) -> None:
    rng = random.Random(count)

    async def run() -> list[int]:
        found = []
        for _ in range(count):
            path = rng.choice([TEXT, CHAT])
            body = {"prompt": rng.choice(["x", [1, 2]]), "max_tokens": 2} if path == TEXT else HELLO | {"max_tokens": 2}
            body |= {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randrange(4))}
            sent = json.dumps(body).encode()
            if rng.random() < 0.1:
                at = rng.randrange(len(sent))
                sent = sent[:at] + rng.randbytes(rng.randrange(3)) + sent[at + rng.randrange(3) :]
            reply = await ask(service.app, path, sent)
            assert reply.status in (200, 400, 404), (sent, reply.body)
            if reply.status != 200:
                assert reply.error["message"], sent
            found.append(reply.status)
        return found

    found = asyncio.run(run())
    assert found.count(200) > count // 20
    assert found.count(400) > count // 20
