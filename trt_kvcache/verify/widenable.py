"""A float32 model in a form that means the same in float64: everything that is float32 says so.

Operators become the functions that define them where float64 is none of their types, or where ONNX Runtime 1.31.1 fails
on it. Functions of the model are written out: where they are named like ONNX Runtime's own operators, these would
compute, in the types that they know.

ONNX Runtime's own operators, such as GroupQueryAttention and MatMulNBits, become the bodies that the importer gives
them. The importer's check has compared these with the operators, region by region, and `rounding` asks for float64 only
where both models as they are differ by little.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, inliner, numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.lower import CONTRIB
from trt_kvcache.importer.protos import Scope, copied, is_op, iter_scopes, replace_field
from trt_kvcache.importer.simplify import simplify

_DOMAIN = "trt_kvcache.verify.widenable"
_NUMBERS = ("value_float", "value_floats")
_WRITTEN_OUT = ("Attention", "RMSNormalization", "RotaryEmbedding")


def widenable(model: ModelProto) -> ModelProto:
    """The model in that form.

    Args:
        model: of float32.

    Raises:
        UnsupportedModelError: ONNX does not give a definition.
    """
    result = ModelProto()
    result.CopyFrom(inliner.inline_local_functions(model))
    if any(node.domain == CONTRIB for node in result.graph.node):
        result, _ = simplify(result)
    if any(node.op_type in _WRITTEN_OUT and not node.domain for node in result.graph.node):
        result = inliner.inline_local_functions(_with_definitions(result))
    for scope in iter_scopes(result):
        _state_types(scope)
    return result


def _with_definitions(model: ModelProto) -> ModelProto:
    """The model with functions in place of these operators."""
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v.type for v in (*inferred.value_info, *inferred.input)}
    types |= {t.name: helper.make_tensor_type_proto(t.data_type, t.dims) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in _WRITTEN_OUT and not node.domain:
            input_types = [types.get(name, TypeProto()).SerializeToString() for name in node.input]
            schema = onnx.defs.get_schema(node.op_type, opset)
            try:
                # Stubs of onnx 1.23 do not have it.
                body = schema.get_context_dependent_function(node.SerializeToString(), input_types)  # type: ignore[attr-defined]
            except Exception as error:  # noqa: BLE001 - whatever ONNX raises where it does not know a shape
                raise UnsupportedModelError(f"ONNX does not define {node.op_type} '{node.name}' ({error})") from None
            function = FunctionProto.FromString(body)
            function.opset_import[0].version = opset  # or it would not be written out
            function.domain, function.name = _DOMAIN, f"{node.op_type}_{len(model.functions)}"
            model.functions.append(function)
            node.domain, node.op_type = function.domain, function.name
            del node.attribute[:]
    model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    return model


def dequantize_narrow(model: ModelProto, dtype: int) -> None:
    """Let DequantizeLinear read scales of a type, and give numbers of it, in place; the model knows wider ones.

    No version of the operator has scales of float64. Each number is one product, which float64 holds.
    """
    wide = {t.name for t in model.graph.initializer if t.data_type == dtype}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if not is_op(node, "DequantizeLinear") or node.input[1] not in wide:
            nodes.append(node)
            continue
        narrow, scales, result = (f"{node.output[0]}/{part}" for part in ("narrow", "scales", "result"))
        nodes.append(helper.make_node("Cast", [node.input[1]], [scales], scales, to=dtype))
        inner = copied(node)
        inner.input[1], inner.output[0] = scales, narrow
        nodes += [inner, helper.make_node("Cast", [narrow], [node.output[0]], result, to=TensorProto.DOUBLE)]
    replace_field(model.graph.node, nodes)


def _state_types(scope: Scope) -> None:
    """Gives a tensor to each constant that is float32 without saying so."""
    for node in scope.node:
        if is_op(node, "ConstantOfShape") and not node.attribute:
            _set_value(node, np.zeros(1, np.float32))
        for number in [a for a in node.attribute if is_op(node, "Constant") and a.name in _NUMBERS]:
            _set_value(node, np.asarray(helper.get_attribute_value(number), np.float32))


def _set_value(node: NodeProto, values: np.ndarray) -> None:
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(values)))
