"""The share of the host in a decode step: inputs, choice of tokens, events. No model is run.

A GPU waits for the host between two steps, because the next one needs the tokens of the last. So a session decodes over
a runner that fills a step's inputs and returns prepared logits. The launch by TensorRT and CUDA is not measured.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
from decoders import DecoderConfig, write_decoder

from benchmarks.report import Report, spread
from benchmarks.turns import interleave, timed
from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.plugins.choice import CANDIDATES, ordered, read_keys, read_lists, sets_per_row
from trt_kvcache.runtime.generation.sampling import CHOICE
from trt_kvcache.runtime.runner import Logits, StepBatch
from trt_kvcache.runtime.step_inputs import StepInputs

DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ON_GPU = ", GPU"
WAYS = {
    "greedy": GenerationConfig(max_new_tokens=1 << 20),
    "greedy" + ON_GPU: GenerationConfig(max_new_tokens=1 << 20),
    "top-k 50": GenerationConfig(max_new_tokens=1 << 20, do_sample=True, top_k=50, seed=0),
    "top-k 50" + ON_GPU: GenerationConfig(max_new_tokens=1 << 20, do_sample=True, top_k=50, seed=0),
    "top-p 0.9": GenerationConfig(max_new_tokens=1 << 20, do_sample=True, top_k=0, top_p=0.9, seed=0),
}

OPTIONS = {
    "vocab": (128256, "tokens of the vocabulary"), "batch": ([1, 8, 64], "sequences"),
    "turns": (60, "steps of each way"),
}  # fmt: skip


class Canned:
    """A `Runner` for decoding without a model: its steps only fill inputs and return prepared logits."""

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
        """Fill the inputs as a real runner does, and return the same logits each time."""
        self._inputs.signature(batch)
        self._inputs.arrays(batch)
        if self._chooses:
            return self._found(batch)
        return self._logits[: batch.rows]

    def _found(self, batch: StepBatch) -> Logits:
        """Return the scores that kernels on a GPU would find, in the form in which a GPU runner reads them."""
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
    """Return logits like a language model's: most tokens very unlikely, a few hundred possible, one or some likely."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (batch, 1, vocab))
    for row in logits[:, 0]:
        row[rng.integers(0, vocab, 300)] += rng.exponential(4, 300) + 6
    return logits


def run(given: argparse.Namespace, keep: Any) -> Report:
    with TemporaryDirectory() as folder:
        path = write_decoder(Path(folder) / "model.onnx", DecoderConfig(layers=1, capacity=1024))
        plan = import_model(path).plan
    found: dict[tuple[str, str, int], list[float]] = {}
    for dtype in DTYPES:
        for batch in given.batch:
            steps = {way: _step(plan, batch, given.vocab, DTYPES[dtype], way) for way in WAYS}
            interleave({way: timed(step) for way, step in steps.items()}, 3)  # warms up
            times = interleave({way: timed(step) for way, step in steps.items()}, given.turns)
            found |= {(way, dtype, batch): [1e6 * t for t in seconds] for way, seconds in times.items()}
    steps_ = [
        {"way": w, "logits": d, "batch": b, "us": round(statistics.median(us), 1)} for (w, d, b), us in found.items()
    ]
    return Report(
        [f"vocabulary of {given.vocab}; microseconds of the host in a step: median (quartiles)"],
        ["", "logits", *(f"batch {b}" for b in given.batch)],
        [[way, dtype, *(spread(found[way, dtype, b], 0) for b in given.batch)] for way in WAYS for dtype in DTYPES],
        {"steps": steps_}, labels=2,
    )  # fmt: skip


def _step(plan: CachePlan, batch: int, vocab: int, dtype: Any, way: str) -> Any:
    session = DecodeSession(Canned(plan, batch, vocab, dtype, chooses=way.endswith(ON_GPU)))  # type: ignore[arg-type]
    for row in range(batch):
        session.add([1 + row, 2], WAYS[way])
    return session.step
