"""Prefill with logits of the last position, and with those of all, on ONNX Runtime: processor time and peak memory.

The session's own runner runs a decoder with a real vocabulary size over empty caches. The two ways take turns, each in
its own process. The share of the product with the vocabulary in the arithmetic depends on the geometry; it is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from decoders import DecoderConfig, write_decoder

from benchmarks.report import Report, spread
from benchmarks.turns import Worker, interleave
from trt_kvcache.importer.cache_plan import LogitPositions, PlanOptions
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch

SIDES = tuple(side.value for side in LogitPositions)
OPTIONS = {
    "tokens": (512, "of the prefill"), "turns": (3, "prefills of each side"), "layers": (16, "layers"),
    "hidden": (1024, "width"), "vocab": (128256, "tokens of the vocabulary"),
}  # fmt: skip


def prefills(model: Path, side: str, tokens: int) -> Iterator[tuple[float, int, list[float]]]:
    """Yield processor seconds of a prefill, the peak memory of this process in it, and logits."""
    options = PlanOptions(logits=LogitPositions(side))
    runner = OnnxRuntimeRunner(model, options, max_batch=1, max_chunk=tokens, threads=1)
    batch = StepBatch(0, np.arange(tokens)[None] % 97, np.zeros(1, np.int64))
    while True:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far: forget it
        begin = time.process_time()
        logits = runner.step(batch)
        seconds = time.process_time() - begin
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        yield seconds, int(status["VmHWM"].split()[0]) << 10, logits[0, -1, :1000].tolist()


def head_share(config: DecoderConfig) -> float:
    """Return the product with the vocabulary as a share of all products with weights."""
    heads = config.hidden * config.head_size * 2 * (config.query_heads + config.kv_heads)
    layer = heads + 3 * 2 * config.hidden * config.hidden
    head = config.hidden * config.vocab
    return head / (head + config.layers * layer)


def run(given: argparse.Namespace, keep: Any) -> Report:
    config = DecoderConfig(
        layers=given.layers, hidden=given.hidden, query_heads=given.hidden // 64, kv_heads=given.hidden // 256 or 1,
        head_size=64, vocab=given.vocab, capacity=2 * given.tokens, form="heads-major",
    )  # fmt: skip
    with TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_decoder(Path(folder) / "model.onnx", config, external_threshold=1 << 20)
        makers = {side: partial(prefills, model, side, given.tokens) for side in SIDES}
        workers = {side: stack.enter_context(Worker(side, make)) for side, make in makers.items()}
        found = interleave({side: partial(_one, worker) for side, worker in workers.items()}, given.turns)
    seconds = {side: [turn[0] for turn in turns] for side, turns in found.items()}
    peaks = {side: max(turn[1] for turn in turns) for side, turns in found.items()}
    last, every = (np.array(found[side][0][2]) for side in ("last", "all"))
    difference, share = float(np.abs(last - every).max() / np.abs(every).max()), head_share(config)
    return Report(
        [f"{given.layers} layers, hidden {given.hidden}, vocabulary {given.vocab}, prefill of {given.tokens} tokens, "
         f"1 thread; the vocabulary has {share:.0%} of the arithmetic"],
        ["logits", "processor s: median (quartiles)", "peak MB"],
        [[side, spread(seconds[side]), f"{peaks[side] / 1e6:.0f}"] for side in SIDES],
        {"head_share": share, "seconds": {side: statistics.median(s) for side, s in seconds.items()},
         "peak_bytes": peaks, "difference": difference},
        notes=[f"largest difference of the logits: {difference:.2g} of their scale"],
    )  # fmt: skip


def _one(worker: Worker) -> list[Any]:
    return worker.run(1).given
