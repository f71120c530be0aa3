"""Steps over cached latents: queries that go to the latents, against keys and values computed from them.

One random decoder with latent attention (scripts/foreign_decoders.py), rewritten both ways (`--latent-attention`),
makes the same steps of some tokens over some rows, in turns, on ONNX Runtime with one thread. Processor time, not the
clock's, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from decoders import DecoderConfig
from foreign_decoders import make_foreign

from benchmarks.loops import Loop
from benchmarks.report import Report, spread
from benchmarks.turns import interleave, timed
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import LatentAttention, PlanOptions

SIZES = ((1, 512), (1, 4096), (1, 16384), (64, 512), (64, 4096), (128, 4096), (256, 4096), (512, 4096))
"""New tokens of a step, and rows that hold tokens after it."""
OPTIONS = {
    "capacity": (16384, "rows of each cache"), "turns": (5, "steps of each form and size"), "layers": (2, "layers"),
    "hidden": (1024, "width"), "heads": (16, "query heads"), "head-size": (128, "width of a head"),
    "vocab": (256, "tokens of the vocabulary"),
}  # fmt: skip


def run(given: argparse.Namespace, keep: Any) -> Report:
    """See the module."""
    config = DecoderConfig(
        layers=given.layers, hidden=given.hidden, query_heads=given.heads, kv_heads=given.heads,
        head_size=given.head_size, vocab=given.vocab, capacity=given.capacity, positions=given.capacity,
    )  # fmt: skip
    forms = [form.value for form in LatentAttention]
    loops: dict[str, Loop] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "latents.onnx"
        onnx.save(make_foreign("latents", config), path)
        for form in LatentAttention:
            options = PlanOptions(capacity=given.capacity, latent_attention=form)
            loops[form.value] = Loop(import_model(path, options), 1)
    for loop in loops.values():
        rng = np.random.default_rng(0)
        for buffer in loop.buffers.values():
            rng.standard_normal(out=buffer, dtype=np.float32)
    steps, rows = [], []
    for tokens, held in (size for size in SIZES if size[1] <= given.capacity):
        works = {
            form: partial(loop.step, [i % 7 for i in range(tokens)], held - tokens) for form, loop in loops.items()
        }
        logits = {form: work().copy() for form, work in works.items()}  # which also warms up
        times = interleave({form: timed(work, time.process_time) for form, work in works.items()}, given.turns)
        scale = np.abs(logits["expanded"]).max()
        difference = float(np.abs(logits["absorbed"] - logits["expanded"]).max() / scale)
        best = {form: 1e3 * min(found) for form, found in times.items()}
        ratio = best["expanded"] / best["absorbed"]
        steps.append({"tokens": tokens, "rows": held, **{f"{f}_ms": best[f] for f in forms}, "difference": difference})
        cells = (spread([1e3 * t for t in times[form]], 1) for form in forms)
        rows.append([str(tokens), str(held), *cells, f"{ratio:.2f}", f"{difference:.1e}"])
        keep({"steps": steps})
    return Report(
        [f"{given.layers} layers, hidden {given.hidden}, {given.heads} heads of {given.head_size}, latents of "
         f"{4 * given.head_size}, 1 thread; ms of processor time of a step: median (quartiles), ratio of the least"],
        ["tokens", "rows", *forms, "ratio", "difference"], rows, {"steps": steps}, labels=2,
    )  # fmt: skip
