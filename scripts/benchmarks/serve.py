"""The server against a bare session on the CPU: tokens per second of all clients together, and their waiting times.

Both take turns, in processes with equally many threads. The bare session gets the same prompts at once, without HTTP.
The clients' own work needs another free core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import numpy as np
from decoders import DecoderConfig, write_decoder

from benchmarks.report import Report
from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import CpuOptions

OPTIONS = {
    "clients": ([1, 8, 32], "clients at a time"), "rows": (8, "rows of the session"), "prompt": (32, "tokens"),
    "tokens": (64, "of each answer"), "turns": (3, "of each side"), "layers": (12, "layers"), "hidden": (768, "width"),
    "vocab": (8192, "tokens of the vocabulary"), "threads": (1, "of ONNX Runtime"),
}  # fmt: skip


def serve_it(model: Path, given: argparse.Namespace, pipe: Connection) -> None:
    from trt_kvcache.serve.server import bind, serve
    from trt_kvcache.serve.service import Service

    with bind("127.0.0.1", 0) as sock, open_model(model, given) as session:
        service = Service(session, "model", max_queue=1000)
        serve(service, sock, 0.0, lambda: pipe.send(sock.getsockname()[1]))


def step_it(model: Path, given: argparse.Namespace, pipe: Connection) -> None:
    """Run the bare session in its process: for each list of prompts, send the seconds and the tokens of each."""
    config = GenerationConfig(max_new_tokens=given.tokens, eos_token_id=())
    with open_model(model, given) as session:
        pipe.send(None)
        while prompts := pipe.recv():
            start = time.perf_counter()
            found = session.generate(prompts, config)
            pipe.send((time.perf_counter() - start, [one.tokens for one in found]))


def open_model(model: Path, given: argparse.Namespace) -> DecodeSession:
    return DecodeSession.open(model, max_batch=given.rows, tokenizer=False, cpu=CpuOptions(threads=given.threads))


async def ask_all(port: int, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]], list[list[float]]]:
    """Return the seconds for all clients; and for each client its tokens, and the times at which they came."""

    async def one(client: httpx2.AsyncClient, prompt: list[int]) -> tuple[list[int], list[float]]:
        tokens, times = [], []
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    tokens += choice["token_ids"]
                    times += [time.perf_counter() - start] * len(choice["token_ids"])
        return tokens, times

    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits) as client:
        start = time.perf_counter()
        found = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        return time.perf_counter() - start, [tokens for tokens, _ in found], [times for _, times in found]


def run(given: argparse.Namespace, keep: Any) -> Report:
    room = given.prompt + given.tokens + 16
    config = DecoderConfig(
        layers=given.layers, hidden=given.hidden, head_size=64, vocab=given.vocab, capacity=room, positions=room,
        query_heads=given.hidden // 64, kv_heads=given.hidden // 192,
    )  # fmt: skip
    start = multiprocessing.get_context("spawn")
    rows, data = [], {}
    with TemporaryDirectory() as folder:
        model = write_decoder(Path(folder) / "model.onnx", config)
        sides, pipes = [], []
        for side in (serve_it, step_it):
            mine, theirs = start.Pipe()
            sides.append(start.Process(target=side, args=(model, given, theirs), daemon=True))
            pipes.append(mine)
            sides[-1].start()
        try:
            port, _ = [pipe.recv() for pipe in pipes]
            for clients in given.clients:
                rng = np.random.default_rng(clients)
                prompts = rng.integers(1, given.vocab, (clients, given.prompt)).tolist()
                row, data[str(clients)] = measured(port, pipes[1], prompts, given)
                rows.append(row)
                keep(data)
            pipes[1].send(None)
        finally:
            sides[0].terminate()
            for process in sides:
                process.join(20)
    head = [
        "clients",
        "served tokens/s",
        "bare tokens/s",
        "served/bare",
        "first token s p50",
        "p99",
        "next ms p50",
        "p99",
    ]
    title = [f"{given.rows} rows, {given.layers} layers of width {given.hidden}, {given.threads} thread(s)"]
    return Report(title, head, rows, {"clients": data}, labels=0)


def measured(
    port: int, bare: Connection, prompts: list[list[int]], given: argparse.Namespace
) -> tuple[list[str], dict[str, Any]]:
    """Measure one number of clients; return a row of the table, and numbers."""
    speeds: dict[str, list[float]] = {"served": [], "bare": []}
    first: list[float] = []
    between: list[float] = []
    for turn in range(given.turns + 1):
        seconds, tokens, times = asyncio.run(ask_all(port, prompts, given.tokens))
        bare.send(prompts)
        alone, expected = bare.recv()
        if tokens != expected:
            raise SystemExit("the server changed tokens")
        if turn == 0:  # a warm-up
            continue
        total = len(prompts) * given.tokens
        speeds["served"].append(total / seconds)
        speeds["bare"].append(total / alone)
        first += [came[0] for came in times]
        between += [b - a for came in times for a, b in pairwise(came)]
    served, plain = (statistics.median(speeds[name]) for name in ("served", "bare"))
    share = statistics.median(a / b for a, b in zip(speeds["served"], speeds["bare"], strict=True))
    waits = [*np.percentile(first, [50, 99]), *(1000 * np.percentile(between, [50, 99]))]
    row = [str(len(prompts)), f"{served:.1f}", f"{plain:.1f}", f"{share:.3f}", *(f"{wait:.3g}" for wait in waits)]
    names = ("first_token_s_p50", "first_token_s_p99", "next_token_ms_p50", "next_token_ms_p99")
    numbers = dict(zip(names, map(float, waits), strict=True))
    return row, {"tokens_per_second": speeds, "served_over_bare": share, **numbers}
