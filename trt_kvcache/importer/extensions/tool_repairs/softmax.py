"""Softmax in several operators, as one again.

    x - ReduceMax -- Sub -- Exp -- Div        becomes        Softmax(x)
                             `- ReduceSum -'

So ONNX Runtime leaves it where it has no kernel (float16 on the CPU), its quantizers with it, and JAX writes it.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, NodeProto, helper, numpy_helper

from trt_kvcache.importer.protos import copied, is_op


def rewrite(model: ModelProto) -> ModelProto:
    """Put a Softmax in the place of each that is written in five operators: a guess, which the check compares."""
    edited = copied(model)
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in edited.graph.node:
        parts = _parts(node, makers) if is_op(node, "Div") else []
        axes = [numpy_helper.to_array(t) for t in model.graph.initializer if parts and t.name in parts[1].input[1:]]
        if axes and axes[0].size == 1:
            node.op_type, node.input[:] = "Softmax", parts[0].input[:1]
            node.attribute.append(helper.make_attribute("axis", int(axes[0].item())))
    return edited


def _parts(div: NodeProto, makers: Mapping[str, NodeProto]) -> list[NodeProto]:
    """The Sub and the ReduceSum of a softmax that a Div ends; empty if it ends none."""
    power, total = (makers.get(name) for name in div.input)
    if power is None or total is None or (power.op_type, total.op_type) != ("Exp", "ReduceSum"):
        return []
    shifted = makers.get(power.input[0])
    most = makers.get(shifted.input[1]) if shifted is not None and is_op(shifted, "Sub") else None
    if shifted is None or most is None or not is_op(most, "ReduceMax") or most.input[0] != shifted.input[0]:
        return []
    return [shifted, total] if total.input[0] == div.input[0] else []
