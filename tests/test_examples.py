"""The programs in ``examples/`` do what they say; `own_loop.py` has tests of its own."""

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")
pytest.importorskip("llguidance", reason="llguidance is not installed (extra: structured)")

import chat_service
import scoring
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from runtime.tokenizers_in_code import byte_level
from serve.models import write_served

from trt_kvcache import DecodeSession
from trt_kvcache.decoding import Schedule

ROOT = Path(__file__).resolve().parent.parent


def test_each_example_is_named_in_the_docs_and_has_help() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    files = sorted((ROOT / "examples").glob("*.py"))
    assert len(files) == 3
    for file in files:
        assert f"examples/{file.name}" in pages
        done = subprocess.run(
            [sys.executable, str(file), "--help"], capture_output=True, text=True, timeout=60, check=True
        )
        assert file.name in done.stdout
        assert f"python examples/{file.name}" in file.read_text(encoding="utf-8")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[str, DecodeSession]]:
    write_served(tmp_path, eos_token="</s>")
    with DecodeSession.open(tmp_path, max_batch=4, schedule=Schedule(prefix_cache=1 << 20)) as session:
        server = chat_service.serve(chat_service.Service(session), 0)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", session
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_service_answers_in_its_schema_and_computes_the_system_message_once(
    service: tuple[str, DecodeSession],
) -> None:
    url, session = service
    answers = []

    def ask(question: str) -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, question.encode()), timeout=60) as answer:
                answers.append(json.load(answer))
        except urllib.error.HTTPError as error:
            answers.append(json.load(error))
            error.close()

    ask("first")
    before = session.cache.prefix_stats.hits
    threads = [threading.Thread(target=ask, args=(f"question {i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.cache.prefix_stats.hits - before == 3
    for answer in answers:
        assert set(answer) == {"answer", "sure"}, answer
        assert isinstance(answer["answer"], str)
        assert answer["sure"] in range(10)
    ask("x" * 2000)
    assert "512" in answers[-1]["error"]


def test_scores_are_those_of_the_exported_model(tmp_path: Path) -> None:
    """ONNX Runtime runs the original, each way computed whole, from an empty past."""
    model = make_foreign("concat", DecoderConfig(vocab=300))
    onnx.save(model, tmp_path / "model.onnx")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    beginning, ways = [5, 6, 7, 8, 9], [[1], [2, 3, 4], [2, 3], [250, 1, 1, 1]]
    original = onnxruntime.InferenceSession(tmp_path / "model.onnx")

    def reference(way: list[int]) -> float:
        tokens = [*beginning, *way]
        given = {
            "input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64),
            "position_ids": np.arange(len(tokens))[None],
        }  # fmt: skip
        inputs = [(wanted.name, wanted.shape) for wanted in original.get_inputs()]
        empty = {name: np.zeros((1, shape[1], 0, shape[3]), np.float32) for name, shape in inputs if "past" in name}
        fed = empty | {name: given[name] for name, _ in inputs if name not in empty}
        (logits,) = original.run(["logits"], fed)
        rows = logits[0].astype(np.float64)
        rows -= np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) + rows.max(1, keepdims=True)
        return float(sum(rows[len(beginning) - 1 + i, token] for i, token in enumerate(way)))

    with DecodeSession.open(tmp_path, max_batch=2, capacity=32) as session:
        found = scoring.scores(session, beginning, ways)
        assert not session.cache.slots
    assert found == pytest.approx([reference(way) for way in ways], abs=1e-4)

    command = [sys.executable, str(ROOT / "examples" / "scoring.py"), str(tmp_path), "the cache", " a", " longer end"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert sorted(line.split()[-1] for line in shown.splitlines()) == ["a'", "end'"]
    totals = [float(line.split()[0]) for line in shown.splitlines()]
    assert totals == sorted(totals, reverse=True)
