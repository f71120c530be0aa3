"""Support for rare families of models: these functions load a family's module only for a model of that family.

    read           replaces ModelOpt's operators, before checks             quantizers
    choose         takes one branch of a merged decoder, before inlining    torch_exports
    standardize    refuses operators of quantizers for CPUs, after inlining quantizers
    define         adds ONNX functions that define nodes outside ONNX       plugin_route
    rewrite        edits a decoder before recognition                       torch_exports
    for_cpu        replaces operators that ONNX Runtime does not run        quantizers

Other stages load `plugin_route` for caches that the plugin updates, `quantized_caches` for ``--cache-dtype``,
`adapters` for ``--lora-rank``, and `encoders` for an encoder beside the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import onnx

from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.importer.operators import INTEGER_PRODUCTS, QUANTIZES
from trt_kvcache.importer.protos import INTEGERS, TENSORRT_UPDATE, elem_type_of, iter_scopes
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS

Finish = Callable[[CachePlan], CachePlan]
"""A function that adds facts to a plan that the edited model no longer shows, such as removed inputs."""

if TYPE_CHECKING:
    from trt_kvcache.importer.families import adapters as adapters
    from trt_kvcache.importer.families import plugin_route as plugin_route
    from trt_kvcache.importer.families import quantized_caches as quantized_caches
    from trt_kvcache.importer.families import quantizers as quantizers
    from trt_kvcache.importer.families import torch_exports as torch_exports
else:

    def __getattr__(name: str) -> Any:
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"no family is named '{name}'") from error


def _family(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def _operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for scope in iter_scopes(model) for node in scope.node}


def read(model: onnx.ModelProto) -> bool:
    """Replace operators of ModelOpt in a model, in place, after reading it. Return True if there are any."""
    if any(node.domain == "trt" for scope in iter_scopes(model) for node in scope.node):  # ModelOpt's operators
        return bool(_family("quantizers").read(model))
    return False


def choose(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Finish]]:
    """If an input of a decoder chooses the branch (optimum's merged decoder), keep the branch that reads caches."""
    inputs = {value.name for value in model.graph.input}
    if not any(node.op_type == "If" and node.input[0] in inputs for node in model.graph.node):
        return model, []
    model, finish = _family("torch_exports").choose(model)
    return model, [] if finish is None else [finish]


def standardize(model: onnx.ModelProto) -> None:
    """Refuse a model with operators that ONNX Runtime's quantizers write for CPUs."""
    known = {"QuantizeLinear", "DequantizeLinear", *QUANTIZES, *INTEGER_PRODUCTS}
    if any(op in known or op.startswith("QLinear") for op in _operators(model)):
        _family("quantizers").refuse_integers(model)


def is_update_outside_onnx(node: onnx.NodeProto) -> bool:
    """True if a node is TensorRT's own cache update, or a cache update of the plugin."""
    return node.op_type == TENSORRT_UPDATE or (node.domain == NAMESPACE and node.op_type in OPERATORS)


def define(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add an ONNX function for each cache update of TensorRT or the plugin, because ONNX does not define these."""
    if any(map(is_update_outside_onnx, model.graph.node)):
        model = _family("plugin_route").define(model)
    return model


def rewrite(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Finish]]:
    """Edit a decoder before the search for caches: replace assignments to slices by a Concat, drop `logits_to_keep`."""
    finishes: list[Finish] = []
    operators = _operators(model)
    if {"ScatterND", "ConstantOfShape"} <= operators:
        model = _family("torch_exports").join_slices(model)
    keeps = any(v.name.endswith("logits_to_keep") and elem_type_of(v) in INTEGERS for v in model.graph.input)
    if keeps and "TensorScatter" not in operators:
        model, finish = _family("torch_exports").drop_kept_logits(model)
        finishes += [] if finish is None else [finish]
    return model, finishes


def for_cpu(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Return a model that ONNX Runtime can run on the CPU, and notes on what this model computes differently."""
    blocks = {"TRT_FP4DynamicQuantize", "TRT_MXFP8DynamicQuantize", "TRT_MXFP8DequantizeLinear"}
    narrow = any(t.data_type == onnx.TensorProto.FLOAT4E2M1 for t in model.graph.initializer)
    if not narrow and blocks.isdisjoint(_operators(model)):
        return model, []
    result: tuple[onnx.ModelProto, list[str]] = _family("quantizers").for_cpu(model)
    return result
