"""More families of decoders, beside those of `checkpoints.ARCHITECTURES`: each by few exporters.

`docs/exporters-tables.md` shows what was measured.

Names are transformers' own (`model_type`), with what differs from its usual form after a hyphen. Every feature that
bears on caches and attention is on: windows that are small, layers of different kinds, biases, norms of queries and
keys, experts.
"""

from typing import Any

from exporters.checkpoints import GEMMA, GROUPED, MIXED_WINDOWS, PAIR, POSITIONS, T5, WINDOW, Architecture

EXPORTERS = ("mobius-dynamic", "optimum", "torch-dynamic-op20-eager", "genai-cpu-fp32")

_KV = {"num_key_value_heads": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = _LOCAL | {"num_experts": 4, "moe_intermediate_size": 32}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": POSITIONS, "n_ctx": POSITIONS}
_RANKS = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
_LATENT = _RANKS | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
_FALCON = {"ffn_hidden_size": 96, "tie_word_embeddings": True}
_LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.3 * i for i in range(8)]}
_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "partial_rotary_factor": 0.5,
}  # fmt: skip
_PAIR = PAIR | {"forced_eos_token_id": None}


def _text(name: str, settings: dict[str, Any]) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", settings)


def _pair(name: str, settings: dict[str, Any]) -> Architecture:
    return Architecture(f"{name}ForConditionalGeneration", f"{name}Config", settings, encoder_decoder=True)


FAMILIES = {
    "apertus": _text("Apertus", _KV),
    "arcee": _text("Arcee", GROUPED),
    "biogpt": _text("BioGpt", {}),
    "bloom": _text("Bloom", {"n_layer": 2, "n_head": 4, "intermediate_size": 256, "tie_word_embeddings": True}),
    "codegen": _text("CodeGen", _GPT | {"rotary_dim": 8}),
    "cohere": _text("Cohere", _KV | {"tie_word_embeddings": True}),
    "cohere2": _text("Cohere2", _KV | MIXED_WINDOWS | {"tie_word_embeddings": True}),
    "deepseek_v3": _text("DeepseekV3", _LATENT),
    "ernie4_5": _text("Ernie4_5", GROUPED | {"use_bias": True}),
    "exaone4": _text("Exaone4", GROUPED | MIXED_WINDOWS),
    "falcon": _text("Falcon", _FALCON | {"multi_query": True, "parallel_attn": True, "alibi": False}),
    "falcon-new": _text("Falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "falcon-alibi": _text(
        "Falcon", _FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}
    ),
    "gemma": _text("Gemma", {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
    "glm": _text("Glm", GROUPED | {"partial_rotary_factor": 0.5, "attention_bias": False}),
    "glm4": _text("Glm4", GROUPED | {"partial_rotary_factor": 0.5, "attention_bias": False}),
    "glm4_moe_lite": _text("Glm4MoeLite", _LATENT),
    "gpt_bigcode": _text("GPTBigCode", _GPT | {"multi_query": True}),
    "gpt_neo": _text(
        "GPTNeo",
        {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "num_layers": 2, "num_heads": 4},
    ),
    "gpt_neox": _text("GPTNeoX", {"rotary_pct": 0.25}),
    "gpt_oss": _text("GptOss", GROUPED | MIXED_WINDOWS | _LOCAL | {"rope_scaling": _YARN}),
    "gptj": _text("GPTJ", _GPT | {"rotary_dim": 8}),
    "granite": _text("Granite", _KV | {"attention_multiplier": 0.1, "residual_multiplier": 0.22}),
    "granitemoe": _text("GraniteMoe", _KV | _LOCAL | {"attention_multiplier": 0.1}),
    "helium": _text("Helium", GROUPED),
    "hunyuan_v1_dense": _text("HunYuanDenseV1", GROUPED),
    "lfm2": _text(
        "Lfm2",
        _KV | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "hidden_act": "silu"},
    ),
    "minicpm3": _text("MiniCPM3", _RANKS),
    "mistral4": _text("Mistral4", _LATENT),
    "mixtral": _text("Mixtral", GROUPED | _LOCAL | {"sliding_window": WINDOW}),
    "mpt": _text(
        "Mpt",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": POSITIONS, "intermediate_size": 256}
        | {"tie_word_embeddings": True},
    ),
    "nemotron": _text("Nemotron", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}),
    "olmo": _text("Olmo", _KV | {"clip_qkv": 1.0}),
    "olmo2": _text("Olmo2", _KV),
    "olmo3": _text("Olmo3", _KV | MIXED_WINDOWS),
    "olmoe": _text("Olmoe", _KV | {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": _text("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True}),
    "persimmon": _text("Persimmon", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi3-longrope": _text(
        "Phi3",
        _KV
        | {"original_max_position_embeddings": 128, "sliding_window": None}
        | {"rope_scaling": {"type": "longrope", **_LONG}},
    ),
    "phimoe": _text(
        "Phimoe",
        _KV
        | _LOCAL
        | {"attention_bias": True, "lm_head_bias": True, "sliding_window": None}
        | {"original_max_position_embeddings": 128}
        | {"rope_scaling": {"type": "longrope", "short_mscale": 1.2, "long_mscale": 1.3, **_LONG}},
    ),
    "qwen2": _text("Qwen2", _KV),
    "qwen2_moe": _text("Qwen2Moe", _KV | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": _text("Qwen3Moe", GROUPED | _EXPERTS),
    "qwen3_next": _text("Qwen3Next", GROUPED | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 32}),
    "seed_oss": _text("SeedOss", GROUPED | {"attention_bias": True, "attention_out_bias": True}),
    "smollm3": _text("SmolLM3", _KV | {"no_rope_layers": [1, 0], "use_sliding_window": True} | MIXED_WINDOWS),
    "stablelm": _text("StableLm", _KV | {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "starcoder2": _text("Starcoder2", _KV | {"sliding_window": WINDOW}),
    "vaultgemma": _text("VaultGemma", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    "xglm": _text("XGLM", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}),
    "youtu": _text("Youtu", _RANKS),
    "bart": _pair("Bart", _PAIR),
    "blenderbot": _pair("Blenderbot", _PAIR),
    "longt5": _pair("LongT5", T5 | {"encoder_attention_type": "local", "local_radius": 8}),
    "m2m_100": _pair("M2M100", _PAIR),
    "marian": Architecture("MarianMTModel", "MarianConfig", _PAIR | {"decoder_vocab_size": 256}, encoder_decoder=True),
    "mbart": _pair("MBart", _PAIR),
    "mt5": _pair("MT5", T5 | {"feed_forward_proj": "gated-gelu"}),
    "pegasus": _pair("Pegasus", _PAIR),
}

_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
_BASE = {"rope_type": "yarn", "factor": 4.0, **_ROPE}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ROPE}
_SLIDING = {"sliding_window": WINDOW}


def _rope(name: str, rope: dict[str, Any], **more: Any) -> Architecture:
    return _text(name, GROUPED | {"rope_parameters": rope} | more)


def _gpt2(settings: dict[str, Any]) -> Architecture:
    return Architecture("GPT2LMHeadModel", "GPT2Config", _GPT | {"tie_word_embeddings": True} | settings)


SETTINGS = {
    "mistral-whole": _text("Mistral", GROUPED | {"sliding_window": None}),
    "mistral-heads": _text("Mistral", _KV | {"head_dim": 32, "sliding_window": None}),
    "phi3-window": _text("Phi3", _KV | _SLIDING | {"original_max_position_embeddings": 256}),
    "phi3-partial": _text("Phi3", {"num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}
                          | {"sliding_window": None, "original_max_position_embeddings": 256}),
    "qwen2-window": _text("Qwen2", _KV | _SLIDING | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-window": _text("Qwen3", GROUPED | {"use_sliding_window": True} | MIXED_WINDOWS),
    "qwen3-yarn": _rope("Qwen3", _BASE),
    "qwen3-yarn-attention": _rope("Qwen3", _BASE | {"attention_factor": 1.7}),
    "qwen3-yarn-betas": _rope("Qwen3", _BASE | {"beta_fast": 16.0, "beta_slow": 2.0}),
    "llama-yarn": _rope("Llama", _BASE),
    "llama-dynamic": _rope("Llama", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}),
    "llama-linear": _rope("Llama", {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "llama-llama3": _rope("Llama", _LLAMA3),
    "llama-base": _rope("Llama", {"rope_type": "default", "rope_theta": 500.0}),
    "llama-biases": _text("Llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama-mqa": _text("Llama", {"num_key_value_heads": 1}),
    "llama-tied": _text("Llama", GROUPED | {"tie_word_embeddings": True}),
    "llama-gelu": _text("Llama", GROUPED | {"hidden_act": "gelu"}),
    "llama-epsilon": _text("Llama", GROUPED | {"rms_norm_eps": 0.1}),
    "gpt_neox-serial": _text("GPTNeoX", {"rotary_pct": 0.5, "use_parallel_residual": False}),
    "gpt_neox-gelu": _text("GPTNeoX", {"rotary_pct": 0.5, "hidden_act": "relu"}),
    "gemma2-soft": _text("Gemma2", GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma2-scalar": _text("Gemma2", GEMMA | {"query_pre_attn_scalar": 64}),
    "gemma3-scalar": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA | {"query_pre_attn_scalar": 64}),
    "ministral": _text("Ministral", GROUPED | MIXED_WINDOWS),
    "ministral3": _text("Ministral3", GROUPED | {"rope_parameters": {
        **_BASE, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }}),
    "granite-scales": _text("Granite", _KV | {"attention_multiplier": 0.1, "logits_scaling": 3.0}
                            | {"embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "gpt2-inverse": _gpt2({"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": _gpt2({"scale_attn_weights": False}),
    "starcoder2-whole": _text("Starcoder2", _KV | {"sliding_window": None, "use_bias": True}),
    "stablelm-norms": _text("StableLm", _KV | {"partial_rotary_factor": 0.5, "qk_layernorm": True}
                            | {"use_parallel_residual": True}),
    "phi-norms": _text("Phi", {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_layernorm": True}),
    "cohere-norms": _text("Cohere", _KV | {"use_qk_norm": True, "logit_scale": 0.25, "tie_word_embeddings": True}),
    "olmo-plain": _text("Olmo", _KV | {"clip_qkv": None}),
    "opt-behind": _text("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": False}
                        | {"tie_word_embeddings": True}),
    "ernie4_5-plain": _text("Ernie4_5", GROUPED | {"use_bias": False}),
    "qwen3_moe-raw": _text("Qwen3Moe", GROUPED | _EXPERTS | {"norm_topk_prob": True}),
    "mixtral-whole": _text("Mixtral", GROUPED | _LOCAL | {"sliding_window": None}),
    "gpt_oss-plain": _text("GptOss", GROUPED | MIXED_WINDOWS | _LOCAL),
}  # fmt: skip
"""Settings of single families, each of which changes what a model computes; for comparisons with transformers alone."""
