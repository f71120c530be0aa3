"""Constants in disguise: indices and conditions that are the same in every step.

    repeat_interleave(cos, 2)       NonZero(Range(n) < 2) -> GatherND          becomes      constant -> GatherND
    LongRoPE                        If(Shape(mask)[1] > 128, long, short)      becomes      short, up to 128 tokens

TorchScript writes the former, where n is a dimension that never changes, and TensorRT for RTX has no NonZero. A branch
that is always the same one would keep alive whatever its condition reads, such as the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize.evidence.probe import Array, Blueprint
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.protos import is_op
from trt_kvcache.importer.simplify import splice_body

_LARGEST = 1 << 16  # elements of a constant
_MOST = 1 << 14  # of an axis that nothing explains
_LONGEST = 1 << 20  # tokens
_FEW = range(1, 9)
_FEW_NUMBERS = 64  # of a constant that may be a size, a bound or an index


def fold_fixed(samples: Samples) -> onnx.ModelProto | None:
    """Put a constant in the place of each NonZero, and a branch in that of each If, that is the same in every step.

    Args:
        samples: of the model as exported.

    Returns:
        Another model; None where there is nothing to fold.
    """
    graph = samples.blueprint.model.graph
    outputs = {value.name for value in graph.output}
    names = {node.output[0] for node in graph.node if is_op(node, "NonZero") and node.output[0] not in outputs}
    names |= {node.input[0] for node in graph.node if is_op(node, "If")}
    fixed = {name: value for name in names if (value := _same(name, samples)) is not None}
    fixed = _at_other_sizes(fixed, samples) if fixed else fixed
    if not fixed:
        return None
    model = onnx.ModelProto()
    model.CopyFrom(samples.blueprint.model)
    graph = model.graph
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if is_op(node, "If") and node.input[0] in fixed:
            wanted = "then_branch" if fixed[node.input[0]].reshape(-1)[0] else "else_branch"
            splice_body(graph, index, next(a.g for a in node.attribute if a.name == wanted))
        elif is_op(node, "NonZero") and node.output[0] in fixed:
            graph.initializer.append(numpy_helper.from_array(fixed[node.output[0]], node.output[0]))
            del graph.node[index]
    return model


def _same(name: str, samples: Samples) -> Array | None:
    """The value of a small tensor, if it is the same in all samples."""
    first, *others = (step.probe.value(name) for step in (*samples.plain, *samples.wrapped))
    if first is None or first.size > _LARGEST or first.dtype.kind not in "iub":
        return None
    return first if all(value is not None and np.array_equal(first, value) for value in others) else None


def _at_other_sizes(values: Mapping[str, Array], samples: Samples) -> dict[str, Array]:
    """Those that stay whatever the size of axes that nothing explains is: small, and around each number.

    The check runs one size of such axes: shapes of what regions are fed with are terms in B and S alone.
    """
    numbers = _numbers(list(values), samples.blueprint)
    found = dict(values)
    for size in sorted({*_FEW, *(n + d for n in numbers for d in (-1, 0, 1) if 0 < n + d <= _MOST)}):
        for step in samples.plain[:2]:
            probe = samples.step(step.batch, step.past, step.length, other=size).probe
            found = {n: v for n, v in found.items() if (made := probe.value(n)) is not None and np.array_equal(made, v)}
    return found


def _numbers(names: Sequence[str], blueprint: Blueprint) -> set[int]:
    """The whole numbers that take part in tensors, or in the shapes of what they are made of."""
    pending, seen = list(names), set(names)
    found: set[int] = set()
    while pending:
        name = pending.pop()
        maker = blueprint.makers.get(name)
        value = blueprint.stated(name).value if name in blueprint.initializers else None
        if value is not None and value.size <= _FEW_NUMBERS and value.dtype.kind in "iuf":
            found |= {int(n) for n in value.reshape(-1).tolist() if abs(n) <= _LONGEST and n == int(n)}
        new = [n for n in (maker.inputs if maker is not None else ()) if n and n not in seen]
        pending += new
        seen.update(new)
    return found


def chosen_by_length(node: gs.Node, output: gs.Tensor, samples: Samples) -> UnsupportedModelError:
    """Why an If that depends on the length of the cache is refused.

    Args:
        node: the If.
        output: of it.
        samples: of the model as exported.
    """
    last = _last_unchanged(str(node.inputs[0].name), samples)
    where, what = "", "take a capacity below the length at which it changes"
    if last is not None:
        where, what = f", another one from {last + 1} tokens on", f"take a capacity of at most {last}"
    return UnsupportedModelError(
        f"If '{node.name}' chooses '{output.name}' by the length of the longest sequence of a batch{where}, such as "
        f"rotary factors (LongRoPE, dynamic NTK); supported are sequences that do not depend on each other: {what}"
    )


def _last_unchanged(condition: str, samples: Samples) -> int | None:
    """The most tokens in all up to which a condition stays as it is for one; None where there is no telling."""

    def chosen(tokens: int) -> bool | None:
        value = samples.step(1, tokens - 1, 1).probe.value(condition)
        return None if value is None else bool(value.any())

    first = chosen(1)
    same, changed = 1, samples.capacity
    if samples.fixed_length > 1 or first is None or chosen(changed) == first:
        return None
    while changed - same > 1:
        middle = (same + changed) // 2
        same, changed = (middle, changed) if chosen(middle) == first else (same, middle)
    return same
