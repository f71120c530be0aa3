"""Tokens chosen on a GPU against those of the host: the same, and in what time.

    python scripts/bench_choice.py [--vocab 128256] [--output FILE.json]

Scores lie on the GPU, as an engine leaves them there. "Host" fetches them and chooses with NumPy; "GPU" launches the
kernels and chooses from what they find. Greedy, and sampled from the 50 highest scores; by the scores' type and the
batch; milliseconds, medians. Prints a table, then one JSON line; exits with 1 where the tokens differ. Nobody has run
it on a GPU yet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu_measure import write_json

from trt_kvcache.plugins.choice import CHOICE_DTYPES
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.generation.sampling import Sampler
from trt_kvcache.runtime.trt import runner as trt_runner
from trt_kvcache.runtime.trt.choice import open_choice

BATCHES = (1, 8, 64)
PROMPT = np.array([1])
WAYS = {
    "greedy": GenerationConfig(),
    "top-k 50": GenerationConfig(do_sample=True, top_k=50, seed=0),
}


def measure(cuda: Any, name: str, vocab: int, repeats: int) -> list[dict[str, Any]]:
    """One type of scores, every batch."""
    dtype, rows = np.dtype(CHOICE_DTYPES[name]), max(BATCHES)
    width = vocab * dtype.itemsize
    address, pinned = cuda.allocate(rows * width), cuda.allocate_pinned(rows * width)
    choice, reason = open_choice(cuda, dtype, vocab, rows, address, rows * width, pinned)
    if choice is None:
        return [{"logits": name, "error": reason}]
    logits = np.random.default_rng(0).normal(0, 4, (rows, vocab)).astype(dtype)
    pinned.data[:] = logits.reshape(-1).view(np.uint8)
    cuda.upload(address, pinned.address, rows * width)
    cuda.sync()

    def host(samplers: list[Sampler]) -> list[int]:
        count = len(samplers)
        cuda.download_rows(pinned.address, address, width, width, count)
        cuda.sync()
        return drawn(samplers, pinned.data[: count * width].view(dtype).reshape(count, vocab))

    def gpu(samplers: list[Sampler]) -> list[int]:
        chosen = choice.choose(address, width, len(samplers), 1, samplers[0].looks_at(0))
        return host(samplers) if chosen is None else drawn(samplers, chosen[:, 0])

    def drawn(samplers: list[Sampler], rows: Any) -> list[int]:
        return [sampler.choose(row, PROMPT, 0)[0] for sampler, row in zip(samplers, rows, strict=True)]

    found = []
    for (way, config), count in itertools.product(WAYS.items(), BATCHES):
        one, other = ([Sampler(config, i) for i in range(count)] for _ in range(2))
        same = host(one) == gpu(other)
        ms = {"host_ms": _median(partial(host, one), repeats), "gpu_ms": _median(partial(gpu, other), repeats)}
        found.append({"way": way, "logits": name, "vocab": vocab, "batch": count, "same": same} | ms)
    return found


def _median(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        work()
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
    print(f"{cuda.name}: a token of each row, ms")
    print(f"{'':10}{'logits':10}{'vocabulary':>12}{'batch':>7}{'host':>10}{'GPU':>10}")
    for row in result["rows"]:
        if "error" in row:
            print(f"{'':10}{row['logits']:10}{row['error']}")
            continue
        times = f"{row['host_ms']:10.3f}{row['gpu_ms']:10.3f}"
        where = f"{row['way']:10}{row['logits']:10}{row['vocab']:12}{row['batch']:7}"
        print(f"{where}{times}{'' if row['same'] else '  other tokens!'}")
    print(json.dumps(result))
    if not all(row.get("same") for row in result["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
