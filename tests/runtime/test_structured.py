"""Texts under grammars of llguidance: each is what its grammar allows, alone and with other rows beside."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed (extra: structured)")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from runtime.tokenizers_in_code import byte_fallback, byte_level
from serve.models import write_served

from trt_kvcache import DecodeSession, GenerationConfig, Grammars, Tokenizer
from trt_kvcache.errors import OptionError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "kind": {"enum": ["a", "ü"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 120}
PROMPTS = ["the cache", "naïve", "the model reads what the cache keeps"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("model"), capacity=192, eos_token="</s>")


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[DecodeSession]:
    with DecodeSession.open(folder, max_batch=3) as session:
        yield session


@pytest.fixture(scope="module")
def grammars(session: DecodeSession) -> Grammars:
    return Grammars(session)


def is_valid(text: str) -> bool:
    """By hand, so that llguidance does not judge itself."""
    found = json.loads(text)
    sizes = found["sizes"]
    return (
        list(found) == ["name", "sizes", "kind"]
        and len(found["name"]) <= 6
        and len(sizes) <= 2
        and all(type(size) is int and 0 <= size <= 99 for size in sizes)
        and found["kind"] in ("a", "ü")
    )


def test_json_follows_its_schema_alone_and_beside_others(session: DecodeSession, grammars: Grammars) -> None:
    grammar = grammars.json_schema(SCHEMA)
    for more in ({}, {"prompt_lookup_num_tokens": 3}):
        together = session.generate(PROMPTS, seed=3, grammar=grammar, **SAMPLED)
        assert all(is_valid(made.text) for made in together), together
        assert len({made.text for made in together}) > 1
        config = GenerationConfig(seed=3, **SAMPLED, **more)
        for i, prompt in enumerate(PROMPTS):
            slot = session.add(prompt, config, index=i, grammar=grammar)
            tokens = []
            while slot in session.running:
                tokens += [event.token for event in session.step()]
            assert tokens == together[i].tokens


def test_other_grammars(session: DecodeSession, grammars: Grammars) -> None:
    cases = [
        (grammars.regex("[a-c]{2,4}-[0-9]!"), lambda text: re.fullmatch("[a-c]{2,4}-[0-9]!", text)),
        (grammars.choice(["red", 'a "b"\n', "日本"]), lambda text: text in ("red", 'a "b"\n', "日本")),
        (grammars.lark('start: "x" start "y" | "z"'), lambda text: text.count("x") == text.count("y")),
        (grammars.lark('root ::= "x" root "y" | "z"'), lambda text: text.count("x") == text.count("y")),
    ]
    for grammar, holds in cases:
        for seed in range(4):
            made = session.generate("the", grammar=grammar, seed=seed, **SAMPLED)
            assert (made.finish_reason, bool(holds(made.text))) == ("eos", True), made.text
    cut = session.generate("the", grammar=grammars.json_object(), seed=1, do_sample=True, max_new_tokens=5)
    assert (cut.finish_reason, cut.text[0]) == ("length", "{")


REFUSED = [
    (lambda g: g.regex("(("), r"the regular expression does not compile: .*unclosed group"),
    (lambda g: g.regex("[^\\s\\S]"), "the regular expression allows no text"),
    (lambda g: g.json_schema({"type": "objekt"}), "the JSON schema does not compile: Invalid type: objekt"),
    (lambda g: g.json_schema({"enum": []}), "the JSON schema does not compile: Unsatisfiable schema"),
    (lambda g: g.json_schema({"if": {}}), r'the JSON schema does not compile: Unimplemented keys: \["if"\]'),
    (lambda g: g.json_schema("nope"), "the JSON schema is 'nope': .*; give a JSON object"),
    (lambda g: g.json_schema("[]"), "the JSON schema"),
    (lambda g: g.json_schema({"enum": ["\ud800"]}), "unexpected end of hex escape"),
    (lambda g: g.regex("\ud800"), "the regular expression is .*; give a Unicode text"),
    (lambda g: g.json_schema(["a"]), "the JSON schema is .*; give a JSON object"),
    (lambda g: g.lark("start: foo"), 'the grammar does not compile: .*unknown name: "foo"'),
    (lambda g: g.lark('top ::= "a"'), "the grammar cannot be read as GBNF: No 'root' rule"),
    (lambda g: g.lark('root ::= ("a"'), "the grammar cannot be read as GBNF: "),
    (lambda g: g.lark(5), "the grammar is 5; give a Unicode text"),
    (lambda g: g.choice([]), r"choice is \[\]; give at least one text"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1])
def test_what_does_not_compile_is_refused(grammars: Grammars, case: tuple[Any, str]) -> None:
    with pytest.raises(OptionError, match=case[1]):
        case[0](grammars)


def test_sessions_without_text_are_refused(folder: Path, session: DecodeSession) -> None:
    runner = session._runner
    for tokenizer, words in ((None, "open the session with a tokenizer.json"), (session.tokenizer, "names none")):
        with pytest.raises(OptionError, match=words):
            Grammars(DecodeSession(runner, tokenizer))


@pytest.mark.parametrize("made", [byte_level(), byte_fallback()], ids=["byte-level", "byte fallback"])
def test_bytes_of_tokens_are_those_of_the_text(made: Any) -> None:
    """Text in several scripts: the bytes of its tokens, joined, are what the tokenizer decodes."""
    tokenizer = Tokenizer(made)
    known = tokenizer.token_bytes()
    for text in ("the cache ", "naïve façade 日本語 😀", "<0x4> a\n\tb"):
        ids = tokenizer.encode(text, special_tokens=False)
        joined = b"".join(known.texts[token] for token in ids).decode()
        assert joined.strip(" ") == text.strip(" ")
    assert {known.texts[token] for token in known.special} >= {b"<s>", b"</s>"}


def test_tokenizers_of_words_are_refused() -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    with pytest.raises(OptionError, match="the tokenizer has the decoder none"):
        Tokenizer(made).token_bytes()
    made.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(OptionError, match="the tokenizer has the decoder WordPiece"):
        Tokenizer(made).token_bytes()
