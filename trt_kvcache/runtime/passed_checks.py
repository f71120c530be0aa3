"""The checks that an engine has passed: a file beside it for each kind of GPU, with driver and version of TensorRT.

It is no signature: it saves time, and whoever can write it can change the engine.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from trt_kvcache.errors import OutputError
from trt_kvcache.files import atomic_file

__all__ = ["PassedCheck", "passed_check_path", "read_passed_check", "write_passed_check"]


@dataclass(frozen=True)
class PassedCheck:
    """A replay of a proof in which the engine gave its numbers.

    Attributes:
        engine, proof: BLAKE3 (hex).
        gpu: its name and compute capability.
        driver: its version, as the version of CUDA that it is for.
        backend: name and version of TensorRT.
        checked_by: version of trt_kvcache.
        largest: the largest difference, as a share of what is allowed.
    """

    engine: str
    proof: str
    gpu: str
    driver: str
    backend: str
    checked_by: str
    largest: float = 0.0

    def differs(self, now: PassedCheck) -> str:
        """The changes since it was written, in words; empty where there are none."""
        changes = [
            f"{name.replace('_', ' ')} was {getattr(self, name)}, and is {getattr(now, name)}"
            for name in ("gpu", "driver", "backend", "checked_by")
            if getattr(self, name) != getattr(now, name)
        ]
        if (self.engine, self.proof) != (now.engine, now.proof):
            changes.append("it is of another engine or proof")
        return "; ".join(changes)


def passed_check_path(engine: Path, gpu: str, folder: Path | None = None) -> Path:
    """``model.engine.NVIDIA-L4.passed_check``, beside the engine or in `folder`: a file for each kind of GPU."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-.") or "GPU"
    return (folder or engine.parent) / f"{engine.name}.{name}.passed_check"


def read_passed_check(path: Path, now: PassedCheck) -> str:
    """Why a passed check does not count here, in words; empty where it does.

    Args:
        path: of the file.
        now: what it has to say, but for `largest`.
    """
    try:
        passed = msgspec.json.decode(path.read_bytes(), type=PassedCheck)
    except FileNotFoundError:
        return "no passed check lies here"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return f"the passed check {path} cannot be read"
    differs = replace(passed, largest=now.largest).differs(now)
    return f"the passed check {path} does not count here: {differs}" if differs else ""


def write_passed_check(path: Path, passed: PassedCheck) -> None:
    """Write a passed check. A folder that cannot be written is worth a warning: the next start checks again."""
    try:
        with atomic_file(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(passed), indent=2) + b"\n")
    except OutputError as error:
        warnings.warn(
            f"no passed check is kept, so that the next start checks again: {error}", RuntimeWarning, stacklevel=2
        )
