"""Positions with several planes for each token (M-RoPE): what a session and the verification give them."""

from pathlib import Path

import numpy as np
import onnx
from concat_graphs import Build, Decoder, make_decoder, signal
from harness import Feeds, run
from onnx import TensorProto

from trt_kvcache import DecodeSession, GenerationConfig

CAPACITY, PLANES = 24, 3


def planar(g: Build, x: str) -> str:
    """Each plane has its own share of the hidden state."""
    positions = g.input("position_ids", TensorProto.INT64, [PLANES, "batch", "sequence"])
    planes = [g.Gather(positions, k, axis=0) for k in range(PLANES)]
    signals = [signal(g, p, w) for p, w in zip(planes, [6, 5, 5], strict=True)]
    return g.Add(x, g.node("Concat", signals, axis=-1))


def test_a_session_gives_all_planes_the_position_in_the_text(tmp_path: Path) -> None:
    """Ragged prompts in chunks: the tokens that a full recomputation chooses."""
    model = make_decoder(Decoder(positions="none", after=planar))
    onnx.save(model, tmp_path / "model.onnx")
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]
    with DecodeSession.open(str(tmp_path / "model.onnx"), capacity=CAPACITY, max_chunk=3) as session:
        results = session.generate(prompts, GenerationConfig(max_new_tokens=9))
    nothing = np.zeros((1, 2, 0, 4), np.float32)
    for prompt, result in zip(prompts, results, strict=True):
        text = np.array([[*prompt, *result.tokens][:-1]])
        feeds: Feeds = {v.name: nothing for v in model.graph.input}
        feeds |= {"input_ids": text, "position_ids": np.broadcast_to(np.arange(text.size), (PLANES, *text.shape))}
        logits = run(model, feeds)["logits"][0, len(prompt) - 1 :]
        assert result.tokens == logits.argmax(-1).tolist()
