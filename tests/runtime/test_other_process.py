"""A sequence that moves to another process goes on with the tokens that it would have had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache import DecodeSession, GenerationConfig

PROMPT, TOKENS, MOVED = [3, 1, 4, 1, 5], 14, 6
CONFIGS = {"greedy": {}, "drawn": {"do_sample": True, "temperature": 1.5, "seed": 11}}
GOES_ON = """
import json, sys
from trt_kvcache import DecodeSession, GenerationConfig
model, saved, settings, index, last = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
with DecodeSession.open(model, max_batch=3) as session:
    session.add([7, 7, 7], GenerationConfig(max_new_tokens=4, do_sample=True, seed=5))  # it takes the first row
    (slot,) = session.cache.load(saved).values()
    number = session.add(last, GenerationConfig(**settings), slot=slot, index=index)
    events = []
    while session.running:
        events += session.step()
print(json.dumps([event.token for event in events if event.sequence == number]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_the_same(name: str, tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64))
    settings, index = CONFIGS[name], 3
    with DecodeSession.open(model, max_batch=2) as session:
        number = session.add(PROMPT, GenerationConfig(max_new_tokens=TOKENS, **settings), index=index)
        alone = [event.token for _ in range(TOKENS) for event in session.step() if event.sequence == number]
        assert len(alone) == TOKENS
        # The last token of a text is not in the cache yet: it is the first that the other process gets.
        slot = session.cache.acquire()
        session.update({slot: PROMPT + alone[: MOVED - 1]})
        session.cache.save(tmp_path / "saved.npz", [slot])
    rest = json.dumps({**settings, "max_new_tokens": TOKENS - MOVED})
    arguments = [str(model), str(tmp_path / "saved.npz"), rest, str(index), json.dumps([alone[MOVED - 1]])]
    ran = subprocess.run([sys.executable, "-c", GOES_ON, *arguments], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == alone[MOVED:]
    if name == "drawn":  # another index, other numbers: the test can fail
        arguments[3] = str(index + 1)
        other = subprocess.run([sys.executable, "-c", GOES_ON, *arguments], capture_output=True, text=True, timeout=120)
        assert json.loads(other.stdout) != alone[MOVED:]
