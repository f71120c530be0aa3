"""Decode speed on the CPU: a session against bare ONNX Runtime loops, side by side in one run, with the same tokens.

Ways to decode one sequence with one model, random weights, 200 tokens in the cache:

    session               `DecodeSession`: one loop for everything
    rewritten             a bare loop over IOBinding and the rewritten graph: shows the extra time of the session
    original              the same bare loop over the model as exported: shows what the rewrite gains
    onnxruntime-genai, CTranslate2, openvino-genai      their own export or conversion, and their own loop
    transformers          `generate`, with the default cache, which grows
    transformers, static  `generate`, with a static cache
    products alone        no decoder: one row times each weight matrix, which every decoder has to compute

The model as exported comes from mobius-onnx if it is installed, else from scripts/decoders.py. Peers are the extras
`bench` and `bench-more`; missing ones are named on stderr. Each has a process of its own; all take turns of a few
steps, in random order, so that a machine that slows down slows all of them. Medians of step times are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from decoders import DecoderConfig, write_decoder

from benchmarks.loops import Loop, Products
from benchmarks.openvino_llama import export_openvino
from benchmarks.peers import (
    CTranslatePeer,
    GenaiPeer,
    OpenVinoPeer,
    TransformersPeer,
    export_ctranslate,
    export_genai,
    export_mobius,
    save_llama,
)
from benchmarks.report import Report, quartiles
from benchmarks.turns import Steps, Worker, take_turns
from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import CpuOptions
from trt_kvcache.importer import import_model

BURST, SKIPPED = 16, 4  # steps per turn, and those at its start that are not measured
FLOOR = "products alone"
OPTIONS = {
    "capacity": ([4096, 16384], "rows of each cache"), "prompt": (200, "tokens in the cache"),
    "steps": (400, "of each way"), "layers": (8, "layers"), "hidden": (768, "width"),
    "kv-heads": (0, "heads of 64; 0: a third of the query heads"), "vocab": (16384, "tokens of the vocabulary"),
    "threads": (os.cpu_count() or 1, "of every way"),
}  # fmt: skip


def run_session(model: Path, threads: int, prompt: list[int], count: int) -> Steps:
    with DecodeSession.open(model, max_batch=1, cpu=CpuOptions(threads=threads)) as session:
        session.add(prompt, GenerationConfig(max_new_tokens=count))
        while session.running:
            for event in session.step():
                assert event.token is not None
                yield event.token


def run_bare(model: Path, rewritten: bool, threads: int, prompt: list[int], count: int) -> Steps:
    loop = Loop(import_model(model), threads, original=None if rewritten else model, folder=model.parent)
    return loop.greedy(prompt, count)


def run_genai(folder: Path, capacity: int, threads: int, prompt: list[int], count: int) -> Steps:
    return GenaiPeer(folder, capacity, threads).steps(prompt, count)


def run_ctranslate(folder: Path, threads: int, prompt: list[int], count: int) -> Steps:
    return CTranslatePeer(folder, threads).steps(prompt, count)


def run_openvino(folder: Path, threads: int, prompt: list[int], count: int) -> Steps:
    return OpenVinoPeer(folder, threads).steps(prompt, count)


def run_transformers(llama: Path, capacity: int | None, threads: int, prompt: list[int], count: int) -> Steps:
    return TransformersPeer(llama, threads, capacity).steps(prompt, count)


def run_products(model: Path, threads: int, count: int) -> Steps:
    return Products(model, threads).steps(count)


def attempt(name: str, make: Callable[[], Path]) -> Path | None:
    """Return the result of `make`; None, and a line on stderr, if a package that it needs is not installed."""
    try:
        return make()
    except ImportError as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return None


def compare(config: DecoderConfig, prompt: list[int], count: int, threads: int, folder: Path) -> dict[str, Any]:
    """Measure every way to run one decoder; return its exporter's name, and the seconds of each way's steps."""
    assert isinstance(config.capacity, int)
    model = write_decoder(folder / "decoder.onnx", config, 1024)
    exporter, capacity = "scripts/decoders.py", config.capacity
    peers: dict[str, Callable[..., Steps]] = {}
    openvino = attempt("openvino-genai", lambda: export_openvino(folder / "decoder.onnx", config, folder / "openvino"))
    if openvino is not None:
        peers["openvino-genai"] = partial(run_openvino, openvino)
    llama = attempt("transformers", lambda: save_llama(model, config, folder / "llama"))
    if llama is not None:
        exported = attempt("mobius-onnx", lambda: export_mobius(llama, capacity, folder / "exported.onnx"))
        if exported is not None:
            model, exporter = exported, "mobius-onnx"
        genai = attempt("onnxruntime-genai", lambda: export_genai(llama, folder / "genai"))
        if genai is not None:
            peers["onnxruntime-genai"] = partial(run_genai, genai, capacity)
        ctranslate = attempt("CTranslate2", lambda: export_ctranslate(llama, folder / "ctranslate"))
        if ctranslate is not None:
            peers["CTranslate2"] = partial(run_ctranslate, ctranslate)
        peers["transformers"] = partial(run_transformers, llama, None)
        peers["transformers, static"] = partial(run_transformers, llama, capacity)
    else:
        others = "mobius-onnx, onnxruntime-genai and CTranslate2"
        print(f"{others} are left out: they start from transformers' files", file=sys.stderr)
    ways: dict[str, Callable[..., Steps]] = {
        "session": partial(run_session, model),
        "rewritten": partial(run_bare, model, True),
        "original": partial(run_bare, model, False),
    }
    with ExitStack() as stack:
        makers = {name: partial(way, threads, prompt, count) for name, way in (ways | peers).items()}
        makers[FLOOR] = partial(run_products, model, threads, count)
        workers = {name: stack.enter_context(Worker(name, make)) for name, make in makers.items()}
        return {"exporter": exporter, "times": measure(workers, count)}


def measure(workers: dict[str, Worker], count: int) -> dict[str, list[float]]:
    """Return the seconds of each way's steps. All must give the same tokens, except the products, which give none."""
    tokens, times = take_turns(workers, count, BURST, SKIPPED)
    tokens.pop(FLOOR, None)
    for name, found in tokens.items():
        if found != tokens["session"]:
            raise SystemExit(f"{name} gives other tokens than the session: {found[:10]}, {tokens['session'][:10]}")
    return times


def run(given: argparse.Namespace, keep: Any) -> Report:
    prompt = np.random.default_rng(0).integers(1, given.vocab, given.prompt).tolist()
    rows, results = [], []
    for capacity in given.capacity:
        config = DecoderConfig(
            layers=given.layers, hidden=given.hidden, head_size=64, vocab=given.vocab, capacity=capacity,
            query_heads=given.hidden // 64, kv_heads=given.kv_heads or given.hidden // 192, positions=capacity,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            found = compare(config, prompt, given.steps, given.threads, Path(folder))
        times = found.pop("times")
        speeds = {name: 1 / statistics.median(values) for name, values in times.items()}
        for name, values in times.items():
            low, _, high = quartiles(values)
            ratio = speeds["session"] / speeds[name]
            between = f"{1 / high:.1f} to {1 / low:.1f}"
            rows.append([str(capacity), name, f"{speeds[name]:.1f}", between, f"{ratio:.2f}x"])
        results.append({"capacity": capacity, **found, "tokens_per_second": speeds})
        keep({"results": results})
    return Report(
        [f"one sequence, {given.prompt} tokens in the cache, {given.threads} thread(s)"],
        ["capacity", "way", "tokens/s", "quartiles", "session is"], rows, {"results": results}, labels=2,
    )  # fmt: skip
