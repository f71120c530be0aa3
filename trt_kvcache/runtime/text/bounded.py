"""Tokenizers from anywhere, as far as text needs them: the interface of the library's, and bounds on time and memory.

Texts are encoded in another process. A stream decodes at each token, which leaves no time for that: this process takes
of the file a table of texts, and decoders that let a text grow by no more than a small factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trt_kvcache.child import ChildError
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.text.token_bytes import TokenBytes, each_decoder, read_token_bytes
from trt_kvcache.runtime.text.tokenizer_process import TokenizerProcess

__all__ = ["BoundedTokenizer"]

_LONGEST = 1 << 16  # characters of a token
_MOST = 64  # decoders
_GROWTH = 256  # of a text
_BOUNDED = (
    "ByteFallback", "ByteLevel", "BPEDecoder", "CTC", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece",
)  # fmt: skip


@dataclass(frozen=True)
class Encoding:
    """The tokens of a text."""

    ids: list[int]


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _File(msgspec.Struct):
    model: _Model
    decoder: dict[str, Any] | None = None


class BoundedTokenizer:
    """The answers of `tokenizers.Tokenizer` for the same file, made in a child process.

    Args:
        data: of a ``tokenizer.json``.
        name: of it, for messages.

    Raises:
        OptionError: the library does not read it, or nothing bounds the work of its decoders.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._process = TokenizerProcess(data)
        unread = f"{name} is not a tokenizer.json that this tokenizers library reads"
        try:
            loaded = self._process.load()
        except ChildError as error:
            raise OptionError(f"{unread}: it {error}") from None
        except OptionError as error:
            raise OptionError(f"{unread}: {error}") from None
        try:
            file = msgspec.json.decode(data, type=_File)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise OptionError(f"{unread}: {error}") from None
        vocab = file.model.vocab
        pairs = vocab.items() if isinstance(vocab, dict) else [(text, place) for place, (text, _) in enumerate(vocab)]
        self._texts = {number: text for text, number in pairs} | {token.id: token.text for token in loaded.added}
        self._numbers = dict(pairs) | {token.content: token.id for token in loaded.added}
        self._special = {token.id for token in loaded.added if token.special}
        self._size = loaded.vocab_size
        longest = max(map(len, self._texts.values()), default=0)
        if longest > _LONGEST:
            raise OptionError(f"{name} has a token of {longest} characters; supported are up to {_LONGEST}")
        _check_decoders(file.decoder, name)
        self._decoder = _read_decoder(file.decoder)
        self._said, self._name = file.decoder, name

    def token_bytes(self) -> TokenBytes:
        """The bytes of each token.

        Raises:
            OptionError: see `read_token_bytes`.
        """
        return read_token_bytes(self._texts, self._special, self._said, self._name)

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Tokens, with the added ones."""
        return self._size

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None: there is none."""
        return self._numbers.get(token)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The special tokens as a text spells them."""
        return tuple(text for text, number in self._numbers.items() if number in self._special)

    def encode(self, text: str, add_special_tokens: bool = True, *, plain: bool = False) -> Encoding:
        """The tokens of a text; `plain`: what looks like a special token is text.

        Raises:
            ChildError: the tokenizer exceeds a limit.
            OptionError: it fails on the text.
        """
        return Encoding(list(self._process.encode(text, special_tokens=add_special_tokens, plain=plain)))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; ids that there are not have none."""
        skipped = self._special if skip_special_tokens else ()
        texts = [self._texts[name] for name in ids if name in self._texts and name not in skipped]
        return " ".join(texts) if self._decoder is None else str(self._decoder.decode(texts))


def _read_decoder(decoder: dict[str, Any] | None) -> Any:
    import tokenizers

    model: dict[str, Any] = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    plain: dict[str, Any] = {"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model}
    return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(plain)).decoder


def _check_decoders(decoder: dict[str, Any] | None, name: str) -> None:
    """Refuse decoders that take any time, or make texts of any length."""
    decoders = list(each_decoder(decoder))
    growth = 1.0
    for part in decoders:
        kind = part.get("type")
        if kind not in _BOUNDED:
            raise OptionError(f"{name} decodes by {kind!r}; supported are {', '.join(_BOUNDED)}")
        if kind == "Replace":
            pattern, content = part.get("pattern"), part.get("content")
            text = pattern.get("String") if isinstance(pattern, dict) else None
            if not isinstance(text, str) or not text or not isinstance(content, str):
                raise OptionError(
                    f"{name} decodes by a Replace of {pattern!r}; supported is that of a text, {{'String': ...}}"
                )
            growth *= max(1.0, len(content.encode()) / len(text.encode()))
    if len(decoders) > _MOST or growth > _GROWTH:
        raise OptionError(
            f"{name} has {len(decoders)} decoders, which make a text {growth:.3g} times as long; supported are "
            f"{_MOST}, and {_GROWTH} times"
        )
