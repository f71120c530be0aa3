"""Step time against capacity, with and without the attention span, on ONNX Runtime.

Models with small and large caches run one decode step at the same position, in turns, with updates in place. Without
the span a step reads the whole cache; with it, the rows that are in use.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from decoders import DecoderConfig, write_decoder

from benchmarks.loops import Loop
from benchmarks.report import Report, spread
from benchmarks.turns import interleave, timed
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions

POSITION = 160
OPTIONS = {
    "capacity": ([512, 16384], "rows of each cache: small and large"),
    "turns": (60, "steps of each model"),
    "threads": (1, "of ONNX Runtime"),
}


def run(given: argparse.Namespace, keep: Any) -> Report:
    loops: dict[tuple[bool, int], Loop] = {}
    with TemporaryDirectory() as folder:
        for capacity in given.capacity:
            config = DecoderConfig(
                layers=4, hidden=256, query_heads=8, kv_heads=8, head_size=32, capacity=capacity, positions=1024
            )
            path = write_decoder(Path(folder) / f"{capacity}.onnx", config)
            for span in (True, False):
                loops[span, capacity] = Loop(import_model(path, PlanOptions(attention_span=span)), given.threads)
    for loop in loops.values():
        rng = np.random.default_rng(0)
        for buffer in loop.buffers.values():
            buffer[:, :, :POSITION] = rng.uniform(-1, 1, buffer[:, :, :POSITION].shape)
    logits = {key: loop.step([7], POSITION).copy() for key, loop in loops.items()}
    for loop in loops.values():
        for buffer in loop.buffers.values():
            if not buffer[:, :, POSITION].any() or buffer[:, :, POSITION + 1].any():
                raise SystemExit("the step did not update its cache in place")
    times = interleave({key: timed(partial(loop.step, [7], POSITION)) for key, loop in loops.items()}, given.turns)
    small, *_, large = given.capacity
    medians = {key: 1e3 * statistics.median(found) for key, found in times.items()}
    ratios = {span: medians[span, large] / medians[span, small] for span in (True, False)}
    difference = max(float(np.abs(value - logits[False, small]).max()) for value in logits.values())
    return Report(
        [f"4 layers, position {POSITION}, {given.threads} thread(s); ms of a step: median (quartiles)"],
        ["", *(f"capacity {capacity}" for capacity in given.capacity), "ratio"],
        [
            [label, *(spread([1e3 * t for t in times[span, c]]) for c in given.capacity), f"{ratios[span]:.2f}"]
            for span, label in ((True, "with span"), (False, "without span"))
        ],
        {
            "ms_with_span": [medians[True, c] for c in given.capacity],
            "ms_without_span": [medians[False, c] for c in given.capacity],
            "ratio_with_span": ratios[True], "ratio_without_span": ratios[False], "difference": difference,
        },
        notes=[f"largest difference of the logits: {difference:.2g}"],
    )  # fmt: skip
