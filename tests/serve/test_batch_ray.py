"""Batch jobs on a real Ray: a killed actor and a killed driver lose no row, and change no answer."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from decoders import DecoderConfig, write_decoder

from trt_kvcache.errors import OptionError

pytestmark = [
    pytest.mark.slow,  # Ray takes many seconds to start
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL"),
]
ROWS = 200
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}  # 15, on a busy machine, is minutes


def command(folder: Path, output: str, *flags: str) -> subprocess.Popen[str]:
    arguments = ["batch", str(folder / "model.onnx"), str(folder / "in.jsonl"), "-o", str(folder / output), *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "trt_kvcache", *arguments, "--max-batch", "4"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **RAY},
    )  # fmt: skip


def answers(file: Path) -> list[Any]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [(line["id"], line["response"]["body"]["choices"][0]["token_ids"]) for line in found]


def actors(driver: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(driver.pid).children(recursive=True)
    return [process for process in found if re.search(r"MapWorker.*submit", "".join(process.cmdline()))]


def wait_until(driver: subprocess.Popen[str], true: Callable[[], Any]) -> None:
    end = time.monotonic() + 240
    while not true():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Ended with the test, whatever happens; Ray ends with its driver."""
    drivers: list[subprocess.Popen[str]] = []
    yield drivers
    for driver in drivers:
        driver.kill()
        driver.communicate()


def test_killed_actors_and_a_killed_driver_lose_nothing(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    write_decoder(tmp_path / "model.onnx", DecoderConfig(vocab=300, layers=1, capacity=96))
    with (tmp_path / "in.jsonl").open("w") as file:
        for at in range(ROWS):
            file.write(json.dumps({"id": at, "prompt": [1 + at % 200, 2], "max_tokens": 60, "ignore_eos": True}) + "\n")
    said, errors = command(tmp_path, "alone.jsonl").communicate()
    assert said.endswith(f"{ROWS} rows; 0 in error\n"), errors
    journal = tmp_path / "out.jsonl.journal"
    log = journal.with_name(journal.name + "-wal")

    started.append(first := command(tmp_path, "out.jsonl", "--ray", "--workers", "2"))
    wait_until(first, lambda: log.exists() and log.stat().st_size > 30_000)  # an empty one has less
    processes = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=60)
    assert not (tmp_path / "out.jsonl").exists()

    started.append(second := command(tmp_path, "out.jsonl", "--ray", "--workers", "2"))
    wait_until(second, lambda: actors(second))
    actors(second)[0].kill()
    said, errors = second.communicate(timeout=240)
    kept = re.search(rf"{ROWS} rows, (\d+) of them from an earlier run; 0 in error\n$", said)
    assert kept, said + errors
    assert 0 < int(kept[1]) < ROWS
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "alone.jsonl")
    assert not journal.exists()


def test_an_engine_wants_a_gpu_for_each_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for ever."""
    import ray

    from trt_kvcache.serve.with_ray import answer_with_ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    with pytest.raises(OptionError, match="an engine needs a GPU for each of 2 workers, but Ray has 1"):
        answer_with_ray(tmp_path / "model.engine", "tiny", {}, 2, [], lambda *_: None)
