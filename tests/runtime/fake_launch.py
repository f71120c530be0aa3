"""Kernels of the fake GPU: what the runner calls of ``cuda.core`` to load and launch one, and what numpy makes of it.

A kernel is known by its name. What a launch reads and writes lies within one allocation, and keys are zeros before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.plugins.choice import CHOICE_DTYPES, choice_name
from trt_kvcache.plugins.spec import THREADS


class ObjectCode:
    """Of ``cuda.core``."""

    def __init__(self, module: bytes) -> None:
        self._module = module

    @classmethod
    def from_cubin(cls, module: bytes, *, name: str) -> ObjectCode:
        return cls(module)

    def get_kernel(self, name: str) -> Kernel:
        if not self._module.startswith(b"\x7fELF") or name.encode() not in self._module:
            raise RuntimeError(f"CUDA_ERROR_NOT_FOUND: {name}")
        return Kernel(name)


class Kernel:
    """Of ``cuda.core``."""

    def __init__(self, name: str) -> None:
        self._name = name


class LaunchConfig:
    """Of ``cuda.core``."""

    def __init__(self, *, grid: int, block: int) -> None:
        self.grid, self.block = grid, block


def launch(stream: Any, config: LaunchConfig, kernel: Kernel, *arguments: Any) -> None:
    """Of ``cuda.core``: Python's integers are addresses, NumPy's are numbers."""
    machine = stream._machine
    assert [type(x) for x in arguments] == [int, int, np.int32, np.int32, np.int32, np.int64]
    assert config.block == THREADS
    if machine.no_launches:
        raise RuntimeError(machine.no_launches)
    (dtype,) = (dtype for dtype in CHOICE_DTYPES if choice_name(dtype) == kernel._name)
    machine.launched += 1
    machine.put(lambda: _best_token(machine, np.dtype(CHOICE_DTYPES[dtype]), config.grid, *map(int, arguments)))


def _best_token(
    machine: Any, dtype: Any, grid: int, logits: int, keys: int, keep: int, vocab: int, blocks: int, pitch: int
) -> None:
    count = grid // blocks
    sign = 1 << 8 * dtype.itemsize - 1
    out = machine.array(keys, 8 * count, "the keys").view(np.uint64)
    assert not out.any()
    for i in range(count):
        address = logits + i // keep * pitch + i % keep * vocab * dtype.itemsize
        row = machine.array(address, vocab * dtype.itemsize, "logits").view(dtype)
        scores = row.astype(np.float32)
        token = int(scores.argmax())
        top = scores[token]
        size = int(row[token : token + 1].view(f"u{dtype.itemsize}")[0]) & (sign - 1)
        ordered = sign + (sign - 1) if np.isnan(top) else sign - size if top < 0 else sign + size
        out[i] = ordered << 32 | (~(token ^ machine.wrong_tokens) & 0xFFFFFFFF)
