"""The receipt of a proof that was replayed: a file beside the engine, for one GPU, driver and TensorRT.

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

__all__ = ["Receipt", "read_receipt", "receipt_path", "write_receipt"]


@dataclass(frozen=True)
class Receipt:
    """A proof that was passed.

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

    def differs(self, now: Receipt) -> str:
        """The changes since it was written, in words; empty where there are none."""
        changes = [
            f"{name.replace('_', ' ')} was {getattr(self, name)}, and is {getattr(now, name)}"
            for name in ("gpu", "driver", "backend", "checked_by")
            if getattr(self, name) != getattr(now, name)
        ]
        if (self.engine, self.proof) != (now.engine, now.proof):
            changes.append("it is of another engine or proof")
        return "; ".join(changes)


def receipt_path(engine: Path, gpu: str, folder: Path | None = None) -> Path:
    """``model.engine.NVIDIA-L4.proved``, beside the engine or in `folder`: a file for each kind of GPU."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-.") or "GPU"
    return (folder or engine.parent) / f"{engine.name}.{name}.proved"


def read_receipt(path: Path, now: Receipt) -> str:
    """Why a receipt does not count, in words; empty where it does.

    Args:
        path: of the file.
        now: what it has to say, but for `largest`.
    """
    try:
        receipt = msgspec.json.decode(path.read_bytes(), type=Receipt)
    except FileNotFoundError:
        return "no receipt lies here"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return f"the receipt {path} cannot be read"
    differs = replace(receipt, largest=now.largest).differs(now)
    return f"the receipt {path} does not count here: {differs}" if differs else ""


def write_receipt(path: Path, receipt: Receipt) -> None:
    """Write a receipt. A folder that cannot be written is worth a warning: the next start replays the proof again."""
    try:
        with atomic_file(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(receipt), indent=2) + b"\n")
    except OutputError as error:
        warnings.warn(f"no receipt is kept, so that the next start checks again: {error}", RuntimeWarning, stacklevel=2)
