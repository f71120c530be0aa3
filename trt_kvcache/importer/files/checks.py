"""Repairs what some tools write, and checks that a graph follows those rules of ONNX that the importer needs.

Weights are not read. `repair` repairs models that break rules of ONNX, or that ONNX Runtime cannot load later:

    nodes in any order              ONNX Runtime's float16 converter appends Casts of inputs and of float32 operators
    the domain ai.onnx              another name of ONNX's own domain ""; ONNX's checker finds no operator there
    no import of com.microsoft      ONNX Runtime's quantizers add operators of this domain without the import
    shapes stated for initializers  onnxruntime-genai states [] for a constant [1], which becomes an initializer
    values that are stated twice    ONNX Runtime's float16 converter lists outputs again, as values without shapes
    names of saved Casts            ONNX Runtime's optimizer saves the Casts that it adds. When it loads the model, it
                                    adds Casts of the same names: "Duplicate definition of name" (1.32)

`drop_defaults` removes default values of inputs (initializers with the name of an input), so that positions or a past
do not become constants. Old exporters list all weights as inputs, too; weights stay constants.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx
import onnx.inliner
from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, ValueInfoProto

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.interface import NamePattern, shipped_patterns
from trt_kvcache.importer.protos import (
    DEFAULT_DOMAINS,
    Scope,
    all_nodes,
    byte_size,
    copied,
    describe,
    dtype_name,
    elem_type_of,
    int_attribute,
    is_op,
    iter_scopes,
    iter_tensors,
    names_read,
    nested_scopes,
    opset_version,
    replace_field,
    shape_of,
)

TENSOR_SCATTER_OPSET = 24
_FOREIGN_DOMAIN = "trt_kvcache.foreign"
_SIZES = 1 << 31
_MOST_NODES, _MOST_CALLS = 1 << 20, 100
_MOST_NUMBERS, _MOST_LISTED = 1 << 22, 1 << 20
"""The most numbers of a rank-1 tensor whose data are not in the file, and the most values of a list attribute.

ONNX's shape inference allocates 80 bytes or more for each number of the tensor (measured, 1.23.2).
"""
_SMALL_BYTES = 1024  # constants up to this size stay: shape inference reads shapes from them
_UNNATURAL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # Unicode's categories Cc, Zl and Zp
_NAMES = {"name", "input", "output", "op_type", "domain", "dim_param"}
_FLAGGED = {"Attention", "GroupQueryAttention", "MultiHeadAttention", "RotaryEmbedding"}
_FLAGS = {
    "is_causal", "causal", "unidirectional", "do_rotary", "rotary_interleaved", "interleaved", "is_packed_batching",
    "sliding_window_cache",
}  # fmt: skip
_TYPE_ADVICE = (
    "ONNX Runtime does not load it either; convert the model again with another tool, such as "
    "onnxruntime.transformers.float16, or export it in the type that you want"
)
_QUANTIZED_ADVICE = (
    "ONNX Runtime does not load it either; quantize a float32 export instead. From float16, onnxruntime's "
    "quantize_dynamic makes such types. NVIDIA ModelOpt can quantize ONNX files in float32 and make the rest float16 "
    "(high_precision_dtype='fp16'); export a torch model that ModelOpt quantized as model.half()"
)
_FUSED: dict[str, tuple[int, ...]] = {
    "RotaryEmbedding": (0, 2, 3), "SkipLayerNormalization": (0, 1, 2), "SkipSimplifiedLayerNormalization": (0, 1, 2),
    "BiasGelu": (0, 1), "FastGelu": (0, 1), "FusedMatMul": (0, 1),
}  # fmt: skip
"""Maps operators of ONNX Runtime to indices of inputs that must have one type. Optimizers may mix float types."""
_ONNX_ERRORS = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError)

_RULE = re.compile(r"\(op_type:(\w+)(?:, node name: ([^)]*))?\): \[\w+\] (.+?)(?= \(op_type:|$)")
"""Matches messages of ONNX's shape inference: operator, node, rule."""
_CONTRIB = "com.microsoft"
_LONG = "ai.onnx"
_CASTS = "InsertedPrecisionFreeCast_"


def repair(model: ModelProto) -> None:
    """Repair, in place, the order of nodes, names of domains and Casts, and wrong or repeated shapes."""
    _unalias(model)
    for scope in iter_scopes(model):
        _sort(scope)
        _unstate(scope)
    used = {node.domain for scope in iter_scopes(model) for node in scope.node}
    if _CONTRIB in used - {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=_CONTRIB, version=1)
    _rename_casts(model.graph)


def _unalias(model: ModelProto) -> None:
    """Replace the domain "ai.onnx" with "", ONNX's own name, unless a model imports both in different versions."""
    for owner in (model, *model.functions):
        versions = {entry.version for entry in owner.opset_import if entry.domain in DEFAULT_DOMAINS}
        if len(versions) != 1 or all(entry.domain != _LONG for entry in owner.opset_import):
            continue
        others = [entry for entry in owner.opset_import if entry.domain not in DEFAULT_DOMAINS]
        replace_field(owner.opset_import, [OperatorSetIdProto(domain="", version=versions.pop()), *others])
    for scope in iter_scopes(model):
        for node in scope.node:
            if node.domain == _LONG:
                node.domain = ""


def _rename_casts(graph: GraphProto) -> None:
    """Rename inner tensors, in place, if their names begin like the names of Casts that ONNX Runtime adds."""
    fixed = {value.name for value in (*graph.input, *graph.output)}

    def other(name: str) -> str:
        return f"trt_kvcache/{name}" if str(name).startswith(_CASTS) and name not in fixed else name

    for scope in nested_scopes(graph):
        for node in scope.node:
            for names in (node.input, node.output):
                if any(other(name) != name for name in names):
                    names[:] = [other(name) for name in names]
        if isinstance(scope, GraphProto):
            for value in (*scope.initializer, *scope.value_info, *scope.input, *scope.output):
                if other(value.name) != value.name:
                    value.name = other(value.name)


def _unstate(scope: Scope) -> None:
    """Drop, in place, stated shapes of initializers, and shapes stated twice. Shape inference finds them again."""
    is_graph = isinstance(scope, GraphProto)
    known = {value.name for value in (*scope.initializer, *scope.output, *scope.input)} if is_graph else set[str]()
    counts = Counter(value.name for value in scope.value_info)
    stated = [value for value in scope.value_info if value.name not in known and counts[value.name] == 1]
    if len(stated) < len(scope.value_info):
        replace_field(scope.value_info, stated)


def _sort(scope: Scope) -> None:
    """Sort nodes topologically, in place. A graph with a cycle stays unchanged."""
    makers = {name: index for index, node in reversed([*enumerate(scope.node)]) for name in node.output}
    needs = {i: {makers[name] for name in names_read(n) if name in makers} for i, n in enumerate(scope.node)}
    if all(max(before, default=-1) < index for index, before in needs.items()):
        return
    try:
        order = [*TopologicalSorter(needs).static_order()]
    except CycleError:
        return
    replace_field(scope.node, [scope.node[index] for index in order])


def check_graph(model: ModelProto, source: str) -> None:
    """Raise an error if a model is invalid or unsupported. External data may be missing; messages name `source`."""
    _check_are_tensors(model.graph, source)
    _check_types(model, source)
    _check_sizes(model, source)
    _check_updates(model, source)
    _check_flags(model, source)
    _check_functions(model, source)
    skeleton = _skeleton(model, source)
    try:
        onnx.checker.check_model(_without_external_data(skeleton))
    except _ONNX_ERRORS as error:
        raise InvalidModelError(f"{source}: not valid ONNX: {_one_line(error)}; export the model again") from None
    try:
        flat = onnx.inliner.inline_local_functions(skeleton)
        # without data_prop, shape inference allocates no data of the stated sizes
        _check_sizes(onnx.shape_inference.infer_shapes(flat), source)
        inferred = onnx.shape_inference.infer_shapes(flat, data_prop=True)
        _check_no_optional(inferred, source)
        _check_element_types(inferred.graph, opset_version(inferred), source)
        onnx.shape_inference.infer_shapes(_without_stated_shapes(flat), strict_mode=True, data_prop=True)
    except _ONNX_ERRORS as error:
        said = next((m for m in _RULE.findall(_one_line(error)) if not m[2].startswith("Inference")), None)
        what = f"{said[0]} '{said[1]}' breaks a rule of ONNX: {said[2]}" if said else _one_line(error)
        raise InvalidModelError(f"{source}: {what}; export the model again") from None


def _check_sizes(model: ModelProto, source: str) -> None:
    """Refuse lists and stated sizes that would need far more memory than the data in the file."""
    for scope in iter_scopes(model):
        for info in (*(scope.input if isinstance(scope, GraphProto) else ()), *scope.value_info):
            shape = shape_of(info) or ()
            if len(shape) == 1 and isinstance(shape[0], int) and shape[0] > _MOST_NUMBERS:
                raise UnsupportedModelError(
                    f"{source}: '{info.name}' is a list of {shape[0]} numbers that are not in the file; the importer "
                    f"supports at most {_MOST_NUMBERS} such numbers: export the model with a symbolic or smaller size"
                )
        for node in scope.node:
            for a in node.attribute:
                if (count := max(len(a.ints), len(a.floats), len(a.strings))) > _MOST_LISTED:
                    raise UnsupportedModelError(
                        f"{source}: the attribute '{a.name}' of {describe(node)} lists {count} values; the importer "
                        f"supports at most {_MOST_LISTED}: export them as a tensor"
                    )


def _check_updates(model: ModelProto, source: str) -> None:
    """Refuse a TensorScatter below opset 24 (also in functions), or with an unknown mode."""
    for top, version in [(model.graph, opset_version(model)), *((f, opset_version(f)) for f in model.functions)]:
        for node in (node for node in all_nodes(top) if is_op(node, "TensorScatter")):
            if version is None or version < TENSOR_SCATTER_OPSET:
                raise InvalidModelError(
                    f"{source}: {describe(node)} needs opset {TENSOR_SCATTER_OPSET}, but the model imports opset "
                    f"{version or '(none)'}; export the model again with opset {TENSOR_SCATTER_OPSET} or newer"
                )
            mode = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "mode"), "linear")
            if mode not in ("linear", "circular"):
                raise InvalidModelError(
                    f"{source}: {describe(node)} has mode '{mode}'; ONNX defines only 'linear' and 'circular': export "
                    "the model again"
                )


def _check_flags(model: ModelProto, source: str) -> None:
    """Refuse flags of attention other than 0 and 1: ONNX Runtime 1.31.1 reads 5 as 0, ONNX's evaluator as 1."""
    for scope in iter_scopes(model):
        for node in scope.node:
            for attribute in node.attribute:
                if node.op_type in _FLAGGED and attribute.name in _FLAGS and attribute.i not in (0, 1):
                    raise InvalidModelError(
                        f"{source}: {describe(node)} has {attribute.name}={attribute.i}; this attribute must be 0 or "
                        "1: export the model again"
                    )


def _check_functions(model: ModelProto, source: str) -> None:
    """Refuse functions that call themselves, and functions that inlining would expand to too many nodes."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}

    def size(scope: Scope, callers: tuple[tuple[str, str, str], ...]) -> int:
        count = 0
        if len(callers) > _MOST_CALLS:
            raise UnsupportedModelError(
                f"{source}: its functions call each other more than {_MOST_CALLS} levels deep, starting at "
                f"'{callers[0][1]}'; export the model again with fewer levels"
            )
        for node in all_nodes(scope):
            name = (node.domain, node.op_type, node.overload)
            if name in callers:
                raise InvalidModelError(
                    f"{source}: the function '{name[1]}' calls itself; ONNX does not allow that: export the model again"
                )
            if name in functions and name not in sizes:
                sizes[name] = size(functions[name], (*callers, name))
            count += sizes.get(name, 1)
        return count

    if (nodes := size(model.graph, ())) > _MOST_NODES:
        raise UnsupportedModelError(
            f"{source}: inlining its functions gives {nodes} nodes; the importer supports at most {_MOST_NODES}"
        )


def _skeleton(model: ModelProto, source: str) -> ModelProto:
    """Return a copy of the model for ONNX's checker, with inputs instead of large initializers of the main graph."""
    skeleton = ModelProto(
        ir_version=model.ir_version,
        opset_import=model.opset_import,
        functions=model.functions,
        graph=GraphProto(name=model.graph.name, node=model.graph.node, output=model.graph.output),
    )
    graph = skeleton.graph
    graph.value_info.extend(model.graph.value_info)
    weights: dict[str, TensorProto] = {}
    inputs = {info.name: info for info in model.graph.input}
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            raise InvalidModelError(f"{source}: two initializers have the name '{tensor.name}'; export the model again")
        if tensor.name in inputs:
            _check_default(tensor, inputs[tensor.name], source)
            if any(isinstance(dim, str) for dim in shape_of(inputs[tensor.name]) or ()):
                continue  # the caller gives a value in each step, maybe of another shape
        weights[tensor.name] = tensor
        if _is_small(tensor):
            graph.initializer.append(tensor)
        else:
            dims = list(tensor.dims) if len(tensor.dims) != 1 or tensor.dims[0] <= _MOST_NUMBERS else [None]
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, dims))
    graph.input.extend(info for info in model.graph.input if info.name not in weights)
    for sparse in model.graph.sparse_initializer:
        info = onnx.helper.make_tensor_value_info(sparse.values.name, sparse.values.data_type, list(sparse.dims))
        graph.input.append(info)
    _move_foreign_ops(skeleton)
    return skeleton


def _check_default(tensor: TensorProto, info: ValueInfoProto, source: str) -> None:
    shape, elem_type = shape_of(info), elem_type_of(info)
    fits = shape is None or (
        len(shape) == len(tensor.dims)
        and all(isinstance(dim, str) or dim == size for dim, size in zip(shape, tensor.dims, strict=True))
    )
    if not fits or elem_type != tensor.data_type:
        declared = f"{dtype_name(elem_type)} {'' if shape is None else list(shape)}".rstrip()
        raise InvalidModelError(
            f"{source}: input '{tensor.name}' is declared {declared}, but its initializer is "
            f"{dtype_name(tensor.data_type)} {list(tensor.dims)}; export the model again"
        )


def _is_small(tensor: TensorProto) -> bool:
    size = byte_size(tensor)
    return tensor.data_location != TensorProto.EXTERNAL and size is not None and size <= _SMALL_BYTES


def _move_foreign_ops(skeleton: ModelProto) -> None:
    """Move operators that ONNX lacks, but exporters write in its domain, to a domain that the checker ignores."""
    for owner, top in [(skeleton, skeleton.graph), *((function, function) for function in skeleton.functions)]:
        nodes = [node for scope in nested_scopes(top) for node in scope.node]
        foreign = [n for n in nodes if n.domain in DEFAULT_DOMAINS and not onnx.defs.has(n.op_type)]
        for node in foreign:
            node.domain = _FOREIGN_DOMAIN
        if foreign:
            owner.opset_import.add(domain=_FOREIGN_DOMAIN, version=1)


def _without_stated_shapes(model: ModelProto) -> ModelProto:
    """Drop the shapes that the exporter stored for inner tensors, because some of these are wrong."""
    stated = {info.name: info for info in model.graph.value_info}
    foreign = [name for node in model.graph.node if node.domain not in DEFAULT_DOMAINS for name in node.output]
    replace_field(model.graph.value_info, [stated[name] for name in foreign if name in stated])
    return model


def _without_external_data(skeleton: ModelProto) -> ModelProto:
    """Return a copy whose external tensors are empty, because ONNX's checker would look for their files."""
    copy = copied(skeleton)
    for tensor in iter_tensors(copy):
        if tensor.data_location == TensorProto.EXTERNAL:
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            tensor.dims[:] = [0]
            tensor.raw_data = b""
    return copy


def check_text(message: Message, source: str) -> None:
    """Refuse names with line breaks or control characters, and names that are not UTF-8 (protobuf returns bytes)."""
    # Access to the other fields of a tensor would copy its data.
    wanted = ("name", "doc_string", "external_data") if isinstance(message, TensorProto) else None
    fields = message.DESCRIPTOR.fields_by_name
    present = [(fields[name], getattr(message, name)) for name in wanted] if wanted else message.ListFields()
    for field, value in present:
        values: Iterable[Any] = (value,) if isinstance(value, (Message, str, bytes, int, float)) else value
        if field.cpp_type == field.CPPTYPE_MESSAGE:
            for child in values:
                check_text(child, source)
        elif field.type == field.TYPE_STRING:
            for text in values:
                if isinstance(text, bytes):
                    raise InvalidModelError(
                        f"{source}: a {field.name} is not UTF-8 text: {text[:40]!r}; export the model again"
                    )
                if field.name in _NAMES and (unnatural := _UNNATURAL.search(text)):
                    raise InvalidModelError(
                        f"{source}: the name {text[:80]!a} has the control character or line break {unnatural[0]!a}, "
                        "which messages, logs and TensorRT's layer names cannot show; rename it and export the model "
                        "again"
                    )


def _check_are_tensors(graph: GraphProto, source: str) -> None:
    """Refuse inputs and outputs that are not tensors, or that have sizes too large for an engine."""
    for info in (*graph.input, *graph.output):
        kind = info.type.WhichOneof("value")
        if kind not in (None, "tensor_type"):
            raise UnsupportedModelError(
                f"{source}: '{info.name}' is of type {kind.removesuffix('_type')}; inputs and outputs must be tensors: "
                "export each cache as a separate input and output"
            )
        sizes = [size for size in shape_of(info) or () if isinstance(size, int) and not 0 <= size < _SIZES]
        if sizes:
            raise UnsupportedModelError(
                f"{source}: '{info.name}' has an axis of size {sizes[0]}; sizes must be 0 to {_SIZES - 1}, because "
                "engines store them in 32 bits: export it with such sizes, or with a symbol"
            )


def _check_no_optional(model: ModelProto, source: str) -> None:
    """Refuse operators of optional values (ONNX type optional), even if ONNX cannot infer their types."""
    names = [n.output[0] for top in (model.graph, *model.functions) for n in all_nodes(top) if is_op(n, "Optional")]
    names += [i.name for s in iter_scopes(model) for i in s.value_info if i.type.WhichOneof("value") == "optional_type"]
    if names:
        raise UnsupportedModelError(
            f"{source}: '{names[0]}' is of type optional; the importer supports only tensors: export the model without "
            "optional values"
        )


def _check_types(model: ModelProto, source: str) -> None:
    """Refuse element types that ONNX does not define. ONNX's checker accepts them."""
    for scope in iter_scopes(model):
        inputs_outputs = (*scope.input, *scope.output) if isinstance(scope, GraphProto) else ()
        for info in (*inputs_outputs, *scope.value_info):
            if elem_type_of(info) not in TensorProto.DataType.values():
                raise InvalidModelError(
                    f"{source}: '{info.name}' has element type {elem_type_of(info)}, which ONNX does not define; "
                    "export the model again"
                )
        types = set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
        for node in (node for node in scope.node if is_op(node, "Cast")):
            for a in node.attribute:  # in a function, the caller may give the attribute
                if a.name == "to" and not a.ref_attr_name and a.i not in types:
                    raise InvalidModelError(
                        f"{source}: {describe(node)} casts to element type {a.i}, which ONNX does not define; "
                        "export the model again"
                    )


def _check_element_types(graph: GraphProto, version: int | None, source: str) -> None:
    """Refuse element types that contradict each other: ONNX's checker accepts them, ONNX Runtime cannot load them.

    onnxconverter-common (1.16) and tools built on it state float16 for a Cast to float32, or add float32 to float16.
    """
    is_quantized = any("QuantizeLinear" in n.op_type or n.domain == "trt" for n in graph.node)
    advice = _QUANTIZED_ADVICE if is_quantized else _TYPE_ADVICE
    infos = (*graph.value_info, *graph.output, *graph.input)
    types = {info.name: kind for info in infos if (kind := elem_type_of(info))}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        to = int_attribute(node, "to") if is_op(node, "Cast") else 0
        stated = types.get(node.output[0], to) if to else 0
        if to != stated:
            raise InvalidModelError(
                f"{source}: {describe(node)} casts to {dtype_name(to)}, but the model states {dtype_name(stated)} for "
                f"its result; {advice}"
            )
        for first, other in _operands(node, version):
            one, two = types.get(first, 0), types.get(other, 0)
            if one and two and one != two:
                whose = "ONNX" if node.domain in DEFAULT_DOMAINS else "ONNX Runtime"
                raise InvalidModelError(
                    f"{source}: {describe(node)} reads '{first}' of {dtype_name(one)} and '{other}' of "
                    f"{dtype_name(two)}, but {whose} requires the same type for both; {advice}"
                )


def _operands(node: NodeProto, version: int | None) -> Iterator[tuple[str, str]]:
    if node.domain == "com.microsoft":
        names = [node.input[i] for i in _FUSED.get(node.op_type, ()) if i < len(node.input) and node.input[i]]
        yield from ((names[0], name) for name in names[1:])
        return
    if version is None or node.domain not in DEFAULT_DOMAINS or not onnx.defs.has(node.op_type, version, ""):
        return
    formal = onnx.defs.get_schema(node.op_type, version, "").inputs
    firsts: dict[str, str] = {}
    for index, name in enumerate(node.input):
        what = formal[min(index, len(formal) - 1)] if formal else None
        if what is None or not name or not what.is_homogeneous or "(" in what.type_str:
            continue
        yield firsts.setdefault(what.type_str, name), name


def _one_line(error: Exception) -> str:
    """Return ONNX's message without line breaks and without the dump of the node at its end."""
    return " ".join(str(error).split("\n\n==> Context")[0].split()).rstrip(".")


_BROUGHT = {"TensorScatter": (0, 2), "Attention": (4, 5, 6)}
"""Indices of inputs that need a value in each step: a cache, its write indices, its valid lengths."""


def drop_defaults(graph: GraphProto, named: Iterable[NamePattern] = ()) -> bool:
    """Remove, in place, default values of inputs that the caller gives in each step; True if the graph changed.

    Such inputs are caches, write indices, lengths, inputs with a symbolic dimension or a name that shows a role.
    `named` are name patterns of the caller, in addition to the shipped ones.
    """
    patterns = (*named, *shipped_patterns())
    brought = {
        name
        for node in graph.node
        for place, name in enumerate(node.input)
        if node.domain in DEFAULT_DOMAINS and place in _BROUGHT.get(node.op_type, ())
    }
    inputs = {value.name: shape_of(value) for value in graph.input}
    dropped = {
        tensor.name
        for tensor in graph.initializer
        if tensor.name in inputs
        and (
            tensor.name in brought
            or any(not isinstance(dim, int) for dim in inputs[tensor.name] or ())
            or any(pattern.matches(tensor.name, "input") for pattern in patterns)
        )
    }
    constants = [tensor for tensor in graph.initializer if tensor.name not in dropped]
    if dropped:
        replace_field(graph.initializer, constants)
    shapes = {tensor.name: tensor.dims for tensor in constants}
    bare = [value for value in graph.input if value.name in shapes and shape_of(value) is None]
    for value in bare:  # gets the shape of its default value
        shape = value.type.tensor_type.shape
        shape.SetInParent()  # also for shapes without axes
        shape.dim.extend(TensorShapeProto.Dimension(dim_value=size) for size in shapes[value.name])
    return bool(bare or dropped)
