"""The decode benchmark runs, and stops where its ways disagree."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import bench_decode
import pytest
from bench_turns import Worker

# onnxruntime-genai's builder takes every linear layer as wide as the vocabulary for the head: keys are 64 wide here.
SMALL = ["--capacity", "96", "--prompt", "20", "--tokens", "40", "--layers", "1", "--hidden", "192", "--vocab", "96"]


PEERS = {
    "torch": "transformers",
    "transformers": "transformers",
    "mobius": "mobius-onnx",
    "onnxruntime_genai": "onnxruntime-genai",
}
"""Packages, and what the benchmark calls what it leaves out without them."""


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The result of a small run, and what it says on stderr."""
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", *SMALL, "--threads", "1"])
    bench_decode.main()
    printed = capsys.readouterr()
    (result,) = json.loads(printed.out.strip().splitlines()[-1])["results"]
    return result, printed.err


@pytest.mark.slow
@pytest.mark.parametrize("package", PEERS)
def test_a_peer_that_is_absent_is_left_out_by_name(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result, said = run(monkeypatch, capsys)
    assert {"session", "rewritten", "original", "products alone"} <= set(result["tokens_per_second"])
    assert f"{PEERS[package]} is left out" in said or "transformers is left out" in said
    if PEERS[package] != "mobius-onnx":
        assert PEERS[package] not in result["tokens_per_second"]
    else:
        assert result["exporter"] == "scripts/decoders.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # other people's packages
def test_every_peer_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for package in PEERS:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'trt-kvcache[bench]'")
    result, said = run(monkeypatch, capsys)
    assert result["exporter"] == "mobius-onnx"
    assert set(result["tokens_per_second"]) == {
        "session", "rewritten", "original", "onnxruntime-genai", "transformers", "transformers, static",
        "products alone",
    }  # fmt: skip
    assert "left out" not in said


def tokens(*given: int) -> Iterator[int]:
    return iter(given)


def test_other_tokens_are_no_benchmark() -> None:
    ways = {"session": partial(tokens, 1, 2, 3), "rewritten": partial(tokens, 1, 2, 4)}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, way)) for name, way in ways.items()}
        with pytest.raises(SystemExit, match="rewritten gives other tokens than the session"):
            bench_decode.measure(workers, 3)
