"""Decoder layers over shared inputs, and the check that importing them keeps their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from cases import HALF, INT64
from graphs import Dim, Graph
from harness import Feeds, build, imported, random_feeds, run_rewritten
from onnx.reference import ReferenceEvaluator

from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.plan import PlanOptions

BATCH, STEP, CAPACITY = 2, 3, 16
STARTS = np.array([2, 9])


class Layers(Graph):
    """A graph with the inputs that all layers of a decoder share."""

    def __init__(self, dtype: int = HALF, length: Dim = "S") -> None:
        super().__init__()
        self.dtype, self.length = dtype, length
        self.input("write_indices", INT64, ["B"])
        self.input("valid", INT64, ["B"])

    def cache(
        self,
        name: str,
        heads: int = 2,
        size: int = 16,
        capacity: int = CAPACITY,
        mode: str = "linear",
        sequence_major: bool = False,
    ) -> str:
        """Update one cache, 4-D heads-major or 3-D sequence-major; returns present."""

        def shape(tokens: Dim) -> list[Dim]:
            return ["B", tokens, heads * size] if sequence_major else ["B", heads, tokens, size]

        inputs = [self.input(f"past_{name}", self.dtype, shape(capacity))]
        inputs.append(self.input(f"new_{name}", self.dtype, shape(self.length)))
        axis = 1 if sequence_major else 2
        self.TensorScatter(*inputs, "write_indices", out=f"present_{name}", axis=axis, mode=mode)
        self.output(f"present_{name}", self.dtype, shape(capacity))
        return f"present_{name}"

    def query(self, name: str = "query", heads: int = 4, size: int = 16) -> str:
        """A query input."""
        return self.input(name, self.dtype, ["B", heads, self.length, size])

    def attend(self, query: str, key: str, value: str, out: str, lengths: str = "valid", **attrs: Any) -> None:
        """One Attention with a graph output `[B, N, S, H]`."""
        self.Attention(query, key, value, "", "", "", lengths, out=out, **attrs)
        self.output(out, self.dtype, ["B", "N", self.length, "H"])


def feeds_of(model: onnx.ModelProto, starts: np.ndarray = STARTS, step: int = STEP) -> Feeds:
    """Random inputs; write indices and valid lengths of a step; large garbage beyond the valid rows."""
    rng = np.random.default_rng(7)
    feeds = random_feeds(model, {"B": BATCH, "S": step}, rng)
    feeds["write_indices"] = starts
    if "valid" in feeds:
        feeds["valid"] = starts + step
    for name, array in feeds.items():
        if name.startswith("past") and array.ndim == 4:
            for b, start in enumerate(starts):
                array[b, :, int(start) + step :] = 300
    return feeds


def check(
    model: onnx.ModelProto, folder: Path, feeds: Feeds | None = None, options: PlanOptions | None = None
) -> ImportedModel:
    """The numbers of the original by ONNX's reference, at full and at the smallest span; then a build."""
    result = imported(model, folder, options)
    feeds = feeds_of(model) if feeds is None else feeds
    with np.errstate(invalid="ignore"):
        values = ReferenceEvaluator(model).run(None, feeds)
    want = dict(zip((value.name for value in model.graph.output), values, strict=True))
    longest = int(feeds["valid"].max()) if "valid" in feeds else CAPACITY
    for span in {longest, CAPACITY}:
        spans = {s.name: min(span, s.capacity) for s in result.plan.spans}
        got = run_rewritten(result, feeds, spans)
        assert set(got) == set(want)
        for name, array in want.items():
            bits = 0 if name.startswith("present") else 6e-2 if array.dtype == ml_dtypes.bfloat16 else 1e-2
            np.testing.assert_allclose(
                got[name].astype(np.float64), array.astype(np.float64), rtol=bits, atol=bits, err_msg=name
            )
    outcome = build(result)
    assert outcome.stage == "built", str(outcome)
    return result
