"""Quality of a trained model on a text: types, quantized caches and weights against transformers in float32.

Everything runs on the CPU and reads the same tokens, in steps of several tokens over growing caches. The columns:

    perplexity   of the text
    KL           divergence of its next tokens from those of transformers in float32, the mean over positions, in nats
    greedy       positions at which both prefer the same token
    bytes/token  that the caches of the session take
    tokens/s     single-token steps after the text, the median

Caches are calibrated with the text after the measured one. Exports take minutes; --exports keeps them.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report
from trt_kvcache import DecodeSession, PlanOptions, calibrate_caches
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.export.run import export_checkpoint
from trt_kvcache.plan import Target

Array = NDArray[Any]

ARGUMENTS = {"checkpoint": "folder of a trained model", "text": "file with a text, such as people write"}
OPTIONS = {
    "tokens": (2000, "tokens of the text that are measured"), "chunk": (256, "tokens of a step"),
    "calibration": (500, "tokens after these, for caches with one scale"), "steps": (32, "single tokens, timed"),
    "exporter": ("auto", "of trt-kvcache export"), "exports": (str, "folder that keeps exports, and is asked for them"),
    "only": ("", "comma-separated ways, such as 'float32,int4 caches'"),
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A model to measure: an export of `dtype`, int4 weights, quantized caches (`calibrated`: one scale a cache)."""

    dtype: str = "float32"
    int4: bool = False
    caches: str | None = None
    calibrated: bool = False


WAYS = {
    **{dtype: Way(dtype) for dtype in ("float32", "float16", "bfloat16")},
    **{
        f"{caches} caches{', calibrated' * calibrated}": Way(caches=caches, calibrated=calibrated)
        for caches in ("int8", "int4", "fp8")
        for calibrated in (False, True)
    },
    "int4 weights": Way(int4=True),
}
REFERENCE = "transformers"


class Scores:
    """Log-probabilities of the reference for the text `ids`, on disk: a large vocabulary makes gigabytes of them."""

    def __init__(self, ids: list[int], folder: Path) -> None:
        self._ids, self._file = ids, folder / "scores"
        self._scores: Array | None = None

    def compare(self, chunks: Iterator[Array]) -> dict[str, float]:
        """Return the quality of a model from chunks of its logits. The first model is the reference for later models.

        Positions at which logits are NaN, as after an overflow of float16, only count as different tokens.
        """
        start, nan, divergence, same = 0, 0, 0.0, 0
        lost: list[float] = []
        first = self._scores is None
        for logits in chunks:
            found = _log_softmax(logits)
            if self._scores is None:
                self._scores = np.memmap(self._file, np.float32, "w+", shape=(len(self._ids), found.shape[1]))
            exact = self._scores[start : start + len(found)]
            if first:
                exact[:] = found
            known = ~np.isnan(found).any(1)
            following = self._ids[start + 1 : start + len(found) + 1]
            start, nan = start + len(found), nan + int((~known).sum())
            lost += [-float(found[i, token]) for i, token in enumerate(following) if known[i]]
            same += int((exact.argmax(1) == found.argmax(1))[known].sum())
            vocab = min(found.shape[1], exact.shape[1])  # some exporters pad it
            before, after = exact[known, :vocab], found[known, :vocab]
            divergence += float((np.exp(before) * (before - after)).sum())
        made = {
            "perplexity": float(np.exp(np.mean(lost))), "kl": divergence / (start - nan), "greedy": same / start,
        }  # fmt: skip
        return made | ({"nan": nan} if nan else {})


def _log_softmax(logits: Array) -> Array:
    wide = logits.astype(np.float32)
    wide -= wide.max(1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(1, keepdims=True))
    return wide


def transformers_chunks(checkpoint: Path, ids: list[int], chunk: int) -> Iterator[Array]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        named = "cache" in inspect.signature(model.forward).parameters  # past_key_values before 5.24
        cache = {"cache" if named else "past_key_values": DynamicCache(config=model.config)}
        for start in range(0, len(ids), chunk):
            yield model(torch.tensor([ids[start : start + chunk]]), **cache).logits[0].numpy()


def session_chunks(session: DecodeSession, slot: int, ids: list[int], chunk: int) -> Iterator[Array]:
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        yield np.asarray(session.update({slot: part}, keep=len(part))[slot])


def speed(session: DecodeSession, slot: int, count: int) -> float:
    """Return tokens per second of single-token steps: the median of `count`, after two that warm up."""
    times, token = [], 0
    for _ in range(count + 2):
        begin = time.perf_counter()
        token = int(session.update({slot: [token]})[slot][-1].argmax())
        times.append(time.perf_counter() - begin)
    return 1 / statistics.median(times[2:])


def run(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> Report:
    ways = WAYS
    if given.only:
        names = [name.strip() for name in given.only.replace(", calibrated", ";").split(",")]
        names = [name.replace(";", ", calibrated") for name in names]
        if unknown := [name for name in names if name not in WAYS]:
            raise SystemExit(f"'{unknown[0]}' is no way; ways are {'; '.join(WAYS)}")
        ways = {name: WAYS[name] for name in names}
    ids = _tokens(given)
    text, calibration = ids[: given.tokens], ids[given.tokens :]
    found: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as name:
        exports = Path(given.exports or name)
        scores = Scores(text, Path(name))
        found[REFERENCE] = scores.compare(transformers_chunks(given.checkpoint, text, given.chunk))
        for way in ways:
            try:
                model = _export(given, ways[way], exports)
                found[way] = _measure(model, ways[way], text, calibration, scores, given)
            except TrtKvCacheError as error:
                found[way] = {"error": str(error)}
            keep({"ways": found})
    rows = [_row(name, values) for name, values in found.items()]
    title = f"{given.checkpoint.name}, {len(text)} tokens of {given.text.name}"
    head = ["", "perplexity", "KL", "greedy", "bytes/token", "tokens/s"]
    notes = [
        f"{name}: logits are NaN at {values['nan']} position(s), which are left out of perplexity and KL"
        for name, values in found.items()
        if "nan" in values
    ]
    return Report([title], head, rows, {"ways": found, "tokens": len(text)}, notes=notes)


def _row(name: str, values: dict[str, Any]) -> list[str]:
    if "error" in values:
        return [name, values["error"]]
    quality = [f"{values['perplexity']:.3f}", f"{values['kl']:.2g}", f"{values['greedy']:.2%}"]
    measured = "bytes" in values
    return [name, *quality, *([str(values["bytes"]), f"{values['speed']:.1f}"] if measured else ["", ""])]


def _tokens(given: argparse.Namespace) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.checkpoint)
    wanted = given.tokens + given.calibration
    ids: list[int] = tokenizer(given.text.read_text(encoding="utf-8")).input_ids[:wanted]
    if len(ids) < wanted:
        raise SystemExit(
            f"{given.text} has {len(ids)} tokens, and {wanted} are asked for: give a longer text, or lower --tokens or "
            "--calibration"
        )
    return ids


def _export(given: argparse.Namespace, way: Way, exports: Path) -> Path:
    folder = exports / ("int4" if way.int4 else way.dtype)
    if not folder.exists():
        exporter = "genai" if way.int4 else given.exporter
        export_checkpoint(given.checkpoint, folder, exporter=exporter, dtype=way.dtype, int4=way.int4)
    return folder


def _measure(
    model: Path, way: Way, text: list[int], calibration: list[int], scores: Scores, given: argparse.Namespace
) -> dict[str, Any]:
    capacity = len(text) + given.steps + 2
    # float8 is TensorRT's alone. On the CPU the target changes nothing else of what is measured but the bytes.
    options = PlanOptions(capacity=capacity, target=Target.TENSORRT if way.caches == "fp8" else Target.TENSORRT_RTX)
    if way.caches is not None:
        ranges = calibrate_caches(model, [calibration], options) if way.calibrated else None
        options = PlanOptions(capacity=capacity, target=options.target, cache_dtype=way.caches, cache_ranges=ranges)  # type: ignore[arg-type]
    with DecodeSession.open(model, device="cpu", plan_options=options, max_batch=1) as session:
        slot = session.cache.acquire()
        quality = scores.compare(session_chunks(session, slot, text, given.chunk))
        taken = session.plan.cache_bytes() // capacity
        return {**quality, "bytes": taken, "speed": round(speed(session, slot, given.steps), 2)}
