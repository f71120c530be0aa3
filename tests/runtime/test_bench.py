"""The bench command and what it measures with."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decoders import DecoderConfig, write_decoder
from runtime.hash_runner import HashRunner

from trt_kvcache.cli.app import app
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.measure import Timing, bench_session
from trt_kvcache.runtime.session import DecodeSession


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("bench") / "model.onnx", DecoderConfig(capacity=64, vocab=64))


def test_what_is_measured_is_what_was_asked_for() -> None:
    runner = HashRunner(max_batch=4, max_chunk=8)
    with DecodeSession(runner) as session:
        timings = list(
            bench_session(session, lengths=[8, 20], positions=[10, 40], batches=[1, 2, 4], repeats=3, warmup=2)
        )
        assert session.cache.slots == ()
    cases = [(t.phase, t.batch, t.tokens) for t in timings]
    assert cases[:4] == [("prefill", 1, 8), ("prefill", 1, 20), ("decode", 1, 10), ("decode", 1, 40)]
    assert cases[4:] == [("decode", 2, 10), ("decode", 4, 10)]
    decode = [b for b in runner.steps if b.length == 1]
    assert [(b.rows, int(b.starts[0])) for b in decode[:5]] == [(1, 10 + i) for i in range(5)]
    assert [(b.rows, int(b.starts[0])) for b in decode[-5:]] == [(4, 10 + i) for i in range(5)]
    assert sum(b.length == 8 and b.starts[0] == 0 for b in runner.steps) >= 5
    assert all(t.low_ms <= t.median_ms <= t.high_ms for t in timings)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"lengths": [65]}, "lengths up to 65 .* need 65 rows, but the caches hold 64"),
        ({"positions": [60]}, "from position 60 need 65 rows"),
        ({"batches": [5]}, "batch 5 needs as many rows, but only 4 are free"),
        ({"lengths": [0]}, r"length is \[0\]"),
        ({"positions": []}, r"position is \[\]"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, Any], words: str) -> None:
    given = {"lengths": [4], "positions": [4], "batches": [1], "repeats": 3, "warmup": 2} | sizes
    with DecodeSession(HashRunner()) as session, pytest.raises(OptionError, match=words):
        list(bench_session(session, **given))


def test_rows_come_as_they_are_measured_and_stay_at_ctrl_c(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def cases(session: DecodeSession, **how: Any) -> Iterator[Timing]:
        assert (how["repeats"], how["seconds"]) == (20, 5.0)
        for tokens in (4, 16):
            yield Timing("prefill", 1, tokens, 2.0, 1.0, 3.0, 100.0)
            shown.append(sys.stdout.getvalue())  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr("trt_kvcache.runtime.measure.bench_session", cases)
    stdout = io.StringIO()
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            app(["bench", str(model)])
    assert ended.value.code == 130
    assert [text.count("prefill ") for text in shown] == [1, 2]
    assert stdout.getvalue().count("prefill ") == 2
    assert "process peak " in stdout.getvalue()
