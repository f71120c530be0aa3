"""Files from anywhere: pipes, devices, files without end and templates that never end are one line, at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from decoders import DecoderConfig, write_decoder
from hostile.files import NO_FILES
from hostile.texts import PATTERNS, TEMPLATES

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.engine.generation import settings_beside
from trt_kvcache.engine.manifest import load_manifest
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.files import is_inside, read_file
from trt_kvcache.importer.interface.config import load_patterns
from trt_kvcache.importer.plan import Role, TensorRole
from trt_kvcache.runtime import embeddings
from trt_kvcache.verify.inputs import load_inputs

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes with names")

from runtime.tokenizers_in_code import byte_level  # noqa: E402

from trt_kvcache.runtime.text import template_process  # noqa: E402
from trt_kvcache.runtime.text.tokenizer import Tokenizer  # noqa: E402

SECONDS = 60
"""Of one test: anything that waits for ever is ended."""


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _saved_tokenizer(where: Path) -> Path:
    byte_level().save(str(where / "tokenizer.json"))
    return where


def _cache(path: Path) -> None:
    model = write_decoder(path.parent / "model.onnx", DecoderConfig(layers=1, head_size=16, capacity=16))
    with DecodeSession.open(model) as session:
        session.cache.load(path)


TABLE = TensorRole("embeds", "input", Role.TOKENS, "float32", ("batch", "sequence", 8), "graph", ())
READERS: dict[str, Callable[[Path], object]] = {
    "tokenizer.json": Tokenizer.load,
    "tokenizer_config.json": lambda path: Tokenizer.load(_saved_tokenizer(path.parent)),
    "chat_template.jinja": lambda path: Tokenizer.load(_saved_tokenizer(path.parent)),
    "generation_config.json": GenerationConfig.from_file,
    "genai_config.json": lambda path: settings_beside(path.parent),
    "model.engine.json": load_manifest,
    "roles.yaml": load_patterns,
    "arrays.npz": lambda path: load_inputs(str(path)),
    "saved.cache": _cache,
    "table.npy": embeddings._read_npy,
    "table.safetensors": lambda path: embeddings._read_safetensors(path, "", TABLE),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("make", NO_FILES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_none_or_has_no_end(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(
        TrtKvCacheError, match=r"not a regular file|larger than|[Ii]s a directory|a folder|cannot be read|not a saved"
    ):
        READERS[name](tmp_path / name)


def test_a_file_within_its_limit_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a" * 100)
    assert read_file(tmp_path / "x", 100) == b"a" * 100
    with pytest.raises(OSError, match="larger than"):
        read_file(tmp_path / "x", 99)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("a.onnx", True),
        ("sub/a.onnx", True),
        ("../a.onnx", False),
        ("/etc/a", False),
        ("a/../../b", False),
        ("a\0b", False),
    ],
)
def test_names_in_configs_stay_in_the_folder(name: str, inside: bool) -> None:
    assert is_inside(name) is inside


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (_saved_tokenizer(tmp_path) / "chat_template.jinja").write_text(TEMPLATES[kind])
    made = Tokenizer.load(tmp_path)
    monkeypatch.setattr(template_process, "SECONDS", 3.0)
    with pytest.raises(
        TrtKvCacheError, match=r"^the chat template of .*(took more than|needs more than|ended with|failed)"
    ):
        made.render_chat([{"role": "user", "content": "hi"}])
    monkeypatch.undo()
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_onnx_runtime_writes_and_tells_nothing_on_its_own(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1, head_size=16, capacity=16))
    home = tmp_path / "home"
    home.mkdir()
    code = f"from trt_kvcache import DecodeSession; DecodeSession.open({str(model)!r}).close()"
    given = {
        name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=given | {"HOME": str(home), "TMPDIR": str(home)})
    assert not list(home.rglob("*"))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_names_match_in_linear_time(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "roles.yaml").write_text(f"roles: {{tokens: '{pattern}'}}")
    try:
        found = load_patterns(tmp_path / "roles.yaml")
    except TrtKvCacheError as error:
        assert "no regular expression of RE2" in str(error)  # noqa: PT017
    else:
        assert not found[0].matches("a" * 10_000 + "b", "input")
