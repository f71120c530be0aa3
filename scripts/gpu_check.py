"""Checks a machine with an NVIDIA GPU: answers, tests, latency and bandwidth, in 8 minutes and with no human.

    scripts/gpu_check                          # every backend that is installed
    scripts/gpu_check --backend tensorrt-rtx
    scripts/gpu_check --engine model.engine    # also engines that were built elsewhere
    scripts/gpu_check --compute-capabilities current    # engines for this GPU alone, if those for all do not run
    python scripts/gpu_check.py                # with what is installed, if nothing can be downloaded

This script has never run on a GPU, only with the fake TensorRT of the tests, which shows nothing about its numbers.

Each step is a process with a time limit. If a step fails, crashes or hangs, the script says where, and keeps its
results so far. The other steps still run. The steps, most important first:

- answers, for each backend: does it run here; do engines that were built elsewhere open; aliases; garbage and NaN in
  unused rows; CUDA graphs; IAttention's masks and lengths (``gpu_steps.py answers``);
- measure, for each backend and capacity: decode latency, prefill, batches, bandwidth (``gpu_steps.py measure``);
- bench, choice: kernels against a copy and other libraries, and tokens chosen on the GPU (``bench.py kernel, choice``);
- engine tests, encoder tests, ..., for each backend: files of ``tests/gpu``;
- compile, kernel tests, choosing tests: every kernel compiled for this GPU (registers, spills), and against numpy;
- sanitizer: some kernels under compute-sanitizer, if it is installed.

Writes ``benchmarks/results/<gpu>-kernel.json`` and ``<gpu>-<backend>.json``, each with a table (``.md``), and
``<gpu>.log``; prints the tables, and one JSON line last. If a backend does not support the GPU, the backend's file
has its error message. Exits with 1 if another step fails, or if there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cuda.pathfinder import load_nvidia_dynamic_lib
from gpu_steps import AGAIN, BUILT_FOR, ENGINE, limit, runs_only_if_built_here, write_json

from trt_kvcache.cli.signals import end_by_unwinding
from trt_kvcache.engine import backend, diagnosis
from trt_kvcache.importer.cache_plan import Target

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
CAPACITIES = {False: (8192, 1024, 32_768), True: (64, 128)}
ENGINE_TESTS = {
    "engine": "engines", "encoder": "encoder", "embeddings": "embeddings", "plugin engine": "plugin_engines",
}  # fmt: skip
"""Files with tests of engines, by the name of their step. Each file has its own step: the others do not need it."""
KERNEL = "kernel"
SANITIZED = "float16_to_int8_one or padded_circular_two or packed_linear_two or float16-31"
NO_SANITIZER = ("Device not supported", "not supported on this", "Unable to find injection library")
"""Messages of compute-sanitizer if it cannot inspect the GPU, as in some virtual machines."""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        part: the file that gets the results: ``"kernel"`` or a backend.
        name: the key of the results in this file.
        command: ``{out}`` is the JSON or XML file that it writes. Empty: there is no compute-sanitizer.
        limit: time limit in seconds.
        merged: the results are lists, which are appended to the lists in the file.
        asks: it asks questions, each with a time limit. If one ends the process, another process asks the others.
    """

    part: str
    name: str
    command: tuple[str, ...]
    limit: float
    merged: bool = False
    asks: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.compute_capabilities:
        os.environ[BUILT_FOR] = options.compute_capabilities  # for all steps
    driver, gpus, problem = _find_gpus()
    if problem:
        print(f"gpu_check: nothing was checked: {problem}", file=sys.stderr)
        return 1
    deadline = time.monotonic() + options.minutes * 60
    versions = {t.value: backend.installed_version(t) for t in (Target.TENSORRT_RTX, Target.TENSORRT)}
    chosen = [name for name, version in versions.items() if version and options.backend in (None, name)]
    if options.backend and not chosen:
        print(f"gpu_check: {options.backend} is not installed", file=sys.stderr)
        return 1
    gpu = gpus[0]
    parts: dict[str, dict[str, Any]] = {}
    machine = {"gpu": dataclasses.asdict(gpu), "driver": driver, "packages": _packages(), "nvrtc": _nvrtc()}
    for name in (*chosen, KERNEL):
        parts[name] = machine | {"backend": name, "version": versions.get(name), "steps": []}
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"gpu_check: nothing was checked: {error}", file=sys.stderr)
        return 1
    lost: dict[str, str] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for step in steps(chosen, options, gpu.compute_capability):
            if options.only and not any(word in step.name for word in options.only):
                continue
            part = parts[step.part]
            if _useless(part, step):
                continue
            print(f"gpu_check: {step.part}: {step.name}", file=sys.stderr, flush=True)
            try:
                about = run_step(step, part, Path(folder), deadline)
            except Exception as error:  # noqa: BLE001 - such as no memory for one more process
                about = {"step": step.name, "status": "failed", "output": f"{type(error).__name__}: {error}"}
            part["steps"].append(about)
            if step.name == ANSWERS and BUILT_FOR not in os.environ and runs_only_if_built_here(part.get(ANSWERS, {})):
                part["built_for"] = "current"
            try:
                _write(options.output, gpu.name, part)
            except OSError as error:  # such as a full disk: the next step is run, and everything is printed below
                lost[step.part] = str(error)
                print(f"gpu_check: results are not written: {error}", file=sys.stderr, flush=True)
            else:
                lost.pop(step.part, None)
            _keep_log(options.output, gpu.name, step, Path(folder))
    for part in parts.values():
        print(_table(part))
    failed = [f"{p}: {s['step']}" for p, part in parts.items() for s in part["steps"] if s["status"] in FAILED]
    last = {"gpu": gpu.name, "ok": not failed and not lost, "failed": failed, "backends": {
        name: parts[name].get("answers", {}).get("runs", {}).get("yes") for name in chosen
    }}  # fmt: skip
    print(json.dumps(last | ({"not_written": lost, "parts": parts} if lost else {})))
    return int(not last["ok"])


FAILED = ("failed", "timeout")
MOST_LOG = 1 << 20  # bytes that are kept of a step's output
MOST_WORDS = 1500  # characters that are kept of the output of a question that ended its process
MOST_FAILURES, MOST_TRACES = 40, 10  # number of failed tests whose messages, and whose traces, are kept
MOST_FOR_DRIVER = 60.0  # seconds in which the driver must list the GPUs
ANSWERS = "answers"
PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy", "onnx", "onnxruntime", "torch")
"""Packages whose versions are written down with the results."""


def _find_gpus() -> tuple[str | None, tuple[diagnosis.Gpu, ...], str]:
    """Find GPUs as `doctor` does, within a time limit, because a driver whose GPU is lost may never answer."""
    found: list[tuple[str | None, tuple[diagnosis.Gpu, ...], str]] = []
    thread = threading.Thread(target=lambda: found.append(diagnosis.find_gpus()), daemon=True)
    thread.start()
    thread.join(MOST_FOR_DRIVER)
    return found[0] if found else (None, (), f"the driver does not answer within {MOST_FOR_DRIVER:g} seconds")


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=[t.value for t in Target], help="default: all that are installed")
    parser.add_argument("--engine", type=Path, action="append", default=[], help="an engine built elsewhere")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--compute-capabilities", help="to build for, with TensorRT for RTX; such as current")
    parser.add_argument("--minutes", type=float, default=7.5, help="everything ends within these")
    parser.add_argument("--small", action="store_true", help="a tiny decoder; the numbers mean little")
    parser.add_argument("--only", action="append", metavar="WORD", help="steps whose names contain this; several times")
    return parser.parse_args(arguments)


def steps(backends: Sequence[str], options: argparse.Namespace, capability: str) -> list[Step]:
    """Return all steps, in order. Their time limits leave room for one step that hangs."""
    python = sys.executable
    # Warnings are no errors here: they depend on the installed versions of packages, which are not tested.
    tests = (python, "-m", "pytest", "-m", "gpu", "-v", "-W", "default", "--tb=short", "-p", "no:cacheprovider")
    tests += ("--junitxml={out}",)
    arch = "sm_" + capability.replace(".", "")
    kernels = [str(ROOT / "tests" / "gpu" / f"test_{which}.py") for which in ("kernel", "choice")]
    sizes = ("--vocab", "1001", "--turns", "3") if options.small else ()
    bench = Step(KERNEL, "bench", (python, str(SCRIPTS / "bench.py"), "kernel", "--output={out}"), 75)
    choice = Step(KERNEL, "choice", (python, str(SCRIPTS / "bench.py"), "choice", "--output={out}", *sizes), 60)
    found = []
    for name in backends:
        given = [f"--engine={path.resolve()}" for path in options.engine]
        command = (python, str(SCRIPTS / "gpu_steps.py"), "answers", f"--backend={name}", "--output={out}", *given)
        found.append(Step(name, ANSWERS, (*command, "--folder={folder}"), 200, merged=True, asks=True))
    for i, capacity in enumerate(CAPACITIES[options.small]):
        found += [bench, choice] if i == 1 else []
        for name in backends:
            command = (python, str(SCRIPTS / "gpu_steps.py"), "measure", f"--backend={name}", f"--capacity={capacity}")
            command += ("--output={out}", *(["--small"] if options.small else []))
            found.append(Step(name, f"measure {capacity}", command, 130, merged=True))
    for name in backends:
        for what, file in ENGINE_TESTS.items():
            found.append(Step(name, f"{what} tests", (*tests, str(ROOT / "tests" / "gpu" / f"test_{file}.py")), 180))
    # PTX and cubins of all kernels, several at a time: the tests after it take them from the cache on disk.
    found.append(Step(KERNEL, "compile", (python, str(ROOT / "tests" / "compile_kernels.py"), arch), 75))
    for what, file in zip(("kernel", "choosing"), kernels, strict=True):
        found.append(Step(KERNEL, f"{what} tests", (*tests, file), 120))
    sanitizer = shutil.which("compute-sanitizer") or _in_toolkit("compute-sanitizer")
    guarded = (sanitizer, "--error-exitcode", "9", *tests, *kernels, "-k", SANITIZED) if sanitizer else ()
    found.append(Step(KERNEL, "sanitizer", guarded, 90))
    return found


def _in_toolkit(program: str) -> str | None:
    """Find a program in the folder of the CUDA toolkit, for machines where it is not on the PATH."""
    for folder in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if folder and (found := shutil.which(program, path=f"{folder}/bin")):
            return found
    return None


def _useless(part: dict[str, Any], step: Step) -> bool:
    runs = part.get(ANSWERS, {}).get("runs", {})
    refused = "error" in runs and not runs.get("unexpected")
    return step.part != KERNEL and refused and "built_for" not in part


def run_step(step: Step, part: dict[str, Any], folder: Path, deadline: float) -> dict[str, Any]:
    """Run one step, put its results into `part`, and return a record of the run.

    The fields are ``step``, ``status`` (``ok``, ``failed``, ``timeout``, ``no time``, ``not possible``), ``seconds``,
    and the end of the output if it is not ok.
    """
    about: dict[str, Any] = {"step": step.name}
    if not step.command:
        return about | {"status": "not possible", "output": "compute-sanitizer is neither on PATH nor in CUDA_HOME"}
    most = min(step.limit, deadline - time.monotonic())
    if most < 5:
        return about | {"status": "no time"}
    out = _out(step, folder)
    log = out.with_suffix(".log")
    environment = os.environ | {
        "PYTHONPATH": _python_path(),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), _nvrtc()])),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash, or the end of a step that hangs, shows where it was
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    if step.part != KERNEL:
        environment["TRT_KVCACHE_GPU_BACKENDS"] = step.part
        if "built_for" in part:
            environment[BUILT_FOR] = part["built_for"]
    start, end = time.monotonic(), time.monotonic() + most
    command = [word.replace("{out}", str(out)).replace("{folder}", str(folder)) for word in step.command]
    with log.open("wb") as file:
        code = ask(command, environment, file, out, end) if step.asks else run(command, environment, file, lambda: end)
    text = without_modules(log.read_text(errors="replace"))
    about |= {"status": "timeout" if code is None else "failed" if code else "ok", "exit_code": code}
    about["seconds"] = round(time.monotonic() - start, 1)
    if any(words in text for words in NO_SANITIZER) and step.name == "sanitizer":
        about["status"] = "not possible"
    if about["status"] != "ok":
        about["output"] = text[-6000:]
    if about["status"] == "timeout" and (test := unfinished(text)):
        about["ended_at"] = test
    try:
        if not _take(step, part, out, text) and about["status"] == "ok":
            about |= {"status": "failed", "output": f"it ended well, and without results: {text[-6000:]}"}
    except Exception as error:  # noqa: BLE001 - whatever it wrote, the next step is run
        about["unreadable"] = f"{type(error).__name__}: {error}"
    return about


def run(command: Sequence[str], environment: dict[str, str], log: Any, end: Callable[[], float]) -> int | None:
    """Return the exit code of a process; None if it was ended at the time that `end` says."""
    # A separate session (process group), so that the children of pytest and of the builder end with it.
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        while time.monotonic() < end():
            with suppress(subprocess.TimeoutExpired):
                return process.wait(0.1)
        for kind in (signal.SIGINT, signal.SIGABRT):  # then pytest writes its report, and Python prints where it was
            _signal(process, kind)
            with suppress(subprocess.TimeoutExpired):
                process.wait(4)
                break
        return None
    finally:
        _signal(process, signal.SIGKILL)  # and its children, which may outlive it and keep the GPU's memory
        with suppress(subprocess.TimeoutExpired):
            process.wait(4)  # not longer: a process that waits for a lost GPU cannot be killed


def ask(
    command: Sequence[str], environment: dict[str, str], log: Any, out: Path, end: float,
    limit: Callable[[str], float] = limit,
) -> int | None:  # fmt: skip
    """Run a process that asks questions until all have an answer; `limit` gives seconds by the question's name.

    Returns 0; or 1 if a question ended a process; or None if the time was over.
    """
    write_json(out, {"answers": {}, "engines": [], "asking": ""})
    worst: int | None = 0
    while True:
        asking = [0, end, 0.0]  # when the file was written, when its question must be answered, in how many seconds

        def until(asking: list[float] = asking) -> float:
            if (now := out.stat().st_mtime_ns) != asking[0]:
                most = limit(json.loads(out.read_text())["asking"])
                asking[:] = now, min(time.monotonic() + most, end), most
            return asking[1]

        begin = log.tell()
        code = run(command, environment, log, until)
        result = json.loads(out.read_text())
        asked = result.pop("asking")
        if not asked and code in (0, AGAIN):
            if code == AGAIN:
                continue
            return worst
        if not asked:
            return 1  # before it asked anything, as its output says
        worst = 1
        how = f"it took more than {asking[2]:g} seconds" if code is None else f"exit {code}"
        if code is not None and code < 0:
            how = f"it was killed by {signal.Signals(-code).name}"
        said = without_modules(Path(log.name).read_bytes()[begin:].decode(errors="replace"))
        answer = {"yes": False, "error": f"{how}: {said[-MOST_WORDS:].strip()}", "unexpected": True}
        if asked.startswith(ENGINE):
            result["engines"].append({"engine": asked.removeprefix(ENGINE)} | answer)
        else:
            result["answers"][asked] = answer
        write_json(out, result | {"asking": ""})
        if time.monotonic() >= end:
            return None


def without_modules(text: str) -> str:
    """Return a process's output without the list of all its modules that Python writes after a crash."""
    return re.sub(r"^Extension modules: .*\n?", "", text, flags=re.MULTILINE)


def _out(step: Step, folder: Path) -> Path:
    return folder / f"{step.part}-{step.name}".replace(" ", "-")


def _signal(process: subprocess.Popen[bytes], kind: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, kind)


def _take(step: Step, part: dict[str, Any], out: Path, text: str) -> bool:
    """Put the results that a step wrote into `part`; return False if there are none."""
    try:
        if step.name.endswith("tests") or step.name == "sanitizer":
            found = counts(out) if out.exists() else counted(text)
        elif step.name == "compile":
            # The JSON rows are between other output, such as TensorRT's and warnings.
            rows, _ = json.JSONDecoder().raw_decode(text, f"\n{text}".index("\n[\n"))
            spills = [row["kernel"] for row in rows if row["spill_bytes"]]
            most = max(row["registers"] for row in rows)
            found = {"kernels": len(rows), "most_registers": most, "with_spills": spills}
        else:
            found = json.loads(out.read_text())
    except (OSError, ValueError, ElementTree.ParseError):
        return False  # the step ended before it had results; its status and its output say why
    if step.merged:
        for key, value in found.items():
            if isinstance(value, list):
                part.setdefault(key, []).extend(value)
            elif key not in part:
                part[key] = value
    else:
        part[step.name.replace(" ", "_")] = found
    return True


def _python_path() -> str:
    """Return a PYTHONPATH with this repository first, in case it is not installed."""
    known = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*([known] if known else []), str(ROOT), str(SCRIPTS)])


def _stem(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


@cache
def _nvrtc() -> str:
    """Return the folder of NVRTC's Python package, which libraries do not search by themselves; empty if missing.

    TensorRT for RTX 1.7.1 contains NVRTC, but also has a message for a libnvrtc that it cannot open.
    """
    try:
        return str(Path(load_nvidia_dynamic_lib("nvrtc").abs_path).parent)
    except Exception:  # noqa: BLE001 - it need not be here
        return ""


def _write(folder: Path, gpu: str, part: dict[str, Any]) -> None:
    stem = f"{_stem(gpu)}-{part['backend']}"
    write_json(folder / f"{stem}.json", part)
    (folder / f"{stem}.md").write_text(_table(part), encoding="utf-8")


def _keep_log(folder: Path, gpu: str, step: Step, logs: Path) -> None:
    with suppress(OSError), (folder / f"{_stem(gpu)}.log").open("ab") as file:
        file.write(f"==== {step.part}: {step.name}\n".encode())
        file.write(_out(step, logs).with_suffix(".log").read_bytes()[-MOST_LOG:] + b"\n")


def _table(part: dict[str, Any]) -> str:
    try:
        return table(part)
    except Exception as error:  # noqa: BLE001 - the results are in the JSON file, and the next step is run
        return f"no table of {part['backend']}: {type(error).__name__}: {error}\n"


# Results of tests: from pytest's report, or from its output without one.


def counts(report: Path) -> dict[str, Any]:
    """Return the counts of a pytest report, why tests were skipped, and which failed where."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    found = {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
    bad = found["failures"] + found["errors"]
    problems = [
        (str(case.get("name")), problem)
        for case in suite.iter("testcase")
        for problem in (*case.iter("failure"), *case.iter("error"))
    ]
    return {
        "passed": found["tests"] - bad - found["skipped"],
        "failed": bad,
        "skipped": found["skipped"],
        "reasons": sorted({s.get("message", "") for s in suite.iter("skipped")}),
        "failures": {name: str(problem.get("message", ""))[:500] for name, problem in problems[:MOST_FAILURES]},
        "traces": {name: (problem.text or "")[-1500:] for name, problem in problems[:MOST_TRACES]},
    }


def counted(text: str) -> dict[str, Any]:
    """Return the same as `counts` from pytest's output, if pytest was ended before it wrote a report."""
    outcomes = re.findall(r"^\S+::(\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    found = {kind: sum(outcome == kind for _, outcome in outcomes) for kind in ("PASSED", "SKIPPED")}
    bad = [name for name, kind in outcomes if kind in ("FAILED", "ERROR")]
    return {
        "passed": found["PASSED"],
        "failed": len(bad),
        "skipped": found["SKIPPED"],
        "reasons": [],
        "failures": dict.fromkeys(bad[:MOST_FAILURES], "see the output"),
    }


def unfinished(text: str) -> str:
    """Return the name of the test that pytest was running."""
    lines = re.findall(r"^\S+::(\S.*)", text, re.MULTILINE)
    open_ = [line for line in lines if not re.search(r" (PASSED|FAILED|ERROR|SKIPPED)\b", line)]
    return open_[-1].partition(" Fatal Python error")[0].strip() if open_ else ""


# Tables, for the README.


def table(part: dict[str, Any]) -> str:
    gpu = part["gpu"]
    title = f"{part['backend']} {part['version']}" if part["version"] else "cache-update kernel"
    lines = [f"### {gpu['name']} (compute capability {gpu['compute_capability']}), {title}", ""]
    lines += _answers(part) + _measured(part) + _kernels(part) + _choice(part)
    for name in part:
        if name.endswith("_tests") or name == "sanitizer":
            counts = ", ".join(f"{part[name][k]} {k}" for k in ("passed", "failed", "skipped"))
            lines += [f"{name.replace('_', ' ').capitalize()}: {counts}.", ""]
    for step in part["steps"]:
        if step["status"] != "ok":
            last = step.get("ended_at") or (step.get("output", "").strip().splitlines() or [""])[-1]
            lines += [f"Step {step['step']}: {step['status']}{': ' + last if last else ''}", ""]
    return "\n".join(lines)


def _answers(part: dict[str, Any]) -> list[str]:
    answers = part.get("answers", {})
    lines = []
    runs = answers.get("runs", {})
    if "error" in runs:
        lines += [f"{part['backend']} does not run on this GPU. It says:", "", f"> {runs['error']}", ""]
    if answers:
        lines += ["| question | answer |", "| --- | --- |"]
        lines += [f"| {name.replace('_', ' ')} | {_answer(answer)} |" for name, answer in answers.items()]
        lines += [""]
    for engine in part.get("engines", []):
        said = engine.get("error") or f"opens in {engine['open_s']:.2f} s and runs"
        lines += [f"Built elsewhere, {engine['engine']}: {said}", ""]
    return lines


def _answer(answer: dict[str, Any]) -> str:
    more = {k: v for k, v in answer.items() if k not in ("yes", "error", "reported")}
    words = answer.get("error") or ", ".join(f"{k.replace('_', ' ')} {_short(v)}" for k, v in more.items())
    text = ("yes" if answer.get("yes") else "no") + (f": {words}" if words else "")
    return text.replace("|", "\\|")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k} {_short(v)}" for k, v in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


TABLES = {
    "decode": {
        "decode: capacity": "{capacity}", "position": "{position}", "span": "{span}", "graphs": "{graphs}",
        "ms per token": "{ms:.3f}", "at first": "{ms_at_first:.1f}", "GB/s read": "{gb_per_s:.0f}",
        "of a copy": "{share:.0%}",
    },
    "prefill": {
        "prefill: capacity": "{capacity}", "tokens": "{length}", "ms": "{ms:.3f}", "tokens/s": "{tokens_per_s:.0f}",
    },
    "batches": {
        "batch: capacity": "{capacity}", "sequences": "{batch}", "ms per step": "{ms:.3f}",
        "tokens/s": "{tokens_per_s:.0f}", "ms, best tokens alone": "{ms_best:.3f}",
    },
    "weights": {
        "batch of one: capacity": "{capacity}", "weights of decode": "{decode_weights}", "engine": "{mb:.0f} MB",
        "ms per token": "{ms:.3f}",
    },
}  # fmt: skip
"""Columns of the tables, and the format of their cells."""


def _measured(part: dict[str, Any]) -> list[str]:
    lines = []
    for kind, columns in TABLES.items():
        if not part.get(kind):
            continue
        if kind == "decode":
            lines += [f"Copy within the GPU: {part['copy_gb_per_s']:.0f} GB/s.", ""]
        rules = ["---" if name in ("graphs", "weights of decode") else "---:" for name in columns]
        lines += [f"| {' | '.join(columns)} |", f"| {' | '.join(rules)} |"]
        for row in part[kind]:
            graphs = "on" if row.get("graphs") == "on" else "off"
            share, mb = row.get("gb_per_s", 0) / part["copy_gb_per_s"], row.get("engine_bytes", 0) / 1e6
            values = row | {"graphs": graphs, "share": share, "mb": mb}
            lines += [f"| {' | '.join(cell.format_map(values) for cell in columns.values())} |"]
        lines += [""]
    return lines


def _kernels(part: dict[str, Any]) -> list[str]:
    bench = part.get("bench")
    if bench is None:
        return []
    lines = [f"Copy within the GPU: {bench['copy_bytes_per_second'] / 1e9:.0f} GB/s; an empty kernel: "
             f"{bench['empty_kernel_us']:.2f} us.", ""]  # fmt: skip
    lines += ["| update of K and V | 4,096 tokens | of a copy | 1 token | over an empty kernel |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for k in (*bench["kernels"], *bench["peers"]):
        cells = (k["error"], "", "", "") if "error" in k else (
            f"{k['large_us']:.1f} us", f"{k['copy_ratio']:.0%}", f"{k['one_token_us']:.2f} us",
            f"{k['over_empty_us']:.2f} us",
        )  # fmt: skip
        lines += [f"| {k['name']} | {' | '.join(cells)} |"]
    if bench["targets"]:
        lines += ["", f"Targets: {', '.join(f'{k} {v}' for k, v in bench['targets'].items())}."]
    return [*lines, ""]


def _choice(part: dict[str, Any]) -> list[str]:
    if "choice" not in part:
        return []
    lines = ["| choice of tokens: scores | | vocabulary | batch | host ms | GPU ms | |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | --- |"]
    for row in part["choice"]["rows"]:
        cells = ("", "", "", "", "", row["error"]) if "error" in row else (
            row["way"], row["vocab"], row["batch"], f"{row['host_ms']:.3f}", f"{row['gpu_ms']:.3f}",
            "the same tokens" if row["same"] else "other tokens",
        )  # fmt: skip
        lines += [f"| {row['logits']} | {' | '.join(map(str, cells))} |"]
    return [*lines, ""]


if __name__ == "__main__":
    end_by_unwinding()  # so that SIGTERM, as from timeout, ends the step too
    sys.exit(main())
