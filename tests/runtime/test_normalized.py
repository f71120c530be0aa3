"""Sessions of models whose interface normalization changes: the same tokens as the original in its own interface."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession

MODEL = Path(__file__).parents[1] / "models" / "optimum" / "llama" / "model.onnx"
PROMPTS = ([1, 2, 3, 4, 5], [200, 17], [9] * 11)


def greedy(prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of the original: caches that grow, a padding mask of ones."""
    session = ort.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_inputs() if v.name.startswith("past")]
    caches = dict.fromkeys(names, np.zeros((1, 2, 0, 16), np.float32))
    new, made, past = list(prompt), [], 0
    while len(made) < count:
        total = past + len(new)
        feeds = {
            "input_ids": np.array([new]),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(past, total)[None],
        }
        values = session.run(None, {**feeds, **caches})
        outputs = dict(zip([v.name for v in session.get_outputs()], values, strict=True))
        caches = {name: outputs[name.replace("past_key_values", "present")] for name in names}
        made.append(int(outputs["logits"][0, -1].argmax()))
        new, past = made[-1:], total
    return made


@pytest.mark.parametrize("max_chunk", [None, 4])
def test_a_session_gives_the_originals_tokens(max_chunk: int | None) -> None:
    with DecodeSession.open(MODEL, capacity=64, max_batch=2, max_chunk=max_chunk) as session:
        assert session.cache.capacity == 64
        results = session.generate(PROMPTS, GenerationConfig(max_new_tokens=33))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == greedy(prompt, 33)


def test_the_capacity_joins_the_other_options() -> None:
    options = PlanOptions(attention_span=False)
    with DecodeSession.open(MODEL, capacity=32, plan_options=options) as session:
        assert session.cache.capacity == 32
        assert not session.plan.spans


def test_engines_have_no_capacity_to_choose() -> None:
    with pytest.raises(OptionError, match="'capacity' is no option of an engine on a GPU; options are .*gpu"):
        DecodeSession.open("model.engine", capacity=32)
