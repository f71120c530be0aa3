"""The rules that a graph must keep to before anything is planned: those of ONNX, and those of TensorScatter.

Weights are left out of every check: large initializers are replaced by typed inputs, so the checks cost what the graph
costs. Shapes come from ONNX's own shape inference, through If and Loop bodies and model-local functions.

Rules of TensorScatter: https://onnx.ai/onnx/operators/onnx__TensorScatter.html
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping

import onnx
import onnx.inliner
from google.protobuf.message import Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.files.element_types import check_element_types
from trt_kvcache.importer.protos import (
    DEFAULT_DOMAINS,
    attribute_graphs,
    byte_size,
    describe,
    dtype_name,
    elem_type_of,
    is_op,
    iter_scopes,
    iter_tensors,
    nested_scopes,
    opset_version,
    shape_of,
)

TENSOR_SCATTER_OPSET = 24
_FOREIGN_DOMAIN = "trt_kvcache.foreign"
_KEPT_BYTES = 1024  # constants up to this size are kept: shape inference reads shapes from them
_NAMES = {"name", "input", "output", "op_type", "domain", "dim_param"}
_FLAGGED = {"Attention", "GroupQueryAttention", "MultiHeadAttention", "RotaryEmbedding"}
_FLAGS = {
    "is_causal", "causal", "unidirectional", "do_rotary", "rotary_interleaved", "interleaved", "is_packed_batching",
    "sliding_window_cache",
}  # fmt: skip
_ONNX_ERRORS = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    RuntimeError,
    ValueError,
)


_RULE = re.compile(r"\(op_type:(\w+)(?:, node name: ([^)]*))?\): \[\w+\] (.+?)(?= \(op_type:|$)")
"""In the words of ONNX's shape inference: operator, node, rule."""


def check_graph(model: ModelProto, source: str) -> None:
    """Check a model that may lack its external data.

    Args:
        model: is not changed.
        source: the file's name, for messages.

    Raises:
        InvalidModelError: a rule is broken; the message names the node.
    """
    _check_are_tensors(model.graph, source)
    _check_types(model, source)
    _check_opset(model, source)
    _check_flags(model, source)
    skeleton = _skeleton(model, source)
    try:
        onnx.checker.check_model(_without_external_data(skeleton))
    except _ONNX_ERRORS as error:
        raise InvalidModelError(f"{source}: not valid ONNX: {_one_line(error)}; export the model again") from None
    try:
        flat = onnx.inliner.inline_local_functions(skeleton)
        inferred = onnx.shape_inference.infer_shapes(flat, data_prop=True)
        check_element_types(inferred.graph, opset_version(inferred), source)
        _check_scatters(inferred.graph, {}, source)
        onnx.shape_inference.infer_shapes(_without_stated_shapes(flat), strict_mode=True, data_prop=True)
    except _ONNX_ERRORS as error:
        said = next((m for m in _RULE.findall(_one_line(error)) if not m[2].startswith("Inference")), None)
        what = f"{said[0]} '{said[1]}' breaks a rule of ONNX: {said[2]}" if said else _one_line(error)
        raise InvalidModelError(f"{source}: {what}; export the model again") from None


def _check_opset(model: ModelProto, source: str) -> None:
    """TensorScatter exists from opset 24 on; a function may import another version than the model does."""
    for top, version in [(model.graph, opset_version(model)), *((f, opset_version(f)) for f in model.functions)]:
        for node in (node for scope in nested_scopes(top) for node in scope.node):
            if is_op(node, "TensorScatter") and (version is None or version < TENSOR_SCATTER_OPSET):
                raise InvalidModelError(
                    f"{source}: {describe(node)} needs opset {TENSOR_SCATTER_OPSET}, but the model imports opset "
                    f"{version or '(none)'}; export it again with opset {TENSOR_SCATTER_OPSET} or newer"
                )


def _check_flags(model: ModelProto, source: str) -> None:
    """Refuse flags of attention that are neither 0 nor 1.

    Measured: ONNX Runtime 1.31.1 takes is_causal=5 as 0, ONNX's reference evaluator as 1.
    """
    for scope in iter_scopes(model):
        for node in scope.node:
            for attribute in node.attribute:
                if node.op_type in _FLAGGED and attribute.name in _FLAGS and attribute.i not in (0, 1):
                    raise InvalidModelError(
                        f"{source}: {describe(node)} has {attribute.name}={attribute.i}; it is a flag, 0 or 1: export "
                        "the model again"
                    )


def _skeleton(model: ModelProto, source: str) -> ModelProto:
    """The model without the data of its main graph's large tensors: they become typed inputs."""
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
            raise InvalidModelError(f"{source}: two initializers are named '{tensor.name}'; export the model again")
        if tensor.name in inputs:
            _check_default(tensor, inputs[tensor.name], source)
            if any(isinstance(dim, str) for dim in shape_of(inputs[tensor.name]) or ()):
                continue  # a step brings other numbers, of another shape
        weights[tensor.name] = tensor
        if _is_small(tensor):
            graph.initializer.append(tensor)
        else:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    graph.input.extend(info for info in model.graph.input if info.name not in weights)
    for sparse in model.graph.sparse_initializer:
        info = onnx.helper.make_tensor_value_info(sparse.values.name, sparse.values.data_type, list(sparse.dims))
        graph.input.append(info)
    _set_foreign_ops_apart(skeleton)
    return skeleton


def _check_default(tensor: TensorProto, info: ValueInfoProto, source: str) -> None:
    """Refuse an initializer that the input of its name could not take: some of what reads them reads the one."""
    shape, elem_type = shape_of(info), elem_type_of(info)
    fits = shape is None or (
        len(shape) == len(tensor.dims)
        and all(isinstance(dim, str) or dim == size for dim, size in zip(shape, tensor.dims, strict=True))
    )
    if not fits or elem_type != tensor.data_type:
        declared = f"{dtype_name(elem_type)} {'' if shape is None else list(shape)}".rstrip()
        raise InvalidModelError(
            f"{source}: input '{tensor.name}' is declared {declared}, and its initializer is "
            f"{dtype_name(tensor.data_type)} {list(tensor.dims)}; export the model again"
        )


def _is_small(tensor: TensorProto) -> bool:
    """Whether the data are inside the model and few."""
    try:
        size = byte_size(tensor)
    except ValueError:
        return True  # the checker words what is wrong
    return tensor.data_location != TensorProto.EXTERNAL and size is not None and size <= _KEPT_BYTES


def _set_foreign_ops_apart(skeleton: ModelProto) -> None:
    """Give operators that ONNX does not define a domain of their own, where the checker lets them be.

    TensorRT's parser and ONNX Runtime look up some of their own operators in ONNX's domain (``TRT_KVCacheUpdate``,
    ``SimplifiedLayerNormalization``), and exporters write them so. An operator that nobody knows is refused there.
    """
    for owner, top in [(skeleton, skeleton.graph), *((function, function) for function in skeleton.functions)]:
        nodes = [node for scope in nested_scopes(top) for node in scope.node]
        foreign = [n for n in nodes if n.domain in DEFAULT_DOMAINS and not onnx.defs.has(n.op_type)]
        for node in foreign:
            node.domain = _FOREIGN_DOMAIN
        if foreign:
            owner.opset_import.add(domain=_FOREIGN_DOMAIN, version=1)


def _without_stated_shapes(model: ModelProto) -> ModelProto:
    """The same, with shapes inside of it for operators of other domains alone: exporters state some wrongly."""
    stated = {info.name: info for info in model.graph.value_info}
    foreign = [name for node in model.graph.node if node.domain not in DEFAULT_DOMAINS for name in node.output]
    del model.graph.value_info[:]
    model.graph.value_info.extend(stated[name] for name in foreign if name in stated)
    return model


def _without_external_data(skeleton: ModelProto) -> ModelProto:
    """A copy whose external tensors are empty: the checker would look for their files in the working directory."""
    copy = ModelProto()
    copy.CopyFrom(skeleton)
    for tensor in iter_tensors(copy):
        if tensor.data_location == TensorProto.EXTERNAL:
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            tensor.dims[:] = [0]
            tensor.raw_data = b""
    return copy


def check_text(message: Message, source: str) -> None:
    """Refuse names that are not UTF-8, which protobuf hands out as bytes, or that would break a line of text."""
    # Looking at a tensor's other fields would copy its data.
    wanted = ("name", "doc_string", "external_data") if isinstance(message, TensorProto) else None
    fields = message.DESCRIPTOR.fields_by_name
    present = [(fields[name], getattr(message, name)) for name in wanted] if wanted else message.ListFields()
    for field, value in present:
        values = value if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else (value,)
        if field.cpp_type == field.CPPTYPE_MESSAGE:
            for child in values:
                check_text(child, source)
        elif field.type == field.TYPE_STRING and any(isinstance(text, bytes) for text in values):
            bad = next(text for text in values if isinstance(text, bytes))
            raise InvalidModelError(f"{source}: a {field.name} in it is not text: {bad[:40]!r}; export the model again")
        elif field.name in _NAMES:
            for text in values:
                if unnatural := [c for c in text if unicodedata.category(c) in ("Cc", "Zl", "Zp")]:
                    raise InvalidModelError(
                        f"{source}: the name {text[:80]!a} has the control character or line break {unnatural[0]!a}, "
                        "which messages, logs and TensorRT's layer names cannot show; rename it, and export again"
                    )


def _check_are_tensors(graph: GraphProto, source: str) -> None:
    """Refuse inputs and outputs that are sequences, maps or optional."""
    for info in (*graph.input, *graph.output):
        kind = info.type.WhichOneof("value")
        if kind not in (None, "tensor_type"):
            raise UnsupportedModelError(
                f"{source}: '{info.name}' is of type {kind.removesuffix('_type')}; supported are inputs and outputs "
                "that are tensors: export each cache as an input and an output of its own"
            )


def _check_types(model: ModelProto, source: str) -> None:
    """Refuse element types that ONNX does not define; its checker lets them pass."""
    for scope in iter_scopes(model):
        inputs_outputs = (*scope.input, *scope.output) if isinstance(scope, GraphProto) else ()
        for info in (*inputs_outputs, *scope.value_info):
            if elem_type_of(info) not in TensorProto.DataType.values():
                raise InvalidModelError(
                    f"{source}: '{info.name}' has element type {elem_type_of(info)}, which ONNX does not define; "
                    "export the model again"
                )
        for node in scope.node:
            for attribute in node.attribute:
                if is_op(node, "Cast") and attribute.name == "to" and not _is_elem_type(attribute):
                    raise InvalidModelError(
                        f"{source}: {describe(node)} casts to element type {attribute.i}, which ONNX does not define; "
                        "export the model again"
                    )


def _is_elem_type(attribute: AttributeProto) -> bool:
    """Whether an attribute is an element type that tensors have; one that a function's caller gives may be."""
    types = set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
    return bool(attribute.ref_attr_name) or attribute.i in types


def _check_scatters(graph: GraphProto, infos: Mapping[str, ValueInfoProto], source: str) -> None:
    """Refuse what ONNX's own inference does not see of a TensorScatter, in bodies of control flow, too."""
    infos = {**infos, **{info.name: info for info in (*graph.value_info, *graph.output, *graph.input)}}
    for node in graph.node:
        if is_op(node, "TensorScatter"):
            _check_scatter(node, infos, f"{source}: {describe(node)}")
        for attribute in node.attribute:
            for body in attribute_graphs(attribute):
                _check_scatters(body, infos, source)


def _check_scatter(node: NodeProto, infos: Mapping[str, ValueInfoProto], where: str) -> None:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    mode = attributes["mode"].s.decode(errors="replace") if "mode" in attributes else "linear"
    axis = attributes["axis"].i if "axis" in attributes else -2
    if mode not in ("linear", "circular"):
        raise InvalidModelError(f"{where} has mode '{mode}'; ONNX defines 'linear' and 'circular'")
    past, update = (shape_of(infos.get(name)) for name in node.input[:2])
    if past is None or update is None or not -min(len(past), len(update)) <= axis < min(len(past), len(update)):
        return
    length, capacity = update[axis], past[axis]
    if isinstance(length, int) and isinstance(capacity, int) and length > capacity:
        raise InvalidModelError(
            f"{where} writes an update of {length} tokens into a cache of {capacity}; "
            "enlarge the cache or shorten the update"
        )


def _one_line(error: Exception) -> str:
    """ONNX's words without line breaks and without the dump of the node that follows them."""
    return " ".join(str(error).split("\n\n==> Context")[0].split()).rstrip(".")
