"""The kernel that finds the best token of each row of logits: its text, its launch, and what it writes.

TensorRT knows nothing of it: the runtime launches it behind an engine. See ``best_token.cu``.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache.plugins.compile import CompiledKernel, compile_source
from trt_kvcache.plugins.spec import BLOCK_BYTES, THREADS
from trt_kvcache.resources import resource_dir

CHOICE_DTYPES: dict[str, npt.DTypeLike] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}
"""Types of logits that there is a kernel for."""

MOST_TOKENS = 1 << 30
"""Tokens of a vocabulary, below which places of 32 bits do not overflow."""

_NUMBERS = {"float16": "Float16", "bfloat16": "Bfloat16", "float32": "Float32"}


def choice_name(dtype: str) -> str:
    """The entry function for logits of this type."""
    return f"best_token_{dtype}"


def choice_source(dtype: str) -> str:
    """One CUDA C++ translation unit, without includes, whose entry function is ``choice_name(dtype)``."""
    return f"{choice_family()}\n{choice_entry(dtype)}"


def choice_family() -> str:
    """The text that all entry functions share."""
    text = (resource_dir("plugins") / "best_token.cu").read_text(encoding="utf-8")
    return f'constexpr int THREADS = {THREADS};\n#line 1 "best_token.cu"\n{text}'


def choice_entry(dtype: str) -> str:
    """The entry function for logits of this type: addresses, int32 sizes, and the pitch as int64."""
    return f"""#line 1 "{choice_name(dtype)}.cu"
extern "C" __global__ void __launch_bounds__(THREADS) {choice_name(dtype)}(
    const void* logits, void* best, int keep, int vocab, int blocks, long long pitch) {{
    best_token<{_NUMBERS[dtype]}>(
        static_cast<const char*>(logits), static_cast<Key*>(best), keep, vocab, blocks, pitch);
}}
"""


def compile_choice(dtype: str, arch: str, *, driver: tuple[int, int] | None = None) -> CompiledKernel:
    """A cubin for this architecture: nothing hands it on as text, and a driver of its major version takes it.

    Raises:
        OptionError, BackendError: as of `compile_source`.
    """
    return compile_source(choice_source(dtype), choice_name(dtype), arch, driver=driver)


def blocks_per_row(vocab: int, itemsize: int) -> int:
    """Blocks that share a row: each thread takes a few accesses of it."""
    return max(1, -(-vocab * itemsize // BLOCK_BYTES))


def read_keys(keys: npt.NDArray[np.uint64], dtype: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Tokens and their scores, of what the kernel wrote; a score of NaN is some NaN, one of 0 may have had a sign."""
    bits: npt.DTypeLike = np.dtype(f"u{np.dtype(CHOICE_DTYPES[dtype]).itemsize}")
    sign = 1 << 8 * np.dtype(bits).itemsize - 1
    tokens = (~keys & 0xFFFFFFFF).astype(np.int64)
    ordered = (keys >> np.uint64(32)).astype(np.int64) - sign
    scores: npt.NDArray[Any] = (np.abs(ordered) | np.where(ordered < 0, sign, 0)).astype(bits)
    return tokens, scores.view(CHOICE_DTYPES[dtype]).astype(np.float32)
