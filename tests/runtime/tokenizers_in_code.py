"""Small tokenizers of the two common kinds, built in code."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "the cache keeps what the model wrote, and the model reads what the cache keeps",
    "naïve façade — ça va? 日本語のテキスト, emoji 😀😃, and the end.",
]


def byte_level(specials: tuple[str, ...] = ("<s>", "</s>")) -> tokenizers.Tokenizer:
    """BPE over bytes, as GPT-2 and Llama 3: any bytes can be written, and a token can end inside a character."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def byte_fallback() -> tokenizers.Tokenizer:
    """Pieces with a space before them, as Llama 2: characters that no piece has become byte tokens."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehtmowrl,.",
        "▁t",
        "he",
        "▁the",
    ]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)},
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made
