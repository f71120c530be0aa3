"""Decode speed on the CPU: a session against bare ONNX Runtime loops, side by side in one run, with the same tokens.

    python scripts/bench_decode.py --capacity 4096 --capacity 16384

Ways to decode one sequence with one model, random weights, 200 tokens in the cache:

    session               `DecodeSession`: one loop for everything
    rewritten             a bare loop over IOBinding and the rewritten graph: what the session costs on top shows here
    original              the same bare loop over the model as exported: what the rewrite gains shows here
    onnxruntime-genai     its own export and its own loop
    transformers          `generate`, with the default cache, which grows
    transformers, static  `generate`, with a static cache

The model as exported comes from mobius-onnx where it is installed, else from scripts/decoders.py. Peers are the extra
`bench`; a peer that is not installed is named on stderr and left out. All but transformers' default hold each cache in
one buffer of the whole capacity. All take turns of a few steps, in random order, so that a machine that slows down
slows all of them, and the medians of their step times are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from bench_peers import GenaiPeer, TransformersPeer, export_mobius, save_llama
from decoders import DecoderConfig, write_decoder
from rich.console import Console
from rich.table import Table

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.importer import import_model
from trt_kvcache.runtime.inputs import SPAN_BUCKET, array_dtype

BURST, SKIPPED = 16, 4  # steps per turn, and those at its start that meet cold caches and sleeping threads
REST = 0.1  # seconds before a turn: the threads of the one before spin for tens of milliseconds

Steps = Iterator[int]
"""The tokens after a prompt, one per step."""


def session_steps(session: DecodeSession, prompt: list[int], count: int) -> Steps:
    """The session as a user drives it."""
    session.add(prompt, GenerationConfig(max_new_tokens=count))
    while session.running:
        for event in session.step():
            assert event.token is not None
            yield event.token


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


def measure(ways: dict[str, Steps], count: int) -> dict[str, list[float]]:
    """Seconds of the steps of each way; all must give the same tokens."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, list[int]] = {name: [next(steps)] for name, steps in ways.items()}  # the prompt
    order, shuffle = [*ways.items()], random.Random(0).shuffle
    for number in range(0, count - 1, BURST):
        shuffle(order)  # nobody always comes after the same one
        for name, steps in order:
            time.sleep(REST)
            for place in range(min(BURST, count - 1 - number)):
                start = time.perf_counter()
                tokens[name].append(next(steps))
                if place >= SKIPPED and number:  # the first turn warms up
                    times[name].append(time.perf_counter() - start)
    for name, found in tokens.items():
        if found != tokens["session"]:
            raise SystemExit(f"{name} gives other tokens than the session: {found[:10]}, {tokens['session'][:10]}")
    return times


def attempt(name: str, make: Callable[[], Any]) -> Any:
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
    peers: dict[str, Any] = {}
    llama = attempt("transformers", lambda: save_llama(model, config, folder / "llama"))
    if llama is not None:
        exported = attempt("mobius-onnx", lambda: export_mobius(llama, capacity, folder / "exported.onnx"))
        if exported is not None:
            model, exporter = exported, "mobius-onnx"
        peers["onnxruntime-genai"] = attempt(
            "onnxruntime-genai", lambda: GenaiPeer(llama, folder / "genai", capacity, threads)
        )
        peers["transformers"] = TransformersPeer(llama, threads)
        peers["transformers, static"] = TransformersPeer(llama, threads, capacity)
    else:
        print("mobius-onnx and onnxruntime-genai are left out: they start from transformers' files", file=sys.stderr)
    with DecodeSession.open(model, max_batch=1, threads=threads) as session:
        bare = {"rewritten": BareLoop(model, True, threads), "original": BareLoop(model, False, threads)}
        ways = {"session": session_steps(session, prompt, count)}
        ways |= {name: way.steps(prompt, count) for name, way in (bare | peers).items() if way is not None}
        return {"exporter": exporter, "times": measure(ways, count)}


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
