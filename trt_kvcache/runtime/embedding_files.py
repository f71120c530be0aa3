"""Where exporters put the embedding model of a decoder.

What is known:

    embedding/model.onnx             mobius-onnx, beside decoder/model.onnx
    genai_config.json                onnxruntime-genai: the file that "embedding" names there
    embedding.onnx, embeddings.onnx  the same without a config
    embed_tokens.onnx                optimum, beside decoder_model_merged.onnx; both may end alike, as in _fp16.onnx
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["find_embeddings"]

_DECODER = re.compile(r"decoder(_with_past)?_model(_merged)?(?P<suffix>_\w+)?")


def find_embeddings(model: Path) -> Path | None:
    """The embedding model that lies beside a decoder or engine (or in its folder), or None."""
    return next((path for path in _candidates(model) if path.is_file()), None)


def _candidates(model: Path) -> Iterator[Path]:
    folder = model if model.is_dir() else model.parent
    decoder = None if model.is_dir() else _DECODER.fullmatch(model.stem)
    if decoder is not None and decoder["suffix"]:
        yield folder / f"embed_tokens{decoder['suffix']}.onnx"
    yield folder / "embed_tokens.onnx"
    yield from _named_by_genai(folder)
    yield folder / "embedding.onnx"
    yield folder / "embeddings.onnx"
    yield folder / "embedding" / "model.onnx"
    if folder.absolute().name == "decoder":
        yield folder.absolute().parent / "embedding" / "model.onnx"


def _named_by_genai(folder: Path) -> Iterator[Path]:
    try:
        name = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]["embedding"]["filename"]
    except (OSError, ValueError, KeyError, TypeError):  # none, or another layout
        return
    if isinstance(name, str):
        yield folder / name
