"""A trained model with adapters of peft: eight sequences of five adapters and none, in one batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real.test_trained import Trained

from trt_kvcache import DecodeSession
from trt_kvcache.decoding import CpuOptions

torch = pytest.importorskip("torch", reason="torch is not installed (extra: exporters)")
peft = pytest.importorskip("peft", reason="peft is not installed (extra: exporters)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: exporters)")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KINDS: list[dict[str, Any]] = [
    {"r": 16},
    {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "use_rslora": True},
    {"r": 16, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [3, 20]},
    {"r": 2, "target_modules": ["down_proj", "o_proj"], "lora_alpha": 64},
]
TEXT, NEW = "The capital of France is Paris, and the capital of Italy is", 12


def written(checkpoint: Path, folder: Path, seed: int, settings: dict[str, Any]) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = peft.LoraConfig(**{"lora_alpha": 16, "target_modules": "all-linear", **settings})
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                size = 0.02 if "lora_B" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder


def judged(checkpoint: Path, adapter: Path | None, tokens: list[int]) -> tuple[np.ndarray, list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    text = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(text).logits[0].numpy()
        how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        new = model.generate(text, attention_mask=torch.ones_like(text), **how)[0, len(tokens) :]
    return logits, new.tolist()


@pytest.mark.parametrize("exporter", ["mobius", "genai"])
def test_a_trained_model_mixes_adapters(exporter: str, tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    checkpoint, model = trained.checkpoint("smollm2"), trained.export("smollm2", exporter, "float32")
    folders = {str(i): written(checkpoint, tmp_path / str(i), i, kind) for i, kind in enumerate(KINDS)}
    with DecodeSession.open(model, adapters=folders, cpu=CpuOptions(default_capacity=64)) as session:
        tokens = session.tokenizer.encode(TEXT)
        wanted = {name: judged(checkpoint, folders.get(name or ""), tokens) for name in (None, *folders)}
        for name, (logits, _) in wanted.items():
            slot = session.cache.acquire(adapter=name)
            found = session.update({slot: tokens}, keep=len(tokens))[slot]
            session.cache.release(slot)
            assert np.abs(found - logits).max() < 1e-4 * max(1.0, float(np.abs(logits).max()) / 10)
        chosen = [*folders, None, "0", None]
        slots = [session.add(tokens, adapter=name, max_new_tokens=NEW, eos_token_id=()) for name in chosen]
        made = {slot: list[int | None]() for slot in slots}
        while session.running:
            for event in session.step():
                made[event.sequence].append(event.token)
        assert [made[slot] for slot in slots] == [wanted[name][1] for name in chosen]
        assert len({tuple(new) for _, new in wanted.values()}) > 2
