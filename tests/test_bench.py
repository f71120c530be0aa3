"""Every benchmark runs with small sizes and prints a table and a line of JSON. No time is asserted."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import bench
import kernel_device
import numpy as np
import onnx
import pytest
from benchmarks import decode, idioms, turns
from benchmarks.loops import Products
from benchmarks.turns import Worker, take_turns
from decoders import DecoderConfig, write_decoder
from onnx import numpy_helper
from runtime.fake_cuda import Machine
from runtime.fake_kernels import FakeKernelDevice

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
    "span": ["--capacity", "256", "512", "--turns", "3"],
    "choice": ["--vocab", "1001", "--turns", "3"],
    "kernel": [], "quality": [], "stall": ["--prompt", "20", "--usual", "2", "--turns", "1", "--rows", "3"],
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
    ("idioms", 6), ("latents", 2), pytest.param("logits", 2, marks=pytest.mark.slow), ("span", 2), ("choice", 18),
    ("kernel", 12), pytest.param("draft", 2, marks=pytest.mark.slow), pytest.param("serve", 1, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.filterwarnings("default")  # other people's packages
def test_prints_a_table_and_json(
    name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sides that compute the same agree; `--output` has the same JSON."""
    monkeypatch.setattr(kernel_device, "KernelDevice", FakeKernelDevice)
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


def test_a_long_prompt_beside_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = DecoderConfig(
        layers=1, hidden=32, head_size=8, query_heads=4, kv_heads=2, vocab=64, capacity=64, positions=64
    )
    model = write_decoder(tmp_path / "model.onnx", config)
    data, table, _ = ran("stall", capsys, "--model", str(model), "--budgets", "4", "100")
    assert len(table) == 4
    assert set(data["budgets"]) == {"4", "100"}
    with pytest.raises(SystemExit, match="give --model"):
        bench.main(["stall"])


def test_adapters_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = DecoderConfig(
        layers=1, hidden=32, head_size=8, query_heads=4, kv_heads=2, vocab=64, capacity=64, positions=64
    )
    model = write_decoder(tmp_path / "model.onnx", config)
    data, table, _ = ran("lora", capsys, "--model", str(model))
    assert len(table) == 6
    assert set(data["ms"]["2"]) == {"without", "none chosen", "all the same", "each its own"}
    with pytest.raises(SystemExit, match="give --model"):
        bench.main(["lora"])


def test_a_build_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not a model")
    with pytest.raises(SystemExit, match=r" failed:\n"):
        bench.main(["build", "--model", str(tmp_path / "m.onnx"), "--turns", "1"])


@pytest.mark.slow
@pytest.mark.parametrize("package", PEERS)
def test_a_peer_that_is_absent_is_left_out_by_name(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    data, _, said = ran("decode", capsys)
    (result,) = data["results"]
    assert f"{PEERS[package]} is left out" in said or "transformers is left out" in said
    assert PEERS[package] not in result["tokens_per_second"]
    assert PEERS[package] != "mobius-onnx" or result["exporter"] == "scripts/decoders.py"


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


def tokens(*given: int) -> Iterator[int]:
    return iter(given)


@pytest.mark.slow
def test_other_tokens_are_no_benchmark() -> None:
    ways = {"session": partial(tokens, 1, 2, 3), "rewritten": partial(tokens, 1, 2, 4)}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, way)) for name, way in ways.items()}
        with pytest.raises(SystemExit, match="rewritten gives other tokens than the session"):
            decode.measure(workers, 3)


def test_other_logits_are_seen() -> None:
    class Constant:
        def __init__(self, value: float) -> None:
            self.value = value

        def start(self, position: int) -> None:
            pass

        def step(self, token: int) -> Any:
            return np.full(4, self.value)

    assert idioms.difference((Constant(2.0), Constant(2.0)), 3, [1, 2]) == 0
    assert idioms.difference((Constant(2.0), Constant(1.0)), 3, [1, 2]) == 0.5


def test_the_floor_reads_every_matrix(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=2, dtype="float32"))
    products = Products(model, 1)
    assert list(products.steps(2)) == [-1, -1]
    matrices = [numpy_helper.to_array(w) for w in onnx.load(model).graph.initializer]
    found = [made[0] for made in products.outputs.values()]
    assert len(found) == 7 * 2 + 1  # four of attention and three of the MLP in each layer, and the head
    for made in found:
        sums = [m.sum(axis=0) for m in matrices if m.ndim == 2 and m.shape[1] == made.size]
        assert any(np.allclose(made, columns, rtol=1e-4, atol=1e-4) for columns in sums)
    half = write_decoder(tmp_path / "half.onnx", DecoderConfig(layers=1, dtype="float16"))
    with pytest.raises(ValueError, match="no MatMul with a float32 weight matrix"):
        Products(half, 1)


# Ways that take turns: where they run, what of them is measured, and what stops them.


def process() -> Iterator[int]:
    while True:
        yield os.getpid()


def slow_after_a_rest() -> Iterator[int]:
    """In turns of 1, 3, 3 and 3 steps."""
    for number in range(10):
        time.sleep(0.3 if number in (0, 1, 4, 7) else 0)
        yield number


def ending(end: Callable[[], object]) -> Iterator[int]:
    yield os.getpid()
    end()
    yield 0


def spinning() -> Iterator[int]:
    def spin() -> None:
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()
    return process()


@pytest.mark.slow
def test_each_has_a_process_that_lives_from_turn_to_turn_and_no_longer() -> None:
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, process)) for name in ("a", "b")}
        given, times = take_turns(workers, 8, 3, 1)
        found = {name: set(ids) for name, ids in given.items()}
    assert {len(ids) for ids in found.values()} == {1}
    assert len(found["a"] | found["b"] | {os.getpid()}) == 3
    # 1 step, then turns of 3, 3 and 1 of which the first warms up and each step but the first of a turn is measured.
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    for (pid,) in found.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_what_follows_a_rest_is_not_measured() -> None:
    with Worker("a", slow_after_a_rest) as worker:
        given, times = take_turns({"a": worker}, 10, 3, 1)
    assert given == {"a": [*range(10)]}
    assert len(times["a"]) == 4
    assert max(times["a"]) < 0.3


@pytest.mark.few(1)
@pytest.mark.parametrize(("end", "words"), [
    (partial(int, "x"), "a: ValueError: invalid literal"),
    (partial(os._exit, 3), "a: its process ended, exit code 3"),
    (None, "a: its process ended, exit code -9"),
], ids=["raises", "exits", "is killed"])  # fmt: skip
def test_a_way_that_fails_ends_the_benchmark(end: Callable[[], object] | None, words: str) -> None:
    with Worker("a", partial(ending, end or int)) as worker:
        (pid,) = worker.run(1).given
        if end is None:
            os.kill(pid, signal.SIGKILL)
            worker._process.join()
        with pytest.raises(SystemExit, match=words):
            worker.run(1)


@pytest.mark.slow
def test_who_disturbs_the_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_IDLE", 0.005)  # on a machine that is busy already
    words = r"a uses \d+% of a processor while others have turns"
    with Worker("a", spinning) as one, Worker("b", process) as other, pytest.raises(SystemExit, match=words):
        take_turns({"a": one, "b": other}, 11, 1, 0)
