"""``trt-kvcache chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trt_kvcache.cli.generate import GenerationFlags, RunFlags
from trt_kvcache.cli.options import RunnableArgument, SessionPlanFlags, TokenizerOption
from trt_kvcache.cli.output import print_error, visible
from trt_kvcache.cli.signals import interruptible
from trt_kvcache.errors import OptionError, TrtKvCacheError

if TYPE_CHECKING:
    from trt_kvcache.runtime.conversation import Conversation
    from trt_kvcache.runtime.generation.config import GenerationConfig
    from trt_kvcache.runtime.session import DecodeSession

_LONG = 1024  # most tokens of an answer, where nothing else is said
_HELP = """\
/reset          start a new conversation
/system TEXT    start one with this system message; without TEXT: with none
/save FILE      write the conversation as JSON
/help           these lines
/quit           end; Ctrl-D does the same
Ctrl-C          stop the answer"""


def chat(
    model: RunnableArgument,
    generation: GenerationFlags,
    running: RunFlags,
    planning: SessionPlanFlags,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Talk to a model. Its caches keep the conversation; /help lists what can be typed beside messages."""
    if generation.output_logprobs:
        raise OptionError("--logprobs are shown by generate --json; leave it out")
    options = planning.session_options(model)
    running = running if running.max_batch is not None else replace(running, max_batch=1)
    from trt_kvcache.runtime.conversation import Conversation
    from trt_kvcache.runtime.session import DecodeSession

    with DecodeSession.open(model, tokenizer=tokenizer, **running.options(), **options) as session:
        session.render_chat([{"role": "user", "content": ""}])  # without a template no message is worth typing
        config = generation.config(model, session.tokenizer)
        if generation.max_new_tokens is None and generation.generation_config is None:
            config = replace(config, max_new_tokens=_LONG)
        talk = Conversation(session, system)
        if sys.stdin.isatty():
            _tell(f"{session.name}; /help lists commands, Ctrl-D ends")
        while (line := _line()) is not None:
            try:
                if line.startswith("/"):
                    if not _command(talk, line):
                        break
                elif line:
                    _answer(session, talk, line, config)
            except TrtKvCacheError as error:  # of this message; the conversation goes on
                print_error(error.message)
    from trt_kvcache.cli.summary import tell_next

    tell_next(model, "serve", planning)


def _line() -> str | None:
    """Return what was typed; None at the end."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows, whose terminals do it
            import readline  # noqa: F401 - lets `input` edit the line, and brings earlier ones back
        try:
            return input("> ").strip()
        except EOFError:
            sys.stderr.write("\n")
            return None
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            return ""
    line = sys.stdin.readline()
    return line.strip() if line else None


def _command(talk: Conversation, line: str) -> bool:
    """Do what a line with a slash says; return False for the end."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word == "/quit":
        return False
    if word == "/help":
        _tell(_HELP)
    elif word == "/reset":
        first = talk.messages[:1]
        talk.reset(first[0]["content"] if first and first[0]["role"] == "system" else None)
        _tell("a new conversation")
    elif word == "/system":
        talk.reset(rest or None)
        _tell("a new conversation, with this system message" if rest else "a new conversation, without one")
    elif word == "/save":
        _tell(_save(talk.messages, rest))
    else:
        _tell(f"{word} is no command; /help lists them")
    return True


def _save(messages: list[dict[str, Any]], name: str) -> str:
    import json

    from trt_kvcache.files import atomic_file

    if not name:
        return "/save needs the name of a file"
    with atomic_file(Path(name).expanduser()) as file:
        file.write((json.dumps(messages, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "backslashreplace"))
    return f"{name}: {len(messages)} messages"


def _answer(session: DecodeSession, talk: Conversation, line: str, config: GenerationConfig) -> None:
    """Print an answer as it comes, and a line about it on stderr."""
    from trt_kvcache.runtime.events import FinishReason

    start = time.perf_counter()
    first, count, reason = 0.0, 0, FinishReason.CANCELLED
    with interruptible() as interrupted, closing(talk.say(line, config)) as events:
        for event in events:
            count += event.token is not None
            first = first or time.perf_counter()
            sys.stdout.write(visible(event.text, "\n\t") if sys.stdout.isatty() else event.text)
            sys.stdout.flush()
            reason = event.finish_reason or reason
            if interrupted.is_set():
                break
    sys.stdout.write("\n")
    sys.stdout.flush()
    seconds = time.perf_counter() - first
    rate = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else ""
    capacity = session.cache.capacity
    room = f"{talk.tokens} of {capacity}" if capacity is not None else str(talk.tokens)
    told = {FinishReason.CAPACITY: "; the cache is full: /reset starts anew", FinishReason.CANCELLED: "; stopped"}
    if reason is FinishReason.LENGTH:
        told[reason] = f"; ended by --max-new-tokens {config.max_new_tokens}"
    _tell(f"[{count} tokens, the first after {first - start:.2f} s{rate}; {room} in the cache{told.get(reason, '')}]")


def _tell(text: str) -> None:
    sys.stderr.write(f"{visible(text, chr(10))}\n")
    sys.stderr.flush()
