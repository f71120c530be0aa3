"""Emits keys and values that a graph computes from caches row by row, as in multi-head latent attention.

    latents [B, 1, T, r] -- MatMul, Reshape, Transpose, Split --> K without positions, V
    rotated [B, 1, T, d] -- Expand over the heads --------------> K with positions

In the result, a plain Attention reads keys and values that are computed only from constants and the cache rows in use.
This module follows tensors forward from the caches. In sample steps, the axis of rows is the one as long as the cache.
If an operator still mixes rows, such as a softmax over rows, the check refuses the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.emit.canonical_nodes import Canonical
from trt_kvcache.importer.graph import INT32, INT64, elem_type, is_constant, is_op
from trt_kvcache.importer.planning.cache_plans import emit_row_slice
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.recognize.records import Attention, Cache
from trt_kvcache.importer.recognize.sample_steps import Samples

Axes = tuple[int, ...]
_OTHERS = ("Attention", "Shape", "Size")
_SAMPLES = 3


class MixedError(Exception):
    """Raised if a node does not compute each row from one cache row and constants; the message may be empty."""


@dataclass(frozen=True, eq=False)
class RowFunction:
    """A tensor computed from caches. Each of its rows depends only on one cache row.

    Attributes:
        axes: the axis of the batch, and the axis of the cache rows.
        caches: the caches from which the tensor is computed.
        node: the node that computes the tensor; None if the tensor is a cache.
        shape: the shape to give to a Reshape or Expand, with 0 and -1 as in Reshape; None for other nodes.
    """

    tensor: gs.Tensor
    axes: Axes
    caches: tuple[Cache, ...]
    node: gs.Node | None = None
    shape: Axes | None = None


class Computed:
    """Emits keys and values that a sorted graph computes from `caches`, after TensorScatter updates these."""

    def __init__(self, graph: gs.Graph, caches: Sequence[Cache], samples: Samples) -> None:
        self._broken = ""
        self._fixed: dict[str, Array] = {}  # maps integer tensors to values, if these are equal in all samples
        self._every = (*samples.plain, *samples.twins)
        some = [s for s in samples.plain if s.length and s.total > 1]
        self._samples = sorted(some, key=lambda s: s.batch < 2)[:_SAMPLES]
        self._known = {str(c.present.name): RowFunction(c.present, (0, c.axis), (c,)) for c in caches}
        for node in graph.nodes:
            if not is_op(node, *_OTHERS) and any(t.name in self._known for t in node.inputs):
                try:
                    for function in self._functions(node):
                        self._known.setdefault(function.tensor.name, function)
                except MixedError as error:
                    self._broken = self._broken or str(error)

    def place(self, attention: Attention, canonical: Canonical) -> Attention:
        """Emit an attention's keys and values from the cache rows in use; return the attention that reads them."""
        emitted: dict[str, gs.Tensor] = {}
        key, value = (
            self._placed(cache, attention, size, emitted, canonical)
            for cache, size in ((attention.key, attention.sizes["d"]), (attention.value, attention.sizes["v"]))
        )
        return replace(attention, key=key, value=value)

    def _placed(
        self, cache: Cache, attention: Attention, size: int, emitted: dict[str, gs.Tensor], canonical: Canonical
    ) -> Cache:
        name = str(cache.present.name)
        if name not in self._known:
            raise UnsupportedModelError(
                f"'{name}', the keys or values of '{attention.name}', is computed from caches"
                + (f", but {self._broken}" if self._broken else "")
                + "; keys and values must be computed from the caches row by row, using only constants"
            )
        tensor = self._emit(name, emitted, canonical)
        kind = elem_type(cache.present) or elem_type(attention.computed_from[0].past) or 0
        if cache.axis == 3:
            tensor = canonical.emit.op("Transpose", [tensor], "rows_first", kind, perm=[0, 1, 3, 2])
        tensor.dtype = kind
        shape = (canonical.batch, attention.sizes["n"], canonical.capacity, size)
        canonical.known[tensor.name] = (kind, shape)
        return replace(cache, past=tensor, present=tensor, axis=2)

    def _emit(self, name: str, emitted: dict[str, gs.Tensor], canonical: Canonical) -> gs.Tensor:
        if name in emitted:
            return emitted[name]
        function, emit = self._known[name], canonical.emit
        node = function.node
        if node is None:
            cache = function.caches[0]
            rows = int((cache.present.shape or ())[cache.axis])
            emitted[name] = emit_row_slice(emit, cache.present, cache.axis, rows)
            return emitted[name]
        read = node.inputs[:1] if function.shape is not None else node.inputs
        inputs = [self._operand(t, emitted, canonical) for t in read]
        if function.shape is not None:
            op, kind = "Expand" if is_op(node, "Expand") else "Reshape", elem_type(function.tensor)
            emitted[name] = emit.op(op, [inputs[0], emit.ints(list(function.shape))], "row", kind)
        else:
            outputs = [t if t.is_empty() else gs.Variable(emit.name("row"), dtype=t.dtype) for t in node.outputs]
            copy = gs.Node(node.op, emit.name(f"row:{node.op}"), dict(node.attrs), inputs, outputs)
            canonical.graph.nodes.append(copy)
            emitted |= {old.name: new for old, new in zip(node.outputs, outputs, strict=True) if not old.is_empty()}
        return emitted[name]

    def _operand(self, tensor: gs.Tensor, emitted: dict[str, gs.Tensor], canonical: Canonical) -> gs.Tensor:
        if tensor.name in self._known:
            return self._emit(tensor.name, emitted, canonical)
        return canonical.emit.constant(self._fixed[tensor.name]) if tensor.name in self._fixed else tensor

    def _functions(self, node: gs.Node) -> list[RowFunction]:
        """Return the outputs of a node that reads caches. Raise `MixedError` if they are not computed row by row."""
        sources = [self._known[t.name] for t in node.inputs if t.name in self._known]
        shaped = is_op(node, "Reshape", "Expand")
        for tensor in node.inputs[:1] if shaped else node.inputs:
            if not (tensor.name in self._known or tensor.is_empty() or self._is_constant(tensor)):
                # A MatMul by queries or attention weights is a part of attention, so no message is needed.
                words = f"{node.op} '{node.name}' reads '{tensor.name}', which is not a constant"
                raise MixedError("" if is_op(node, "MatMul") else words)
        caches = tuple(dict.fromkeys(c for source in sources for c in source.caches))
        functions = []
        for tensor in (t for t in node.outputs if not t.is_empty()):
            axes = self._axes(node, tensor, sources[0])
            shape = self._shape(node, tensor, sources[0].axes, axes) if shaped else None
            functions.append(RowFunction(tensor, axes, caches, node, shape))
        return functions

    def _is_constant(self, tensor: gs.Tensor) -> bool:
        if is_constant(tensor) or tensor.name in self._fixed:
            return True
        if self._samples[0].probe.elem_type(tensor.name) not in (INT32, INT64):
            return False
        values = [sample.probe.value(tensor.name) for sample in self._every]
        first = values[0]
        if first is None or any(v is None or not np.array_equal(v, first) for v in values):
            return False
        self._fixed[tensor.name] = first
        return True

    def _axes(self, node: gs.Node, tensor: gs.Tensor, before: RowFunction) -> Axes:
        """Find the axes of batch and cache rows in an output. Raise `MixedError` if no axis is as long as the rows."""
        rank = len(self._shapes(before.tensor)[0])
        if is_op(node, "Transpose"):  # the shapes do not show where axes of size 1 go
            perm = list(node.attrs.get("perm") or reversed(range(rank)))
            return tuple(perm.index(axis) for axis in before.axes)
        shapes = self._shapes(tensor)
        near = before.axes[1] + len(shapes[0]) - rank
        # a cache that does not grow always has as many rows as the capacity
        fixed = any(not cache.growing for cache in before.caches)
        sizes = [s.capacity if fixed else s.total for s in self._samples]
        row = min(_axes_of(shapes, sizes), key=lambda axis: abs(axis - near), default=-1)
        batch = [axis for axis in _axes_of(shapes, [s.batch for s in self._samples]) if axis != row]
        if row < 0 or not batch:
            raise MixedError(f"{node.op} '{node.name}' mixes rows of a cache")
        return batch[0], row

    def _shape(self, node: gs.Node, tensor: gs.Tensor, before: Axes, after: Axes) -> Axes:
        shape = list(self._shapes(tensor)[0])
        for i, axis in enumerate(after):  # 0: this axis keeps its size
            if is_op(node, "Expand"):
                shape[axis] = 1
            else:
                shape[axis] = -1 if i == int(before[0] == after[0]) else 0
        return tuple(shape)

    def _shapes(self, tensor: gs.Tensor) -> list[Axes]:
        shapes = [sample.probe.shape(tensor.name) for sample in self._samples]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes) or len(set(map(len, known))) > 1:
            raise MixedError(f"the shape of '{tensor.name}' is unknown")
        return known


def _axes_of(shapes: Sequence[Axes], sizes: Sequence[int]) -> list[int]:
    """Return each axis with ``shapes[i][axis] == sizes[i]`` in every sample step i."""
    return [a for a in range(len(shapes[0])) if all(shape[a] == n for shape, n in zip(shapes, sizes, strict=True))]
