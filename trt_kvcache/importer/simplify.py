"""Simplifies a model before the search for caches: one graph of opset 24 without functions, with constants folded.

    function calls                            their bodies                 onnx.inliner
    opset 11 to 23                            opset 24                     onnx.version_converter
    operators of ONNX Runtime                 their bodies                 lower
    values computed from constants and sizes  constants                    onnx.shape_inference, ONNX Runtime
    If with a constant condition              the branch that is taken     onnx.compose
    equal nodes                               one node
    shapes                                                                 onnx.shape_inference

Remaining tensors and nodes keep their names. Weights (large initializers and external data) are never read.

onnx-ir, onnxscript and onnx-shape-inference do the same, but to import them takes 0.3 s (onnx-ir loads sympy), a
quarter of the time to plan a model of two layers. For a model below opset 18, onnxscript's version converter (0.7.2)
sets the opset, but keeps the operators. graphsurgeon's `fold_constants` (0.6.1) ignores `start` and `end` of `Shape`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper, version_converter

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.protos import (
    DEFAULT_DOMAINS,
    TENSORRT_UPDATE,
    all_nodes,
    attribute_graphs,
    constant_value,
    copied,
    describe,
    is_op,
    names_read,
    opset_version,
    part_of,
    replace_field,
    shape_of,
)

OPSET = 24
"""The lowest opset with TensorScatter, and Attention with `nonpad_kv_seqlen`."""

_OLDEST = 13  # in older opsets, Softmax normalizes over its axis and all later axes
_PARKED = "trt_kvcache.parked"
_LARGEST = 1024  # the most elements of a constant that may be a shape, an axis or a factor
_HIDDEN = ("TensorScatter", "Attention")
_PREFIX = "trt_kvcache/simplify/"
_MOST_ROUNDS = 8
_NAME = 200  # the most characters of a prefix for names inside a branch
_WITH_BODIES = ("Attention", "DequantizeLinear", "SimplifiedLayerNormalization")
"""Operators of ONNX's own domain that `lower` may replace; DequantizeLinear together with a MatMul."""
_STAY = frozenset((
    # TensorRT needs these operators themselves, not their results
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear",
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout",
    "RegexFullMatch", "If", "Loop", "Scan", "TensorScatter", "Attention",
))  # fmt: skip
_FOLDED = frozenset((
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8,
))  # fmt: skip


def simplify(model: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    """Inline functions, raise the opset to 24, and fold constants. Return the model, and names of inlined parts.

    The model has placeholders for large inline weights, and may be edited in place. Raises `InvalidModelError` if its
    stated shapes contradict each other, and `UnsupportedModelError` if a cache update or an attention is in a body that
    may run never or several times, or if the opset cannot be raised.
    """
    model, inlined = inline_functions(model)
    name_nodes(model.graph)
    drop_unused_outputs(model.graph)
    if not any(node.op_type == "TRT_KVCacheUpdate" for node in all_nodes(model.graph)):
        model = raise_opset(model)
    model, branches = _fold(model)
    for node in model.graph.node:
        _refuse_hidden(node)
    name_nodes(model.graph)
    return model, (*inlined, *branches)


def infer_shapes(model: ModelProto) -> ModelProto:
    """Return the model with inferred shapes; raises `InvalidModelError` if stated shapes contradict each other."""
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError) as error:
        raise InvalidModelError(
            f"ONNX shape inference fails for this model:  {(str(error).splitlines() or [''])[0]}"
        ) from error


def name_nodes(graph: GraphProto) -> None:
    """Give every node a unique name, because plans and messages name nodes, and TensorRT names layers after nodes."""
    taken: set[str] = set()
    for index, node in enumerate(graph.node):
        name = node.name or f"{node.op_type}_{index}"
        while name in taken:
            name = f"{name}_{index}"
        node.name = name
        taken.add(name)


def drop_unused_outputs(graph: GraphProto) -> None:
    """Drop unread outputs that TensorRT and (from opset 25 on) ONNX's shape inference refuse."""
    used = {name for node in all_nodes(graph) for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        if is_op(node, "Attention") or is_op(node, "LayerNormalization"):
            outputs = [name if i == 0 or name in used else "" for i, name in enumerate(node.output)]
            while not outputs[-1]:
                outputs.pop()
            node.output[:] = outputs


def inline_functions(model: ModelProto) -> tuple[ModelProto, list[str]]:
    """Inline functions, because TensorRT's parser prefers its own operator to a function of the same name.

    For example, if a function ``my::Relu`` computes x * x, TensorRT builds a ReLU instead, without a message (measured
    on TensorRT for RTX 1.7.1). A function that defines TensorRT's own cache update stays.
    """
    known = {entry.domain: entry.version for entry in model.opset_import}
    done = []
    for function in model.functions:
        if function.name == TENSORRT_UPDATE:
            continue
        done.append((function.domain, function.name))
        for entry in function.opset_import:  # ONNX's inliner does not support two opsets
            if (of_model := known.get(entry.domain, entry.version)) != entry.version:
                raise UnsupportedModelError(
                    f"the function {function.domain}::{function.name} uses opset {entry.version} of "
                    f"'{entry.domain or 'ai.onnx'}', but the model uses {of_model}; both must use the same: export the "
                    "model with one opset"
                )
    if done:
        model = inliner.inline_selected_functions(model, done)
        for node in model.graph.node:  # trailing empty names crash fusions of ONNX Runtime 1.31
            while node.input and not node.input[-1]:
                del node.input[-1]
    return model, [f"function {domain}::{name}" for domain, name in done]


def raise_opset(model: ModelProto) -> ModelProto:
    """Raise a model without functions to opset 24. Return a model of opset 24 or later unchanged.

    Exporters write operators into ONNX's domain that the old opset lacks (SimplifiedLayerNormalization). ONNX's
    converter fails for them, so they are in another domain during the conversion. The converter loses metadata,
    functions and stated shapes, so only nodes and new constants come from its result.

    Raises `UnsupportedModelError` if the opset is below 13, or if ONNX's converter cannot convert an operator.
    """
    version = opset_version(model)
    if version is None or version >= OPSET:
        return model
    if version < _OLDEST:
        raise UnsupportedModelError(
            f"the model has opset {version}; the importer supports {_OLDEST} and later: export the model with opset "
            f"{OPSET}"
        )
    parked = copied(model)
    parked.opset_import.add(domain=_PARKED, version=1)
    for node in all_nodes(parked.graph):
        if node.domain in DEFAULT_DOMAINS and not onnx.defs.has(node.op_type, version, ""):
            node.domain = _PARKED
    try:
        converted = version_converter.convert_version(parked, OPSET)
    except (RuntimeError, version_converter.ConvertError) as error:
        raise UnsupportedModelError(
            f"ONNX's version converter cannot raise the model from opset {version} to {OPSET} "
            f"({_culprit(model, str(error))}): export the model with opset {OPSET}"
        ) from error
    result = copied(model)
    metadata = {tuple(node.output): node.metadata_props for node in model.graph.node if node.metadata_props}
    for node in all_nodes(converted.graph):
        if node.domain == _PARKED:
            node.ClearField("domain")
        if (entries := metadata.get(tuple(node.output))) is not None and not node.metadata_props:
            node.metadata_props.extend(entries)
    replace_field(result.graph.node, converted.graph.node)
    own = {tensor.name for tensor in model.graph.initializer}
    result.graph.initializer.extend(t for t in converted.graph.initializer if t.name not in own)
    for entry in result.opset_import:
        if entry.domain in DEFAULT_DOMAINS:
            entry.version = OPSET
    result.ir_version = max(model.ir_version, 10)  # element types of opset 24 need this IR version
    return result


def _culprit(model: ModelProto, words: str) -> str:
    last = words.strip().splitlines()[-1].split("failed: ")[-1] if words.strip() else "no reason given"
    operator = last.rsplit(" for ", 1)[-1]
    node = next((n for n in all_nodes(model.graph) if n.op_type == operator), None)
    return f"{describe(node)}: {last}" if node is not None else last


def _fold(model: ModelProto) -> tuple[ModelProto, list[str]]:
    """Replace tensors of known value by constants, and Ifs by the branch taken. Return the model, and names of Ifs."""
    taken: list[str] = []
    stated = list(model.graph.output)  # callers need the stated outputs, but inference would overwrite them
    for _ in range(_MOST_ROUNDS):
        model = infer_shapes(model)
        if any(n.domain not in DEFAULT_DOMAINS or n.op_type in _WITH_BODIES for n in model.graph.node):
            from trt_kvcache.importer.lower import lower  # only models with such operators load this

            model = lower(model)
        graph = model.graph
        constants = _take_constants(graph)
        values = _known_sizes(model, constants)
        values |= _evaluated(model, constants | values)
        gone = [n for n in graph.node if n.output[0] in values]
        for name in (name for node in gone for name in node.output if name in values):
            graph.initializer.append(numpy_helper.from_array(values[name], name))
        replace_field(graph.node, [n for n in graph.node if n.output[0] not in values])
        branches = take_branches(graph, constants | values)
        _merge_equal(graph)
        drop_dead(graph)
        taken += branches
        if not (gone or branches):
            break
    inferred = {v.name: v for v in model.graph.output}
    shapes = [(shape_of(v), shape_of(inferred[v.name])) for v in stated]
    fits = [one is None or two is None or len(one) == len(two) for one, two in shapes]
    replace_field(model.graph.output, [v if fit else inferred[v.name] for v, fit in zip(stated, fits, strict=True)])
    return model, taken


def _take_constants(graph: GraphProto) -> dict[str, Any]:
    """Turn Constant nodes into initializers, in place. Return the values of small constants by name."""
    outputs = {v.name for v in graph.output}
    others = []
    for node in graph.node:
        tensor = constant_value(node) if node.output[0] not in outputs else None
        if tensor is None or not _is_small(tensor.dims) or tensor.data_location == TensorProto.EXTERNAL:
            others.append(node)
        else:
            graph.initializer.append(tensor)
            graph.initializer[-1].name = node.output[0]
    if len(others) < len(graph.node):
        replace_field(graph.node, others)
        _drop_shapes(graph)  # onnxruntime-genai states wrong shapes for constants
    inputs = {v.name for v in graph.input}  # an initializer with the name of an input is only a default value
    return {name: value for name, value in _small_values(graph).items() if name not in inputs}


def _small_values(graph: GraphProto) -> dict[str, Any]:
    tensors = (t for t in graph.initializer if t.data_type in _FOLDED and t.data_location != TensorProto.EXTERNAL)
    return {t.name: numpy_helper.to_array(t) for t in tensors if _is_small(t.dims)}


def _is_small(dims: Iterable[int]) -> bool:
    return int(np.prod(list(dims), dtype=np.float64)) <= _LARGEST


def _known_sizes(model: ModelProto, constants: dict[str, Any]) -> dict[str, Any]:
    """Return integers that the model computes from known sizes, by name.

    ONNX's shape inference knows them, but returns only shapes. So a ConstantOfShape shows each integer as a shape.
    """
    shapes = _shapes(model)
    outputs = {v.name for v in model.graph.output}
    twin, probed = copied(model), {}
    twin.graph.initializer.append(numpy_helper.from_array(np.array([0]), f"{_PREFIX}axis"))
    for node in model.graph.node:
        name = node.output[0]
        kind, shape = shapes.get(name, (0, None))
        if len(node.output) > 1 or name in outputs or node.op_type in _STAY or kind != TensorProto.INT64:
            continue
        if shape is None or len(shape) > 1:
            continue
        probed[_PREFIX + name] = shape
        sizes = name if shape else f"{_PREFIX}{name}/sizes"
        if not shape:
            twin.graph.node.append(helper.make_node("Unsqueeze", [name, f"{_PREFIX}axis"], [sizes]))
        twin.graph.node.append(helper.make_node("ConstantOfShape", [sizes], [_PREFIX + name]))
    if not probed:
        return {}
    inferred = {v.name: shape_of(v) for v in infer_shapes(twin).graph.value_info}
    return {
        probe.removeprefix(_PREFIX): np.array(sizes, np.int64).reshape([len(sizes)] if shape else [])
        for probe, shape in probed.items()
        if (sizes := inferred.get(probe)) and all(isinstance(d, int) and d > 0 for d in sizes)
    }


def _evaluated(model: ModelProto, constants: dict[str, Any]) -> dict[str, Any]:
    """Compute nodes over small constants in ONNX Runtime. Return the results that other nodes read, by name."""
    shapes = _shapes(model)
    outputs = {v.name for v in model.graph.output}
    known, nodes = set(constants), []
    for node in model.graph.node:
        if _is_foldable(node, shapes, known) and not outputs & set(node.output):
            known.update(node.output)
            if node.output[0] not in constants:
                nodes.append(node)
    folded = {id(node) for node in nodes}
    read = {name for node in model.graph.node if id(node) not in folded for name in names_read(node)}
    wanted = [name for node in nodes for name in node.output if name in read]
    if not wanted:
        return {}
    from trt_kvcache.cpu import UnfusedSession  # slow to import: only if needed

    used = {name for node in nodes for name in node.input}
    initializers = [numpy_helper.from_array(v, n) for n, v in constants.items() if n in used]
    part = part_of(model, nodes, [], wanted, initializers)
    try:
        values = UnfusedSession(part).run({})
    except Exception:  # noqa: BLE001 - for example a missing kernel; then these nodes stay
        return {}
    return {name: value for name, value in values.items() if _is_small(value.shape)}


def _is_foldable(node: NodeProto, shapes: dict[str, Any], known: set[str]) -> bool:
    if node.domain not in DEFAULT_DOMAINS or node.op_type in _STAY or not all(n in known for n in node.input if n):
        return False
    results = [shapes.get(name, (0, None)) for name in node.output if name]
    return all(kind in _FOLDED for kind, _ in results) and (
        node.op_type == "NonZero"
        or all(s is not None and all(isinstance(d, int) for d in s) and _is_small(s) for _, s in results)
    )


def _shapes(model: ModelProto) -> dict[str, Any]:
    return {v.name: (v.type.tensor_type.elem_type, shape_of(v)) for v in model.graph.value_info}


def take_branches(graph: GraphProto, constants: Mapping[str, Any]) -> list[str]:
    """Replace each If with a constant condition by the branch that is taken. Return the replaced nodes' names."""
    done = []
    while (index := next((i for i, n in enumerate(graph.node) if is_op(n, "If") and n.input[0] in constants), -1)) >= 0:
        node = graph.node[index]
        done.append(f"If '{node.name or node.output[0]}'")
        wanted = "then_branch" if constants[node.input[0]].reshape(-1)[0] else "else_branch"
        splice_body(graph, index, next(a.g for a in node.attribute if a.name == wanted))
    return done


def splice_body(graph: GraphProto, index: int, body: GraphProto) -> None:
    """Replace the node at `index` by one of its branches, in place. Inner names get the node's name as a prefix."""
    node = graph.node[index]
    prefix = f"{_short(node.name or node.output[0])}/"
    names = {t.name: prefix + t.name for t in body.initializer}
    inner_names = {name for n in body.node for name in n.output}
    copies = []
    for value, name in zip(body.output, node.output, strict=False):
        if value.name in inner_names and value.name not in names:
            names[value.name] = name or prefix + value.name  # the branch writes the node's output
        elif name:  # a tensor from outside, or used for two outputs
            copies.append(helper.make_node("Identity", [names.get(value.name, value.name)], [name]))
    # Inference also writes shapes of outer tensors into a body. Outer tensors must keep their names.
    inner = onnx.compose.add_prefix_graph(
        body, prefix, rename_inputs=False, rename_outputs=False, rename_value_infos=False, name_map=names
    )
    replace_field(graph.node, [*graph.node[:index], *inner.node, *copies, *graph.node[index + 1 :]])
    graph.initializer.extend(inner.initializer)
    own = set(names.values())
    graph.value_info.extend(v for v in inner.value_info if v.name in own)


def _short(name: str) -> str:
    """Limit the length of a name, because names in nested branches would double with each level."""
    return name if len(name) <= _NAME else f"{name[:_NAME]}~{hashlib.sha1(name.encode()).hexdigest()[:12]}"


def _merge_equal(graph: GraphProto) -> None:
    outputs = {v.name for v in graph.output}
    constants = {name: (v.dtype.str, *v.shape, v.tobytes()) for name, v in _small_values(graph).items()}
    fixed = outputs.union(*(names_read(node) - {*node.input} for node in graph.node))
    first: dict[object, NodeProto] = {}
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        bodies = any(True for a in node.attribute for _ in attribute_graphs(a))
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        read = [constants.get(name, name) for name in node.input]
        key = (node.domain, node.op_type, *attributes, "", *read, len(node.output))
        free = not bodies and node.op_type not in _STAY and node.domain in DEFAULT_DOMAINS
        if not free or fixed & set(node.output) or (other := first.setdefault(key, node)) is node:
            nodes.append(node)
        else:
            renamed |= dict(zip(node.output, other.output, strict=True))
    if renamed:
        replace_field(graph.node, nodes)


def drop_dead(graph: GraphProto) -> None:
    """Remove nodes, initializers and stated shapes that no graph output needs, in place."""
    used = {v.name for v in graph.output}
    needed = []
    for node in reversed(graph.node):
        if used & set(node.output):
            needed.append(node)
            used |= names_read(node)
    replace_field(graph.node, needed[::-1])
    for index in reversed(range(len(graph.initializer))):  # in place, so that no large weights are copied
        if graph.initializer[index].name not in used:
            del graph.initializer[index]
    _drop_shapes(graph)


def _drop_shapes(graph: GraphProto) -> None:
    outputs = {name for node in graph.node for name in node.output}
    replace_field(graph.value_info, [v for v in graph.value_info if v.name in outputs])


def _refuse_hidden(node: NodeProto) -> None:
    """Refuse an If, Loop or Scan with a cache update or an attention, because TensorRT would always run its body."""
    bodies = [graph for attribute in node.attribute for graph in attribute_graphs(attribute)]
    inner = [n for body in bodies for n in all_nodes(body)]
    hidden = {n.op_type for n in inner if n.op_type == "TRT_KVCacheUpdate"}
    hidden |= {n.op_type for n in inner if n.op_type in _HIDDEN and n.domain in DEFAULT_DOMAINS}
    if not hidden:
        return
    label = f"{describe(node)} contains {', '.join(sorted(hidden))}"
    if is_op(node, "If"):
        raise UnsupportedModelError(
            f"{label}, but its condition '{node.input[0]}' is not constant. TensorRT's cache layer must run in every "
            "step: export the model without this branch"
        )
    raise UnsupportedModelError(
        f"{label}. TensorRT has no layers for cache updates and attention in the body of a {node.op_type}: export the "
        "model without this control flow"
    )
