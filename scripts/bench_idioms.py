"""Step time of decoders as exporters write them against their rewritten form, on ONNX Runtime.

    python scripts/bench_idioms.py

For each way in which exporters hold caches (scripts/foreign_decoders.py) both models decode the same tokens from the
same position, some steps each in turns. Each original gets its best use, with IOBinding:

    growing caches      past and present stay OrtValues, what a step gives goes into the next one; nothing is copied
    GroupQueryAttention also with past and present in one buffer of the capacity, as onnxruntime-genai runs it
    ScatterND           two buffers of the capacity per cache, in turns

The rewritten model has past and present in one buffer of the capacity. Medians of the step times, without sampling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
import onnx
import onnxruntime as ort
from decoders import DecoderConfig
from foreign_decoders import make_foreign

from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions, Role
from trt_kvcache.runtime.inputs import SPAN_BUCKET

# Label, form, and whether the original's past and present share a buffer.
CASES = (
    ("Concat, plain operators", "concat", False),
    ("Concat, Attention", "concat-attention", False),
    ("Attention with past", "past-attention", False),
    ("GroupQueryAttention, growing", "gqa", False),
    ("GroupQueryAttention, shared", "gqa", True),
    ("ScatterND, Attention", "scatter", False),
)
SKIPPED = 2  # steps at the start of a turn that meet cold caches
REST = 0.05  # seconds before a turn: the threads of the one before spin for tens of milliseconds


@dataclass(frozen=True)
class Setting:
    """What all models have in common.

    Attributes:
        contents: random rows ``[1, N, capacity, H]``, by name of the past.
    """

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


def _session(model: bytes, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Original:
    """A model as exported, in its own interface."""

    def __init__(self, model: onnx.ModelProto, setting: Setting, *, shared: bool) -> None:
        self._setting = setting
        self._session = _session(model.SerializeToString(), setting.threads)
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
        return logits.numpy()


class Rewritten:
    """The same model as `trt-kvcache rewrite` writes it."""

    def __init__(self, path: Path, setting: Setting) -> None:
        self._setting = setting
        imported = import_model(path, PlanOptions(capacity=setting.capacity))
        self.model, self.plan = imported.model, imported.plan
        self._session = _session(imported.model.SerializeToString(), setting.threads)
        self._roles = {t.name: t.role for t in imported.plan.tensors if t.io == "input" and t.role is not Role.CACHE}
        buffers = {c.past: np.zeros_like(setting.contents[c.past]) for c in imported.plan.caches}
        self._buffers = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in buffers.items()}
        self._position = 0

    def start(self, position: int) -> None:
        """See `Side`."""
        self._position = position
        for name, buffer in self._buffers.items():
            values = self._setting.contents[name].copy()
            values[:, :, position:] = 0
            buffer.update_inplace(values)

    def step(self, token: int) -> np.ndarray:
        """See `Side`."""
        binding = self._session.io_binding()
        span = min(-(-(self._position + 1) // SPAN_BUCKET) * SPAN_BUCKET, self._setting.capacity)
        feeds = {
            Role.TOKENS: np.array([[token]]),
            Role.POSITIONS: np.array([[self._position]]),
            Role.WRITE_INDICES: np.array([self._position]),
            Role.VALID_LENGTHS: np.array([self._position + 1]),
            Role.SPAN: np.arange(span),
        }
        for name, role in self._roles.items():
            binding.bind_cpu_input(name, feeds[role])
        binding.bind_output("logits")
        for cache in self.plan.caches:
            binding.bind_ortvalue_input(cache.past, self._buffers[cache.past])
            binding.bind_ortvalue_output(cache.present, self._buffers[cache.past])
        self._session.run_with_iobinding(binding)
        self._position += 1
        return binding.get_outputs()[0].numpy()


def make_sides(form: str, setting: Setting, folder: Path, *, shared: bool) -> tuple[Original, Rewritten]:
    """Both sides of a case."""
    model = make_foreign(form, setting.config)
    path = folder / f"{form}.onnx"
    onnx.save(model, path)
    return Original(model, setting, shared=shared), Rewritten(path, setting)


def difference(sides: tuple[Side, Side], position: int, tokens: list[int]) -> float:
    """The largest difference of the logits over some steps, of the largest logit."""
    logits = []
    for side in sides:
        side.start(position)
        logits.append(np.stack([side.step(token).copy() for token in tokens]))
    return float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max())


def turn(side: Side, position: int, tokens: list[int]) -> list[float]:
    """Milliseconds of each step of one turn, without the first ones."""
    side.start(position)
    times = []
    time.sleep(REST)
    for token in tokens:
        begin = time.perf_counter()
        side.step(token)
        times.append(1e3 * (time.perf_counter() - begin))
    return times[SKIPPED:]


def measure(
    cases: dict[str, tuple[Original, Rewritten]], positions: list[int], tokens: list[int], turns: int
) -> dict[str, list[tuple[float, float]]]:
    """Median step times in ms, original and rewritten, by case and position.

    All cases take their turns in each round, and both sides of a case one after the other, in an order that changes, so
    that a machine that slows down slows all of them.
    """
    times: dict[tuple[str, int, int], list[float]] = {}
    for number in range(turns):
        for label, sides in cases.items():
            for position in positions:
                for which in (0, 1) if number % 2 else (1, 0):
                    times.setdefault((label, position, which), []).extend(turn(sides[which], position, tokens))
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {label: [(medians[label, p, 0], medians[label, p, 1]) for p in positions] for label in cases}


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--position", type=int, action="append", help="tokens in the cache; may be given again")
    parser.add_argument("--steps", type=int, default=10, help="per turn")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    for name, default in (("layers", 4), ("hidden", 512), ("query-heads", 8), ("kv-heads", 2), ("vocab", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
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
    positions = [min(p, room) for p in given.position or (room // 8, room // 2, room)]
    with TemporaryDirectory() as folder:
        cases = {label: make_sides(form, setting, Path(folder), shared=shared) for label, form, shared in CASES}
        differences = {label: max(difference(sides, p, tokens) for p in positions) for label, sides in cases.items()}
        medians = measure(cases, positions, tokens, given.turns)
    results: dict[str, dict[str, list[float] | float]] = {
        label: {
            "original_ms": [a for a, _ in pairs],
            "rewritten_ms": [b for _, b in pairs],
            "ratio": [b / a for a, b in pairs],
            "logits_difference": differences[label],
        }
        for label, pairs in medians.items()
    }
    _print(results, positions, given)


def _print(results: dict[str, dict[str, list[float] | float]], positions: list[int], given: argparse.Namespace) -> None:
    heads = f"{given.query_heads} query and {given.kv_heads} KV heads"
    print(f"{given.layers} layers, hidden {given.hidden}, {heads}, capacity {given.capacity}, ", end="")
    print(f"ONNX Runtime {ort.__version__}, {given.threads} thread(s)")
    print("ms per step, original -> rewritten (ratio), by tokens in the cache")
    print(f"{'':30}" + "".join(f"{position:>24}" for position in positions) + f"{'difference':>14}")
    for label, result in results.items():
        rows = zip(*(result[key] for key in ("original_ms", "rewritten_ms", "ratio")), strict=True)  # type: ignore[arg-type]
        cells = [f"{a:.2f} -> {b:.2f} ({ratio:.2f})" for a, b, ratio in rows]
        print(f"{label:30}" + "".join(f"{cell:>24}" for cell in cells) + f"{result['logits_difference']:>14.1e}")
    print(
        json.dumps(
            {"benchmark": "idioms", "capacity": given.capacity, "positions": positions, "threads": given.threads,
             "cases": results}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
