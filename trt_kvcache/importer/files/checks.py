"""The rules that a graph must keep to before anything is planned: those of ONNX, and those of TensorScatter.

Weights are left out of every check: large initializers are replaced by typed inputs, so the checks cost what the graph
costs. Shapes come from ONNX's own shape inference, through If and Loop bodies and model-local functions.

Rules of TensorScatter: https://onnx.ai/onnx/operators/onnx__TensorScatter.html
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

import numpy.typing as npt
import onnx
import onnx.inliner
from google.protobuf.message import Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.files.element_types import check_element_types
from trt_kvcache.importer.protos import (
    DEFAULT_DOMAINS,
    Shape,
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


def check_graph(model: ModelProto, source: str) -> None:
    """Check a model that may lack its external data.

    Args:
        model: is not changed.
        source: the file's name, for messages.

    Raises:
        InvalidModelError: a rule is broken; the message names the node.
    """
    _check_text(model, source)
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
        inferred = onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(skeleton), data_prop=True)
    except _ONNX_ERRORS as error:
        raise InvalidModelError(
            f"{source}: shape inference fails: {_one_line(error)}; export the model again"
        ) from None
    _check_moves(inferred.graph, source)
    _check_scatters(inferred.graph, {}, source)
    check_element_types(inferred.graph, opset_version(inferred), source)


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


def _check_text(message: Message, source: str) -> None:
    """Refuse names that are not UTF-8, which protobuf hands out as bytes, or that would break a line of text."""
    # Looking at a tensor's other fields would copy its data.
    wanted = ("name", "doc_string", "external_data") if isinstance(message, TensorProto) else None
    fields = message.DESCRIPTOR.fields_by_name
    present = [(fields[name], getattr(message, name)) for name in wanted] if wanted else message.ListFields()
    for field, value in present:
        values = value if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else (value,)
        if field.cpp_type == field.CPPTYPE_MESSAGE:
            for child in values:
                _check_text(child, source)
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


def _check_moves(graph: GraphProto, source: str) -> None:
    """Refuse a Transpose or Slice whose constant operands are none, which ONNX's checker lets pass.

        Transpose(x [B, N, P, H]; perm=[0, -1, 1, 3])        Slice(x, starts [0], ends [4], axes [])

    No engine runs them, and a cache that is followed through one would get a wrong axis. Bodies of control flow are not
    looked at.
    """
    infos = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    ranks = {name: len(shape) for name, value in infos.items() if (shape := shape_of(value)) is not None}
    ranks |= {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    known = _constants(graph)
    for node in graph.node:
        rank = ranks.get(node.input[0]) if node.input else None
        wrong = ""
        if is_op(node, "Transpose"):
            wrong = _wrong_perm(node, rank)
        elif is_op(node, "Slice"):
            wrong = _wrong_bounds(node, rank, known)
        if wrong:
            of = "" if rank is None else f" of '{node.input[0]}', which has {rank} axes,"
            raise InvalidModelError(f"{source}: {describe(node)}{of} has {wrong}; export the model again")


def _constants(graph: GraphProto) -> dict[str, npt.NDArray[Any]]:
    """Integer constants by name."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if is_op(node, "Constant"):
            found.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    integers = {n: t for n, t in found.items() if t.data_type in (TensorProto.INT64, TensorProto.INT32)}
    return {n: numpy_helper.to_array(t) for n, t in integers.items() if t.data_location != TensorProto.EXTERNAL}


def _wrong_perm(node: NodeProto, rank: int | None) -> str:
    perm = next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
    is_legal = sorted(perm) == list(range(len(perm) if rank is None else rank))
    return "" if not perm or is_legal else f"the perm {perm}, which is none"


def _wrong_bounds(node: NodeProto, rank: int | None, known: Mapping[str, npt.NDArray[Any]]) -> str:
    names = [name for name in node.input[1:5] if name]
    bounds = [known[name] for name in names if name in known]
    if any(numbers.ndim != 1 for numbers in bounds) or len({numbers.size for numbers in bounds}) > 1:
        return f"operands of the shapes {', '.join(str(list(n.shape)) for n in bounds)}; they are one list of as many"
    axes = known.get(node.input[3]) if len(node.input) > 3 else None
    if axes is not None and rank is not None and any(not -rank <= axis < rank for axis in axes.tolist()):
        return f"the axes {axes.tolist()}"
    return ""


def _check_scatters(graph: GraphProto, outer: dict[str, ValueInfoProto], source: str) -> None:
    """Check every TensorScatter of a graph and of the bodies in it; `outer` are the values that it may read."""
    infos = {**outer, **{info.name: info for info in (*graph.value_info, *graph.output, *graph.input)}}
    for tensor in graph.initializer:
        infos[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
    for node in graph.node:
        if is_op(node, "TensorScatter"):
            _check_scatter(node, infos, f"{source}: {describe(node)}")
        for attribute in node.attribute:
            for body in attribute_graphs(attribute):
                _check_scatters(body, infos, source)


def _check_scatter(node: NodeProto, infos: dict[str, ValueInfoProto], where: str) -> None:
    """Check one TensorScatter as far as its shapes and dtypes are known."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    mode = attributes["mode"].s.decode(errors="replace") if "mode" in attributes else "linear"
    axis = attributes["axis"].i if "axis" in attributes else -2
    if mode not in ("linear", "circular"):
        raise InvalidModelError(f"{where} has mode '{mode}'; ONNX defines 'linear' and 'circular'")
    past, update, present = (infos.get(name) for name in (node.input[0], node.input[1], node.output[0]))
    _check_same_type(past, update, where)
    past_shape, update_shape = shape_of(past), shape_of(update)
    known = past_shape if past_shape is not None else update_shape
    if axis == 0 or (known is not None and not -len(known) < axis < len(known)):
        rank = "" if known is None else f" on a cache of rank {len(known)} (shape {_show(known)})"
        legal = "" if known is None else f" {-len(known) + 1} to {len(known) - 1} except 0"
        raise InvalidModelError(f"{where} has axis {axis}{rank}; legal are{legal or ' all axes but 0, the batch'}")
    if past_shape is not None and update_shape is not None:
        _check_update_shape(past_shape, update_shape, axis, where)
    present_shape = shape_of(present)
    if past_shape is not None and present_shape is not None and not _may_be_equal(past_shape, present_shape):
        raise InvalidModelError(
            f"{where} makes a cache of shape {_show(present_shape)} from one of shape {_show(past_shape)}; "
            "both must be equal"
        )
    if len(node.input) > 2 and node.input[2]:
        _check_write_indices(infos.get(node.input[2]), known, where)


def _check_same_type(past: ValueInfoProto | None, update: ValueInfoProto | None, where: str) -> None:
    types = [elem_type_of(info) for info in (past, update)]
    if TensorProto.UNDEFINED not in types and types[0] != types[1]:
        raise InvalidModelError(
            f"{where} writes a {dtype_name(types[1])} update into a {dtype_name(types[0])} cache; cast the update first"
        )


def _check_update_shape(past: Shape, update: Shape, axis: int, where: str) -> None:
    axis %= len(past)
    if len(past) != len(update):
        raise InvalidModelError(
            f"{where} writes an update of rank {len(update)} (shape {_show(update)}) into a cache of rank {len(past)} "
            f"(shape {_show(past)}); both need one rank"
        )
    for i, (size, written) in enumerate(zip(past, update, strict=True)):
        if i != axis and not _may_be_equal((size,), (written,)):
            raise InvalidModelError(
                f"{where} writes an update of shape {_show(update)} into a cache of shape {_show(past)}: they differ "
                f"on axis {i}; they may differ only on the sequence axis {axis}"
            )
    length, capacity = update[axis], past[axis]
    if isinstance(length, int) and isinstance(capacity, int) and length > capacity:
        raise InvalidModelError(
            f"{where} writes an update of {length} tokens into a cache of {capacity}; "
            "enlarge the cache or shorten the update"
        )


def _check_write_indices(indices: ValueInfoProto | None, cache: Shape | None, where: str) -> None:
    elem_type, shape = elem_type_of(indices), shape_of(indices)
    if elem_type not in (TensorProto.UNDEFINED, TensorProto.INT64):
        raise InvalidModelError(
            f"{where} has {dtype_name(elem_type)} write_indices; ONNX defines int64: cast them first"
        )
    if shape is not None and (len(shape) != 1 or (cache is not None and not _may_be_equal(shape, cache[:1]))):
        wanted = "[batch]" if cache is None else _show(cache[:1])
        raise InvalidModelError(
            f"{where} has write_indices of shape {_show(shape)}; one index per row is needed: {wanted}"
        )


def _may_be_equal(one: Shape, other: Shape) -> bool:
    """Whether no two sizes that are known differ."""
    sizes = zip(one, other, strict=False)
    return len(one) == len(other) and all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in sizes)


def _show(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _one_line(error: Exception) -> str:
    """ONNX's words without line breaks and without the dump of the node that follows them."""
    return " ".join(str(error).split("\n\n==> Context")[0].split()).rstrip(".")
