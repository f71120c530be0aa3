"""Decoders whose caches lie in few tensors, made of decoders whose caches have an input and an output each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from foreign_tools import foreign
from onnx import helper, numpy_helper

from corpus import Entry, built

Names = npt.NDArray[Any]  # of caches, in the order in which they are stacked
KINDS = ("key", "value")


@dataclass(frozen=True)
class Stacking:
    """The layout of caches in a tensor.

    Attributes:
        order: what is stacked, outermost first: ``"L"`` layers, ``"K"`` keys and values; ``"LK"`` along two axes,
            ``"M"`` along one axis for both, keys and values of a layer side by side.
        axis: of the first of these.
        read: how a cache is taken out: ``"gather"``, ``"slice"`` or ``"split"``.
        write: how the caches are put together: ``"stack"``, or ``"slots"``: each is written into the tensor given.
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
        "LK": {"all": table}, "M": {"all": table.reshape(-1)},
    }[how.order]  # fmt: skip
    edit = _Edit(model, how)
    for name, caches in groups.items():
        edit.group(name, caches)
    return edit.finished()


class _Edit:
    def __init__(self, model: onnx.ModelProto, how: Stacking) -> None:
        self.model, self.how = model, how
        self.before: list[onnx.NodeProto] = []
        self.after: list[onnx.NodeProto] = []
        self.nodes = self.before
        self.count = 0
        self.ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in (*model.graph.input, *model.graph.output)}

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, name: str = "", **attrs: Any) -> str:
        self.count += 1
        made = [name or f"stacking/{self.count}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), made, name=f"stacking/{op}_{self.count}", **attrs))
        return made[0]

    def ints(self, values: Any) -> str:
        self.count += 1
        array = np.array(values, np.int64)
        self.model.graph.initializer.append(numpy_helper.from_array(array, f"stacking/const_{self.count}"))
        return f"stacking/const_{self.count}"

    def group(self, name: str, caches: Names) -> None:
        """Stack some caches: their inputs, and their outputs."""
        past, present = f"past.{name}", f"present.{name}"
        inputs = np.vectorize(lambda cache: f"past_key_values.{cache}")(caches)
        outputs = np.vectorize(lambda cache: f"present.{cache}")(caches)
        given = np.roll(outputs.reshape(-1), 1).reshape(outputs.shape) if self.how.moved else outputs
        rank = self.ranks[inputs.flat[0]] + caches.ndim
        self.nodes = self.before
        self._take(past, inputs, rank)
        self.nodes = self.after
        if self.how.write == "slots":
            self._write(past, present, given)
        else:
            rows = given if caches.ndim == 1 else [self._joined(row) for row in given]
            self._joined(rows, present)
        self._declare(self.model.graph.input, past, inputs)
        self._declare(self.model.graph.output, present, outputs)

    def _declare(self, values: Any, name: str, caches: Names) -> None:
        first = next(v for v in values if v.name == caches.flat[0])
        kind, axis = first.type.tensor_type.elem_type, self.how.axis
        shape: list[Any] = [d.dim_value or d.dim_param for d in first.type.tensor_type.shape.dim]
        shape[axis:axis] = caches.shape
        place = list(values).index(first)
        kept = [v for v in values if v.name not in set(caches.flat)]
        kept.insert(place, helper.make_tensor_value_info(name, kind, shape))
        del values[:]
        values.extend(kept)

    def _take(self, whole: str, caches: Names, rank: int) -> None:
        """Name every cache that lies in a tensor."""
        axis, count = self.how.axis, len(caches)
        split = ""
        if self.how.read == "split" and count > 1:
            split = self.add("Split", [whole, self.ints([1] * count)], count, axis=axis)
        for i, below in enumerate(caches):
            name = below if isinstance(below, str) else ""
            if self.how.read == "gather":
                part = self.add("Gather", [whole, self.ints(i - count if i % 2 else i)], name=name, axis=axis)
            else:
                end = i + 1 if i % 2 else i + 1 - count or np.iinfo(np.int64).max
                cut = [self.ints([i]), self.ints([end]), self.ints([axis - rank])]
                one = f"{split[:-1]}{i}" if split else self.add("Slice", [whole, *cut])
                part = self.add("Squeeze", [one, self.ints([axis])], name=name)
            if not name:
                self._take(part, below, rank - 1)

    def _write(self, past: str, whole: str, caches: Names) -> None:
        """Write every cache into the tensor that was given."""
        for i, name in enumerate(caches):
            update = self.add("Unsqueeze", [name, self.ints([self.how.axis])])
            past = self.add("ScatterND", [past, self.ints([[i]]), update], name=whole if i == len(caches) - 1 else "")

    def _joined(self, parts: Sequence[str] | Names, name: str = "") -> str:
        rows = [self.add("Unsqueeze", [p, self.ints([self.how.axis])]) for p in parts]
        return self.add("Concat", rows, name=name, axis=self.how.axis)

    def finished(self) -> onnx.ModelProto:
        nodes = [*self.before, *self.model.graph.node, *self.after]
        del self.model.graph.node[:]
        self.model.graph.node.extend(nodes)
        return self.model


def maker(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if name in n.output)


def read_at_a_computed_place(model: onnx.ModelProto) -> None:
    """The batch."""
    model.graph.node.insert(0, helper.make_node("Shape", ["input_ids"], ["s"], name="s", end=1))
    model.graph.node.insert(1, helper.make_node("Squeeze", ["s"], ["computed"], name="computed"))
    maker(model, "past_key_values.1.key").input[1] = "computed"


def read_as_a_whole(model: onnx.ModelProto) -> None:
    maker(model, "logits").output[0] = "scores"
    model.graph.node.append(helper.make_node("ReduceMean", ["past.all"], ["mean"], name="mean", keepdims=0))
    model.graph.node.append(helper.make_node("Add", ["scores", "mean"], ["logits"], name="shifted"))


def written_by_two_layers(model: onnx.ModelProto) -> None:
    last = maker(model, "present.key")
    last.input[1] = maker(model, last.input[0]).input[1]


SLOTS = ("scatter", ("L", 0, "gather", "slots"))
EDITS: list[tuple[Callable[[onnx.ModelProto], None], tuple[str, tuple[Any, ...]]]] = [
    (read_at_a_computed_place, ("concat-attention", ("L",))), (read_as_a_whole, ("concat-attention", ("LK", 1))),
    (written_by_two_layers, SLOTS),
]  # fmt: skip


def _edited(form: str, how: tuple[Any, ...], edit: Callable[[onnx.ModelProto], None]) -> onnx.ModelProto:
    model = stacked(foreign(form), Stacking(*how))
    edit(model)
    return model


def entries() -> Iterator[Entry]:
    kinds: list[tuple[str, tuple[Any, ...]]] = [
        ("concat", ("L", 1, "slice")), ("concat-attention", ("M",)), ("concat-attention", ("K", 2)),
        ("concat", ("LK",)), ("past-attention", ("LK", 1, "split")), ("gqa", ("LK", 1)), ("scatter", ("LK", 1)),
        ("scatter", ("L", 0, "slice", "slots")), ("scatter", ("L", 0, "gather", "stack", True)),
        ("concat-attention", ("L", 0, "gather", "stack", True)),
    ]  # fmt: skip
    models = {f"{f} {how}": (lambda f=f, how=how: stacked(foreign(f), Stacking(*how))) for f, how in kinds}
    models |= {edit.__name__: (lambda e=edit, k=kind: _edited(*k, e)) for edit, kind in EDITS}
    models["one layer"] = lambda: stacked(foreign("concat-attention", layers=1), Stacking("L"))
    yield from built("stacked", models, capacity=32)
