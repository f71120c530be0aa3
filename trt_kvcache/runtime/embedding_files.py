"""The places where exporters put the embedding model of a decoder, and a checkpoint's facts about its table.

Embedding models:

    embedding/model.onnx             mobius-onnx, beside decoder/model.onnx
    genai_config.json                onnxruntime-genai: the file that "embedding" names there
    embedding.onnx, embeddings.onnx  the same without a config
    embed_tokens.onnx                optimum, beside decoder_model_merged.onnx; both may end alike, as in _fp16.onnx
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trt_kvcache.files import export_suffix, is_inside, read_object

__all__ = ["find_embeddings", "scaled_by"]


def find_embeddings(model: Path) -> Path | None:
    """The embedding model that lies beside a decoder or engine (or in its folder), or None."""
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
    except (OSError, ValueError, KeyError, TypeError):  # none, or another layout
        return
    if isinstance(name, str) and is_inside(name):
        yield folder / name


def scaled_by(checkpoint: Path) -> str | None:
    """The setting of ``config.json`` beside a checkpoint by which its model scales embeddings; None: it says nothing.

    Where it is done differs: in transformers 5.23, Gemma, MiniCPM3 and BART scale where they look tokens up, Granite
    after that. So nothing here tells whether an exported decoder takes them scaled.
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
