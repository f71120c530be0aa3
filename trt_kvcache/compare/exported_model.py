"""Runs the model as exported in ONNX Runtime: the present caches of a step are the past caches of the next step."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.float32_copy import Float32Copies
from trt_kvcache.compare.text_inputs import TextInputs, by_position, guessed
from trt_kvcache.cpu import RunError, lean_options, open_in_time, run_in_time
from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, OriginalRole, OriginalTensor, TensorRole, UpdateMode
from trt_kvcache.importer.families import define, for_cpu
from trt_kvcache.importer.files.source import SourceModel, load_source
from trt_kvcache.importer.interface import IndexLimits
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.steps.cache_contents import as_text, find_caches, find_states, fixed_rows, original_rows
from trt_kvcache.importer.steps.drawn_inputs import read_limits
from trt_kvcache.importer.steps.original_interface import OriginalInterface
from trt_kvcache.importer.steps.runnable import open_types, runnable
from trt_kvcache.importer.weights import for_session

Feeds = dict[str, Array]


class Exported:
    """Decodes texts with the model as exported, in float32 in ONNX Runtime, one text at a time.

    If the batch size is fixed, all batch rows hold this text. Each step gets the caches of the step before, unchanged.
    Raises `UnsupportedModelError` if ONNX Runtime cannot open the model, or if a step cannot take these caches.

    `given` are values of inputs that do not follow from the text, by name; `table` has embeddings ``[V, H]`` if the
    model takes them. A step returns logits of its `last` positions (None: all). `edit` changes the float32 model
    before it is opened. `copies` makes this float32 model; its file must exist as long as this object.

    Attributes:
        vocabulary: number of logits of a position; None if the model leaves it open.
        batch: number of rows in the model's batch.
        outputs: shapes of the model's outputs, by name.
        garbage: the value that fills caches of a fixed length before the first token.
        watch: called with inputs and outputs of each run, also the outputs that `edit` adds.
    """

    def __init__(
        self, path: str | os.PathLike[str] | SourceModel, plan: CachePlan, given: Mapping[str, Array] | None = None,
        table: Array | None = None, seed: int = 0, *, last: int | None = None,
        edit: Callable[[ModelProto], ModelProto] = lambda model: model, copies: Float32Copies | None = None,
    ) -> None:  # fmt: skip
        source = path if isinstance(path, SourceModel) else load_source(path)
        self.name = f"ONNX Runtime {ort.__version__}, float32"
        self._path, self._plan, self._given, self._last = source.path, plan, given or {}, last
        if copies is None:
            scratch = mkdtemp(prefix="trt-kvcache-exported-")  # the session maps the file as long as it lives
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
            copies = Float32Copies(Path(scratch))
        try:
            wide, folder = copies.copy(runnable(for_cpu(define(source.proto))[0]), source.path.parent)
            wide = edit(open_types(wide, wide=True))  # types such as float8 caches, which are only moved
            options = lean_options(ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
            self._session = open_in_time(for_session(wide, folder, options), options)
        except RunError as error:
            raise UnsupportedModelError(f"{source.path}: ONNX Runtime cannot open the model: {error}") from None
        self._types = {i.name: array_dtype(i.type.removeprefix("tensor(")[:-1]) for i in self._session.get_inputs()}
        self.outputs = {o.name: o.shape for o in self._session.get_outputs()}
        tensors: tuple[OriginalTensor | TensorRole, ...] = plan.original or plan.tensors
        if strange := self._types.keys() - {t.name for t in tensors if t.io == "input"}:
            raise UnsupportedModelError(
                f"{source.path}: cannot carry '{min(strange)}' from step to step, because it holds several caches"
            )
        limits = read_limits(plan, 1)
        self.batch, self._length = limits.batch, limits.length
        rings = ring_rows(source, plan)
        self._inputs = TextInputs(plan, IndexLimits({}, {}), given, table, seed=seed, rings=bool(rings))
        self._interface = OriginalInterface(plan) if plan.original else None
        caches, fixed = (*find_caches(plan), *find_states(plan)), fixed_rows(plan, source.proto.graph.input)
        self._caches = {c.role.name: as_text(c, plan, fixed, c.update.capacity if c.update else 0) for c in caches}
        self._carried = {past: c.output for past, c in self._caches.items() if c.output is not None}
        found = [t.name for t in tensors if t.io == "output" and t.role.value == "logits"]
        found += [o.name for o in source.proto.graph.output if o.name not in self._carried.values()]
        if not found:
            raise UnsupportedModelError(
                f"{source.path}: the model has no output except its caches, so there is nothing to compare"
            )
        self._logits = found[0]
        self._axes = next((t.axes for t in tensors if t.io == "output" and t.name == self._logits), ())
        size = self.outputs[self._logits][-1]
        self.vocabulary = size if isinstance(size, int) else None
        self.garbage = 0.0
        self.watch: Callable[[Feeds, Feeds], None] = lambda *_: None

    def start(self, rows: int) -> None:
        """Start `rows` new texts without tokens."""
        self._inputs.start(rows)
        self._texts = [self._empty() for _ in range(rows)]
        self._ends = [0] * rows

    def step(self, piece: Piece, tokens: Array) -> Array:
        """Run one step and return its logits ``[R, K, V]``; raises `UnsupportedModelError` if the model cannot run."""
        longest = self._length or piece.length
        if piece.length % longest:
            raise UnsupportedModelError(
                f"{self._path}: the model takes exactly {longest} tokens in each step; got {piece.length}"
            )
        texts = []
        for row, text in zip(piece.rows, tokens, strict=True):
            parts = [self._run(row, text[at : at + longest]) for at in range(0, piece.length, longest)]
            texts.append(np.concatenate(parts)[-self._last if self._last else 0 :])
        return np.stack(texts).astype(np.float32)

    def _empty(self) -> Feeds:
        states = {s.past for s in self._plan.states}
        growing = {t.name for t in self._plan.original if t.role is OriginalRole.GROWING_CACHE}
        empty = {}
        for past in self._types.keys() & self._caches:
            cache = self._caches[past]
            shape = list(cache.logical_shape(self.batch))
            if past in growing and cache.update is not None:
                shape[cache.update.sequence_axis] = 0
            number = 0.0 if past in states else self.garbage if "float" in cache.role.dtype else min(self.garbage, 100)
            empty[past] = np.full(shape, number, self._types[past])
        return empty

    def _run(self, text: int, tokens: Array) -> Array:
        start, carried = self._ends[text], self._texts[text]
        piece = Piece(len(tokens), (text,) * self.batch)
        feeds = self._inputs.feeds(piece, [start] * self.batch, np.stack([tokens] * self.batch)) | carried
        if self._interface is not None:
            without = self._carried if start else ()
            feeds = carried | self._interface.feeds(feeds, slice(0, self.batch), start, without)
        feeds = {name: feeds[name].astype(dtype, copy=False) for name, dtype in self._types.items()}
        try:
            outputs = dict(zip(self.outputs, run_in_time(self._session, [*self.outputs], feeds), strict=True))
        except RunError as error:
            raise UnsupportedModelError(
                f"{self._path}: ONNX Runtime cannot run a step of {len(tokens)} tokens after a past of {start} "
                f"tokens: {error}{guessed(self._plan, self._given)}"
            ) from None
        self.watch(feeds, outputs)
        carried |= {past: outputs[present] for past, present in self._carried.items() if past in self._types}
        self._ends[text] += len(tokens)
        rows = by_position(outputs[self._logits], self._axes, 1)[0]  # all rows of the batch hold this text
        return np.asarray(rows[: len(rows) // self.batch])


def ring_rows(source: SourceModel, plan: CachePlan) -> tuple[int, ...]:
    """Return the row counts of circular caches in the exported model, if the rewritten model has other counts."""
    fixed = fixed_rows(plan, source.proto.graph.input)
    rows = [(c, original_rows(c, plan, fixed)) for c in plan.caches if c.mode is UpdateMode.CIRCULAR]
    return tuple(n for cache, n in rows if n is not None and n != cache.capacity)
