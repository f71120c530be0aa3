"""Adapters as peft writes them, made without it, and models with their weights merged, to compare numbers with."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.numpy import save_file

MODELS = Path(__file__).parent / "models"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Array = NDArray[Any]

_BY_NAME = ("mobius/llama_dynamic_f32", "mobius/llama_static_f32", "ort-genai/llama_cpu_fp32", "optimum/llama")
LLAMAS = {name: MODELS / name / "model.onnx" for name in _BY_NAME}


class Tiny:
    """A Llama of `models`: where the weight of each module is, in the names of its exporter."""

    def __init__(self, name: str, layers: int = 2) -> None:
        self.name, self.path = name, LLAMAS[name]
        self.model = onnx.load(self.path)
        self._weights = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self.modules = [
            f"model.layers.{layer}.{'mlp' if target in TARGETS[4:] else 'self_attn'}.{target}"
            for layer in range(layers)
            for target in TARGETS
        ]

    def place(self, module: str) -> tuple[str, int, int]:
        """The initializer ``[in, out]`` that holds a module, and its columns there."""
        stem, _, target = module.rpartition(".")
        if self.name.startswith("mobius"):
            name = f"{module}.weight_t"
        elif self.name.startswith("optimum"):
            node = "/" + module.replace(".", "/").replace("layers/", "layers.") + "/MatMul"
            name = next(n.input[1] for n in self.model.graph.node if n.name == node)
        else:
            stem = stem.replace("self_attn", "attn")
            if target in TARGETS[:3]:
                start = {"q_proj": 0, "k_proj": 64, "v_proj": 96}[target]
                return f"{stem}.qkv_proj.MatMul.weight", start, start + (64 if target == "q_proj" else 32)
            name = f"{stem}.{target}.MatMul.weight"
        return name, 0, int(self._weights[name].dims[1])

    def weight(self, module: str) -> Array:
        """As ``[in, out]``."""
        name, start, stop = self.place(module)
        return numpy_helper.to_array(self._weights[name])[:, start:stop]

    def merged(self, changes: Mapping[str, Array], path: Path) -> Path:
        """The model as exported, with what an adapter adds to each module."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        weights = {tensor.name: tensor for tensor in model.graph.initializer}
        for module, change in changes.items():
            name, start, stop = self.place(module)
            whole = numpy_helper.to_array(weights[name]).copy()
            whole[:, start:stop] += change.astype(whole.dtype)
            weights[name].CopyFrom(numpy_helper.from_array(whole, name))
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)
        for beside in ("genai_config.json", "config.json"):
            if (self.path.parent / beside).exists():
                (path.parent / beside).write_bytes((self.path.parent / beside).read_bytes())
        return path


def draw(
    tiny: Tiny,
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    targets: Sequence[str] = TARGETS,
    layers: Sequence[int] = (0, 1),
    size: float = 0.4,
    **settings: Any,
) -> dict[str, Array]:
    """Write an adapter of random numbers; returns what it adds to the weight ``[in, out]`` of each module."""
    rng, tensors, changes = np.random.default_rng(seed), {}, {}
    alpha = settings.get("lora_alpha", 2 * rank)
    for module in tiny.modules:
        if module.rpartition(".")[2] not in targets or int(module.split(".")[2]) not in layers:
            continue
        weight = tiny.weight(module)
        a = (rng.normal(size=(rank, weight.shape[0])) / weight.shape[0] ** 0.5).astype(np.float32)
        b = (size * rng.normal(size=(weight.shape[1], rank)) / rank**0.5).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
        changes[module] = scale * (b.astype(np.float64) @ a.astype(np.float64)).T
    write(folder, tensors, {"r": rank, "lora_alpha": alpha, "target_modules": list(targets), **settings})
    return changes


def write(folder: Path, tensors: Mapping[str, Array], settings: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(plain | dict(settings)))
