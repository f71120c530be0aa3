"""Checks that an engine has passed: a file beside it for each kind of GPU, with the versions of driver and TensorRT.

The file is not signed. It only saves time: anyone who can write it could change the engine, too.
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
    """A replay of a proof in which the engine agreed.

    Attributes:
        engine, proof: BLAKE3 (hex).
        gpu: name and compute capability of the GPU.
        driver: the driver's CUDA version, and its own if known.
        backend: name and version of TensorRT.
        checked_by: version of trt_kvcache.
        largest: the largest difference, as a share of the allowed one.
    """

    engine: str
    proof: str
    gpu: str
    driver: str
    backend: str
    checked_by: str
    largest: float = 0.0

    def differs(self, now: PassedCheck) -> str:
        """Return the changes since this was written, as text; empty if nothing changed."""
        changes = [
            f"{name.replace('_', ' ')} was {getattr(self, name)}, and is {getattr(now, name)}"
            for name in ("gpu", "driver", "backend", "checked_by")
            if getattr(self, name) != getattr(now, name)
        ]
        if (self.engine, self.proof) != (now.engine, now.proof):
            changes.append("it is of another engine or proof")
        return "; ".join(changes)


def passed_check_path(engine: Path, gpu: str, folder: Path | None = None) -> Path:
    """Return ``model.engine.NVIDIA-L4.passed_check``, beside the engine or in `folder`: a file for each kind of GPU."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-.") or "GPU"
    return (folder or engine.parent) / f"{engine.name}.{name}.passed_check"


def read_passed_check(path: Path, now: PassedCheck) -> str:
    """Return why a passed check does not count here; empty if it counts.

    Args:
        path: path of the file.
        now: the expected contents; `largest` is ignored.
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
    """Write a passed check. If the folder cannot be written, warn: the next start checks again."""
    try:
        with atomic_file(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(passed), indent=2) + b"\n")
    except OutputError as error:
        warnings.warn(
            f"no passed check is kept, so that the next start checks again: {error}", RuntimeWarning, stacklevel=2
        )
