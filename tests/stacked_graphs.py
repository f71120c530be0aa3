"""Decoders whose caches lie in few tensors, made of decoders whose caches have an input and an output each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Names = npt.NDArray[Any]  # of caches, in the order in which they are stacked
READS = ("gather", "slice", "split", "halves", "transpose", "reshape", "none")
WRITES = ("stack", "transpose", "reshape", "elements", "slots", "none")
KINDS = ("key", "value")


@dataclass(frozen=True)
class Stacking:
    """How caches lie in a tensor.

    Attributes:
        order: what is stacked, outermost first: ``"L"`` layers, ``"K"`` keys and values; ``"LK"`` and ``"KL"`` along
            two axes, ``"M"`` along one axis for both, keys and values of a layer side by side.
        axis: of the first of these.
        read: how a cache is taken out.
        write: how the caches are put together.
        moved: the model gives each cache back in the place of the next one.
    """

    order: str = "LK"
    axis: int = 0
    read: str = "gather"
    write: str = "stack"
    moved: bool = False

    def __str__(self) -> str:
        """Its name as a test's parameter."""
        return f"{self.order}{self.axis}-{self.read}-{self.write}"


def stacked(model: onnx.ModelProto, how: Stacking) -> onnx.ModelProto:
    """The same decoder with stacked caches.

    Args:
        model: with inputs ``past_key_values.<i>.key|value`` and outputs ``present.<i>.key|value``. Changed.
        how: they are stacked.
    """
    layers = sum(v.name.endswith(".key") for v in model.graph.input)
    table = np.array([[f"{i}.{kind}" for kind in KINDS] for i in range(layers)], object)
    groups: dict[str, Names] = {
        "L": {kind: table[:, k] for k, kind in enumerate(KINDS)}, "K": {str(i): row for i, row in enumerate(table)},
        "LK": {"all": table}, "KL": {"all": table.T}, "M": {"all": table.reshape(-1)},
    }[how.order]  # fmt: skip
    edit = _Edit(model, how)
    for name, caches in groups.items():
        edit.group(name, caches)
    return edit.finished()


def text_first(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same decoder with caches ``[P, B, N, H]``. Changed."""
    before, after = [], []
    for values, nodes, perm in ((model.graph.input, before, (1, 2, 0, 3)), (model.graph.output, after, (2, 0, 1, 3))):
        for value in [v for v in values if v.name.startswith(("past_key_values.", "present."))]:
            dims = [onnx.TensorShapeProto.Dimension.FromString(d.SerializeToString())
                    for d in value.type.tensor_type.shape.dim]  # fmt: skip
            del value.type.tensor_type.shape.dim[:]
            value.type.tensor_type.shape.dim.extend(dims[a] for a in (2, 0, 1, 3))
            inner = f"{value.name}/inner"
            for node in model.graph.node:
                node.input[:] = [inner if name == value.name else name for name in node.input]
                node.output[:] = [inner if name == value.name else name for name in node.output]
            names = (value.name, inner) if values is model.graph.input else (inner, value.name)
            nodes.append(helper.make_node("Transpose", names[:1], names[1:], name=f"{inner}/turned", perm=perm))
    nodes = [*before, *model.graph.node, *after]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


class _Edit:
    def __init__(self, model: onnx.ModelProto, how: Stacking) -> None:
        self.model, self.how = model, how
        self.before: list[onnx.NodeProto] = []
        self.after: list[onnx.NodeProto] = []
        self.nodes = self.before
        self.count = 0
        self.shapes = {v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim]
                       for v in (*model.graph.input, *model.graph.output)}  # fmt: skip

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, name: str = "", **attrs: Any) -> str:
        self.count += 1
        made = (
            [f"stacking/{self.count}.{i}" for i in range(outputs)]
            if outputs > 1
            else [name or f"stacking/{self.count}"]
        )
        self.nodes.append(helper.make_node(op, list(inputs), made, name=f"stacking/{op}_{self.count}", **attrs))
        return made[0]

    def ints(self, *values: int) -> str:
        return self._array(np.array(values, np.int64))

    def _array(self, values: npt.NDArray[Any]) -> str:
        self.count += 1
        self.model.graph.initializer.append(numpy_helper.from_array(values, f"stacking/const_{self.count}"))
        return f"stacking/const_{self.count}"

    def group(self, name: str, caches: Names) -> None:
        """Stack some caches: their inputs, and their outputs."""
        past, present = f"past.{name}", f"present.{name}"
        inputs = np.vectorize(lambda cache: f"past_key_values.{cache}")(caches)
        outputs = np.vectorize(lambda cache: f"present.{cache}")(caches)
        given = np.roll(outputs.reshape(-1), 1).reshape(outputs.shape) if self.how.moved else outputs
        self.nodes = self.before
        if self.how.read != "none":
            self._take(past, inputs, self.shapes[inputs.flat[0]])
            self._declare(self.model.graph.input, past, inputs)
        self.nodes = self.after
        if self.how.write != "none":
            self._put(past, present, given, self.shapes[outputs.flat[0]])
            self._declare(self.model.graph.output, present, outputs)

    def _declare(self, values: Any, name: str, caches: Names) -> None:
        first = next(v for v in values if v.name == caches.flat[0])
        kind, shape, axis = first.type.tensor_type.elem_type, list(self.shapes[first.name]), self.how.axis
        shape[axis:axis] = caches.shape
        place = list(values).index(first)
        kept = [v for v in values if v.name not in set(caches.flat)]
        kept.insert(place, helper.make_tensor_value_info(name, kind, shape))
        del values[:]
        values.extend(kept)

    def _take(self, whole: str, caches: Names, own: list[Any]) -> None:
        """Name every cache that lies in a tensor."""
        axis, read, count = self.how.axis, self.how.read, len(caches)
        rank = len(own) + caches.ndim
        if read == "halves" and count % 2 == 0 and count > 2:
            parts = [self.add("Split", [whole, self.ints(count // 2, count // 2)], 2, axis=axis)]
            parts.append(parts[0].replace(".0", ".1"))
            for part, group in zip(parts, np.split(caches, 2), strict=True):
                self._take(part, group, own)
            return
        if read == "reshape" and self.how.order == "M" and len(own) + 1 == rank and whole.startswith("past."):
            whole = self._reshaped(whole, axis, 1, count // 2, 2)
            caches = caches.reshape(count // 2, 2)
            count, rank = count // 2, rank + 1
        if read == "transpose":
            perm = [a for a in range(rank) if a != axis] + [axis]
            whole = self.add("Transpose", [whole], perm=perm)
        split = (
            self.add("Split", [whole, self.ints(*[1] * count)], count, axis=axis)
            if read == "split" and count > 1
            else ""
        )
        for i, below in enumerate(caches):
            name = below if isinstance(below, str) else ""
            if read == "transpose":
                part = self.add("Gather", [whole, self._array(np.array(i - count, np.int64))], name=name, axis=-1)
            elif split or read == "slice":
                end = i + 1 if i % 2 else i + 1 - count or np.iinfo(np.int64).max
                cut = [self.ints(i), self.ints(end), self.ints(axis - rank)]
                one = f"{split[:-1]}{i}" if split else self.add("Slice", [whole, *cut])
                part = self.add("Squeeze", [one, self.ints(axis)], name=name)
            else:
                part = self.add("Gather", [whole, self._array(np.array(i, np.int64))], name=name, axis=axis)
            if not name:
                self._take(part, below, own)

    def _reshaped(self, tensor: str, axis: int, gone: int, *sizes: int, name: str = "") -> str:
        """A tensor with other sizes in the place of `gone` ones."""
        shape, end = self.add("Shape", [tensor]), self.ints(np.iinfo(np.int64).max)
        before = self.add("Slice", [shape, self.ints(0), self.ints(axis)])
        after = self.add("Slice", [shape, self.ints(axis + gone), end])
        target = self.add("Concat", [before, self.ints(*sizes), after], axis=0)
        return self.add("Reshape", [tensor, target], name=name, allowzero=1)  # of no tokens, too

    def _put(self, past: str, whole: str, caches: Names, own: list[Any]) -> None:
        """Make a tensor of what is written to all caches."""
        axis, write = self.how.axis, self.how.write
        if write in ("elements", "slots"):  # into the tensor that was given
            for i, name in enumerate(caches.flat):
                last = i == caches.size - 1
                update = self.add("Unsqueeze", [name, self.ints(axis)])
                if write == "slots":
                    past = self.add("ScatterND", [past, self._array(np.array([[i]], np.int64)), update],
                                    name=whole if last else "")  # fmt: skip
                else:
                    place = self.add("Expand", [self.ints(i), self.add("Shape", [update])])
                    past = self.add("ScatterElements", [past, place, update], name=whole if last else "", axis=axis)
            return
        if write == "reshape" and self.how.order == "M":
            pairs = [self._joined(pair, axis) for pair in caches.reshape(-1, 2)]
            self._reshaped(self._joined(pairs, axis), axis, 2, caches.size, name=whole)
            return
        if write == "transpose":
            last = (
                self._joined(caches, -1)
                if caches.ndim == 1
                else self._joined([self._joined(c, axis) for c in caches], -1)
            )
            rank = len(own) + caches.ndim
            self.add("Transpose", [last], name=whole, perm=[*range(axis), rank - 1, *range(axis, rank - 1)])
            return
        self._joined(caches if caches.ndim == 1 else [self._joined(c, axis) for c in caches], axis, whole)

    def _joined(self, parts: Sequence[str] | Names, axis: int, name: str = "") -> str:
        return self.add("Concat", [self.add("Unsqueeze", [p, self.ints(axis)]) for p in parts], name=name, axis=axis)

    def finished(self) -> onnx.ModelProto:
        nodes = [*self.before, *self.model.graph.node, *self.after]
        del self.model.graph.node[:]
        self.model.graph.node.extend(nodes)
        return self.model
