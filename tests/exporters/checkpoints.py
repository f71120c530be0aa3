"""Tiny decoders with random weights as transformers writes them to disk: what every exporter starts from.

Importable without transformers or torch; `write` needs both (transformers 4.57, which optimum-onnx wants, or 5.x).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 256
POSITIONS = 256
WINDOW = 8


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers, and what its configuration sets besides `SIZES`."""

    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    encoder_decoder: bool = False


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": POSITIONS,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
MIXED_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
PAIR = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 32, "decoder_start_token_id": 0,
}  # fmt: skip
GEMMA = GROUPED | MIXED_WINDOWS | {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}

ARCHITECTURES = {
    # Rotary embedding, grouped-query attention, RMS norm.
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", GROUPED),
    # Norms of q and k before the rotary embedding.
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    # Each layer attends a window.
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": WINDOW}),
    # One layer with a window and one without; softcap of scores (small enough to matter) and of logits.
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "Gemma2Config", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}
    ),
    # One layer with a window and one without, each with its own rotary base; norms of q and k, scaled embeddings.
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    # Learned positions, one projection for q, k and v, as many KV heads as query heads, biases.
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": POSITIONS, "tie_word_embeddings": True},
    ),
    # Rotary embedding of half of each head, attention and MLP in parallel, biases. GroupQueryAttention wants a rotary
    # size that 16 divides.
    "phi": Architecture(
        "PhiForCausalLM",
        "PhiConfig",
        {"num_attention_heads": 2, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    ),
    # One projection for q, k and v, one for gate and up.
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "Phi3Config",
        {"num_key_value_heads": 2, "original_max_position_embeddings": POSITIONS, "sliding_window": None},
    ),
    # Relative position bias, unscaled scores, cross-attention.
    "t5": Architecture(
        "T5ForConditionalGeneration", "T5Config", T5 | {"tie_word_embeddings": True}, encoder_decoder=True
    ),
    # Learned positions, biases but for k, cross-attention.
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        PAIR
        | {"num_mel_bins": 16, "max_source_positions": 1500, "max_target_positions": POSITIONS}
        | {"decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": []},
        encoder_decoder=True,
    ),
}


def architecture_of(name: str) -> Architecture:
    """An architecture of the matrix, a family beside it, or a setting of one."""
    from exporters.families import FAMILIES, SETTINGS

    return (ARCHITECTURES | FAMILIES | SETTINGS)[name]


def write(arch: str, folder: Path) -> Path:
    """Write an architecture's configuration, random fp32 weights and a tokenizer to `folder`, and return it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    architecture = architecture_of(arch)
    config = getattr(transformers, architecture.config)(**SIZES | architecture.settings)
    model = getattr(transformers, architecture.model)(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms' weights about what the model starts them with, biases about 0
                parameter += 0.1 * torch.randn_like(parameter)
            else:  # large enough that scores differ between keys and logits between tokens
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t3"))
    named = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "unk_token": "t3"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return folder


def load(folder: Path, attention: str) -> Any:
    """The model of `folder` in fp32, with attention `eager` or `sdpa` as transformers calls them, "" for its choice."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    return kind.from_pretrained(folder, attn_implementation=attention or None).eval()
