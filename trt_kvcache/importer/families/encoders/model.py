"""Builds one encoder model for TensorRT, which computes a decoder's constants from a source (text, audio or image).

    encoder_model.onnx       source -> hidden
    decoder_model.onnx       hidden -> keys and values of every layer, and other outputs
    become one model         source -> the decoder's constants

Constants are decoder inputs that stay the same for a text, such as keys of cross-attention. The encoder model takes one
source at a time, without padding. Some exporters compute constants in the decoder's first step, which also takes token
ids. That step then becomes a part of the encoder model, and gets one id, 0. If constants depend on this id, the model
is refused.

`check_positions` checks that an encoder's tables have enough rows for the positions of a source, because TensorRT
returns arbitrary numbers, without an error, for a lookup after the end of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, Dim, PlanOptions, Role, TensorRole
from trt_kvcache.importer.families.encoders.outputs import (
    HIDDEN,
    IDS,
    MASK,
    EncoderParts,
    find_later,
    find_parts,
    keep_outputs,
    take_first_branch,
)
from trt_kvcache.importer.files.source import SourceModel, load_source
from trt_kvcache.importer.graph import Emitter, dims, dtype_name, elem_type, export_inferred, fold_identities
from trt_kvcache.importer.interface import table_rows
from trt_kvcache.importer.planning.attention_plans import analyze_attention
from trt_kvcache.importer.planning.cache_plans import check_dtypes
from trt_kvcache.importer.prepare import attach_weights, detach_weights, fix_digit_dims, flatten
from trt_kvcache.importer.protos import elem_type_of, int_attribute, is_op, names_read, shape_of
from trt_kvcache.importer.rewrite import rewrite_graph
from trt_kvcache.importer.simplify import drop_unused_outputs
from trt_kvcache.importer.steps.probe import Blueprint, Probe

_STEP = "first_step/"  # prefix of all names in a first step
_LENGTHS = (1, 2, 7, 64, 1000, 1001, 4000)  # lengths of sources to try; some encoders cannot run short sources
_ENOUGH = 3  # a size is constant if it is the same for at least this many lengths


@dataclass(frozen=True)
class EncoderModel:
    """An encoder whose outputs are the constant inputs of its decoder.

    Attributes:
        sources: the model files of the encoder and of the decoder's first step.
        plan: a plan without caches. Axes with the meaning ``"encoder"`` are as long as the encoder's output.
        model: the model for TensorRT. Paths of external data are relative to the folder of the first file in `sources`.
    """

    sources: tuple[SourceModel, ...]
    plan: CachePlan
    model: onnx.ModelProto


def import_encoder(
    path: Path, first_step: Path | None, constants: Sequence[TensorRole], options: PlanOptions
) -> EncoderModel:
    """Join an encoder and the decoder's first step, which computes keys and values, into one model.

    `first_step` is needed if the encoder itself does not compute keys and values. Of the decoder's `options`, only the
    target is used. Raises `InvalidModelError` or `UnsupportedModelError` if a file cannot be read, or if the models
    cannot compute all constants of the decoder.
    """
    source = load_source(path, first_step=True)
    parts = find_parts(constants, {v.name: len(shape_of(v) or ()) for v in source.proto.graph.output}, source.path)
    length = _length(source.proto.graph, parts, constants)
    model, weights = _standard(source.proto)
    sources, outputs = [source], dict(parts.own)
    if parts.rest:
        step = load_source(first_step, first_step=True) if first_step is not None else None
        names = [v.name for v in step.proto.graph.output] if step is not None else []
        later = find_later(parts.rest, names, source.path, first_step)
        assert step is not None
        if step.external_files and step.path.parent != source.path.parent:
            raise UnsupportedModelError(
                f"{source.path} and {step.path} are in different folders, and the second has weights in separate "
                "files; put all files of the export into one folder"
            )
        take_first_branch(step.proto.graph)
        keep_outputs(step.proto.graph, later.values())
        inputs = _check_inputs(step)
        onnx.compose.add_prefix(step.proto, _STEP, inplace=True)
        second, more = _standard(step.proto)
        _prefix_added(second.graph)
        _append(model, second, inputs, parts.hidden)
        weights |= more
        sources.append(step)
        outputs |= {name: _STEP + output for name, output in later.items()}
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model, data_prop=True))
    _give(graph, [t for t in constants if t not in parts.masks], outputs)
    for tensor in graph.inputs:
        tensor.shape = [1, *(tensor.shape or [])[1:]]
    model = export_inferred(graph.cleanup(remove_unused_graph_inputs=True).toposort())
    _fold_sizes(model, weights)
    graph = gs.import_onnx(model).cleanup(remove_unused_graph_inputs=True).toposort()
    plan = _plan(graph, constants, length, options)
    rewrite_graph(graph, plan)
    rewritten: onnx.ModelProto = gs.export_onnx(graph)
    del rewritten.graph.value_info[:]
    rewritten.ir_version = max(source.proto.ir_version, 10)
    attach_weights(rewritten, weights)
    return EncoderModel(tuple(sources), plan, rewritten)


def _length(graph: onnx.GraphProto, parts: EncoderParts, constants: Sequence[TensorRole]) -> Dim:
    shapes = {v.name: shape_of(v) or () for v in graph.output}
    places = [(parts.hidden, 1)] if parts.hidden else []
    places += [(parts.own[t.name], t.axes.index("encoder")) for t in constants
               if t.name in parts.own and "encoder" in t.axes]  # fmt: skip
    known = [shapes[name][axis] for name, axis in places if axis < len(shapes[name])]
    return next((d for d in known if d != "?"), "")


def _standard(source: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """Return a copy of opset 24 without functions, with placeholders for large weights, and these weights by name."""
    model, weights = detach_weights(source)
    fix_digit_dims(model.graph)
    model, _ = flatten(model)
    graph = gs.import_onnx(model)
    fold_identities(graph)
    model = export_inferred(graph.cleanup().toposort())
    drop_unused_outputs(model.graph)
    return model, weights


def _check_inputs(step: SourceModel) -> dict[str, int]:
    """Return element types of a first step's inputs, by name. Refuse inputs other than the encoder's output."""
    graph = step.proto.graph
    inputs = {v.name: elem_type_of(v) for v in graph.input}
    reads = next((f"'{name}'" for name in inputs if name not in (IDS, HIDDEN, MASK)), "")
    if not reads and IDS in inputs and IDS in _by_value(graph):
        reads = "the text"
    if reads:
        raise UnsupportedModelError(
            f"{step.path}: the encoder's keys and values depend on {reads}; they must depend only on the encoder's "
            "output. Compute them yourself, and give them as constants"
        )
    return inputs


def _prefix_added(step: onnx.GraphProto) -> None:
    def own(names: Iterable[str]) -> list[str]:
        return [name if not name or name.startswith(_STEP) else _STEP + name for name in names]

    for node in step.node:
        node.input[:], node.output[:] = own(node.input), own(node.output)
        (node.name,) = own([node.name])
    for tensor in (*step.initializer, *step.value_info):
        (tensor.name,) = own([tensor.name])


def _append(model: onnx.ModelProto, step: onnx.ModelProto, inputs: Mapping[str, int], hidden: str) -> None:
    """Append the decoder's first step to `model`. It reads the output `hidden`, the token 0 and a mask of ones."""
    graph, nodes = model.graph, []
    if HIDDEN in inputs:
        nodes.append(helper.make_node("Identity", [hidden], [_STEP + HIDDEN]))
    if IDS in inputs:
        graph.initializer.append(helper.make_tensor(_STEP + IDS, inputs[IDS], [1, 1], [0]))
    if MASK in inputs:
        one = helper.make_tensor("value", inputs[MASK], [1], [1])
        nodes.append(helper.make_node("Shape", [hidden], [_STEP + "lengths"], start=0, end=2))
        nodes.append(helper.make_node("ConstantOfShape", [_STEP + "lengths"], [_STEP + MASK], value=one))
    for index, node in enumerate(nodes):
        node.name = f"{_STEP}input_{index}"
    graph.node.extend([*nodes, *step.graph.node])
    graph.initializer.extend(step.graph.initializer)
    graph.output.extend(step.graph.output)
    known = {entry.domain for entry in model.opset_import}
    model.opset_import.extend(entry for entry in step.opset_import if entry.domain not in known)


def _by_value(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that affect the outputs by their values, not only by their shapes."""
    read = {v.name for v in graph.output}
    for node in reversed(graph.node):
        if read & {*node.output} and node.op_type not in ("Shape", "Size"):
            read |= names_read(node)
    return read


def _fold_sizes(model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
    """Fold Shape nodes of constant results, in place, so that nodes read only for their shapes can be removed."""
    graph, read = model.graph, _by_value(model.graph)
    alone = [n for n in graph.node if n.op_type == "Shape" and n.output[0] in read and n.input[0] not in read]
    blueprint = Blueprint(model, weights)
    inputs = {v.name: shape_of(v) or () for v in graph.input}
    probes = [
        Probe(blueprint, {name: tuple(d if isinstance(d, int) else n for d in s) for name, s in inputs.items()}, {})
        for n in _LENGTHS
    ]
    for node in alone:
        values = [value for probe in probes if (value := probe.value(node.output[0])) is not None]
        if len(values) >= _ENOUGH and all(np.array_equal(values[0], value) for value in values):
            graph.initializer.append(numpy_helper.from_array(values[0], node.output[0]))
            graph.node.remove(node)


def _give(graph: gs.Graph, constants: Sequence[TensorRole], outputs: dict[str, str]) -> None:
    emitter, tensors = Emitter(graph), graph.tensors()
    sources = {constant.name: tensors[outputs[constant.name]] for constant in constants}
    for name in sources:
        if name in tensors:
            tensors[name].name = emitter.name(name)
    graph.outputs.clear()
    for constant in constants:
        source = sources[constant.name]
        dtype = onnx.TensorProto.DataType.Value(constant.dtype.upper())
        attrs = {"to": dtype} if elem_type(source) != dtype else {}
        tensor = emitter.op("Cast" if attrs else "Identity", [source], "constant", dtype, **attrs)
        tensor.name, tensor.shape = constant.name, source.shape
        graph.outputs.append(tensor)


def _plan(graph: gs.Graph, constants: Sequence[TensorRole], length: Dim, options: PlanOptions) -> CachePlan:
    planned = analyze_attention(graph, (), options)
    axes = {t.name: t.axes for t in constants}
    for t in graph.inputs:
        axes[t.name] = tuple("" if isinstance(d, int) else "encoder" if d == length else "?" for d in dims(t) or ())
    tensors = [
        TensorRole(t.name, io, role, dtype_name(t), dims(t) or (), "graph", axes[t.name])
        for io, role, values in (("input", Role.OTHER, graph.inputs), ("output", Role.CONSTANT, graph.outputs))
        for t in values
    ]
    check_dtypes(tensors)
    computed = planned.attention, planned.masks, planned.spans
    return CachePlan(options, graph.opset, (), *computed, tuple(tensors), warnings=planned.warnings)


_IDS = (0, 1, 2, 3)
"""`check_positions` tries sources of one token id each. One of these ids is padding, whose positions differ."""

_PAIRS, _LARGEST = 1 << 20, 1 << 24
"""Limits on the number of indices. More than `_PAIRS` are relative positions, one for each pair of tokens.

`_LARGEST` is enough for the pairs of 4,096 tokens.
"""


def most_ids(model: onnx.ModelProto) -> int | None:
    """Return the number of valid token ids; None if no input indexes a table of known size."""
    rows = [table_rows(model, v.name) for v in model.graph.input if len(shape_of(v) or ()) == 2]
    return min((n for n in rows if n is not None), default=None)


def count_positions(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int]
) -> int | None:
    """Return the length of an encoder's output for given input shapes; None if unknown. `axes`: by output, its axis."""
    shell, weights = detach_weights(model)
    probe = Probe(Blueprint(shell, weights), shapes, {})
    counts = [shape[axis] for name, axis in axes.items() if (shape := probe.shape(name)) is not None]
    return max(counts, default=None)


def check_positions(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `OptionError` if a table has too few rows for the source, or if the source is too long to check."""
    shell, weights = detach_weights(model)
    blueprint = Blueprint(shell, weights)
    tables = {t.name: tuple(t.dims) for t in shell.graph.initializer}
    lookups = [n for n in shell.graph.node if is_op(n, "Gather") and n.input[0] in tables and n.input[1] not in tables]
    inputs = {v.name: v for v in shell.graph.input}
    for token in _IDS:
        values = {
            name: np.full(shape, 1 if "mask" in name else token, onnx.helper.tensor_dtype_to_np_dtype(kind))
            for name, shape in shapes.items()
            if "int" in onnx.TensorProto.DataType.Name(kind := inputs[name].type.tensor_type.elem_type).lower()
        }
        probe = Probe(blueprint, shapes, values)
        for node in lookups:
            table, index = node.input[:2]
            axis = int_attribute(node, "axis")
            count = prod(probe.shape(index) or (0,))
            if count > _PAIRS and token != _IDS[0]:
                continue
            rows = probe.value(index) if count <= _LARGEST else None
            if count <= _LARGEST and (rows is None or not rows.size or int(rows.max()) < tables[table][axis]):
                continue
            takes = f"reads {count} rows (too many to check)" if rows is None else f"reads row {int(rows.max())}"
            sizes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise OptionError(
                f"a source of {sizes} {takes} of '{table}', which has {tables[table][axis]} rows: allow only shorter "
                "sources (--max-encoder, --maxShapes)"
            )
