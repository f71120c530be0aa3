"""A decode in the interface of the rewritten model, whatever computes it: ONNX Runtime or TensorRT's network."""

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

__all__ = ["Rewritten", "RewrittenSteps", "WideSession", "copy_rows"]

Array = npt.NDArray[Any]
Feeds = dict[str, Array]

_NARROW = ("float16", "bfloat16")
GARBAGE = 1e4
"""What lies in cache rows that no token was written to: finite, as in a session, and far above what caches hold."""


class RewrittenSteps:
    """The inputs of the steps of a decode in the rewritten model's interface, and the caches between the steps.

    Floating-point inputs and caches are float32, whatever type the model has.

    Attributes:
        caches: ``[rows, *physical_shape[1:]]`` by name of the past, garbage in all rows without a token; states, too.
        ends: tokens of each row so far.

    Args:
        plan: of the rewritten model.
        limits: of token ids and positions.
        rows: of the batch.
        seed: of tokens, garbage and what else is drawn.
        garbage: see `GARBAGE`.
        given: values of inputs by name, which are used before any role.
        rings: see `Rewritten`.
    """

    def __init__(
        self, plan: CachePlan, limits: IndexLimits, rows: int, seed: int = 0, garbage: float = GARBAGE,
        given: Mapping[str, Array] | None = None, *, rings: bool = False,
    ) -> None:  # fmt: skip
        self._rings = rings
        self._plan, self._carried = plan, (*find_caches(plan), *find_states(plan))
        constants = _widened(draw_constants(plan, rows, seed, twin=True)) | dict(given or {})
        self._constants = {t.name for t in plan.tensors if t.name in constants and "batch" in t.axes}
        self._drawn = constants
        inputs = [t for t in plan.tensors if t.io == "input" and t.role is Role.OTHER]
        self._others = [t for t in inputs if t.name not in constants]
        self._rng, self._limits, self._rows = np.random.default_rng(seed), limits, rows
        self.ends = [0] * rows
        self._seed, self._garbage, self.caches = seed, garbage, Feeds()
        self._begin(0)

    def feeds(
        self, length: int, rows: Sequence[int], *, span: str = "tight", kept: int | None = None,
        tokens: Array | None = None,
    ) -> Feeds:  # fmt: skip
        """The inputs of a step of `length` new tokens for each of these rows.

        Args:
            length: see above.
            rows: of the batch; all of them where the model fixes its batch.
            span: one of `trt_kvcache.importer.steps.inputs.SPAN_KINDS`.
            kept: last positions that logits are computed of, if the model takes that; None: all.
            tokens: int64 ``[R, length]``, or embeddings ``[R, length, H]``; None: random ones.
        """
        starts = tuple(self.ends[row] for row in rows)
        step = Step(length, starts, tuple(start + length for start in starts))
        constants = {n: v[list(rows)] if n in self._constants else v for n, v in self._drawn.items()}
        inputs = StepInputs(self._plan, self._limits, constants, self._rng, twin=True, rings=self._rings, plain=True)
        feeds = inputs.shared(step) | span_inputs(self._plan, step, span, kept)
        name = self._plan.tensor(Role.TOKENS)
        if tokens is not None and name is not None:
            given = feeds[name.name]
            ids = tokens.ndim == 2 and tokens.size != given.size
            values = arrange(tokens, ("batch", "sequence"), given.shape, name.axes) if ids else tokens
            feeds[name.name] = values.reshape(given.shape).astype(given.dtype)
        if tokens is not None and tokens.ndim == 2:
            for other in self._others:
                given, whole = feeds[other.name], "float" not in other.dtype
                values = numbers_of(other.name, tokens, given.shape, other.axes, whole=whole)
                feeds[other.name] = values if given.dtype.name in _NARROW else values.astype(given.dtype)
        # Of all rows, nothing is copied: caches of many rows would take longer than the model.
        every = [*rows] == [*range(self._rows)]
        return _widened(feeds) | {n: values if every else values[list(rows)] for n, values in self.caches.items()}

    def skip(self, piece: Piece) -> None:
        """Leave out tokens: see `trt_kvcache.compare.decode.Piece.skip`."""
        for cache in self._carried:
            for row in piece.rows if cache.update is not None and not piece.drawn else ():
                copy_rows(cache, self.caches[cache.role.name][row], self.ends[row], self.ends[row] + piece.skip)
        for row in piece.rows:
            self.ends[row] += piece.skip
        if piece.drawn:
            self._begin(1)

    def _begin(self, number: int) -> None:
        """Fill the caches with random numbers for the tokens that there are, and with garbage."""
        named = {c.role.name: c for c in self._carried}
        contents = all_contents(named, self._seed, self.ends, self._garbage, number)
        self.caches = {name: _wide(named[name].to_physical(values)).copy() for name, values in contents}

    def accept(self, length: int, rows: Sequence[int], outputs: Mapping[str, Array]) -> None:
        """Take the caches that a step gave for these rows."""
        for cache in self._carried:
            if cache.output is not None and [*rows] == [*range(self._rows)]:
                self.caches[cache.role.name] = outputs[cache.output]
            elif cache.output is not None:
                self.caches[cache.role.name][list(rows)] = outputs[cache.output]
        for row in rows:
            self.ends[row] += length


class Rewritten:
    """A runner (`trt_kvcache.compare.decode.Runner`) of whatever takes the rewritten model's interface.

    Args:
        plan: of the rewritten model.
        limits: of token ids and positions.
        run: gives the outputs of a step, of its inputs.
        name: of what runs.
        given: values of inputs that no text says, by name.
        table: embeddings ``[V, H]``, for a model that takes these in the place of tokens.
        garbage: see `GARBAGE`.
        rings: windows became rings: valid lengths count the whole text.
    """

    def __init__(
        self, plan: CachePlan, limits: IndexLimits, run: Callable[[Feeds], Mapping[str, Array]], name: str,
        given: Mapping[str, Array] | None = None, table: Array | None = None, garbage: float = GARBAGE, *,
        rings: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.watch: Callable[[Feeds, Mapping[str, Array]], None] = lambda *_: None
        """Called with the inputs and outputs of each step."""
        self._plan, self._limits, self._run = plan, limits, run
        self._given, self._table, self._garbage, self._rings = given or {}, table, garbage, rings
        self._output = output_of(plan)
        self._axes = next(t.axes for t in plan.tensors if t.io == "output" and t.name == self._output)
        self._steps: RewrittenSteps | None = None

    @property
    def caches(self) -> Feeds:
        """See `RewrittenSteps`."""
        assert self._steps is not None
        return self._steps.caches

    @property
    def ends(self) -> list[int]:
        """See `RewrittenSteps`."""
        assert self._steps is not None
        return self._steps.ends

    def start(self, rows: int) -> None:
        """See `Runner.start`."""
        self._steps = RewrittenSteps(
            self._plan, self._limits, rows, garbage=self._garbage, given=self._given, rings=self._rings
        )

    def step(self, piece: Piece, tokens: Array) -> Array:
        """See `Runner.step`."""
        assert self._steps is not None
        values = tokens if self._table is None else self._table[tokens]
        if piece.skip or piece.drawn:
            self._steps.skip(piece)
        feeds = self._steps.feeds(piece.length, piece.rows, span=piece.span, kept=piece.kept, tokens=values)
        outputs = self._run(feeds)
        self.watch(feeds, outputs)
        self._steps.accept(piece.length, piece.rows, outputs)
        logits = by_position(outputs[self._output], self._axes, len(piece.rows))
        return logits if piece.kept is None else logits[:, -piece.kept :].copy()


def copy_rows(cache: CacheTensor, values: Array, length: int, start: int) -> None:
    """Let a cache of `length` tokens hold `start`: the further ones are copies of those; changed in place.

    Args:
        cache: whose contents they are.
        values: of one text ``[*physical_shape[1:]]``.
        length: see above.
        start: see above.
    """
    rows = cache.physical_rows(values[None])[0]
    places = np.arange(max(start - len(rows), 0), start) % len(rows)
    rows[places] = rows[places % min(length, len(rows))]


def output_of(plan: CachePlan) -> str:
    """The name of the output that is compared: the logits, or the first that goes into no later step.

    Raises:
        OptionError: there is none.
    """
    outputs = [t for t in plan.tensors if t.io == "output" and t.role not in (Role.CACHE, Role.STATE)]
    found = [t.name for t in outputs if t.role is Role.LOGITS] or [t.name for t in outputs if t.shape]
    if not found:
        raise OptionError("the model has no output but its caches: there is nothing to compare")
    return found[0]


class WideSession:
    """ONNX Runtime without fusions on a model in float32, whose weights stay in their files.

    Args:
        model: computes in float32 (`trt_kvcache.compare.float32_copy`).
        folder: of its external data.

    Raises:
        RunError: ONNX Runtime refuses it.
    """

    def __init__(self, model: ModelProto, folder: Path) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.disable_prepacking", "1")  # copies of weights, for few rows of use
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = open_in_time(for_session(model, folder, options), options)
        self.inputs = frozenset(i.name for i in self._session.get_inputs())
        self._outputs = [o.name for o in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array], names: Sequence[str] | None = None) -> Feeds:
        """Outputs by name, all or these; further feeds are left out.

        Raises:
            RunError: the step does not run.
        """
        names = self._outputs if names is None else [*names]
        values = run_in_time(self._session, names, {n: v for n, v in feeds.items() if n in self.inputs})
        return dict(zip(names, values, strict=True))


def _wide(values: Array) -> Array:
    return values.astype(np.float32) if values.dtype.name in _NARROW else values


def _widened(feeds: Mapping[str, Array]) -> Feeds:
    return {name: _wide(values) for name, values in feeds.items()}
