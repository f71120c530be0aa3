"""What the host adds to a decode step: inputs, choice of tokens, events. No model is run.

    python scripts/bench_host.py

A GPU waits for the host between two steps, because the next one needs the tokens of the last. So this is measured by
itself: a session over a runner that fills a step's inputs and then hands out logits that were made before, or what a
GPU would find of them; by batch, by the logits' type, greedy and sampled. What TensorRT and CUDA take to launch a step
is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
from decoders import DecoderConfig, write_decoder

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.plugins.choice import CANDIDATES, ordered, read_keys, read_lists, sets_per_row
from trt_kvcache.runtime.generation.greedy import CHOICE
from trt_kvcache.runtime.inputs import StepInputs
from trt_kvcache.runtime.runner import Logits, StepBatch

DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ON_GPU = ", GPU"
WAYS = {
    "greedy": GenerationConfig(max_new_tokens=1 << 20),
    "greedy" + ON_GPU: GenerationConfig(max_new_tokens=1 << 20),
    "top-k 50": GenerationConfig(max_new_tokens=1 << 20, do_sample=True, top_k=50, seed=0),
    "top-k 50" + ON_GPU: GenerationConfig(max_new_tokens=1 << 20, do_sample=True, top_k=50, seed=0),
    "top-p 0.9": GenerationConfig(max_new_tokens=1 << 20, do_sample=True, top_k=0, top_p=0.9, seed=0),
}


class Canned:
    """A runner whose steps take no time of their own: a `Runner` as far as decoding needs one."""

    name = "no model"
    max_positions = max_logits = home = None
    max_chunk = 16

    def __init__(self, plan: CachePlan, batch: int, vocab: int, dtype: Any, *, chooses: bool) -> None:
        self.plan, self.max_batch, self.vocab = plan, batch, vocab
        self._inputs = StepInputs(plan)
        self._logits = _logits(batch, vocab).astype(dtype)
        self._chooses, self._dtype = chooses, np.dtype(dtype).name
        order = ordered(self._logits[:, 0])
        self._keys = order[:, :CANDIDATES].astype(np.uint64) << 32 | ~np.arange(CANDIDATES, dtype=np.uint32)
        self._maxima = order[:, : sets_per_row(vocab, self._logits.itemsize)]
        self._lists = np.concatenate([np.full((batch, 1), 56, np.uint64), self._keys], axis=1)

    def step(self, batch: StepBatch) -> Logits:
        """Fill the inputs as a real runner does; the same logits each time."""
        self._inputs.signature(batch)
        self._inputs.arrays(batch)
        if self._chooses:
            return self._found(batch)
        return self._logits[: batch.rows]

    def _found(self, batch: StepBatch) -> Logits:
        """What a GPU would find, read as from a GPU."""
        if batch.highest == 1:
            tokens, scores = read_keys(self._keys[: batch.rows].max(axis=1, keepdims=True), self._dtype)
        else:
            np.partition(self._maxima[: batch.rows], -batch.highest, axis=1)
            tokens, scores = read_lists(self._lists[: batch.rows], self._dtype)
        chosen = np.empty((batch.rows, 1, tokens.shape[1]), CHOICE)
        chosen["token"], chosen["score"] = tokens[:, None], scores[:, None]
        return chosen

    def zero_rows(self, row: int, start: int, stop: int) -> None:
        """There are no caches."""

    def close(self) -> None:
        """Nothing is open."""


def _logits(batch: int, vocab: int) -> np.ndarray:
    """As language models have them: most tokens hopeless, a few hundred that could be, one or some that are likely."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (batch, 1, vocab))
    for row in logits[:, 0]:
        row[rng.integers(0, vocab, 300)] += rng.exponential(4, 300) + 6
    return logits


def measure(runner: Canned, config: GenerationConfig, steps: int) -> float:
    """Median microseconds of a step of all rows."""
    with DecodeSession(runner) as session:  # type: ignore[arg-type]  # no rows are copied
        for row in range(runner.max_batch):
            session.add([1 + row, 2], config)
        times = []
        for _ in range(steps + 3):
            start = time.perf_counter()
            session.step()
            times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[3:])


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        path = write_decoder(Path(folder) / "model.onnx", DecoderConfig(layers=1, capacity=1024))
        plan = import_model(path).plan
    found = {
        (way, dtype, batch): measure(
            Canned(plan, batch, given.vocab, DTYPES[dtype], chooses=way.endswith(ON_GPU)),
            config,
            given.steps if way.startswith("greedy") else 5,
        )
        for way, config in WAYS.items()
        for dtype in DTYPES
        for batch in given.batch
    }
    print(f"vocabulary of {given.vocab}, microseconds of the host for each step, medians")
    print(f"{'':15}{'logits':10}" + "".join(f"{f'batch {b}':>12}" for b in given.batch))
    for way in WAYS:
        for dtype in DTYPES:
            print(f"{way:15}{dtype:10}" + "".join(f"{found[way, dtype, b]:12.0f}" for b in given.batch))
    rows = [{"way": w, "logits": d, "batch": b, "us": round(us, 1)} for (w, d, b), us in found.items()]
    print(json.dumps({"benchmark": "host", "vocab": given.vocab, "steps": rows}))


if __name__ == "__main__":
    main()
