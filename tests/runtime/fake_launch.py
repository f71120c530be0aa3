"""Kernels of the fake GPU: what the runner calls of ``cuda.core`` to load and launch one, and what numpy makes of it.

What a launch reads and writes lies within one allocation; counts and keys are zeros before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.plugins.choice import CANDIDATES, CHOICE_DTYPES, KERNELS, SETS
from trt_kvcache.plugins.spec import THREADS


class ObjectCode:
    """``ObjectCode`` of ``cuda.core``."""

    def __init__(self, module: bytes, name: str) -> None:
        self._module, self._name = module, name

    @classmethod
    def from_cubin(cls, module: bytes, *, name: str) -> ObjectCode:
        return cls(module, name)

    def get_kernel(self, name: str) -> Kernel:
        if not self._module.startswith(b"\x7fELF") or name.encode() not in self._module:
            raise RuntimeError(f"CUDA_ERROR_NOT_FOUND: {name}")
        assert name in KERNELS
        return Kernel(name, np.dtype(CHOICE_DTYPES[self._name.removeprefix("choice_")]))


class Kernel:
    """``Kernel`` of ``cuda.core``."""

    def __init__(self, name: str, dtype: Any) -> None:
        self._name, self._dtype = name, dtype


class LaunchConfig:
    """``LaunchConfig`` of ``cuda.core``."""

    def __init__(self, *, grid: int, block: int) -> None:
        self.grid, self.block = grid, block


def launch(stream: Any, config: LaunchConfig, kernel: Kernel, *arguments: Any) -> None:
    """``launch`` of ``cuda.core``: Python's integers are addresses, NumPy's are numbers."""
    machine = stream._machine
    addresses = 4 if kernel._name == "candidates" else 3
    assert [type(x) for x in arguments] == [*[int] * addresses, np.int32, np.int32, np.int32, np.int64]
    assert config.block == THREADS
    if machine.no_launches:
        raise RuntimeError(machine.no_launches)
    machine.launched += 1
    sizes = map(int, arguments[addresses:])
    work = Launch(machine, kernel._dtype, config.grid, arguments[:addresses], *sizes)
    machine.put(stream.handle, getattr(work, kernel._name))


@dataclass(frozen=True)
class Launch:
    """One launch, by the name of its kernel."""

    machine: Any
    dtype: Any
    grid: int
    addresses: tuple[int, ...]
    keep: int
    vocab: int
    blocks: int
    pitch: int

    @property
    def count(self) -> int:
        return self.grid // self.blocks

    def rows(self) -> Iterator[Any]:
        """The keys of each row, as unsigned numbers."""
        size = self.vocab * self.dtype.itemsize
        sign = 1 << 8 * self.dtype.itemsize - 1
        for i in range(self.count):
            address = self.addresses[0] + i // self.keep * self.pitch + i % self.keep * size
            bits = self.machine.array(address, size, "logits")
            scores = bits.view(self.dtype).astype(np.float32)
            distance = (bits.view(f"u{self.dtype.itemsize}") & (sign - 1)).astype(np.int64)
            order = np.where(np.isnan(scores), 2 * sign - 1, np.where(scores < 0, sign - distance, sign + distance))
            tokens = np.arange(self.vocab) ^ self.machine.wrong_tokens
            keys = order.astype(np.uint64) << 32 | (~tokens.astype(np.uint64) & 0xFFFFFFFF)
            if self.addresses[1]:
                words = -(-self.vocab // 32)
                mask = self.machine.array(self.addresses[1] + 4 * words * i, 4 * words, "a mask")
                allowed = np.unpackbits(mask, bitorder="little")[: self.vocab].astype(bool)
                keys[~(allowed | np.isnan(scores) | (scores == np.inf))] = 0
            yield keys

    def best_token(self) -> None:
        out = self.machine.array(self.addresses[2], 8 * self.count, "the best keys").view(np.uint64)
        assert not out.any()
        for i, keys in enumerate(self.rows()):
            out[i] = keys.max() or 0xFFFFFFFF

    def set_maxima(self) -> None:
        sets = self.blocks * THREADS // 32 * SETS
        out = self.machine.array(self.addresses[2], 4 * sets * self.count, "maxima").view(np.uint32)
        for row, keys in zip(out.reshape(self.count, sets), self.rows(), strict=True):
            row[:] = 0
            np.maximum.at(row, np.arange(self.vocab) * 7 % sets, (keys >> 32).astype(np.uint32))

    def candidates(self) -> None:
        least = self.machine.array(self.addresses[2], 4 * self.count, "the least scores").view(np.uint32)
        out = self.machine.array(self.addresses[3], 8 * (1 + CANDIDATES) * self.count, "lists").view(np.uint64)
        for row, keys, score in zip(out.reshape(self.count, -1), self.rows(), least, strict=True):
            assert row[0] == 0
            found = keys[(keys >> 32 >= score) & (keys > 0)][::-1]
            row[0] = found.size - self.machine.missing_candidates
            row[1 : 1 + min(found.size, CANDIDATES)] = found[:CANDIDATES]
