"""Reasons why products over caches are no attention that is supported.

From a product of scores, walk to the product with values. All tensors between hold as many numbers as there are scores,
in a short text and in a longer one. A node on this way that multiplies by weights mixes heads. If no Softmax is among
them, the weights of values come from something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import consumers, contains, is_op, producer
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Write
from trt_kvcache.importer.normalize.unknown import why_apart
from trt_kvcache.importer.normalize.views import MOVES

_PLAIN = (*MOVES, "Cast", "Add", "Sub", "Mul", "Div", "Where")  # scales and masks
_FEW = 8  # heads in a message


def mixed_heads(nodes: Iterable[gs.Node], past: str) -> str:
    """Words on the first of the nodes between scores and values that mixes heads; empty if none does."""
    for node in nodes:
        if is_op(node, "MatMul", "Gemm", "Einsum", "Conv"):
            return (
                f"{node.op} '{node.name}' mixes heads between scores and values of attention over the cache '{past}' "
                "(talking heads); supported are heads that do not depend on each other"
            )
    return ""


def why_unlike(graph: gs.Graph, update: gs.Node, samples: Samples) -> str:
    """Words on what stands between products with a cache of keys and those with values; empty if it may be attention.

    Args:
        graph: canonical.
        update: TensorScatter, of the cache.
        samples: of the model as exported.
    """
    past = update.inputs[0].name
    for product in [n for n in graph.nodes if is_op(n, "MatMul") and _update(n.inputs[1]) is update]:
        path = to_values(product, lambda tensor: _update(tensor) is not None, samples)
        if path is None or (not (mixed := mixed_heads(path, past)) and any(is_op(node, "Softmax") for node in path)):
            continue
        ops = [f"{node.op} '{node.name}'" for node in path if not is_op(node, *_PLAIN)]
        return mixed or (
            f"attention over the cache '{past}' has no Softmax: the weights of its values are "
            f"{f'made by {ops[0]}' if ops else 'the scores'}; supported are weights that are a softmax of the scores"
        )
    return ""


def why_lost(graph: gs.Graph, reader: gs.Node, samples: Samples) -> str:
    """Words on the first operator, from what reads a cache to the result of attention, that is not as expected.

    Args:
        graph: canonical.
        reader: of the cache, and no attention.
        samples: of the model as exported.

    Returns:
        Empty if all that is on the way may be attention, or the way ends before a product.
    """
    pending: deque[tuple[gs.Node, bool, bool]] = deque([(reader, False, False)])
    seen: set[int] = set()
    while pending:
        node, after_product, weighted = pending.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for output in node.outputs:
            if samples.twins[0].probe.shape(output.name) is None and (why := why_apart(output, samples.twins[0])):
                return why
        if is_op(node, "Softmax"):
            weighted = after_product
        elif is_op(node, "MatMul") and not after_product:
            counts = _counts(node.outputs[0], samples)
            after_product, weighted = True, counts is not None and len(set(counts)) > 1
        elif not is_op(node, *_PLAIN):
            continue
        if weighted and (shown := [t.name for t in node.outputs if contains(graph.outputs, t)]):
            return (
                f"{node.op} '{node.name}' gives '{shown[0]}' as an output, which has a column for each key of the "
                "text; the rewritten attention has other columns: leave that output out"
            )
        pending += [(reads, after_product, weighted) for t in node.outputs for reads in consumers(t)]
    return ""


def _update(tensor: gs.Tensor) -> gs.Node | None:
    """The update of the cache that a tensor is made of by moving and scaling numbers, or None."""
    while (node := producer(tensor)) is not None and not is_op(node, "TensorScatter"):
        if not is_op(node, *MOVES, "Cast", "Mul", "Div"):
            return None
        tensor = node.inputs[0]
    return node


def to_values(product: gs.Node, is_cached: Callable[[gs.Tensor], bool], samples: Samples) -> tuple[gs.Node, ...] | None:
    """The nodes after the product of scores, up to the next product with a cache; None: there is no such product.

    Args:
        product: MatMul with a cache.
        is_cached: True for a tensor that is made of a cache by moving and scaling numbers.
        samples: of the model as exported.
    """
    scores = _counts(product.outputs[0], samples)
    if scores is None or len(set(scores)) == 1:  # no scores: these are more after a longer past
        return None
    pending: deque[tuple[gs.Tensor, tuple[gs.Node, ...]]] = deque([(product.outputs[0], ())])
    seen = {product.outputs[0].name}
    while pending:
        tensor, path = pending.popleft()
        for node in consumers(tensor):
            if is_op(node, "MatMul") and node.inputs[0] is tensor and is_cached(node.inputs[1]):
                return path
            for output in node.outputs:
                if output.name not in seen and _counts(output, samples) == scores:
                    seen.add(output.name)
                    pending.append((output, (*path, node)))
    return None


def _counts(tensor: gs.Tensor, samples: Samples) -> tuple[int, ...] | None:
    """Numbers that a tensor holds after a short and after a longer past."""
    shapes = [sample.probe.shape(tensor.name) for sample in samples.twins]
    return None if None in shapes else tuple(prod(shape or ()) for shape in shapes)


def other_order(read: gs.Tensor, write: Write, factor: float, size: int, samples: Samples) -> str:
    """Words on the heads of a cache that a product reads, if they are in another order than the supported one.

    Args:
        read: what the product reads, ``[B, H, ., .]`` up to a Reshape, of the numbers of the cache.
        write: the cache.
        factor: by which the numbers are scaled.
        size: of a head.
        samples: of the model as exported.
    """
    name = write.present.name
    sample = min(samples.few, key=lambda step: step.batch * step.total)
    probe = sample.probe
    shape = probe.shape(name)
    first = [(step.probe.shape(name) or (0,))[0] for step in samples.few]
    if (
        not 0 < abs(factor) < np.inf
        or shape is None
        or write.axis == 0
        or first != [step.batch for step in samples.few]
    ):
        return ""
    rest = [1 if axis in (0, write.axis) else n for axis, n in enumerate(shape)]
    heads = np.arange(prod(rest)).reshape(rest) // size
    count = int(heads.max()) + 1
    rows = count * np.arange(sample.batch).reshape(-1, *[1] * (len(shape) - 1))  # a sequence's own, in its place
    kind = (
        np.float16 if probe.elem_type(name) == onnx.TensorProto.FLOAT16 else np.float32
    )  # bfloat16 counts to 256 only
    value = probe.with_values({name: np.broadcast_to(rows + heads, shape).astype(kind)}).value(read.name)
    if value is None or value.ndim < 3 or not value.size or value.size % (sample.batch * prod(value.shape[-2:])):
        return ""
    rows_read = np.rint(value.astype(np.float64) / factor).astype(int)
    rows_read = rows_read.reshape(sample.batch, -1, prod(value.shape[-2:])) - rows.reshape(-1, 1, 1)
    order = rows_read[0, :, 0]
    wanted = np.arange(len(order)) * count // len(order)
    if (rows_read != order[:, None]).any() or np.array_equal(order, wanted):
        return ""
    said, supported = (", ".join(map(str, heads[:_FEW])) + ", ..." * (len(heads) > _FEW) for heads in (order, wanted))
    return (
        f"query heads read heads {said} of the cache '{write.past.name}', in this order; supported is {supported}: "
        "export with the heads of queries, and of the output projection, in an order that gives that"
    )
