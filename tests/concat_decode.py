"""Decodes on a model as exported and on what became of it, side by side in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_graphs import VOCABULARY
from harness import _session

from trt_kvcache.importer import ImportedModel, import_model, prepare
from trt_kvcache.importer.normalize import Normalized, normalize
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.importer.prepare import bind_capacity

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]
CAPACITY = 20  # more than probes alone look at; every pair of P and S up to it is proven in each import
GARBAGE = 1000.0
CHUNKS = (4, 1, 3, 1, 1, 2)


def rewritten(model: onnx.ModelProto, folder: Path, capacity: int = CAPACITY, **options: Any) -> ImportedModel:
    """Write `model` and import it."""
    onnx.save(model, folder / "model.onnx")
    key = model.SerializeToString(), capacity

    def recording(*given: Any) -> Normalized:
        found = normalize(*given)
        if not options:
            _canonical[key] = onnx.ModelProto()
            _canonical[key].CopyFrom(found.model)
        return found

    _canonical.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "normalize", recording)
        return import_model(folder / "model.onnx", PlanOptions(capacity=capacity, **options))


_canonical: dict[tuple[bytes, int], onnx.ModelProto] = {}
"""What the last import made of its model before it went on."""


def normalized(model: onnx.ModelProto, capacity: int = CAPACITY) -> onnx.ModelProto:
    """The canonical form alone: as in the last import, if that was of the same model."""
    result = _canonical.pop((model.SerializeToString(), capacity), None)
    if result is None:
        result = normalize(model, {}, PlanOptions(capacity=capacity)).model
    bind_capacity(result.graph, capacity, fits=True)
    onnx.checker.check_model(result, full_check=result.opset_import[0].version < 25)
    return result


class Decode:
    """The same text on both models. Rows have prompts of their own lengths unless the model fixes its batch.

    Args:
        original: the model as exported: it runs row by row.
        result: what became of it: it runs all rows at once, over caches that are full of garbage.
        capacity: rows of the caches of `result`.
        seed: of the text.
        short: the padding mask of the model as exported is over the rows that it keeps, and new ones.
    """

    def __init__(
        self,
        original: onnx.ModelProto,
        result: onnx.ModelProto,
        capacity: int = CAPACITY,
        seed: int = 0,
        *,
        short: bool = False,
    ) -> None:
        self._short = short
        self._models = (original, result)
        self._capacity = capacity
        self._rng = np.random.default_rng(seed)
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in original.graph.input}
        self._tokens = "input_ids" if "input_ids" in shapes else "inputs_embeds"
        fixed = shapes[self._tokens][0]
        self.batch = fixed or 3
        self._steps = shapes[self._tokens][1]
        self.rows = [slice(0, fixed)] if fixed else [slice(b, b + 1) for b in range(self.batch)]
        self._types = {v.name: v.type.tensor_type.elem_type for v in original.graph.input}
        self._caches = {
            v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in result.graph.input if "past_" in v.name
        }
        self._axes = {name: shapes[name].index(0, 1) for name in self._caches}
        self._ranks = {name: len(shapes[name]) for name in self._caches}
        self._grown = [
            {name: np.zeros([row.stop - row.start, *shapes[name][1:]], self._dtype(name)) for name in self._caches}
            for row in self.rows
        ]
        self._held = {
            name: self._rng.choice([-GARBAGE, GARBAGE], [self.batch, *shape[1:]]).astype(self._dtype(name))
            for name, shape in self._caches.items()
        }
        outputs = [v.name for v in original.graph.output if v.name not in ("logits", "debug")]
        self._presents = dict(zip(self._caches, outputs, strict=False))
        self._past = np.zeros(self.batch, np.int64)
        self._hidden = self._rng.random((self.batch, capacity)) < 0.3

    def check(
        self, chunks: Sequence[int] = CHUNKS, prompts: Sequence[int] = (5, 2, 0), tolerance: float = 1e-4
    ) -> None:
        """Compare the logits of every step, and the caches at the end."""
        for row, length in zip(self.rows, prompts, strict=False):
            if self._steps == 0 and length and len(self.rows) > 1:
                self.check_step(length, row, tolerance)
        for length in [self._steps] * (sum(chunks) // self._steps) if self._steps else chunks:
            self.check_step(length, tolerance=tolerance)
        for row, grown in zip(self.rows, self._grown, strict=True):
            for name, array in grown.items():
                tokens, rest = self._tokens_of(name, row)
                axis = self._axes[name]
                newest = np.arange(tokens.shape[axis])[-array.shape[axis] :]  # all, unless some are cut off
                self._same(array, np.take(tokens, newest, axis), tolerance)
                assert (np.abs(rest) == GARBAGE).all(), name

    def check_step(self, length: int, rows: slice | None = None, tolerance: float = 1e-4) -> None:
        """Compare the logits of one step of some rows, by default all."""
        rows = rows or slice(0, self.batch)
        new = self._new_tokens(length)
        expected = []
        for row, grown in zip(self.rows, self._grown, strict=True):
            if rows.start <= row.start < rows.stop:
                outputs = run(self._models[0], self._feeds(self._models[0], new, row, int(self._past[row][0]), grown))
                expected.append(outputs["logits"])
                for name in grown:
                    grown[name] = outputs[self._presents[name]]
        feeds = self._feeds(self._models[1], new, rows, None, {n: a[rows] for n, a in self._held.items()})
        outputs = run(self._models[1], feeds)
        self._same(np.concatenate(expected), outputs["logits"], tolerance)
        for name, array in self._held.items():
            array[rows] = outputs[self._presents[name]]
        self._past[rows] += length

    def _new_tokens(self, length: int) -> Array:
        if self._tokens == "input_ids":
            return self._rng.integers(0, VOCABULARY, (self.batch, length))
        width = self._models[0].graph.input[0].type.tensor_type.shape.dim[2].dim_value
        return self._rng.standard_normal((self.batch, length, width)).astype(self._dtype(self._tokens))

    def _feeds(self, model: onnx.ModelProto, new: Array, rows: slice, past: int | None, caches: Feeds) -> Feeds:
        """What a step of some rows is given; `past`: of the model as exported, None: of the other one."""
        length, before = new.shape[1], self._past[rows]
        ends = before + length
        shown = next(a.shape[self._axes[n]] for n, a in caches.items()) if self._short and past is not None else None
        positions = before[:, None] + np.arange(length)
        total = self._capacity if past is None else past + length
        visible = np.arange(total) <= positions[:, None, :, None]
        visible &= ~self._hidden[rows, None, None, :total] | (np.arange(total) == positions[:, None, :, None])
        known: Feeds = {
            self._tokens: new[rows],
            "position_ids": positions,
            "attention_mask": np.ones((len(before), total if shown is None else shown + length), np.int64),
            "mask": visible,
            "write_indices": before,
            "nonpad_kv_seqlen": ends,
            "attention_span": np.arange(min(self._capacity, int(ends.max()) + int(ends.max()) % 3)),
            "logits_span": np.arange(length),
            **caches,
        }
        feeds = {v.name: known[v.name] for v in model.graph.input}
        if "mask" in feeds and self._types["mask"] != onnx.TensorProto.BOOL:
            feeds["mask"] = np.where(visible, 0, np.finfo(np.float16).min).astype(self._dtype("mask"))
        return feeds

    def _dtype(self, name: str) -> Any:
        return onnx.helper.tensor_dtype_to_np_dtype(self._types[name])

    def _tokens_of(self, name: str, row: slice) -> tuple[Array, Array]:
        """The rows that hold tokens, in the layout of the model as exported, and the rest."""
        held, axis = self._held[name][row], self._axes[name]
        if held.shape[axis] != self._capacity or held.ndim != self._ranks[name]:
            held = held.swapaxes(1, 2)
            held = held.reshape(*held.shape[:2], -1) if self._ranks[name] == 3 else held
        held = np.moveaxis(held, axis, 0)
        past = self._past[row][0]
        return np.moveaxis(held[:past], 0, axis), held[past:]

    def _same(self, wanted: Array, got: Array, tolerance: float) -> None:
        np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=tolerance, atol=tolerance)


def run(model: onnx.ModelProto, feeds: Feeds) -> Feeds:
    """All outputs of one step."""
    names = [value.name for value in model.graph.output]
    return dict(zip(names, _session(model.SerializeToString()).run(None, feeds), strict=True))


def check_decode(model: onnx.ModelProto, folder: Path, tolerance: float = 1e-4, **options: Any) -> ImportedModel:
    """Import a model and run a decode on both."""
    result = rewritten(model, folder, **options)
    Decode(model, result.model, options.get("capacity", CAPACITY)).check(tolerance=tolerance)
    return result
