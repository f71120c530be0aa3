"""``trt-kvcache chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trt_kvcache.cli.generate import AdapterFlags, GenerationFlags, RunFlags, sampling_text
from trt_kvcache.cli.options import RunnableArgument, SessionPlanFlags, TokenizerOption
from trt_kvcache.cli.output import human_bytes, print_error, visible
from trt_kvcache.cli.prompts import TemplateOption, template_values
from trt_kvcache.cli.signals import interruptible
from trt_kvcache.errors import OptionError, TrtKvCacheError
from trt_kvcache.progress import phase

if TYPE_CHECKING:
    from trt_kvcache.runtime.conversation import Conversation
    from trt_kvcache.runtime.generation.generation_config import GenerationConfig
    from trt_kvcache.runtime.session import DecodeSession

_LONG = 1024  # most tokens of an answer by default
_HELP = """\
/reset          start a new conversation
/system TEXT    start one with this system message; without TEXT: with none
/regenerate     answer the last message once more
/save FILE      write the conversation as JSON
/stats          tokens, time and memory so far
/help           these lines
/quit           end; /exit, /bye and Ctrl-D do the same
\"\"\"             begin a message of several lines; the same ends it
Up, Down        bring earlier messages back
Alt-Enter       begin a new line; pasted lines stay one message
Ctrl-C          stop the answer"""
_ENDS = ("/quit", "/exit", "/bye")
_SEVERAL = '"' * 3


def chat(
    model: RunnableArgument,
    generation: GenerationFlags,
    running: RunFlags,
    adapters: AdapterFlags,
    planning: SessionPlanFlags,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    chat_template_kwargs: TemplateOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Talk to a model. Its caches keep the conversation; /help lists commands."""
    values = template_values(chat_template_kwargs)
    options = planning.session_options(model)
    running = running if running.max_batch is not None else replace(running, max_batch=1)
    from trt_kvcache.runtime.conversation import Conversation
    from trt_kvcache.runtime.session import DecodeSession

    with DecodeSession.open(
        model, tokenizer=tokenizer, **running.options(), **adapters.options(), **options
    ) as session:
        how: dict[str, Any] = {"values": values} if values else {}
        session.render_chat([{"role": "user", "content": ""}], **how)  # an error if there is no template
        config = adapters.config(generation.config(model, session.tokenizer, session.sampling))
        if generation.max_new_tokens is None and generation.generation_config is None:
            config = replace(config, max_new_tokens=_LONG)
        chat = _Chat(session, Conversation(session, system, values), config)
        if sys.stdin.isatty():
            capacity = "" if session.cache.capacity is None else f", capacity {session.cache.capacity}"
            own = {name: getattr(config, name) for name in session.sampling} == session.sampling
            drawn = sampling_text(session) if own else f"temperature {config.temperature:g}"
            _tell(f"{session.name}{capacity}; {drawn if config.do_sample else 'greedy decoding'}")
            _tell("/help lists commands, Ctrl-D ends")
        for line in _read_messages():
            if line in _ENDS:
                break
            try:
                if line.startswith("/"):
                    chat.command(line)
                elif line:
                    chat.answer(line)
            except TrtKvCacheError as error:  # the message fails; the conversation continues
                print_error(error.message)
    from trt_kvcache.cli.summary import tell_next

    tell_next(model, "serve", planning)


def _read_messages() -> Iterator[str]:
    def piped(_prompt: str) -> str | None:
        line = sys.stdin.readline()
        return line.strip() if line else None

    read = _line_editor() if sys.stdin.isatty() else piped
    while (message := read("> ")) is not None:
        if message.startswith(_SEVERAL):
            lines: list[str] = []
            line: str | None = message.removeprefix(_SEVERAL)
            while line is not None and not line.endswith(_SEVERAL):
                lines.append(line)
                line = read("... ")
            message = "\n".join([*lines, (line or "").removesuffix(_SEVERAL)]).strip()
        yield message


def _line_editor() -> Callable[[str], str | None]:
    """Return a function that reads a message from the terminal, with history. Several pasted lines are one message."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.output import create_output
    except ImportError as error:
        raise OptionError(f"chat needs {error.name}: pip install 'trt-kvcache[text]'; or pipe messages in") from None
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    # stdout is for answers, and may be a file: show what is typed on stderr if that is a terminal.
    shown = create_output(sys.stderr if sys.stderr.isatty() else sys.stdout)
    session: PromptSession[str] = PromptSession(output=shown, key_bindings=keys)

    def read(prompt: str) -> str | None:
        try:
            return session.prompt(prompt).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""

    return read


class _Chat:
    """A conversation in the terminal: runs slash commands, prints answers, and counts tokens and time."""

    def __init__(self, session: DecodeSession, talk: Conversation, config: GenerationConfig) -> None:
        self._session, self._talk, self._config = session, talk, config
        self._answers = self._tokens = 0
        self._seconds = 0.0  # seconds after the first token, over all answers

    def command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        rest, talk = rest.strip(), self._talk
        if word == "/help":
            _tell(_HELP)
        elif word == "/reset":
            first = talk.messages[:1]
            talk.reset(first[0]["content"] if first and first[0]["role"] == "system" else None)
            _tell("a new conversation")
        elif word == "/system":
            talk.reset(rest or None)
            _tell("a new conversation, with this system message" if rest else "a new conversation, without one")
        elif word == "/regenerate":
            self.answer(None)
        elif word == "/save":
            _tell(_save(talk.messages, rest))
        elif word == "/stats":
            said = f"{self._answers} answers, {self._tokens} tokens{_rate(self._tokens - self._answers, self._seconds)}"
            size = human_bytes(self._session.cache.bytes)
            _tell(f"{said}; {self._usage}, caches of {size}; {self._session.name}")
        else:
            _tell(f"{word} is no command; /help lists them")

    def answer(self, line: str | None) -> None:
        """Print the answer to a line as it comes, then token counts on stderr. None: answer the last line again."""
        from trt_kvcache.runtime.events import FinishReason

        talk, config = self._talk, self._config
        if line is None and not talk.answered:
            _tell("there is no answer yet")
            return
        start = time.perf_counter()
        first, count, reason = 0.0, 0, FinishReason.CANCELLED
        events = talk.say_again(config) if line is None else talk.say(line, config)
        with interruptible() as interrupted, closing(events), ExitStack() as waiting:
            waiting.enter_context(phase("computing the first token"))
            for event in events:
                waiting.close()
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
        self._answers, self._tokens, self._seconds = self._answers + 1, self._tokens + count, self._seconds + seconds
        told = {FinishReason.CAPACITY: "; the cache is full: /reset starts anew", FinishReason.CANCELLED: "; stopped"}
        if reason is FinishReason.LENGTH:
            told[reason] = f"; ended by --max-new-tokens {config.max_new_tokens}"
        if line is None and not config.do_sample:
            told[reason] = f"{told.get(reason, '')}; greedy decoding gives the same again, --sample draws another one"
        _tell(
            f"[{count} tokens, the first after {first - start:.2f} s{_rate(count - 1, seconds)}; "
            f"{self._usage}{told.get(reason, '')}]"
        )

    @property
    def _usage(self) -> str:
        capacity = self._session.cache.capacity
        return f"{self._talk.tokens}{'' if capacity is None else f' of {capacity}'} in the cache"


def _rate(tokens: int, seconds: float) -> str:
    return f", {tokens / seconds:.1f} tokens/s" if tokens > 0 and seconds > 0 else ""


def _save(messages: list[dict[str, Any]], name: str) -> str:
    import json

    from trt_kvcache.files import atomic_file

    if not name:
        return "/save needs the name of a file"
    with atomic_file(Path(name).expanduser()) as file:
        file.write((json.dumps(messages, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "backslashreplace"))
    return f"{name}: {len(messages)} messages"


def _tell(text: str) -> None:
    sys.stderr.write(f"{visible(text, chr(10))}\n")
    sys.stderr.flush()
