"""Decodes with the model as exported in ONNX Runtime: its presents become its pasts, by name, unchanged."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto

from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.float32_copy import Float32Copies
from trt_kvcache.compare.inputs import by_position, guessed, numbers_of
from trt_kvcache.cpu import RunError, open_in_time, run_in_time
from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.families import define, for_cpu
from trt_kvcache.importer.files.links import for_session
from trt_kvcache.importer.files.source import SourceModel, load_source
from trt_kvcache.importer.interface.role_evidence import place_positions
from trt_kvcache.importer.plan import CachePlan, OriginalTensor, Role, TensorRole, UpdateMode
from trt_kvcache.importer.steps.contents import find_caches, find_states, size_of
from trt_kvcache.importer.steps.element_types import has_bfloat16
from trt_kvcache.importer.steps.inputs import ENCODER_TOKENS
from trt_kvcache.importer.steps.runnable import open_types, runnable
from trt_kvcache.importer.steps.step import read_limits

__all__ = ["Exported", "ExportedTexts"]

Array = npt.NDArray[Any]

_TABLE = (256, 0.5)  # rows of drawn embeddings, and the size of their numbers


@dataclass
class _Text:
    """A text that is decoded: its number of tokens so far, and the tensors that are passed on, by input."""

    length: int = 0
    carried: dict[str, Array] = field(default_factory=dict)


class Exported:
    """Decodes texts with the model as exported, one text at a time. If its batch is fixed, all rows hold the same text.

    The plan gives the role of each input, and which output becomes which input. Caches are passed on without
    conversion.

    Attributes:
        vocabulary: last size of the logits; None: open.
        batch: rows of the model's batch; all hold the same text.
        garbage: contents of caches of a fixed length before the first token.
        also: more outputs of the model that `watch` gets.
        watch: called with inputs and outputs of each run.
        last: most positions of a piece whose logits are returned.

    Args:
        path: path of the model, or the model as it was read.
        plan: plan of the model.
        wide: compute float16 in float32, so that rounding hides nothing. bfloat16 always becomes float32.
        edit: changes the model in float32, before it is opened.
        copies: makes the float32 copy, whose file must live as long; None: the copy has its own file.
        given: values of inputs that do not follow from the text, by name, such as the output of an encoder: with a
            batch of 1, or a row for each text.
        table: embeddings ``[V, H]``, for a model that takes embeddings instead of tokens; None: random ones.

    Raises:
        UnsupportedModelError: ONNX Runtime cannot open the model, or its caches cannot be passed on unchanged.
    """

    def __init__(
        self, path: str | os.PathLike[str] | SourceModel, plan: CachePlan, *, wide: bool = False,
        given: Mapping[str, Array] | None = None, table: Array | None = None,
        edit: Callable[[ModelProto], ModelProto] | None = None, copies: Float32Copies | None = None,
    ) -> None:  # fmt: skip
        source = path if isinstance(path, SourceModel) else load_source(path)
        self._path, self._plan, self._given, self._table = source.path, plan, dict(given or {}), table
        model = runnable(for_cpu(define(source.proto))[0])
        if copies is None and (wide or has_bfloat16(model)):
            scratch = mkdtemp(prefix="trt-kvcache-exported-")  # the session maps the file as long as it lives
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
            copies = Float32Copies(Path(scratch))
        try:
            self._session = _open(model, source.path.parent, copies, edit)
        except RunError as error:
            raise UnsupportedModelError(f"{source.path}: ONNX Runtime does not open it: {error}") from None
        self._sizes = {i.name: i.shape for i in self._session.get_inputs()}
        self._types = {i.name: array_dtype(i.type.removeprefix("tensor(")[:-1]) for i in self._session.get_inputs()}
        outputs = {o.name: o for o in self._session.get_outputs()}
        tensors: tuple[OriginalTensor | TensorRole, ...] = plan.original or plan.tensors
        inputs = {t.name: t for t in tensors if t.io == "input"}
        carried = {c.role.name: c.output for c in (*find_caches(plan), *find_states(plan))}
        self._carried = {past: out for past, out in carried.items() if out is not None and past in self._types}
        self._inputs = {name: inputs[name] for name in self._types}
        limits = read_limits(plan, 1)
        self.batch, self._length = limits.batch, limits.length
        self._caches = {c.past: c for c in plan.caches}
        found = [t.name for t in tensors if t.io == "output" and t.role.value == "logits"]
        found += [name for name in outputs if name not in carried.values()]
        if not found:
            raise UnsupportedModelError(
                f"{source.path}: the model has no output but its caches: there is nothing to compare"
            )
        self._logits = found[0]
        self._axes = next((t.axes for t in tensors if t.io == "output" and t.name == self._logits), ())
        last = outputs[self._logits].shape[-1]
        self.vocabulary = last if isinstance(last, int) else None
        self.garbage, self.last = 0.0, 1 << 30
        self.also: tuple[str, ...] = ()
        self.watch: Callable[[Mapping[str, Array], Mapping[str, Array]], None] | None = None
        self._texts: list[_Text] = []

    def start(self, texts: Sequence[Sequence[int]]) -> None:
        """Begin as many texts as `texts` has; earlier texts are forgotten."""
        self._texts = [_Text() for _ in texts]

    def step(self, pieces: Sequence[Sequence[int]]) -> list[Array]:
        """Decode the next tokens of each text.

        Args:
            pieces: tokens of each text; a text without tokens rests.

        Returns:
            Logits of each text, float64 ``[S, V]``, for the tokens of its piece; only for the last ones if the model
                gives fewer, or `last` limits them.

        Raises:
            UnsupportedModelError: the model cannot run, or takes another number of tokens in a step.
        """
        return [self._decode(number, piece) for number, piece in enumerate(pieces)]

    def _decode(self, number: int, piece: Sequence[int]) -> Array:
        text = self._texts[number]
        longest = self._length or max(len(piece), 1)
        if len(piece) % longest:
            raise UnsupportedModelError(f"{self._path}: it takes {longest} tokens in each step, and got {len(piece)}")
        parts = [self._run(number, text, piece[at : at + longest]) for at in range(0, len(piece), longest)]
        return np.concatenate(parts)[-self.last :] if parts else np.zeros((0, self.vocabulary or 0))

    def _run(self, number: int, text: _Text, piece: Sequence[int]) -> Array:
        feeds = {n: text.carried[n] if n in text.carried else self._fill(n, number, text.length, piece)
                 for n in self._inputs}  # fmt: skip
        try:
            names = [self._logits, *self._carried.values(), *self.also]
            outputs = dict(zip(names, run_in_time(self._session, names, feeds), strict=True))
        except RunError as error:
            raise UnsupportedModelError(
                f"{self._path}: ONNX Runtime does not run {len(piece)} tokens after {text.length}: {error}"
                f"{guessed(self._plan, self._given)}"
            ) from None
        if self.watch is not None:
            self.watch(feeds, outputs)
        text.carried = {past: outputs[present] for past, present in self._carried.items()}
        text.length += len(piece)
        rows = by_position(outputs[self._logits], self._axes, 1)[0]  # all rows of the batch hold this text
        return np.asarray(rows[: len(rows) // self.batch][-self.last :], np.float64)

    def _fill(self, name: str, number: int, past: int, piece: Sequence[int]) -> Array:
        """Return the value of an input in a step with `past` tokens before it."""
        tensor, dtype, new = self._inputs[name], self._types[name], len(piece)
        kept = tensor.window_rows if isinstance(tensor, OriginalTensor) else None
        shape, axes = self._shape(tensor, past if kept is None else min(past, kept), new)
        if name in self._given:
            values = self._given[name]
            if "batch" in axes[:1]:
                values = np.repeat(values[:1] if len(values) == 1 else values[number, None], self.batch, 0)
            known = (slice(None if axis in ("", "?") else size) for size, axis in zip(shape, axes, strict=True))
            return values[tuple(known)].astype(dtype)
        role = tensor.role.value
        match role:
            case "tokens" if dtype.kind == "f":
                if self._table is None:
                    self._table = np.random.default_rng(0).normal(0, _TABLE[1], (_TABLE[0], shape[-1]))
                values = self._table[np.asarray(piece)]
            case "tokens":
                values = _along(np.asarray(piece), shape, axes)
            case "positions" if len(shape) > 2:
                values = place_positions(past + np.arange(new)[None], shape, axes)
            case "positions":
                values = _along(past + np.arange(new), shape, axes)
            case "write_indices" | "past_length":
                values = np.full(shape, past)
            case "valid_lengths":
                values = np.full(shape, min(past + new, self._rows(name)))
            case "update_lengths":
                values = np.arange(shape[0]) * new
            case "padding_mask":
                places = np.arange(shape[-1])
                values = places < past + new if kept is None else places >= shape[-1] - past - new
            case "mask":
                values = self._visible(shape, axes, past, new, kept)
                values = values if dtype.kind != "f" else np.where(values, 0, np.finfo(dtype).min)
            case "switch":
                values = np.asarray(not isinstance(tensor, OriginalTensor) or tensor.on)
            case "other":
                values = numbers_of(name, np.asarray([piece] * self.batch), shape, axes, whole=dtype.kind != "f")
            case "cache" | "fixed_cache":
                values = np.full((), self.garbage if dtype.kind == "f" else min(self.garbage, 100))
            case "growing_cache" | "state" | "zeros":
                values = np.zeros(())
            case _ if self._plan.original and all(t.name != name or t.role is Role.ZEROS for t in self._plan.tensors):
                values = np.zeros(())  # the rewritten model does not have this input: its contents do not matter
            case _:
                raise UnsupportedModelError(
                    f"{self._path}: nothing says what input '{name}' {list(tensor.shape)} holds; give its values"
                )
        return np.broadcast_to(values, shape).astype(dtype)

    def _shape(self, tensor: OriginalTensor | TensorRole, past: int, new: int) -> tuple[tuple[int, ...], Sequence[str]]:
        """Return the shape of an input, and the names of its axes."""
        cache = self._caches.get(tensor.name)
        if cache is not None and tensor.role.value == "cache":
            own = self._sizes[tensor.name]  # a window that became a ring has another length here
            shape = tuple(o if isinstance(o, int) else d for o, d in zip(own, cache.logical_shape, strict=True))
            axes: Sequence[str] = ("batch", *[""] * (len(shape) - 1))
        else:
            shape, axes = tensor.shape, tensor.axes or ("batch", *[""] * len(tensor.shape))[: len(tensor.shape)]
        sizes = {
            "batch": self.batch, "sequence": new, "past": past, "total": past + new, "capacity": self._capacity(),
            "keys": self._rows(tensor.name), "tokens": self.batch * new, "batch+1": self.batch + 1,
            "encoder": ENCODER_TOKENS,
        }  # fmt: skip
        own = self._sizes[tensor.name]
        known = [o if isinstance(o, int) else size_of(d) for o, d in zip(own, shape, strict=True)]
        return tuple(sizes.get(a, 1) if n is None else n for n, a in zip(known, axes, strict=True)), axes

    def _capacity(self) -> int:
        return self._plan.options.capacity or max((c.capacity for c in self._caches.values()), default=0)

    def _rows(self, name: str) -> int:
        """Return the rows of the smallest cache that attention reads under an input of lengths or a mask."""
        masks = {m.name for m in self._plan.masks if name in (m.lengths, m.mask)}
        read = [self._capacity_of(past) for a in self._plan.attention if a.mask in masks for past in a.caches]
        return min(read or [self._capacity_of(past) for past in self._caches], default=0)

    def _capacity_of(self, past: str) -> int:
        """Return the rows of a cache; a window that became a ring has another length here."""
        cache, sizes = self._caches[past], self._sizes.get(past, ())
        own = sizes[cache.sequence_axis] if len(sizes) > cache.sequence_axis else None
        return own if isinstance(own, int) and not self._plan.original else cache.capacity

    def _visible(self, shape: tuple[int, ...], axes: Sequence[str], past: int, new: int, kept: int | None) -> Array:
        """Return a causal mask ``[..., S, L]`` over rows of a cache: the keys that each query sees."""
        keys, query = np.arange(shape[-1]), past + np.arange(new)[:, None]
        if kept is not None:  # the newest row is the last
            keys = keys + past + new - shape[-1]
        elif any(c.mode is UpdateMode.CIRCULAR and c.capacity == shape[-1] for c in self._caches.values()):
            keys = past + new - 1 - (past + new - 1 - keys) % shape[-1]
        seen = (keys >= 0) & (keys <= query)
        return seen if "sequence" in axes or shape[-2:-1] == (new,) else seen[-1]


class ExportedTexts:
    """A runner (`trt_kvcache.compare.decode.Runner`) over the model as exported: one text at a time."""

    def __init__(self, exported: Exported) -> None:
        self.exported, self.name = exported, f"ONNX Runtime {ort.__version__}, float32"
        self._rows = 0

    def start(self, rows: int) -> None:
        """See `Runner.start`."""
        self._rows = rows
        self.exported.start([()] * rows)

    def step(self, piece: Piece, tokens: Array) -> Array:
        """See `Runner.step`."""
        pieces: list[list[int]] = [[] for _ in range(self._rows)]
        for row, values in zip(piece.rows, tokens, strict=True):
            pieces[row] = values.tolist()
        logits = self.exported.step(pieces)
        return np.stack([logits[row] for row in piece.rows]).astype(np.float32)


def _along(values: Array, shape: tuple[int, ...], axes: Sequence[str]) -> Array:
    """Return values of a step's tokens along the tokens' axis, the same in each row of a batch."""
    at = next((i for i, axis in enumerate(axes) if axis in ("sequence", "tokens")), len(shape) - 1)
    if not shape or shape[at] % len(values):
        return np.asarray(values[-1])
    return np.tile(values, shape[at] // len(values)).reshape([-1, *[1] * (len(shape) - 1 - at)])


def _open(
    model: ModelProto, folder: Path, copies: Float32Copies | None, edit: Callable[[ModelProto], ModelProto] | None
) -> ort.InferenceSession:
    """Open a session without fusions; it computes in float32 if `copies` is given."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.enable_cpu_mem_arena = False  # growing caches have many sizes
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if copies is not None:
        # prepacking would copy weights, and there are few rows to use them
        options.add_session_config_entry("session.disable_prepacking", "1")
        model, folder = copies.copy(model, folder)
        model = open_types(model, wide=True)  # caches of types that are moved, not computed with
    if edit is not None:
        model = edit(model)
    return open_in_time(for_session(model, folder, options), options)
