"""`generate` from the command line, on small models that ONNX Runtime runs."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trt_kvcache import DecodeSession, GenerationConfig, Tokenizer
from trt_kvcache.cli.app import app
from trt_kvcache.cli.generate import GenerationFlags
from trt_kvcache.cli.prompts import read_text
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import Role
from trt_kvcache.runtime.events import TokenEvent

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

import numpy as np
import onnx
from decoders import DecoderConfig, write_decoder
from foreign_decoders import make_foreign
from hybrids import cross_model
from serve.models import write_served

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer beside it, as exporters leave them."""
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return write_served(tmp_path_factory.mktemp("model"), capacity=64, template=TEMPLATE, **named)


@pytest.mark.slow
def test_caches_that_grow_become_as_long_as_the_texts_can(tmp_path: Path) -> None:
    """Unless a capacity is given: then that ends a text."""
    config = DecoderConfig(vocab=300, layers=2, head_size=8, query_heads=4, kv_heads=2)
    onnx.save(make_foreign("concat", config), tmp_path / "model.onnx")
    arguments = ["--tokens", "1,2,3", "--tokens", "4,5", "--max-new-tokens", "70", "--ignore-eos"]

    def ends(*more: str) -> list[tuple[int, str]]:
        found = report(tmp_path, *arguments, *more)["sequences"]
        return [(len(sequence["tokens"]), sequence["finish_reason"]) for sequence in found]

    assert ends() == [(70, "length"), (70, "length")]
    assert ends("--capacity", "40") == [(38, "capacity"), (39, "capacity")]
    found, wanted = report(tmp_path, *arguments), report(tmp_path, *arguments, "--capacity", "200")
    assert [s["tokens"] for s in found["sequences"]] == [s["tokens"] for s in wanted["sequences"]]


def call(folder: Path, *arguments: str, stdin: str | None = None, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["generate", str(folder / "model.onnx"), *arguments], input=stdin)
    assert result.exit_code == code, result.output
    return result


def report(folder: Path, *arguments: str, **others: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(folder, *arguments, "--json", **others).stdout)
    return found


def expected(folder: Path, prompts: list[Any], **settings: Any) -> list[tuple[list[int], str]]:
    with DecodeSession.open(folder / "model.onnx", tokenizer=folder) as session:
        made = session.generate(prompts, GenerationConfig(**settings))
    return [(generation.tokens, generation.text) for generation in made]


def test_live_text_is_the_text(folder: Path) -> None:
    ((tokens, text),) = expected(folder, ["the cache"], max_new_tokens=9, eos_token_id=1)
    result = call(folder, "--prompt", "the cache", "--max-new-tokens", "9")
    assert result.stdout == text + "\n"
    assert re.search(rf"{len(tokens)} new \(.*\), the first after .* s, .* tokens/s; ONNX Runtime", result.stderr)


@pytest.mark.slow
def test_several_prompts_come_whole(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("the model", encoding="utf-8")
    ids = Tokenizer.load(folder).encode("naïve")
    prompts = ["the cache", "the model", ids]
    made = expected(folder, prompts, max_new_tokens=5)
    arguments = ["--prompt", "the cache", "--prompt-file", str(tmp_path / "prompt.txt"), "--tokens",
                 ",".join(map(str, ids)), "--max-new-tokens", "5", "--ignore-eos"]  # fmt: skip
    found = report(folder, *arguments, "--logprobs")
    assert [(sequence["tokens"], sequence["text"]) for sequence in found["sequences"]] == made
    assert found["sequences"][0]["prompt_tokens"] == len(Tokenizer.load(folder).encode("the cache"))
    assert [len(sequence["logprobs"]) for sequence in found["sequences"]] == [5, 5, 5]
    assert found["runs_on"].startswith("ONNX Runtime")
    times = found["timings"]
    assert times["new_tokens"] == 15
    assert 0 < times["first_token_seconds"] <= times["total_seconds"]
    assert min(times["open_seconds"], times["tokens_per_second"]) > 0
    shown = call(folder, *arguments).stdout
    assert sorted(re.findall(r"^--- (\d) \(length\)$", shown, re.MULTILINE)) == ["0", "1", "2"]
    for index, (_, text) in enumerate(made):
        assert f"--- {index} (length)\n{text}\n" in shown


def test_a_prompt_from_stdin(folder: Path) -> None:
    ((tokens, _),) = expected(folder, ["the end."], max_new_tokens=4)
    found = report(folder, "--prompt-file", "-", "--max-new-tokens", "4", "--ignore-eos", stdin="the end.")
    assert found["sequences"][0]["tokens"] == tokens


def test_a_prompt_from_a_closed_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(OptionError, match="--prompt-file - reads stdin, which is closed"):
        read_text(Path("-"))


@pytest.mark.slow
def test_sampling_can_be_repeated(folder: Path) -> None:
    arguments = ("--prompt", "the", "--temperature", "1.5", "--top-k", "0", "--max-new-tokens", "20", "--ignore-eos")
    first = report(folder, *arguments)
    assert isinstance(first["seed"], int)
    again = report(folder, *arguments, "--seed", str(first["seed"]))
    assert again["sequences"] == first["sequences"]
    assert report(folder, *arguments, "--seed", str(first["seed"] + 1))["sequences"] != first["sequences"]
    assert f"seed {first['seed']};" in call(folder, *arguments, "--seed", str(first["seed"])).stderr


def test_temperature_0_is_greedy(folder: Path) -> None:
    ((tokens, _),) = expected(folder, ["the cache"], max_new_tokens=5)
    arguments = ("--temperature", "0", "--top-p", "0.5", "--seed", "4", "--ignore-eos", "--max-new-tokens", "5")
    found = report(folder, "--prompt", "the cache", *arguments)
    assert (found["sequences"][0]["tokens"], found["seed"]) == (tokens, None)


def test_a_chat_template_is_told_more(tmp_path: Path) -> None:
    write_served(tmp_path, capacity=64, template="{{ mood }}:{% for m in messages %}{{ m.content }}{% endfor %}")
    told = ("--prompt", "hi", "--chat", "--chat-template-kwargs", '{"mood": "calm"}', "--max-new-tokens", "2")
    found = report(tmp_path, *told)
    assert found["sequences"][0]["prompt_tokens"] == len(Tokenizer.load(tmp_path).encode("calm:hi"))


def test_a_chat(folder: Path) -> None:
    rendered = Tokenizer.load(folder).encode("<s>system: brief\nuser: hi\n", special_tokens=False)
    assert rendered[0] == 0
    ((tokens, _),) = expected(folder, [rendered], max_new_tokens=4)
    found = report(folder, "--chat", "--system", "brief", "--prompt", "hi", "--max-new-tokens", "4", "--ignore-eos")
    assert found["sequences"][0]["prompt_tokens"] == len(rendered)
    assert found["sequences"][0]["tokens"] == tokens


@pytest.mark.parametrize(
    ("said_in", "settings", "end"),
    [
        ("tokenizer_config.json", {"eos_token": "</s>"}, 1),
        ("config.json", {"eos_token_id": 7, "model_type": "llama"}, 7),
        ("generation_config.json", {"eos_token_id": [8, 9]}, (8, 9)),
    ],
)
def test_token_ids_end_as_texts_do(said_in: str, settings: dict[str, Any], end: Any, tmp_path: Path) -> None:
    """The tokenizer beside the model names the end where no config does, for prompts of ids, too."""
    write_served(tmp_path, eos_token="</s>")
    (tmp_path / "generation_config.json").unlink()  # beside which config.json says nothing
    (tmp_path / said_in).write_text(json.dumps(settings))
    assert GenerationFlags().config(tmp_path, None).eos_token_id == end
    assert GenerationFlags(ignore_eos=True).config(tmp_path, None).eos_token_id == ()


def test_beams(folder: Path) -> None:
    """Beams give all tokens at the end."""
    ((tokens, text),) = expected(folder, ["the cache"], max_new_tokens=6, num_beams=3, early_stopping="never")
    beams = ("--num-beams", "3", "--early-stopping", "never", "--ignore-eos")
    found = report(folder, "--prompt", "the cache", "--max-new-tokens", "6", *beams)
    assert [(s["tokens"], s["text"]) for s in found["sequences"]] == [(tokens, text)]
    times = found["timings"]
    assert times["tokens_per_second"] == pytest.approx(len(tokens) / times["total_seconds"], rel=0.01)


def test_the_prefix_cache_tells_how_it_did(folder: Path) -> None:
    ids = ",".join(map(str, range(40)))
    arguments = ("--tokens", ids, "--tokens", f"{ids},50", "--max-batch", "1", "--max-new-tokens", "3")
    plain = report(folder, *arguments)
    found = report(folder, *arguments, "--prefix-cache", "1MiB")
    assert found["sequences"] == plain["sequences"]
    assert plain["prefix_cache"] is None
    assert found["prefix_cache"] == {"lookups": 2, "hits": 1, "saved_tokens": 32, "blocks": 1, "dropped": 0}
    told = call(folder, *arguments, "--prefix-cache", "1MiB").stderr
    assert ", 32 prompt tokens from the prefix cache; " in told


@pytest.mark.few(2)
@pytest.mark.parametrize("extra", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("count", [1, 2])
def test_interrupted_shows_what_was_made(
    extra: list[str], count: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during the fourth event: four are shown, the stream is closed, the handler is put back."""
    real, seen = DecodeSession.stream, []
    before = signal.getsignal(signal.SIGINT)

    def stream(*arguments: Any, **beside: Any) -> Iterator[TokenEvent]:
        try:
            for at, event in enumerate(real(*arguments, **beside)):
                if at == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                seen.append(event)
                yield event
        finally:
            seen.append("closed")

    monkeypatch.setattr(DecodeSession, "stream", stream)
    prompts = ["--tokens", "5,6,7"] * count
    result = call(folder, *prompts, "--max-new-tokens", "30", *extra, code=130)
    assert len(seen) == 5
    assert seen[-1] == "closed"
    made = [[event.token for event in seen[:-1] if event.sequence == index] for index in range(count)]
    if extra:
        sequences = json.loads(result.stdout)["sequences"]
        assert [sequence["tokens"] for sequence in sequences] == made
        assert {sequence["finish_reason"] for sequence in sequences} == {"cancelled"}
    elif count == 1:
        assert result.stdout == " ".join(map(str, made[0])) + "\n"
        assert "4 new (cancelled)" in result.stderr
    else:
        assert result.stdout == "".join(f"--- {i} (cancelled)\n{' '.join(map(str, m))}\n" for i, m in enumerate(made))
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_twice_ends_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*_: Any, **__: Any) -> Iterator[TokenEvent]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        yield TokenEvent(0, 1)

    monkeypatch.setattr(DecodeSession, "stream", stream)
    result = call(folder, "--tokens", "5", "--json", code=130)
    assert (result.stdout, result.stderr) == ("", "error: interrupted\n")


def test_a_text_that_ends_by_capacity_is_a_warning(tmp_path: Path) -> None:
    write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1, capacity=16))

    def said(*arguments: str) -> str:
        return str(call(tmp_path, "--tokens", "1,2,3", *arguments).stderr)

    full = "full at 16 tokens; more need a larger --capacity\n"
    assert f"warning: 1 text ends because its cache is {full}" in said("--max-new-tokens", "99")
    twice = said("--tokens", "4", "--max-new-tokens", "99", "--json")
    assert twice == f"warning: 2 texts end because their caches are {full}"
    assert "warning" not in said("--max-new-tokens", "3")


@pytest.fixture
def crossing(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A decoder with cross-attention, and arrays for it."""
    path = tmp_path / "model.onnx"
    onnx.save(cross_model("keys", "none"), path)
    with DecodeSession.open(path) as session:
        given = [t for t in session.plan.tensors if t.role is Role.CONSTANT]
    rng = np.random.default_rng(0)
    sizes = {"batch": 1, "encoder": 5}
    shapes = {
        t.name: [d if isinstance(d, int) else sizes[a] for a, d in zip(t.axes, t.shape, strict=True)] for t in given
    }
    return tmp_path, {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.slow
def test_constants_come_from_files(crossing: tuple[Path, dict[str, Any]]) -> None:
    folder, arrays = crossing
    np.savez(folder / "a.npz", **arrays)
    np.savez(folder / "b.npz", **{name: 2 * array for name, array in arrays.items()})
    prompts, ends = ["--tokens", "5,6", "--tokens", "7"], ["--max-new-tokens", "4"]
    one = report(folder, *prompts, *ends, "--constants", str(folder / "a.npz"))["sequences"]
    two = report(folder, *prompts, *ends, *(a for f in "ab" for a in ("--constants", str(folder / f"{f}.npz"))))
    with DecodeSession.open(folder / "model.onnx") as session:
        config = GenerationConfig(max_new_tokens=4)
        assert [s["tokens"] for s in one] == [g.tokens for g in session.generate([[5, 6], [7]], config, [arrays] * 2)]
        doubled = {name: 2 * array for name, array in arrays.items()}
        expected = [g.tokens for g in session.generate([[5, 6], [7]], config, [arrays, doubled])]
    assert [s["tokens"] for s in two["sequences"]] == expected


@pytest.mark.parametrize(
    ("flag", "given", "pattern"),
    [
        ("--json-schema", '{"const": {"a": 22}}', r'\{"a": 22\}'),
        ("--json-schema", "schema.json", r"\[(true|false)"),
        ("--regex", "x[0-9]{2}y", r"x\d\dy"),
        ("--grammar", "one.lark", "(yes|no)"),
    ],
)
def test_a_text_has_the_form_that_is_asked_for(
    folder: Path, flag: str, given: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: structured)")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(
        '{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1}'
    )
    (tmp_path / "one.lark").write_text('start: "yes" | "no"')
    found = report(folder, "--prompt", "the cache", flag, given, "--max-new-tokens", "40")
    assert re.match(pattern, found["sequences"][0]["text"]), found["sequences"][0]["text"]
    assert found["sequences"][0]["finish_reason"] == "eos"


def test_forms_that_cannot_be(folder: Path) -> None:
    arguments = ("--prompt", "x", "--regex", "a", "--grammar", "none.lark")
    assert "--regex and --grammar restrict the same text" in call(folder, *arguments, code=1).stderr
    assert "--grammar none.lark cannot be read" in call(folder, "--prompt", "x", *arguments[4:], code=1).stderr
    assert "does not compile" in call(folder, "--prompt", "x", "--regex", "(", code=1).stderr
