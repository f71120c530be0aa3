"""A ``tokenizer.json`` in a child process: one from anywhere may take any time and memory, to be loaded and for a text.

Normalizers replace and grow, patterns backtrack, templates repeat: no look at the file tells what they cost.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

from trt_kvcache.child import Caller, Child, serve
from trt_kvcache.errors import OptionError

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
    """The library's view of the file."""

    vocab_size: int
    added: tuple[AddedToken, ...]


@dataclass(frozen=True)
class _Request:
    """A text to encode; None: the file follows."""

    text: str | None = None
    special_tokens: bool = False
    plain: bool = False


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
            OptionError: the library does not load it.
        """
        _end(self._children)
        self._children.append(Child("-m", __name__, memory=_MEMORY + _TIMES * len(self._data)))
        return self._children[0].ask(_Request(), Loaded, SECONDS, [self._data])

    def encode(self, text: str, *, special_tokens: bool, plain: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text; `plain`: what looks like a special token is text.

        Raises:
            ChildError: the tokenizer exceeds a limit.
            OptionError: it fails on the text.
        """
        with self._lock:
            if not self._children or not self._children[0].alive:
                self.load()
            request = _Request(text, special_tokens, plain)
            return self._children[0].ask(request, tuple[int, ...], SECONDS + len(text) / _SPEED)


def _end(children: list[Child]) -> None:
    while children:
        children.pop().end()


class _Work:
    """The child's side: it loads the tokenizer that comes first, and encodes texts."""

    tokenizer: Any = None

    def __call__(self, request: _Request, parts: list[bytes], _: Caller) -> Loaded | tuple[int, ...]:
        try:
            return self._load(parts.pop()) if request.text is None else self._encode(request)
        except BaseException as error:  # noqa: BLE001 - the library's panics are no Exceptions
            raise OptionError(" ".join(str(error).split())[:2000] or type(error).__name__) from None

    def _load(self, data: bytes) -> Loaded:
        import tokenizers

        tokenizer = self.tokenizer = tokenizers.Tokenizer.from_buffer(data)
        # Both are for training; here a prompt is what it is.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = [
            AddedToken(name, token.content, tokenizer.id_to_token(name) or "", bool(token.special))
            for name, token in tokenizer.get_added_tokens_decoder().items()
        ]
        return Loaded(tokenizer.get_vocab_size(with_added_tokens=True), tuple(added))

    def _encode(self, request: _Request) -> tuple[int, ...]:
        self.tokenizer.encode_special_tokens = request.plain
        ids = self.tokenizer.encode(request.text, add_special_tokens=request.special_tokens).ids
        if len(ids) > _LONGEST:
            raise OptionError(f"more than {_LONGEST} tokens come of it")
        return tuple(ids)


if __name__ == "__main__":
    serve(_Work(), _Request)
