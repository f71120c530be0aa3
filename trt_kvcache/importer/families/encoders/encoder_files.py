"""Finds the files of an encoder, and of a decoder's first step, beside a decoder.

    encoder_model.onnx     optimum, beside decoder_with_past_model.onnx; both may have an ending such as _fp16.onnx
    genai_config.json      onnxruntime-genai: the entry "encoder" names the file
    encoder.onnx           onnxruntime-genai without a config
    encoder/model.onnx     mobius-onnx, beside decoder/model.onnx

A first step is optimum's decoder_model.onnx or decoder_model_merged.onnx, which computes keys and values from the
encoder's output. Other exporters compute these in the encoder or in the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_kvcache.files import export_suffix, is_inside, read_object

_CONFIGS = ("generation_config.json", "config.json", "genai_config.json")
_START = "decoder_start_token_id"


def find_encoder(model: Path) -> Path | None:
    """Return the path of the encoder beside a decoder or engine, or in a folder; None if there is no encoder."""
    return next((path for path in _encoders(model) if path.is_file()), None)


def named_encoder(path: Path) -> Path | None:
    """Return the encoder at a path: the file itself, or the encoder in a folder. None if there is no encoder."""
    return path if path.is_file() else find_encoder(path) if path.is_dir() else None


def find_first_step(model: Path) -> Path | None:
    """Return the decoder file for the first step, beside the file or in the folder `model`; None if not found."""
    suffixes = dict.fromkeys((export_suffix(model), ""))
    names = [f"decoder_model{merged}{suffix}.onnx" for suffix in suffixes for merged in ("", "_merged")]
    return next((path for name in names if (path := _folder(model) / name).is_file()), None)


def decoder_start(model: Path) -> int | None:
    """Return the token id with which the decoder begins every text, from the export's configs; None if unknown."""
    folder = _folder(model)
    for place in (folder, folder.absolute().parent) if folder.absolute().name == "decoder" else (folder,):
        for name in _CONFIGS:
            config = _read(place / name)
            for part in (config, config.get("model"), config.get("decoder"), config.get("text_config")):
                token = part.get(_START) if isinstance(part, dict) else None
                if isinstance(token, int):
                    return token
    return None


def _encoders(model: Path) -> Iterator[Path]:
    folder = _folder(model)
    for suffix in dict.fromkeys((export_suffix(model), "")):
        yield folder / f"encoder_model{suffix}.onnx"
    encoder = _read(folder / "genai_config.json").get("model", {})
    encoder = encoder.get("encoder") if isinstance(encoder, dict) else None
    if isinstance(encoder, dict) and isinstance(name := encoder.get("filename"), str) and is_inside(name):
        yield folder / name
    yield folder / "encoder.onnx"
    yield folder / "encoder" / "model.onnx"
    if folder.absolute().name == "decoder":
        yield folder.absolute().parent / "encoder" / "model.onnx"


def _folder(model: Path) -> Path:
    return model if model.is_dir() else model.parent


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}
