"""The GPU tests and `scripts/gpu_check` against the fake: they run to their end, and fail where they should."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.engines import write_engine

from trt_kvcache.engine.diagnosis import find_gpus

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "tests/corpus", "scripts", "examples"))
SITE = os.pathsep.join((str(ROOT / "tests" / "runtime" / "fake_site"), PATHS))
NO_GPU = "import gpu_check, sys; sys.exit(gpu_check.main(sys.argv[1:]))"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    everything = os.environ | {"PYTHONPATH": PATHS} | environment
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=everything, capture_output=True, text=True)


GPU_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu/test_engines.py",
             "tests/gpu/test_embeddings.py", "tests/gpu/test_encoder.py")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words", "never"), [
    ({}, ["24 passed"], "failed"),
    ({"FAKE_GPU_REFUSES": "unsupported SM 9.0"},
     ["does not run on this GPU; in its own words: ", "unsupported SM 9.0", "24 skipped"], "failed"),
], ids=["pass", "refused"])  # fmt: skip
def test_gpu_tests_on_the_fake(fault: dict[str, str], words: list[str], never: str) -> None:
    """They pass, name what does not run, and are not skipped where the GPU fails."""
    output = run(*GPU_TESTS, PYTHONPATH=SITE, TRT_KVCACHE_GPU_BACKENDS="tensorrt-rtx", **fault).stdout
    assert all(part in output for part in words), output[-3000:]
    assert never not in output


def test_gpu_check_without_a_gpu() -> None:
    if not find_gpus()[2]:
        pytest.skip("there is a GPU here")
    done = run("-c", NO_GPU)
    assert done.returncode == 1
    assert done.stderr.startswith("gpu_check: nothing was checked: no NVIDIA driver")
    assert done.stdout == ""


# `scripts/gpu_check`, its steps in processes of their own that all have the fake.

STEM = "nvidia-fake-90-"


def check(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = (str(ROOT / "scripts" / "gpu_check.py"), "--small", "--backend", "tensorrt-rtx", f"--output={folder}")
    return run(*command, *arguments, PYTHONPATH=SITE, **environment)


def only(*words: str) -> list[str]:
    return [f"--only={word}" for word in words]


def result_of(folder: Path, part: str = "tensorrt-rtx") -> Any:
    return json.loads((folder / f"{STEM}{part}.json").read_text())


def statuses(result: Any) -> dict[str, str]:
    return {step["step"]: step["status"] for step in result["steps"]}


@pytest.mark.slow
def test_gpu_check_measures_answers_and_writes(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "other.onnx", DecoderConfig(dtype="float16"))
    engine = write_engine(model, max_batch=1, max_chunk=2)
    done = check(tmp_path, *only("answers", "measure"), f"--engine={engine}")
    assert done.returncode == 0, done.stderr + done.stdout
    result = result_of(tmp_path)
    assert statuses(result) == {"answers": "ok", "measure 64": "ok", "measure 128": "ok"}
    assert {r["capacity"] for r in result["decode"]} == {64, 128}
    assert {r["graphs"] for r in result["decode"]} == {"on", "off"}
    assert all(r["ms_best"] > 0 for r in result["batches"])
    assert all(r["ms"] > 0 for kind in ("decode", "prefill", "batches", "weights") for r in result[kind])
    assert [(r["capacity"], r["decode_weights"]) for r in result["weights"]] == [
        (capacity, kind) for capacity in (64, 128) for kind in ("shared", "own")
    ]
    assert result["copy_gb_per_s"] > 0
    answers = {question: answer["yes"] for question, answer in result["answers"].items()}
    for question in ("builds", "runs", "runs_if_built_here", "aliases", "decode_steps_become_cuda_graphs",
                     "greedy_tokens_are_chosen_on_the_gpu", "garbage_in_unused_rows_is_not_seen"):  # fmt: skip
        assert answers[question], result["answers"][question]
    # A fake has no network to put IAttention into, and ONNX Runtime's attention is not proof against NaN: both are
    # answers, and neither stops the next question.
    assert result["answers"]["nan_in_unused_rows_is_not_seen"]["finite"] is False
    assert "no attribute 'Builder'" in result["answers"]["attention_lengths_bfloat16"]["error"]
    (foreign,) = result["engines"]
    assert foreign["engine"] == "other.engine"
    assert foreign["yes"]
    assert foreign["aliases"]
    table = (tmp_path / f"{STEM}tensorrt-rtx.md").read_text()
    assert table in done.stdout
    assert "| 128 | 64 | 128 | off |" in table
    assert "| 128 | own |" in table
    assert "Built elsewhere, other.engine: opens in" in table
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["ok"], last["backends"]) == (True, {"tensorrt-rtx": True})


@pytest.mark.slow
def test_gpu_check_says_what_the_backend_says(tmp_path: Path) -> None:
    words = "need compute capability 80 or above, found 72"
    done = check(tmp_path, *only("answers", "measure", "engine tests"), FAKE_GPU_REFUSES=words)
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path)
    assert words in result["answers"]["runs"]["error"]
    assert statuses(result) == {"answers": "ok"}  # nothing is asked of a backend that does not run
    table = (tmp_path / f"{STEM}tensorrt-rtx.md").read_text()
    assert "tensorrt-rtx does not run on this GPU. It says:" in table
    assert words in table
    assert json.loads(done.stdout.splitlines()[-1])["backends"] == {"tensorrt-rtx": False}


def step_of(code: str, name: str = "bench", part: str = "kernel", limit: float = 60, **more: Any) -> Any:
    """A step that runs a few lines of Python."""
    return gpu_check.Step(part, name, (sys.executable, "-c", code), limit, **more)


def ran(step: Any, folder: Path, part: dict[str, Any] | None = None, seconds: float = 60) -> dict[str, Any]:
    return gpu_check.run_step(step, {} if part is None else part, folder, time.monotonic() + seconds)


def test_the_steps(tmp_path: Path) -> None:
    """Everything is there, once, bounded; an engine built elsewhere is handed on; a crash leaves what it had."""
    options = gpu_check._parse(["--engine", "a.engine"])
    steps = gpu_check.steps(["tensorrt", "tensorrt-rtx"], options, "9.0")
    names = [(step.part, step.name) for step in steps]
    assert len(names) == len(set(names))
    assert {part for part, _ in names} == {"kernel", "tensorrt", "tensorrt-rtx"}
    assert all(0 < step.limit <= 240 for step in steps)
    text = " ".join(word for step in steps for word in step.command)
    for needed in ("bench.py kernel", "bench.py choice", "test_kernel.py", "test_choice.py", "test_engines.py",
                   "test_encoder.py", "test_embeddings.py", "test_plugin_engines.py", "compile_kernels.py sm_90",
                   f"--engine={Path('a.engine').resolve()}"):  # fmt: skip
        assert needed in text
    dies = "import json, os; json.dump({'answers': {'runs': {'yes': True}}, 'asking': 'x'}, open('{out}', 'w'))"
    step, part = step_of(f"{dies}; os.abort()", "answers", "tensorrt", merged=True), dict[str, Any]()
    assert ran(step, tmp_path, part)["status"] == "failed"
    assert part == {"answers": {"runs": {"yes": True}}, "asking": "x"}
    assert ran(step, tmp_path, part, 0)["status"] == "no time"
