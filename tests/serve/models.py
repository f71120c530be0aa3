"""What other servers serve in tests."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from decoders import DecoderConfig, write_decoder
from runtime.tokenizers_in_code import byte_level

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def write_served(folder: Path, *, capacity: int = 96) -> Path:
    """A small decoder with a tokenizer and a chat template."""
    folder.mkdir()
    write_decoder(folder / "model.onnx", DecoderConfig(vocab=300, capacity=capacity, layers=1))
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def free_port() -> int:
    """A port of this machine that nobody had a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
