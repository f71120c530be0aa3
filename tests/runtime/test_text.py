"""Text that streams is the text: no half characters, nothing taken back, stop strings wherever tokens end."""

import json
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trt_kvcache.errors import OptionError, PromptError
from trt_kvcache.runtime.text.incremental import StopStrings, TextStream
from trt_kvcache.runtime.text.tokenizer import Tokenizer

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from runtime.tokenizers_in_code import byte_fallback, byte_level
from tokenizers import Tokenizer as Raw
from tokenizers import models, processors

patient = settings(deadline=None, max_examples=200)


@cache
def gpt() -> Tokenizer:
    return Tokenizer(byte_level())


@cache
def llama() -> Tokenizer:
    return Tokenizer(byte_fallback())


def pieces(tokenizer: Tokenizer, tokens: list[int], prompt: list[int] | tuple[int, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(token) for token in tokens), stream.flush()]


@patient
@given(st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xFF]), max_size=80))
@example([0xFF] * 70)
@example([0xF0, 0x9F, 0x98] * 20 + [0x80])
def test_any_bytes_stream_to_their_text(values: list[int]) -> None:
    """One token per byte; long runs that fit no character pass the bound of the window."""

    class Bytes:
        def decode(self, tokens: Any) -> str:
            return bytes(tokens).decode("utf-8", "replace")

    stream, whole, joined = TextStream(Bytes()), bytes(values).decode("utf-8", "replace"), ""
    for value in values:
        joined += stream.push(value)
        assert whole.startswith(joined)
    assert joined + stream.flush() == whole


def test_what_is_out_stays_where_the_decoder_takes_it_back() -> None:
    """Byte fallback decodes a run of bytes as a whole: one that fits nothing spoils the characters before it."""
    euro, bad = [3 + byte for byte in "€".encode()], 3 + 0xFF
    assert llama().decode([*euro, bad]) == "\ufffd" * 4
    assert "".join(pieces(llama(), [*euro, bad, *llama().encode("a€")[1:]])) == "€\ufffda€"


def test_the_space_before_the_first_new_word_stays() -> None:
    prompt = llama().encode("the")
    new = llama().encode("the cow")[len(prompt) :]
    assert "".join(pieces(llama(), new, prompt)) == " cow"
    assert "".join(pieces(llama(), new)) == "cow"


def test_a_prompt_can_end_inside_a_character() -> None:
    lead, rest = [3 + byte for byte in "é".encode()]
    assert "".join(pieces(llama(), [rest], [lead])) == "é"
    assert "".join(pieces(llama(), [rest, *(3 + byte for byte in "€".encode())], [lead])) == "é€"


stops_and_chunks = st.tuples(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=12),
)


@patient
@given(stops_and_chunks)
@example((["abc", "b"], ["a", "b", "c"]))
@example((["aab"], ["aa", "ab"]))
def test_stop_strings_are_found_however_the_text_comes(case: tuple[list[str], list[str]]) -> None:
    """The text ends before the stop string that is complete first; without one, it is whole."""
    stops, chunks = case
    whole = "".join(chunks)
    ends = [(at + len(stop), at) for stop in stops for at in range(len(whole)) if whole.startswith(stop, at)]
    expected = whole[: min(ends)[1]] if ends else whole
    watch = StopStrings(stops)
    given_out = ""
    for chunk in chunks:
        given_out += watch.push(chunk)
        assert expected.startswith(given_out)
    assert given_out + watch.flush() == expected
    assert watch.matched == bool(ends)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    watch = StopStrings(["STOP"])
    assert [watch.push(text) for text in ("go ST", "AY", " S", "TO", "P now", "x")] == ["go ", "STAY", " ", "", "", ""]


def saved(folder: Path, settings: object = None, template: str | None = None) -> Path:
    path = folder / "tokenizer.json"
    byte_level().save(str(path))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


@pytest.mark.parametrize("make", [byte_level, byte_fallback], ids=lambda f: f.__name__)
def test_a_file_encodes_and_decodes_as_the_library(make: Callable[[], Raw], tmp_path: Path) -> None:
    raw = make()
    raw.add_special_tokens(["<end>"])
    raw.add_tokens(["added word"])
    raw.post_processor = processors.TemplateProcessing(
        single="$A <end>", pair="$A $B", special_tokens=[("<end>", raw.token_to_id("<end>"))]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    read, rng = Tokenizer.load(tmp_path), random.Random(0)
    assert read.vocab_size == raw.get_vocab_size()
    for text in ("", "The cache keeps", "the added word <end> café 日本 " * 3):
        for special_tokens in (True, False):
            assert (
                read.encode(text, special_tokens=special_tokens)
                == raw.encode(text, add_special_tokens=special_tokens).ids
            )
    for _ in range(50):
        ids = [rng.randrange(raw.get_vocab_size() + 1) for _ in range(rng.randint(0, 12))]
        assert read.decode(ids) == raw.decode(ids)


def test_a_text_that_is_none_is_refused() -> None:
    with pytest.raises(PromptError, match="a lone surrogate at character 2"):
        gpt().encode("ab\udcff")


@pytest.mark.parametrize("error", [None, BaseException("no entry found for key")], ids=["error", "panic"])
def test_a_text_on_which_the_tokenizer_fails_is_refused(error: BaseException | None) -> None:
    """Words that it does not know, and no token for those; and panics of the library's, which are no Exceptions."""
    raw: Any = Raw(models.WordLevel({"a": 0}, unk_token="<unk>"))
    words = "Missing .UNK. token from the vocabulary"
    if error is not None:
        raw, words = Mock(**{"encode.side_effect": error}), "no entry found for key"
    with pytest.raises(PromptError, match=f"words.json fails on the text: .*{words}; use the tokenizer of the model"):
        Tokenizer(raw, name="words.json").encode("b")
    with pytest.raises(KeyboardInterrupt):
        Tokenizer(Mock(**{"encode.side_effect": KeyboardInterrupt})).encode("b")


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}], ids=["text", "object"])
def test_special_tokens_are_named_beside_it(eos: object, tmp_path: Path) -> None:
    read = Tokenizer.load(saved(tmp_path, {"eos_token": eos, "pad_token": None, "add_bos_token": True}))
    assert read.eos_token_id == 1
    assert read.special_tokens == {"eos_token": "</s>"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json cannot be read: No such file"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer.json that this tokenizers library reads"),
        ("tokenizer.json", '{"model": {}}', "tokenizer.json that this tokenizers library reads: "),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not JSON"),
        (
            "tokenizer_config.json",
            '{"eos_token": "a\\ud800"}',
            r"tokenizer.json: its eos_token 'a\\ud800' is not Unicode text",
        ),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds list"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8 text"),
    ],
)
def test_bad_files(name: str, text: str | bytes | None, message: str, tmp_path: Path) -> None:
    saved(tmp_path, settings={})
    (tmp_path / name).unlink(missing_ok=True)
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OptionError, match=message):
        Tokenizer.load(tmp_path)


TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
    {%- if message.role not in ("user", "assistant", "system") %}
        {{- raise_exception("no role " + message.role) }}
    {%- endif %}
[{{ message.role }}] {{ message.content | trim }}
{% endfor %}
{% if add_generation_prompt %}
[assistant]
{%- endif %}"""

CHAT = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi"}]
SEVERAL = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages | tojson }}"}]
OF_TRANSFORMERS = (
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{% generation %}{{ {'é': m.content} | tojson }}{% endgeneration %}{% endfor %}"
    "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ messages[0].content }}"
)


def rendered(tmp_path: Path, template: Any, own: str | None = None) -> str:
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | ({"chat_template": template} if template else {})
    return Tokenizer.load(saved(tmp_path, settings, own)).render_chat(CHAT)


@pytest.mark.parametrize(
    ("template", "own", "text"),
    [(TEMPLATE, None, "<s>[system] be brief\n[user] hi\n[assistant]"),
     ("old", "{{ messages[0].content }}{{ messages[1].content }} new", " be brief hi new"),  # a file of its own counts
     (SEVERAL, None, json.dumps(CHAT)), (OF_TRANSFORMERS, None, '{"é": "hi"}4True be brief ')],
    ids=["a chat", "its own file", "of several the default", "what templates of transformers use"],
)  # fmt: skip
def test_a_chat_becomes_a_prompt(template: Any, own: str | None, text: str, tmp_path: Path) -> None:
    assert rendered(tmp_path, template, own) == text


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('only two roles') }}", "failed: TemplateError: only two roles"),
    ("{% for %}", "failed: TemplateSyntaxError"),
    ("{{ messages.append(1) }}", "failed: SecurityError"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed: SecurityError"),
    ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
    (None, "has no chat template"),
])  # fmt: skip
def test_a_template_that_fails_or_breaks_out(template: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        rendered(tmp_path, template)


@pytest.mark.parametrize("library", ["tokenizers", "jinja2"])
def test_a_missing_library_is_named(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(OptionError, match=r"pip install 'trt-kvcache\[text\]'"):
        rendered(tmp_path, TEMPLATE)


def test_settings_of_training_do_not_change_a_prompt(tmp_path: Path) -> None:
    made = byte_level()
    wanted = made.encode("the cache keeps").ids
    made.enable_truncation(2)
    made.enable_padding(length=64)
    made.save(str(tmp_path / "tokenizer.json"))
    read = Tokenizer.load(tmp_path)
    assert (read.encode("the cache keeps"), read.decode(wanted)) == (wanted, "the cache keeps")


def test_messages_that_are_no_json_are_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    tokenizer = Tokenizer(byte_level(), {"chat_template": "{{ messages[0].content }}"})
    for message in ({"role": "user", "content": deep}, 3):
        with pytest.raises(OptionError, match="the messages of a chat have to be JSON"):
            tokenizer.render_chat([message])
