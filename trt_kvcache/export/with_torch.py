"""Exports transformers' decoders to ONNX with torch: caches are inputs and outputs, and every size is open.

    python -m trt_kvcache.export.with_torch CHECKPOINT FOLDER [float16|bfloat16|float32]

This file needs torch, transformers and onnxscript, but nothing of this package: it also runs in an environment that
has only these three.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["export_model"]

OPSET = 24  # the first with TensorScatter; Attention came with 23
_PAST, _NEW = 12, 3  # tokens in the sample inputs; the exported model does not keep these sizes


def export_model(model: Any, path: str | Path, *, verbose: bool = False) -> None:
    """Write a causal language model of transformers as an ONNX decoder whose caches grow.

    Inputs are ``input_ids`` ``[B, S]``, ``attention_mask`` ``[B, P + S]``, ``position_ids`` ``[B, S]`` if the model
    takes them, and ``past_key_values.i.key`` and ``.value`` ``[B, N, P, H]``; outputs are ``logits`` and
    ``present.i.key`` and ``.value`` ``[B, N, P + S, H]``. The export has the type of the model's weights, which go to a
    file beside `path`. Raises `ValueError` if a layer's cache is not the keys and values of all tokens.
    """
    torch: Any = import_module("torch")
    make_cache = import_module("transformers").DynamicCache
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default computes shapes from tokens
    tokens = torch.randint(3, model.config.get_text_config().vocab_size, (2, _PAST + _NEW))
    sample = make_cache()
    with torch.no_grad():
        model(tokens[:, :_PAST], past_key_values=sample, use_cache=True)
    caches: list[Any] = [getattr(layer, part, None) for layer in sample.layers for part in ("keys", "values")]
    if not caches or any(t is None or t.ndim != 4 or t.shape[2] != _PAST for t in caches):
        raise ValueError("some layers do not cache the keys and values of all tokens; export it with another exporter")

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        """The model with tensors as caches, instead of a cache object."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Any) -> Any:
            cache = make_cache(list(zip(past[::2], past[1::2], strict=True)))
            more = {"position_ids": position_ids} if takes_positions else {}
            result = self.model(input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **more)
            return result.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))

    auto = torch.export.Dim.AUTO
    names = [f".{layer}.{part}" for layer in range(len(caches) // 2) for part in ("key", "value")]
    samples = (
        tokens[:, _PAST:],
        torch.ones(2, _PAST + _NEW, dtype=torch.int64),
        torch.arange(_PAST, _PAST + _NEW).expand(2, _NEW).contiguous(),
        tuple(t.clone() for t in caches),
    )
    torch.onnx.export(
        Decoder().eval(),  # else torch warns that the module is in training mode
        samples,
        str(path),
        dynamo=True,
        opset_version=OPSET,
        input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values{name}" for name in names)],
        output_names=["logits", *(f"present{name}" for name in names)],
        dynamic_shapes=({0: auto, 1: auto},) * 3 + (({0: auto, 2: auto},) * len(caches),),
        external_data=True,
        verbose=verbose,
    )


def main() -> None:
    """Export the checkpoint that the command line names."""
    checkpoint, folder, dtype = sys.argv[1], Path(sys.argv[2]), (*sys.argv[3:], "float16")[0]
    torch, transformers = import_module("torch"), import_module("transformers")
    sys.stdout.write("reading the checkpoint\n")
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    how: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint, "dtype": getattr(torch, dtype)}
    try:
        how["attn_implementation"] = "eager" if capped else "sdpa"
        model = transformers.AutoModelForCausalLM.from_pretrained(**how)
    except ValueError as error:  # such as BLOOM, which adds slopes to the scores
        if "scaled_dot_product_attention" not in str(error):
            raise
        model = transformers.AutoModelForCausalLM.from_pretrained(**how | {"attn_implementation": "eager"})
    folder.mkdir(parents=True, exist_ok=True)
    export_model(model.eval(), folder / "model.onnx", verbose=True)


if __name__ == "__main__":
    main()
