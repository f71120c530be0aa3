"""Finds the decoder in an export. Exporters write prefill and decoding to one, two or three files.

decoder_model.onnx              only the first step: it has caches as outputs, and no past
decoder_with_past_model.onnx    every step; with an empty past, also the first step: preferred
decoder_model_merged.onnx       both, and an input that chooses one; see the family `tool_repairs`
decoder/model.onnx              mobius-onnx, beside encoder/model.onnx
encoder_model.onnx, vision_encoder.onnx, audio..., embed_tokens.onnx, embedding.onnx
                                models whose outputs the decoder reads
"""

from __future__ import annotations

import re
from pathlib import Path

from onnx import GraphProto

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.protos import FLOATS, elem_type_of, shape_of
from trt_kvcache.importer.recorded_options import was_rewritten

# Maps a file to the files that it replaces: those of optimum, then those of transformers' own exporter.
_INSTEAD_OF = {
    "decoder_with_past_model.onnx": ("decoder_model.onnx", "decoder_model_merged.onnx"),
    "decoder_model_merged.onnx": ("decoder_model.onnx",),
    "decode.onnx": ("prefill.onnx", "language_model.onnx", "lm_head.onnx"),
}
_BEFORE = ("encoder", "vision", "audio", "embed_tokens", "embedding")
_WANTED = "give the path of an .onnx file"
_CACHE_NAME = re.compile(r"present|past|cache|key|value", re.IGNORECASE)
_CACHE_RANK = 4


def find_model(folder: Path) -> Path:
    """Return the decoder of an export's folder; raises `InvalidModelError` for none, or several."""
    files = {p.name: p for p in sorted(folder.glob("*.onnx")) if p.is_file()}
    if not files and (folder / "decoder").is_dir():
        return find_model(folder / "decoder")
    if not files:
        raise InvalidModelError(f"{folder}: a directory without an .onnx file; {_WANTED}")
    superfluous = {name for better, others in _INSTEAD_OF.items() if better in files for name in others}
    left = [p for name, p in files.items() if name not in superfluous and not name.startswith(_BEFORE)]
    if len(left) > 1:
        left = [p for p in left if not was_rewritten(p)] or left
    if len(left) == 1:
        return left[0]
    if not left:
        raise InvalidModelError(f"{folder}: a directory without a decoder (it has {', '.join(files)}); {_WANTED}")
    names = ", ".join(p.name for p in left)
    raise InvalidModelError(
        f"{folder}: a directory in which {len(left)} models may be the decoder ({names}); {_WANTED}"
    )


def check_takes_past(graph: GraphProto, path: Path) -> None:
    """Raise `UnsupportedModelError` for an export of only the first step: caches are outputs, but not inputs."""
    if any(elem_type_of(v) in FLOATS and len(shape_of(v) or ()) >= _CACHE_RANK for v in graph.input):
        return  # an input with more axes holds the caches of several layers
    floats = [v for v in graph.output if elem_type_of(v) in FLOATS and len(shape_of(v) or ()) == _CACHE_RANK]
    presents = [v.name for v in floats if _CACHE_NAME.search(v.name)]
    if len(presents) < 2:
        return
    better = [name for name, others in _INSTEAD_OF.items() if path.name in others and (path.parent / name).is_file()]
    raise UnsupportedModelError(
        f"{path}: has caches as outputs ('{presents[0]}' and {len(presents) - 1} more), but not as inputs, so it "
        "computes only the first step; "
        + (f"use {path.parent / better[0]}, which computes every step" if better else "export the decoder with past")
    )
