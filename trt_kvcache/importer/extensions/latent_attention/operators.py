"""What an operator makes of row functions: which operators work on each row by itself.

Each rule has to keep the axes of the batch and of the rows, and to mix nothing along them. So what it makes is known of
every length, but for shapes that are operands, which are held as even and become constants. What a cache holds behind
its rows in use comes to nothing only if it stays finite (0 * inf is no 0): operators that may make infinity or NaN of a
number are left out, such as a division by what may be 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.extensions.latent_attention.function import ANY, LEAST_ZERO, POSITIVE, Axes, RowFunction
from trt_kvcache.importer.graph import consumers, is_op, made_of_constants
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.views import is_float_cast

_UNARY = ("Identity", "Neg", "Abs", "Relu", "Tanh", "Sigmoid", "Erf", "Sin", "Cos", "Gelu")
_BINARY = ("Add", "Sub", "Mul", "Max", "Min")
_ROUNDING = ("QuantizeLinear", "DequantizeLinear")
_RESHAPES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_END = 1 << 31  # of a Slice that cuts nothing off
_EXACT = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


class MixedError(Exception):
    """Why what an operator makes is no row function; empty where that needs no mention."""


class RowOperators:
    """The operators that work on each row by itself.

    Args:
        found: the row functions that are known, by name; whoever finds more adds them.
        samples: of the model as exported.
        tried: those of them that shapes are looked at in; at least one.

    Attributes:
        fixed: by name, bounds and indices that are computed, and the same in all samples.
    """

    def __init__(self, found: Mapping[str, RowFunction], samples: Samples, tried: Sequence[Sample]) -> None:
        self.fixed: dict[str, Array] = {}
        self._found = found
        self._blueprint = samples.blueprint
        self._every = (*samples.plain, *samples.twins)
        self._samples = tried

    def made(self, node: gs.Node) -> list[RowFunction]:
        """What a node makes of row functions, of which it takes some.

        Raises:
            MixedError: it is none.
        """
        for rule in (self._alike, self._reshaped, self._moved, self._reduced, self._product):
            if (made := rule(node)) is not None:
                return made
        raise MixedError(f"{node.op} '{node.name}' is none of the operators that work on one row by itself")

    # Each rule gives what a node makes, or None where it is not for this operator.

    def _alike(self, node: gs.Node) -> list[RowFunction] | None:
        """Operators on one number at a time."""
        source = node.inputs[0]
        if is_op(node, *_UNARY) or is_float_cast(node):
            found = self._only(node)
            keeps = is_float_cast(node) or is_op(node, "Identity")
            sign = found.sign if keeps else LEAST_ZERO if is_op(node, "Abs", "Relu") else ANY
            if is_float_cast(node) and node.attrs["to"] not in _EXACT:
                sign = min(sign, LEAST_ZERO)  # it may vanish
            return self._one(node, found.axes, sign=sign, is_moved=found.is_moved and keeps)
        if is_op(node, "Sqrt", "Reciprocal"):
            found = self._only(node)
            if found.sign < (LEAST_ZERO if is_op(node, "Sqrt") else POSITIVE):
                raise MixedError(f"{node.op} '{node.name}' may make infinity or NaN of what a cache holds")
            return self._one(node, found.axes, sign=found.sign)
        if is_op(node, "Pow"):
            found = self._only(node)
            power = self._constant(node.inputs[1])
            if source.name not in self._found or power is None or power.size != 1 or float(power.reshape(())) != 2:
                raise MixedError(f"Pow '{node.name}' is no square")
            return self._one(node, found.axes, sign=LEAST_ZERO)
        if is_op(node, "Div"):
            by = self._found.get(node.inputs[1].name)
            if by is not None and by.sign < POSITIVE:
                raise MixedError(f"Div '{node.name}' may divide by 0 what a cache holds")
            return self._one(node, self._aligned(node), is_moved=self._scales(node))
        if is_op(node, *_ROUNDING):
            return self._one(node, self._rounded(node))
        if is_op(node, *_BINARY):
            return self._one(node, self._aligned(node), sign=self._sign(node), is_moved=self._scales(node))
        return None

    def _rounded(self, node: gs.Node) -> Axes:
        """Batch and rows of what is rounded, with scales that are the same for all of these."""
        found = self._only(node)
        scales = self._shape(node.inputs[1], self._samples[0])
        rank = len(self._shape(node.outputs[0], self._samples[0]))
        closed = (made_of_constants(t) for t in node.inputs[1:] if not t.is_empty())
        if node.inputs[0].name not in self._found or not all(closed):
            raise MixedError(f"{node.op} '{node.name}' has scales that are computed")
        if not int(node.attrs.get("saturate", 1)):
            raise MixedError(f"{node.op} '{node.name}' makes NaN of what is too large (saturate=0)")
        if prod(scales) > 1:
            if len(scales) > 1:
                raise MixedError(f"{node.op} '{node.name}' rounds in blocks")
            self._off_axes(node, [int(node.attrs.get("axis", 1))], found.axes, rank)
        return found.axes

    def _reshaped(self, node: gs.Node) -> list[RowFunction] | None:
        if not is_op(node, *_RESHAPES, "Expand"):
            return None
        found = self._only(node)
        pairs = [(self._shape(node.inputs[0], s), self._shape(node.outputs[0], s)) for s in self._samples]
        if is_op(node, "Expand"):
            rank = len(pairs[0][1]) - len(pairs[0][0])
            axes = tuple(axis + rank for axis in found.axes)
            if any(before[a] != after[b] for before, after in pairs for a, b in zip(found.axes, axes, strict=True)):
                raise MixedError(f"Expand '{node.name}' repeats rows")
        else:
            axes = tuple(_apart(node, axis, pairs) for axis in found.axes)
            if len(set(axes)) < len(axes):
                raise MixedError(f"{node.op} '{node.name}' does not keep the rows of a cache apart")
        shape = self._constant_shape(node, found.axes, axes, [after for _, after in pairs])
        return self._one(node, axes, shape=shape, sign=found.sign, is_moved=found.is_moved)

    def _constant_shape(
        self, node: gs.Node, before: Axes, after: Axes, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """The shape of what a Reshape or Expand makes, for every batch and length."""
        made = list(shapes[0])
        if is_op(node, "Expand"):
            for axis in after:
                made[axis] = 1
        elif len(after) == 1:
            made[after[0]] = -1
        elif before[0] == after[0]:
            made[after[0]], made[after[1]] = 0, -1
        elif before[1] == after[1]:
            made[after[0]], made[after[1]] = -1, 0
        else:
            raise MixedError(f"{node.op} '{node.name}' moves both batch and rows")
        others = [axis for axis in range(len(made)) if axis not in after]
        if any(shape[axis] != made[axis] for shape in shapes for axis in others) or any(made[a] < 1 for a in others):
            raise MixedError(f"{node.op} '{node.name}' gives a shape that grows beside the rows")
        return tuple(made)

    def _moved(self, node: gs.Node) -> list[RowFunction] | None:
        """Operators that move numbers along other axes than batch and rows."""
        if not is_op(node, "Transpose", "Concat", "Split", "Slice", "Gather"):
            return None
        if is_op(node, "Concat"):
            return self._one(node, self._beside(node), is_moved=False)
        found = self._only(node)
        rank = len(self._shape(node.inputs[0], self._samples[0]))
        if node.inputs[0].name not in self._found:
            raise MixedError(f"{node.op} '{node.name}' is led by what a cache holds")
        if is_op(node, "Transpose"):
            perm = list(node.attrs.get("perm") or reversed(range(rank)))
            if sorted(perm) != list(range(rank)):
                raise MixedError(f"Transpose '{node.name}' has the perm {perm}, which is none")
            axes = tuple(perm.index(axis) for axis in found.axes)
            return self._one(node, axes, sign=found.sign, is_moved=found.is_moved)
        operands = [self._constant(t) for t in node.inputs[1:] if not t.is_empty()]
        if any(value is None for value in operands):
            raise MixedError(f"{node.op} '{node.name}' takes what is computed")
        if is_op(node, "Split"):
            self._off_axes(node, [int(node.attrs.get("axis", 0))], found.axes, rank)
            part = self._one(node, found.axes, sign=found.sign)[0]
            return [replace(part, tensor=t) for t in node.outputs if not t.is_empty()]
        if is_op(node, "Gather"):
            axis = int(node.attrs.get("axis", 0)) % rank
            self._off_axes(node, [axis], found.axes, rank)
            assert operands[0] is not None
            more = operands[0].ndim - 1
            axes = tuple(kept + more * (kept > axis) for kept in found.axes)
            return self._one(node, axes, sign=found.sign, is_moved=found.is_moved)
        self._check_slice(node, found.axes, rank)
        last = max(axis for axis in range(rank) if axis not in found.axes)  # of one head, behind the heads
        sizes = [self._shape(tensor, self._samples[0])[last] for tensor in (node.inputs[0], node.outputs[0])]
        if not sizes[1]:
            raise MixedError(f"Slice '{node.name}' leaves nothing of a row")
        return self._one(node, found.axes, sign=found.sign, is_moved=found.is_moved and sizes[0] == sizes[1])

    def _check_slice(self, node: gs.Node, axes: Axes, rank: int) -> None:
        bounds = [self._constant(t) for t in node.inputs[1:]]
        starts, ends = bounds[0], bounds[1]
        along = bounds[2] if len(bounds) > 2 else None
        steps = bounds[3] if len(bounds) > 3 else None
        if starts is None or ends is None:
            raise MixedError(f"Slice '{node.name}' takes what is computed")
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            axis = (int(along[i]) if along is not None else i) % rank
            whole = start == 0 and end >= _END - 1 and (steps is None or steps[i] == 1)
            if axis in axes and not whole:
                raise MixedError(f"Slice '{node.name}' cuts rows")

    def _reduced(self, node: gs.Node) -> list[RowFunction] | None:
        """Operators over other axes than batch and rows."""
        if not is_op(node, *_REDUCTIONS, *_NORMS, "Softmax"):
            return None
        found = self._only(node)
        rank = len(self._shape(node.inputs[0], self._samples[0]))
        if is_op(node, "Softmax"):
            self._off_axes(node, [int(node.attrs.get("axis", -1))], found.axes, rank)
            return self._one(node, found.axes, sign=LEAST_ZERO)
        if is_op(node, *_NORMS):
            first = int(node.attrs.get("axis", -1)) % rank
            self._off_axes(node, range(first, rank), found.axes, rank)
            if float(node.attrs.get("epsilon", 1e-5)) <= 0:
                raise MixedError(f"{node.op} '{node.name}' may divide by 0 what a cache holds")
            outputs = [t for t in node.outputs[1:] if not t.is_empty() and consumers(t)]
            if outputs or not all(made_of_constants(t) for t in node.inputs[1:] if not t.is_empty()):
                raise MixedError(f"{node.op} '{node.name}' is more than a norm with constants")
            return self._one(node, found.axes)
        operand = self._constant(node.inputs[1]) if len(node.inputs) > 1 else None
        stated = operand if operand is not None else node.attrs.get("axes", ())
        axes = [int(a) % rank for a in stated] or range(rank)  # none stated: all
        self._off_axes(node, axes, found.axes, rank)
        if int(node.attrs.get("keepdims", 1)):
            return self._one(node, found.axes, sign=found.sign)
        left = tuple(kept - sum(a < kept for a in axes) for kept in found.axes)
        return self._one(node, left, sign=found.sign)

    def _product(self, node: gs.Node) -> list[RowFunction] | None:
        if not is_op(node, "MatMul"):
            return None
        left, right = node.inputs
        found = self._found.get(left.name)
        other, contracted = right, -1
        if found is None:
            found, other, contracted = self._found[right.name], left, -2
        if not made_of_constants(other):
            raise MixedError  # queries, or what a softmax makes of their scores
        for sample in self._samples:
            rank, factor = len(self._shape(found.tensor, sample)), self._shape(other, sample)
            if rank < 2 or len(factor) < 2 or rank + contracted in found.axes:
                raise MixedError(f"MatMul '{node.name}' sums over rows")
            shift = max(rank, len(factor)) - rank
            for axis in found.axes:
                place = axis - rank  # counted from the end
                if place < -2 and -place <= len(factor) and factor[place] != 1:
                    raise MixedError(f"MatMul '{node.name}' multiplies each row with its own numbers")
        return self._one(node, tuple(axis + shift for axis in found.axes))

    def _one(
        self, node: gs.Node, axes: Axes, *, shape: tuple[int, ...] | None = None, sign: int = ANY,
        is_moved: bool = False,
    ) -> list[RowFunction]:  # fmt: skip
        sources = [self._found[t.name] for t in node.inputs if t.name in self._found]
        writes = tuple(dict.fromkeys(w for source in sources for w in source.writes))
        if len({source.is_new for source in sources}) > 1:
            raise MixedError(f"{node.op} '{node.name}' brings the new tokens' rows and those of all together")
        made = RowFunction(node.outputs[0], axes, writes, node, shape, is_moved, sign, sources[0].is_new)
        return [replace(made, inputs=tuple(node.inputs))]

    def _only(self, node: gs.Node) -> RowFunction:
        """The one row function among the inputs; what else there is is constant, or says a shape."""
        sources = [self._found[t.name] for t in node.inputs if t.name in self._found]
        if len(sources) != 1:
            raise MixedError(f"{node.op} '{node.name}' brings caches together")
        return sources[0]

    def _aligned(self, node: gs.Node) -> Axes:
        """Batch and rows of what an operator makes of tensors number by number."""
        whole = max(len(self._shape(t, self._samples[0])) for t in node.inputs)
        found: set[Axes] = set()
        alike: set[Axes] = set()  # the same for all sequences
        for tensor in node.inputs:
            if (function := self._found.get(tensor.name)) is not None:
                shift = whole - len(self._shape(tensor, self._samples[0]))
                axes = tuple(axis + shift for axis in function.axes)
                (found if len(axes) > 1 else alike).add(axes)
            elif not made_of_constants(tensor):
                raise MixedError(f"{node.op} '{node.name}' takes '{tensor.name}', which is no constant")
        if len(found) > 1 or len({axes[-1] for axes in (*found, *alike)}) != 1:
            raise MixedError(f"{node.op} '{node.name}' brings rows of different places together")
        axes = (found or alike).pop()
        for sample in self._samples:
            for tensor in node.inputs:
                shape = self._shape(tensor, sample)
                places = [axis - whole for axis in axes if whole - axis <= len(shape)]
                if (function := self._found.get(tensor.name)) is not None:
                    alone = len(axes) - len(function.axes)  # the batch, where that is alike for all sequences
                    places = [axis - whole for axis in axes[:alone] if whole - axis <= len(shape)]
                if any(shape[place] != 1 for place in places):
                    raise MixedError(f"{node.op} '{node.name}' does something else to each row")
        return axes

    def _beside(self, node: gs.Node) -> Axes:
        """Batch and rows of what a Concat makes."""
        functions = [self._found.get(t.name) for t in node.inputs]
        rank = len(self._shape(node.outputs[0], self._samples[0]))
        axes = {f.axes for f in functions if f is not None}
        if None in functions or len(axes) != 1:
            raise MixedError(f"Concat '{node.name}' puts something else beside rows of a cache")
        found = axes.pop()
        self._off_axes(node, [int(node.attrs["axis"])], found, rank)
        return found

    def _off_axes(self, node: gs.Node, along: Sequence[int], axes: Axes, rank: int) -> None:
        for axis in along:
            if axis % rank in axes:
                what = "rows of a cache" if axis % rank == axes[-1] else "sequences"
                raise MixedError(f"{node.op} '{node.name}' is along {what}")

    def _scales(self, node: gs.Node) -> bool:
        """Whether a Mul or Div scales one cache by one number."""
        if not is_op(node, "Mul", "Div"):
            return False
        functions = [self._found[t.name] for t in node.inputs if t.name in self._found]
        others = [t for t in node.inputs if t.name not in self._found]
        return (
            len(functions) == 1
            and functions[0].is_moved
            and prod(self._shape(others[0], self._samples[0])) == 1
            and (is_op(node, "Mul") or others[0] is node.inputs[1])
        )

    def _sign(self, node: gs.Node) -> int:
        left, right = (self._sign_of(t) for t in node.inputs[:2])
        if len(node.inputs) != 2:
            return ANY
        if is_op(node, "Mul"):
            return LEAST_ZERO if node.inputs[0] is node.inputs[1] else min(left, right, LEAST_ZERO)
        if is_op(node, "Add"):
            return max(left, right) if min(left, right) >= LEAST_ZERO else ANY
        return max(left, right) if is_op(node, "Max") else ANY

    def _sign_of(self, tensor: gs.Tensor) -> int:
        if (function := self._found.get(tensor.name)) is not None:
            return function.sign
        value = self._constant(tensor)
        if value is None or not value.size:
            return ANY
        least = float(value.min())
        return POSITIVE if least > 0 else LEAST_ZERO if least == 0 else ANY

    def _shape(self, tensor: gs.Tensor, sample: Sample) -> tuple[int, ...]:
        shape = sample.probe.shape(tensor.name)
        if shape is None:
            raise MixedError(f"nothing says the shape of '{tensor.name}'")
        return shape

    def _constant(self, tensor: gs.Tensor) -> Array | None:
        if self._blueprint.is_constant(tensor.name):
            return self._blueprint.constant(tensor.name)
        if tensor.name not in self.fixed:  # such as half of the size of a head
            values = [sample.probe.value(tensor.name) for sample in self._every]
            first = values[0]
            if first is None or any(v is None or not np.array_equal(v, first) for v in values):
                return None
            self.fixed[tensor.name] = first
        return self.fixed[tensor.name]


def _apart(node: gs.Node, axis: int, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    """The axis that holds, behind a Reshape, just what `axis` holds in front of it."""
    places = set(range(len(pairs[0][1])))
    for before, after in pairs:
        sizes = prod(before[:axis]), before[axis], prod(before[axis + 1 :])
        places &= {i for i in range(len(after)) if sizes == (prod(after[:i]), after[i], prod(after[i + 1 :]))}
    if not places:
        raise MixedError(f"{node.op} '{node.name}' does not keep rows of a cache apart")
    return min(places)
