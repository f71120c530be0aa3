"""What a machine with an NVIDIA GPU can show: answers, tests, latency and bandwidth, in 8 minutes and with no human.

    scripts/gpu_check                          # every backend that is installed
    scripts/gpu_check --backend tensorrt-rtx
    scripts/gpu_check --engine model.engine    # also engines that were built elsewhere
    scripts/gpu_check --compute-capabilities current    # engines for this GPU alone, where those for all do not run
    python scripts/gpu_check.py                # with what is installed, where nothing can be downloaded

This script has never run on a GPU. Where it was developed there is none: it has run against the fake TensorRT of the
tests alone, which shows that it runs to its end, and nothing about its numbers.

Every step is a process with a time limit; one that fails, crashes or hangs says where it was, keeps what it had by
then, and costs no other step; each step's results are on disk before the next begins. In this order, the most telling
first:

- answers, for each backend: does it run here at all, in its own words; do engines that were built without a GPU, or
  elsewhere, open; aliases; garbage and NaN in unused rows; CUDA graphs; IAttention's masks and lengths
  (``gpu_answers.py``);
- measure, for each backend and capacity: decode latency against position, span and CUDA graphs, prefill, batches,
  bandwidth (``gpu_measure.py``). Behind the first capacity:
- bench: the cache-update kernel against a device-to-device copy, an empty kernel, torch's ``index_copy_`` and
  FlashInfer's append kernel (``bench.py kernel``);
- choice: greedy tokens chosen on the GPU against those of the host, and the time of both (``bench.py choice``);
- engine tests, encoder tests, ..., for each backend: ``tests/gpu/test_engines.py``, ``test_encoder.py``,
  ``test_embeddings.py``, ``test_plugin_engines.py``;
- compile, kernel tests, choosing tests: every kernel compiled for this GPU (registers, spills), and against numpy:
  cache updates, and the choice of tokens;
- sanitizer: some kernels under compute-sanitizer, where there is one.

Where engines for all GPUs do not run on this one, and engines that were built for it alone do, the steps after the
answers build such engines.

Writes ``benchmarks/results/<gpu>-kernel.json`` and ``<gpu>-<backend>.json``, each with a table beside it (``.md``), and
``<gpu>.log`` with all that the steps print; prints the tables, and one JSON line last. Where a backend does not support
the GPU, its file holds its exact words: that is a result. Exits with 1 if another step fails, or if there is no GPU.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

from cuda.pathfinder import load_nvidia_dynamic_lib
from gpu_measure import BUILT_FOR, write_json
from gpu_outcomes import counted, counts, unfinished
from gpu_report import table
from gpu_supervise import runs_only_if_built_here, without_modules

from trt_kvcache.cli.signals import end_by_unwinding
from trt_kvcache.engine import backend, doctor
from trt_kvcache.importer.plan import Target

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
CAPACITIES = {False: (8192, 1024, 32_768), True: (64, 128)}
ENGINE_TESTS = {
    "engine": "engines", "encoder": "encoder", "embeddings": "embeddings", "plugin engine": "plugin_engines",
}  # fmt: skip
"""The files of tests of engines, by what their steps are called: each costs no other its results."""
KERNEL = "kernel"
SANITIZED = "float16_to_int8_one or padded_circular_two or packed_linear_two or float16-31"
NO_SANITIZER = ("Device not supported", "not supported on this", "Unable to find injection library")
"""What compute-sanitizer says where it cannot look at the GPU, as under some virtual machines."""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        part: the file that its results go to: ``"kernel"`` or a backend.
        name: the key of its results there.
        command: ``{out}`` is the JSON or XML file that it writes. Empty: there is no compute-sanitizer to run it.
        limit: seconds.
        merged: its results are lists to append to those of the part.
    """

    part: str
    name: str
    command: tuple[str, ...]
    limit: float
    merged: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = _parse(arguments)
    if options.compute_capabilities:
        os.environ[BUILT_FOR] = options.compute_capabilities  # of all steps
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
MOST_LOG = 1 << 20  # bytes of what a step prints
MOST_FOR_DRIVER = 60.0  # seconds until it says which GPUs there are
ANSWERS = "answers"
PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy", "onnx", "onnxruntime", "torch")
"""Whose versions are written down with the results."""


def _find_gpus() -> tuple[str | None, tuple[doctor.Gpu, ...], str]:
    """As `doctor` does, but not for longer than a driver takes that works: one whose GPU is lost may never answer."""
    found: list[tuple[str | None, tuple[doctor.Gpu, ...], str]] = []
    thread = threading.Thread(target=lambda: found.append(doctor.find_gpus()), daemon=True)
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
    """All steps, in order. Limits leave room for one that hangs."""
    python = sys.executable
    # Warnings as they are: those of package versions that happen to be here are not what is tested.
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
        command = (python, str(SCRIPTS / "gpu_answers.py"), f"--backend={name}", "--output={out}", *given)
        found.append(Step(name, ANSWERS, command, 200, merged=True))  # each has its own limit, too
    for i, capacity in enumerate(CAPACITIES[options.small]):
        found += [bench, choice] if i == 1 else []
        for name in backends:
            command = (python, str(SCRIPTS / "gpu_measure.py"), f"--backend={name}", f"--capacity={capacity}")
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
    """A program of the CUDA toolkit that is not on the PATH."""
    for folder in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if folder and (found := shutil.which(program, path=f"{folder}/bin")):
            return found
    return None


def _useless(part: dict[str, Any], step: Step) -> bool:
    """Whether the backend already said that it does not run on this GPU."""
    runs = part.get(ANSWERS, {}).get("runs", {})
    refused = "error" in runs and not runs.get("unexpected")
    return step.part != KERNEL and refused and "built_for" not in part


def run_step(step: Step, part: dict[str, Any], folder: Path, deadline: float) -> dict[str, Any]:
    """Run one step and put what it found into `part`.

    Returns:
        What became of it: ``step``, ``status`` (``ok``, ``failed``, ``timeout``, ``no time``, ``not possible``),
        ``seconds``, and the end of its output where it is not ok.
    """
    about: dict[str, Any] = {"step": step.name}
    if not step.command:
        return about | {"status": "not possible", "output": "compute-sanitizer is neither on PATH nor in CUDA_HOME"}
    limit = min(step.limit, deadline - time.monotonic())
    if limit < 5:
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
    start = time.monotonic()
    with log.open("wb") as file:
        # A session of its own: pytest's and the builder's children end with it.
        process = subprocess.Popen(
            [word.replace("{out}", str(out)) for word in step.command], cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            for kind in (signal.SIGINT, signal.SIGABRT):  # pytest writes its report, Python says where it is
                _signal(process, kind)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(4)
                    break
        finally:
            _signal(process, signal.SIGKILL)  # and its children, which may outlive it and keep the GPU's memory
            with suppress(subprocess.TimeoutExpired):
                process.wait(4)  # no longer: one that waits for a GPU that is lost cannot be killed
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


def _out(step: Step, folder: Path) -> Path:
    """The file that a step writes; its log has another ending."""
    return folder / f"{step.part}-{step.name}".replace(" ", "-")


def _signal(process: subprocess.Popen[bytes], kind: signal.Signals) -> None:
    """To a step and its children; as gently as it lets us, where it takes too long."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, kind)


def _take(step: Step, part: dict[str, Any], out: Path, text: str) -> bool:
    """Put what a step wrote into its part, as much as there is; gives whether there is any."""
    try:
        if step.name.endswith("tests") or step.name == "sanitizer":
            found = counts(out) if out.exists() else counted(text)
        elif step.name == "compile":
            # Between what else is said, as by TensorRT or in warnings.
            rows, _ = json.JSONDecoder().raw_decode(text, f"\n{text}".index("\n[\n"))
            spills = [row["kernel"] for row in rows if row["spill_bytes"]]
            most = max(row["registers"] for row in rows)
            found = {"kernels": len(rows), "most_registers": most, "with_spills": spills}
        else:
            found = json.loads(out.read_text())
    except (OSError, ValueError, ParseError):
        return False  # it ended before it had anything; its status and its output say why
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
    """This repository before everything else, where it is not installed."""
    known = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*([known] if known else []), str(ROOT), str(SCRIPTS)])


def _stem(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


@cache
def _nvrtc() -> str:
    """The folder of the NVRTC that is a Python package here, where no library looks by itself; empty without one.

    TensorRT for RTX 1.7.1 contains one, and also words for a libnvrtc that it cannot open.
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
    """Add what a step printed to the log of the GPU."""
    with suppress(OSError), (folder / f"{_stem(gpu)}.log").open("ab") as file:
        file.write(f"==== {step.part}: {step.name}\n".encode())
        file.write(_out(step, logs).with_suffix(".log").read_bytes()[-MOST_LOG:] + b"\n")


def _table(part: dict[str, Any]) -> str:
    try:
        return table(part)
    except Exception as error:  # noqa: BLE001 - the results are in the JSON file, and the next step is run
        return f"no table of {part['backend']}: {type(error).__name__}: {error}\n"


if __name__ == "__main__":
    end_by_unwinding()  # so that SIGTERM, as from timeout, ends the step too
    sys.exit(main())
