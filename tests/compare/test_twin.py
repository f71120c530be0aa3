"""Twins are small by the names of settings, and keep what changes the numbers of a model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_kvcache.compare import twin
from trt_kvcache.compare.twin import DECODE, left_out, small_config

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "vocab_size": 128256,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008], "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def small(**settings: Any) -> dict[str, Any]:
    config = {**LLAMA, **settings}
    return small_config(config, config)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"num_key_value_heads": 32}, {"num_key_value_heads": 4}),
        ({"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
        ({"head_dim": 256}, {"head_dim": 32, "hidden_size": 64}),  # narrower than its heads
        ({"head_dim": 64}, {"head_dim": 32, "hidden_size": 256}),
        ({"head_dim": 256, "query_pre_attn_scalar": 256}, {"query_pre_attn_scalar": 32}),  # else scores differ
        ({"head_dim": 128, "query_pre_attn_scalar": 144}, {"query_pre_attn_scalar": 144}),
        ({"partial_rotary_factor": 0.25}, {"hidden_size": 256}),  # heads of 64, of which 16 numbers are rotated
        ({"sliding_window": 4096}, {"sliding_window": 6}),
        ({"sliding_window": 131072}, {"sliding_window": 256}),  # reached by no text
        ({"sliding_window": None, "use_sliding_window": True}, {"sliding_window": None, "use_sliding_window": True}),
        ({"max_window_layers": 28, "sliding_window": 512}, {"max_window_layers": 2, "num_hidden_layers": 4}),
        ({"max_window_layers": 32, "sliding_window": 512}, {"max_window_layers": 2, "num_hidden_layers": 2}),
        ({"first_k_dense_replace": 3}, {"first_k_dense_replace": 2, "num_hidden_layers": 4}),
        ({"sliding_window_pattern": 6}, {"sliding_window_pattern": 2, "num_hidden_layers": 4}),
        (
            {"layer_types": ["sliding", "sliding", "sliding", "full"] * 8},
            {"layer_types": ["sliding", "full", "sliding", "full"], "num_hidden_layers": 4},
        ),
        (
            {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 29, "first_k_dense_replace": 3},
            {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": 2},
        ),
        (
            {"no_rope_layers": [1, 1, 1, 0] * 8, "full_attn_idxs": [3, 7, 11, 15, 19, 23, 27, 31]},
            {"no_rope_layers": [1, 0, 1, 0], "full_attn_idxs": [1, 3]},
        ),
        ({"attention_types": [[["global", "local"], 16]]}, {"attention_types": [[["global", "local"], 1]]}),
        (
            {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        ),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [*range(64)], "mrope_section": [16, 24, 24]}},
            {"rope_scaling": {"type": "longrope", "long_factor": [*range(0, 64, 4)], "mrope_section": [4, 6, 6]}},
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "n_positions": 2048},
            {"max_position_embeddings": 16, "n_positions": 16},  # a text goes past it
        ),
        (
            {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
            | {"v_head_dim": 128, "qk_head_dim": 192},
            {"q_lora_rank": 48, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
            | {"v_head_dim": 32, "qk_head_dim": 48, "hidden_size": 128},
        ),
        ({"query_pre_attn_scalar": 168, "logit_scale": 0.0625}, {"query_pre_attn_scalar": 168, "logit_scale": 0.0625}),
    ],
    ids=str,
)
def test_settings(settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    made = small(**settings)
    assert {name: made[name] for name in wanted} == wanted


def test_a_configuration_without_layers_has_no_twin() -> None:
    with pytest.raises(ValueError, match="config.json does not say its number of layers and heads and hidden"):
        small_config({"model_type": "rnn"}, {"model_type": "rnn"})


def test_each_setting_is_left_out() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "sliding_window": 6, "attention_bias": True, "scale": 0.5,
        "layer_types": ["sliding", "full"], "rope_parameters": {"rope_type": "yarn", "attention_factor": 1.7},
        "bos_token_id": 1, "attention_dropout": 0.1, "head_dim": None,
    }  # fmt: skip
    found = [(name, changed) for name, changed in left_out(config)]
    assert [name for name, _ in found] == [
        "sliding_window", "attention_bias", "scale", "scale", "layer_types", "layer_types",
        "rope_parameters.rope_type", "rope_parameters.attention_factor", "rope_parameters.attention_factor",
        "rope_parameters",
    ]  # fmt: skip
    assert found[0][1] == {**config, "sliding_window": 64}
    assert found[1][1] == {**config, "attention_bias": False}
    assert "scale" not in found[2][1]
    assert found[4][1]["layer_types"] == ["sliding", "sliding"]
    assert found[7][1]["rope_parameters"] == {"rope_type": "yarn"}


REAL = os.environ.get("TRT_KVCACHE_EXPORTERS", sys.executable)
"""An interpreter with torch and transformers, where the tests' own has none."""


@pytest.mark.slow
def test_a_twin_of_a_checkpoint(tmp_path: Path) -> None:
    """transformers reads what was written, computes the same, and the same without a setting that does nothing."""
    if subprocess.run([REAL, "-c", "import torch, transformers"], capture_output=True).returncode:
        pytest.skip("torch or transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "sliding_window": None, "attention_bias": True}))
    script, folder = Path(twin.__file__), tmp_path / "twin"
    subprocess.run([REAL, str(script), str(tmp_path), str(folder)], check=True, capture_output=True)
    words = [str(folder), str(folder / "decode.json"), str(tmp_path / "again.npz")]
    subprocess.run([REAL, str(script.with_name("checkpoint.py")), *words], check=True, capture_output=True)
    with np.load(folder / "logits.npz") as first, np.load(tmp_path / "again.npz") as again:
        for name, text in zip("01", DECODE["texts"], strict=True):
            assert first[name].shape == (len(text), twin.VOCABULARY)
            np.testing.assert_allclose(first[name], again[name], rtol=0, atol=1e-5)
    # Without biases: what an exporter that drops them would write.
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps({**LLAMA, "attention_bias": False}))
    subprocess.run([REAL, str(script), str(plain), str(plain / "twin")], check=True, capture_output=True)
    words = ["explain", str(folder), str(plain / "twin" / "logits.npz"), "0.01"]
    subprocess.run([REAL, str(script), *words], check=True, capture_output=True)
    assert json.loads((folder / "settings.json").read_text()) == ["attention_bias"]
