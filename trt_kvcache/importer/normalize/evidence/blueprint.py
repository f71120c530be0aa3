"""A model as probes read it: what makes each tensor, constants, and one operator at a time by ONNX's own means.

Values come from ONNX's reference evaluator, shapes from ONNX shape inference. Of large weights, only those are read
that have the shape of a bias of scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper
from onnx.reference.ops import load_op

from trt_kvcache.importer.protos import cut_squares, may_be_bias

Array = npt.NDArray[Any]

# Inputs whose values decide the shape of the output, by operator; every other operator's output shape follows from
# shapes.
_SHAPED_BY: dict[str, tuple[int, ...]] = {
    "Reshape": (1,), "Expand": (1,), "Slice": (1, 2, 3, 4), "Tile": (1,), "Range": (0, 1, 2), "ConstantOfShape": (0,),
    "Squeeze": (1,), "Unsqueeze": (1,), "Pad": (1, 3), "Split": (1,), "TopK": (1,), "OneHot": (1,), "Resize": (2, 3),
    "ReduceSum": (1,), "ReduceMean": (1,), "ReduceMax": (1,), "ReduceMin": (1,), "ReduceProd": (1,), "ReduceL2": (1,),
    "ReduceSumSquare": (1,), "CenterCropPad": (1,),
}  # fmt: skip
SIZES = ("Shape", "Size")  # know their inputs by their types
_SMALL = 1 << 12  # bytes; larger values are not compared
LARGEST = 1 << 26  # elements of one value; beyond it nothing is computed
_GROWING = ("Pad", "OneHot", "Resize", "CenterCropPad")  # as large as values say, not as their inputs
_SLOW = ("Conv", "ConvTranspose", "Einsum")  # no mask and no position is made of these
_COUNTING = ("NonZero", "Compress", "Unique")  # give no more than they get
_RANDOM = ("RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike", "Bernoulli", "Multinomial")
_SPREAD = ("Expand", "ConstantOfShape", "Tile", "Range")  # make much of little
_READABLE = {  # masks kept as buffers, and rows counted over a capacity
    onnx.TensorProto.BOOL, onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.INT32,
    onnx.TensorProto.INT64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Maker:
    """What makes a tensor: one output of a node that is no Constant. Protos are slow to read, so this is read once.

    Attributes:
        node: the node.
        index: of the output.
        op: its operator, with the domain where that is not ONNX's own.
        form: equal for nodes that do the same to their inputs.
        inputs: names; empty where one is left out.
        operands: names of the tensors whose values count for its value,
        likes: and of those whose types do;
        shaped_by: and of those whose values count for its type.
    """

    node: onnx.NodeProto
    index: int
    op: str
    form: int
    inputs: tuple[str, ...]
    operands: tuple[str, ...]
    likes: tuple[str, ...]
    shaped_by: tuple[str, ...]


class Blueprint:
    """A model as probes read it: made once, shared by all samples.

    Attributes:
        evaluated, inferred: what operators made of small values and types, by form and `content`, in any sample.

    Args:
        model: flat, with named tensors. Not kept in sync with later edits.
        weights: large inline initializers that were detached from `model`, by name; only integers, masks and what has
            the shape of a bias are read.
    """

    def __init__(self, model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
        self.model = model
        self.opsets = {o.domain if o.domain != "ai.onnx" else "": o.version for o in model.opset_import}
        self.producers: dict[str, tuple[onnx.NodeProto, int]] = {}
        self._places: dict[str, int] = {}
        for place, node in enumerate(model.graph.node):
            for index, name in enumerate(node.output):
                if name:
                    self.producers[name] = (node, index)
                    self._places[name] = place
        if any(self._places.get(n, -1) >= place for place, node in enumerate(model.graph.node) for n in node.input):
            self._places.clear()
        self.initializers = {t.name: t for t in model.graph.initializer}
        self.inputs = {v.name: v for v in model.graph.input if v.name not in self.initializers}
        self._weights = weights
        self._masks = cut_squares(model.graph)
        self._makers: dict[str, Maker | None] = {}
        self._forms: dict[Hashable, int] = {}
        self._operators: dict[int, Callable[..., Any] | None] = {}
        self._constants: dict[str, Array | None] = {}
        self._contents: dict[Hashable, Array] = {}
        self.evaluated: dict[Hashable, Sequence[Array | None]] = {}
        self.inferred: dict[Hashable, Sequence[bytes | None]] = {}

    def place(self, name: str) -> int:
        """What a tensor is made of has smaller numbers; below 0: constants, inputs, and all if nodes are not sorted."""
        return self._places.get(name, -1)

    def constant(self, name: str) -> Array | None:
        """The value of a Constant, or of an initializer that is small or may be a mask; None for all other tensors.

        Small ones of the same content are the same object.
        """
        if name not in self._constants:
            value = self._constant(name) if self.is_constant(name) else None
            if value is not None and is_small(value):
                value = self._contents.setdefault(content(value), value)
            self._constants[name] = value
        return self._constants[name]

    def _constant(self, name: str) -> Array | None:
        tensor = self.initializers[name] if name in self.initializers else self.constant_tensor(name)
        if tensor is None:  # numbers that are attributes themselves
            node = self.producers[name][0]
            return _run(node, self._operator(node), [])[0]
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        may_be_mask = tensor.data_type in _READABLE or may_be_bias(tensor) or name in self._masks
        if external and name in self._weights and may_be_mask:
            tensor, external = self._weights[name], False
        return None if external else np.asarray(numpy_helper.to_array(tensor))

    def constant_tensor(self, name: str) -> onnx.TensorProto | None:
        """The tensor that a Constant holds, which may have its data elsewhere; None for all other tensors."""
        node = self.producers[name][0] if name in self.producers else None
        if node is None or not is_standard(node, "Constant"):
            return None
        return next((a.t for a in node.attribute if a.name == "value"), None)

    def is_constant(self, name: str) -> bool:
        """Whether a tensor is an initializer or comes from a Constant."""
        made = self.producers.get(name)
        return name in self.initializers or (made is not None and is_standard(made[0], "Constant"))

    def maker(self, name: str) -> Maker | None:
        """What makes a tensor; None for constants and inputs of the graph."""
        if name not in self._makers:
            made = None if self.is_constant(name) else self.producers.get(name)
            self._makers[name] = None if made is None else self._maker(*made)
        return self._makers[name]

    def _maker(self, node: onnx.NodeProto, index: int) -> Maker:
        op = str(node.op_type) if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
        inputs = tuple(node.input)
        counted = tuple(operands(node)) if op not in SIZES else ()
        likes = (node.output[0],) if op in _SPREAD else inputs[len(counted) :]
        shaped_by = tuple(inputs[i] for i in _SHAPED_BY.get(op, ()) if i < len(inputs) and inputs[i])
        return Maker(node, index, op, self._form(node), inputs, counted, likes, shaped_by)

    def _form(self, node: onnx.NodeProto) -> int:
        inputs = list(node.input)
        places = tuple(inputs.index(n) if n else -1 for n in inputs)
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in node.attribute))
        content = (node.domain, node.op_type, attributes, places, tuple(map(bool, node.output)))
        return self._forms.setdefault(content, len(self._forms))

    def evaluate(self, node: onnx.NodeProto, inputs: Sequence[Array | None]) -> Sequence[Array | None]:
        """The outputs of a node, by ONNX's reference implementation of its operator.

        Args:
            node: any of the model.
            inputs: None where one is left out.

        Returns:
            One value for each output; None where they are unknown: no such implementation, a subgraph, chance, or
            inputs that do not fit.
        """
        if is_standard(node, "Dropout") and any(np.any(value) for value in inputs[2:]):
            return [None] * len(node.output)  # in training
        if not self._is_bounded(node, inputs):
            return [None] * len(node.output)
        form = self._form(node)
        if form not in self._operators:
            self._operators[form] = self._operator(node)
        return _run(node, self._operators[form], inputs)

    def _is_bounded(self, node: onnx.NodeProto, inputs: Sequence[Array | None]) -> bool:
        """Whether a foreign model's operator needs little memory and time: this runs in the caller's own process."""
        known = {name: v for name, v in zip(operands(node), inputs, strict=False) if name and v is not None}
        if is_standard(node, *_SLOW) or any(v.dtype.kind not in "biufcV" for v in known.values()):
            return False
        most = prod(max(v.size, 1) for v in known.values())
        if (most <= LARGEST and not is_standard(node, *_GROWING)) or is_standard(node, *_COUNTING):
            return True
        make = onnx.helper.make_tensor_type_proto
        types = {n: make(onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in known.items()}
        places = _SHAPED_BY.get(node.op_type, ())
        made = self.infer(node, types, {n: known[n] for i, n in enumerate(node.input) if i in places and n in known})
        shapes = [[d.dim_value for d in made[n].tensor_type.shape.dim] if n in made else [LARGEST, 2]
                  for n in node.output if n]  # fmt: skip
        return all(prod(shape) <= LARGEST for shape in shapes)

    def _operator(self, node: onnx.NodeProto) -> Callable[..., Any] | None:
        """The reference implementation of a node, with its attributes."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        if any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute) or is_standard(node, *_RANDOM):
            return None
        try:
            made = load_op(domain, node.op_type, self.opsets.get(domain, 1))
            settings = {"log": lambda *_: None, "opsets": self.opsets, "verbose": 0, "new_ops": None}
            return cast("Callable[..., Any]", made(node, settings).run)
        except Exception:  # noqa: BLE001 - no such operator: its values are unknown
            return None

    def infer(
        self, node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], values: Mapping[str, Array]
    ) -> Mapping[str, onnx.TypeProto]:
        """The types of the outputs of a node, by ONNX's shape inference: those that it finds.

        Args:
            node: any of the model.
            types: of its inputs.
            values: of those that decide the shape of the output.
        """
        if node.op_type == "Range":
            values = {name: value.reshape(()) if value.size == 1 else value for name, value in values.items()}
        data = {name: numpy_helper.from_array(value) for name, value in values.items()}
        domain = "" if node.domain == "ai.onnx" else node.domain
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opsets.get(domain, 1), domain)
            if node.op_type == "Attention":
                node = _without_own(node, schema)
            inferred: dict[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(
                schema, node, dict(types), data
            )
        except Exception:  # noqa: BLE001 - no schema, or shapes that do not fit: unknown
            return {}
        return inferred


def content(value: Array | None) -> Hashable:
    """What is equal for equal small values, and for large ones where they are the same object."""
    if value is None or not is_small(value):
        return id(value)
    return value.dtype, value.shape, value.tobytes()


def is_small(value: Array) -> bool:
    """Whether a value is told apart by its content."""
    return value.nbytes <= _SMALL and not value.dtype.hasobject


def _run(
    node: onnx.NodeProto, operator: Callable[..., Any] | None, inputs: Sequence[Array | None]
) -> Sequence[Array | None]:
    if is_standard(node, "Range"):  # ONNX Runtime takes [1] for a scalar, and exporters rely on it
        inputs = [v.reshape(()) if v is not None and v.size == 1 else v for v in inputs]
    if is_standard(node, "Pad"):
        inputs = _without_negative_pads(inputs)
    try:
        if is_standard(node, "ScatterND") and (written := _written(node, *inputs)) is not None:
            return [written]
        if operator is not None:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return [np.asarray(value) for value in operator(*inputs)]
    except Exception:  # noqa: BLE001 - an index out of range, a shape that does not fit: the sample is none for this node
        return [None] * len(node.output)
    return [None] * len(node.output)


def _written(node: onnx.NodeProto, data: Array | None, index: Array | None, rows: Array | None) -> Array | None:
    """What ScatterND makes, at once: the reference implementation takes row by row, and caches have many.

    None where it combines rows, or their shapes do not fit.
    """
    combines = any(a.name == "reduction" and a.s != b"none" for a in node.attribute)
    if combines or data is None or index is None or rows is None or not index.ndim:
        return None
    if rows.shape != (*index.shape[:-1], *data.shape[index.shape[-1] :]):
        return None
    written: Array = data.copy()
    written[tuple(np.moveaxis(index, -1, 0))] = rows  # of several in one place, the last one
    return written


def _without_negative_pads(inputs: Sequence[Array | None]) -> Sequence[Array | None]:
    """The same inputs of Pad with what negative pads take away already gone: the reference implementation fails there.

    torch.onnx writes them where it cuts a padding mask to the length of a window.
    """
    data, pads, value, axes = (*inputs, *[None] * 4)[:4]
    if data is None or pads is None or pads.min(initial=0) >= 0:
        return inputs
    kept = [slice(None)] * data.ndim
    for axis, begin, end in zip(range(data.ndim) if axes is None else axes, *np.split(pads, 2), strict=True):
        kept[axis] = slice(max(-begin, 0), data.shape[axis] + min(end, 0))
    return [data[tuple(kept)], np.maximum(pads, 0), value, *([] if axes is None else [axes])]


def is_standard(node: onnx.NodeProto, *op_types: str) -> bool:
    """Whether a node is one of these operators of ONNX itself."""
    return node.op_type in op_types and node.domain in ("", "ai.onnx")


def operands(node: onnx.NodeProto) -> list[str]:
    """The inputs whose values count: of what CastLike is like, it is the type."""
    return list(node.input)[:1] if is_standard(node, "CastLike") else list(node.input)


def _without_own(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> onnx.NodeProto:
    """An Attention without the inputs and attributes that only the importer gives, see `lower.attention`."""
    known = [a for a in node.attribute if a.name in schema.attributes]
    inputs = node.input[: len(schema.inputs)]
    return onnx.NodeProto(op_type=node.op_type, input=inputs, output=node.output, attribute=known)
