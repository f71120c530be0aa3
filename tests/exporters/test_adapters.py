"""Adapters that peft trained and merged, against the same adapters in real exports."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporters import checkpoints
from exporters.exports import export, missing

from trt_kvcache import DecodeSession, PlanOptions

torch = pytest.importorskip("torch", reason="torch is not installed (extra: exporters)")
peft = pytest.importorskip("peft", reason="peft is not installed (extra: exporters)")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPT = [5, 17, 33, 70, 91, 4, 8]
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "few": {"r": 2, "use_rslora": True, "target_modules": r".*\.1\..*(o_proj|down_proj|c_proj)"},
    "patterns": {"rank_pattern": {"down_proj|c_proj": 3, "layers.0.mlp.up_proj": 1}, "alpha_pattern": {"o_proj": 5}},
    "layer": {"target_modules": ["o_proj", "down_proj", "c_proj"], "layers_to_transform": [1], "lora_dropout": 0.1},
}
CASES = [
    ("mobius-dynamic", "llama"), ("mobius-static", "qwen3"), ("torch-dynamic-op20-eager", "gemma3"),
    ("torch-dynamic-op20-sdpa", "llama"), ("torch-static-op24-sdpa", "qwen3"), ("torch-dynamic-op24-eager", "gpt2"),
    ("transformers-dynamic-op20", "llama"), ("optimum", "llama"), ("genai-cpu-fp32", "llama"),
    ("genai-cpu-fp32", "phi3"), ("mobius-dynamic", "phi3"), ("torch-dynamic-op20-eager", "phi3"),
]  # fmt: skip


def write_adapter(checkpoint: Path, folder: Path, seed: int, settings: dict[str, Any]) -> Path:
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings})
    model = peft.get_peft_model(checkpoints.load(checkpoint, "eager"), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * 0.4 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def merged(checkpoint: Path, adapter: Path | None) -> Any:
    model = checkpoints.load(checkpoint, "eager")
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()


def greedy(model: Any, count: int) -> Iterator[int]:
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            yield tokens[-1]


@pytest.mark.parametrize("checkpoint_given", [False, True])
@pytest.mark.parametrize(("exporter", "arch"), CASES)
def test_exports_with_adapters_are_merged_models(
    exporter: str, arch: str, checkpoint_given: bool, tmp_path: Path
) -> None:
    if reason := missing(exporter):
        pytest.skip(reason)
    if checkpoint_given and exporter.startswith(("mobius", "genai")) and arch == "phi3":
        pytest.skip("its parts of fused modules are known by their names")
    model = export(exporter, arch, tmp_path / "export")
    checkpoint = tmp_path / "export" / "checkpoint"
    kinds = KINDS if arch != "gpt2" else {name: KINDS[name] for name in ("all", "few")}
    if arch == "phi3":
        kinds = {name: KINDS[name] for name in ("all", "layer")}
    folders = {
        name: write_adapter(checkpoint, tmp_path / name, seed, settings)
        for seed, (name, settings) in enumerate(kinds.items())
    }
    options = PlanOptions(capacity=64, checkpoint=str(checkpoint)) if checkpoint_given else PlanOptions(capacity=64)
    if "static" in exporter and exporter.startswith("mobius"):
        options = PlanOptions(checkpoint=options.checkpoint)
    with DecodeSession.open(model, tokenizer=False, adapters=folders, plan_options=options) as session:
        slots = {}
        for name in (None, *folders):
            judge = merged(checkpoint, folders.get(name or ""))
            with torch.no_grad():
                wanted = judge(torch.tensor([PROMPT])).logits[0].numpy()
            slot = session.cache.acquire(adapter=name)
            found = session.update({slot: PROMPT}, keep=len(PROMPT))[slot]
            session.cache.release(slot)
            assert np.abs(found - wanted).max() < 1e-4
            tokens = [*greedy(judge, 6)]
            slots[session.add(PROMPT, adapter=name, max_new_tokens=6, eos_token_id=())] = tokens
        made: dict[int, list[int | None]] = {slot: [] for slot in slots}
        while session.running:
            for event in session.step():
                made[event.sequence].append(event.token)
        assert made == slots
