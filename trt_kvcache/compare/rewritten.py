"""Decodes through the interface of the rewritten model, computed by ONNX Runtime or TensorRT's network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto

from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.inputs import by_position, numbers_of
from trt_kvcache.cpu import open_in_time, run_in_time
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.files.links import for_session
from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.importer.planning.index_limits import IndexLimits
from trt_kvcache.importer.steps.contents import CacheTensor, all_contents, find_caches, find_states
from trt_kvcache.importer.steps.inputs import StepInputs, arrange, draw_constants, span_inputs
from trt_kvcache.importer.steps.step import Step

__all__ = ["Rewritten", "WideSession", "copy_rows"]

Array = npt.NDArray[Any]
Feeds = dict[str, Array]

_NARROW = ("float16", "bfloat16")
GARBAGE = 1e4
"""The value in cache rows without a token: finite, as in a session, and far above the values in caches."""


class Rewritten:
    """A runner (`trt_kvcache.compare.decode.Runner`) over a function with the rewritten model's interface.

    Floating-point inputs and caches are float32, independent of the model's types.

    Attributes:
        caches: ``[rows, *physical_shape[1:]]`` by name of the past, garbage in all rows without a token; states, too.
        ends: number of tokens of each text so far.
        watch: called with the inputs and outputs of each step.

    Args:
        plan: plan of the rewritten model.
        limits: limits of token ids and positions.
        run: computes the outputs of a step from its inputs.
        name: name of the runtime.
        given: values of inputs that do not follow from the text, by name.
        table: embeddings ``[V, H]``, for a model that takes embeddings instead of tokens.
        garbage: see `GARBAGE`.
        rings: windows became rings: valid lengths count the whole text.
        seed: seed of garbage and other random numbers.
    """

    def __init__(
        self, plan: CachePlan, limits: IndexLimits, run: Callable[[Feeds], Mapping[str, Array]] = lambda _: {},
        name: str = "", given: Mapping[str, Array] | None = None, table: Array | None = None, garbage: float = GARBAGE,
        *, rings: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.name = name
        self.watch: Callable[[Feeds, Mapping[str, Array]], None] = lambda *_: None
        self._plan, self._limits, self._run, self._seed = plan, limits, run, seed
        self._given, self._table, self._garbage, self._rings = given or {}, table, garbage, rings
        self._carried = {c.role.name: c for c in (*find_caches(plan), *find_states(plan))}

    def start(self, rows: int) -> None:
        """See `Runner.start`."""
        plan, self._rng, self._rows = self._plan, np.random.default_rng(self._seed), [*range(rows)]
        self._constants = _widened(draw_constants(plan, rows, self._seed, twin=True)) | dict(self._given)
        inputs = [t for t in plan.tensors if t.io == "input" and t.role is Role.OTHER]
        self._others = [t for t in inputs if t.name not in self._constants]
        self.ends = [0] * rows
        self._begin(0)

    def _begin(self, number: int) -> None:
        """Fill the caches with random numbers for the present tokens, and with garbage."""
        contents = all_contents(self._carried, self._seed, self.ends, self._garbage, number)
        self.caches = {name: _wide(self._carried[name].to_physical(values)).copy() for name, values in contents}

    def step(self, piece: Piece, tokens: Array) -> Array:
        """See `Runner.step`."""
        if piece.skip or piece.drawn:
            self._skip(piece)
        feeds = self.feeds(piece, tokens if self._table is None else self._table[tokens])
        outputs = self._run(feeds)
        self.watch(feeds, outputs)
        self.accept(piece, outputs)
        name = output_of(self._plan)
        axes = next(t.axes for t in self._plan.tensors if t.io == "output" and t.name == name)
        logits = by_position(outputs[name], axes, len(piece.rows))
        return logits if piece.kept is None else logits[:, -piece.kept :].copy()

    def feeds(self, piece: Piece, tokens: Array | None = None) -> Feeds:
        """Return the inputs of a step.

        Args:
            piece: the piece; it must include all texts if the model fixes its batch.
            tokens: int64 ``[R, length]``, or embeddings ``[R, length, H]``; None: random ones.
        """
        plan, rows = self._plan, list(piece.rows)
        starts = tuple(self.ends[row] for row in rows)
        step = Step(piece.length, starts, tuple(start + piece.length for start in starts))
        apart = {t.name for t in plan.tensors if "batch" in t.axes}
        constants = {n: v[rows] if n in apart else v for n, v in self._constants.items()}
        inputs = StepInputs(plan, self._limits, constants, self._rng, twin=True, rings=self._rings, plain=True)
        feeds = inputs.shared(step) | span_inputs(plan, step, piece.span, piece.kept)
        role = plan.tensor(Role.TOKENS)
        if tokens is not None and role is not None:
            given = feeds[role.name]
            ids = tokens.ndim == 2 and tokens.size != given.size
            values = arrange(tokens, ("batch", "sequence"), given.shape, role.axes) if ids else tokens
            feeds[role.name] = values.reshape(given.shape).astype(given.dtype)
        if tokens is not None and tokens.ndim == 2:
            for other in self._others:
                given, whole = feeds[other.name], "float" not in other.dtype
                values = numbers_of(other.name, tokens, given.shape, other.axes, whole=whole)
                feeds[other.name] = values if given.dtype.name in _NARROW else values.astype(given.dtype)
        # A step of all rows copies no caches: copying many rows would take longer than the model.
        return _widened(feeds) | {n: v if rows == self._rows else v[rows] for n, v in self.caches.items()}

    def accept(self, piece: Piece, outputs: Mapping[str, Array]) -> None:
        """Store the caches from the outputs of a step."""
        rows = list(piece.rows)
        for name, cache in self._carried.items():
            if cache.output is not None and rows == self._rows:
                self.caches[name] = outputs[cache.output]
            elif cache.output is not None:
                self.caches[name][rows] = outputs[cache.output]
        for row in rows:
            self.ends[row] += piece.length

    def _skip(self, piece: Piece) -> None:
        """Skip tokens: see `Piece.skip`."""
        for name, cache in self._carried.items():
            for row in piece.rows if cache.update is not None and not piece.drawn else ():
                copy_rows(cache, self.caches[name][row], self.ends[row], self.ends[row] + piece.skip)
        for row in piece.rows:
            self.ends[row] += piece.skip
        if piece.drawn:
            self._begin(1)


def copy_rows(cache: CacheTensor, values: Array, length: int, start: int) -> None:
    """Extend a cache of `length` tokens to `start` tokens, in place: new rows are copies of earlier ones.

    Args:
        cache: the cache.
        values: contents of one text ``[*physical_shape[1:]]``.
        length: number of tokens before.
        start: number of tokens afterwards.
    """
    rows = cache.physical_rows(values[None])[0]
    places = np.arange(max(start - len(rows), 0), start) % len(rows)
    rows[places] = rows[places % min(length, len(rows))]


def output_of(plan: CachePlan) -> str:
    """Return the name of the output to compare: the logits, or the first output that no later step takes.

    Raises:
        OptionError: the model has no such output.
    """
    outputs = [t for t in plan.tensors if t.io == "output" and t.role not in (Role.CACHE, Role.STATE)]
    found = [t.name for t in outputs if t.role is Role.LOGITS] or [t.name for t in outputs if t.shape]
    if not found:
        raise OptionError("the model has no output but its caches: there is nothing to compare")
    return found[0]


class WideSession:
    """ONNX Runtime without fusions on a model in float32, whose weights stay in their files.

    Args:
        model: a model that computes in float32 (`trt_kvcache.compare.float32_copy`).
        folder: folder of its external data.

    Raises:
        RunError: ONNX Runtime refuses the model.
    """

    def __init__(self, model: ModelProto, folder: Path) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = False
        # prepacking would copy weights, and there are few rows to use them
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = open_in_time(for_session(model, folder, options), options)
        self.inputs = frozenset(i.name for i in self._session.get_inputs())
        self._outputs = [o.name for o in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array], names: Sequence[str] | None = None) -> Feeds:
        """Return the outputs by name, all or the named ones; feeds without an input are ignored.

        Raises:
            RunError: the step cannot run.
        """
        names = self._outputs if names is None else [*names]
        values = run_in_time(self._session, names, {n: v for n, v in feeds.items() if n in self.inputs})
        return dict(zip(names, values, strict=True))


def _wide(values: Array) -> Array:
    return values.astype(np.float32) if values.dtype.name in _NARROW else values


def _widened(feeds: Mapping[str, Array]) -> Feeds:
    return {name: _wide(values) for name, values in feeds.items()}
