"""Converts a decoder in a GGUF file to a checkpoint; transformers dequantizes it.

    python -m trt_kvcache.export.from_gguf MODEL.gguf FOLDER [float16|bfloat16|float32]

This file needs torch, transformers, gguf and accelerate, but nothing of this package: it also runs in an environment
that has only these four.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["MODULES", "save_checkpoint"]

MODULES = ("torch", "transformers", "gguf", "accelerate")
"""Packages that must be installed."""
_NO_NUMBERS = (
    "attention.value_length",
    "attention.causal",
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.finetuned",
)
"""Settings without effect on the model: they repeat other settings, or have the same value in all decoders."""
_AS_ARE = {
    "rope.dimension_count": "rotated",
    "rope.freq_base": "rope_theta",
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "intermediate_size",
}
"""GGUF settings that transformers does not read. They do no harm if they equal these config settings (`_values`)."""


def save_checkpoint(gguf: str | Path, folder: str | Path, dtype: str = "bfloat16", layers: int | None = None) -> None:
    """Write the model and the tokenizer of a GGUF file as transformers' `save_pretrained` does.

    With `layers`, only this many first layers are kept. Raises `ValueError` if transformers cannot read the file, or
    would ignore a part of it; the message names each such part.
    """
    torch, transformers = import_module("torch"), import_module("transformers")
    gguf = Path(gguf)
    reader = import_module("gguf").GGUFReader(str(gguf))
    at: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    if (parts := _value(reader, "split.count") or 1) > 1:
        raise ValueError(f"the file is one of {parts} parts; join them first by llama-gguf-split")
    config = transformers.AutoConfig.from_pretrained(**at)
    if dropped := _dropped_settings(reader, config):
        raise ValueError(f"transformers does not read {', '.join(dropped)}, which changes the numbers of the model")
    kind = getattr(torch, dtype)
    read, loading = transformers.AutoModelForCausalLM.from_pretrained(**at, dtype=kind, output_loading_info=True)
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"the file has no {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}")
    stored, wanted = sum(int(t.n_elements) for t in reader.tensors), sum(p.numel() for p in read.parameters())
    if stored != wanted:
        raise ValueError(
            f"transformers does not read all of its tensors: the file holds {stored} numbers, and transformers' "
            f"{type(read).__name__} {wanted}{_unknown_tensors(reader, read)}"
        )
    config = read.config
    vars(config).pop("quantization_config", None)  # the weights are no longer GGUF's
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    # A new model: transformers cannot save the one that it read from GGUF.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind)
    names = model.state_dict().keys()
    model.load_state_dict({name: value for name, value in read.state_dict().items() if name in names})
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**at).save_pretrained(folder)


def _value(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _dropped_settings(reader: Any, config: Any) -> list[str]:
    """Return the settings in the GGUF file that transformers ignores, such as a scaling of rotary positions."""
    name = str(_value(reader, "general.architecture"))
    mapping = import_module("transformers.integrations.ggml").GGUF_CONFIG_MAPPING
    kind = str(config.model_type)
    names = {name, name.replace("-", "_"), kind, kind.removesuffix("_text")}
    # transformers maps a setting that it ignores to None.
    known = {key for each in names for key, read in mapping.get(each, {}).items() if read is not None}
    rotary = getattr(config, "rope_parameters", None) or {}
    scales = (_value(reader, f"{name}.rope.scaling.factor") or 1.0) != 1.0
    scaling = _value(reader, f"{name}.rope.scaling.type") or ("linear" if scales else "none")
    scaled_as_read = scaling in ("none", rotary.get("rope_type"))
    dropped = []
    for full in reader.fields:
        key = full.removeprefix(f"{name}.")
        if key == full or key in known or key in _NO_NUMBERS or (key.startswith("rope.scaling.") and scaled_as_read):
            continue
        value = _value(reader, full)
        if value not in _values(config).get(_AS_ARE.get(key, ""), ()):
            dropped.append(f"{full} = {value}")
    return dropped


def _values(config: Any) -> dict[str, set[Any]]:
    """Return, for each setting of a config, its values in transformers; kinds of layers (full, sliding) may differ."""
    said = vars(config)  # if layers differ, attributes that most configs have are missing
    hidden, heads = said.get("hidden_size"), said.get("num_attention_heads")
    sizes = {said.get("head_dim"), said.get("global_head_dim")} - {None}
    sizes = sizes or ({hidden // heads} if hidden and heads else set())
    rotary = said.get("rope_parameters") or {}
    kinds = [kind for kind in rotary.values() if isinstance(kind, dict)] or ([rotary] if rotary else [])
    # "proportional" rotates all numbers of a head, some of them with a speed of 0.
    parts = {1.0 if kind.get("rope_type") == "proportional" else _part(kind, said) for kind in kinds}
    return {
        "head_dim": sizes,
        "rotated": {int(size * part) for size in sizes for part in parts},
        "rope_theta": {kind.get("rope_theta", said.get("rope_theta")) for kind in kinds},
        "intermediate_size": {said.get("intermediate_size")},
    }


def _part(kind: dict[str, Any], said: dict[str, Any]) -> float:
    return float(kind.get("partial_rotary_factor") or said.get("partial_rotary_factor") or 1.0)


def _unknown_tensors(reader: Any, model: Any) -> str:
    """Return the end of a message: names of tensors in the file that transformers' model does not have; "" if none."""
    loader = import_module("transformers.modeling_gguf_pytorch_utils")
    try:
        known = loader.get_gguf_hf_weights_map(model, loader.TensorProcessor(config=model.config))
    except (AttributeError, NotImplementedError, TypeError):  # transformers has no map for this architecture
        return ""
    unknown = [tensor.name for tensor in reader.tensors if tensor.name not in known]
    return f"; without a place there: {', '.join(unknown[:3])}{' ...' if len(unknown) > 3 else ''}" if unknown else ""


def main() -> None:
    """Convert the GGUF file that the command line names."""
    try:
        save_checkpoint(sys.argv[1], sys.argv[2], (*sys.argv[3:], "bfloat16")[0])
    except ValueError as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
