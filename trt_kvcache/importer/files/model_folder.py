"""Finds the decoder in an export, and the default capacity (rows) of caches whose length the model leaves open.

Exporters write prefill and decoding to one, two or three files:

decoder_model.onnx              only the first step: it has caches as outputs, and no past
decoder_with_past_model.onnx    every step; with an empty past, also the first step: preferred
decoder_model_merged.onnx       both, and an input that chooses one; see the family `torch_exports`
decoder/model.onnx              mobius-onnx, beside encoder/model.onnx
encoder_model.onnx, vision_encoder.onnx, audio..., embed_tokens.onnx, embedding.onnx
                                models whose outputs the decoder reads
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from trt_kvcache.errors import InvalidModelError
from trt_kvcache.files import read_object
from trt_kvcache.importer.plan_options import was_rewritten

# Maps a file to the files that it replaces: those of optimum, then those of transformers' own exporter.
INSTEAD_OF = {
    "decoder_with_past_model.onnx": ("decoder_model.onnx", "decoder_model_merged.onnx"),
    "decoder_model_merged.onnx": ("decoder_model.onnx",),
    "decode.onnx": ("prefill.onnx", "language_model.onnx", "lm_head.onnx"),
}
_BEFORE = ("encoder", "vision", "audio", "embed_tokens", "embedding")
_WANTED = "give the path of an .onnx file"
USUAL = 4096
"""The default capacity in tokens, unless the model's longest text is shorter."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "context_length")


def find_model(folder: Path) -> Path:
    """Return the file of the decoder in an export's folder; raises `InvalidModelError` if there is none, or several."""
    files = {p.name: p for p in sorted(folder.glob("*.onnx")) if p.is_file()}
    if not files and (folder / "decoder").is_dir():
        return find_model(folder / "decoder")
    if not files:
        raise InvalidModelError(f"{folder}: a directory without an .onnx file; {_WANTED}")
    superfluous = {name for better, others in INSTEAD_OF.items() if better in files for name in others}
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


def usual_capacity(folder: Path) -> int:
    """Return the default capacity: the longest text of the model in this folder, in tokens, but at most 4096."""
    longest = longest_text(folder)
    return USUAL if longest is None else min(longest[0], USUAL)


def longest_text(folder: Path) -> tuple[int, str] | None:
    """Return the most tokens of a text by the config files of `folder`, and the setting that says so; None if unknown.

    The folder above is also searched if `folder` is named ``decoder`` (mobius-onnx).
    """
    texts: list[tuple[int, str]] = []
    folders = (folder, folder.parent) if folder.name == "decoder" else (folder,)
    files = (("config.json", "text_config"), ("genai_config.json", "model"))
    for place, (name, part) in product(folders, files):
        try:
            config = read_object(place / name)
        except (OSError, ValueError):
            continue
        inner = config.get(part)
        for settings in (config, inner if isinstance(inner, dict) else {}):
            lengths = ((settings.get(key), key) for key in _LENGTHS)
            texts += [(value, f"{key} in {name}") for value, key in lengths if type(value) is int and value > 0]
    return min(texts, default=None)
