"""Writes an adapter (LoRA) of random numbers for a model, as peft writes one. Needs no torch.

    python scripts/small_adapter.py MODEL.onnx FOLDER [RANK] [TARGET,...]

It is for trying adapters: a model's texts with it mean nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from trt_kvcache import PlanOptions, plan_model


def write_adapter(
    model: Path, folder: Path, rank: int = 8, targets: tuple[str, ...] = ("all",), seed: int = 0, size: float = 1.0
) -> None:
    plan = plan_model(model, PlanOptions(lora_rank=rank, lora_targets=targets))
    assert plan.adapters is not None
    rng = np.random.default_rng(seed)
    tensors = {}
    for product in plan.adapters.products:
        for part in product.parts:
            a = rng.standard_normal((rank, product.inputs), np.float32) / product.inputs**0.5
            b = size * rng.standard_normal((part.stop - part.start, rank), np.float32) / rank**0.5
            tensors[f"base_model.model.{part.module}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"base_model.model.{part.module}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": [*targets]}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4, 5):
        raise SystemExit(__doc__)
    model, folder, *more = sys.argv[1:]
    write_adapter(Path(model), Path(folder), *map(int, more[:1]), *(tuple(t.split(",")) for t in more[1:]))
