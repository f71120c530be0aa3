"""The kernels that choose tokens, compiled for the host: logits go in as numpy arrays, what they write comes back."""

import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from host_kernel import HERE, compile_for_host
from numpy.typing import NDArray

from trt_kvcache.plugins.choice import CANDIDATES, CHOICE_DTYPES, KERNELS, choice_entries, choice_family, sets_per_row
from trt_kvcache.plugins.spec import BLOCK_BYTES, THREADS
from trt_kvcache.runtime.generation.token_masks import pack_masks

DTYPES = list(CHOICE_DTYPES)


@dataclass(frozen=True, eq=False)
class ChoiceCase:
    """One launch.

    Attributes:
        logits: ``[R, positions, V]``, as they lie in memory.
        keep: the last positions of each row, which are looked at.
        blocks: that share a row.
        shift: bytes by which the logits miss an alignment of 64.
        backwards: the last thread of the last block comes first.
        kernel: which; what it writes for each position has the type and size of `written`.
        least: of `candidates`, by row and position.
        allowed: ``[R, keep, V]``, of masks; None: there are none.
    """

    logits: NDArray[Any]
    keep: int
    blocks: int
    shift: int = 0
    backwards: bool = False
    kernel: str = "best_token"
    least: NDArray[np.uint32] | None = None
    allowed: NDArray[np.bool_] | None = None

    @property
    def written(self) -> tuple[Any, int]:
        """Type and number of what the kernel writes for each position."""
        if self.kernel == "set_maxima":
            return np.uint32, sets_per_row(self.blocks * BLOCK_BYTES, 1)
        return np.uint64, 1 + CANDIDATES if self.kernel == "candidates" else 1


class HostChoice:
    """An executable with the kernels of every type."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self.folder = folder
        parts = [f'#include "{HERE}/host_shim.h"\n#include "{HERE}/host_warp.h"', choice_family()]
        parts += [choice_entries(dtype, f"_{dtype}") for dtype in DTYPES]
        parts += [f'#line 1 "table"\n#include "{HERE}/host_choice_main.h"\nconst std::vector<Entry> ENTRIES = {{']
        for kernel in KERNELS:
            least = "least, " if kernel == "candidates" else ""
            for dtype in DTYPES:
                call = f"{kernel}_{dtype}(logits, masks, {least}out, keep, vocab, blocks, pitch);"
                named = "least" if least else ""
                pointers = f"const void* logits, const void* masks, const void* {named}, void* out"
                parts.append(f"[]({pointers}, int keep, int vocab, int blocks, long long pitch) {{ {call} }},")
        self._program = compile_for_host(folder, "choice", "\n".join([*parts, "};\n"]), flags)

    def run(self, cases: Sequence[ChoiceCase]) -> list[NDArray[Any]]:
        """The kernel's output: ``[R, keep, N]`` of each case."""
        content, sizes = [], []
        for case in cases:
            rows, positions, vocab = case.logits.shape
            pitch = positions * vocab * case.logits.itemsize
            data = case.logits.tobytes()[pitch // positions * (positions - case.keep) :]  # from the first that is kept
            entry = KERNELS.index(case.kernel) * len(DTYPES) + DTYPES.index(case.logits.dtype.name)
            each = np.dtype(case.written[0]).itemsize * case.written[1]
            sizes.append(rows * case.keep * each)
            least = np.zeros((rows, case.keep), np.uint32) if case.least is None else case.least
            masks = b"" if case.allowed is None else pack_masks(case.allowed).tobytes()
            content.append(struct.pack(
                "12q", entry, rows, case.keep, vocab, case.blocks, pitch, THREADS, case.backwards, case.shift,
                len(data), each, len(masks),
            ))  # fmt: skip
            content += [data, least.tobytes(), masks]
        given, results = self.folder / "choice-cases", self.folder / "choice-results"
        given.write_bytes(b"".join(content))
        done = subprocess.run([self._program, given, results], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[:4000]
        written = np.frombuffer(results.read_bytes(), np.uint8)
        assert written.size == sum(sizes)
        parts = np.split(written, np.cumsum(sizes)[:-1])
        return [
            part.view(case.written[0]).reshape(-1, case.keep, case.written[1])
            for part, case in zip(parts, cases, strict=True)
        ]
