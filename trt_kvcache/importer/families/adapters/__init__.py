"""Adds adapters (LoRA) as inputs to a rewritten model, for ``--lora-rank``.

    y = x W                                                  x [B, S, inputs]
becomes
    y = x W + (x A[slot]) B[slot]                            A [slots + 1, inputs, rank], B [slots + 1, rank, outputs]

`slot` is an input ``[B]``: each sequence chooses its adapter; slot 0 holds zeros. W stays unchanged, quantized or not.
This happens after the check, which runs without adapters. Names in the model, or a comparison of weights with the
checkpoint, tell to which module a product (MatMul) belongs. If a product fuses several modules, each has its own
columns in A and B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import (
    AdapterPart,
    AdapterPlan,
    AdapterProduct,
    CachePlan,
    Dim,
    InterfaceChange,
    Role,
    TensorRole,
)
from trt_kvcache.importer.families.adapters.adapter_weights import Contents, module_names
from trt_kvcache.importer.graph import free_name
from trt_kvcache.importer.protos import FLOATS, constants_of, dtype_name, is_op, readers_of, replace_field, shape_of
from trt_kvcache.importer.simplify import infer_shapes
from trt_kvcache.lora import FUSED, list_names, module_key


@dataclass(frozen=True)
class _Match:
    """A MatMul or Gemm, and the modules of the checkpoint that it computes."""

    product: Product
    parts: tuple[AdapterPart, ...]
    whole: str | None
    found_by: str

    @property
    def modules(self) -> list[str]:
        return [*(part.module for part in self.parts), *filter(None, [self.whole])]


def add_adapters(
    model: ModelProto, plan: CachePlan, source: ModelProto, folder: Path, weights: Mapping[str, TensorProto]
) -> CachePlan:
    """Add adapters to a rewritten model in place, as the plan's options say. Return the new plan.

    `source` is the exported model, whose names may show the modules. `weights` holds the tensors that are placeholders
    in `model`. Raises `UnsupportedModelError` if no MatMul belongs to a target module, or if it is unknown which rows
    of a MatMul belong to which sequence, and `OptionError` if the checkpoint cannot be read.
    """
    options = plan.options
    assert options.lora_rank is not None
    graph = ProductGraph(model, plan)
    matches = [_parts(one, graph) for one in _named(graph.products(), source)]
    contents = Contents.beside(options.checkpoint, folder)
    if contents is not None and (options.checkpoint is not None or not _covers(matches, options.lora_targets)):
        matches = _merged(matches, _compared(contents, graph, folder, weights))
    targets = _split_targets(matches, options.lora_targets)
    chosen = [one for one in matches if any(_is_wanted(module, targets) for module in one.modules)]
    _check(chosen, matches, targets, compared=contents is not None)
    for one in chosen:
        graph.check_rows(one.product, one.parts[0].module)
    taken = set(graph.shapes) | {v.name for v in (*model.graph.input, *model.graph.output)}
    index = free_name("adapter", taken)
    planned = tuple(_planned(one, options.lora_rank, targets, taken) for one in chosen)
    adapters = AdapterPlan(options.lora_rank, options.lora_slots, index, planned)
    _insert(model, adapters, [one.product for one in chosen], graph.batch)
    axis = "" if isinstance(graph.batch, int) else "batch"
    roles = [TensorRole(index, "input", Role.ADAPTER, "int64", (graph.batch,), "added", (axis,))]
    for product in planned:
        for name, shape in _shapes(product, options.lora_slots):
            roles.append(TensorRole(name, "input", Role.ADAPTER_WEIGHTS, product.dtype, shape, "added", ("", "", "")))
    changes = (
        InterfaceChange("input", "", f"{index} [B]", "for each sequence, the slot of its adapter; 0: no adapter"),
        InterfaceChange(
            "input", "", f"lora.MODULE.a, lora.MODULE.b ({len(planned)} of each)",
            "factors of the adapters, one adapter in each slot; slot 0 holds zeros",
        ),
    )  # fmt: skip
    return replace(
        plan, tensors=(*plan.tensors, *roles), changes=(*plan.changes, *changes) if plan.changes else plan.changes,
        adapters=adapters,
    )  # fmt: skip


def _named(products: Iterable[Product], source: ModelProto) -> list[_Match]:
    """Find modules of MatMuls by name. Of several MatMuls with the same module, keep the one with the most inputs."""
    names = module_names(source)
    best: dict[str, list[Product]] = {}
    said: dict[str, str] = {}
    for product in products:
        naming = names.of(product.root, product.node.name)
        if naming is not None:
            module, by = naming
            if "lora_" in module:  # belongs to an adapter that was exported with the model
                continue
            said[module] = by
            others = best.get(module, [])
            widest = max([product, *others], key=lambda p: p.inputs).inputs
            best[module] = [p for p in (*others, product) if p.inputs == widest]
    return [_Match(many[0], (AdapterPart(module, 0, many[0].outputs),), None, said[module])
            for module, many in best.items() if len(many) == 1]  # fmt: skip


def _compared(
    contents: Contents, graph: ProductGraph, folder: Path, weights: Mapping[str, TensorProto]
) -> list[_Match]:
    matches = []
    for product in graph.products():
        parts = contents.parts_of(graph.constants[product.root], product.turned, folder, weights)
        if parts:
            planned = tuple(AdapterPart(*part) for part in parts)
            matches.append(_Match(product, planned, None, f"weights of {contents.name}"))
    return matches


def _merged(named: Sequence[_Match], compared: Sequence[_Match]) -> list[_Match]:
    """Join both lists of matches. If both have a match for a MatMul or a module, keep the one found by weights."""
    known = {one.product.node.output[0] for one in compared}
    keys = {module_key(part.module) for one in compared for part in one.parts}
    others = [
        one for one in named
        if one.product.node.output[0] not in known and all(module_key(p.module) not in keys for p in one.parts)
    ]  # fmt: skip
    return [*compared, *others]


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _parts(one: _Match, graph: ProductGraph) -> _Match:
    """If the exporter fused several modules under one name, return the match with these modules as its parts."""
    module = one.parts[0].module
    names = FUSED.get(_last(module))
    sizes = graph.split_of(one.product) if names and len(one.parts) == 1 else None
    if names is None or sizes is None or len(sizes) != len(names):
        return one
    stem, stops = module.removesuffix(_last(module)), [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = tuple(
        AdapterPart(stem + name, stop - size, stop) for name, size, stop in zip(names, sizes, stops, strict=True)
    )
    return replace(one, parts=parts, whole=module)


def _is_wanted(module: str, targets: Sequence[str]) -> bool:
    key = module_key(module)
    return _last(module) in targets or ("all" in targets and key is not None and len(key) > 1)


def _covers(matches: Sequence[_Match], targets: Sequence[str]) -> bool:
    names = {_last(p.module) for one in matches for p in one.parts}
    names |= {part for name in names for part in FUSED.get(name, ())}
    return "all" not in targets and names >= set(targets)


def _split_targets(matches: Sequence[_Match], targets: Sequence[str]) -> tuple[str, ...]:
    """Replace target modules that the export splits into several MatMuls: qkv_proj -> q_proj, k_proj, v_proj."""
    known = {_last(module) for one in matches for module in one.modules}
    split: dict[str, None] = {}
    for target in targets:
        parts = FUSED.get(target, ())
        split |= dict.fromkeys(parts if parts and target not in known and known.issuperset(parts) else (target,))
    return tuple(split)


def _check(chosen: Sequence[_Match], matches: Sequence[_Match], targets: Sequence[str], *, compared: bool) -> None:
    last = {_last(module) for one in chosen for module in one.modules}
    known = sorted({_last(module) for one in matches for module in one.modules})
    missing = [target for target in targets if target not in last and not (target == "all" and chosen)]
    if missing:
        near = get_close_matches(missing[0], known, 3, 0.5) or known
        said = f"the model has no product for the module '{missing[0]}'; it has products for {list_names(near)}"
        if not near or missing[0] == "all":
            said = (
                "cannot tell which products of the model belong to modules of the checkpoint, so no product can "
                "have an adapter"
            )
        advice = (
            "" if compared else "; give the checkpoint of the model with --checkpoint, to find modules by their weights"
        )
        raise UnsupportedModelError(said + advice)
    keys: dict[object, str] = {}
    for part in (part for one in chosen for part in one.parts):
        key = module_key(part.module)
        if key is None:
            raise UnsupportedModelError(
                f"the module '{part.module}' is not a module of a decoder; remove it from --lora-targets"
            )
        if key in keys:
            raise UnsupportedModelError(
                f"several products (MatMul, Gemm) match the module '{part.module}', but its adapter can be added to "
                "only one; remove the module from --lora-targets"
            )
        keys[key] = part.module


def _planned(one: _Match, rank: int, targets: Sequence[str], taken: set[str]) -> AdapterProduct:
    module = one.whole or (
        one.parts[0].module
        if len(one.parts) == 1
        else one.parts[0].module + "".join(f"+{_last(p.module)}" for p in one.parts[1:])
    )
    a, b = (free_name(f"lora.{module}.{side}", taken) for side in "ab")
    taken |= {a, b}
    wanted = sum(_is_wanted(part.module, targets) for part in one.parts)
    product, rank = one.product, rank * max(1, wanted)
    sizes = product.inputs, product.outputs
    return AdapterProduct(a, b, product.dtype, rank, *sizes, one.parts, one.whole, one.found_by)


def _shapes(product: AdapterProduct, slots: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (
        (product.a, (slots + 1, product.inputs, product.rank)),
        (product.b, (slots + 1, product.rank, product.outputs)),
    )


def _insert(model: ModelProto, plan: AdapterPlan, products: Sequence[Product], batch: Dim) -> None:
    graph = model.graph
    pairs = zip(products, plan.products, strict=True)
    added = {product.node.output[0]: (product, planned) for product, planned in pairs}
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.output and node.output[0] in added:
            product, planned = added[node.output[0]]
            nodes += _nodes(node, product, planned, plan.index)
    replace_field(graph.node, nodes)
    graph.input.append(helper.make_tensor_value_info(plan.index, TensorProto.INT64, [batch]))
    for planned in plan.products:
        kind = getattr(TensorProto, planned.dtype.upper())
        for name, shape in _shapes(planned, plan.slots):
            graph.input.append(helper.make_tensor_value_info(name, kind, shape))


def _nodes(node: NodeProto, product: Product, planned: AdapterProduct, index: str) -> list[NodeProto]:
    result, stem = node.output[0], planned.a.removesuffix(".a")
    own, x = f"{result}/{stem}/own", node.input[0]
    node.output[0] = own
    nodes: list[NodeProto] = []

    def add(op: str, inputs: list[str], output: str, name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [f"{stem}/{output}"], f"{stem}/{name}", **attributes))
        return f"{stem}/{output}"

    flat = product.rows != x  # the operand has one axis for sequences and tokens
    if flat:
        sizes = numpy_helper.from_array(np.array([-1, product.inputs]), f"{stem}/sizes")
        ends = [add("Shape", [index], "batch", "Shape_batch"), add("Constant", [], "sizes", "Constant", value=sizes)]
        x = add("Reshape", [x, add("Concat", ends, "by_sequence", "Concat", axis=0)], "x", "Reshape_x")
    a = add("Gather", [planned.a, index], "a", "Gather_a", axis=0)
    b = add("Gather", [planned.b, index], "b", "Gather_b", axis=0)
    change = add("MatMul", [add("MatMul", [x, a], "low", "MatMul_a"), b], "change", "MatMul_b")
    if flat:
        change = add("Reshape", [change, add("Shape", [own], "shape", "Shape")], "flat", "Reshape")
    return [*nodes, helper.make_node("Add", [own, change], [result], f"{stem}/Add")]


_KEEPS_ROWS = {
    "Add", "Cast", "Div", "Erf", "Gelu", "Identity", "LayerNormalization", "MatMul", "Mul", "Neg", "Pow",
    "RMSNormalization", "Reciprocal", "ReduceMean", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh",
    "Where",
}  # fmt: skip
"""Operators whose result has the same first axis as any operand of the same rank."""
_OF_WEIGHTS = {"Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose"}


@dataclass(frozen=True)
class Product:
    """A product (MatMul or Gemm) with a weight.

    Attributes:
        node: the node.
        rows: name of the other operand ``[B, S, inputs]``, or of the tensor before a Reshape that merged B and S.
        root: name of the initializer that holds the weight.
        turned: True if the initializer is ``[outputs, inputs]``.
    """

    node: NodeProto
    rows: str
    root: str
    turned: bool
    inputs: int
    outputs: int
    dtype: str


class ProductGraph:
    """The MatMuls of a rewritten model, and facts about their operands."""

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
                "each sequence chooses its adapter, but the model has the tokens of all sequences in one axis: export "
                "it with tokens [batch, sequence]"
            )
        self.batch: Dim = caches[0]
        if tokens is not None and "batch" in tokens.axes:
            self.batch = tokens.shape[tokens.axes.index("batch")]
        self._rows: dict[str, bool] = {}

    def products(self) -> Iterator[Product]:
        """Yield all products (MatMul or Gemm) of token rows with a weight."""
        for node in self._nodes:
            if not is_op(node, "MatMul") and not is_op(node, "Gemm"):
                continue
            attributes = {a.name: a.i for a in node.attribute}
            turned, shape = bool(attributes.get("transB")), self.shapes.get(node.input[1]) or ()
            root, flips = self._root(node.input[1])
            fits = len(shape) == 2 and all(isinstance(d, int) for d in shape) and not attributes.get("transA")
            if root is None or not fits:
                continue
            inputs, outputs = map(int, reversed(shape) if turned else shape)
            rows = self._with_rows(node.input[0])
            dtype = self._types.get(node.input[0], 0) or self._types.get(node.output[0], 0)
            if rows is not None and dtype in FLOATS:
                yield Product(node, rows, root, turned ^ flips, inputs, outputs, dtype_name(dtype))

    def _root(self, name: str) -> tuple[str | None, bool]:
        """Return the initializer of a weight, and True if it is transposed."""
        turned = False
        while name not in self.constants:
            node = self._makes.get(name)
            if node is None or node.op_type not in _OF_WEIGHTS:
                return None, False
            turned ^= node.op_type == "Transpose"
            name = node.input[0]
        return name, turned

    def _with_rows(self, name: str) -> str | None:
        """Follow an operand back through Reshape and Cast to a tensor with three or more axes; None if not found."""
        most, shape = 3, self.shapes.get(name)
        while shape is not None and len(shape) == 2:
            node = self._makes.get(name)
            if node is None or node.op_type not in ("Reshape", "Cast"):
                return None
            name = node.input[0]
            most, shape = 5, self.shapes.get(name)
        return name if shape is not None and 3 <= len(shape) <= most else None

    def check_rows(self, product: Product, module: str) -> None:
        """Refuse a MatMul if the first axis of its operand may be something else than the batch."""
        if not self._by_sequence(product.rows) and not self._meets_sequences(product.node.output[0]):
            raise UnsupportedModelError(
                f"module '{module}' ({product.node.op_type} '{product.node.name}') multiplies '{product.rows}' "
                f"{list(self.shapes.get(product.rows) or ())}, but the model does not show that the first axis is the "
                f"batch '{self.batch}', so a sequence cannot choose an adapter there: remove the module from "
                "--lora-targets"
            )

    def _by_sequence(self, name: str) -> bool:
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
        axes = self.constants.get(node.input[3]) if node.op_type == "Slice" and len(node.input) > 3 else None
        return axes is not None and min(numpy_helper.to_array(axes).tolist(), default=0) > 0

    def _meets_sequences(self, name: str) -> bool:
        """True if the result of a MatMul is added to a tensor whose first axis is the batch."""
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
        """Return the sizes of a Split after a MatMul (a bias may come between them); None without such a Split."""
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
