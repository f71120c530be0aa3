"""Computes the logits of a checkpoint with transformers, in float32 on the CPU.

    python checkpoint.py CHECKPOINT DECODE.json LOGITS.npz

This file runs in the interpreter of an exporter, so it needs torch and transformers, but nothing of this package.
DECODE.json is ``{"texts": [[token, ...], ...], "cuts": [[number of tokens of a step, ...], ...]}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def decode(model: Any, texts: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]) -> list[Any]:
    """Return the logits ``[tokens, vocabulary]`` of each text of token ids. `cuts`: sizes of each text's steps."""
    torch: Any = import_module("torch")
    logits = []
    with torch.no_grad():
        for text, steps in zip(texts, cuts, strict=True):
            cache, rows, at = None, [], 0
            for length in steps:
                tokens = torch.tensor([text[at : at + length]])
                result = model(input_ids=tokens, past_key_values=cache, use_cache=True)
                cache, at = result.past_key_values, at + length
                rows.append(result.logits[0].float())
            logits.append(torch.cat(rows).numpy())
    return logits


def save_logits(path: str | Path, logits: Sequence[Any], first: int = 0) -> None:
    """Write the logits of each text to an ``.npz`` file. Arrays are named by the texts' numbers, from `first` on."""
    import_module("numpy").savez(path, **{str(i): rows for i, rows in enumerate(logits, first)})


def main() -> None:
    """Run the command line."""
    checkpoint, asked, out = sys.argv[1:]
    torch, transformers = import_module("torch"), import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    save_logits(out, decode(model.eval(), **json.loads(Path(asked).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
