"""A conversation keeps its caches, and says what the same conversation says that is computed from its start."""

import json
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from decoders import DecoderConfig, write_decoder
from runtime.tokenizers_in_code import byte_level
from serve.models import TEMPLATE, write_served
from typer.testing import CliRunner

from trt_kvcache import DecodeSession, GenerationConfig, Tokenizer
from trt_kvcache.cli.app import app
from trt_kvcache.decoding import TokenEvent
from trt_kvcache.errors import CapacityError
from trt_kvcache.runtime.conversation import Conversation

FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}"
    "{% endfor %}<assistant>"
)
BRIEF = GenerationConfig(max_new_tokens=6, eos_token_id=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("model"), capacity=160)


@pytest.fixture
def session(folder: Path) -> Iterator[DecodeSession]:
    with DecodeSession.open(folder, max_batch=1) as session:
        yield session


def spoken(talk: Conversation, text: str, config: GenerationConfig = BRIEF) -> list[int | None]:
    return [event.token for event in talk.say(text, config)]


@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL])
def test_turns_are_those_of_the_whole_conversation(
    folder: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is new is computed alone, as far as the template leaves earlier turns as they were."""
    settings = {"chat_template": template}
    tokenizer = Tokenizer(byte_level(), settings)
    given: list[int] = []
    with DecodeSession.open(folder, tokenizer=tokenizer, max_batch=1) as session:
        add = session.add

        def counted(prompt: Any, *others: Any, **more: Any) -> int:
            given.append(len(prompt))
            return add(prompt, *others, **more)

        monkeypatch.setattr(session, "add", counted)
        talk = Conversation(session, "be brief")
        with DecodeSession.open(folder, tokenizer=tokenizer, max_batch=1) as alone:
            for turn, text in enumerate(("the cache", "keeps", "what the model wrote")):
                asked = [*talk.messages, {"role": "user", "content": text}]
                whole = alone.render_chat(asked)
                tokens = spoken(talk, text)
                assert tokens == alone.generate(whole, BRIEF).tokens
                assert talk.messages[-1] == {"role": "assistant", "content": tokenizer.decode([t for t in tokens if t])}
                assert talk.tokens in (len(whole) + 6, len(whole) + 5)
                assert given[turn] <= len(whole) if turn == 0 else given[turn] < len(whole) // 2
        assert session.cache.free == 0
        talk.reset(None)
        assert (talk.messages, talk.tokens, session.cache.free) == ([], 0, 1)


def test_an_answer_that_is_stopped_stays(session: DecodeSession, folder: Path) -> None:
    talk = Conversation(session)
    events = talk.say("the cache", BRIEF)
    said = "".join(next(events).text for _ in range(3))
    events.close()
    assert session.running == ()
    assert [message["content"] for message in talk.messages] == ["the cache", said]
    whole = session.render_chat([*talk.messages, {"role": "user", "content": "and"}])
    with DecodeSession.open(folder) as alone:
        assert spoken(talk, "and") == alone.generate(whole, BRIEF).tokens


def test_a_message_that_does_not_fit_is_not_said(session: DecodeSession) -> None:
    talk = Conversation(session)
    spoken(talk, "the cache")
    before = list(talk.messages)
    with pytest.raises(CapacityError, match="but a sequence may have at most 160"):
        spoken(talk, "x" * 200)
    assert talk.messages == before
    assert len(spoken(talk, "fits")) == 6


def test_caches_that_cannot_go_back_are_computed_again(session: DecodeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation(session)
    first = spoken(talk, "the cache")
    talk.messages[-1]["content"] = "something else"

    def refuse(*_: object) -> None:
        raise CapacityError("no way back")

    monkeypatch.setattr(session.cache, "crop", refuse)
    whole = session.render_chat([*talk.messages, {"role": "user", "content": "and"}])
    assert len(spoken(talk, "and")) == len(first)
    assert session.cache.tokens(session.cache.slots[0])[: len(whole)] == whole


def chat(folder: Path, *lines: str, code: int = 0, options: tuple[str, ...] = ()) -> Any:
    arguments = ["chat", str(folder), "--max-new-tokens", "6", "--ignore-eos", "--temperature", "0", *options]
    result = CliRunner().invoke(app, arguments, input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == code, result.output
    return result


def test_chat_in_the_terminal(folder: Path, session: DecodeSession, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    found = chat(
        folder, "the cache", "", "keeps", f"/save {saved}", "/reset", "the cache", "/help", "/what", "/save", "/quit",
        "never", options=("--system", "be brief"),
    )  # fmt: skip
    talk = Conversation(session, "be brief")
    answers = []
    for text in ("the cache", "keeps"):
        spoken(talk, text)
        answers.append(str(talk.messages[-1]["content"]))
    assert found.stdout == f"{answers[0]}\n{answers[1]}\n{answers[0]}\n"
    assert json.loads(saved.read_text(encoding="utf-8")) == talk.messages
    for part in ("[6 tokens, the first after ", " tokens/s; ", " of 160 in the cache; ended by --max-new-tokens 6]",
                 f"{saved}: 5 messages", "a new conversation\n", "/what is no command; /help lists them",
                 "/save needs the name of a file", "/system TEXT"):  # fmt: skip
        assert part in found.stderr
    assert "never" not in found.stderr


@pytest.mark.parametrize("end", ["/quit", "/exit", "/bye"])
def test_another_answer_and_messages_of_several_lines(folder: Path, session: DecodeSession, end: str) -> None:
    several = ('"""the', "cache  ", 'keeps"""')
    found = chat(
        folder, "/regenerate", *several, "/regenerate", "/stats", end, "never", options=("--system", "be brief")
    )
    talk = Conversation(session, "be brief")
    answer = spoken(talk, "the\ncache\nkeeps")
    assert found.stdout.count(str(talk.messages[-1]["content"]) + "\n") == 2
    assert len(answer) == 6
    first, told, again, stats = found.stderr.splitlines()[-4:]
    assert first == "there is no answer yet"
    assert "greedy decoding" not in told
    assert again.endswith("; greedy decoding gives the same again, --sample draws another one]")
    assert stats.startswith("2 answers, 12 tokens")
    assert "in the cache, caches of " in stats
    assert "never" not in found.stderr + found.stdout


def test_chat_goes_on_after_an_error(folder: Path) -> None:
    found = chat(folder, "x" * 300, "/system be brief", "the cache", "/system", "/save /nowhere/at/all.json")
    assert found.stderr.startswith("error: the prompt has ")
    assert found.stdout.count("\n") == 1
    assert "a new conversation, with this system message\n" in found.stderr
    assert "error: /nowhere/at/all.json: no such folder" in found.stderr
    full = chat(folder, "y" * 140, options=("--max-new-tokens", "90"))
    assert "the cache is full: /reset starts anew]" in full.stderr


def test_ctrl_c_stops_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say = Conversation.say

    def interrupted(self: Conversation, text: str, config: GenerationConfig) -> Generator[TokenEvent]:
        for number, event in enumerate(say(self, text, config)):
            if number == 2 and text == "stop me":
                signal.raise_signal(signal.SIGINT)
            yield event

    monkeypatch.setattr(Conversation, "say", interrupted)
    found = chat(folder, "stop me", "the cache")
    assert "[3 tokens, " in found.stderr
    assert " in the cache; stopped]\n[6 tokens, " in found.stderr


def test_chat_needs_a_template(folder: Path, tmp_path: Path) -> None:
    write_decoder(tmp_path / "model.onnx", DecoderConfig(vocab=300, capacity=32, layers=1))
    missing = chat(tmp_path, code=1).stderr
    assert "a chat is text, and there is no " in missing
    assert "open the session with --tokenizer" in missing
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert "has no chat template" in chat(tmp_path, code=1).stderr
    assert "there is no --logprobs: generate shows them" in chat(folder, options=("--logprobs",), code=1).stderr
