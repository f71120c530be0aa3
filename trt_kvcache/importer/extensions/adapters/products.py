"""Find products with a weight in a rewritten model, and facts about their operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import CachePlan, Dim, Role
from trt_kvcache.importer.protos import FLOATS, constants_of, dtype_name, is_op, readers_of, shape_of
from trt_kvcache.importer.simplify import infer_shapes

__all__ = ["Product", "ProductGraph"]

_KEEPS_ROWS = {
    "Add", "Cast", "Div", "Erf", "Gelu", "Identity", "LayerNormalization", "MatMul", "Mul", "Neg", "Pow",
    "RMSNormalization", "Reciprocal", "ReduceMean", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh",
    "Where",
}  # fmt: skip
"""Operators whose result has the first axis of an operand of the same rank, whatever that is."""
_OF_WEIGHTS = {"Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose"}


@dataclass(frozen=True)
class Product:
    """A product with a weight.

    Attributes:
        rows: the other operand ``[B, S, inputs]``, or its source if the operand merges the first two axes.
        root: the initializer of its weight.
        turned: True if the initializer is ``[outputs, inputs]``.
        scales: the initializer ``[outputs, blocks]`` with the scales of a quantized weight ``[outputs, inputs]``.
    """

    node: NodeProto
    rows: str
    root: str
    turned: bool
    scales: str | None
    inputs: int
    outputs: int
    dtype: str


class ProductGraph:
    """The products of a rewritten model, and facts about their operands."""

    def __init__(self, model: ModelProto, plan: CachePlan) -> None:
        inferred = infer_shapes(model)
        values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
        self.shapes = {value.name: shape_of(value) for value in values}
        self._types = {value.name: value.type.tensor_type.elem_type for value in values}
        self.constants = constants_of(model.graph)
        self.shapes |= {name: tuple(tensor.dims) for name, tensor in self.constants.items()}
        self._makes = {name: node for node in model.graph.node for name in node.output}
        self._nodes = model.graph.node
        self.readers = readers_of(model.graph.node)
        tokens = plan.tensor(Role.TOKENS)
        caches = [c.physical_shape[0] for c in plan.caches if c.carried]
        packed = tokens is not None and "tokens" in tokens.axes
        if packed or not caches:
            raise UnsupportedModelError(
                "adapters are chosen for each sequence, and the model takes the tokens of all sequences in one axis: "
                "export it with tokens [batch, sequence]"
            )
        self.batch: Dim = caches[0]
        if tokens is not None and "batch" in tokens.axes:
            self.batch = tokens.shape[tokens.axes.index("batch")]
        self._rows: dict[str, bool] = {}

    def products(self) -> Iterator[Product]:
        """Yield all products of rows with a weight."""
        for node in self._nodes:
            if not is_op(node, "MatMul") and not is_op(node, "Gemm"):
                continue
            attributes = {a.name: a for a in node.attribute}
            if "transA" in attributes and attributes["transA"].i:
                continue
            turned = "transB" in attributes and bool(attributes["transB"].i)
            shape = self.shapes.get(node.input[1])
            root, flips, scales = self._root(node.input[1])
            if root is None or shape is None or len(shape) != 2 or not all(isinstance(d, int) for d in shape):
                continue
            inputs, outputs = map(int, reversed(shape) if turned else shape)
            rows = self._with_rows(node.input[0])
            dtype = self._types.get(node.input[0], 0) or self._types.get(node.output[0], 0)
            if rows is not None and dtype in FLOATS:
                yield Product(node, rows, root, turned ^ flips, scales, inputs, outputs, dtype_name(dtype))

    def _root(self, name: str) -> tuple[str | None, bool, str | None]:
        """The initializer of a weight, True if it was transposed, and its scales; no initializer for other tensors."""
        turned, scales = False, None
        while name not in self.constants:
            node = self._makes.get(name)
            if node is None or node.op_type not in _OF_WEIGHTS:
                return None, False, None
            if node.op_type == "DequantizeLinear" and node.input[1] in self.constants:
                scales = node.input[1]
            turned ^= node.op_type == "Transpose"
            name = node.input[0]
        return name, turned, scales

    def _with_rows(self, name: str) -> str | None:
        """Find the tensor of three or more axes behind a flattened operand, whose rows lie sequence by sequence."""
        most, shape = 3, self.shapes.get(name)
        while shape is not None and len(shape) == 2:
            node = self._makes.get(name)
            if node is None or node.op_type not in ("Reshape", "Cast"):
                return None
            name = node.input[0]
            most, shape = 5, self.shapes.get(name)
        return name if shape is not None and 3 <= len(shape) <= most else None

    def check_rows(self, product: Product, module: str) -> None:
        """Refuse a product whose first axis is not known to be the batch."""
        if not self._by_sequence(product.rows) and not self._meets_sequences(product.node.output[0]):
            raise UnsupportedModelError(
                f"module '{module}' ({product.node.op_type} '{product.node.name}') multiplies '{product.rows}' "
                f"{list(self.shapes.get(product.rows) or ())}, and nothing says that its first axis is the batch, "
                f"'{self.batch}', so no adapter can be chosen there: leave the module out of --lora-targets"
            )

    def _by_sequence(self, name: str) -> bool:
        """True if the first axis of a tensor of three axes or more is the batch."""
        pending, seen = [name], {name}
        while pending:
            name = pending.pop()
            shape = self.shapes.get(name)
            if shape is not None and len(shape) > 2 and shape[0] == self.batch:
                return True
            node = self._makes.get(name)
            if node is None or not (node.op_type in _KEEPS_ROWS or self._slices_other_axes(node)):
                continue
            operands = node.input[:1] if node.op_type in ("MatMul", "ReduceMean", "Slice") else node.input
            new = [o for o in operands if o not in seen and len(self.shapes.get(o) or ()) == len(shape or ())]
            pending += new
            seen.update(new)
        return False

    def _slices_other_axes(self, node: NodeProto) -> bool:
        """True for a Slice that does not cut the first axis."""
        axes = self.constants.get(node.input[3]) if node.op_type == "Slice" and len(node.input) > 3 else None
        return axes is not None and min(numpy_helper.to_array(axes).tolist(), default=0) > 0

    def _meets_sequences(self, name: str) -> bool:
        """True if a result, after at most a bias, is added to a tensor whose first axis is the batch."""
        for _ in range(3):
            readers = self.readers.get(name, [])
            if len(readers) != 1 or readers[0].op_type not in ("Add", "Cast", "Identity"):
                return False
            (node,) = readers
            if any(self._by_sequence(other) for other in node.input if other != name):
                return True
            name = node.output[0]
        return False

    def split_of(self, product: Product) -> list[int] | None:
        """The sizes of a Split that follows a product, after at most a bias; None without such a Split."""
        name = product.node.output[0]
        for _ in range(3):
            readers = self.readers.get(name, [])
            if len(readers) != 1:
                return None
            (node,) = readers
            if node.op_type == "Split" and len(node.input) > 1 and node.input[1] in self.constants:
                sizes = numpy_helper.to_array(self.constants[node.input[1]]).tolist()
                return sizes if sum(sizes) == product.outputs else None
            if node.op_type not in ("Add", "Sub"):
                return None
            name = node.output[0]
        return None
