"""Every benchmark runs with small sizes and prints a table and a line of JSON. No time is asserted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.fake_cuda import Machine

from trt_kvcache.runtime.trt import trt_runner

PEERS = {"torch": "transformers", "transformers": "transformers", "mobius": "mobius-onnx",
         "onnxruntime_genai": "onnxruntime-genai", "ctranslate2": "CTranslate2",
         "openvino_genai": "openvino-genai"}  # fmt: skip
"""Packages, and the names under which the benchmark leaves out what needs them."""
# onnxruntime-genai's builder takes every linear layer as wide as the vocabulary for the head: keys are 64 wide here.
DECODE = ["--capacity", "96", "--prompt", "20", "--steps", "40", "--layers", "1", "--hidden", "192", "--vocab", "96"]
SMALL = {
    "build": ["--small", "--turns", "1"],
    "decode": [*DECODE, "--threads", "1"],
    "host": ["--vocab", "5000", "--batch", "1", "2", "--turns", "2"],
    "idioms": ["--capacity", "48", "--layers", "2", "--hidden", "64", "--query-heads", "4", "--vocab", "64", "--turns",
               "1", "--steps", "2", "--position", "5", "1000"],
    "logits": ["--tokens", "16", "--turns", "1", "--layers", "1", "--hidden", "256", "--vocab", "1000"],
    "serve": ["--clients", "2", "--rows", "2", "--tokens", "6", "--turns", "1", "--hidden", "192", "--layers", "1",
              "--vocab", "500"],
    "lora": ["--rank", "2", "--rows", "2", "--turns", "2", "--past", "3", "--threads", "1"],
    "span": ["--capacity", "256", "512", "--turns", "3"], "choice": [], "kernel": [], "quality": [],
    "stall": ["--prompt", "20", "--usual", "2", "--turns", "1", "--rows", "3"],
    "draft": ["--tokens", "150", "--prompt", "8", "--hidden", "192", "--vocab", "500", "--layers", "2", "--guesses",
              "3", "--threads", "1"],
}  # fmt: skip


def ran(name: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[dict[str, Any], list[str], str]:
    """The JSON of a benchmark, its table and its stderr."""
    bench.main([name, *SMALL[name], *more])
    printed = capsys.readouterr()
    *table, last = printed.out.splitlines()
    data: dict[str, Any] = json.loads(last)
    assert data["benchmark"] == name
    return data, table, printed.err


def differences(data: Any) -> Iterator[float]:
    """The differences between sides, wherever they are in the JSON."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if key == "difference":
            yield value
        elif isinstance(value, dict | list):
            yield from differences(value)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "rows"), [
    pytest.param("build", 7, marks=pytest.mark.slow), pytest.param("decode", 4, marks=pytest.mark.slow), ("host", 15),
    ("idioms", 6), ("latents", 2), pytest.param("logits", 2, marks=pytest.mark.slow), ("span", 2),
    pytest.param("draft", 2, marks=pytest.mark.slow), pytest.param("serve", 1, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.filterwarnings("default")  # other people's packages
def test_prints_a_table_and_json(
    name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sides that compute the same agree; `--output` has the same JSON."""
    monkeypatch.setattr(trt_runner, "cuda_bindings", Machine().bindings)
    data, table, _ = ran(name, capsys, f"--output={tmp_path / 'out.json'}")
    assert json.loads((tmp_path / "out.json").read_text()) == data
    assert len(table) >= rows + 2
    found = [*differences(data)]
    assert max(found, default=0) < 1e-4
    assert bool(found) == (name in ("idioms", "latents", "logits", "span"))
    if name == "build":
        assert data["ours"]["peak_bytes"][0] > data["model_bytes"]
        for side in ("ours", "proven"):
            assert data["ratios"][side]["seconds"] == data[side]["seconds"][0] / data["bare"]["seconds"][0]
        for side in ("ours", "proven", "bare"):
            assert [*data["stages"][side]] == ["planning", "parsing", "building", "finishing"]
            assert sum(data["stages"][side].values()) == pytest.approx(data[side]["seconds"][0], abs=0.1)
    if name == "decode":
        assert {"session", "rewritten", "original", "products alone"} <= set(data["results"][0]["tokens_per_second"])
    if name == "idioms":
        assert data["positions"] == [5, 44]  # as many as leave room for the steps


def test_names_are_listed_and_each_has_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(bench.NAMES) == set(SMALL)
    for wrong in ([], ["none"]):
        with pytest.raises(SystemExit, match="Runs one benchmark"):
            bench.main(wrong)
    for name in bench.NAMES:
        with pytest.raises(SystemExit):
            bench.main([name, "--help"])
        assert "--output" in capsys.readouterr().out


def test_benchmarks_of_a_given_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = DecoderConfig(
        layers=1, hidden=32, head_size=8, query_heads=4, kv_heads=2, vocab=64, capacity=64, positions=64
    )
    model = write_decoder(tmp_path / "model.onnx", config)
    data, table, _ = ran("stall", capsys, "--model", str(model), "--budgets", "4", "100")
    assert len(table) == 4
    assert set(data["budgets"]) == {"4", "100"}
    data, table, _ = ran("lora", capsys, "--model", str(model))
    assert len(table) == 6
    assert set(data["ms"]["2"]) == {"without", "none chosen", "all the same", "each its own"}
    with pytest.raises(SystemExit, match="give --model"):
        bench.main(["lora"])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_every_peer_gives_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    for package in PEERS:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'trt-kvcache[bench-more]'")
    data, _, said = ran("decode", capsys)
    (result,) = data["results"]
    assert result["exporter"] == "mobius-onnx"
    peers = {"onnxruntime-genai", "CTranslate2", "openvino-genai", "transformers", "transformers, static"}
    assert peers <= set(result["tokens_per_second"])
    assert "left out" not in said
