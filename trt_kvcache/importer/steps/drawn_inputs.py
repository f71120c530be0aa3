"""Defines steps of a decode loop, finds a model's limits for steps, and draws values for inputs except caches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import (
    CachePlan,
    OriginalRole,
    OriginalTensor,
    Role,
    SpanInput,
    TensorRole,
    UpdateMode,
)
from trt_kvcache.importer.interface import IndexLimits
from trt_kvcache.importer.interface.role_evidence import place_positions
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.steps.cache_contents import numpy_dtype, size_of
from trt_kvcache.input_values import (
    Named,
    axis_sizes,
    by_token,
    caches_under,
    from_lengths,
    newest_tokens,
    place,
)

_HIDDEN_SHARE = 0.2  # a mask input hides this share of visible keys, to detect a rewrite that drops the mask
ENCODER_TOKENS = 6  # length of an encoder's output in verification
SPAN_KINDS = ("tight", "bucketed", "full")
"""Kinds of spans (ranges of cache rows that a step reads); see `span_inputs`."""

_FAINT = -20.0  # a float mask's bias for hidden tokens: finite, and exp(-20) is nearly 0
_ANY_LENGTH = 1 << 20  # the most tokens of an update, if no cache limits them


@dataclass(frozen=True)
class Step:
    """One step: each sequence writes `length` tokens, from its row in `starts` on, and then has `valid` tokens."""

    length: int
    starts: tuple[int, ...]
    valid: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.length} tokens from {list(self.starts)}, valid {list(self.valid)}"


@dataclass(frozen=True)
class Limits:
    """The steps that a model allows.

    Attributes:
        batch: number of rows of the batch.
        length: the fixed number of tokens of an update; None: not fixed.
        longest: the largest number of tokens of an update.
        linear: capacity of the shortest linear cache; None: no linear cache.
        circular: capacities of the circular caches.
        no_straddle: capacities of the circular caches in which no update may cross the end.
        indexed: True if steps write at write indices; if False, they always write from row 0 on.
        ragged: True if the sequences of a batch may have different lengths.
        lengths: True if the model has an input for valid lengths.
        fixed_batch: True if the model takes only batches of `batch` rows.
    """

    batch: int
    length: int | None
    longest: int
    linear: int | None
    circular: tuple[int, ...]
    no_straddle: tuple[int, ...]
    indexed: bool
    ragged: bool
    lengths: bool
    fixed_batch: bool = False


def read_limits(plan: CachePlan, batch: int) -> Limits:
    """Return the limits of a model's steps; raises `OptionError` if a circular cache is shorter than an update."""
    fixed_batches = {c.logical_shape[0] for c in plan.caches if isinstance(c.logical_shape[0], int)}
    together = rows_together(plan.original)
    batch = together or min(fixed_batches, default=batch)
    fixed_lengths = {c.update_length for c in plan.caches if isinstance(c.update_length, int)}
    fixed_lengths |= {d for t in plan.original for d, axis in zip(t.shape, t.axes, strict=True)
                      if t.role is OriginalRole.TOKENS and axis == "sequence" and isinstance(d, int)}  # fmt: skip
    too_short = [c for c in plan.caches if c.contract and c.capacity < max(fixed_lengths, default=1)]
    if too_short:
        raise OptionError(
            f"cache '{too_short[0].past}' holds {too_short[0].capacity} rows, but the model always updates "
            f"{max(fixed_lengths)} tokens, so every update would cross the end of this circular cache; plan with "
            "--fallback functional"
        )
    contracts = [c.contract for c in plan.caches if c.contract is not None]
    bounds = [c.max_update_length for c in contracts if c.max_update_length is not None]
    roles = {Role.WRITE_INDICES, Role.VALID_LENGTHS}
    if plan.original:  # the exported model runs each row separately, with positions and masks of that row
        roles |= {Role.POSITIONS, Role.MASK}
    driven = [t for t in plan.tensors if t.io == "input" and t.role in roles]
    return Limits(
        batch=batch,
        length=min(fixed_lengths, default=None),
        longest=min([c.capacity for c in plan.caches] + bounds, default=_ANY_LENGTH),
        linear=min((c.capacity for c in plan.caches if c.mode is UpdateMode.LINEAR), default=None),
        circular=tuple(sorted({c.capacity for c in plan.caches if c.mode is UpdateMode.CIRCULAR})),
        no_straddle=tuple(sorted({c.capacity for c in plan.caches if c.contract and c.contract.no_straddle})),
        indexed=any(c.write_indices is not None for c in plan.caches),
        ragged=together is None and all("batch" in t.axes or batch in t.shape for t in driven),
        lengths=any(t.role is Role.VALID_LENGTHS for t in driven),
        fixed_batch=bool(fixed_batches) or together is not None,
    )


def rows_together(original: Iterable[OriginalTensor]) -> int | None:
    """Return the fixed batch size of the exported model if it exceeds 1; None: each sequence runs separately."""
    batches = {
        n
        for t in original
        for a, d in zip(t.axes, t.shape, strict=True)
        if t.io == "input" and a == "batch" and (n := size_of(d))
    }
    return max(batches) if max(batches, default=1) > 1 else None


class DrawnInputs:
    """Draws values for the inputs of one step.

    `named` maps names of inputs to values that replace drawn ones. `unknown` is the size of axes of unknown meaning
    (None: refuse models with such axes). `rings`: True if the rewrite made caches circular; then valid lengths also
    count tokens that were overwritten. `plain`: True if masks hide only later tokens, as in a session.
    """

    def __init__(
        self, plan: CachePlan, limits: IndexLimits, named: Mapping[str, Array], rng: np.random.Generator, *,
        unknown: int | None = None, rings: bool = False, plain: bool = False,
    ) -> None:  # fmt: skip
        self._plan, self._limits, self._named, self._rng = plan, limits, named, rng
        self._unknown, self._rings, self._plain = unknown, rings, plain
        carried = (Role.CACHE, Role.STATE, Role.SPAN)
        self._adapters: dict[str, Array] = {}
        self._inputs = [t for t in plan.tensors if t.io == "input" and t.role not in carried]

    def shared(self, step: Step) -> dict[str, Array]:
        """Return values for the inputs that the original and the rewritten model share, by name."""
        sizes = axis_sizes(len(step.starts), step.length)
        return {t.name: self._fill(t, step, sizes | {"keys": self._capacity(t.name)}) for t in self._inputs}

    def _fill(self, tensor: TensorRole, step: Step, sizes: Mapping[str, int]) -> Array:
        shape = tuple(
            dim if isinstance(dim, int) else self._size(tensor, axis, sizes) for axis, dim in enumerate(tensor.shape)
        )
        dtype = numpy_dtype(tensor.dtype)
        if tensor.name in self._named:
            return self._slice_values(tensor, shape).astype(dtype)
        match tensor.role:
            case Role.TOKENS if dtype.kind in "iu":
                return self._rng.integers(0, self._limits.tokens.get(tensor.name, 2), shape).astype(dtype)
            case Role.MASK:
                return self._mask(tensor, step, shape, dtype)
            case Role.ZEROS | Role.ADAPTER:
                return np.zeros(shape, dtype)
            case Role.ADAPTER_WEIGHTS:
                return self._other_adapters(tensor.name, shape, dtype)
        valid = np.minimum(step.valid, math.inf if self._rings else self._capacity(tensor.name))
        if known := from_lengths(tensor.role, np.array(step.starts), step.length, valid):
            return self._from_lengths(tensor, known, shape).astype(dtype)
        return (self._rng.normal(0, 0.5, shape) if dtype.kind == "f" else self._rng.integers(0, 2, shape)).astype(dtype)

    def _from_lengths(self, tensor: TensorRole, known: Named, shape: tuple[int, ...]) -> Array:
        if tensor.role is not Role.POSITIONS:
            return place(known, shape, tensor.axes)
        positions = known[0] % self._limits.positions.get(tensor.name, known[0].max() + 1)  # no limit: unchanged
        if len(shape) > 2:
            return place_positions(positions, shape, tensor.axes)
        return place(by_token(positions, tensor), shape, tensor.axes)

    def _other_adapters(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return values for an adapter input: 0 in slot 0, which all sequences use, and 10 in other slots."""
        if name not in self._adapters:
            self._adapters[name] = np.full(shape, 10, dtype)
            self._adapters[name][0] = 0
        return self._adapters[name]

    def _size(self, tensor: TensorRole, axis: int, sizes: Mapping[str, int]) -> int:
        meaning = tensor.axes[axis]
        if tensor.name in self._named and meaning not in sizes:
            shape = self._named[tensor.name].shape
            return shape[axis] if axis < len(shape) else 1
        if meaning not in sizes and self._unknown is not None:
            return self._unknown
        if meaning not in sizes:
            raise OptionError(
                f"cannot tell how long axis {axis} of input '{tensor.name}' {list(tensor.shape)} is; give values for "
                "this input in an .npz file (VerifyOptions.inputs), or name its role in a config"
            )
        return sizes[meaning]

    def _slice_values(self, tensor: TensorRole, shape: tuple[int, ...]) -> Array:
        values = self._named[tensor.name]
        if values.ndim != len(shape) or any(have < need for have, need in zip(values.shape, shape, strict=True)):
            raise OptionError(
                f"the values given for '{tensor.name}' have shape {list(values.shape)}, but a step needs {list(shape)}"
            )
        return values[tuple(slice(0, size) for size in shape)]

    def _capacity(self, name: str) -> int:
        """Return the rows of the smallest cache for which attention reads this input (a mask or valid lengths)."""
        rows = [t.shape[-2] for t in self._inputs if len(t.shape) > 2 and "float" in t.dtype]
        fixed = max((n for n in rows if isinstance(n, int)), default=1)
        return min((c.capacity for c in caches_under(self._plan, name) or self._plan.caches), default=fixed)

    def _mask(self, tensor: TensorRole, step: Step, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a causal mask over the cache rows that hold tokens. The mask also hides some keys at random."""
        keys = shape[-1] if shape else 1
        is_ring = any(c.mode is UpdateMode.CIRCULAR and c.capacity == keys for c in self._plan.caches)
        held, new = newest_tokens(np.array(step.starts), step.length, keys, keys if is_ring else None)
        share = 0 if self._plain else _HIDDEN_SHARE
        hidden = self._rng.random((len(step.starts), step.length, keys)) < share
        written = np.broadcast_to((held >= 0) & (held <= new[:, -1:]), hidden.shape)
        names = ("batch", "sequence", "keys")
        placed = place((written & (held <= new) & (~hidden | (held == new)), names), shape, tensor.axes)
        if dtype.kind != "f":
            return placed.astype(dtype)
        # Hidden rows that hold a token get a finite bias. If lengths or causality leave a query no other key, a softmax
        # of only the lowest values would depend on the order in which they were added.
        token = place((written, names), shape, tensor.axes)
        bias = np.where(placed, 0 if self._plain else self._rng.uniform(-1, 1, shape), _FAINT)
        # -inf, not the lowest finite number: ONNX Runtime treats the latter as -inf, but ONNX's definition adds it.
        return np.where(token, bias, -np.inf).astype(dtype)


def draw_constants(plan: CachePlan, batch: int, seed: int, *, length: int = ENCODER_TOKENS) -> dict[str, Array]:
    """Draw values for inputs that a caller gives once, such as an encoder's output for `length` tokens and its mask."""
    rng = np.random.default_rng([seed, len(plan.tensors)])
    named = {t.name for t in plan.original if t.role is OriginalRole.CONSTANT}
    drawn: dict[str, Array] = {}
    for tensor in plan.tensors:
        if tensor.io != "input" or (tensor.role is not Role.CONSTANT and tensor.name not in named):
            continue
        dims = zip(tensor.shape, tensor.axes, strict=True)
        shape = tuple(d if isinstance(d, int) else batch if axis == "batch" else length for d, axis in dims)
        dtype = numpy_dtype(tensor.dtype)
        values = rng.uniform(-1, 1, shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        if dtype.kind != "f" and values.ndim:
            values[..., 0] = 1  # a mask over an encoder's output hides a part of it, but never all
        drawn[tensor.name] = values.astype(dtype)
    return drawn


def span_inputs(plan: CachePlan, step: Step, kind: str, length: int | None = None) -> dict[str, Array]:
    """Return values for the inputs that, by their length, say how many cache rows or logits a step uses.

    `kind` is how many cache rows a step reads: "tight" (those in use), "bucketed" (the next multiple of 16) or "full".
    `length` is the number of last positions whose logits are computed; None: all.
    """
    spans = {span.name: np.arange(_span(span, step, kind)) for span in plan.spans}
    logits = plan.logits_span
    return spans if logits is None else spans | {logits.name: np.arange(step.length if length is None else length)}


def _span(span: SpanInput, step: Step, kind: str) -> int:
    tight = max(1, min(max(step.valid), span.capacity))
    return {"tight": tight, "bucketed": min(-(-tight // 16) * 16, span.capacity), "full": span.capacity}[kind]
