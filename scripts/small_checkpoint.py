"""Writes a small checkpoint: a Llama with random weights, a trained tokenizer and a chat template. Needs no torch.

    python scripts/small_checkpoint.py FOLDER

It is for trying the way from a checkpoint to text. Its texts mean nothing, because it was not trained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCAB = 64, 2, 4, 2, 128, 512
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


def write_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_text(encoding="utf-8").splitlines()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (1.5 * rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    size, norm = HIDDEN // HEADS, np.ones(HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "model.norm.weight": norm}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {f"{at}{name}_layernorm.weight": norm.copy() for name in ("input", "post_attention")}
        weights |= {f"{at}self_attn.{name}_proj.weight": weight(HEADS * size, HIDDEN) for name in "qo"}
        weights |= {f"{at}self_attn.{name}_proj.weight": weight(KV_HEADS * size, HIDDEN) for name in "kv"}
        weights |= {f"{at}mlp.{name}_proj.weight": weight(INNER, HIDDEN) for name in ("gate", "up")}
        weights[f"{at}mlp.down_proj.weight"] = weight(HIDDEN, INNER)
    weights["lm_head.weight"] = weight(VOCAB, HIDDEN)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "intermediate_size": INNER, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
            "torch_dtype": "float32",
        },
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1],
            "chat_template": TEMPLATE,
        },
    }  # fmt: skip
    for name, content in settings.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
