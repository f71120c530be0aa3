"""bfloat16 models on the CPU: in float32, against a decoder in NumPy that has the same weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.families import Twin

from trt_kvcache import DecodeSession
from trt_kvcache.runtime.ort.cpu_model import NOTE

BASE = DecoderConfig(layers=2, capacity=64, vocab=128, dtype="bfloat16", form="heads-major")
PROMPT = [5, 9, 3, 77, 1, 2, 4, 8]


@pytest.mark.few(3)
@pytest.mark.parametrize("inside", [True, False], ids=["weights inside", "external weights"])
@pytest.mark.parametrize("form", ["mobius", "heads-major", "five-d", "seq-major"])
def test_logits_equal_those_of_numpy(tmp_path: Path, form: str, inside: bool) -> None:
    config = replace(BASE, form=form)
    twin = Twin(write_decoder(tmp_path / "inside.onnx", config), config)
    model = write_decoder(tmp_path / "model.onnx", config, external_threshold=None if inside else 64)
    with DecodeSession.open(model, max_batch=2) as session:
        assert session.name.endswith("CPU, bfloat16 in float32")
        assert NOTE in session.plan.notes
        assert {c.dtype for c in session.plan.caches} == {"float"}
        slots = {session.cache.acquire(): list(PROMPT), session.cache.acquire(): PROMPT[:3]}
        logits = session.update(slots)
        for token in (7, 11):
            for slot, tokens in slots.items():
                wanted = twin.logits(tokens)
                assert np.abs(logits[slot][-1] - wanted).max() < 1e-4 * np.abs(wanted).max()
                tokens.append(token)
            logits = session.update({slot: [token] for slot in slots})
