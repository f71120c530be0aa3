"""Einsum over two tensors as the operators that everything else knows.

    Einsum("bngsd,bntd->bngst", q, k)        becomes        MatMul(q, Transpose(Unsqueeze(k, 2)))
    Einsum("i,j->ij", positions, frequencies)               Mul(Unsqueeze(positions, 1), frequencies)

Only where no axis has to be merged: at most one is summed over, and at most one is the second tensor's alone. Products
with weights that make several axes at once stay as they are.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, elem_type, is_op


def lower_einsum(graph: gs.Graph) -> None:
    """Replace, in place, each Einsum that is one MatMul or one Mul.

    Args:
        graph: of the model; sorted anew by the caller.
    """
    emit = Emitter(graph)
    for node in [n for n in graph.nodes if is_op(n, "Einsum") and len(n.inputs) == 2]:
        terms = _terms(str(node.attrs["equation"]))
        product = None if terms is None else _product(emit, node.inputs, *terms)
        if product is not None:
            maker, output = product.inputs[0], node.outputs[0]
            node.outputs.clear()
            maker.outputs = [output]


def _terms(equation: str) -> tuple[str, str, str] | None:
    """The letters of both operands and of the result; None where one is there twice, or more than letters."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = operands.partition(",")
    terms = (left, right, result)
    if not arrow or not comma or not all(t.isalpha() and len(set(t)) == len(t) for t in terms):
        return None
    return terms if set(result) <= {*left, *right} else None


def _product(emit: Emitter, tensors: list[gs.Tensor], left: str, right: str, result: str) -> gs.Tensor | None:
    """What the equation says of two tensors; None where that takes more than one product."""
    one, other = tensors
    summed = [c for c in left if c in right and c not in result]
    if len(summed) + len(result) != len({*left, *right}):
        return None  # something is summed up alone
    if not summed:
        return emit.op("Mul", [_aligned(emit, one, left, result), _aligned(emit, other, right, result)], "einsum",
                       elem_type(one))  # fmt: skip
    alone = [[c for c in result if c in term and c not in rest] for term, rest in ((left, right), (right, left))]
    if alone[0] and alone[1] and result.index(alone[1][0]) < result.index(alone[0][0]):
        one, other, left, right = other, one, right, left
        alone.reverse()
    if len(summed) != 1 or len(alone[1]) != 1 or not alone[0]:
        return None
    both = [c for c in result if c in left and c in right]
    rows, column, depth = alone[0], alone[1][0], summed[0]
    if left[-2:] == rows[-1] + depth and result == left[:-1] + column:  # as both are, whatever is in front
        behind = _aligned(emit, other, right, [*left[:-2], depth, column])
        return emit.op("MatMul", [one, behind], "einsum", elem_type(one))
    if left.startswith("".join(both)) and left.endswith(depth):  # as it is
        rows = list(left[len(both) : -1])
    order = [*both, *rows, column]
    before = _aligned(emit, one, left, [*both, *rows, depth])
    behind = _aligned(emit, other, right, [*both, *rows[:-1], depth, column])
    product = emit.op("MatMul", [before, behind], "einsum", elem_type(one))
    return _aligned(emit, product, "".join(order), result)


def _aligned(emit: Emitter, tensor: gs.Tensor, letters: str, wanted: str | list[str]) -> gs.Tensor:
    """A tensor with its axes in the order wanted, and axes of one where it has none."""
    perm = [letters.index(c) for c in wanted if c in letters]
    if perm != sorted(perm):
        tensor = emit.op("Transpose", [tensor], "einsum_axes", elem_type(tensor), perm=perm)
    missing = [i for i, c in enumerate(wanted) if c not in letters]
    if missing:
        tensor = emit.op("Unsqueeze", [tensor, emit.ints(missing)], "einsum_axes", elem_type(tensor))
    return tensor
