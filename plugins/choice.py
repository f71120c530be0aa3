"""The kernels that find the best tokens in logits: source, launch and results. The host chooses among these tokens.

The runtime launches them after an engine, without TensorRT.
"""

from __future__ import annotations

from dataclasses import dataclass
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
"""Types of logits that have kernels."""

KERNELS = ("best_token", "set_maxima", "candidates")
"""Names of the entry functions. Arguments: addresses (`candidates`: four, others: three), then int32 keep, vocab,
blocks, and int64 pitch. The second address is that of the masks, int32 ``[R * keep, ceil(V / 32)]``, or 0."""

MOST_TOKENS = 1 << 30
"""The largest vocabulary that the kernels take: positions of 32 bits must not overflow."""

SETS = 8
"""Number of sets into which each warp of `set_maxima` divides its scores."""

CANDIDATES = 1023
"""Most keys (scores with tokens, see `read_keys`) that the kernel `candidates` writes for a row, after their count."""

_NUMBERS = {"float16": "Float16", "bfloat16": "Bfloat16", "float32": "Float32"}


@dataclass(frozen=True)
class ChoiceKernels:
    """All kernels that choose tokens from one type of logits (`CHOICE_DTYPES`), in one cubin."""

    logits: str

    @property
    def name(self) -> str:
        """Name of the cubin."""
        return f"choice_{self.logits}"


def choice_source(dtype: str) -> str:
    """Return the CUDA C++ source of all kernels for logits of this type, as one translation unit without includes."""
    return f"{choice_family()}\n{choice_entries(dtype)}"


def choice_family() -> str:
    """Return the CUDA C++ source that the kernels share, whatever the type of the logits."""
    constants = {"THREADS": THREADS, "SETS": SETS, "CANDIDATES": CANDIDATES}
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    text = (resource_dir("plugins") / "choice.cu").read_text(encoding="utf-8")
    return "\n".join([*lines, '#line 1 "choice.cu"', text])


def choice_entries(dtype: str, suffix: str = "") -> str:
    """Return the CUDA C++ source of the entry functions for logits of this type; their names end with `suffix`."""
    scores = f"const Scores<{_NUMBERS[dtype]}> scores(logits, masks, keep, vocab, blocks, pitch);"
    begin = 'extern "C" __global__ void __launch_bounds__(THREADS)'
    sizes = "int keep, int vocab, int blocks, long long pitch"
    return f"""#line 1 "choice_{dtype}.cu"
{begin} best_token{suffix}(const void* logits, const void* masks, void* best, {sizes}) {{
    {scores}
    best_token(scores, static_cast<Key*>(best));
}}
{begin} set_maxima{suffix}(const void* logits, const void* masks, void* maxima, {sizes}) {{
    {scores}
    set_maxima(scores, static_cast<unsigned*>(maxima), blocks);
}}
{begin} candidates{suffix}(
    const void* logits, const void* masks, const void* least, void* lists, {sizes}) {{
    {scores}
    candidates(scores, static_cast<const unsigned*>(least), static_cast<Key*>(lists));
}}
"""


def compile_choice(dtype: str, arch: str, *, driver: tuple[int, int] | None = None) -> CompiledKernel:
    """Compile the kernels for this type of logits to a cubin. Any driver of the same major CUDA version can load it.

    Raises what `compile_source` raises.
    """
    return compile_source(choice_source(dtype), ChoiceKernels(dtype).name, arch, driver=driver)


def blocks_per_row(vocab: int, itemsize: int) -> int:
    """Return how many CUDA blocks share a row of scores: so many that each thread reads only a few vectors."""
    return max(1, -(-vocab * itemsize // BLOCK_BYTES))


def sets_per_row(vocab: int, itemsize: int) -> int:
    """Return the number of sets into which the kernel `set_maxima` divides a row; it writes the maximum of each set."""
    return blocks_per_row(vocab, itemsize) * (THREADS // 32) * SETS


def ordered(logits: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Convert scores to uint32 numbers that sort in the same order. The kernels convert scores in the same way."""
    kind = np.dtype(f"u{logits.itemsize}").type
    bits = logits.view(kind)
    sign, infinite = kind(1 << 8 * logits.itemsize - 1), np.array(np.inf, logits.dtype).view(kind)
    size = bits & (sign - kind(1))
    order: npt.NDArray[Any] = np.where(bits == size, sign + size, sign - size)
    order[size > infinite] = np.iinfo(kind).max
    return order.astype(np.uint32)


def read_scores(order: npt.NDArray[np.uint32], dtype: str) -> npt.NDArray[np.float32]:
    """Convert numbers from `ordered` back to float32 scores.

    The bits of NaN and the sign of a zero score are lost. The number 0 means "no score" and becomes ``-inf``.
    """
    bits = np.dtype(f"u{np.dtype(CHOICE_DTYPES[dtype]).itemsize}")
    sign = 1 << 8 * bits.itemsize - 1
    distance = order.astype(np.int64) - sign
    scores: npt.NDArray[Any] = (np.abs(distance) | np.where(distance < 0, sign, 0)).astype(bits)
    return np.where(order == 0, np.float32(-np.inf), scores.view(CHOICE_DTYPES[dtype]).astype(np.float32))


def read_keys(keys: npt.NDArray[np.uint64], dtype: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Split keys that a kernel returned into tokens (bitwise not, low 32 bits) and scores (`ordered`, high 32 bits)."""
    tokens = (~keys & 0xFFFFFFFF).astype(np.int64)
    return tokens, read_scores((keys >> np.uint64(32)).astype(np.uint32), dtype)


def read_lists(lists: npt.NDArray[np.uint64], dtype: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the tokens, ascending, and the scores in lists that the kernel `candidates` wrote, both ``[n, longest]``.

    `lists` is ``[n, 1 + CANDIDATES]``: a count of keys, then the keys. Shorter results end with token -1, score -inf.
    """
    counts = lists[:, 0]
    most = max(1, int(counts.max()))
    keys = lists[:, 1 : 1 + most]
    # Put tokens into the upper half, to sort by them; entries after the end of a list come last.
    keys = ((~keys & 0xFFFFFFFF) << 32 | keys >> 32).astype(np.uint64)
    missing = np.arange(most) >= counts[:, None]
    keys[missing] = np.iinfo(np.uint64).max
    keys.sort(axis=1)
    tokens = np.where(missing, -1, (keys >> 32).astype(np.int64))
    scores = np.where(missing, np.float32(-np.inf), read_scores(keys.astype(np.uint32), dtype))
    return tokens, scores
