"""Models that servers serve in tests."""

import json
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tokenizers
from decoders import DecoderConfig, make_decoder, write_decoder
from onnx import helper, numpy_helper
from runtime.tokenizers_in_code import byte_level
from tokenizers import models

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def write_served(folder: Path, *, capacity: int = 512, template: str = TEMPLATE, **settings: str) -> Path:
    """A small decoder with a tokenizer and a chat template; `settings` are the tokenizer's, too."""
    folder.mkdir(exist_ok=True)
    write_decoder(folder / "model.onnx", DecoderConfig(vocab=300, capacity=capacity, layers=1))
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"temperature": 1.0}')  # as sessions draw
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **settings}))
    return folder


def write_said(folder: Path, tokens: list[str], *, decoder: Any, template: str = TEMPLATE) -> Path:
    """A model that says its tokens in order, whatever came before: after token i comes i + 1, and next best is i + 2.

    Tokens in angle brackets are special, but for bytes; `decoder` is of the ``tokenizer.json``.
    """
    size = len(tokens)
    model = make_decoder(DecoderConfig(vocab=size, capacity=64, layers=1))
    places = np.arange(size)
    table = np.zeros((size, size), np.float32)
    table[places, (places + 1) % size] = 90
    table[places, (places + 2) % size] = 60
    model.graph.initializer.append(numpy_helper.from_array(table, "said"))
    last = next(node for node in model.graph.node if "logits" in node.output)
    last.output[:] = ["faint" if name == "logits" else name for name in last.output]
    model.graph.node.append(helper.make_node("Gather", ["said", "input_ids"], ["loud"], "node_said"))
    model.graph.node.append(helper.make_node("Add", ["loud", "faint"], ["logits"], "node_logits"))
    onnx.save(model, folder / "model.onnx")
    special = [token for token in tokens if token[0] == "<" and not token.startswith("<0x")]
    made = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    made.add_special_tokens(special)
    made.decoder = decoder
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def free_port() -> int:
    """A port of this machine that nobody had a moment ago; Dynamo has 16 bits with a sign for some."""
    for port in random.sample(range(20_000, 2**15), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")
