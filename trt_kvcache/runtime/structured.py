"""Structured output: grammars of llguidance, compiled for the tokenizer of a session."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.arguments import shown
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.generation.token_masks import Grammar, Mask, TokenMask, words
from trt_kvcache.runtime.token_inputs import common_length

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from trt_kvcache.runtime.session import DecodeSession
    from trt_kvcache.runtime.text.tokenizer import Tokenizer


JSON_FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python's ``json.dumps`` writes it, on one line. With free spaces a text could continue forever."""

_LEXER_STATES = 50_000
"""Most states of llguidance's lexer; one takes about 2 kB."""


class Grammars:
    """Compiles grammars for a session's tokenizer and vocabulary. Its creation takes time: it reads all tokens.

        grammars = Grammars(session)
        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        print(session.generate("Answer in JSON.", grammar=grammars.json_schema(schema)).text)

    A grammar may be used for any number of sequences, also at the same time. When the text is complete, the grammar
    allows an end-of-sequence token.

    Args:
        session: a session with a tokenizer whose tokens are bytes, and a config that names end-of-sequence tokens.

    Raises:
        OptionError: llguidance is not installed, or the session lacks the tokenizer or the end tokens.
    """

    def __init__(self, session: DecodeSession) -> None:
        try:
            import llguidance
        except ImportError:
            raise OptionError("grammars need llguidance: pip install 'trt-kvcache[structured]'") from None
        tokenizer = session.tokenizer
        if not hasattr(tokenizer, "token_bytes"):
            raise OptionError("grammars need the bytes of each token; open the session with a tokenizer.json")
        ends = [token for token in session.config.eos_token_ids if token < session.vocab]
        if not ends:
            raise OptionError(
                "a grammar ends its text with an end-of-sequence token, and the model names none; name one in "
                "generation_config.json or tokenizer_config.json"
            )
        self._words = words(session.vocab)
        self._vocabulary = _Vocabulary(tokenizer, ends, session.vocab)
        wrapped: Any = self._vocabulary
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=session.vocab, eos_token=ends)
        self._vocabulary.greedy = self._tokenizer.greedy_tokenize
        self._matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)

    def json_schema(self, schema: Mapping[str, Any] | str) -> Grammar:
        """Return a grammar of JSON texts that match a schema: on one line, with properties in the schema's order.

        `schema` is a JSON object or its text. Raises `OptionError` if it is not a JSON schema, has keywords that
        llguidance does not know, or allows no text.
        """
        try:
            content = json.loads(schema) if isinstance(schema, str) else dict(schema)
            grammar = self._matcher.grammar_from_json_schema(json.dumps(content), defaults=JSON_FORM)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"the JSON schema is {shown(schema)}: {error}; give a JSON object") from None
        return self._compile(grammar, "JSON schema")

    def json_object(self) -> Grammar:
        """Return a grammar of any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Grammar:
        """Return a grammar of texts that fully match a regular expression, in the syntax of Rust's ``regex`` crate.

        Raises `OptionError` if the expression does not compile, or matches no text.
        """
        what = "regular expression"
        return self._compile(self._matcher.grammar_from_regex(_text(pattern, what)), what)

    def choice(self, texts: Sequence[str]) -> Grammar:
        """Return a grammar that allows exactly one of these texts. `OptionError` if there are none, or one is empty."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise OptionError(f"choice is {shown(texts)}; give at least one text, and no empty ones")
        return self.lark("start: " + " | ".join(map(json.dumps, texts)))

    def lark(self, grammar: str) -> Grammar:
        """Return a context-free grammar. llguidance's dialect of Lark and llama.cpp's GBNF are supported.

        `grammar` is a text with a rule ``start`` (Lark), or ``root`` (GBNF, whose rules have ``::=``). Raises
        `OptionError` if the grammar does not compile, or allows no text.
        """
        from llguidance.gbnf_to_lark import any_to_lark

        text = _text(grammar, "grammar")
        try:
            text = any_to_lark(text) if "::=" in text else text
        except Exception as error:  # noqa: BLE001 - the converter raises several classes, none of its own
            raise OptionError(f"the grammar cannot be read as GBNF: {error}") from None
        return self._compile(self._matcher.grammar_from_lark(text), "grammar")

    @property
    def special_texts(self) -> list[str]:
        """The names of special tokens, such as ``<|im_end|>``. The text of a generation leaves them out."""
        return [self._vocabulary.tokens[token].decode() for token in self._vocabulary.special_token_ids]

    def _compile(self, grammar: str, what: str) -> Grammar:
        matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise OptionError(f"the {what} does not compile: {_reason(matcher)}")
        compiled = _Matched(matcher, self._words)
        try:
            able = bool(compiled.start()(np.empty(0, np.int64)).any())
        except OptionError:
            able = False
        if not able:
            raise OptionError(f"the {what} allows no text that the model's tokens can write; give another")
        return compiled


class _Vocabulary:
    """The vocabulary of a session, in the form that llguidance expects of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], vocab: int) -> None:
        table = tokenizer.token_bytes()
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.tokens = [table.texts.get(token, b"") for token in range(vocab)]
        self.special_token_ids = sorted({*ends, *(token for token in table.special if token < vocab)})
        self.greedy: Callable[[str], list[int]]

    def __call__(self, text: str) -> list[int]:
        """Return token ids for a text that a grammar forces: the tokenizer's ids if they decode to it, else others."""
        try:
            ids = self._tokenizer.encode(text, special_tokens=False)
        except Exception:  # noqa: BLE001 - a tokenizer may fail on a part of a text; other tokens write it, too
            ids = []
        # Tokenizers may add a space before the text, or normalize it.
        written = b"".join(self.tokens[token] if token < len(self.tokens) else b"" for token in ids)
        good = written == text.encode() and set(ids).isdisjoint(self.special_token_ids)
        return ids if good else self.greedy(text)


class _Matched:
    """A compiled grammar. Each sequence uses a copy, which keeps track of the tokens that it has read."""

    def __init__(self, matcher: Any, most: int) -> None:
        self._matcher, self._words = matcher, most
        self._read: list[int] = []

    def start(self) -> TokenMask:
        return _Matched(self._matcher.deep_copy(), self._words)

    def __call__(self, new_tokens: npt.NDArray[np.int64]) -> Mask:
        """Return the bit mask of tokens allowed after `new_tokens`; `OptionError` if llguidance exceeds a limit."""
        tokens: list[int] = new_tokens.tolist()
        same = common_length(self._read, tokens)
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
        self._read = tokens[: same + self._matcher.try_consume_tokens(tokens[same:])]
        mask = np.zeros(self._words, np.int32)
        if len(self._read) == len(tokens):
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise OptionError(f"the grammar cannot be followed: {_reason(self._matcher)}")
        return mask


def _text(value: str, what: str) -> str:
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        raise OptionError(f"the {what} is {shown(value)}; give a Unicode text")
    return value


def _reason(matcher: Any) -> str:
    return " ".join(str(matcher.get_error()).replace("<non-verbose/>", "").split())[:500]
