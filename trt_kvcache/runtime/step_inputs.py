"""Computes the inputs of a step except caches, reads its logits, and pads it to a model's fixed sizes. Pure NumPy.

A model whose batch or step length is fixed computes all of its rows and tokens in each step. Afterwards, batch rows
without a sequence get their old contents back. Padding tokens lie after those of the step, where causal attention hides
them; their cache rows are zeroed. The results of real rows and tokens are the same as without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
from blake3 import blake3

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import OptionError, SessionError, UnsupportedModelError
from trt_kvcache.files import FileIdentity
from trt_kvcache.importer.cache_plan import CachePlan, CacheUpdate, Role, TensorRole, UpdateForm, UpdateMode
from trt_kvcache.input_values import (
    axes_with_planes,
    by_token,
    caches_under,
    fixed_length,
    fixed_rows,
    from_lengths,
    named_axes,
    newest_tokens,
    place,
)
from trt_kvcache.runtime.buffers import carried_buffers, carried_caches, filled_up
from trt_kvcache.runtime.encoders.constants import ConstantInputs
from trt_kvcache.runtime.generation.token_masks import Mask, all_tokens
from trt_kvcache.runtime.runner import Array, Runner, StepBatch

SPAN_BUCKET = 256
"""The number of cache rows that a step reads is a multiple of this, so that one CUDA graph serves many steps."""

_EXTERNAL = (Role.CACHE, Role.STATE, Role.CONSTANT, Role.SPAN, Role.ADAPTER_WEIGHTS)  # not filled by `StepInputs.fill`
_SIZES = frozenset({"batch", "sequence", "tokens", "batch+1", "keys", "span"})


def model_identity(files: Iterable[FileIdentity]) -> str:
    """Return a digest (hex) of a model: of the contents of its file and its external data; names do not matter."""
    return blake3("\n".join(sorted(f.blake3 for f in files)).encode()).hexdigest()


class StepLogits:
    """Finds a model's output of logits, and reads the logits of a step from its values.

    Attributes:
        known: True if the model states the size of the vocabulary. If False, call `settle` first to set the size.
        last_only: True if the model returns logits of the last position of each row only.

    Raises:
        UnsupportedModelError: the model has no logits, or their shape is not understood.
    """

    def __init__(self, plan: CachePlan) -> None:
        tensor = plan.tensor(Role.LOGITS, "output")
        if tensor is None:
            outputs = [t for t in plan.tensors if t.io == "output" and t.role in (Role.LOGITS, Role.OTHER)]
            names = ", ".join(f"'{t.name}' {t.dtype} {list(t.shape)}" for t in outputs) or "caches alone"
            raise UnsupportedModelError(
                f"no output has the role 'logits' (outputs: {names}), but a session needs the scores of the whole "
                "vocabulary to choose tokens: export the model with logits, or name the output of logits in a "
                "config (--config)"
            )
        tensor = named_axes(tensor, plan)
        self.name, self.dtype, self._tensor = tensor.name, array_dtype(tensor.dtype), tensor
        self._what = what = f"logits '{tensor.name}' {list(tensor.shape)}"
        size = tensor.shape[-1] if tensor.shape else "?"
        for dim, axis in zip(tensor.shape[:-1], tensor.axes[:-1], strict=True):
            if axis in ("batch", "sequence", "kept", "tokens") or dim == 1:
                continue
            if isinstance(dim, str):
                raise UnsupportedModelError(f"{what}: the size '{dim}' is unknown; fix it in the model")
            raise UnsupportedModelError(
                f"{what} hold {dim} vectors of scores for each position, as models with several codebooks do, but a "
                "session chooses one token from one vector: export logits [B, S, V]"
            )
        self.known = isinstance(size, int)
        self._vocab = size if isinstance(size, int) else 0
        tokens = plan.tensor(Role.TOKENS)
        one_at_a_time = tokens is not None and not {"sequence", "tokens"} & set(named_axes(tokens, plan).axes)
        self._counted = "kept" in tensor.axes
        self.last_only = not one_at_a_time and not {"sequence", "kept", "tokens"} & set(tensor.axes)

    @property
    def vocab(self) -> int:
        """Size of the vocabulary, V, which is the size of the logits' last axis."""
        if not self._vocab:
            raise UnsupportedModelError(
                f"{self._what}: the size of the vocabulary is unknown; export the model with a "
                "constant last axis of the logits"
            )
        return self._vocab

    def settle(self, vocab: int) -> None:
        """Set the size of the vocabulary if the model leaves it open; else do nothing."""
        self._vocab = self._vocab or vocab

    def shape(self, batch: StepBatch) -> tuple[int, ...]:
        """Return the shape of the logits output in this step."""
        dims = zip(self._tensor.shape[:-1], self._tensor.axes[:-1], strict=True)
        return (*(d if isinstance(d, int) else batch.sizes[a] for d, a in dims), self.vocab)

    def last(self, output: Array, batch: StepBatch) -> Array:
        """Return the logits ``[R, keep, V]`` of the last `keep` positions of a step's output. Errors: see `check`."""
        positions = self.check(batch)
        return output.reshape(batch.rows, positions, self.vocab)[:, positions - batch.keep :]

    def check(self, batch: StepBatch) -> int:
        """Return the number of positions with logits in a step. Raises `SessionError` if `batch` asks for more."""
        positions = 1 if self.last_only else batch.sizes["kept"] if self._counted else batch.length
        if batch.keep > positions:
            raise SessionError(
                f"the model gives the logits of the last position only (output '{self.name}'), but the logits of "
                f"the last {batch.keep} positions are needed; export the model with logits of all positions"
            )
        return positions


class StepInputs:
    """Computes the inputs of a step (tokens, positions, write indices, masks, ...) by their roles in the plan.

    If a token has several positions (M-RoPE: time, height, width), all get the same number (right for text), unless the
    step has its own. Write indices are not wrapped for circular caches: the rewritten graph applies the modulo. Valid
    lengths end at the capacity. Masks hide cache rows that are not written yet and, within a step, later tokens.

    Attributes:
        uniform: True if an input lacks a batch axis, although its values differ between rows. Then all rows of a step
            must start at one position.
        max_rows: most rows in a step; None if the model's batch is dynamic.
        fixed_rows: the model's batch size, if it is fixed and above 1; else None.
        constants: the inputs that stay the same in all steps of a sequence.
        embedded: the input of embeddings, for a model that takes embeddings instead of tokens.
        fixed_length: number of tokens per row and step, if the model fixes it; else None.

    Args:
        plan: plan of the rewritten model.
        bucket: the number of cache rows that a step reads, and the length of a dynamic mask, are rounded up to a
            multiple of `bucket`, or to the capacity if that is less.

    Raises:
        UnsupportedModelError: the model has an input that the runtime cannot fill, or has no caches, tokens or logits.
    """

    def __init__(self, plan: CachePlan, bucket: int = SPAN_BUCKET) -> None:
        self._bucket, self._plan, self._caches = bucket, plan, carried_caches(plan)
        self._spans = {s.name: s for s in plan.spans}
        self._logits_span = () if plan.logits_span is None else (plan.logits_span.name,)
        filled = [t for t in plan.tensors if t.io == "input" and t.role not in _EXTERNAL]
        self._inputs = tuple(named_axes(t, plan) for t in filled)
        self._check()
        self._reach = {t.name: self._capacity_under(t) for t in self._inputs}
        self._largest = max(c.capacity for c in self._caches)
        self._dtypes = {t.name: array_dtype(t.dtype) for t in self._inputs}
        per_row = (Role.POSITIONS, Role.WRITE_INDICES, Role.VALID_LENGTHS, Role.MASK)
        self.uniform = any(t.role in per_row and not {"batch", "tokens"} & set(t.axes) for t in self._inputs)
        self.constants = ConstantInputs(plan)
        self.embedded = next((t for t in self._inputs if t.embedded), None)
        self.max_rows = fixed_rows(plan)
        self.fixed_rows = self.max_rows if self.max_rows != 1 else None
        self.fixed_length = fixed_length(plan)

    def no_embeds(self, tokens: Array) -> Array | None:
        """Return zeros as embeddings of tokens ``[R, S]``, for a step without use; None if the model takes ids."""
        if self.embedded is None:
            return None
        return np.zeros((*tokens.shape, self.embedded.shape[-1]), self._dtypes[self.embedded.name])

    def batch(self, asked: int | None) -> int | None:
        """Return the number of batch rows: the model's, or else `asked`. `OptionError` if both are given and differ."""
        if self.fixed_rows is not None and asked not in (None, self.fixed_rows):
            raise OptionError(
                f"max_batch is {asked}, but this model computes {self.fixed_rows} sequences in every step: leave it "
                "out, or export the model with a dynamic batch"
            )
        return asked if self.fixed_rows is None else self.fixed_rows

    def positions(self, rows: int | None) -> int | None:
        """Return the most tokens of a sequence, without padding, that a position table of `rows` entries allows."""
        return None if rows is None else rows - max(map(filled_up, self._caches))

    def chunk(self, asked: int | None, default: int) -> int:
        """Return the largest number of tokens per row and step: `asked`, or `default` if that is None.

        The model and its smallest cache limit the result. Raises `OptionError` if `asked` is more than they allow.
        """
        bounds = [c.contract.max_update_length for c in self._caches if c.contract]
        allowed = min([*(c.capacity for c in self._caches), *(b for b in bounds if b is not None)])
        allowed = allowed if self.fixed_length is None else self.fixed_length
        if self._plan.prefill_in_one_step:
            default = allowed
        if asked is not None and asked > allowed:
            raise OptionError(f"max_chunk is {asked}, but this model takes at most {allowed} tokens per update")
        return min(default, allowed) if asked is None else asked

    def signature(self, batch: StepBatch) -> tuple[int, ...]:
        """Return the sizes that determine all input shapes of a step, such as batch rows and tokens per row."""
        sizes = batch.constants[0].sizes if batch.constants else ()
        positions = (batch.sizes["kept"],) if self._logits_span else ()
        return batch.rows, batch.length, self._rows(batch.longest, self._largest), *positions, *sizes

    def span_sizes(self, batch: StepBatch) -> dict[str, int]:
        """Return the length of each span input: the number of cache rows that the step reads."""
        rows = {name: self._rows(batch.longest, span.capacity) for name, span in self._spans.items()}
        return rows | dict.fromkeys(self._logits_span, batch.sizes["kept"])

    def arrays(self, batch: StepBatch) -> dict[str, Array]:
        """Return inputs by name, C-contiguous, in the model's dtypes: all but caches, state, constants and spans."""
        arrays = {t.name: np.empty(self._shape(t, batch), self._dtypes[t.name]) for t in self._inputs}
        self.fill(batch, arrays)
        return arrays

    def fill(self, batch: StepBatch, into: Mapping[str, Array]) -> None:
        """Write the values that ``arrays()`` returns into existing arrays of the right shapes and dtypes."""
        for tensor in self._inputs:
            target = into[tensor.name]
            target[...] = self._values(tensor, batch, target.shape)

    def shapes(self, batch: StepBatch) -> dict[str, tuple[int, ...]]:
        """Return shapes of the inputs in `arrays`, spans (cache rows to read) and constants; compute no values."""
        filled = {t.name: self._shape(t, batch) for t in self._inputs}
        given = batch.constants[0].arrays if batch.constants else {}
        constants = {name: (batch.rows, *array.shape[1:]) for name, array in given.items()}
        return filled | constants | {name: (size,) for name, size in self.span_sizes(batch).items()}

    def _values(self, tensor: TensorRole, batch: StepBatch, shape: tuple[int, ...]) -> Array:
        """Return the values of one input of the shape `shape`."""
        role, dtype = tensor.role, self._dtypes[tensor.name]
        if tensor.embedded:
            return _embeds(batch, tensor, shape)
        if role is Role.TOKENS:
            return place(by_token(batch.tokens, tensor), shape, tensor.axes)
        if role is Role.POSITIONS and batch.positions is not None:
            return _positions(batch.positions, tensor, shape)
        if role is Role.ADAPTER and batch.adapters is not None:
            return place((batch.adapters, ("batch",)), shape, tensor.axes)
        if role in (Role.ZEROS, Role.ADAPTER):
            return np.zeros(shape, dtype)
        if role is Role.MASK:
            circular = any(c.mode is UpdateMode.CIRCULAR for c in self._readers(tensor))
            ring = self._reach[tensor.name] if circular else None
            held, new = newest_tokens(batch.starts, batch.length, shape[-1], ring)
            visible = (held >= 0) & (held <= new)
            if dtype.kind not in "iub":  # a bias that is added to the scores: finite, because all keys may be hidden
                visible = np.where(visible, 0.0, float(ml_dtypes.finfo(dtype).min))  # type: ignore[no-untyped-call]
            return place((visible, ("batch", "sequence", "keys")), shape, tensor.axes)
        valid = np.minimum(batch.starts + batch.length, self._reach[tensor.name])
        known = from_lengths(role, batch.starts, batch.length, valid)
        assert known, role  # `_check` refuses other roles
        return place(by_token(known[0], tensor) if role is Role.POSITIONS else known, shape, tensor.axes)

    def _shape(self, tensor: TensorRole, batch: StepBatch) -> tuple[int, ...]:
        known = batch.sizes | {"keys": self._rows(batch.longest, self._reach[tensor.name])}
        return tuple(d if isinstance(d, int) else known[a] for d, a in zip(tensor.shape, tensor.axes, strict=True))

    def _rows(self, longest: int, capacity: int) -> int:
        return min(-(-longest // self._bucket) * self._bucket, capacity)

    def _readers(self, tensor: TensorRole) -> list[CacheUpdate]:
        """Return the caches that attention reads with a lengths or mask input; all caches if the plan does not say."""
        return [c for c in caches_under(self._plan, tensor.name) if c.carried] or list(self._caches)

    def _capacity_under(self, tensor: TensorRole) -> int:
        readers = self._readers(tensor)
        capacity = min(c.capacity for c in readers)
        if tensor.role is not Role.MASK:
            return capacity
        if len({(c.capacity, c.mode) for c in readers}) > 1:
            kinds = ", ".join(f"'{c.past}' ({c.mode.value}, {c.capacity} rows)" for c in readers[:4])
            raise UnsupportedModelError(
                f"one mask input, '{tensor.name}', serves caches of different kinds: {kinds}; the runtime fills a mask "
                "for one kind of cache: export the model with a mask for each kind"
            )
        keys = tensor.shape[-1] if tensor.shape else 0
        if isinstance(keys, int) and keys != capacity:
            raise UnsupportedModelError(
                f"mask input '{tensor.name}' {list(tensor.shape)} covers {keys} keys, but the caches that it masks "
                f"hold {capacity}; export the model with a mask as long as the cache"
            )
        return capacity

    def _check(self) -> None:
        if not self._caches:
            raise UnsupportedModelError("the model keeps no KV cache from step to step, so it cannot decode")
        carried = {c.past for c in self._caches}
        for tensor in self._plan.tensors:
            if tensor.io == "input" and tensor.role is Role.CACHE and tensor.name not in carried:
                raise UnsupportedModelError(
                    f"input '{tensor.name}' is a cache that no update writes; the runtime can run a model only if "
                    "it writes all of its caches itself"
                )
        if self._plan.tensor(Role.TOKENS) is None:
            raise UnsupportedModelError(
                "no input has the role 'tokens', so there is nowhere to put token ids; name it in a config (--config)"
            )
        masks = [f"'{t.name}'" for t in self._inputs if t.role is Role.MASK]
        if len(masks) > 1:
            raise UnsupportedModelError(
                f"the model takes several masks ({', '.join(masks)}), and it does not say which window each mask "
                "stands for; the runtime can fill only one causal mask: export a model that makes its masks itself"
            )
        for tensor in self._inputs:
            self._check_input(tensor)
        for cache in self._caches:
            self._check_cache(cache)

    def _check_input(self, tensor: TensorRole) -> None:
        what = f"input '{tensor.name}' ({tensor.dtype} {list(tensor.shape)})"
        if tensor.role is Role.OTHER and "lora_" in tensor.name.lower():
            raise UnsupportedModelError(
                f"{what} takes the weights of an adapter for all sequences of a step, as in onnxruntime-genai, which "
                "is not supported: export the model without adapters, and give adapters to the session, where each "
                "sequence chooses its own"
            )
        if tensor.role in (Role.OTHER, Role.LOGITS):
            from trt_kvcache.importer.interface import example

            # A value for each token of a step is not a constant of the sequence.
            by_row = tensor.axes[:1] == ("batch",) and not {"sequence", "tokens"} & set(tensor.axes)
            sized = all(isinstance(d, int) or axis in _SIZES for d, axis in zip(tensor.shape, tensor.axes, strict=True))
            role = example({Role.CONSTANT if by_row else Role.ZEROS: [tensor.name]})
            named = f"name the input's role with --config, a YAML file such as: {role}; or " if by_row or sized else ""
            raise UnsupportedModelError(
                f"{what} has no known role in decoding, so the runtime cannot fill it; it can fill tokens, "
                "positions, write indices, lengths and masks, zeros, and constants given with a sequence: "
                f"{named}export the model without it, or with a constant in its place"
            )
        if tensor.role is Role.TOKENS and not tensor.embedded and any(size != 1 for size in tensor.shape[2:]):
            raise UnsupportedModelError(
                f"{what} takes several ids for each token, as models with several codebooks do, but a session has "
                "one id: export only the part of the model after the sum of their embeddings, [B, S, D]"
            )
        for size, axis in zip(tensor.shape, tensor.axes, strict=True):
            if isinstance(size, str) and axis not in _SIZES:
                raise UnsupportedModelError(f"{what}: its size '{size}' is unknown; fix it in the model")
        plain = tensor.role in (Role.MASK, Role.ZEROS) or tensor.embedded
        if not plain and array_dtype(tensor.dtype).kind not in "iu":
            raise UnsupportedModelError(
                f"{what} is the model's {tensor.role.value}, but the runtime fills it with integers; export a model "
                "that takes positions and lengths as integers"
            )

    def _check_cache(self, cache: CacheUpdate) -> None:
        if self._plan.prefill_in_one_step and isinstance(cache.update_length, int) and cache.update_length > 1:
            raise UnsupportedModelError(
                f"the model's number of tokens per step is fixed at {cache.update_length}, and tokens of one step see "
                "each other, so padding tokens of a shorter step would change its other tokens: export the model "
                "with a dynamic number of tokens, or with a causal mask"
            )
        if cache.write_indices is None:
            raise UnsupportedModelError(
                f"cache '{cache.past}' is always written from its first row on (its update has no write indices), so "
                "it cannot grow from step to step; export the model with write indices"
            )
        if not isinstance(cache.update_length, int) or cache.update_length == 1:
            return
        packed = " of packed updates" if cache.form is UpdateForm.PACKED_NHD else ""
        if cache.mode is UpdateMode.CIRCULAR or packed or self._plan.states:
            what = "state" if self._plan.states else f"{cache.mode.value} cache '{cache.past}'{packed}"
            raise UnsupportedModelError(
                f"the model's number of tokens per step is fixed at {cache.update_length}, and padding tokens would "
                f"change the contents of its {what}: export the model with a dynamic number of tokens, or with 1"
            )
        if StepLogits(self._plan).last_only:
            raise UnsupportedModelError(
                f"the model's number of tokens per step is fixed at {cache.update_length}, and it returns only the "
                "logits of the last token, so a step of fewer tokens has no logits. Export the model with logits "
                "of all positions, or with a dynamic number of tokens"
            )


def _embeds(batch: StepBatch, tensor: TensorRole, shape: tuple[int, ...]) -> Array:
    """Return the step's embeddings in the input's shape; raises `SessionError` if there are none."""
    if batch.embeds is None:
        raise SessionError(
            f"the model takes embeddings (input '{tensor.name}'), but the step has only token ids; a session looks "
            "up embeddings: DecodeSession(runner, embeddings=...)"
        )
    values, names = by_token(batch.embeds, tensor)
    return place((values, (*names, "width")), shape, (*tensor.axes[:-1], "width"))


def _positions(values: Array, tensor: TensorRole, shape: tuple[int, ...]) -> Array:
    """Return the caller's positions ``[R, planes, S]`` (planes: positions per token) in the input's shape."""
    if len(tensor.shape) < 3:
        return place(by_token(values[:, 0], tensor), shape, tensor.axes)
    if "tokens" not in tensor.axes:
        return place((values, ("batch", "planes", "sequence")), shape, axes_with_planes(tensor))
    flat = values.transpose(1, 0, 2).reshape(values.shape[1], -1)
    return place((flat, ("planes", "tokens")), shape, axes_with_planes(tensor))


def why_no_session(plan: CachePlan) -> str:
    """Return why no session can run a decoder; empty if one can, or if the model is not a decoder."""
    if plan.tensor(Role.TOKENS) is None or not plan.caches:
        return ""
    try:
        StepInputs(plan)
        StepLogits(plan)
    except UnsupportedModelError as error:
        return error.message
    return ""


def run_whole(runner: Runner, inputs: StepInputs, batch: StepBatch, run: Callable[[StepBatch], Array]) -> Array:
    """Pad a step to the model's fixed sizes, and run it; return logits ``[R, keep, V]`` without the padding."""
    rows, length = inputs.fixed_rows or batch.rows, inputs.fixed_length or batch.length
    if (rows, length) == (batch.rows, batch.length):
        return run(batch)
    first = batch.first_row if rows == batch.rows else 0
    taking_part = slice(batch.first_row - first, batch.first_row - first + batch.rows)
    tokens = np.zeros((rows, length), np.int64)
    tokens[taking_part, : batch.length] = batch.tokens
    starts = np.full(rows, batch.starts[0] if inputs.uniform else 0)
    starts[taking_part] = batch.starts
    constants = list(batch.constants[:1] * rows)
    constants[taking_part] = batch.constants
    keep = batch.keep and length - batch.length + batch.keep  # padding comes after the tokens
    beside = (taking_part.start, rows - taking_part.stop), (0, length - batch.length)
    embeds, positions = batch.embeds, batch.positions
    if embeds is not None:
        embeds = np.pad(embeds, (*beside, (0, 0)))
    # Padding copies the positions of a real token: a model may take one position for all rows.
    if positions is not None:
        positions = np.pad(positions, (beside[0], (0, 0), beside[1]), "edge")
    adapters = None if batch.adapters is None else np.pad(batch.adapters, beside[0])

    def whole_masks(words: int) -> Mask:
        assert batch.masks is not None
        masks = all_tokens((rows, keep, words))
        masks[taking_part, : batch.keep] = batch.masks(words)
        return masks

    whole = replace(
        batch, first_row=first, tokens=tokens, starts=starts, constants=tuple(constants), keep=keep, embeds=embeds,
        positions=positions, adapters=adapters, masks=batch.masks and whole_masks,
    )  # fmt: skip
    idle = [row for row in range(first, first + rows) if not 0 <= row - batch.first_row < batch.rows]
    names = [buffer.past for buffer in carried_buffers(runner.plan)]
    saved = [(n, row, runner.read_row(n, row, int(starts[row - first]) + length)) for n in names for row in idle]
    try:
        logits = run(whole)
    finally:
        for name, row, data in saved:
            runner.write_row(name, row, data)
        if length > batch.length:
            for i, start in enumerate(batch.starts):
                runner.zero_rows(batch.first_row + i, int(start) + batch.length, int(start) + length)
    return logits[taking_part, : batch.keep]
