"""The part of a model that makes some values, compiled once to be run at very many lengths.

A probe infers the shapes of a sample operator by operator, which takes milliseconds. Over steps of one batch size these
shapes grow with P and S by fixed amounts. So a program learns them from a few steps, and then only computes:

    Shape(x) of a step  =  a + b * P + c * S + d * min(P, kept)        every other operator as ONNX Runtime has it

What decides such a shape, as the bounds of a Slice do, is computed too, and has to go on as evenly in each step.

Operators that do the same with the same inputs are one, whatever the layer they belong to: masks that each layer makes
for itself are made, and compared, once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from trt_kvcache.importer.normalize.evidence.blueprint import Array, Blueprint, is_standard, operands
from trt_kvcache.importer.normalize.evidence.probe import COUNTS, FILLED, Probe

_SMALL = 1 << 12  # bytes; larger constants are told apart by their names
_NO_MESSAGES = 4
_SUMS = ("Add", "Sub", "Concat", "Identity")
_EVEN, _SIZE, _NEVER = 1, 2, 3  # grows evenly; and is not below 0; a condition that is never true
_PIECES = ("Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape")


@dataclass(frozen=True, eq=False)
class Step:
    """A step that shapes are learnt from: P, S, and the model in it."""

    past: int
    length: int
    probe: Probe


class Program:
    """Computes tensors of a model from P, S and the values of graph inputs.

    Args:
        blueprint: the model.
        names: what to compute.
        steps: of one batch size and several P; several S as well, unless S is fixed.
        given: values of tensors, in place of what the model makes.
        kept: rows, at most, of each kind of past that is cut to the newest ones.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        names: Sequence[str],
        steps: Sequence[Step],
        given: Mapping[str, Array],
        kept: Sequence[int] = (),
    ) -> None:
        self._blueprint = blueprint
        self._given = given
        self._steps = steps
        self._kept = kept
        self._varies = len({step.length for step in steps}) > 1  # else S is part of what does not change
        self._slots: dict[Hashable, str | None] = {}
        self._of: dict[str, str | None] = {}
        self._constants: dict[str, Array] = {}
        self._shapes: dict[str, Array] = {}
        self._inputs: dict[str, str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._sized: list[str] = []  # tensors whose shapes were learnt
        self._uneven: list[str] = []  # and could not be learnt
        self._is_even = True
        self._checked = 0  # how many nodes were looked at for even growth
        for name in names:
            for needed in self._order(name):
                self._of[needed] = self._compile(needed)
        self._wanted = {name: slot for name in names if (slot := self._of[name]) is not None}
        self._even = self._deciding()
        self._amounts = np.concatenate([np.zeros((0, 3 + len(kept)), np.int64), *self._even.values()])
        made = {slot for node in self._nodes for slot in node.output}
        self._outputs = sorted(made & {*self._wanted.values(), *self._even})
        self._widened: list[str] = []  # outputs in bfloat16, which ONNX Runtime does not hand to NumPy
        self._session = self._open() if self._outputs else None

    def key(self, name: str) -> str | None:
        """What tensors share that are computed alike; None where it cannot be computed."""
        return self._of[name]

    @property
    def runs(self) -> bool:
        """Whether it runs at all: not where ONNX Runtime lacks an operator for a type, or shapes grow unevenly."""
        return self._is_even and (not self._outputs or self._session is not None)

    @property
    def inputs(self) -> frozenset[str]:
        """The graph inputs whose values take part."""
        return frozenset(self._inputs)

    def integers(self) -> set[int]:
        """The whole numbers that take part, but for those in large tensors."""
        known = (*self._constants.values(), *self._behind_unlearnt())
        small = [v for v in known if v.nbytes <= _SMALL and v.dtype.kind in "iuf"]
        return {int(n) for value in small for n in value.reshape(-1).tolist() if abs(n) < 1 << 53 and n == int(n)}

    def run(self, past: int, length: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The values in one step.

        Args:
            past: P.
            length: S.
            inputs: of graph inputs.

        Returns:
            By name; nothing where it fails, as where an index is out of range.
        """
        values = self._constants | self._leaves(past, length, inputs)
        if self._session is not None:
            feeds = {i.name: values[i.name] for i in self._session.get_inputs()}
            try:
                values.update(zip(self._outputs, self._session.run(None, feeds), strict=True))
            except Exception:  # noqa: BLE001 - ONNX Runtime has an exception for each status, all of them alike here
                return {}
            values.update({slot: values[slot].astype(ml_dtypes.bfloat16) for slot in self._widened})
        if self._even:
            sizes = self._sizes(past, length)
            found = [values[slot].reshape(-1) for slot in self._even]
            if not np.array_equal(np.concatenate(found), self._amounts @ sizes):
                return {}
        return {name: values[slot] for name, slot in self._wanted.items() if slot in values}

    def _leaves(self, past: int, length: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        sizes = self._sizes(past, length)
        shapes = {slot: np.asarray(shape @ sizes) for slot, shape in self._shapes.items()}
        return shapes | {slot: inputs[name] for name, slot in self._inputs.items()}

    def _open(self) -> ort.InferenceSession | None:
        step = self._steps[0]
        leaves = self._leaves(step.past, step.length, step.probe.values)
        read = {slot for node in self._nodes for slot in node.input}
        inputs = [
            helper.make_tensor_value_info(slot, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim)
            for slot, value in leaves.items()
            if slot in read
        ]
        wide = {slot: f"{slot} in float32" for slot in self._widened}
        casts = [helper.make_node("Cast", [slot], [name], to=onnx.TensorProto.FLOAT) for slot, name in wide.items()]
        outputs = [onnx.ValueInfoProto(name=wide.get(slot, slot)) for slot in self._outputs]
        constants = [numpy_helper.from_array(value, slot) for slot, value in self._constants.items() if slot in read]
        graph = helper.make_graph([*self._nodes, *casts], "program", inputs, outputs, constants)
        opsets = [helper.make_opsetid(domain, version) for domain, version in self._blueprint.opsets.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.log_severity_level = _NO_MESSAGES
        options.intra_op_num_threads = 1  # most steps are tiny
        try:
            session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception:  # noqa: BLE001 - as for bfloat16, for which it has few operators on the CPU
            return None
        narrow = [output.name for output in session.get_outputs() if output.type == "tensor(bfloat16)"]
        if not narrow:
            return session
        self._widened = narrow
        return self._open()

    def _order(self, name: str) -> list[str]:
        """The tensors to compile, each after what it is made from."""
        order: list[str] = []
        stack = [(name, False)]
        while stack:
            current, ready = stack.pop()
            if ready:
                order.append(current)
            elif current not in self._of:
                stack.append((current, True))
                made = None if current in self._given else self._blueprint.producers.get(current)
                if made is not None and not is_standard(made[0], "Shape", "Size", "Constant"):
                    stack.extend((n, False) for n in operands(made[0]) if n)
        return list(dict.fromkeys(order))

    def _compile(self, name: str) -> str | None:
        """The slot of a tensor; None where it cannot be computed."""
        if name in self._given:
            return self._constant(self._given[name], name)
        if self._blueprint.is_constant(name):
            value = self._blueprint.constant(name)
            return None if value is None else self._constant(value, name)
        made = self._blueprint.producers.get(name)
        if made is None:
            if name not in self._steps[0].probe.values:
                return None
            self._inputs[name] = self._slot(("input", name))
            return self._inputs[name]
        node, index = made
        if is_standard(node, "Shape", "Size"):
            return self._shape(name)
        inputs = [self._of[n] if n else "" for n in operands(node)]
        return None if None in inputs else self._node(node, [slot for slot in inputs if slot is not None], index)

    def _node(self, node: onnx.NodeProto, inputs: Sequence[str], index: int) -> str | None:
        """The slot of one output of a node; it is computed here and now if only constants take part."""
        compiled = onnx.NodeProto()
        compiled.CopyFrom(node)
        if is_standard(node, "CastLike"):
            kind = self._steps[0].probe.elem_type(node.input[1])
            if kind is None:
                return None
            compiled = helper.make_node("Cast", [], list(node.output), to=kind)
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in compiled.attribute))
        made = (compiled.domain, compiled.op_type, attributes, *inputs)
        keys = [(*made, i) for i in range(len(node.output))]
        if keys[0] in self._slots:
            return self._slots[keys[index]]
        if all(not slot or slot in self._constants for slot in inputs):
            values = self._blueprint.evaluate(compiled, [self._constants.get(slot) for slot in inputs])
            for key, value, name in zip(keys, values, node.output, strict=True):
                self._slots[key] = None if value is None else self._constant(value, name)
        else:
            compiled.input[:] = inputs
            compiled.output[:] = [self._slot(key) if name else "" for key, name in zip(keys, node.output, strict=True)]
            self._nodes.append(compiled)
        return self._slots[keys[index]]

    def _constant(self, value: Array, name: str) -> str:
        content: Hashable = value.tobytes() if value.nbytes <= _SMALL else name
        slot = self._slot(("constant", str(value.dtype), value.shape, content))
        self._constants[slot] = value
        return slot

    def _shape(self, name: str) -> str | None:
        """The slot of a shape, if it grows evenly with P and S."""
        learnt = self._learn(name)
        node = self._blueprint.producers[name][0]
        if learnt is None:
            self._uneven.append(operands(node)[0])
            return None
        self._sized.append(operands(node)[0])
        matrix = learnt if is_standard(node, "Shape") else learnt[0]
        if not matrix[..., 1:].any():
            return self._constant(matrix[..., 0], name)
        slot = self._slot(("shape", matrix.shape, matrix.tobytes()))
        self._shapes[slot] = matrix
        return slot

    def _behind_unlearnt(self) -> list[Array]:
        """Constants that take part in shapes that could not be learnt: they may say at which lengths these turn."""
        pending, seen = list(self._uneven), set(self._uneven)
        while pending:
            made = self._blueprint.producers.get(pending.pop())
            more = [n for n in (operands(made[0]) if made is not None else ()) if n and n not in seen]
            seen.update(more)
            pending += more
        values = [self._blueprint.constant(name) for name in sorted(seen) if self._blueprint.is_constant(name)]
        return [value for value in values if value is not None]

    def _learn(self, name: str) -> Array | None:
        """How each number of a tensor grows, int64 ``[numbers, 3 + kinds of past that is cut]``."""
        values = [step.probe.value(name) for step in self._steps]
        known = [value for value in values if value is not None]
        if len(known) < len(values) or len({value.shape for value in known}) != 1 or known[0].dtype.kind not in "iub":
            return None
        sizes = np.stack([self._sizes(step.past, step.length) for step in self._steps])
        targets = np.stack([value.reshape(-1) for value in known])
        learnt = np.rint(np.linalg.lstsq(sizes, targets, rcond=None)[0]).astype(np.int64)
        return np.asarray(learnt.T) if np.array_equal(sizes @ learnt, targets) else None

    def _sizes(self, past: int, length: int) -> Array:
        return np.array([1, past, length * self._varies, *(min(past, kept) for kept in self._kept)])

    def _deciding(self) -> dict[str, Array]:
        """What decides shapes that were learnt, by slot, and how it has to go on as it did while they were."""
        found: dict[str, Array] = {}
        grown: dict[str, int] = {}
        seen: set[str] = set()
        for name in self._sized:  # which grows
            pending = [name]
            while pending:
                name = pending.pop()
                maker = None if name in seen or name in self._given else self._blueprint.maker(name)
                seen.add(name)
                if maker is None or maker.op in ("Shape", "Size"):
                    continue
                self._is_even &= maker.op not in COUNTS
                sized_by = maker.inputs[:1] if maker.op in FILLED else maker.inputs
                pending += [n for n in sized_by if n and n not in maker.shaped_by]
                for operand in maker.shaped_by:
                    for needed in self._order(operand):
                        self._of[needed] = self._compile(needed)
                    slot = self._of[operand]
                    if slot is None or slot in found or self._grows(slot, grown):
                        continue
                    learnt = self._learn(operand)
                    if learnt is None:
                        self._is_even = False
                    else:
                        found[slot] = learnt
        return found

    def _grows(self, slot: str, known: dict[str, int]) -> bool:
        """Whether a slot grows evenly because of what it is made of: sums and pieces of shapes that do."""
        while self._checked < len(self._nodes):  # each behind those that it reads
            node = self._nodes[self._checked]
            self._checked += 1
            kinds = [self._growth(n, known) for n in node.input if n]
            fixed = [n in self._constants for n in node.input if n]
            growth = 0
            if is_standard(node, *_SUMS) or _is_whole(node) or (is_standard(node, "Mul") and any(fixed)):
                growth = min(*kinds, _EVEN if is_standard(node, "Sub") else _SIZE, _SIZE)
            elif is_standard(node, *_PIECES) and all(fixed[1:]):
                growth = min(kinds[0], _SIZE)
            elif is_standard(node, "Equal") and _SIZE in kinds:
                others = [self._constants.get(n) for n, kind in zip(node.input, kinds, strict=True) if kind != _SIZE]
                growth = _NEVER if any(v is not None and bool((v < 0).all()) for v in others) else 0
            elif is_standard(node, "Where") and kinds[0] == _NEVER:  # torch spells sizes that stay -1
                growth = kinds[2]
            known.update(dict.fromkeys(node.output, growth))
        return self._growth(slot, known) > 0

    def _growth(self, slot: str, known: Mapping[str, int]) -> int:
        if slot in self._constants:
            value = self._constants[slot]
            return 0 if value.dtype.kind != "i" else _SIZE if bool((value >= 0).all()) else _EVEN
        return _SIZE if slot in self._shapes else known.get(slot, 0)

    def _slot(self, key: Hashable) -> str:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = f"slot{len(self._slots)}"
        return slot


def _is_whole(node: onnx.NodeProto) -> bool:
    """Whether a node casts to 64 bits."""
    return is_standard(node, "Cast") and any(a.name == "to" and a.i == onnx.TensorProto.INT64 for a in node.attribute)
