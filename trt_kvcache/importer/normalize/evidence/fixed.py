"""Constants in disguise: what only sizes make, and no size changes.

    repeat_interleave(cos, 2)       NonZero(Range(n) < 2) -> GatherND          becomes      constant -> GatherND
    LongRoPE                        If(Shape(mask)[1] > 128, long, short)      becomes      short, up to 128 tokens

TorchScript writes the former, where n is a dimension that never changes, and TensorRT for RTX has no NonZero. A branch
that is always the same one would keep alive whatever its condition reads, such as the mask.

Only constants and the shapes of graph inputs may take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize.evidence.blueprint import Array, Blueprint, is_standard
from trt_kvcache.importer.normalize.evidence.probe import Probe
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.simplify import splice_body

_LARGEST = 1 << 16  # elements of a constant
_MOST = 1 << 14  # sequences, and of an axis that nothing explains
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
    blueprint = samples.blueprint
    names = [name for name in _deciding(blueprint.model.graph) if _from_sizes(name, blueprint)]
    fixed = {name: value for name in names if (value := _same(name, samples)) is not None}
    if fixed:
        fixed = _at_other_sizes(fixed, samples)
    if not fixed:
        return None
    model = onnx.ModelProto()
    model.CopyFrom(blueprint.model)
    _replace(model.graph, fixed)
    return model


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


def _deciding(graph: onnx.GraphProto) -> list[str]:
    """The tensors that take a node away if they are constants: indices, and conditions."""
    outputs = {value.name for value in graph.output}
    found = [node.output[0] for node in graph.node if is_standard(node, "NonZero") and node.output[0] not in outputs]
    found += [node.input[0] for node in graph.node if is_standard(node, "If")]
    return list(dict.fromkeys(found))


def _is_nonzero(graph: onnx.GraphProto, name: str) -> bool:
    return any(is_standard(node, "NonZero") and node.output[0] == name for node in graph.node)


def _replace(graph: onnx.GraphProto, values: Mapping[str, Array]) -> None:
    """Put constants in the place of each NonZero, and branches in that of each If that they decide."""
    decided = [i for i, node in enumerate(graph.node) if is_standard(node, "If") and node.input[0] in values]
    for index in reversed(decided):
        wanted = "then_branch" if values[graph.node[index].input[0]].reshape(-1)[0] else "else_branch"
        splice_body(graph, index, next(a.g for a in graph.node[index].attribute if a.name == wanted))
    gone = [node for node in graph.node if is_standard(node, "NonZero") and node.output[0] in values]
    for node in gone:
        graph.node.remove(node)
    graph.initializer.extend(numpy_helper.from_array(values[node.output[0]], node.output[0]) for node in gone)


def _same(name: str, samples: Samples) -> Array | None:
    """The value of a small tensor, if it is the same in all samples."""
    steps = (*samples.all, *samples.learning)  # the twins may be longer than the capacity
    value = steps[0].probe.value(name)
    if value is None or value.size > _LARGEST or value.dtype.kind not in "iub":
        return None
    return value if all(_is(step.probe, name, value) for step in steps) else None


def _is(probe: Probe, name: str, value: Array) -> bool:
    found = probe.value(name)
    return found is not None and np.array_equal(found, value)


def _from_sizes(name: str, blueprint: Blueprint) -> bool:
    """Whether constants and shapes alone make a tensor, and not what any graph input holds."""
    pending, seen = [name], {name}
    while pending:
        name = pending.pop()
        maker = blueprint.maker(name)
        if maker is None and not blueprint.is_constant(name):
            return False
        new = [n for n in (maker.operands if maker is not None else ()) if n and n not in seen]
        pending += new
        seen.update(new)
    return True


def _at_other_sizes(values: Mapping[str, Array], samples: Samples) -> dict[str, Array]:
    """Those that stay whatever the batch is, and the axes that nothing explains: few, and around each number.

    Behind the capacity as well, where caches may be circular.
    """
    numbers = _numbers(list(values), samples.blueprint)
    found = dict(values)
    for size in sorted({*_FEW, *(n + d for n in numbers for d in (-1, 0, 1) if n + d > 0)}):
        for step in samples.learning[:2]:
            probes = []
            if size <= _MOST:
                probes += [samples.step(size, step.past, step.length).probe]
                probes += [samples.step(step.batch, step.past, step.length, other=size).probe]
            if samples.wrapped and size > samples.capacity:
                probes += [samples.step(step.batch, size, step.length, wrapped=True).probe]
            found = {name: v for name, v in found.items() if all(_is(probe, name, v) for probe in probes)}
    return found


def _numbers(names: Sequence[str], blueprint: Blueprint) -> set[int]:
    """The whole numbers that take part in tensors, or in the shapes of what they are made of."""
    pending, seen = list(names), set(names)
    found: set[int] = set()
    while pending:
        name = pending.pop()
        maker = blueprint.maker(name)
        value = blueprint.constant(name) if maker is None else None
        if value is not None and value.size <= _FEW_NUMBERS and value.dtype.kind in "iuf":
            found |= {int(n) for n in value.reshape(-1).tolist() if abs(n) <= _LONGEST and n == int(n)}
        new = [n for n in (maker.inputs if maker is not None else ()) if n and n not in seen]
        pending += new
        seen.update(new)
    return found


def _last_unchanged(condition: str, samples: Samples) -> int | None:
    """The most tokens in all up to which a condition stays as it is for one; None where there is no telling."""

    def probe(tokens: int) -> Probe:
        return samples.step(1, tokens - 1, 1).probe

    first = probe(1).value(condition)
    same, changed = 1, samples.capacity
    if samples.fixed_length > 1 or first is None or _is(probe(changed), condition, first):
        return None
    while changed - same > 1:
        middle = (same + changed) // 2
        same, changed = (middle, changed) if _is(probe(middle), condition, first) else (same, middle)
    return same
