"""Paths of embedding models beside decoders, and scaling in a checkpoint's configuration.

Embedding models:

    embedding/model.onnx             mobius-onnx, beside decoder/model.onnx
    genai_config.json                onnxruntime-genai: the file that "embedding" names there
    embedding.onnx, embeddings.onnx  onnxruntime-genai without a config
    embed_tokens.onnx                optimum, beside decoder_model_merged.onnx; both may have a suffix (_fp16)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trt_kvcache.files import export_suffix, is_inside, read_object

__all__ = ["find_embeddings", "scaled_by"]


def find_embeddings(model: Path) -> Path | None:
    """Return the embedding model beside a decoder or engine (or in its folder), or None."""
    return next((path for path in _candidates(model) if path.is_file()), None)


def _candidates(model: Path) -> Iterator[Path]:
    folder = model if model.is_dir() else model.parent
    for suffix in dict.fromkeys((export_suffix(model), "")):
        yield folder / f"embed_tokens{suffix}.onnx"
    yield from _named_by_genai(folder)
    yield folder / "embedding.onnx"
    yield folder / "embeddings.onnx"
    yield folder / "embedding" / "model.onnx"
    if folder.absolute().name == "decoder":
        yield folder.absolute().parent / "embedding" / "model.onnx"


def _named_by_genai(folder: Path) -> Iterator[Path]:
    try:
        name = read_object(folder / "genai_config.json")["model"]["embedding"]["filename"]
    except (OSError, ValueError, KeyError, TypeError):  # no config, or another layout
        return
    if isinstance(name, str) and is_inside(name):
        yield folder / name


def scaled_by(checkpoint: Path) -> str | None:
    """Return the setting of ``config.json`` beside a checkpoint that scales embeddings; None if there is none.

    The place of the scaling differs: in transformers 5.23, Gemma, MiniCPM3 and BART scale when they look tokens up,
    Granite scales later. So the setting does not tell whether an exported decoder takes scaled embeddings.
    """
    try:
        config = read_object(checkpoint.parent / "config.json")
    except (OSError, ValueError):
        return None
    parts = [config, config.get("text_config")]
    for part in (p for p in parts if isinstance(p, dict)):
        kind = part.get("model_type")
        if isinstance(kind, str) and "gemma" in kind:
            return f"model_type {kind!r}"
        for name in ("embedding_multiplier", "scale_emb", "scale_embedding"):
            value = part.get(name)
            if value is True or value not in (None, False, 1):
                return f"{name} {json.dumps(value)}"
    return None
