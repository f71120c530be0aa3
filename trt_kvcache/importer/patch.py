"""Set properties of TensorRT's parsed network that standard ONNX cannot express."""

from __future__ import annotations

from typing import Any

from trt_kvcache.errors import BuildError
from trt_kvcache.importer.plan import AttentionKind, CachePlan


def patch_network(network: Any, plan: CachePlan, trt: Any, *, decompose_all: bool = False) -> None:
    """Allow TensorRT to decompose attentions for which it has no fused kernel.

    Without this permission, the build fails ("Attention operation was not supported by a dedicated kernel", measured on
    TensorRT for RTX 1.7.1). The ONNX attribute ``TRT_decomposable`` would have the same effect, but then other runtimes
    refuse the model.

    Args:
        network: a parsed ``INetworkDefinition`` of the rewritten model.
        plan: the plan, with the kind of each attention.
        trt: the module ``tensorrt`` or ``tensorrt_rtx`` that parsed the network.
        decompose_all: allow TensorRT to decompose every attention, because this TensorRT lacks a kernel that the plan
            expects.

    Raises:
        BuildError: the network and the plan have different attention layers.
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
