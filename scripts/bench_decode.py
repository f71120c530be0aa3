"""Decode speed on the CPU: a session against bare ONNX Runtime loops, side by side in one run, with the same tokens.

    python scripts/bench_decode.py --capacity 4096 --capacity 16384

Three ways to decode one sequence with one model, random weights, 200 tokens in the cache:

    session     `DecodeSession`: one loop for everything
    rewritten   a bare loop over IOBinding and the rewritten graph: what the session costs on top shows here
    original    the same bare loop over the model as exported: what the rewrite gains shows here

All three hold each cache in one buffer. Rounds take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from decoders import DecoderConfig, write_decoder
from rich.console import Console
from rich.table import Table

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.importer import import_model
from trt_kvcache.runtime.inputs import SPAN_BUCKET, array_dtype

Run = Callable[[list[int], int], tuple[list[int], float]]
"""A prompt and a number of tokens to the tokens and the seconds that all but the first took."""


def session_run(session: DecodeSession) -> Run:
    """The session as a user drives it."""

    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        session.add(prompt, GenerationConfig(max_new_tokens=count))
        tokens: list[int] = []
        while not tokens:
            tokens += [event.token for event in session.step()]
        start = time.perf_counter()
        while session.running:
            tokens += [event.token for event in session.step()]
        return tokens, time.perf_counter() - start

    return run


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
            logits = np.zeros((1, length, self.vocab), np.float32)
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

    def run(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """See `Run`."""
        tokens = [self.step(prompt, 0)]
        start = time.perf_counter()
        while len(tokens) < count:
            tokens.append(self.step(tokens[-1:], len(prompt) + len(tokens) - 1))
        return tokens, time.perf_counter() - start


def measure(runs: dict[str, Run], prompt: list[int], count: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each way in each round; all must give the same tokens."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    expected = None
    for number in range(rounds + 1):
        for name, run in runs.items():
            tokens, seconds = run(prompt, count)
            expected = expected or tokens
            if tokens != expected:
                raise SystemExit(f"{name} gives other tokens: {tokens[:10]} ..., {expected[:10]} ...")
            if number:  # the first round warms up
                speeds[name].append((count - 1) / seconds)
    return speeds


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, action="append", help="rows of each cache; default 4096 and 16384")
    parser.add_argument("--prompt", type=int, default=200, help="tokens in the cache")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--threads", type=int, help="of ONNX Runtime; default: one per core")
    given = parser.parse_args()
    prompt = np.random.default_rng(0).integers(1, given.vocab, given.prompt).tolist()
    table = Table("capacity", "way", "tokens/s", "spread", "session is")
    results = []
    for capacity in given.capacity or [4096, 16384]:
        config = DecoderConfig(
            layers=given.layers, hidden=given.hidden, query_heads=given.hidden // 64, kv_heads=given.hidden // 192,
            head_size=64, vocab=given.vocab, capacity=capacity, positions=capacity,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            model = write_decoder(Path(folder) / "model.onnx", config, 1024)
            with DecodeSession.open(model, max_batch=1, threads=given.threads) as session:
                runs = {
                    "session": session_run(session),
                    "rewritten": BareLoop(model, True, given.threads).run,
                    "original": BareLoop(model, False, given.threads).run,
                }
                speeds = measure(runs, prompt, given.tokens, given.rounds)
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        for name, values in speeds.items():
            spread = f"{min(values):.1f} to {max(values):.1f}"
            table.add_row(
                str(capacity), name, f"{medians[name]:.1f}", spread, f"{medians['session'] / medians[name]:.2f}x"
            )
        results.append({"capacity": capacity, "tokens_per_second": speeds})
    Console().print(table)
    print(json.dumps({"benchmark": "decode", "onnxruntime": ort.__version__, **vars(given), "results": results}))


if __name__ == "__main__":
    main()
