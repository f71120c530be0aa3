"""The seam between the decode loop and what executes a model: one small interface, two implementations.

A runner owns one buffer per cache, ``[max_batch, *physical_shape[1:]]``, and one value per row of every state, all
allocated once and zeroed, and runs steps on contiguous rows of them. It knows nothing of sequences, prompts or
sampling; the loop knows nothing of TensorRT or ONNX Runtime. Whatever must hold before a step (lengths, capacity, the
update's contract) the session has checked: a runner may rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.runtime.encoders.constants import Constants
from trt_kvcache.runtime.generation.masks import Masks

__all__ = ["Array", "HostBytes", "HostMemory", "Logits", "Runner", "StepBatch"]

Array = npt.NDArray[Any]
Logits = npt.NDArray[Any]
"""Scores of tokens in the model's own float type: converting them costs more than choosing from them."""

HostBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class HostMemory:
    """Some host memory.

    Attributes:
        data: uint8 ``[size]``, garbage at first.
        close: gives it back; nobody may use `data` then. Calling it again does nothing.
    """

    data: HostBytes
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One step: `S` new tokens for each of `R` neighbouring rows.

    Attributes:
        first_row: the step reads and writes rows ``first_row .. first_row + R - 1`` of every cache.
        tokens: int64 ``[R, S]``.
        starts: int64 ``[R]``: tokens in each row before this step, in total: not wrapped for circular caches.
        keep: logits of how many of the last positions the caller wants: 0 to S.
        constants: of each row, all of equal sizes; empty where the model takes none.
        embeds: ``[R, S, H]`` in the model's dtype: what stands for the tokens, of a model that takes embeddings.
        positions: int64 ``[R, planes, S]``, or one plane for all; None: each token stands where its cache row is.
        highest: the caller looks at so many of the highest scores of each position, and at those that equal the last of
            them; of 1 at the first alone; of 0 at all scores.
        masks: the tokens that may be among the `highest`; None: all. Best called after the step has begun.
        adapters: int64 ``[R]``, the slot of each row's adapter, 0 for none; None: all 0.
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
        """R."""
        return int(self.tokens.shape[0])

    @cached_property
    def length(self) -> int:
        """S."""
        return int(self.tokens.shape[1])

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the step, by the names that a plan has for axes."""
        tokens = self.rows * self.length
        count = max(self.keep, 1)
        return {"batch": self.rows, "sequence": self.length, "kept": count, "tokens": tokens, "batch+1": self.rows + 1}

    @cached_property
    def longest(self) -> int:
        """Most tokens in a row after this step."""
        return int(self.starts.max()) + self.length

    def split(self) -> Iterator[StepBatch]:
        """Each row as a step of its own."""
        for i in range(self.rows):
            one = slice(i, i + 1)
            yield replace(
                self, first_row=self.first_row + i, tokens=self.tokens[one], starts=self.starts[one],
                constants=self.constants[one], embeds=None if self.embeds is None else self.embeds[one],
                positions=None if self.positions is None else self.positions[one],
                adapters=None if self.adapters is None else self.adapters[one],
            )  # fmt: skip


class Runner(Protocol):
    """Executes steps, and moves cache rows. Not safe to use from several threads at once: the session sees to that."""

    @property
    def name(self) -> str:
        """Runtime and device, for people: ``"ONNX Runtime 1.31.1, CPU"``."""
        ...

    @property
    def plan(self) -> CachePlan:
        """The plan of the rewritten model that is run."""
        ...

    @property
    def home(self) -> object:
        """The GPU whose arrays may be constants of a step, see `DeviceArray.home`; None: those of the host only."""
        ...

    @property
    def max_batch(self) -> int:
        """Rows of every cache buffer."""
        ...

    @property
    def max_chunk(self) -> int:
        """Most tokens per row in one step."""
        ...

    @property
    def max_logits(self) -> int | None:
        """Most positions per row that a step gives logits of: `StepBatch.keep`; None: all."""
        ...

    @property
    def vocab(self) -> int:
        """Token ids are 0 to ``vocab - 1``."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Most tokens that a sequence may have because of the model's position tables; None where none is known."""
        ...

    def identity(self) -> str:
        """A digest of the source model's content: equal for an engine and the model that it was built from.

        See `trt_kvcache.runtime.inputs.model_identity`. May read whole files: called for saving and loading only.
        """
        ...

    def step(self, batch: StepBatch) -> Logits:
        """Run one step to its end.

        Returns:
            ``[R, keep, V]``, of the last `keep` positions, in the model's float type. Memory of the runner's:
            valid until the next call, `close` included. A runner that can choose by itself may answer a step that looks
            at few scores with `trt_kvcache.runtime.generation.greedy.CHOICE` ``[R, keep, N]``: those at least of the
            scores that the masks allow, tokens ascending. Others take no heed of masks.

        Raises:
            SessionError: it failed. Cache rows below `starts` hold what they held.
        """
        ...

    def copy_rows(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``min(tokens, capacity)`` cache rows of one row to another, in every cache; and state."""
        ...

    def zero_rows(self, row: int, start: int, stop: int) -> None:
        """Set cache rows ``start .. stop - 1`` of a batch row to 0 in every cache, as far as each cache reaches.

        State has one value for the whole text: it becomes 0 where `start` is 0, else it stays.
        """
        ...

    def read_row(self, name: str, row: int, tokens: int) -> Array:
        """A host copy of the first `tokens` cache rows of a batch row.

        Args:
            name: of the past tensor.
            row: of the batch.
            tokens: cache rows, at most the capacity.

        Returns:
            The engine's own layout: `physical_shape` without its batch axis, and `tokens` long on its sequence axis.
            State as a whole, whatever `tokens` is.
        """
        ...

    def write_row(self, name: str, row: int, data: Array) -> None:
        """Overwrite the first cache rows of a batch row with what `read_row` gave."""
        ...

    def write_adapter(self, name: str, slot: int, data: Array | None) -> None:
        """Fill one slot of an input that holds factors of adapters; steps that use the slot read it from then on.

        Args:
            name: of the input ``[slots + 1, inputs, rank]`` or ``[slots + 1, rank, outputs]``.
            slot: from 1 on; slot 0 stays zero.
            data: in the input's dtype, of this rank or a smaller one: what is left of the slot becomes 0. None: all.
        """
        ...

    def host_memory(self, size: int) -> HostMemory:
        """Host memory for `pack_rows`, page-locked where the caches lie on a GPU.

        Raises:
            SessionError: there is none.
        """
        ...

    def pack_rows(self, row: int, start: int, stop: int, into: HostBytes) -> None:
        """Copy what tokens ``start .. stop - 1`` left in one batch row to host memory, and wait for it.

        Args:
            row: of the batch.
            start: first token; state goes along with the first of all.
            stop: after the last token.
            into: of `host_memory`; takes the buffers one after the other, each as a contiguous array of
                `Carried.range_shape`.
        """
        ...

    def unpack_rows(self, row: int, start: int, stop: int, data: HostBytes) -> None:
        """Write to a batch row what `pack_rows` gave for these tokens."""
        ...

    def view(self, name: str) -> Any:
        """The whole buffer ``[max_batch, *physical_shape[1:]]`` of one cache without a copy.

        An object with ``__dlpack__`` on the device where the cache lies, of a bfloat16 or float8 cache with its bits as
        unsigned integers; a NumPy array on the CPU.
        """
        ...

    def close(self) -> None:
        """Free everything. Calling it again does nothing."""
        ...
