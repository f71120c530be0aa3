"""The GPU tests and `scripts/gpu_check` against the fake: they run to their end, and fail where they should."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_check
import gpu_steps
import psutil
import pytest
from decoders import DecoderConfig, write_decoder
from hybrids import cross_model, write
from runtime.embedded_models import cut
from runtime.engines import open_engine, write_engine

from trt_kvcache.engine.diagnosis import find_gpus
from trt_kvcache.errors import BackendError, SessionError

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
    ({"FAKE_GPU_IS_LOST": "1"},
     ["BackendError: CUDA: cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS", "1 error in"], "skipped"),
], ids=["pass", "refused", "lost"])  # fmt: skip
def test_gpu_tests_on_the_fake(fault: dict[str, str], words: list[str], never: str) -> None:
    """They pass, name what does not run, and are not skipped where the GPU fails."""
    output = run(*GPU_TESTS, PYTHONPATH=SITE, TRT_KVCACHE_GPU_BACKENDS="tensorrt-rtx", **fault).stdout
    assert all(part in output for part in words), output[-3000:]
    assert never not in output


LOSES = """
def test_fails(): assert "CUDA_ERROR_OUT_OF_MEMORY" == 1
def test_loses_the_gpu(): raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
def test_more(): raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
"""


@pytest.mark.slow
def test_gpu_tests_end_with_the_one_that_loses_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "gpu_conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(LOSES)
    paths, report = os.pathsep.join((str(tmp_path), PATHS)), tmp_path / "report.xml"
    command = ("-m", "pytest", "-p", "gpu_conftest", "-p", "no:cacheprovider", f"--junitxml={report}")
    done = run(*command, str(tmp_path / "test_some.py"), PYTHONPATH=paths)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS: nothing runs on the GPU any more in this process" in done.stdout
    found = gpu_check.counts(report)
    assert (found["failed"], list(found["failures"])) == (2, ["test_fails", "test_loses_the_gpu"])


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
    done = check(tmp_path, *only("bench", "choice", "answers", "measure"), f"--engine={engine}")
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
    kernel = result_of(tmp_path, "kernel")
    assert statuses(kernel) == {"bench": "ok", "choice": "ok"}
    assert {(r["logits"], r["same"]) for r in kernel["choice"]["rows"]} == {
        (dtype, True) for dtype in ("float16", "bfloat16", "float32")
    }
    assert {k["name"] for k in kernel["bench"]["kernels"]} >= {"float16", "float16 circular", "float16 to int8"}
    assert [p["name"] for p in kernel["bench"]["peers"]] == ["torch index_copy_", "FlashInfer append"]
    assert "85 % of a copy" in kernel["bench"]["targets"]
    table = (tmp_path / f"{STEM}kernel.md").read_text()
    assert "| float16 circular | 100.0 us |" in table
    assert "| bfloat16 | top-k 50 | 1001 | 64 | " in table
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


def test_a_step_that_ends_well_without_results_has_failed(tmp_path: Path) -> None:
    part: dict[str, Any] = {}
    about = ran(step_of("print('nothing')"), tmp_path, part)
    assert (about["status"], about["output"]) == ("failed", "it ended well, and without results: nothing\n")
    rows = json.dumps([{"kernel": "one", "registers": 12, "spill_bytes": 0}], indent=2)
    says = f"print('[W] first'); print({rows!r}); print('[W] last')"
    assert ran(step_of(says, "compile"), tmp_path, part)["status"] == "ok"
    assert part["compile"] == {"kernels": 1, "most_registers": 12, "with_spills": []}


ASKS = """
import json, os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
result = json.loads(out.read_text())

def keep(asking):
    part = out.with_suffix(".part")
    part.write_text(json.dumps(result | {"asking": asking}))
    part.replace(out)

ends = {"dies": os.abort, "engine a.engine": lambda: os._exit(3), "hangs": lambda: time.sleep(60),
        "leaves": lambda: os._exit(0)}
for name in ("good", "dies", "engine a.engine", "hangs", "leaves", "fault", "last"):
    if name in result["answers"] or any("engine " + e["engine"] == name for e in result["engines"]):
        continue
    keep(name)
    print("at", name, flush=True)
    ends.get(name, int)()
    result["answers"][name] = {"yes": True}
    if name == "fault":
        keep("")
        sys.exit(75)
keep("")
"""


@pytest.mark.slow
def test_a_question_that_ends_the_process_costs_its_own_answer_only(tmp_path: Path) -> None:
    out = tmp_path / "answers.json"
    limits = {"": 60.0, "hangs": 1.5}

    def ask(code: str, *given: str) -> tuple[Any, Any]:
        with (tmp_path / "log").open("wb") as log:
            command = [sys.executable, "-c", code, *given]
            end = time.monotonic() + 60
            status = gpu_check.ask(command, {**os.environ}, log, out, end, lambda asked: limits.get(asked, 30.0))
        return status, json.loads(out.read_text())

    status, result = ask(ASKS, str(out))
    assert (status, result["asking"]) == (1, "")
    answers, (engine,) = result["answers"], result["engines"]
    assert [name for name, answer in answers.items() if answer["yes"]] == ["good", "fault", "last"]
    assert answers["leaves"]["error"].startswith("exit 0: at leaves")
    assert answers["dies"]["error"].startswith("it was killed by SIGABRT: at good")
    assert answers["hangs"]["error"].startswith("it took more than 1.5 seconds: at hangs")
    assert answers["hangs"]["unexpected"]
    assert (engine["engine"], engine["error"][:6]) == ("a.engine", "exit 3")
    assert ask("pass")[0] == 0
    assert ask("import none_such") == (1, {"answers": {}, "engines": [], "asking": ""})


def test_a_fault_of_the_gpu_stays_with_its_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA says it again to every later call of the process: another one asks the rest."""
    words = "CUDA: cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)"

    def fails(error: Exception) -> Any:
        def ask(engine: Path, name: str) -> dict[str, Any]:
            raise error

        return ask

    errors = {"refused": BackendError("TensorRT says: Cuda Runtime (unsupported)"), "late": SessionError(words),
              "early": BackendError(words), "other": AttributeError("Builder")}  # fmt: skip
    monkeypatch.setattr(gpu_steps, "QUESTIONS", {name: fails(error) for name, error in errors.items()})
    out = tmp_path / "answers.json"
    first = {name: {"yes": True} for name in (*gpu_steps.FIRST, *gpu_steps.HERE_ONLY)}
    out.write_text(json.dumps({"answers": first, "engines": []}))
    for last in ("late", "early"):
        with pytest.raises(SystemExit) as end:
            gpu_steps.ask_all(tmp_path, "tensorrt-rtx", out, [])
        result = json.loads(out.read_text())
        assert (end.value.code, list(result["answers"])[-1], result["asking"]) == (gpu_steps.AGAIN, last, "")
    gpu_steps.ask_all(tmp_path, "tensorrt-rtx", out, [])
    answers = json.loads(out.read_text())["answers"]
    assert list(answers) == [*first, *errors]
    # The backend is asked for the rest all the same, unless it refuses.
    assert {name for name, answer in answers.items() if answer.get("unexpected")} == {"late", "early", "other"}


@pytest.mark.slow
def test_decoders_that_are_given_more_than_tokens_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine from elsewhere may be one that reads an encoder's output, or takes embeddings."""
    monkeypatch.setattr("gpu_steps.TensorRTRunner", open_engine)
    cross = write_engine(write(tmp_path / "cross.onnx", cross_model("keys", "ones")), max_encoder=12)
    embeds = cut(write_decoder(tmp_path / "whole.onnx", DecoderConfig()), tmp_path).embeds
    for engine in (cross, write_engine(embeds)):
        answer = gpu_steps.foreign(engine, "tensorrt-rtx")
        assert answer is not None
        assert (answer["yes"], answer.get("aliases")) == (True, True), answer


Main = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """`gpu_check.main` with a GPU and these steps: its status, its last line as JSON, and stderr."""
    gpu = gpu_check.diagnosis.Gpu("NVIDIA Fake 90", "9.0", 1 << 30)
    monkeypatch.setattr(gpu_check.diagnosis, "find_gpus", lambda: ("13.0", (gpu,), ""))
    monkeypatch.setattr(gpu_check.backend, "installed_version", lambda target: "1.7.1.116")

    def run(steps: list[Any], *arguments: str) -> tuple[int, Any, str]:
        monkeypatch.setattr(gpu_check, "steps", lambda *_: steps)
        status = gpu_check.main([f"--output={tmp_path}", *arguments])
        told = capsys.readouterr()
        return status, json.loads((told.out.splitlines() or ["null"])[-1]), told.err

    return run


def test_steps_build_for_this_gpu_where_nothing_else_runs(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what every step prints is kept; one that cannot even start costs no other."""
    write, rtx = "import json, os; print('says {0}'); json.dump({1}, open('{{out}}', 'w'))", "tensorrt-rtx"
    answers = {"runs": {"yes": False, "error": "sm_90"}, "runs_if_built_here": {"yes": True}}
    built = f"{{'for': os.environ['{gpu_check.BUILT_FOR}']}}"
    monkeypatch.delenv(gpu_check.BUILT_FOR, raising=False)
    status, _, _ = main(
        [step_of(write.format("answers", {"answers": answers}), "answers", rtx, merged=True),
         gpu_check.Step(rtx, "nothing", (str(tmp_path / "none"),), 60),
         step_of(write.format("measured", built), "measure 64", rtx, merged=True)],
        f"--backend={rtx}",
    )  # fmt: skip
    result = result_of(tmp_path)
    assert (status, statuses(result)) == (1, {"answers": "ok", "nothing": "failed", "measure 64": "ok"})
    assert "FileNotFoundError" in result["steps"][1]["output"]
    assert (result["built_for"], result["for"]) == ("current", "current")
    log = (tmp_path / "nvidia-fake-90.log").read_text()
    assert log.index("==== tensorrt-rtx: answers\nsays answers") < log.index("measure 64\nsays measured")


def test_results_that_cannot_be_written_are_printed(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next step is run, whose results may find room."""
    writes = "import json; json.dump({'copy_gb_per_s': float('nan')}, open('{out}', 'w'))"
    steps = [step_of(writes, name, merged=True) for name in ("one", "other")]
    write, full = gpu_check.write_json, [True, True]

    def write_json(path: Path, content: object) -> None:
        if full.pop(0):
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(gpu_check, "write_json", write_json)
    status, last, said = main(steps)
    assert (status, last["ok"], last["failed"]) == (1, False, [])
    assert last["not_written"] == {"kernel": "[Errno 28] No space left on device"}
    assert statuses(last["parts"]["kernel"]) == {"one": "ok", "other": "ok"}
    assert "results are not written: [Errno 28] No space left on device" in said
    full[:] = [True, False]
    status, last, _ = main(steps)
    assert (status, last["ok"]) == (0, True)
    found = json.loads((tmp_path / f"{STEM}kernel.json").read_text(), parse_constant=lambda word: 1 / 0)
    assert found["copy_gb_per_s"] == "NaN"  # a word
    status, _, said = main(steps, f"--output={tmp_path / 'nvidia-fake-90-kernel.json' / 'below'}")
    assert (status, "nothing was checked: [Errno 20] Not a directory" in said) == (1, True)


def test_a_driver_that_never_answers(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(gpu_check, "MOST_FOR_DRIVER", 0.1)
    monkeypatch.setattr(gpu_check.diagnosis, "find_gpus", answer.wait)
    status, _, said = main([])
    answer.set()
    assert status == 1
    assert said == "gpu_check: nothing was checked: the driver does not answer within 0.1 seconds\n"


def test_a_step_leaves_no_process_behind(tmp_path: Path) -> None:
    """Not even where it ends by itself: its children would keep the GPU's memory."""
    child = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    sleeps = f"import subprocess, sys; open('{{out}}', 'w').write(str(subprocess.Popen({child}).pid))"
    part: dict[str, Any] = {}
    assert ran(step_of(sleeps), tmp_path, part)["status"] == "ok"
    for _ in range(100):  # it takes a moment
        try:
            if psutil.Process(part["bench"]).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.1)
    pytest.fail("it is still there")


def test_sigterm_ends_the_step(tmp_path: Path) -> None:
    code = f"""
import gpu_check, sys
sleeps = "import os, time; print(os.getpid()); time.sleep(60)"
step = gpu_check.Step("kernel", "bench", (sys.executable, "-c", sleeps), 60)
gpu_check.end_by_unwinding()
gpu_check.run_step(step, {{}}, gpu_check.Path({str(tmp_path)!r}), gpu_check.time.monotonic() + 60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": PATHS}, stderr=subprocess.DEVNULL
    )
    log = tmp_path / "kernel-bench.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert process.wait(30) != 0
    assert not psutil.pid_exists(int(log.read_text()))


TESTS = """
import signal, time
import pytest

pytestmark = pytest.mark.gpu

def test_that_passes(): pass
def test_that_fails(): assert 1 == 2
def test_that_hangs():
    {first}
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["pass", "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})"])
def test_tests_that_hang_keep_what_came_before(tmp_path: Path, first: str) -> None:
    """Also where Python does not come to an interrupt, as in a library that waits for a GPU."""
    file = tmp_path / "test_some.py"
    file.write_text(TESTS.replace("{first}", first))
    (suite,) = [s for s in gpu_check.steps([], gpu_check._parse([]), "9.0") if s.name == "kernel tests"]
    command = [*suite.command[: suite.command.index("--junitxml={out}") + 1], str(file)]
    part: dict[str, Any] = {}
    about = ran(gpu_check.Step("kernel", "kernel tests", tuple(command), 6), tmp_path, part)
    assert (about["status"], about["ended_at"]) == ("timeout", "test_that_hangs")
    assert "test_that_hangs" in about["output"]
    assert "Fatal Python error: Aborted" in about["output"] or first == "pass"
    tests = part["kernel_tests"]
    assert (tests["passed"], tests["failed"], list(tests["failures"])) == (1, 1, ["test_that_fails"])
    assert ("traces" in tests) is (first == "pass")  # else pytest came to no report
    assert first != "pass" or "assert 1 == 2" in tests["traces"]["test_that_fails"]
