"""Reads unsigned weights as signed ones, which TensorRT needs, by flipping bits. Needs neither ONNX nor numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 25  # bytes read at a time


@dataclass(frozen=True)
class Flipped:
    """External data of an unsigned weight whose numbers still need one bit flipped.

    Attributes:
        location: path of the file, relative to the model's folder.
        offset, length: first byte of the weight in the file, and its number of bytes.
        mask: each byte is combined with this number by xor.
    """

    name: str
    location: str
    offset: int
    length: int
    mask: int

    def read(self, folder: Path) -> Iterator[bytes]:
        """Yield the flipped bytes in blocks. Raises `OSError` if the file cannot be read, or is too short."""
        with (folder / self.location).open("rb") as file:
            file.seek(self.offset)
            left = self.length
            while left:
                data = file.read(min(left, _BLOCK))
                if not data:
                    raise OSError(f"{self.location} ends before the end of the weight '{self.name}'")
                left -= len(data)
                yield flip(data, self.mask)


def flip(data: bytes, mask: int) -> bytes:
    """Return every byte of `data` xor `mask`."""
    return data.translate(bytes(byte ^ mask for byte in range(256)))
