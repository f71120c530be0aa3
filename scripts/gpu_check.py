"""What a machine with an NVIDIA GPU can show: the GPU tests, then latency, throughput and bandwidth, in 8 minutes.

    scripts/gpu_check                          # every backend that is installed
    scripts/gpu_check --backend tensorrt-rtx
    scripts/gpu_check --engine model.engine    # also engines that were built elsewhere

This script has never run on a GPU. Where it was developed there is none: it has run against the fake TensorRT of the
tests alone, which shows that it runs to its end, and nothing about its numbers.

For each backend it runs ``pytest -m gpu``, then builds a decoder of 0.1 billion float16 parameters at several
capacities and measures, with medians over repeated steps:

- decode latency against position and capacity: it should follow the position, not the capacity;
- decode latency with and without CUDA graphs;
- prefill latency against length;
- tokens per second against batch;
- bytes that a decode step must read (weights, and cache rows up to the span) per second, against a copy within the GPU
  measured in the same run (its reads and writes both counted).

Writes ``benchmarks/results/<gpu>-<backend>.json`` and a table beside it (``.md``), prints the table, and one JSON line
last. Where the backend does not support the GPU, both hold its exact words: that is a result. Exits with 1 if a test
fails, if a backend fails after it had begun, or if there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from decoders import DecoderConfig, weights, write_decoder

from trt_kvcache.engine import backend, build, doctor
from trt_kvcache.engine.manifest import load_manifest
from trt_kvcache.engine.options import BuildOptions
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer.plan import Target, cache_bytes
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt_runner import TensorRTRunner

ROOT = Path(__file__).resolve().parent.parent
LARGE = DecoderConfig(
    layers=8, hidden=1024, query_heads=16, kv_heads=4, head_size=64, vocab=32_000, dtype="float16", positions=32_768
)
SMALL = DecoderConfig(layers=2, hidden=64, vocab=256, dtype="float16", positions=4096)
CAPACITIES = {False: (1024, 8192, 32_768), True: (64, 128)}
TESTS_LIMIT = 240  # seconds for the GPU tests of all backends


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        small: a tiny decoder, to try the script out.
        repeats: steps per median.
        deadline: time.monotonic() after which nothing new is begun.
    """

    small: bool
    repeats: int
    deadline: float

    @property
    def over(self) -> bool:
        """No time is left."""
        return time.monotonic() > self.deadline


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = _parse(arguments)
    _, gpus, problem = doctor.find_gpus()
    if problem:
        print(f"gpu_check: nothing was checked: {problem}", file=sys.stderr)
        return 1
    effort = Effort(options.small, 5 if options.small else 30, time.monotonic() + options.minutes * 60)
    targets = [t for t in Target if backend.installed_version(t) is not None]
    chosen = [t.value for t in targets if options.backend in (None, t.value)]
    if not chosen:
        print(f"gpu_check: {options.backend} is not installed", file=sys.stderr)
        return 1
    summary, failed = [], False
    for name in chosen:
        result = check_backend(name, options.engine, effort, tests=not options.no_tests)
        result = {"gpu": dataclasses.asdict(gpus[0]), **result}
        failed |= bool(result["tests"].get("failed")) or bool(result.get("error"))
        table = _table(result)
        stem = options.output / f"{_slug(gpus[0].name)}-{name}"
        options.output.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
        stem.with_suffix(".md").write_text(table)
        print(table)
        summary.append({"backend": name, "supported": result["supported"], "tests": result["tests"], "file": str(stem)})
    print(json.dumps({"gpu": gpus[0].name, "backends": summary, "ok": not failed}))
    return int(failed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=[t.value for t in Target], help="default: all that are installed")
    parser.add_argument("--engine", type=Path, action="append", default=[], help="an engine built elsewhere")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--minutes", type=float, default=7.5, help="after these, nothing new is begun")
    parser.add_argument("--small", action="store_true", help="a tiny decoder; the numbers mean little")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    return parser.parse_args(arguments)


def check_backend(name: str, engines: Sequence[Path], effort: Effort, *, tests: bool) -> dict[str, Any]:
    """All about one backend, as JSON data."""
    result: dict[str, Any] = {
        "backend": name,
        "version": backend.installed_version(Target(name)),
        "supported": True,
        "tests": _run_tests(name) if tests else {},
        "decode": [],
        "prefill": [],
        "batches": [],
        "engines": [],
        "cut_short": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            for capacity in CAPACITIES[effort.small]:
                if effort.over:
                    result["cut_short"] = True
                    break
                _measure_capacity(result, name, Path(folder), capacity, effort)
        except TrtKvCacheError as error:
            # The same words in the file and in the table: what does not run here is a result, too.
            result["words"] = str(error)
            result["supported"] = bool(result["decode"])
            result["error"] = result["supported"]
    for path in engines:
        result["engines"].append(_foreign(path, name, effort))
    result["engines"] = [e for e in result["engines"] if e]
    return result


def _run_tests(name: str) -> dict[str, Any]:
    """``pytest -m gpu`` for one backend: counts, and why tests were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", f"--junitxml={report}"]
        environment = os.environ | {"TRT_KVCACHE_GPU_BACKENDS": name}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=TESTS_LIMIT, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"failed": 1, "output": f"not done after {TESTS_LIMIT} seconds"}
        if not report.exists():
            return {"failed": 1, "output": (done.stdout + done.stderr)[-2000:]}
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
        counts = {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
        reasons = sorted({s.get("message", "") for s in suite.iter("skipped")})
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    found = {"passed": passed, "failed": failed, "skipped": counts["skipped"], "reasons": reasons}
    return found if not failed else found | {"output": done.stdout[-4000:]}


def _measure_capacity(result: dict[str, Any], name: str, folder: Path, capacity: int, effort: Effort) -> None:
    config = dataclasses.replace(SMALL if effort.small else LARGE, capacity=capacity)
    model = write_decoder(folder / f"{capacity}.onnx", config, external_threshold=None if effort.small else 1 << 16)
    engine = folder / f"{capacity}.engine"
    chunk = min(512, capacity // 2)
    build.build_engine(model, engine, build=BuildOptions(backend=name, max_batch=8, max_chunk=chunk))
    start = time.perf_counter()
    with _Opened(engine) as runner:
        opened = time.perf_counter() - start
        # All but the embedding, of which a step reads one row per sequence.
        read = sum(2 * prod(shape) for name, shape, *_ in weights(config) if name != "embed.weight")
        if "copy_gb_per_s" not in result:
            result["copy_gb_per_s"] = _copy_speed(runner, 1 << 24 if effort.small else 1 << 30)
        for position in sorted({16, capacity // 4, capacity // 2, capacity - effort.repeats - 16}):
            result["decode"].append(
                {"capacity": capacity, "position": position, "open_s": opened}
                | _decode(runner, 1, position, effort.repeats, read)
            )
        for length in sorted({1, chunk // 8, chunk // 2, chunk}):
            result["prefill"].append({"capacity": capacity, "length": length} | _prefill(runner, length, effort))
        for rows in (1, 2, 4, 8):
            measured = _decode(runner, rows, capacity // 4, effort.repeats, read)
            result["batches"].append({"capacity": capacity, "batch": rows} | measured)
    with _Opened(engine, cuda_graphs=False) as runner:
        plain = _decode(runner, 1, capacity // 2, effort.repeats, read)
        result["decode"].append({"capacity": capacity, "position": capacity // 2, "cuda_graphs": False} | plain)


class _Opened:
    """An engine for the length of a block."""

    def __init__(self, engine: Path, **arguments: Any) -> None:
        self._runner = TensorRTRunner(engine, **arguments)

    def __enter__(self) -> TensorRTRunner:
        return self._runner

    def __exit__(self, *error: object) -> None:
        self._runner.close()


def _decode(runner: TensorRTRunner, rows: int, position: int, repeats: int, read: int) -> dict[str, Any]:
    """Decode steps from `position` on; the caches' content does not matter for the time.

    `read` is what a step reads besides the caches, in bytes.
    """
    ids = np.ones((rows, 1), np.int64)
    steps = iter(range(position, position + repeats + 8))

    def step() -> None:
        runner.step(StepBatch(0, ids, np.full(rows, next(steps), np.int64)))

    seconds, spread = _median(step, repeats, warm_up=6)
    batch = StepBatch(0, ids, np.full(rows, position, np.int64))
    spans = max(runner.inputs.span_sizes(batch).values(), default=0)
    for cache in runner.plan.caches:
        read += rows * cache_bytes(cache, 1) * min(spans or cache.capacity, cache.capacity) // cache.capacity
    graphs = runner.graphs.failure or "on" if runner.graphs else "off"
    return {
        "ms": seconds * 1e3,
        "spread_ms": spread * 1e3,
        "tokens_per_s": rows / seconds,
        "span": spans,
        "gb_per_s": read / seconds / 1e9,
        "graphs": graphs,
    }


def _prefill(runner: TensorRTRunner, length: int, effort: Effort) -> dict[str, Any]:
    batch = StepBatch(0, np.ones((1, length), np.int64), np.zeros(1, np.int64))
    seconds, spread = _median(lambda: runner.step(batch), effort.repeats, warm_up=3)
    return {"ms": seconds * 1e3, "spread_ms": spread * 1e3, "tokens_per_s": length / seconds}


def _copy_speed(runner: TensorRTRunner, most: int) -> float:
    """GB/s of a copy within the GPU, reads and writes counted."""
    cuda = runner._cuda  # the runner's own stream and allocations
    free, _ = cuda.free_memory()
    size = min(most, free // 4)
    source, target = cuda.allocate(size), cuda.allocate(size)

    def copy() -> None:
        cuda.copy_rows(target, source, size, size, 1)
        cuda.sync()

    seconds, _ = _median(copy, 10, warm_up=3)
    return 2 * size / seconds / 1e9


def _median(work: Callable[[], object], repeats: int, warm_up: int) -> tuple[float, float]:
    """Median and spread (90th less 10th percentile) of the seconds that `work` takes."""
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    low, *_, high = statistics.quantiles(times, n=10)
    return statistics.median(times), high - low


def _foreign(path: Path, name: str, effort: Effort) -> dict[str, Any] | None:
    """An engine that was built elsewhere: does it open here, and how fast is it?"""
    try:
        manifest = load_manifest(path)
        if manifest.backend != name:
            return None
        with _Opened(path) as runner:
            measured = _decode(runner, 1, 1, min(effort.repeats, 8), 0)
    except TrtKvCacheError as error:
        return {"engine": path.name, "words": str(error)}
    return {"engine": path.name, "built_for": list(manifest.compute_capabilities)} | measured


def _table(result: dict[str, Any]) -> str:
    """Markdown for the README."""
    gpu = result["gpu"]
    lines = [
        f"### {gpu['name']} (compute capability {gpu['compute_capability']}), {result['backend']} {result['version']}",
        "",
    ]
    tests = result["tests"]
    if tests:
        counts = ", ".join(f"{tests[k]} {k}" for k in ("passed", "failed", "skipped") if k in tests)
        lines += [f"GPU tests: {counts}.", ""]
    if "words" in result:
        what = "does not run on this GPU" if not result["supported"] else "failed"
        lines += [f"{result['backend']} {what}. It says:", "", f"> {result['words']}", ""]
    if result["decode"]:
        copy = result["copy_gb_per_s"]
        lines += [f"Copy within the GPU: {copy:.0f} GB/s.", ""]
        lines += ["| decode: capacity | position | CUDA graphs | ms per token | GB/s read | of a copy |"]
        lines += ["| ---: | ---: | --- | ---: | ---: | ---: |"]
        lines += [
            f"| {r['capacity']} | {r['position']} | {'on' if r['graphs'] == 'on' else 'off'} | {r['ms']:.3f} | "
            f"{r['gb_per_s']:.0f} | {100 * r['gb_per_s'] / copy:.0f} % |"
            for r in result["decode"]
        ]
        lines += ["", "| prefill: capacity | tokens | ms | tokens/s |", "| ---: | ---: | ---: | ---: |"]
        lines += [
            f"| {r['capacity']} | {r['length']} | {r['ms']:.3f} | {r['tokens_per_s']:.0f} |" for r in result["prefill"]
        ]
        lines += ["", "| batch: capacity | sequences | ms per step | tokens/s |", "| ---: | ---: | ---: | ---: |"]
        lines += [
            f"| {r['capacity']} | {r['batch']} | {r['ms']:.3f} | {r['tokens_per_s']:.0f} |" for r in result["batches"]
        ]
        lines += [""]
    for engine in result["engines"]:
        said = engine.get("words") or f"{engine['ms']:.3f} ms per token"
        lines += [f"Built elsewhere, {engine['engine']}: {said}", ""]
    if result["cut_short"]:
        lines += ["Cut short: time was up.", ""]
    return "\n".join(lines)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
