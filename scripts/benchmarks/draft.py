"""Decode speed on the CPU with a draft model, and without one: one sequence, greedy, the same tokens from all.

The model has random weights. Its later layers contribute little, and the draft is its first layers. The benchmark does
not show how often the draft of a trained model is right.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from decoders import DecoderConfig, write_decoder
from onnx import numpy_helper

from benchmarks.report import Report
from benchmarks.turns import Steps, Worker, take_turns
from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import CpuOptions

BURST, SKIPPED = 64, 8  # tokens per turn, and those at its start that are not measured
OPTIONS = {
    "guesses": ([2, 4, 6], "tokens that the draft guesses at a time"), "prompt": (200, "tokens in the cache"),
    "tokens": (400, "of each way"), "layers": (12, "layers of the model"), "draft-layers": (1, "layers of the draft"),
    "later": (5, "thousandths that are left of what later layers contribute"), "hidden": (768, "width"),
    "vocab": (8192, "tokens of the vocabulary"), "threads": (os.cpu_count() or 1, "of every way"),
}  # fmt: skip


def write_pair(folder: Path, config: DecoderConfig, layers: int, later: float) -> tuple[Path, Path]:
    """Write a model whose layers from `layers` on are scaled by `later`, and a draft of the layers before them."""
    model = onnx.load(write_decoder(folder / "model.onnx", config))
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for layer in range(layers, config.layers):
        for part in ("o", "down"):
            tensor = weights[f"layers.{layer}.{part}.weight"]
            scaled = numpy_helper.to_array(tensor) * np.float32(later)
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))
    onnx.save(model, folder / "model.onnx")
    draft = onnx.load(write_decoder(folder / "draft.onnx", replace(config, layers=layers)))
    for tensor in draft.graph.initializer:
        tensor.CopyFrom(weights[tensor.name])
    onnx.save(draft, folder / "draft.onnx")
    return folder / "model.onnx", folder / "draft.onnx"


def decode(model: Path, draft: Path | None, guesses: int, threads: int, prompt: list[int], count: int) -> Steps:
    with DecodeSession.open(model, draft=draft, max_batch=1, cpu=CpuOptions(threads=threads)) as session:
        config = GenerationConfig(max_new_tokens=count, num_assistant_tokens=guesses or None)
        for event in session.stream([prompt], config):
            assert event.token is not None
            yield event.token


def run(given: argparse.Namespace, keep: Any) -> Report:
    prompt = np.random.default_rng(0).integers(1, given.vocab, given.prompt).tolist()
    config = DecoderConfig(
        layers=given.layers, hidden=given.hidden, head_size=64, vocab=given.vocab,
        capacity=given.prompt + given.tokens + 16, query_heads=given.hidden // 64, kv_heads=given.hidden // 192,
        positions=given.prompt + given.tokens + 16,
    )  # fmt: skip
    shares = {0: 0.0}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        model, draft = write_pair(Path(folder), config, given.draft_layers, given.later / 1000)
        with DecodeSession.open(model, draft=draft, max_batch=1) as session:
            for guesses in given.guesses:
                made = GenerationConfig(max_new_tokens=given.tokens, num_assistant_tokens=guesses)
                shares[guesses] = session.generate([prompt], made)[0].speculation.acceptance
        workers = {}
        for guesses in shares:
            way = partial(decode, model, draft if guesses else None, guesses, given.threads, prompt, given.tokens)
            name = f"draft, {guesses} guesses" if guesses else "alone"
            workers[name] = stack.enter_context(Worker(name, way))
        tokens, times = take_turns(workers, given.tokens, BURST, SKIPPED)
    if len({tuple(found) for found in tokens.values()}) > 1:
        raise SystemExit("a draft changed tokens")
    speeds = {name: len(seconds) / sum(seconds) for name, seconds in times.items()}
    rows = [
        [name, f"{share:.0%}", f"{speed:.1f}", f"{speed / speeds['alone']:.2f}x"]
        for (name, speed), share in zip(speeds.items(), shares.values(), strict=True)
    ]
    return Report(
        [f"one sequence, {given.layers} layers, {given.draft_layers} of the draft, {given.threads} thread(s)"],
        ["way", "accepted", "tokens/s", "of alone"], rows, {"tokens_per_second": speeds, "accepted": shares}, labels=1,
    )  # fmt: skip
