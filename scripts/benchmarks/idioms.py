"""Step time of decoders as exporters write them against their rewritten form, on ONNX Runtime.

For each way in which exporters hold caches (scripts/foreign_decoders.py) both models decode the same tokens from the
same position, in turns. Each original runs in its fastest way, with IOBinding:

    growing caches      the presents of a step (OrtValues) are the pasts of the next step; nothing is copied
    GroupQueryAttention also with past and present in one buffer of the capacity, as onnxruntime-genai runs it
    ScatterND           two buffers of the capacity per cache, in turns
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from decoders import DecoderConfig
from foreign_decoders import make_foreign

from benchmarks.loops import Loop, open_session
from benchmarks.report import Report, quartiles
from benchmarks.turns import interleave
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions

# Label, form, and whether the original's past and present share a buffer.
CASES = (
    ("Concat, plain operators", "concat", False),
    ("Concat, Attention", "concat-attention", False),
    ("Attention with past", "past-attention", False),
    ("GroupQueryAttention, growing", "gqa", False),
    ("GroupQueryAttention, shared", "gqa", True),
    ("ScatterND, Attention", "scatter", False),
)
SKIPPED = 2  # steps at the start of a turn that are not measured: the CPU's caches are cold
REST = 0.05  # seconds before a turn: the threads of the one before spin for tens of milliseconds
OPTIONS = {
    "capacity": (4096, "rows of each cache"), "position": ([0], "tokens in the cache; 0: an eighth, half and all"),
    "steps": (10, "per turn"), "turns": (10, "of each side"), "threads": (1, "of ONNX Runtime"),
    "layers": (4, "layers"), "hidden": (512, "width"), "query-heads": (8, "query heads"), "kv-heads": (2, "KV heads"),
    "vocab": (8192, "tokens of the vocabulary"),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The part that all models have in common. `contents`: random rows ``[1, N, capacity, H]``, by name of the past."""

    config: DecoderConfig
    capacity: int
    threads: int
    contents: dict[str, np.ndarray]


class Side(Protocol):
    """A model that decodes."""

    def start(self, position: int) -> None:
        """Fill the caches with `position` tokens."""

    def step(self, token: int) -> np.ndarray:
        """Decode one token; returns its logits."""


class Original:
    """A model as exported, in its own interface."""

    def __init__(self, model: onnx.ModelProto, setting: Setting, *, shared: bool) -> None:
        self._setting = setting
        self._session = open_session(model.SerializeToString(), setting.threads)
        self._inputs = {i.name for i in self._session.get_inputs()}
        self._static = "cur_len" in self._inputs
        self._shared = shared
        self._presents = {n: n.replace("past_key_values", "present") for n in self._inputs if n.startswith("past")}
        self._position = 0

    def start(self, position: int) -> None:
        """See `Side`."""
        self._position = position
        rows = self._setting.capacity if self._static or self._shared else position
        self._pasts = {}
        for name in self._presents:
            values = self._setting.contents[name].copy()
            values[:, :, position:] = 0
            self._pasts[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values[:, :, :rows]))
        self._spare = {
            name: ort.OrtValue.ortvalue_from_numpy(np.zeros_like(self._setting.contents[name]))
            for name in (self._presents if self._static else ())
        }

    def step(self, token: int) -> np.ndarray:
        """See `Side`."""
        binding = self._session.io_binding()
        feeds = {
            "input_ids": np.array([[token]]),
            "position_ids": np.array([[self._position]]),
            "attention_mask": np.ones((1, self._position + 1), np.int64),
            "cur_len": np.array(self._position),
        }
        for name, array in feeds.items():
            if name in self._inputs:
                binding.bind_cpu_input(name, array)
        binding.bind_output("logits")
        for past, present in self._presents.items():
            binding.bind_ortvalue_input(past, self._pasts[past])
            if self._shared:
                binding.bind_ortvalue_output(present, self._pasts[past])
            elif self._static:
                binding.bind_ortvalue_output(present, self._spare[past])
            else:
                binding.bind_output(present)
        self._session.run_with_iobinding(binding)
        logits, *presents = binding.get_outputs()
        if self._static:
            self._pasts, self._spare = self._spare, self._pasts
        elif not self._shared:
            self._pasts = dict(zip(self._presents, presents, strict=True))
        self._position += 1
        return logits.numpy()[0, -1]


class Rewritten:
    """The same model as `trt-kvcache rewrite` writes it. Like the original, it binds its tensors in every step."""

    def __init__(self, path: Path, setting: Setting) -> None:
        options = PlanOptions(capacity=setting.capacity)
        self._loop = Loop(import_model(path, options), setting.threads, rebind=True)
        self._setting, self._position = setting, 0

    def start(self, position: int) -> None:
        """See `Side`."""
        self._position = position
        for name, buffer in self._loop.buffers.items():
            buffer[...] = self._setting.contents[name]
            buffer[:, :, position:] = 0

    def step(self, token: int) -> np.ndarray:
        """See `Side`."""
        self._position += 1
        return self._loop.step([token], self._position - 1)


def make_sides(form: str, setting: Setting, folder: Path, *, shared: bool) -> tuple[Original, Rewritten]:
    model = make_foreign(form, setting.config)
    path = folder / f"{form}.onnx"
    onnx.save(model, path)
    return Original(model, setting, shared=shared), Rewritten(path, setting)


def difference(sides: tuple[Side, Side], position: int, tokens: list[int]) -> float:
    """Return the largest difference of the logits over some steps, divided by the largest logit."""
    logits = []
    for side in sides:
        side.start(position)
        logits.append(np.stack([side.step(token).copy() for token in tokens]))
    return float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max())


def turn(side: Side, position: int, tokens: list[int]) -> list[float]:
    """Return the milliseconds of each step of one turn, without the first ones."""
    side.start(position)
    times = []
    time.sleep(REST)
    for token in tokens:
        begin = time.perf_counter()
        side.step(token)
        times.append(1e3 * (time.perf_counter() - begin))
    return times[SKIPPED:]


def run(given: argparse.Namespace, keep: Any) -> Report:
    config = DecoderConfig(
        layers=given.layers, hidden=given.hidden, query_heads=given.query_heads, kv_heads=given.kv_heads,
        head_size=given.hidden // given.query_heads, vocab=given.vocab, capacity=given.capacity,
        positions=given.capacity,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shape = (1, config.kv_heads, given.capacity, config.head_size)
    names = [f"past_key_values.{i}.{part}" for i in range(config.layers) for part in ("key", "value")]
    contents = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name in names}
    setting = Setting(config, given.capacity, given.threads, contents)
    tokens = [int(t) for t in rng.integers(0, config.vocab, given.steps + SKIPPED)]
    room = given.capacity - len(tokens)
    positions = [min(p, room) for p in (given.position if any(given.position) else (room // 8, room // 2, room))]
    with TemporaryDirectory() as folder:
        cases = {label: make_sides(form, setting, Path(folder), shared=shared) for label, form, shared in CASES}
        apart = {label: max(difference(sides, p, tokens) for p in positions) for label, sides in cases.items()}
        ways = {
            (label, p, which): partial(turn, sides[which], p, tokens)
            for label, sides in cases.items() for p in positions for which in (0, 1)
        }  # fmt: skip
        times = interleave(ways, given.turns)
    medians = {key: statistics.median(values) for key, values in times.items()}
    results, rows = {}, []
    for label in cases:
        before, after = ([medians[label, p, which] for p in positions] for which in (0, 1))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        results[label] = {
            "original_ms": before, "rewritten_ms": after, "ratio": ratios, "difference": apart[label],
            "quartiles": [[quartiles(times[label, p, which]) for p in positions] for which in (0, 1)],
        }  # fmt: skip
        cells = [f"{a:.2f} -> {b:.2f} ({r:.2f})" for a, b, r in zip(before, after, ratios, strict=True)]
        rows.append([label, *cells, f"{apart[label]:.1e}"])
    return Report(
        [f"{given.layers} layers, hidden {given.hidden}, {given.query_heads} query and {given.kv_heads} KV heads, "
         f"capacity {given.capacity}, {given.threads} thread(s)",
         "ms per step, original -> rewritten (ratio), by tokens in the cache"],
        ["", *map(str, positions), "difference"], rows, {"positions": positions, "cases": results},
    )  # fmt: skip
