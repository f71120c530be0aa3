"""The perplexity of a text is that of the exported model, in one window and in several."""

import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from commands import invoke
from decoders import DecoderConfig
from foreign_decoders import make_foreign

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from runtime.tokenizers_in_code import byte_level

from trt_kvcache import DecodeSession, Tokenizer, score
from trt_kvcache.errors import OptionError, PromptError

TEXT = "the cache holds what the model has read of the text so far, and the rest is to come. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    onnx.save(make_foreign("concat", DecoderConfig(vocab=300)), folder / "model.onnx")
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(TEXT)
    return folder


def reference(folder: Path, tokens: list[int], window: int) -> float:
    """Each token after the beginning that its window shows it, computed by ONNX Runtime from an empty past."""
    original = onnxruntime.InferenceSession(folder / "model.onnx")
    shapes = {wanted.name: wanted.shape for wanted in original.get_inputs()}
    nats, half = [], window - window // 2
    for place in range(1, len(tokens)):
        start = 0 if place < window else ((place - window) // half + 1) * half
        seen = tokens[start:place]
        fed = {
            "input_ids": np.array([seen]), "attention_mask": np.ones((1, len(seen)), np.int64),
            "position_ids": np.arange(len(seen))[None],
        }  # fmt: skip
        fed = {name: array for name, array in fed.items() if name in shapes}
        fed |= {n: np.zeros((1, shape[1], 0, shape[3]), np.float32) for n, shape in shapes.items() if "past" in n}
        row = original.run(["logits"], fed)[0][0, -1].astype(np.float64)
        nats.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[tokens[place]])
    return float(np.mean(nats))


@pytest.mark.parametrize("window", [256, 40, 7, 2])
def test_scores_are_those_of_the_exported_model(folder: Path, window: int) -> None:
    tokens = Tokenizer.load(folder).encode(TEXT)[:120]
    with DecodeSession.open(folder, max_batch=1, max_chunk=16, capacity=256) as session:
        found = score(session, tokens, window)
        assert not session.cache.slots
    assert found.tokens == len(tokens) - 1
    assert found.nats == pytest.approx(reference(folder, tokens, window), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.nats))


def test_what_has_no_score_is_refused(folder: Path) -> None:
    with DecodeSession.open(folder, max_batch=1, capacity=32) as session:
        for window in (1, 33):
            with pytest.raises(OptionError, match=f"window is {window}; it must be 2 to 32"):
                score(session, [1, 2, 3], window)
        with pytest.raises(PromptError, match="the text has 1 tokens"):
            score(session, [1])
        assert score(session, TEXT[:40]) == score(session, Tokenizer.load(folder).encode(TEXT[:40]))


def test_the_command(folder: Path) -> None:
    arguments = ["score", str(folder), str(folder / "text.txt"), "--capacity", "64", "--tokens", "90", "--window", "40"]
    said = json.loads(invoke(*arguments, "--json", code=None).stdout)
    tokens = Tokenizer.load(folder).encode(TEXT)[:90]
    assert (said["tokens"], said["nats"]) == (89, pytest.approx(reference(folder, tokens, 40), abs=1e-5))
    shown = invoke(*arguments, code=None).stdout
    assert f"perplexity {said['perplexity']:.4g}, {said['nats']:.4f} nats per token; 89 tokens, " in shown
    missing = invoke("score", folder, "no.txt", code=None)
    assert missing.stderr == "error: FILE no.txt cannot be read: No such file or directory\n"
