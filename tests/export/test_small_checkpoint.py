"""A checkpoint for trials without a download."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

import safetensors.numpy
from small_checkpoint import write_checkpoint

from trt_kvcache import GenerationConfig, Tokenizer
from trt_kvcache.export.run import installed
from trt_kvcache.model_paths import is_checkpoint

ROOT = Path(__file__).parents[2]


def test_it_is_a_checkpoint_with_a_tokenizer_and_a_template(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert is_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert weights["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert sum(name.endswith("q_proj.weight") for name in weights) == config["num_hidden_layers"]
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size <= config["vocab_size"]
    assert tokenizer.decode(tokenizer.encode("Hello, naïve 😀")) == "Hello, naïve 😀"
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "<|begin|><|user|>Hi<|end|><|assistant|>"
    assert GenerationConfig.for_model(tmp_path).eos_token_id == tokenizer.eos_token_id == 1


@pytest.mark.slow
def test_from_a_checkpoint_to_text(tmp_path: Path) -> None:
    """In an empty folder, without a download; the exporter may be in another environment."""
    python = os.environ.get("TRT_KVCACHE_EXPORTERS", sys.executable)
    if not installed(python):
        pytest.skip("no exporter is installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in (
        [str(ROOT / "scripts" / "small_checkpoint.py"), "my-checkpoint/"],
        ["-m", "trt_kvcache", "export", "my-checkpoint/", "-o", "my-export/", "--python", python],
        ["-m", "trt_kvcache", "generate", "my-export/", "--prompt", "Hello"],
    ):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    assert "128 new (length)" in done.stderr or "(eos)" in done.stderr
