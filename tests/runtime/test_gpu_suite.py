"""The GPU tests and `scripts/gpu_check` against the fake: they run to their end, and fail where they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "scripts"))
NO_GPU = "import gpu_check, sys; sys.exit(gpu_check.main(sys.argv[1:]))"
FAKE_GPU = "import runtime.fake_gpu, gpu_check, sys; sys.exit(gpu_check.main(sys.argv[1:]))"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    everything = os.environ | {"PYTHONPATH": PATHS} | environment
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=everything, capture_output=True, text=True)


def gpu_tests(**environment: str) -> str:
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "runtime.fake_gpu",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "tests/gpu/test_engines.py",
    ]
    return run(*command, **environment).stdout


@pytest.mark.slow
def test_gpu_tests_pass_on_the_fake() -> None:
    last = gpu_tests(TRT_KVCACHE_GPU_BACKENDS="tensorrt-rtx").splitlines()[-1]
    assert "18 passed" in last
    assert "failed" not in last


def test_gpu_tests_name_what_does_not_run() -> None:
    output = gpu_tests(FAKE_GPU_REFUSES="unsupported SM 9.0", TRT_KVCACHE_GPU_BACKENDS="tensorrt-rtx")
    assert "does not run on this GPU; in its own words: " in output
    assert "unsupported SM 9.0" in output
    assert "18 skipped" in output


def test_gpu_check_without_a_gpu() -> None:
    from trt_kvcache.engine.doctor import find_gpus

    if not find_gpus()[2]:
        pytest.skip("there is a GPU here")
    done = run("-c", NO_GPU)
    assert done.returncode == 1
    assert done.stderr.startswith("gpu_check: nothing was checked: no NVIDIA driver")
    assert done.stdout == ""


def check(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(
        "-c", FAKE_GPU, "--small", "--no-tests", "--backend", "tensorrt-rtx", "--output", str(folder), **environment
    )


def test_gpu_check_measures_and_writes(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "nvidia-fake-90-tensorrt-rtx.json").read_text())
    assert {r["capacity"] for r in result["decode"]} == {64, 128}
    assert {r["graphs"] for r in result["decode"]} == {"on", "off"}
    assert all(r["ms"] > 0 for kind in ("decode", "prefill", "batches") for r in result[kind])
    assert result["copy_gb_per_s"] > 0
    table = (tmp_path / "nvidia-fake-90-tensorrt-rtx.md").read_text()
    assert table in done.stdout
    assert "| 128 | 64 | off |" in table
    assert json.loads(done.stdout.splitlines()[-1])["ok"] is True


def test_gpu_check_says_what_the_backend_says(tmp_path: Path) -> None:
    words = "need compute capability 80 or above, found 72"
    done = check(tmp_path, FAKE_GPU_REFUSES=words)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "nvidia-fake-90-tensorrt-rtx.json").read_text())
    assert result["supported"] is False
    assert words in result["words"]
    table = (tmp_path / "nvidia-fake-90-tensorrt-rtx.md").read_text()
    assert "tensorrt-rtx does not run on this GPU. It says:" in table
    assert words in table
