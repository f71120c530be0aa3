"""Greedy tokens chosen on a GPU against those of the host: the same, and in what time.

    python scripts/bench_choice.py [--vocab 128256] [--output FILE.json]

Scores lie on the GPU, as an engine leaves them there. "Host" fetches them and chooses with NumPy; "GPU" launches the
kernel and fetches its answers. By the scores' type and the batch; milliseconds, medians. Prints a table, then one JSON
line; exits with 1 where the tokens differ. Nobody has run it on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gpu_measure import write_json

from trt_kvcache.plugins.choice import CHOICE_DTYPES
from trt_kvcache.runtime import trt_runner
from trt_kvcache.runtime.greedy import best
from trt_kvcache.runtime.trt_choice import hard_scores, open_choice

BATCHES = (1, 8, 64)


def measure(cuda: Any, name: str, vocab: int, repeats: int) -> list[dict[str, Any]]:
    """One type of scores, every batch."""
    dtype, rows = np.dtype(CHOICE_DTYPES[name]), max(BATCHES)
    width = vocab * dtype.itemsize
    address, pinned = cuda.allocate(rows * width), cuda.allocate_pinned(rows * width)
    choice, reason = open_choice(cuda, dtype, vocab, rows, address, rows * width, pinned)
    if choice is None:
        return [{"logits": name, "error": reason}]
    logits = np.random.default_rng(0).normal(0, 4, (rows, vocab)).astype(dtype)
    hard = hard_scores(dtype, rows // 2, 1, vocab, 0)[:, 0]
    finite = np.isfinite(hard.astype(np.float32)).any(axis=1) & ~np.isnan(hard.astype(np.float32)).any(axis=1)
    logits[: rows // 2][finite] = hard[finite]
    pinned.data[:] = logits.reshape(-1).view(np.uint8)
    cuda.upload(address, pinned.address, rows * width)
    cuda.sync()

    def host(count: int) -> list[int]:
        cuda.download_rows(pinned.address, address, width, width, count)
        cuda.sync()
        return [best(row)[0] for row in pinned.data[: count * width].view(dtype).reshape(count, vocab)]

    def gpu(count: int) -> list[int]:
        return [best(row[0])[0] for row in choice.best(address, width, count, 1)]

    found = []
    for count in BATCHES:
        same = host(count) == gpu(count)
        ms = {"host_ms": _median(host, count, repeats), "gpu_ms": _median(gpu, count, repeats)}
        found.append({"logits": name, "vocab": vocab, "batch": count, "same": same} | ms)
    return found


def _median(work: Callable[[int], object], count: int, repeats: int) -> float:
    """Milliseconds for so many rows."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        work(count)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[128_256, 50_257])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--output", type=Path, help="also write the JSON here, again after every type")
    given = parser.parse_args(arguments)
    cuda = trt_runner.Cuda(0, trt_runner.cuda_bindings())
    result: dict[str, Any] = {"gpu": cuda.name, "rows": []}
    for vocab in given.vocab:
        for name in CHOICE_DTYPES:
            result["rows"] += measure(cuda, name, vocab, given.repeats)
            if given.output is not None:
                write_json(given.output, result)
    cuda.close()
    print(f"{cuda.name}: the best token of each row, ms")
    print(f"{'logits':10}{'vocabulary':>12}{'batch':>7}{'host':>10}{'GPU':>10}")
    for row in result["rows"]:
        if "error" in row:
            print(f"{row['logits']:10}{row['error']}")
            continue
        times = f"{row['host_ms']:10.3f}{row['gpu_ms']:10.3f}"
        print(f"{row['logits']:10}{row['vocab']:12}{row['batch']:7}{times}{'' if row['same'] else '  other tokens!'}")
    print(json.dumps(result))
    if not all(row.get("same") for row in result["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
