"""Small random-weight decoders written by mobius-onnx with static caches. Imported only where mobius-onnx is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CAPACITY = 48


@dataclass(frozen=True)
class Architecture:
    """One of mobius' model classes with a small configuration."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)


_LONGROPE = {
    "rope_type": "longrope",
    "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]},
}
ARCHITECTURES = {
    "llama": Architecture("CausalLMModel"),
    "llama-mha": Architecture("CausalLMModel", {"num_key_value_heads": 4}),
    "qwen3": Architecture("Qwen3CausalLMModel", {"attn_qk_norm": True}),
    "qwen2": Architecture("CausalLMModel", {"attn_qkv_bias": True}),
    "longrope": Architecture("CausalLMModel", _LONGROPE | {"original_max_position_embeddings": CAPACITY}),
}
DEPENDENT = Architecture("CausalLMModel", _LONGROPE | {"original_max_position_embeddings": CAPACITY // 2})
"""Its longest sequence chooses the rotary factors of all."""


def export_gemma4(folder: Path, provider: str, dtype: str) -> Path:
    """Export Gemma 4, whose last two layers read the caches of the first two: with a window, and without one.

    Args:
        folder: for the model.
        provider: "default" writes ONNX's Attention, "cpu" and "trt-rtx" GroupQueryAttention.
        dtype: of an onnx_ir.DataType.
    """
    import mobius
    import onnx_ir as ir
    from mobius._configs._base import Gemma4Config
    from mobius.tasks._gemma4 import Gemma4TextCausalLMTask

    config = Gemma4Config(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, hidden_act="gelu_pytorch_tanh", pad_token_id=0,
        rope_type="default", max_position_embeddings=128, sliding_window=8, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=256, use_double_wide_mlp=True, tie_word_embeddings=True, dtype=ir.DataType[dtype],
    )  # fmt: skip
    module = mobius.models.Gemma4CausalLMModel(config)
    package = mobius.build_from_module(module, config, Gemma4TextCausalLMTask(), execution_provider=provider)
    return _save(package["model"], folder / "model.onnx")


def export(name: str, folder: Path, dtype: str = "FLOAT") -> Path:
    """Export an architecture with `CAPACITY` static cache rows and random weights; returns the model's path."""
    import mobius
    import onnx_ir as ir

    architecture = (ARCHITECTURES | {"dependent": DEPENDENT})[name]
    settings: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "pad_token_id": 0,
        "rope_type": "default", "max_position_embeddings": 256, "dtype": ir.DataType[dtype],
    } | architecture.settings  # fmt: skip
    config = mobius.ArchitectureConfig(**settings)
    task = mobius.CausalLMTask(static_cache=True, max_seq_len=CAPACITY)
    package = mobius.build_from_module(getattr(mobius.models, architecture.model)(config), config, task)
    return _save(package["model"], folder / f"{name}.onnx")


def _save(model: Any, path: Path) -> Path:
    """Fill the weights of a model with random numbers, and write it."""
    import onnx_ir as ir

    rng = np.random.default_rng(0)
    for value in model.graph.initializers.values():
        if value.const_value is None:
            shape = [int(d) for d in value.shape]
            mean = 1.0 if len(shape) == 1 else 0.0
            array = (mean + rng.standard_normal(shape) / np.sqrt([1, *shape][-1])).astype(value.dtype.numpy())
            value.const_value = ir.tensor(array, name=value.name)
    ir.save(model, path, external_data=f"{path.name}.data")
    return path
