"""Support for rare families of models. Each family has its own module, which loads only for a model of that family.

To add a family, write a module with a function for each station at which the family has something to do. The function
has the station's name. Add a test for each of these stations to `FAMILIES`, below.

    read(model)                 edits a file's model before it is checked            -> True if it changed the model
    choose(model)               takes one branch of a decoder, before inlining       -> the model, Finish or None
    standardize(model)          edits a model (or an encoder) after inlining         -> the model, notes for the plan
    define(model)               adds ONNX functions that define nodes outside ONNX   -> another model, None
    rewrite(model)              edits a decoder before recognition                   -> the model, Finish or None
    note(model, folder)         looks at the planned model                           -> notes for the plan
    for_tensorrt(model, folder) edits a rewritten model before TensorRT reads it     -> nothing
    for_cpu(model)              replaces operators that ONNX Runtime does not run    -> another model, notes

`folder` holds the external data. `Finish` is a function that adds facts to the plan. The rewrite loads `plugin_route`
if a cache takes the plugin's route. The pipeline loads `quantized_caches` for ``--cache-dtype`` and `adapters` for
``--lora-rank``. Builds and sessions load `encoders` if an encoder lies beside the decoder. These modules load as
attributes of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from trt_kvcache.importer.operators import INTEGER_PRODUCTS, QUANTIZES
from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.importer.protos import INTEGERS, TENSORRT_UPDATE, elem_type_of, iter_scopes, names_read, shape_of
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS

__all__ = [
    "FAMILIES",
    "define",
    "edit",
    "for_cpu",
    "for_tensorrt",
    "is_update_outside_onnx",
    "notes",
    "read",
]

Test = Callable[[onnx.ModelProto], bool]
"""A test of a model. It must be cheap and load no module."""
Finish = Callable[[CachePlan], CachePlan]
"""Adds facts to a plan that the edited model does not show."""


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


if TYPE_CHECKING:
    from trt_kvcache.importer.families import adapters as adapters
    from trt_kvcache.importer.families import plugin_route as plugin_route
    from trt_kvcache.importer.families import quantized_caches as quantized_caches
else:

    def __getattr__(name: str) -> Any:
        """The module of an extension; the first access loads it."""
        try:
            return _module(name)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"no extension is named '{name}'") from error


def _at(station: str, model: onnx.ModelProto) -> Iterator[Callable[..., Any]]:
    """Yield the function of every extension that applies at a station. Each sees the edits of those before it."""
    for name, stations in FAMILIES.items():
        if station in stations and stations[station](model):
            yield getattr(_module(name), station)


def edit(station: str, model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Any]]:
    """Run every extension that applies at a station; returns the model and the second results (see the module).

    Args:
        station: "choose", "standardize", "define", "rewrite" or "for_cpu".
        model: the model; "choose" and "standardize" may change it.
    """
    more = []
    for name, stations in FAMILIES.items():
        if station in stations and stations[station](model):
            model, said = getattr(_module(name), station)(model)
            more += [] if said is None else [said]
    return model, more


def read(model: onnx.ModelProto) -> bool:
    """Edit a model in place after reading it; True if operators now read other tensors than in the file.

    Raises:
        ModelError: the model belongs to a family, but has an unsupported form. Other functions here also raise it.
    """
    edited = [function(model) for function in _at("read", model)]
    return any(edited)


def define(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add a function to the model for each cache update that ONNX does not define."""
    return edit("define", model)[0]


def notes(model: onnx.ModelProto, folder: Path) -> tuple[str, ...]:
    """Collect notes for the plan from the planned model; its external data lie in `folder`."""
    return tuple(note for function in _at("note", model) for note in function(model, folder))


def for_tensorrt(model: onnx.ModelProto, folder: Path) -> None:
    """Edit, in place, a rewritten model before TensorRT reads it; its external data lie in `folder`.

    Raises:
        UnsupportedModelError: the model rounds numbers in a way that TensorRT does not support.
    """
    for function in _at("for_tensorrt", model):
        function(model, folder)


def for_cpu(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Convert the model to operators that ONNX Runtime runs; also returns notes on differences."""
    model, notes = edit("for_cpu", model)
    return model, [*chain(*notes)]


_LISTED = {"Squeeze", "Unsqueeze", "Reshape", "Expand", "Tile", "Split", "Slice", "Pad", "Concat", "ConstantOfShape"}


def _breaks_rules(model: onnx.ModelProto) -> bool:
    """True if the model breaks a rule that tools are known to break; see `tool_repairs`."""
    imported = {entry.domain for owner in (model, *model.functions) for entry in owner.opset_import} | {""}
    scalars: set[str] = set()
    for scope in iter_scopes(model):
        tensors = {t.name: t for t in scope.initializer} if isinstance(scope, onnx.GraphProto) else {}
        constants = {n.output[0]: a.t for n in scope.node if n.op_type == "Constant" for a in n.attribute}
        whole = {**tensors, **constants}.items()
        scalars |= {name for name, t in whole if t.data_type == onnx.TensorProto.INT64 and not t.dims}
        later = {name for node in scope.node for name in node.output}
        if any(v.name in tensors and shape_of(v) != tuple(tensors[v.name].dims) for v in scope.value_info):
            return True
        stated = [v.name for v in scope.value_info]
        outer = {v.name for v in (*scope.input, *scope.output)} if isinstance(scope, onnx.GraphProto) else set()
        if len({*stated}) < len(stated) or not outer.isdisjoint(stated):
            return True
        for node in scope.node:
            places = 0 if node.op_type in ("Concat", "ConstantOfShape") else 1
            is_listed = node.op_type in _LISTED or node.op_type.startswith("Reduce")
            if (
                node.domain == "ai.onnx"
                or node.domain not in imported
                or (is_listed and not scalars.isdisjoint(node.input[places:]))
                or not later.isdisjoint(names_read(node))
                or any(str(name).startswith("InsertedPrecisionFreeCast_") for name in node.output)
            ):
                return True
            later.difference_update(node.output)
    return "ai.onnx" in imported


def is_update_outside_onnx(node: onnx.NodeProto) -> bool:
    """True for TensorRT's own update of a cache, or one of the plugin's."""
    return node.op_type == TENSORRT_UPDATE or (node.domain == NAMESPACE and node.op_type in OPERATORS)


def _updates_outside_onnx(model: onnx.ModelProto) -> bool:
    return any(is_update_outside_onnx(node) for node in model.graph.node)


def _chooses_branch(model: onnx.ModelProto) -> bool:
    """True if an input decides between two branches."""
    inputs = {value.name for value in model.graph.input}
    return any(node.op_type == "If" and node.input[0] in inputs for node in model.graph.node)


_BLOCKS = {"TRT_FP4DynamicQuantize", "TRT_MXFP8DynamicQuantize", "TRT_MXFP8DequantizeLinear"}


def _operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for scope in iter_scopes(model) for node in scope.node}


def _by_quantizer(model: onnx.ModelProto) -> bool:
    """True if the model has operators in TensorRT's domain."""
    return any(node.domain == "trt" for scope in iter_scopes(model) for node in scope.node)


def _multiplies_integers(model: onnx.ModelProto) -> bool:
    operators = _operators(model)
    return bool(operators & {"QuantizeLinear", "DequantizeLinear", *QUANTIZES, *INTEGER_PRODUCTS}) or any(
        op.startswith("QLinear") for op in operators
    )


def _only_on_tensorrt(model: onnx.ModelProto) -> bool:
    return bool(_operators(model) & _BLOCKS) or any(
        t.data_type == onnx.TensorProto.FLOAT4E2M1 for t in model.graph.initializer
    )


def _is_in_parts(model: onnx.ModelProto) -> bool:
    """True if the model may write slices into zeros, by ScatterND and ConstantOfShape."""
    return {"ScatterND", "ConstantOfShape"} <= _operators(model)


def _keeps_logits(model: onnx.ModelProto) -> bool:
    """True if an input gives the number of logits to keep, in a model that is not canonical yet."""
    keeps = any(v.name.endswith("logits_to_keep") and elem_type_of(v) in INTEGERS for v in model.graph.input)
    return keeps and "TensorScatter" not in _operators(model)


FAMILIES: dict[str, dict[str, Test]] = {
    "tool_repairs": {"read": _breaks_rules, "choose": _chooses_branch, "rewrite": _is_in_parts},
    "quantizers": {
        "read": _by_quantizer,
        "standardize": _multiplies_integers,
        "for_cpu": _only_on_tensorrt,
    },
    "plugin_route": {"define": _updates_outside_onnx},
    "kept_logits": {"rewrite": _keeps_logits},
}
"""Module name -> station -> test."""
