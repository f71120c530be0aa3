"""Changes to a decoder that show in few steps only: at one length, in one place.

    tensor  ->  Where(odd, changed, tensor)        odd: a bool scalar that few numbers P, S or P + S make true

The numbers come from shapes, positions or the padding mask; arithmetic may hide the constants that decide.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper


class UnsuitableError(Exception):
    """The model has nothing that this mutation could change."""


_INT, _FLOAT = TensorProto.INT64, TensorProto.FLOAT
_LAST = np.iinfo(np.int64).max


@dataclass
class Odd:
    """Nodes in front of everything else in a graph, from which `odd` scalars are made.

    Attributes:
        graph: changed in place.
        random: of every choice.
        capacity: the lengths that can be reached.
        rows: rank of a tensor whose first axis is the batch: each row of it may be odd for itself. 0: all are, or none.
    """

    graph: GraphProto
    random: random.Random
    capacity: int
    rows: int = 0

    def __post_init__(self) -> None:
        self._made = 0
        self._known = {name for node in self.graph.node for name in node.output}

    def node(self, op: str, *inputs: str, **attributes: object) -> str:
        """A node that reads graph inputs, constants, and what was made here."""
        name = f"odd_{self._made}"
        while name in self._known:
            name += "_"
        self._known.add(name)
        self.graph.node.insert(self._made, helper.make_node(op, inputs, [name], f"node_{name}", **attributes))
        self._made += 1
        return name

    def number(self, value: object, dtype: type = np.int64) -> str:
        """A constant."""
        name = f"odd_number_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def scalar(self) -> tuple[str, str]:
        """A bool scalar that is true in few steps, and when."""
        names, wanted = self._quantities()
        kinds: list[Callable[[str, int], str]] = [
            self._equal, self._equal, self._above, self._hidden_by_square, self._hidden_by_sum, self._remainder,
            self._quotient, self._looked_up, self._clipped, self._float, self._product,
        ]  # fmt: skip
        what = self.random.choice(sorted(names))
        also = self.random.random() < 0.25
        kind = self._equal if also else self.random.choice(kinds)  # a pair is found by its numbers only
        made, said = kind(names[what], wanted[what]), f"{what} ~ {wanted[what]} {kind.__name__}"
        if also:
            other = self.random.choice(sorted(set(names) - {what}))
            made = self.node("And", made, self._equal(names[other], wanted[other]))
            said += f" and {other} = {wanted[other]}"
        if self.rows:
            made = self.node("Reshape", made, self.number([-1, *[1] * (self.rows - 1)]))
        return made, said

    def _quantities(self) -> tuple[dict[str, str], dict[str, int]]:
        """P, S and P + S as int64 scalars, and a step to be odd in."""
        dims = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in self.graph.input}
        first = self.graph.input[0].name
        length = self._size(first, 1)
        sources = []
        for value in self.graph.input:
            name, kind, shape = value.name, value.type.tensor_type.elem_type, dims[value.name]
            integer = kind in (TensorProto.INT64, TensorProto.INT32)
            if len(shape) == 4 and "mask" not in name and isinstance(shape[2], str) and not shape[2].isdecimal():
                sources.append(("shape", name))
            elif "mask" in name and len(shape) == 2:
                sources += [("mask", name), ("sum", name)]
            elif integer and name != first and any(word in name for word in ("pos", "len", "offset")):
                sources.append(("value", name))
        if not sources:
            raise UnsuitableError
        kind, name = self.random.choice(sources)
        if kind == "value" and name == "pos":
            name = self._called("position_ids", name)
        total = None
        if kind == "shape":
            past = self._size(name, 2)
        elif kind == "value":
            whole = self.node("Cast", name, to=_INT)
            own = self.rows and len(dims.get(name, ())) == 2
            past = (
                self.node("Gather", whole, self.number(0), axis=1) if own else self.node("ReduceMin", whole, keepdims=0)
            )
        else:
            if kind == "mask":
                total = self._size(name, 1)
            else:
                counted = self.node("CumSum", self.node("Cast", name, to=_INT), self.number(1))
                total = self.node("ReduceMax", counted, keepdims=0)
            past = self.node("Sub", total, length)
        names = {"P": past, "S": length, "T": total or self.node("Add", past, length)}
        tokens = self.random.choice([1, 1, 2, self.random.randint(1, self.capacity)])
        before = self.random.randint(0, self.capacity - tokens)
        return names, {"P": before, "S": tokens, "T": before + tokens}

    def _called(self, new: str, old: str) -> str:
        """Another name for a graph input: that of positions says what they are where they do more than say rows."""
        for node in self.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
        next(v for v in self.graph.input if v.name == old).name = new
        return new

    def _size(self, name: str, axis: int) -> str:
        return self.node("Gather", self.node("Shape", name), self.number(axis), axis=0)

    def _equal(self, x: str, n: int) -> str:
        return self.node("Equal", x, self.number(n))

    def _above(self, x: str, n: int) -> str:
        return self.node("Greater", x, self.number(max(n, self.capacity - 3)))

    def _hidden_by_square(self, x: str, n: int) -> str:
        return self._equal(self.node("Mul", x, x), n * n)

    def _hidden_by_sum(self, x: str, n: int) -> str:
        return self._equal(self.node("Add", self.node("Mul", x, self.number(7919)), self.number(104729)),
                           n * 7919 + 104729)  # fmt: skip

    def _remainder(self, x: str, n: int) -> str:
        size = self.random.randint(max(2, self.capacity // 3), self.capacity)
        return self._equal(self.node("Mod", x, self.number(size)), n % size)

    def _quotient(self, x: str, n: int) -> str:
        size = self.random.randint(2, 5)
        return self._equal(self.node("Div", x, self.number(size)), n // size)

    def _looked_up(self, x: str, n: int) -> str:
        table = np.zeros(self.capacity + 8, bool)
        table[n] = True
        return self.node("Gather", self.number(table, bool), x, axis=0)

    def _clipped(self, x: str, n: int) -> str:
        return self._equal(self.node("Clip", x, self.number(n - 1), self.number(n + 1)), n)

    def _float(self, x: str, n: int) -> str:
        off = self.node("Sub", self.node("Cast", x, to=_FLOAT), self.number(n + 0.25, np.float32))
        return self.node("Less", self.node("Abs", off), self.number(0.5, np.float32))

    def _product(self, x: str, n: int) -> str:
        """Zero at n and at one more number."""
        other = self.random.randint(0, self.capacity)
        square = self.node("Mul", x, x)
        line = self.node("Mul", x, self.number(n + other))
        return self._equal(self.node("Sub", square, line), -n * other)

    def changed(self, odd: str, name: str, kind: int, rank: int, output: str) -> tuple[list[NodeProto], str]:
        """Nodes that make `output`: `name`, but something else in odd steps."""
        numpy_type = helper.tensor_dtype_to_np_dtype(kind)
        if kind == TensorProto.BOOL:
            op = self.random.choice(["Xor", "Xor", "Or"])
            return [helper.make_node(op, [name, odd], [output])], op
        if kind in (TensorProto.INT64, TensorProto.INT32):
            step = self.random.choice([1, 1, -1, 2])
            nodes = [
                helper.make_node("Cast", [odd], [f"{output}_cast"], to=kind),
                helper.make_node("Mul", [f"{output}_cast", self.number(step, numpy_type)], [f"{output}_step"]),
                helper.make_node("Add", [name, f"{output}_step"], [output]),
            ]
            return nodes, f"+ {step}"
        choices = ["Mul", "Add", "Neg", *(["reversed", "reversed", "rolled"] if rank > 1 else [])]
        how = self.random.choice(choices)
        other = f"{output}_other"
        axis = self.random.randrange(rank) if rank else 0
        if how == "Neg":
            nodes = [helper.make_node("Neg", [name], [other])]
        elif how == "reversed":
            bounds = [self.number([n]) for n in (-1, -_LAST, axis, -1)]
            nodes = [helper.make_node("Slice", [name, *bounds], [other])]
        elif how == "rolled":
            pieces = [(f"{other}_a", 1, _LAST), (f"{other}_b", 0, 1)]
            nodes = [
                helper.make_node("Slice", [name, *(self.number([n]) for n in (start, end, axis))], [piece])
                for piece, start, end in pieces
            ]
            nodes.append(helper.make_node("Concat", [piece for piece, _, _ in pieces], [other], axis=axis))
        else:
            value = 1.5 if how == "Mul" else 0.5
            nodes = [helper.make_node(how, [name, self.number(value, numpy_type)], [other])]
        nodes.append(helper.make_node("Where", [odd, other, name], [output]))
        return nodes, how + (f" axis {axis}" if how in ("reversed", "rolled") else "")
