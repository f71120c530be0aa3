"""The interface of runners, which execute a model for the decode loop: one with TensorRT, one with ONNX Runtime.

A runner owns one buffer per cache, ``[max_batch, *physical_shape[1:]]``, and one value per row of every state, and runs
steps on contiguous rows of them. It knows nothing of sequences, prompts or sampling. The session checks every step
before it runs (lengths, capacity, rules of cache updates): a runner may rely on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.input_values import axis_sizes
from trt_kvcache.runtime.encoders.constants import Constants
from trt_kvcache.runtime.generation.token_masks import Masks

Array = npt.NDArray[Any]
Logits = npt.NDArray[Any]
"""Scores of tokens in the model's own float type: converting them costs more than choosing from them."""

HostBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class HostMemory:
    """Memory of the host that a runner allocated.

    Attributes:
        data: uint8 ``[size]``, not initialized.
        close: frees the memory; afterwards `data` must not be used. Calling it again does nothing.
    """

    data: HostBytes
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The inputs of one step: S new tokens for each of R neighboring batch rows.

    Attributes:
        first_row: the step reads and writes batch rows ``first_row .. first_row + R - 1`` of every cache.
        tokens: int64 ``[R, S]``.
        starts: int64 ``[R]``: total number of tokens in each row before this step, not wrapped for circular caches.
        keep: number of last positions whose logits the caller wants: 0 to S.
        constants: for each row, the inputs that stay the same in all steps, of equal sizes in all rows; empty if the
            model has no such inputs.
        embeds: ``[R, S, H]`` in the model's dtype: embeddings of the tokens, for a model that takes embeddings.
        positions: int64 ``[R, planes, S]`` (planes: positions per token; 1 if they are equal); None: the position of
            each token is its cache row.
        highest: how many of the highest scores of each position the caller needs, with all scores that equal the
            lowest of them. 1: only one score (of equal ones, that of the lowest token id). 0: all scores.
        masks: function that returns bit masks of the tokens that may be among the `highest`; None: all tokens. A runner
            should call it after the step has started, so that step and function run at the same time.
        adapters: int64 ``[R]``, the slot of each row's adapter, 0 for no adapter; None: all 0.
    """

    first_row: int
    tokens: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    keep: int = 1
    constants: tuple[Constants, ...] = ()
    embeds: Array | None = None
    positions: npt.NDArray[np.int64] | None = None
    highest: int = 0
    masks: Masks | None = None
    adapters: npt.NDArray[np.int64] | None = None

    @cached_property
    def rows(self) -> int:
        """Number of batch rows in the step, R."""
        return int(self.tokens.shape[0])

    @cached_property
    def length(self) -> int:
        """Number of new tokens in each batch row, S."""
        return int(self.tokens.shape[1])

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the step's axes, by their names in a plan: ``{"batch": R, "sequence": S, ...}``."""
        return axis_sizes(self.rows, self.length) | {"kept": max(self.keep, 1)}

    @cached_property
    def longest(self) -> int:
        """The largest number of tokens that any batch row holds after this step."""
        return int(self.starts.max()) + self.length

    def split(self) -> Iterator[StepBatch]:
        """Yield one step for each batch row alone, in order."""
        for i in range(self.rows):
            one = slice(i, i + 1)
            yield replace(
                self, first_row=self.first_row + i, tokens=self.tokens[one], starts=self.starts[one],
                constants=self.constants[one], embeds=None if self.embeds is None else self.embeds[one],
                positions=None if self.positions is None else self.positions[one],
                adapters=None if self.adapters is None else self.adapters[one],
            )  # fmt: skip


class Runner(Protocol):
    """Executes steps, and moves cache rows. Not thread-safe: the session's lock ensures one thread at a time.

    Attributes:
        name: runtime and device as text: ``"ONNX Runtime 1.31.1, CPU"``.
        home: the GPU on which constants of a step may lie, see `DeviceArray.home`; None: only host arrays.
        max_batch: batch rows of every cache buffer.
        max_chunk: most tokens per row in one step.
        max_logits: most positions per row whose logits a step returns (`StepBatch.keep`); None: all.
        vocab: size of the vocabulary: token ids are 0 to ``vocab - 1``.
        max_positions: most tokens of a sequence that the model's position tables allow; None if no limit is known.
    """

    name: str
    plan: CachePlan
    home: object
    max_batch: int
    max_chunk: int
    max_logits: int | None
    vocab: int
    max_positions: int | None

    def identity(self) -> str:
        """Return a digest of the source model's content, equal for a model and its engines. May read whole files."""

    def step(self, batch: StepBatch) -> Logits:
        """Run one step to its end. Raises `SessionError` if it failed; cache rows below `starts` are unchanged then.

        Returns:
            Logits ``[R, keep, V]`` of the last `keep` positions, in the model's float type. The runner owns this
            memory; it is valid until the next call, including `close`. If the step needs few scores, a runner that
            chooses tokens itself may return `trt_kvcache.runtime.generation.sampling.CHOICE` ``[R, keep, N]`` instead:
            at least the needed scores of allowed tokens, in ascending order of tokens. Other runners ignore masks.
        """

    def copy_rows(self, source: int, target: int, tokens: int) -> None:
        """Copy all state, and the first `tokens` cache rows of each cache, from one batch row to another."""

    def zero_rows(self, row: int, start: int, stop: int) -> None:
        """Set cache rows ``start .. stop - 1`` of a batch row to 0 in every cache; state becomes 0 if `start` is 0."""

    def read_row(self, name: str, row: int, tokens: int) -> Array:
        """Return a host copy of the first `tokens` cache rows of a batch row of one past tensor.

        Returns:
            An array in the engine's layout: `physical_shape` without its batch axis, with `tokens` entries on its
            sequence axis. State is returned whole.
        """

    def write_row(self, name: str, row: int, data: Array) -> None:
        """Overwrite the first cache rows of a batch row with data from `read_row`."""

    def write_adapter(self, name: str, slot: int, data: Array | None) -> None:
        """Write matrix A or B of a LoRA adapter to one adapter slot (from 1 on) of a model input; slot 0 stays zero.

        The input is ``[slots + 1, inputs, rank]`` or ``[slots + 1, rank, outputs]``. The matrix has the input's dtype;
        its rank may be smaller. The rest of the slot becomes 0; if `data` is None, the whole slot.
        """

    def host_memory(self, size: int) -> HostMemory:
        """Return host memory for `pack_rows`, page-locked for a GPU. Raises `SessionError` if too little is free."""

    def pack_rows(self, row: int, start: int, stop: int, into: HostBytes) -> None:
        """Copy the cache rows of tokens ``start .. stop - 1`` of one batch row to host memory, and wait for the end.

        If `start` is 0, the state is copied, too. `into` (from `host_memory`) gets the buffers one after the other,
        each as a contiguous array ``[planes, tokens, width]`` (a plane is, for example, a head), see `Carried`.
        """

    def unpack_rows(self, row: int, start: int, stop: int, data: HostBytes) -> None:
        """Write data that `pack_rows` copied for the same range of tokens to a batch row."""

    def view(self, name: str) -> Any:
        """Return the whole buffer ``[max_batch, *physical_shape[1:]]`` of one cache without a copy.

        On the CPU, it is a NumPy array. On a GPU, it is an object with ``__dlpack__``; a bfloat16 or float8 cache comes
        as unsigned integers with the same bits.
        """

    def close(self) -> None:
        """Free all memory. Calling it again does nothing."""
