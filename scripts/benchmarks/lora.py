"""The cost of adapters (LoRA): step time with and without, by rows of the step, and what each row chooses.

A step on the CPU writes one token to each row: without adapters; or with adapters for all linear modules. Then no row
uses an adapter, all rows use the same one, or each row uses another one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from small_adapter import write_adapter

from benchmarks.report import Report, spread
from benchmarks.turns import interleave, timed
from trt_kvcache import DecodeSession
from trt_kvcache.decoding import CpuOptions

OPTIONS = {
    "model": (Path, "a model, or the folder of an export"), "rank": (16, "of the adapters"),
    "rows": ([1, 8], "sequences of a step"), "turns": (20, "steps of each kind"), "past": (64, "tokens before"),
    "threads": (2, "of ONNX Runtime"),
}  # fmt: skip
KINDS = ("without", "none chosen", "all the same", "each its own")


def run(given: argparse.Namespace, keep: Any) -> Report:
    if given.model is None:
        raise SystemExit("bench.py lora: give --model")
    most = max(given.rows)
    opened = {
        "max_batch": most, "tokenizer": False,
        "cpu": CpuOptions(given.threads, given.past + len(KINDS) * len(given.rows) * given.turns + 2),
    }  # fmt: skip
    with TemporaryDirectory() as folder, ExitStack() as stack:
        adapters = {str(i): Path(folder) / str(i) for i in range(min(most, 8))}
        for seed, path in enumerate(adapters.values()):
            model = given.model if given.model.suffix == ".onnx" else given.model / "model.onnx"
            write_adapter(model, path, given.rank, seed=seed, size=0.01)
        plain = stack.enter_context(DecodeSession.open(given.model, **opened))
        adapted = stack.enter_context(DecodeSession.open(given.model, adapters=adapters, **opened))
        size, weights = adapted.plan.adapter_bytes(), adapted.plan.adapters
        rows, data = [], {}
        for count in given.rows:
            kinds: list[list[str | None]] = [[None] * count, ["0"] * count, [str(i % 8) for i in range(count)]]
            chosen = dict(zip(KINDS[1:], kinds, strict=True))
            times: dict[str, list[float]] = {}
            for kind, names in chosen.items():
                way, other = _way(adapted, names, given.past), _way(plain, [None] * count, given.past)
                found = interleave({kind: way, KINDS[0]: other}, given.turns)
                times[kind] = found[kind]
                times.setdefault(KINDS[0], []).extend(found[KINDS[0]])
                _drop(adapted)
                _drop(plain)
            base = statistics.median(times[KINDS[0]])
            data[str(count)] = {kind: [1e3 * t for t in times[kind]] for kind in KINDS}
            for kind in KINDS:
                ratio = statistics.median(times[kind]) / base
                rows.append([f"{count} rows, {kind}", spread([1e3 * t for t in times[kind]]), f"{ratio:.2f}"])
            keep(data)
    assert weights is not None
    title = (
        f"{given.model}: rank {given.rank}, {len(weights.products)} products, {size / 1e6:.1f} MB for each adapter, "
        f"{given.threads} thread(s); ms of a step: median (quartiles)"
    )
    return Report([title], ["", "ms", "ratio"], rows, {"ms": data, "adapter_bytes": size})


def _way(session: DecodeSession, names: Sequence[str | None], past: int) -> Any:
    slots = [session.cache.acquire(adapter=name) for name in names]
    session.update({slot: [5] * past for slot in slots})
    session.update({slot: [7] for slot in slots})  # the first step of its kind makes what later ones use
    return timed(partial(session.update, {slot: [7] for slot in slots}))


def _drop(session: DecodeSession) -> None:
    for slot in session.cache.slots:
        session.cache.release(slot)
