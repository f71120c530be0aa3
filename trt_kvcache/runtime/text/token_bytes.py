"""The bytes of each token of a tokenizer. Grammars use them to decide which tokens may come next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trt_kvcache.errors import OptionError


@dataclass(frozen=True)
class TokenBytes:
    """The tokens of a vocabulary as bytes.

    Attributes:
        texts: by id, the bytes of each token; for special tokens, their names, which are not text.
        special: ids of special tokens.
    """

    texts: Mapping[int, bytes]
    special: frozenset[int]


def read_token_bytes(
    texts: Mapping[int, str], special: Iterable[int], decoder: dict[str, Any] | None, name: str
) -> TokenBytes:
    """Convert the token texts of a ``tokenizer.json`` to bytes.

    Args:
        texts: texts of the tokens by id, as in the file.
        special: ids of special tokens.
        decoder: the entry ``decoder`` of the file.
        name: name of the tokenizer, for error messages.

    Raises:
        OptionError: the decoder does more than join the bytes of the tokens.
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


def _alphabet() -> dict[str, int]:
    """Map characters of byte-level tokenizers to bytes: visible bytes as themselves, others from character 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): byte for at, byte in enumerate(unseen)}


_BYTES = _alphabet()


def each_decoder(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield the decoder of a ``tokenizer.json``, and all decoders inside it."""
    if isinstance(decoder, dict):
        yield decoder
        inner = decoder.get("decoders")
        for part in inner if isinstance(inner, list) else ():
            yield from each_decoder(part)
