"""`generate` of encoder-decoders: the encoder beside the model reads the sources."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import invoke
from encoders import encoder, first_step, heard
from hybrids import cross_logits, cross_model, greedy, write

LENGTHS = (6, 11)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export with features as its encoder's input, and a config."""
    encoder(tmp_path / "encoder_model.onnx")
    first_step(tmp_path / "decoder_model.onnx")
    write(tmp_path / "decoder_with_past_model.onnx", cross_model("keys"))
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 9}')
    for i, length in enumerate(LENGTHS):
        np.savez(tmp_path / f"{i}.npz", input_features=heard(length, i))
    return tmp_path


def call(*arguments: object, code: int = 0) -> Any:
    return invoke("generate", *arguments, "--max-new-tokens", "6", code=code)


def tokens(*arguments: object) -> list[list[int]]:
    return [s["tokens"] for s in json.loads(call(*arguments, "--json").stdout)["sequences"]]


def expected(prompt: list[int], index: int) -> list[int]:
    return greedy(lambda t: cross_logits(t, "none", LENGTHS[index], index), prompt, 6)


@pytest.mark.slow
def test_features(folder: Path) -> None:
    """Texts start as the config says, or as they are given; one of either goes with several of the others."""
    sources = [f"--source-inputs={folder / name}" for name in ("0.npz", "1.npz")]
    assert tokens(folder, *sources) == [expected([9], 0), expected([9], 1)]
    assert tokens(folder, *sources, "--tokens", "3,4") == [expected([3, 4], 0), expected([3, 4], 1)]
    assert tokens(folder, sources[1], "--tokens=3", "--tokens=4") == [expected([3], 1), expected([4], 1)]
    assert tokens(folder, *sources, "--tokens=3", "--tokens=4") == [expected([3], 0), expected([4], 1)]


@pytest.mark.slow
def test_mistakes(folder: Path) -> None:
    source = ["--source-inputs", folder / "0.npz"]
    cases: list[tuple[list[object], str]] = [
        ([*source, "--constants", folder / "0.npz"], "--source and --constants give the same inputs; use one of them"),
        ([*source * 2, "--tokens=1", "--tokens=2", "--tokens=3"], "there are 2 sources for 3 prompts; give one"),
        (["--tokens=1", "--encoder", folder], "has nothing to read; give --source, or leave it out"),
        (["--tokens=1"], "past_key_values.a.encoder.key"),
        (["--source-tokens=one"], "--source-tokens 'one' is not a list of token ids"),
        (["--source-tokens=1"], "'input_ids' is not an input of the encoder"),
        (["--source=one"], "text needs a tokenizer"),
        (["--source-inputs", folder / "none.npz"], "none.npz: cannot be read"),
        ([], "nothing to continue; give --prompt, --prompt-file, --tokens or --inputs-embeds, or --source"),
    ]
    for arguments, words in cases:
        assert words in call(folder, *arguments, code=1).output
    (folder / "generation_config.json").unlink()
    assert (
        "names the decoder_start_token_id, with which texts of an encoder-decoder start; give"
        in call(folder, *source, code=1).output
    )
