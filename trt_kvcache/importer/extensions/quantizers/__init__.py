"""Quantizers other than those of weights in 4 and 8 bits: how their operators become those of ONNX and TensorRT.

NVIDIA ModelOpt, FP8, NVFP4, MXFP8          modelopt, blocks_on_cpu
onnxruntime's quantize_dynamic              dynamic
onnxruntime's quantize_static               static

See `trt_kvcache.importer.extensions` for when each function is called.
"""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from trt_kvcache.importer.extensions.quantizers.blocks_on_cpu import block_steps, with_plain_blocks
from trt_kvcache.importer.extensions.quantizers.dynamic import NOTE, keep_weights_only, refuse_integers
from trt_kvcache.importer.extensions.quantizers.modelopt import is_block_operator, write_as_onnx
from trt_kvcache.importer.extensions.quantizers.static import note_roundings as note
from trt_kvcache.importer.extensions.quantizers.static import spell_biases
from trt_kvcache.importer.extensions.quantizers.static import spell_roundings as for_tensorrt
from trt_kvcache.importer.protos import copied, iter_scopes

__all__ = ["for_cpu", "for_tensorrt", "note", "read", "standardize"]


def read(model: ModelProto) -> bool:
    """Write operators of ONNX for those that neither ONNX Runtime nor TensorRT's parser takes.

    Raises:
        UnsupportedModelError: an operator of ModelOpt stands in another form than ModelOpt writes.
    """
    return write_as_onnx(model) | spell_biases(model.graph)


def standardize(model: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    """Write products with weights of 8 bits for those that round both operands.

    Raises:
        UnsupportedModelError: another operator computes with integers of 8 bits.
    """
    notes = (NOTE,) if keep_weights_only(model) else ()
    refuse_integers(model)
    return model, notes


def for_cpu(model: ModelProto) -> tuple[ModelProto, list[str]]:
    """A copy that ONNX Runtime runs, without rounding that the rewritten model, or the CPU, does not do.

    Raises:
        UnsupportedModelError: operators that quantize in blocks stand in another form than ModelOpt writes.
    """
    copy, notes = copied(model), list[str]()
    if any(node.op_type.startswith("DynamicQuantize") for scope in iter_scopes(model) for node in scope.node):
        keep_weights_only(copy)
        notes.append(f"the original ran like this, too: {NOTE}")
    if steps := block_steps(model):
        notes.append(
            f"what TensorRT quantizes in blocks while it runs, at {steps} places (NVFP4, MXFP8), ran without that "
            "rounding in both models: what it makes of the numbers only TensorRT shows"
        )
    floats = any(t.data_type == TensorProto.FLOAT4E2M1 for t in model.graph.initializer)
    if floats or any(is_block_operator(node) for node in model.graph.node):
        copy = with_plain_blocks(copy)
    return copy, notes
