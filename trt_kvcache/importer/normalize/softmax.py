"""Softmax that was taken apart, as one operator again.

    x - ReduceMax -- Sub -- Exp -- Div        becomes        Softmax(x)
                             `- ReduceSum -'

So ONNX Runtime leaves it where it has no kernel (float16 on the CPU), its quantizers with it, and JAX writes it.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import (
    Emitter,
    dims,
    elem_type,
    input_or_none,
    is_op,
    producer,
    small_constant,
)


def join_softmax(graph: gs.Graph) -> None:
    """Put, in place, a Softmax along one axis for each that is written in five operators.

    Args:
        graph: of opset 13 at least, with shapes as far as they are known; sorted anew by the caller.
    """
    emit = Emitter(graph)
    for node in [n for n in graph.nodes if is_op(n, "Div")]:
        found = _softmax(node)
        if found is not None:
            tensor, axis = found
            output = node.outputs[0]
            node.outputs.clear()
            made = emit.op("Softmax", [tensor], "softmax", elem_type(output), axis=axis)
            made.inputs[0].outputs = [output]


def _softmax(div: gs.Node) -> tuple[gs.Tensor, int] | None:
    """What a Div ends the softmax of, and along which axis; None where it is something else."""
    powers, whole = producer(div.inputs[0]), producer(div.inputs[1])
    if powers is None or whole is None or not is_op(powers, "Exp") or not is_op(whole, "ReduceSum"):
        return None
    shifted = producer(powers.inputs[0])
    if whole.inputs[0] is not powers.outputs[0] or shifted is None or not is_op(shifted, "Sub"):
        return None
    tensor, most = shifted.inputs[0], producer(shifted.inputs[1])
    if most is None or not is_op(most, "ReduceMax") or most.inputs[0] is not tensor:
        return None
    rank = len(dims(tensor) or ())
    axes = {_axis(node, rank) for node in (most, whole)}
    axis = axes.pop()
    return None if axes or axis is None else (tensor, axis)


def _axis(node: gs.Node, rank: int) -> int | None:
    """The one axis that a reduction is over, and keeps; None where it does something else, or that is not known."""
    operand = small_constant(input_or_none(node, 1))
    axes = node.attrs.get("axes", []) if operand is None else operand.reshape(-1).tolist()
    if len(axes) != 1 or not rank or not int(node.attrs.get("keepdims", 1)):
        return None
    return int(axes[0]) % rank
