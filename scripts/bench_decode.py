"""Decode speed on the CPU: a session against bare ONNX Runtime loops, side by side in one run, with the same tokens.

    python scripts/bench_decode.py --capacity 4096 --capacity 16384

Ways to decode one sequence with one model, random weights, 200 tokens in the cache:

    session               `DecodeSession`: one loop for everything
    rewritten             a bare loop over IOBinding and the rewritten graph: what the session costs on top shows here
    original              the same bare loop over the model as exported: what the rewrite gains shows here
    onnxruntime-genai     its own export and its own loop
    transformers          `generate`, with the default cache, which grows
    transformers, static  `generate`, with a static cache
    products alone        no decoder: one row times each weight matrix, which is less than any of them has to do

The model as exported comes from mobius-onnx where it is installed, else from scripts/decoders.py. Peers are the extra
`bench`; a peer that is not installed is named on stderr and left out. All but transformers' default hold each cache in
one buffer of the whole capacity. Each has a process of its own; all take turns of a few steps, in random order, so that
a machine that slows down slows all of them, and the medians of their step times are compared.
"""

from __future__ import annotations

import argparse
import json
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
import onnxruntime as ort
from bench_floor import Products
from bench_peers import GenaiPeer, TransformersPeer, export_genai, export_mobius, save_llama
from bench_turns import Steps, Worker, take_turns
from decoders import DecoderConfig, write_decoder
from rich.console import Console
from rich.table import Table

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.importer import import_model
from trt_kvcache.runtime.inputs import SPAN_BUCKET, array_dtype

BURST, SKIPPED = 16, 4  # steps per turn, and those at its start that are not measured
FLOOR = "products alone"


class BareLoop:
    """The least that a decode loop over IOBinding can be: arrays bound once per span, filled in place."""

    def __init__(self, model: Path, rewritten: bool, threads: int | None) -> None:
        imported = import_model(model)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        if threads:
            options.intra_op_num_threads = threads
        source: str | bytes = str(model)
        if rewritten:
            folder = str(model.parent)
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
            source = imported.model.SerializeToString()
        self.session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self.caches = []
        for cache in imported.plan.caches:
            shape = cache.physical_shape if rewritten else cache.logical_shape
            buffer = np.zeros([1 if isinstance(d, str) else d for d in shape], array_dtype(cache.dtype))
            self.caches.append((cache.past, cache.present, buffer))
        self.span = imported.plan.spans[0] if rewritten else None
        self.kept = imported.plan.logits_span if rewritten else None
        self.vocab = next(o.shape[-1] for o in self.session.get_outputs() if o.name == "logits")
        self.bound: dict[tuple[int, int], Any] = {}

    def bind(self, length: int, span: int) -> tuple[Any, dict[str, np.ndarray]]:
        """Binding and arrays for updates of `length` tokens."""
        if (length, span) not in self.bound:
            binding = self.session.io_binding()
            arrays = {name: np.zeros((1, length), np.int64) for name in ("input_ids", "position_ids")}
            arrays |= {name: np.zeros(1, np.int64) for name in ("write_indices", "nonpad_kv_seqlen")}
            if self.span is not None:
                arrays[self.span.name] = np.arange(span)
            if self.kept is not None:
                arrays[self.kept.name] = np.zeros(1, np.int64)
            logits = np.zeros((1, length if self.kept is None else 1, self.vocab), np.float32)
            inputs = [*arrays.items(), *((past, buffer) for past, _, buffer in self.caches)]
            outputs = [("logits", logits), *((present, buffer) for _, present, buffer in self.caches)]
            for name, array in inputs:
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            for name, array in outputs:
                binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            self.bound[length, span] = (binding, arrays | {"logits": logits})
        return self.bound[length, span]

    def step(self, tokens: list[int], start: int) -> int:
        """Write tokens and choose the next one."""
        after = start + len(tokens)
        span = 0 if self.span is None else min(-(-after // SPAN_BUCKET) * SPAN_BUCKET, self.span.capacity)
        binding, arrays = self.bind(len(tokens), span)
        arrays["input_ids"][0] = tokens
        arrays["position_ids"][0] = range(start, after)
        arrays["write_indices"][0], arrays["nonpad_kv_seqlen"][0] = start, after
        self.session.run_with_iobinding(binding)
        return int(arrays["logits"][0, -1].argmax())

    def steps(self, prompt: list[int], count: int) -> Steps:
        """See `Steps`."""
        token = self.step(prompt, 0)
        yield token
        for number in range(count - 1):
            token = self.step([token], len(prompt) + number)
            yield token


def run_session(model: Path, threads: int, prompt: list[int], count: int) -> Steps:
    """The session as a user drives it."""
    with DecodeSession.open(model, max_batch=1, threads=threads) as session:
        session.add(prompt, GenerationConfig(max_new_tokens=count))
        while session.running:
            for event in session.step():
                assert event.token is not None
                yield event.token


def run_bare(model: Path, rewritten: bool, threads: int, prompt: list[int], count: int) -> Steps:
    """See `BareLoop`."""
    return BareLoop(model, rewritten, threads).steps(prompt, count)


def run_genai(folder: Path, capacity: int, threads: int, prompt: list[int], count: int) -> Steps:
    """See `GenaiPeer`."""
    return GenaiPeer(folder, capacity, threads).steps(prompt, count)


def run_transformers(llama: Path, capacity: int | None, threads: int, prompt: list[int], count: int) -> Steps:
    """See `TransformersPeer`."""
    return TransformersPeer(llama, threads, capacity).steps(prompt, count)


def run_products(model: Path, threads: int, count: int) -> Steps:
    """See `Products`."""
    return Products(model, threads).steps(count)


def attempt(name: str, make: Callable[[], Path]) -> Path | None:
    """What `make` makes; None, and a line on stderr, where a package that it needs is not installed."""
    try:
        return make()
    except ImportError as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return None


def compare(config: DecoderConfig, prompt: list[int], count: int, threads: int, folder: Path) -> dict[str, Any]:
    """Every way over one decoder: who exported it, and the seconds of the steps of each."""
    assert isinstance(config.capacity, int)
    model = write_decoder(folder / "decoder.onnx", config, 1024)
    exporter, capacity = "scripts/decoders.py", config.capacity
    peers: dict[str, Callable[..., Steps]] = {}
    llama = attempt("transformers", lambda: save_llama(model, config, folder / "llama"))
    if llama is not None:
        exported = attempt("mobius-onnx", lambda: export_mobius(llama, capacity, folder / "exported.onnx"))
        if exported is not None:
            model, exporter = exported, "mobius-onnx"
        genai = attempt("onnxruntime-genai", lambda: export_genai(llama, folder / "genai"))
        if genai is not None:
            peers["onnxruntime-genai"] = partial(run_genai, genai, capacity)
        peers["transformers"] = partial(run_transformers, llama, None)
        peers["transformers, static"] = partial(run_transformers, llama, capacity)
    else:
        print("mobius-onnx and onnxruntime-genai are left out: they start from transformers' files", file=sys.stderr)
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
    """Seconds of the steps of each way; all must give the same tokens, but for the products, which give none."""
    tokens, times = take_turns(workers, count, BURST, SKIPPED)
    tokens.pop(FLOOR, None)
    for name, found in tokens.items():
        if found != tokens["session"]:
            raise SystemExit(f"{name} gives other tokens than the session: {found[:10]}, {tokens['session'][:10]}")
    return times


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, action="append", help="rows of each cache; default 4096 and 16384")
    parser.add_argument("--prompt", type=int, default=200, help="tokens in the cache")
    parser.add_argument("--tokens", type=int, default=400, help="steps of each way")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--kv-heads", type=int, help="heads of 64; default: a third of the query heads")
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every way; default: one per core")
    given = parser.parse_args()
    prompt = np.random.default_rng(0).integers(1, given.vocab, given.prompt).tolist()
    table = Table("capacity", "way", "tokens/s", "quartiles", "session is")
    results = []
    for capacity in given.capacity or [4096, 16384]:
        config = DecoderConfig(
            layers=given.layers, hidden=given.hidden, head_size=64, vocab=given.vocab, capacity=capacity,
            query_heads=given.hidden // 64, kv_heads=given.kv_heads or given.hidden // 192, positions=capacity,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            found = compare(config, prompt, given.tokens, given.threads, Path(folder))
        times = found.pop("times")
        speeds = {name: 1 / statistics.median(values) for name, values in times.items()}
        for name, values in times.items():
            low, _, high = statistics.quantiles(values, n=4)
            spread = f"{1 / high:.1f} to {1 / low:.1f}"
            table.add_row(
                str(capacity), name, f"{speeds[name]:.1f}", spread, f"{speeds['session'] / speeds[name]:.2f}x"
            )
        results.append({"capacity": capacity, **found, "tokens_per_second": speeds})
    Console().print(table)
    print(json.dumps({"benchmark": "decode", "onnxruntime": ort.__version__, **vars(given), "results": results}))


if __name__ == "__main__":
    main()
