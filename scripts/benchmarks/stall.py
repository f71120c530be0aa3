"""Time between tokens of decoding clients, before and during the long prompt of another client, by prefill budget.

All rows but one of a session decode on the CPU; then a prompt joins. A step gives each of the others one token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report
from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import CpuOptions, Schedule
from trt_kvcache.runtime.loop import PREFILL_BUDGET

OPTIONS = {
    "model": (Path, "a model, or the folder of an export"), "rows": (8, "rows of the session, and clients"),
    "prompt": (2000, "tokens of the prompt that joins"), "usual": (24, "steps before it joins"),
    "budgets": ([8, PREFILL_BUDGET["cpu"], 32, 100_000], "tokens of prompts in a step"), "turns": (3, "of each budget"),
    "threads": (2, "of ONNX Runtime"),
}  # fmt: skip


def run(given: argparse.Namespace, keep: Any) -> Report:
    if given.model is None:
        raise SystemExit("bench.py stall: give --model")
    found: dict[int, list[tuple[float, float, float, float]]] = {budget: [] for budget in given.budgets}
    for _ in range(given.turns):
        for budget in given.budgets:
            found[budget].append(_measure(given, budget))
    rows, data = [], {}
    for budget, turns in found.items():
        usual, during, longest, first = (statistics.median(column) for column in zip(*turns, strict=True))
        data[str(budget)] = {"usual_s": usual, "during_s": during, "longest_s": longest, "first_token_s": first}
        times = [f"{1000 * seconds:.0f}" for seconds in (usual, during, longest)]
        rows.append([str(budget), *times, f"{during / usual:.2f}", f"{longest / usual:.2f}", f"{first:.1f}"])
    keep(data)
    head = ["budget", "usual ms", "during ms", "longest ms", "during/usual", "longest/usual", "prompt's first token s"]
    title = f"{given.model}: {given.rows} clients, a prompt of {given.prompt} tokens, {given.threads} thread(s)"
    return Report([title], head, rows, {"budgets": data})


def _measure(given: argparse.Namespace, budget: int) -> tuple[float, float, float, float]:
    """Return seconds: the median step before, the median and longest step during, and the prompt's first token."""
    rng = np.random.default_rng(0)
    config = GenerationConfig(max_new_tokens=given.prompt + given.usual, eos_token_id=())
    with DecodeSession.open(
        given.model, max_batch=given.rows, tokenizer=False, schedule=Schedule(prefill_budget=budget),
        cpu=CpuOptions(given.threads, given.prompt + 4 * given.usual),
    ) as session:  # fmt: skip
        for _ in range(given.rows - 1):
            session.add(rng.integers(5, session.vocab, 16).tolist(), config)
        session.step()

        def step() -> tuple[float, set[int]]:
            start = time.perf_counter()
            told = {event.sequence for event in session.step()}
            return time.perf_counter() - start, told

        usual = [step()[0] for _ in range(given.usual)]
        late = session.add(rng.integers(5, session.vocab, given.prompt).tolist(), config)
        during, told = [], set[int]()
        while late not in told:
            seconds, told = step()
            during.append(seconds)
    return statistics.median(usual), statistics.median(during), max(during), sum(during)
