"""Compares exporters with transformers: on a few tokens of a checkpoint, and on its twin (small, with random weights).

`trt_kvcache.compare.twin` makes and decodes the twin in the interpreter of the exporters. ONNX Runtime decodes the
exported twin in float32.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.compare import checkpoint as checkpoint_script
from trt_kvcache.compare import twin as twin_script
from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.exported_model import Exported
from trt_kvcache.errors import TrtKvCacheError, UnsupportedModelError
from trt_kvcache.export.reason import failure_reason
from trt_kvcache.files import read_object
from trt_kvcache.importer import plan_model
from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions
from trt_kvcache.importer.files.model_folder import usual_capacity

__all__ = ["TOLERANCE", "Twin", "Verdict", "decode_exported", "difference"]

Array = npt.NDArray[Any]

TOLERANCE = 0.01
"""The largest allowed difference, as a share of the largest logit. Correct exports differ by up to 0.002, because
float16 and bfloat16 round tables and scales; wrong ones by 0.03 or more."""
_WEIGHTS = 0.05  # the same for trained weights, which float16 rounds
_SECONDS = 180.0  # time limit of one command on a twin
_READS = (OSError, ValueError, KeyError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Verdict:
    """Whether an exporter writes a correct model, judged by comparing it with transformers.

    Attributes:
        is_right: whether the exported model is correct; None if nothing was compared.
        said: text with the size of the difference, or the reason why nothing was compared.
        logits: logits ``[S, V]`` of the exported model for each text.
    """

    is_right: bool | None
    said: str
    logits: tuple[Array, ...] = ()


class Twin:
    """The twin of a checkpoint: a small model with the same settings and random weights, on which exporters are tested.

    Args:
        checkpoint: folder of the checkpoint.
        folder: an empty folder for the twin and its exports.
        run: runs the exporters' interpreter with arguments and a time limit in seconds; returns exit code and stderr.
        capacity: tokens per sequence; None: the default. Some checkpoints change their computation at a certain
            position (LongRoPE). If the capacity is below this position, the twin's texts end before it.
    """

    def __init__(
        self, checkpoint: Path, folder: Path, run: Callable[[Sequence[str], float], tuple[int, str]],
        capacity: int | None = None,
    ) -> None:  # fmt: skip
        self._checkpoint, self._folder, self._run = checkpoint, folder / "checkpoint", run
        try:
            threshold = twin_script.threshold(read_object(checkpoint / "config.json"))
        except _READS:
            threshold = None
        reached = (capacity or usual_capacity(checkpoint)) > (threshold or 0)
        self._first = 0 if reached else 1
        self._capacity = None if reached else twin_script.THRESHOLD

    @cached_property
    def _failure(self) -> str | None:
        """Make the twin, once; return why this failed, or None."""
        code, stderr = self._run([twin_script.__file__, str(self._checkpoint), str(self._folder)], _SECONDS)
        return f"it has no twin: {failure_reason(stderr) or code}" if code else None

    def judge(self, name: str, export: Callable[[Path, Path, float], None]) -> Verdict:
        """Export the twin, decode texts with the exported model, and compare the logits to transformers'.

        `export` exports a checkpoint's folder to a new folder, with a time limit in seconds; it raises
        `UnsupportedModelError` if the exporter fails.
        """
        if self._failure is not None:
            return Verdict(None, self._failure)
        made = self._folder.with_name(name)
        try:
            export(self._folder, made, _SECONDS)
        except UnsupportedModelError as error:
            return Verdict(None, f"it fails on a small twin: {error.message}")
        try:
            plan = plan_model(made, PlanOptions(capacity=self._capacity))
        except TrtKvCacheError as error:
            return Verdict(None, f"its export of a small twin is refused: {error.message}")
        try:
            asked = json.loads((self._folder / "decode.json").read_text(encoding="utf-8"))
            texts, cuts = (asked[part][self._first :] for part in ("texts", "cuts"))
            logits = decode_exported(Exported(made, plan), texts, cuts)
        except UnsupportedModelError as error:
            return Verdict(False, f"its export of a small twin does not decode: {error.message}")
        wrong = difference(logits, _read_logits(self._folder / "logits.npz")[self._first :])
        return Verdict(wrong is None, f"on a small twin, {wrong}" if wrong else "", tuple(logits))

    def settings(self, name: str, verdict: Verdict) -> list[str]:
        """Return settings that the exporter ignores: if one changes, transformers gives its logits. Empty: unknown."""
        if not verdict.logits:
            return []
        file = self._folder.with_name(f"{name}.npz")
        checkpoint_script.save_logits(file, verdict.logits, self._first)
        code, _ = self._run([twin_script.__file__, "explain", str(self._folder), str(file), str(TOLERANCE)], _SECONDS)
        try:
            found = json.loads((self._folder / "settings.json").read_text(encoding="utf-8"))
        except _READS:
            return []
        return [] if code else [str(setting) for setting in found]


def judge_weights(
    checkpoint: Path, model: Path, plan: CachePlan, folder: Path,
    run: Callable[[Sequence[str], float], tuple[int, str]], seconds: float,
) -> Verdict:  # fmt: skip
    """Compare an exported model with its checkpoint in transformers, on a few tokens, within `seconds`.

    `folder` is for temporary files; `run` as in `Twin`.
    """
    runner = Exported(model, plan)
    rng = np.random.default_rng(0)
    asked = {"texts": [rng.integers(0, runner.vocabulary or 100, 12).tolist()], "cuts": [[7, 3, 1, 1]]}
    (folder / "tokens.json").write_text(json.dumps(asked), encoding="utf-8")
    words = [checkpoint_script.__file__, str(checkpoint), str(folder / "tokens.json"), str(folder / "tokens.npz")]
    code, stderr = run(words, seconds)
    if code:
        return Verdict(None, f"transformers does not run it: {failure_reason(stderr) or code}")
    wrong = difference(decode_exported(runner, **asked), _read_logits(folder / "tokens.npz"), _WEIGHTS)
    return Verdict(wrong is None, wrong or "")


def decode_exported(runner: Exported, texts: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]) -> list[Array]:
    """Decode texts with an exported model, in steps whose lengths are `cuts`; return logits ``[S, V]`` by text."""
    runner.start(len(texts))
    logits = []
    for number, (text, steps) in enumerate(zip(texts, cuts, strict=True)):
        parts, left = [], list(text)
        for length in steps:
            parts.append(runner.step(Piece(length, (number,)), np.array([left[:length]]))[0])
            left = left[length:]
        logits.append(np.concatenate(parts))
    return logits


def difference(found: Sequence[Array], wanted: Sequence[Array], tolerance: float = TOLERANCE) -> str | None:
    """Describe how the logits of two decodes differ; None if they agree within the tolerance."""
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if ours.shape != theirs.shape:
            return f"logits of text {number} have shape {list(ours.shape)}, and transformers' {list(theirs.shape)}"
    parts = [np.abs(a - b).max(-1) / np.abs(b).max() for a, b in zip(found, wanted, strict=True)]
    worst = max(parts, key=lambda part: float(part.max()) if np.isfinite(part).all() else np.inf)
    if (worst <= tolerance).all():
        return None
    at, size = int(np.argmin(worst <= tolerance)), float(worst.max())
    return f"logits differ from transformers' from token {at} of a text on, by up to {size:.2g} of the largest"


def _read_logits(path: Path) -> list[Array]:
    with np.load(path, allow_pickle=False) as file:
        return [file[name] for name in sorted(file.files, key=int)]
