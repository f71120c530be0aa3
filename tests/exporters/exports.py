"""Fresh exports of tiny random decoders by the exporters that people use: `export(exporter, arch, folder) -> Path`.

Each function below drives one exporter the way its documentation says, so that what the importer meets in tests is what
it meets in the wild. Weights are fp32 except for onnxruntime-genai's fp16 and int4 forms. Also a command, for exporters
whose dependencies exclude those of the tests: `python tests/exporters/exports.py EXPORTER ARCH FOLDER`.
"""

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from exporters import checkpoints
from exporters.checkpoints import architecture_of
from exporters.families import FAMILIES

CAPACITY = 64
"""Rows of each cache in exports with static caches."""


def mobius(static: bool, arch: str, checkpoint: Path, folder: Path) -> Path:
    """mobius-onnx: its own graphs, not traced. Encoder-decoders give `decoder/model.onnx`."""
    from mobius import CausalLMTask, build

    task = CausalLMTask(static_cache=True, max_seq_len=CAPACITY) if static else None
    package = build(str(checkpoint), task=task, dtype="f32")
    package.save(str(folder), progress_bar=False)
    return folder / ("decoder/model.onnx" if architecture_of(arch).encoder_decoder else "model.onnx")


def optimum(arch: str, checkpoint: Path, folder: Path) -> Path:
    """optimum-onnx: torch's TorchScript exporter, dynamic caches; an encoder-decoder with past is a file of its own."""
    from optimum.exporters.onnx import main_export

    task = "text2text-generation-with-past" if architecture_of(arch).encoder_decoder else "text-generation-with-past"
    if arch == "whisper":
        task = "automatic-speech-recognition-with-past"
    main_export(str(checkpoint), folder, task=task, no_post_process=True, do_validation=False)
    return folder / ("decoder_with_past_model.onnx" if architecture_of(arch).encoder_decoder else "model.onnx")


def torch_dynamic(opset: int, attention: str, arch: str, checkpoint: Path, folder: Path) -> Path:
    """`torch.onnx.export(dynamo=True)` of a wrapper that makes a DynamicCache of its inputs."""
    from exporters import wrappers

    model = checkpoints.load(checkpoint, attention)
    if arch in FAMILIES and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default computes shapes from data
    make = wrappers.encoder_decoder if architecture_of(arch).encoder_decoder else wrappers.dynamic
    if arch in FAMILIES and make is wrappers.dynamic:
        make = wrappers.grown
    return wrappers.save(make(model), opset, folder / "model.onnx")


def torch_sliding(opset: int, attention: str, arch: str, checkpoint: Path, folder: Path) -> Path:
    """The same with `DynamicCache(config=...)`, whose layers with a window keep the newest rows only."""
    from exporters import wrappers

    return wrappers.save(
        wrappers.dynamic(checkpoints.load(checkpoint, attention), sliding=True), opset, folder / "model.onnx"
    )


def torch_static(opset: int, attention: str, arch: str, checkpoint: Path, folder: Path) -> Path:
    """The same with a StaticCache of `CAPACITY` rows."""
    from exporters import wrappers

    model = checkpoints.load(checkpoint, attention)
    make = wrappers.encoder_decoder if architecture_of(arch).encoder_decoder else wrappers.static
    return wrappers.save(make(model, CAPACITY), opset, folder / "model.onnx")


def transformers(static: bool, opset: int, arch: str, checkpoint: Path, folder: Path) -> Path:
    """The exporter of transformers itself: the graph of decoding, with whatever cache `generate` makes."""
    import torch
    from transformers import GenerationConfig
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model = checkpoints.load(checkpoint, "")
    inputs: dict[str, Any] = {"input_ids": torch.randint(3, checkpoints.VOCABULARY, (2, 5))}
    if arch == "whisper":
        settings = model.config
        inputs = {"input_features": torch.randn(2, settings.num_mel_bins, 2 * settings.max_source_positions)}
    else:
        inputs["attention_mask"] = torch.ones(2, 5, dtype=torch.int64)
    options = {"cache_implementation": "static", "max_cache_len": CAPACITY} if static else {}
    generation = GenerationConfig(do_sample=False, decoder_start_token_id=0, pad_token_id=0, **options)
    exported = OnnxExporter().export_for_generation(
        model,
        inputs,
        OnnxConfig(dynamic=True, opset_version=opset),
        generation_config=generation,
        multi_token_decode=True,
    )
    exported.save_pretrained(folder)
    return folder / "decode.onnx"


def genai(precision: str, provider: str, arch: str, checkpoint: Path, folder: Path) -> Path:
    """onnxruntime-genai's model builder: caches inside attention operators of ONNX Runtime's own domain."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    options = {"-i": checkpoint, "-o": folder, "-p": precision, "-e": provider, "-c": folder / "cache"}
    arguments = [str(word) for option in options.items() for word in option]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"the model builder failed on {arch}: {done.stderr.strip().splitlines()[-1]}")
    return folder / ("decoder.onnx" if architecture_of(arch).encoder_decoder else "model.onnx")


EXPORTERS: dict[str, Callable[[str, Path, Path], Path]] = {
    "mobius-dynamic": partial(mobius, False),
    "mobius-static": partial(mobius, True),
    "optimum": optimum,
    "torch-dynamic-op20-eager": partial(torch_dynamic, 20, "eager"),
    "torch-dynamic-op20-sdpa": partial(torch_dynamic, 20, "sdpa"),
    "torch-dynamic-op24-eager": partial(torch_dynamic, 24, "eager"),
    "torch-dynamic-op24-sdpa": partial(torch_dynamic, 24, "sdpa"),
    "torch-sliding-op20-eager": partial(torch_sliding, 20, "eager"),
    "torch-sliding-op24-sdpa": partial(torch_sliding, 24, "sdpa"),
    "torch-static-op20-eager": partial(torch_static, 20, "eager"),
    "torch-static-op20-sdpa": partial(torch_static, 20, "sdpa"),
    "torch-static-op24-eager": partial(torch_static, 24, "eager"),
    "torch-static-op24-sdpa": partial(torch_static, 24, "sdpa"),
    "transformers-dynamic-op20": partial(transformers, False, 20),
    "transformers-dynamic-op24": partial(transformers, False, 24),
    "transformers-static-op20": partial(transformers, True, 20),
    "transformers-static-op24": partial(transformers, True, 24),
    "genai-cpu-fp32": partial(genai, "fp32", "cpu"),
    "genai-cpu-int4": partial(genai, "int4", "cpu"),
    "genai-trt-rtx-fp16": partial(genai, "fp16", "NvTensorRtRtx"),
}

_NO_WINDOW = "no layer has a window, so the export would equal that of torch-dynamic"
_NO_SOFTCAP = "transformers has no sdpa attention with a softcap"
_OTHER_STRIDES = (
    "torch 2.13 and 2.15 fail to decompose its graph: sdpa's output changes strides (Cannot view a tensor with ...)"
)
_HEADS = "torch 2.13 and 2.15 assume a wrong number of heads in cross-attention caches (q_num_heads = kv_num_heads)"
_LAYERS = "mobius-onnx 0.1 has static caches for its common decoder layer only, and {} has a layer of its own"
_BUILDER = "the model builder of onnxruntime-genai 0.18 does not support it"
_ROPE = "onnxruntime-genai 0.18 expects one rotary base, where transformers 5 gives one for each type of layer"

UNAVAILABLE: dict[tuple[str, str], str] = {
    **{("mobius-static", arch): _LAYERS.format(arch) for arch in ("gemma2", "gemma3", "gpt2", "phi", "t5", "whisper")},
    **{
        (name, arch): _NO_WINDOW
        for name in EXPORTERS
        if name.startswith("torch-sliding")
        for arch, architecture in checkpoints.ARCHITECTURES.items()
        if not architecture.settings.get("sliding_window")
    },
    **{(name, "gemma2"): _NO_SOFTCAP for name in EXPORTERS if name.endswith("sdpa")},
    **{
        (name, "t5"): _OTHER_STRIDES
        for name in EXPORTERS
        if name.endswith("sdpa") and not name.startswith("torch-sliding")
    },
    **{
        (name, arch): _HEADS
        for name in ("transformers-dynamic-op24", "transformers-static-op24")
        for arch in ("t5", "whisper")
    },
    **{(name, arch): _BUILDER for name in EXPORTERS if name.startswith("genai") for arch in ("gpt2", "t5")},
    **{(name, "gemma3"): _ROPE for name in EXPORTERS if name.startswith("genai")},
}
"""What an exporter cannot do itself, by exporter and architecture: the reason."""

_TRANSFORMERS_5 = ("torch", "onnxscript", "transformers.exporters")
_NEEDS = {
    "mobius": ("mobius", *_TRANSFORMERS_5),
    "optimum": ("torch", "optimum.exporters.onnx"),
    "torch": _TRANSFORMERS_5,
    "transformers": _TRANSFORMERS_5,
    "genai": ("onnxruntime_genai.models", *_TRANSFORMERS_5),
}


def missing(exporter: str) -> str | None:
    """Why an exporter cannot run here, with what to install, or None where it can."""
    family = exporter.partition("-")[0]
    absent = [module for module in _NEEDS[family] if not _present(module)]
    if not absent:
        return None
    extra = "exporters-optimum" if family == "optimum" else "exporters"
    return f"{exporter} needs {', '.join(absent)}: pip install -e '.[{extra}]'"


def _present(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is absent
        return False


def export(exporter: str, arch: str, folder: Path) -> Path:
    """Export an architecture with an exporter.

    Args:
        exporter: A key of `EXPORTERS`.
        arch: A key of `checkpoints.ARCHITECTURES` or of `FAMILIES`.
        folder: Where the model goes, with the checkpoint it was made from in `checkpoint/`.

    Returns:
        The decoder's path, the one with past caches where the exporter writes several.

    Raises:
        ValueError: The exporter cannot do the architecture, with the reason of `UNAVAILABLE`.
        ModuleNotFoundError: Packages are absent, with the reason of `missing`.
    """
    if reason := UNAVAILABLE.get((exporter, arch)):
        raise ValueError(f"{exporter} cannot export {arch}: {reason}")
    if reason := missing(exporter):
        raise ModuleNotFoundError(reason)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # exporters warn of their own dependencies
        checkpoint = checkpoints.write(arch, folder / "checkpoint")
        return EXPORTERS[exporter](arch, checkpoint, folder)


if __name__ == "__main__":
    sys.stdout.write(f"{export(sys.argv[1], sys.argv[2], Path(sys.argv[3]))}\n")
