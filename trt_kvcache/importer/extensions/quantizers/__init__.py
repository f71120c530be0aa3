"""Quantizers other than those of weights in 4 and 8 bits: how their operators become those of ONNX and TensorRT.

NVIDIA ModelOpt, FP8, NVFP4, MXFP8          modelopt, blocks_on_cpu
ONNX Runtime's, which are refused           integers

See `trt_kvcache.importer.extensions` for when each function is called.
"""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from trt_kvcache.importer.extensions.quantizers.blocks_on_cpu import block_steps, with_plain_blocks
from trt_kvcache.importer.extensions.quantizers.integers import refuse_integers
from trt_kvcache.importer.extensions.quantizers.modelopt import is_block_operator
from trt_kvcache.importer.extensions.quantizers.modelopt import write_as_onnx as read

__all__ = ["for_cpu", "read", "standardize"]


def standardize(model: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    """Refuse models that are quantized for CPUs.

    Raises:
        UnsupportedModelError: an operator computes with integers of 8 bits, or rounds in a way that TensorRT lacks.
    """
    refuse_integers(model)
    return model, ()


def for_cpu(model: ModelProto) -> tuple[ModelProto, list[str]]:
    """Copy the model for ONNX Runtime, without rounding that the rewritten model or the CPU lacks.

    Raises:
        UnsupportedModelError: operators that quantize in blocks stand in another form than ModelOpt writes.
    """
    notes = list[str]()
    if steps := block_steps(model):
        notes.append(
            f"what TensorRT quantizes in blocks while it runs, at {steps} places (NVFP4, MXFP8), ran without that "
            "rounding in both models: what it makes of the numbers only TensorRT shows"
        )
    floats = any(t.data_type == TensorProto.FLOAT4E2M1 for t in model.graph.initializer)
    if floats or any(is_block_operator(node) for node in model.graph.node):
        model = with_plain_blocks(model)
    return model, notes
