"""The kernels that find the best token, compiled for the host: logits go in as numpy arrays, keys come back."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from host_kernel import HERE, compile_for_host
from numpy.typing import NDArray

from trt_kvcache.plugins.choice import CHOICE_DTYPES, choice_entry, choice_family, choice_name
from trt_kvcache.plugins.spec import THREADS

ORDER = {dtype: i for i, dtype in enumerate(CHOICE_DTYPES)}


@dataclass(frozen=True, eq=False)
class ChoiceCase:
    """One launch.

    Attributes:
        logits: ``[R, positions, V]``, as they lie in memory.
        keep: the last positions of each row, which are looked at.
        blocks: that share a row.
        shift: bytes by which the logits miss an alignment of 64.
        backwards: the last thread of the last block comes first.
    """

    logits: NDArray[Any]
    keep: int
    blocks: int
    shift: int = 0
    backwards: bool = False


class HostChoice:
    """An executable with the kernel of every type."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self.folder = folder
        parts = [f'#include "{HERE}/host_shim.h"\n#include "{HERE}/host_warp.h"', choice_family()]
        parts += [choice_entry(dtype) for dtype in CHOICE_DTYPES]
        parts += [f'#line 1 "table"\n#include "{HERE}/host_choice_main.h"']
        parts += [f"const std::vector<Entry> ENTRIES = {{{', '.join(map(choice_name, CHOICE_DTYPES))}}};\n"]
        self._program = compile_for_host(folder, "choice", "\n".join(parts), flags)

    def run(self, cases: Sequence[ChoiceCase]) -> list[NDArray[np.uint64]]:
        """What the kernel writes: keys ``[R, keep]`` of each case."""
        content = []
        for case in cases:
            rows, positions, vocab = case.logits.shape
            pitch = positions * vocab * case.logits.itemsize
            data = case.logits.tobytes()[pitch // positions * (positions - case.keep) :]  # from the first that is kept
            content.append(struct.pack(
                "10q", ORDER[case.logits.dtype.name], rows, case.keep, vocab, case.blocks, pitch, THREADS,
                case.backwards, case.shift, len(data),
            ))  # fmt: skip
            content.append(data)
        given, results = self.folder / "choice-cases", self.folder / "choice-results"
        given.write_bytes(b"".join(content))
        done = subprocess.run([self._program, given, results], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[:4000]
        keys = np.frombuffer(results.read_bytes(), np.uint64)
        sizes = [case.logits.shape[0] * case.keep for case in cases]
        parts = np.split(keys, np.cumsum(sizes)[:-1])
        return [part.reshape(-1, case.keep) for part, case in zip(parts, cases, strict=True)]
