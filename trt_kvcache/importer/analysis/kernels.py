"""Which attentions TensorRT has a fused kernel for.

Measured on TensorRT for RTX 1.7.1 by building without a GPU; tests/facts and tests/grid pin it. Where a build finds no
kernel all the same, it tries again with every attention decomposable (`trt_kvcache.engine.worker`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from trt_kvcache.importer.graph import elem_type
from trt_kvcache.importer.plan import AttentionKind

if TYPE_CHECKING:
    from trt_kvcache.importer.analysis.attention_facts import AttentionFacts

_FUSED_REACH = 24_576
"""Keys and head size together, up to which one masked float16 or bfloat16 query has a fused kernel: 48 KiB. More
queries have one at any length; `decomposable` lets TensorRT choose."""


def attention_kind(facts: AttentionFacts) -> tuple[AttentionKind, str]:
    """Fused, decomposed or lowered to plain operators, and why."""
    half = facts.dtype in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    size = facts.head_size
    if facts.sinks is not None:
        return AttentionKind.LOWERED, "attention sinks"
    if (rounding := facts.rounded_scores or facts.rounded_weights) is not None:
        return AttentionKind.LOWERED, f"rounded to {rounding.type_name} on the way"
    if facts.softcap:
        return AttentionKind.LOWERED, f"softcap {facts.softcap:g}"
    if facts.softmax_precision not in (None, facts.dtype):
        precision = onnx.TensorProto.DataType.Name(facts.softmax_precision).lower()
        return AttentionKind.LOWERED, f"softmax_precision {precision}"
    if facts.value_head_size != size:
        return AttentionKind.LOWERED, f"head size of K is {size}, of V {facts.value_head_size}"
    if facts.qk_output:
        return AttentionKind.LOWERED, "qk_matmul_output is used"
    if elem_type(facts.node.inputs[2]) not in (None, 0, facts.dtype):
        return AttentionKind.LOWERED, "V has another type than Q and K"
    if half and size % 8:
        return AttentionKind.LOWERED, f"head size {size} is not a multiple of 8"
    if not half:
        return AttentionKind.DECOMPOSED, "only float16 and bfloat16 have fused kernels"
    if isinstance(facts.query_heads, int) and facts.query_heads < 4:
        # One head never has a kernel, two and three have none for a single query, which every decode profile is.
        return AttentionKind.DECOMPOSED, "fewer than 4 query heads have no fused kernel for decoding"
    if not 16 <= size <= 256:
        return AttentionKind.DECOMPOSED, f"head size {size} has no fused kernel"
    if isinstance(facts.keys, int) and facts.keys + size > _FUSED_REACH:
        return AttentionKind.DECOMPOSED, f"more than {_FUSED_REACH - size} keys have no fused kernel for decoding"
    return AttentionKind.FUSED, "dedicated kernel"
