"""Replace parts that are written side by side into zeros with one Concat.

    zeros [B, H, T, 24] -- Transpose -> ScatterND(rows 0..15 of axis 0: Transpose(a)) -> Transpose, Transpose ->
        ScatterND(rows 16..23: Transpose(b))                      becomes           Transpose(Concat(a, b, axis=-1))

torch.onnx exports assignments to slices in this form (``k[..., :16] = a; k[..., 16:] = b``), as in transformers' latent
attention. If the parts cover all zeros, the zeros, whose shape is as long as the text, are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer.protos import copied, is_op

_Part = tuple[int, int, str, list[int]]
"""First row, the row after the last, what is written there, and how that is transposed into the layout of the whole."""


def rewrite(model: ModelProto) -> ModelProto:
    """Replace each chain of ScatterND that covers its zeros with a Concat. This is a guess, which the check tests."""
    edited = copied(model)
    makers = {name: node for node in model.graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    del edited.graph.node[:]
    for node in model.graph.node:
        parts = sorted(_parts(node, makers, tensors))
        ends = [part[1] for part in parts]
        perms = [part[3] for part in parts]
        if len(parts) < 2 or [part[0] for part in parts] != [0, *ends[:-1]] or perms != perms[:1] * len(perms):
            edited.graph.node.append(node)
            continue
        whole, axis = f"{node.output[0]}/whole", perms[0][0]
        edited.graph.node.append(helper.make_node("Concat", [part[2] for part in parts], [whole], whole, axis=axis))
        edited.graph.node.append(helper.make_node("Transpose", [whole], node.output, node.name, perm=perms[0]))
    return edited


def _parts(node: NodeProto, makers: Mapping[str, NodeProto], tensors: Mapping[str, TensorProto]) -> list[_Part]:
    """The parts that a chain of ScatterND, ending with `node`, writes into one ConstantOfShape; else an empty list."""
    parts: list[_Part] = []
    perm: list[int] = []
    current: NodeProto | None = node
    while current is not None and not is_op(current, "ConstantOfShape"):
        attributes = {a.name: helper.get_attribute_value(a) for a in current.attribute}
        turned = makers.get(current.input[2]) if is_op(current, "ScatterND") and current.input[1] in tensors else None
        if (
            turned is not None
            and is_op(turned, "Transpose")
            and turned.attribute
            and attributes.get("reduction", b"none") == b"none"
        ):
            rows = numpy_helper.to_array(tensors[current.input[1]])
            turn = list(turned.attribute[0].ints)
            if rows.ndim != 2 or rows.shape[1] != 1 or not np.array_equal(rows[:, 0], rows[0] + np.arange(len(rows))):
                return []
            perm = perm or list(range(len(turn)))
            parts.append((int(rows[0, 0]), int(rows[-1, 0]) + 1, turned.input[0], [turn[axis] for axis in perm]))
        elif parts and is_op(current, "Transpose") and "perm" in attributes:
            perm = [attributes["perm"][axis] for axis in perm]
        elif not (parts and is_op(current, "Cast")):
            return []
        current = makers.get(current.input[0])
    return parts if current is not None else []
