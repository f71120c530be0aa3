"""Models that servers serve in tests."""

from __future__ import annotations

import json
import random
import socket
from contextlib import suppress
from pathlib import Path

from decoders import DecoderConfig, write_decoder
from runtime.tokenizers_in_code import byte_level

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def write_served(folder: Path, *, capacity: int = 512, template: str = TEMPLATE, **settings: str) -> Path:
    """A small decoder with a tokenizer and a chat template; `settings` are the tokenizer's, too."""
    folder.mkdir(exist_ok=True)
    write_decoder(folder / "model.onnx", DecoderConfig(vocab=300, capacity=capacity, layers=1))
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **settings}))
    return folder


def free_port() -> int:
    """A port of this machine that nobody had a moment ago; Dynamo has 16 bits with a sign for some."""
    for port in random.sample(range(20_000, 2**15), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")
