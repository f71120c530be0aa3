"""Sets properties of TensorRT's parsed network that standard ONNX cannot express."""

from __future__ import annotations

from typing import Any

from trt_kvcache.errors import BuildError
from trt_kvcache.importer.cache_plan import AttentionKind, CachePlan


def patch_network(network: Any, plan: CachePlan, trt: Any, *, decompose_all: bool = False) -> None:
    """Allow TensorRT to decompose attentions for which it has no fused kernel; with `decompose_all`, every attention.

    Without this permission, the build fails ("Attention operation was not supported by a dedicated kernel", measured on
    TensorRT for RTX 1.7.1). The ONNX attribute ``TRT_decomposable`` would do the same, but other runtimes refuse it.
    Raises `BuildError` if network and plan have different attention layers.
    """
    wanted = {a.node for a in plan.attention if a.kind is AttentionKind.DECOMPOSED}
    names: set[str] = set()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type != trt.LayerType.ATTENTION_INPUT:
            continue
        # The parser names an attention's layers <node>_AttentionInput and <node>_AttentionOutput.
        name = layer.name.removesuffix("_AttentionInput")
        names.add(name)
        if decompose_all or name in wanted:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
    expected = {a.node for a in plan.attention if a.kind is not AttentionKind.LOWERED}
    if names != expected:
        raise BuildError(
            f"the parsed network has attention layers {sorted(names - expected)} that are not in the plan, and does "
            f"not have {sorted(expected - names)}: this TensorRT version names layers differently; please report this"
        )
