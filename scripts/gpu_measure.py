"""Latency, throughput and bandwidth of one backend at one capacity.

    python scripts/gpu_measure.py --backend tensorrt-rtx --capacity 8192 --output measured.json [--small]

A step of `scripts/gpu_check`, in a process of its own. Builds a decoder of 0.1 billion float16 parameters and measures,
with medians over repeated steps:

- decode latency against position, and with and without CUDA graphs; the slowest of the first steps there, in which
  TensorRT for RTX compiles kernels for a new span;
- prefill latency against length;
- tokens per second against batch, with all scores and with the best tokens alone on the host;
- for a batch of one, decode with the weights of prefill against decode with weights of its own: time and engine size;
- bytes that a decode step must read (weights, and cache rows up to the span) per second, against a copy within the GPU
  measured in the same process (its reads and writes both counted).

The file is written again after every measurement, so that what was measured before a crash is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from decoders import DecoderConfig, weights, write_decoder

from trt_kvcache.engine import build
from trt_kvcache.engine.options import BuildOptions
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer.plan import cache_bytes
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt.runner import TensorRTRunner

LARGE = DecoderConfig(
    layers=8, hidden=1024, query_heads=16, kv_heads=4, head_size=64, vocab=32_000, dtype="float16", positions=32_768
)
SMALL = DecoderConfig(layers=2, hidden=64, vocab=256, dtype="float16", positions=4096)


BUILT_FOR = "TRT_KVCACHE_GPU_BUILT_FOR"
"""Environment variable: what engines are built for, as ``trt-kvcache build --compute-capabilities`` takes it."""


def built_for() -> dict[str, Any]:
    """The same as arguments of `BuildOptions`."""
    names = os.environ.get(BUILT_FOR, "")
    return {"compute_capabilities": tuple(names.split(","))} if names else {}


class Opened:
    """An engine for the length of a block."""

    def __init__(self, engine: Path, **arguments: Any) -> None:
        self._runner = TensorRTRunner(engine, **arguments)

    def __enter__(self) -> TensorRTRunner:
        return self._runner

    def __exit__(self, *error: object) -> None:
        self._runner.close()


def write_json(path: Path, content: object) -> None:
    """Replace a file as a whole: a reader, or a crash, never sees half of it. NaN, which JSON lacks, becomes a word."""
    temporary = path.with_name(path.name + ".part")
    content = json.loads(json.dumps(content), parse_constant=str)
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def measure(name: str, capacity: int, *, small: bool, output: Path) -> dict[str, Any]:
    """Everything at one capacity, as JSON data, written to `output` as it comes."""
    repeats, settle = (5, 0.0) if small else (30, 2.0)
    result: dict[str, Any] = {"decode": [], "prefill": [], "batches": [], "weights": []}

    def keep(kind: str, row: dict[str, Any]) -> None:
        result[kind].append({"capacity": capacity} | row)
        write_json(output, result)

    config = dataclasses.replace(SMALL if small else LARGE, capacity=capacity)
    # All but the embedding, of which a step reads one row per sequence.
    read = sum(2 * prod(shape) for name, shape, *_ in weights(config) if name != "embed.weight")
    with tempfile.TemporaryDirectory() as folder:
        model = write_decoder(Path(folder) / "model.onnx", config, external_threshold=None if small else 1 << 16)
        engine = Path(folder) / "model.engine"
        chunk = min(512, capacity // 2)
        build.build_engine(model, engine, build=BuildOptions(backend=name, max_batch=8, max_chunk=chunk, **built_for()))
        start = time.perf_counter()
        with Opened(engine) as runner:
            opened = time.perf_counter() - start
            result["copy_gb_per_s"] = _copy_speed(runner, 1 << 24 if small else 1 << 30)
            for position in sorted({16, capacity // 4, capacity // 2, capacity - repeats - 16}):
                keep("decode", {"position": position, "open_s": opened} | decode(runner, 1, position, repeats, read))
            for length in sorted({1, chunk // 8, chunk // 2, chunk}):
                keep("prefill", {"length": length} | _prefill(runner, length, repeats, settle))
            for rows in (1, 2, 4, 8):
                best = decode(runner, rows, capacity // 4, repeats, read, best=True)["ms"]
                keep("batches", {"batch": rows, "ms_best": best} | decode(runner, rows, capacity // 4, repeats, read))
        with Opened(engine, cuda_graphs=False) as runner:
            plain = decode(runner, 1, capacity // 2, repeats, read, settle)
            keep("decode", {"position": capacity // 2, "cuda_graphs": False} | plain)
        for kind in ("shared", "own"):
            options = BuildOptions(backend=name, max_batch=1, max_chunk=chunk, decode_weights=kind, **built_for())
            build.build_engine(model, engine, build=options)
            with Opened(engine) as runner:
                size = {"decode_weights": kind, "engine_bytes": engine.stat().st_size}
                keep("weights", size | decode(runner, 1, capacity // 2, repeats, read))
    return result


def decode(
    runner: TensorRTRunner, rows: int, position: int, repeats: int, read: int, settle: float = 0, *, best: bool = False
) -> dict[str, Any]:
    """Decode steps from `position` on; the caches' content does not matter for the time.

    `read` is what a step reads besides the caches, in bytes; with `best`, the host gets the best tokens alone.
    """
    ids = np.ones((rows, 1), np.int64)
    steps = iter(range(position, position + repeats + 8))

    def step() -> None:
        runner.step(StepBatch(0, ids, np.full(rows, next(steps), np.int64), highest=int(best)))

    slowest = max(_times(step, 6))
    seconds, spread = _median(step, repeats, 0, settle)
    batch = StepBatch(0, ids, np.full(rows, position, np.int64))
    sizes = runner.inputs.span_sizes(batch)
    spans = max((sizes[span.name] for span in runner.plan.spans), default=0)
    for cache in runner.plan.caches:
        read += rows * cache_bytes(cache, 1) * min(spans or cache.capacity, cache.capacity) // cache.capacity
    recorded = runner.graphs  # of which there are none any more after a failure
    graphs = "off" if recorded is None else recorded.failure or ("on" if len(recorded) else "nothing was recorded")
    return {
        "ms": seconds * 1e3,
        "spread_ms": spread * 1e3,
        "ms_at_first": slowest * 1e3,
        "tokens_per_s": rows / seconds,
        "span": spans,
        "gb_per_s": read / seconds / 1e9,
        "graphs": graphs,
    }


def _prefill(runner: TensorRTRunner, length: int, repeats: int, settle: float) -> dict[str, Any]:
    batch = StepBatch(0, np.ones((1, length), np.int64), np.zeros(1, np.int64))
    at_once, _ = _median(lambda: runner.step(batch), 5, warm_up=1)
    seconds, spread = _median(lambda: runner.step(batch), repeats, 2, settle)
    return {
        "ms_at_once": at_once * 1e3,
        "ms": seconds * 1e3,
        "spread_ms": spread * 1e3,
        "tokens_per_s": length / seconds,
    }


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


def _median(work: Callable[[], object], repeats: int, warm_up: int, settle: float = 0) -> tuple[float, float]:
    """Median and spread (90th less 10th percentile) of the seconds that `work` takes.

    After warming up it waits `settle` seconds: TensorRT for RTX compiles kernels for new shapes meanwhile, and runs
    others until they are there; contexts that record graphs wait by themselves.
    """
    for _ in range(warm_up):
        work()
    if settle:
        time.sleep(settle)
        work()
    times = _times(work, repeats)
    low, *_, high = statistics.quantiles(times, n=10)
    return statistics.median(times), high - low


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a tiny decoder; the numbers mean little")
    options = parser.parse_args(arguments)
    try:
        measure(options.backend, options.capacity, small=options.small, output=options.output)
    except TrtKvCacheError as error:
        raise SystemExit(f"{error}") from error  # one line: the words of the backend


if __name__ == "__main__":
    main()
