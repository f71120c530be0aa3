"""Reads adapters (LoRA) that peft wrote: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

A module ``y = x W`` of the checkpoint becomes ``y = x W + scale * (x A) B``. The scale is ``lora_alpha / r``, or
``lora_alpha / sqrt(r)`` with ``use_rslora``; `rank_pattern` and `alpha_pattern` give other values by module name.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from trt_kvcache.arguments import as_path, is_number, is_whole, shown
from trt_kvcache.errors import OptionError
from trt_kvcache.files import read_object
from trt_kvcache.stored_tensors import StoredTensors

Array = npt.NDArray[Any]

_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"}
_MEANINGLESS = {  # settings that do not affect inference, or that follow from the tensors
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations for training that leave the weights of the model unchanged."""

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
"""Modules that some exporters fuse: the fused module's name, and its parts side by side."""

_MODULE = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight")
_ATTENTION = {"self_attn": "attn", "self_attention": "attn", "attention": "attn"}
_WRAPPERS = {"", "base_model", "decoder", "gpt_neox", "language_model", "model", "text_model", "transformer"}
_ENDS = 4  # most names in a message


@dataclass(frozen=True)
class LoraModule:
    """The change that an adapter makes to one module of the checkpoint, such as ``"model.layers.0.self_attn.q_proj"``.

    Attributes:
        rank: columns of A, and rows of B.
        inputs, outputs: sizes of the module.
        scale: factor of the product of A and B.
    """

    name: str
    rank: int
    inputs: int
    outputs: int
    scale: float


@dataclass(frozen=True)
class LoraFolder:
    """The opened folder of a supported adapter: its modules by name, and a digest of all values that affect results."""

    path: Path
    modules: tuple[LoraModule, ...]
    digest: str
    _tensors: StoredTensors
    _names: Mapping[str, tuple[str, str]]

    @property
    def rank(self) -> int:
        """Largest rank of the adapter's modules."""
        return max(module.rank for module in self.modules)

    @property
    def targets(self) -> tuple[str, ...]:
        """The last parts of the changed modules' names, such as ``"q_proj"``."""
        return tuple(sorted({module.name.rpartition(".")[2] for module in self.modules}))

    def read(self, module: LoraModule) -> tuple[Array, Array]:
        """Return a module's float32 matrices A ``[inputs, rank]`` and B ``[rank, outputs]``; B includes the scale."""
        a, b = (self._tensors.read(name) for name in self._names[module.name])
        return a.astype(np.float32).T, b.astype(np.float32).T * np.float32(module.scale)


def open_lora(folder: str | os.PathLike[str]) -> LoraFolder:
    """Open an adapter's folder; raise `OptionError` if it is no adapter, damaged, or of an unsupported kind."""
    path = as_path(folder, "folder")
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    if not config.is_file():
        raise OptionError(f"{path}: no adapter: there is no adapter_config.json; give a folder that peft wrote")
    if not weights.is_file():
        pickled = (path / "adapter_model.bin").exists()
        why = "adapter_model.bin is a pickle, which runs code when it is read" if pickled else "there are no weights"
        raise OptionError(f"{path}: {why}; save the adapter as adapter_model.safetensors (safe_serialization=True)")
    try:
        settings = read_object(config)
    except (OSError, ValueError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise OptionError(f"{config} {why}; copy the file again") from None
    _check(settings, config)
    tensors = StoredTensors(weights, mapped=False)
    names = _pairs(tensors, path)
    modules = tuple(_module(name, names[name], tensors, settings, path) for name in sorted(names))
    return LoraFolder(path, modules, _digest(modules, names, tensors), tensors, names)


def module_key(name: str) -> tuple[str, ...] | None:
    """Return a key that is equal for all spellings of a module's name; None for a module outside the decoder.

    ``"model.layers.3.self_attn.q_proj"``, ``"model.model.layers.3.attn.q_proj"`` -> ``("3", "attn", "q_proj")``.
    """
    parts = [part for part in name.split(".") if part]
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if first is None:
        outside = [part for part in parts[:-1] if part not in _WRAPPERS]
        return None if outside or not parts else (parts[-1],)
    outside = [part for part in parts[: max(first - 1, 0)] if part not in _WRAPPERS]
    return None if outside else tuple(_ATTENTION.get(part, part) for part in parts[first:])


def _check(settings: Mapping[str, Any], path: Path) -> None:
    if settings.get("peft_type") != "LORA":
        raise OptionError(f"{path}: the adapter is of kind {shown(settings.get('peft_type'))}; only LORA is supported")
    if settings.get("bias") not in (None, "none"):
        raise OptionError(f"{path}: bias is {shown(settings['bias'])}, and biases are not supported; train with 'none'")
    if settings.get("init_lora_weights", True) not in _INITIAL:
        raise OptionError(
            f"{path}: init_lora_weights is {shown(settings['init_lora_weights'])}, which changes the model's own "
            "weights; convert it to a plain adapter when you save it (path_initial_model_for_weight_conversion)"
        )
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(name) or {}, dict):
            raise OptionError(f"{path}: {name} is {shown(settings[name])}, which is not a mapping; copy the file again")
    if not isinstance(settings.get("use_rslora") or False, bool):
        raise OptionError(f"{path}: use_rslora is {shown(settings['use_rslora'])}; it must be true or false")
    for name in sorted(settings.keys() - _READ - _MEANINGLESS):
        if settings[name] not in (None, False, "none", [], {}):
            raise OptionError(f"{path}: {name} is {shown(settings[name])}, which is not supported; train without it")


def _pairs(tensors: StoredTensors, path: Path) -> dict[str, tuple[str, str]]:
    """Return the names of the tensors A and B of each module that the adapter changes."""
    sides: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        match = _MODULE.fullmatch(tensor)
        if match is None:
            raise OptionError(
                f"{path}: tensor '{tensor}' is not A or B of a linear module; biases, embeddings, magnitudes (DoRA) "
                "and modules that were saved whole are not supported: train without them"
            )
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise OptionError(f"{path}: the adapter has no tensors")
    for module, pair in sides.items():
        if len(pair) != 2:
            raise OptionError(f"{path}: module '{module}' has only {next(iter(pair.values()))}; copy the file again")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}


def _module(
    name: str, pair: tuple[str, str], tensors: StoredTensors, settings: Mapping[str, Any], path: Path
) -> LoraModule:
    a, b = (tensors.shapes[tensor] for tensor in pair)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or min(*a, *b) < 1:
        raise OptionError(f"{path}: module '{name}' has A {list(a)} and B {list(b)}, which cannot be multiplied")
    rank = _of_module("rank_pattern", "r", name, settings, path)
    alpha = _of_module("alpha_pattern", "lora_alpha", name, settings, path)
    if rank != a[0]:
        raise OptionError(f"{path}: module '{name}' has a rank of {a[0]}, and adapter_config.json says {rank}")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return LoraModule(name, a[0], a[1], b[0], scale)


def _of_module(pattern: str, default: str, name: str, settings: Mapping[str, Any], path: Path) -> float:
    """Return a module's setting, such as its rank: that of the first pattern that matches its name, else `default`."""
    import re2

    quiet = re2.Options()
    quiet.log_errors = False
    value = settings.get(default)
    for key, own in (settings.get(pattern) or {}).items():
        try:
            if re2.compile(rf"(?:.*\.)?(?:{key})", quiet).fullmatch(name):
                value = own
                break
        except (re2.error, UnicodeEncodeError):
            raise OptionError(f"{path}: {pattern} has {shown(key)}, which RE2 does not read as a pattern") from None
    if not is_number(value) or not math.isfinite(value) or (default == "r" and not is_whole(value)):
        raise OptionError(f"{path}: {default} of module '{name}' is {shown(value)}, which is not a number")
    return value


def _digest(modules: tuple[LoraModule, ...], names: Mapping[str, tuple[str, str]], tensors: StoredTensors) -> str:
    digest = blake3(max_threads=blake3.AUTO)
    for module in modules:
        digest.update(repr(module).encode())
        for name in names[module.name]:
            data = tensors.read(name)
            digest.update(f"{data.dtype}{data.shape}".encode())
            digest.update(np.ascontiguousarray(data).view(np.uint8).data if data.size else b"")
    return digest.hexdigest()


def list_names(names: list[str]) -> str:
    """Return text with the names for a message; of a long list, only the first few."""
    more = f" and {len(names) - _ENDS} more" if len(names) > _ENDS else ""
    return ", ".join(f"'{name}'" for name in names[:_ENDS]) + more
