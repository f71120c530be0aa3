"""A ``tokenizer.json`` in a child process: one from anywhere may take any time and memory, to be loaded and for a text.

Normalizers replace and grow, patterns backtrack, templates repeat: no look at the file tells what they cost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import msgspec

from trt_kvcache.child import Child, limit_memory

__all__ = ["AddedToken", "Loaded", "TokenizerProcess"]

SECONDS = 30.0
"""To start, and for a text; longer ones have more."""
_SPEED = 20_000  # characters that a second is enough for
_MEMORY = 1 << 30  # bytes of address space, and
_TIMES = 32  # times the file's
_LONGEST = 1 << 24  # tokens


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before the text is normalized, or after.

    Attributes:
        content: as the file has it.
        text: that it is decoded to.
        special: it is no text.
    """

    id: int
    content: str
    text: str
    special: bool


@dataclass(frozen=True)
class Loaded:
    """The library's view of the file, or in `failed` the reason that there is none."""

    vocab_size: int = 0
    added: tuple[AddedToken, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class _Request:
    text: str
    special_tokens: bool
    plain: bool = False


@dataclass(frozen=True)
class _Encoded:
    ids: tuple[int, ...] = ()
    failed: str = ""


class TokenizerProcess:
    """A tokenizer in a process of its own, which ends with this object.

    Args:
        data: of the ``tokenizer.json``.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._lock = threading.Lock()
        self._children: list[Child] = []
        weakref.finalize(self, _end, self._children)

    def load(self) -> Loaded:
        """Start the process, in the place of one that ended.

        Raises:
            ChildError: the tokenizer exceeds a limit while it is loaded.
        """
        _end(self._children)
        self._children.append(Child(__name__, str(_MEMORY + _TIMES * len(self._data))))
        line = self._children[0].ask([f"{len(self._data)}\n".encode(), self._data], SECONDS)
        return msgspec.json.decode(line, type=Loaded)

    def encode(self, text: str, *, special_tokens: bool, plain: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text; `plain`: what looks like a special token is text.

        Raises:
            ChildError: the tokenizer exceeds a limit.
            ValueError: it fails on the text.
        """
        request = msgspec.json.encode(_Request(text, special_tokens, plain))
        with self._lock:
            if not self._children or not self._children[0].alive:
                self.load()
            line = self._children[0].ask([request, b"\n"], SECONDS + len(text) / _SPEED)
        answer = msgspec.json.decode(line, type=_Encoded)
        if answer.failed:
            raise ValueError(answer.failed)
        return answer.ids


def _end(children: list[Child]) -> None:
    while children:
        children.pop().end()


def _load(data: bytes) -> tuple[Any, Loaded]:
    import tokenizers

    made = tokenizers.Tokenizer.from_buffer(data)
    # Both are for training; here a prompt is what it is.
    made.no_padding()
    made.no_truncation()
    added = [
        AddedToken(name, token.content, made.id_to_token(name) or "", bool(token.special))
        for name, token in made.get_added_tokens_decoder().items()
    ]
    return made, Loaded(made.get_vocab_size(with_added_tokens=True), tuple(added))


def _encode(tokenizer: Any, line: bytes) -> _Encoded:
    request = msgspec.json.decode(line, type=_Request)
    tokenizer.encode_special_tokens = request.plain
    ids = tokenizer.encode(request.text, add_special_tokens=request.special_tokens).ids
    if len(ids) > _LONGEST:
        return _Encoded(failed=f"more than {_LONGEST} tokens come of it")
    return _Encoded(tuple(ids))


def _words(error: BaseException) -> str:
    """Of an error; the library raises Exception itself, and its panics are no Exceptions."""
    return " ".join(str(error).split())[:2000] or type(error).__name__


def main() -> None:
    """Load the tokenizer that comes first, and answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    stdin = sys.stdin.buffer
    tokenizer: Any = None
    try:
        tokenizer, loaded = _load(stdin.read(int(stdin.readline())))
    except BaseException as error:  # noqa: BLE001 - see `_words`
        loaded = Loaded(failed=_words(error))
    answers.write(msgspec.json.encode(loaded) + b"\n")
    for line in stdin:
        try:
            answer = _encode(tokenizer, line)
        except BaseException as error:  # noqa: BLE001 - see `_words`
            answer = _Encoded(failed=_words(error))
        answers.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
