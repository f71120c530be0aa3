"""Tokenizers of the ``tokenizers`` library, with the settings that transformers stores beside them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_kvcache.errors import OptionError, PromptError
from trt_kvcache.files import read_file, read_object
from trt_kvcache.runtime.text.chat_template import Chat, Part, render

if TYPE_CHECKING:
    import tokenizers


_LARGEST = 1 << 28
"""Most bytes of a ``tokenizer.json``; Gemma 3's, with 262,144 tokens, has 33 MB."""


class Tokenizer:
    """Converts text to token ids and back."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, settings: dict[str, Any] | None = None, name: str = "") -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: an object of the ``tokenizers`` library.
            settings: contents of ``tokenizer_config.json``.
            name: name of the tokenizer for error messages.

        Raises:
            OptionError: the text of a special token cannot be written as UTF-8.
        """
        self._tokenizer = tokenizer
        self._settings = settings or {}
        self.name = name or "the tokenizer"
        for token, text in self.special_tokens.items():
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise OptionError(
                    f"{self.name}: its {token} {text!a} is not Unicode text; correct it in tokenizer_config.json"
                )

    def __repr__(self) -> str:
        return f"<Tokenizer: {self.name}, {self._tokenizer.get_vocab_size()} tokens>"

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``, and ``tokenizer_config.json`` and ``chat_template.jinja`` if its folder has them.

        `path` is the file, or its folder. Load only trusted files: a tokenizer or a chat template can take unlimited
        time and memory. Raises `OptionError` if a file is unreadable, or the ``tokenizers`` library is missing.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            import tokenizers
        except ImportError:
            raise OptionError(
                f"{path} needs the tokenizers library: pip install 'trt-kvcache[text]'; or give token ids"
            ) from None
        try:
            data = read_file(path, _LARGEST)
        except OSError as error:
            raise OptionError(f"{path} cannot be read: {error.strerror}") from None
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic inside the library is not an `Exception`
            raise OptionError(
                f"{path} is not a tokenizer.json that this tokenizers library reads: {' '.join(str(error).split())}"
            ) from error
        # Padding and truncation are for training; they would change a prompt.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(tokenizer, _settings_beside(path), str(path))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token from ``tokenizer_config.json``; None if the file has none."""
        name = self.special_tokens.get("eos_token")
        token = None if name is None else self._tokenizer.token_to_id(name)
        return None if token is None else int(token)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of ``bos_token``, ``eos_token`` and others, by name in ``tokenizer_config.json``."""
        named = {key: value for key, value in self._settings.items() if key.endswith("_token")}
        texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Args:
            text: the prompt.
            special_tokens: add the tokenizer's own tokens around the text, such as a first token. A rendered chat
                already has its special tokens.

        Raises:
            PromptError: `text` cannot be written as UTF-8 (for example, it was decoded from invalid bytes), or the
                tokenizer fails on it.
        """
        return self._encode(text, special_tokens=special_tokens, plain=False)

    def _encode(self, text: str, *, special_tokens: bool, plain: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the text is not Unicode text: a lone surrogate at character {error.start}") from None
        try:
            tokenizer = self._plain if plain else self._tokenizer
            ids: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens).ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic inside the library is not an `Exception`
            raise PromptError(
                f"{self.name} fails on the text: {' '.join(str(error).split())}; use the tokenizer of the model, or "
                "give token ids"
            ) from error
        return ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that treats the names of special tokens as ordinary text."""
        tokenizer = deepcopy(self._tokenizer)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def token_bytes(self) -> TokenBytes:
        """Return the bytes of each token, for grammars. `OptionError` if texts are not the joined bytes of tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        texts = {token: text for text, token in self._tokenizer.get_vocab().items()}
        special = [token for token, about in added.items() if about.special]
        return read_token_bytes(texts, special, json.loads(self._tokenizer.to_str())["decoder"], self.name)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens, with U+FFFD for bytes that are not UTF-8."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def render_chat(self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **how: Any) -> str:
        """Return the prompt of a chat, up to where the model's answer begins.

        Args:
            messages: ``{"role": "user", "content": "..."}`` and so on.
            tools: tools for the model, ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
            how: fields of `trt_kvcache.runtime.text.chat_template.Chat`.

        Raises:
            OptionError: there is no chat template, it fails on the messages, or it ignores one of them.
        """
        return "".join(part.text for part in self._parts(messages, tools, how))

    def chat_tokens(self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **how: Any) -> list[int]:
        """Return the token ids of the prompt from `render_chat`. Special tokens spelled in messages become text.

        `render_chat` explains the arguments; `render_chat` and `encode` list the errors.
        """
        # The template writes the special tokens itself.
        parts = self._parts(messages, tools, how)
        return [token for part in parts for token in self._encode(part.text, special_tokens=False, plain=part.plain)]

    def _parts(self, messages: Sequence[Any], tools: Sequence[Any] | None, how: dict[str, Any]) -> Sequence[Part]:
        try:
            import jinja2  # noqa: F401 - `render` needs it
        except ImportError:
            raise OptionError("a chat template needs Jinja2: pip install 'trt-kvcache[text]'") from None
        chat = Chat([*messages], None if tools is None else [*tools], **how)
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        return render(self._template(tools), chat, self.special_tokens, special, self.name)

    def _template(self, tools: Sequence[Any] | None) -> str:
        template = self._settings.get("chat_template")
        if isinstance(template, list):
            # There may be several templates by name: one for tool use, and "default" for plain chats.
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("tool_use" if tools and "tool_use" in named else "default")
        if not isinstance(template, str):
            raise OptionError(
                f"{self.name} has no chat template: none in a tokenizer_config.json or chat_template.jinja beside it; "
                "give the prompt as plain text"
            )
        return template


def _settings_beside(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    config, template = path.with_name("tokenizer_config.json"), path.with_name("chat_template.jinja")
    try:
        if config.exists():
            settings = read_object(config)
        if template.exists():
            # transformers 5 writes the template to its own file, which has priority
            settings["chat_template"] = read_file(template).decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"{template} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise OptionError(f"{error.filename} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{config} {error}") from None
    return settings


@dataclass(frozen=True)
class TokenBytes:
    """The tokens of a vocabulary as bytes.

    Attributes:
        texts: the bytes of each token, by id; for a special token, its name, which is not part of a text.
        special: ids of special tokens.
    """

    texts: Mapping[int, bytes]
    special: frozenset[int]


def read_token_bytes(
    texts: Mapping[int, str], special: Iterable[int], decoder: dict[str, Any] | None, name: str
) -> TokenBytes:
    """Convert the token texts of a ``tokenizer.json`` to bytes.

    `decoder` is the file's entry ``"decoder"``. Raises `OptionError` if this decoder does more than join bytes.
    """
    parts = list(each_decoder(decoder))
    kinds = {str(part.get("type")) for part in parts}
    known = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}
    if not kinds or kinds - known:
        names = ", ".join(sorted(kinds - known)) or "none"
        raise OptionError(
            f"grammars need a tokenizer whose tokens are bytes, and {name} has the decoder {names}; use a model whose "
            "tokenizer is byte-level, or falls back to bytes"
        )
    replaced = [(p["pattern"]["String"], p["content"]) for p in parts if p.get("type") == "Replace"]
    replaced += [(p.get("replacement", "▁"), " ") for p in parts if p.get("type") == "Metaspace"]
    skipped = frozenset(special)
    read = {token: _read(text, kinds, replaced) for token, text in texts.items() if token not in skipped}
    return TokenBytes(read | {token: texts[token].encode() for token in skipped if token in texts}, skipped)


def _read(text: str, kinds: Collection[str], replaced: Iterable[tuple[str, str]]) -> bytes:
    if "ByteLevel" in kinds:
        known = [_BYTES.get(character) for character in text]
        # An added token that is not written in this alphabet stands for its own text.
        return text.encode() if None in known else bytes(b for b in known if b is not None)
    if "ByteFallback" in kinds and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    for old, new in replaced:
        text = text.replace(old, new)
    return text.encode()


_SEEN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTES = {chr(byte): byte for byte in _SEEN} | {chr(256 + at): byte for at, byte in enumerate(_UNSEEN)}
"""The byte for each character of a byte-level token. Characters from 256 on stand for bytes that are not printable."""


def each_decoder(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield the decoder in a ``tokenizer.json``, and all decoders that it contains."""
    if isinstance(decoder, dict):
        yield decoder
        inner = decoder.get("decoders")
        for part in inner if isinstance(inner, list) else ():
            yield from each_decoder(part)
