"""Tokens chosen on a GPU against those of the host: the same, and in what time (medians, milliseconds).

"Host" fetches the scores and chooses with NumPy; "GPU" launches the kernels and chooses from what they find: greedy,
and sampled from the 50 highest scores. Exits with 1 if the tokens differ. Nobody has run it on a GPU yet.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial
from typing import Any

import numpy as np

from benchmarks.report import Report, quartiles
from benchmarks.turns import interleave, timed
from trt_kvcache.plugins.choice import CHOICE_DTYPES
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.sampling import Sampler
from trt_kvcache.runtime.trt import trt_runner
from trt_kvcache.runtime.trt.choice import open_choice

BATCHES = (1, 8, 64)
PROMPT = np.array([1])
WAYS = {
    "greedy": GenerationConfig(),
    "top-k 50": GenerationConfig(do_sample=True, top_k=50, seed=0),
}
OPTIONS = {"vocab": ([128_256, 50_257], "tokens of the vocabularies"), "turns": (50, "choices of each side")}


def measure(cuda: Any, name: str, vocab: int, turns: int) -> list[dict[str, Any]]:
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
        ways = {"host": timed(partial(host, one)), "gpu": timed(partial(gpu, other))}
        interleave(ways, 3)  # warms up
        row = {"way": way, "logits": name, "vocab": vocab, "batch": count, "same": same}
        for side, seconds in interleave(ways, turns).items():
            row |= {f"{side}_ms": 1e3 * statistics.median(seconds)}
            row |= {f"{side}_quartiles": [1e3 * t for t in quartiles(seconds)]}
        found.append(row)
    return found


def run(given: argparse.Namespace, keep: Any) -> Report:
    cuda = trt_runner.Cuda(0, trt_runner.cuda_bindings())
    result: dict[str, Any] = {"gpu": cuda.name, "rows": []}
    for vocab in given.vocab:
        for name in CHOICE_DTYPES:
            result["rows"] += measure(cuda, name, vocab, given.turns)
            keep(result)
    cuda.close()
    rows = []
    for row in result["rows"]:
        if "error" in row:
            rows.append(["", row["logits"], row["error"]])
            continue
        times = (f"{row['host_ms']:.3f}", f"{row['gpu_ms']:.3f}", "yes" if row["same"] else "no!")
        rows.append([row["way"], row["logits"], str(row["vocab"]), str(row["batch"]), *times])
    return Report(
        [f"{cuda.name}: a token of each row, median ms"], ["", "logits", "vocabulary", "batch", "host", "GPU", "same"],
        rows, result, labels=2, failed=not all(row.get("same") for row in result["rows"]),
    )  # fmt: skip
