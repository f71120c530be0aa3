"""transformers' own caches of a window's size in a StaticCache: full ones become rings; others are refused."""

from pathlib import Path
from typing import Any

import pytest
from exporters import checkpoints
from exporters.exports import CAPACITY, missing

from trt_kvcache import DecodeSession, GenerationConfig, build_engine, plan_model, verify_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import UpdateMode

PROMPTS = [[5, 9, 3], list(range(20, 41)), [77]]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # exporters warn of their own dependencies
    pytest.mark.skipif(missing("torch") is not None, reason=missing("torch") or ""),
]


def rolled(arch: str, attention: str, folder: Path, **how: Any) -> tuple[Any, Path]:
    from exporters import wrappers

    model = checkpoints.load(checkpoints.write(arch, folder / "checkpoint"), attention)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default computes shapes from data
    return model, wrappers.save(wrappers.rolled(model, CAPACITY, **how), 20, folder / "model.onnx")


@pytest.mark.parametrize(("arch", "attention"), [("mistral", "sdpa"), ("gemma3", "sdpa"), ("gpt_oss", "eager")])
def test_tokens_are_those_of_the_checkpoint_without_caches(arch: str, attention: str, tmp_path: Path) -> None:
    import torch

    model, path = rolled(arch, attention, tmp_path)
    plan = plan_model(path)
    rows = {"shift": checkpoints.WINDOW, "ScatterND": CAPACITY}
    assert all(c.capacity == rows[c.idiom] and c.in_place for c in plan.caches)
    assert sum(c.mode is UpdateMode.CIRCULAR for c in plan.caches) == (4 if arch == "mistral" else 2)
    verify_model(path).check()
    with DecodeSession.open(path, max_batch=3) as session:
        found = session.generate(PROMPTS, GenerationConfig(max_new_tokens=20, eos_token_id=()))
    for prompt, result in zip(PROMPTS, found, strict=True):
        text = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                logits = model(torch.tensor([text]), use_cache=False).logits
            text.append(int(logits[0, -1].argmax()))
        assert result.tokens == text[len(prompt) :]
    assert build_engine(path, tmp_path / "model.engine").aliases == {c.present: c.past for c in plan.caches}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"full": False}, "writes rows 0 of axis 2 .* counts its tokens in Python, .* give the masks as inputs"),
        ({"masked": False}, "shows the last query 8 of 8 rows .* one count for good: .* attention_mask="),
    ],
)
def test_an_export_that_holds_one_length_is_refused(how: dict[str, bool], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(rolled("mistral", "sdpa", tmp_path, **how)[1])
