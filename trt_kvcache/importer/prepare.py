"""Brings a model into the form that planning needs: fixed capacity, no functions, named nodes, known shapes.

In the canonical form, TensorScatter nodes update caches, and Attention nodes read them; see `emit`. Empty placeholders
replace large weights inside the file (`detach_weights`). So the time for copies, shape inference and edits does not
depend on the size of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import OptionError
from trt_kvcache.importer import families
from trt_kvcache.importer.cache_plan import CachePlan, InterfaceChange, PlanOptions, Sliding
from trt_kvcache.importer.emit.canonical_nodes import Canonical, Findings
from trt_kvcache.importer.emit.computed_keys import Computed
from trt_kvcache.importer.emit.past_lengths import NOTE, check_readers, drop_copies, free_positions, free_shapes
from trt_kvcache.importer.emit.ring_windows import Rings, make_circular, slide
from trt_kvcache.importer.files.model_folder import USUAL
from trt_kvcache.importer.graph import INT32, INT64, consumers, contains, elem_type, tidy
from trt_kvcache.importer.interface.exported_interface import PASSED_ON, find_changes, in_words
from trt_kvcache.importer.operators import MOVES
from trt_kvcache.importer.protos import TENSORRT_UPDATE, copied, elem_type_of, int_attribute, is_op, shape_of
from trt_kvcache.importer.recognize import Recognized, recognize
from trt_kvcache.importer.recognize.records import Attention
from trt_kvcache.importer.recognize.sample_steps import Samples
from trt_kvcache.importer.simplify import infer_shapes, inline_functions, name_nodes, simplify
from trt_kvcache.importer.weights import STAND_IN, detached

_FLOAT16, _BFLOAT16 = int(onnx.TensorProto.FLOAT16), int(onnx.TensorProto.BFLOAT16)
_MOST_TOKENS = 1 << 24  # models may compute with positions in float32, which cannot hold all larger integers exactly
_INLINE_LIMIT = 1024  # elements; smaller initializers may be shapes or axes, and get no placeholder


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be planned: without functions, with a fixed capacity, and caches as TensorScatter.

    Attributes:
        reference: the exported model with inlined functions, to check the rewrite. Large weights are placeholders.
        options: the caller's options, with the capacity filled in if the model does not fix it.
        model: the model to edit. Its large inline weights are placeholders until `attach_weights`.
        weights: the weights that are placeholders in `model`, by name, not copied.
        inlined: names of functions and control-flow nodes that were inlined.
        findings: facts about the replaced cache updates and attentions; empty if none was replaced.
        finishes: functions that add facts about earlier edits, such as removed inputs, to the finished plan.
    """

    reference: onnx.ModelProto
    options: PlanOptions
    model: onnx.ModelProto
    weights: dict[str, onnx.TensorProto]
    inlined: tuple[str, ...]
    findings: Findings
    finishes: tuple[Callable[[CachePlan], CachePlan], ...]


def prepare(source: onnx.ModelProto, options: PlanOptions, usual: int = USUAL, folder: Path | None = None) -> Prepared:
    """Copy a model, inline functions, write caches with TensorScatter, and fix capacity and shapes.

    `usual` is the capacity if neither the options nor the model give one. Raises `UnsupportedModelError` if a cache has
    an unsupported form, or is in a body of an If, Loop or Scan; `OptionError` if the capacity contradicts the model.
    """
    asked = options.capacity or usual
    if asked > _MOST_TOKENS:
        raise OptionError(f"--capacity is {asked}; it must be at most {_MOST_TOKENS} tokens")
    model, weights = detach_weights(source)
    fix_digit_dims(model.graph)
    model, chosen = families.choose(model)
    if chosen:  # now the main graph also has the weights of the chosen branch
        model, more = detach_weights(model)
        weights |= more
    model, functions = inline_functions(model)
    name_nodes(model.graph)
    reference = copied(model)
    model, branches = flatten(model)
    notes = _doubles(model.graph)
    model, finishes = families.rewrite(model)
    model, recognized = normalize(model, weights, options, usual, folder)
    if recognized is not None:
        name_nodes(model.graph)
    # `normalize` has already checked the capacity. Circular caches may be shorter.
    bound = bind_capacity(model.graph, options.capacity, usual, fits=recognized is not None)
    findings = recognized or Findings()
    options = replace(options, capacity=options.capacity or findings.capacity or bound)
    changes = (*findings.changes, *_without_passed_on(model.graph))
    idioms = {name: operator for name, operator in _writers(reference.graph).items() if name in findings.written}
    findings = replace(findings, notes=(*notes, *findings.notes), changes=changes, idioms=idioms)
    return Prepared(
        reference, options, infer_shapes(model), weights, (*functions, *branches), findings, (*finishes, *chosen)
    )


def _writers(graph: onnx.GraphProto) -> dict[str, str]:
    """Map each tensor to the operator that computes it, skipping casts and operators that only change a layout."""
    found: dict[str, str] = {}
    for node in graph.node:
        moves = node.op_type in ("Cast", "Identity", "Transpose", "Reshape")
        found |= dict.fromkeys(node.output, found.get(node.input[0], node.op_type) if moves else node.op_type)
    return found


def flatten(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return a model without functions, of opset 24 or later, and names of inlined functions and branches."""
    model, inlined = simplify(model)
    families.standardize(model)
    return model, inlined


def _without_passed_on(graph: onnx.GraphProto) -> list[InterfaceChange]:
    """Remove outputs that are also inputs, because TensorRT's parser would rename the inputs. Return the changes."""
    inputs = {v.name for v in graph.input}
    passed_on = [v for v in graph.output if v.name in inputs]
    for value in passed_on:
        graph.output.remove(value)
    return [InterfaceChange("output", in_words(v.name, shape_of(v) or ()), "", PASSED_ON) for v in passed_on]


def _doubles(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Return notes about operators that compute in double. TensorRT uses float32 silently (measured, RTX 1.7.1)."""
    double = {v.name for v in graph.value_info if elem_type_of(v) == onnx.TensorProto.DOUBLE}
    nodes = [n for n in graph.node if n.op_type not in ("Cast", *MOVES) and not double.isdisjoint(n.output)]
    if not nodes:
        return ()
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return (
        f"the exported model computes {nodes[0].op_type} '{nodes[0].name}'{more} in double, but here the type is "
        "float32, because TensorRT does not support double; this rounds each number by at most 0.000006 %, and numbers "
        "must not exceed 3.4e38",
    )


def detach_weights(source: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """Return a copy of `source` with placeholders for large inline initializers, and these initializers by name."""
    model = onnx.ModelProto(**{field.name: value for field, value in source.ListFields() if field.name != "graph"})
    fields = {field.name: value for field, value in source.graph.ListFields() if field.name != "initializer"}
    model.graph.CopyFrom(onnx.GraphProto(**fields))
    weights: dict[str, onnx.TensorProto] = {}
    for tensor in source.graph.initializer:
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if external or math.prod(tensor.dims) <= _INLINE_LIMIT:  # ByteSize would serialize the tensor
            model.graph.initializer.append(tensor)
            continue
        weights[tensor.name] = tensor
        model.graph.initializer.append(_stand_in(tensor))
    return model, weights


def _stand_in(tensor: onnx.TensorProto) -> onnx.TensorProto:
    empty = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    empty.data_location = onnx.TensorProto.EXTERNAL
    empty.external_data.add(key="location", value=STAND_IN)
    return empty


def attach_weights(model: onnx.ModelProto, weights: dict[str, onnx.TensorProto]) -> None:
    """Replace placeholders by the weights of the same name, in place."""
    for tensor in model.graph.initializer:
        if (weight := detached(tensor, weights)) is not None:
            tensor.CopyFrom(weight)


def _dims(graph: onnx.GraphProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from value.type.tensor_type.shape.dim


def fix_digit_dims(graph: onnx.GraphProto) -> None:
    """Replace symbols such as ``"2"`` with numbers, in place, because TensorRT would treat such sizes as dynamic."""
    for dim in _dims(graph):
        if dim.HasField("dim_param") and dim.dim_param.strip().isdigit():
            dim.dim_value = int(dim.dim_param.strip())


def bind_capacity(graph: onnx.GraphProto, wanted: int | None, usual: int, *, fits: bool = False) -> int | None:
    """Give every cache a fixed length, in place, because TensorRT needs one.

    The length is `wanted` or, if None, `usual`, in tokens per sequence. Return the length if it replaced a symbolic
    length; else None. Raises `OptionError` if the model fixes another length than `wanted`, unless `fits`.
    """
    capacity = wanted or usual
    values = {value.name: value.type.tensor_type.shape.dim for value in (*graph.output, *graph.input)}
    fixed: set[int] = set()
    symbolic: list[str] = []
    for node in graph.node:
        if not is_op(node, "TensorScatter") and node.op_type != TENSORRT_UPDATE:
            continue
        axis = int_attribute(node, "axis", -2) if node.op_type == "TensorScatter" else -2
        for shape in (values.get(name, ()) for name in (node.input[0], node.output[0])):
            if not -len(shape) <= axis < len(shape):
                continue
            dim = shape[axis]
            if dim.HasField("dim_value"):
                fixed.add(dim.dim_value)
            else:
                symbolic.append(dim.dim_param)
                if not dim.dim_param:
                    dim.dim_value = capacity
    if wanted is not None and not symbolic and fixed and fixed != {wanted} and not fits:
        raise OptionError(
            f"--capacity is {wanted}, but the model fixes its cache length at {', '.join(map(str, sorted(fixed)))}: "
            "leave the option out, or export with a symbolic length"
        )
    symbols = {symbol for symbol in symbolic if symbol}
    for dim in _dims(graph):
        if dim.HasField("dim_param") and dim.dim_param in symbols:
            dim.dim_value = capacity
    return capacity if symbolic else None


def normalize(
    model: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    options: PlanOptions,
    usual: int,
    folder: Path | None,
) -> tuple[onnx.ModelProto, Findings | None]:
    """Return the model with caches as TensorScatter, and `Findings`; the same model and None if nothing changes.

    `model` has no functions, but named nodes, and is not changed; `weights` are the tensors for its placeholders.
    `usual` is the capacity if neither the options nor the model give one. Raises `UnsupportedModelError` for an
    unsupported cache or attention, and `OptionError` if the capacity contradicts the model.
    """
    if any(node.op_type in ("TensorScatter", "TRT_KVCacheUpdate") for node in model.graph.node):
        return slide(model, options, usual) if options.sliding is Sliding.CIRCULAR else (model, None)
    recognized = recognize(model, weights, options, usual, folder)
    return (model, None) if recognized is None else canonical_form(recognized, options)


def canonical_form(recognized: Recognized, options: PlanOptions) -> tuple[onnx.ModelProto, Findings]:
    """Write caches as TensorScatter, and attentions as Attention; remove operators that only the old caches needed."""
    graph, interface, samples = recognized.graph, recognized.interface, recognized.samples
    tokens = next(t for t in graph.inputs if t.name == interface.tokens)
    canonical = Canonical(graph, tokens, recognized.caches[0].past, samples.capacity)
    sources = [c for a in recognized.attentions for c in a.computed_from]
    computed = Computed(graph, sources, samples) if sources else None
    for cache in recognized.caches:
        canonical.write(cache)
    for attention in recognized.attentions:
        canonical.attend(
            attention if computed is None or not attention.computed_from else computed.place(attention, canonical)
        )
    counts, copies = _drop_counts(graph, samples), drop_copies(graph)
    tidy(graph)
    check_readers(graph)
    free_shapes(graph, canonical.emit, interface, samples)
    tidy(graph, sort=False)
    by_tokens = free_positions(graph, canonical, interface, samples)  # sorts the graph
    rings = Rings({}, ())
    if options.sliding is Sliding.CIRCULAR:
        rings = make_circular(graph, canonical.emit, samples.capacity, options.window_chunk)
    # Drop inputs that nothing reads any more: only the exported caches needed them.
    graph.inputs = [t for t in graph.inputs if consumers(t) or contains(graph.outputs, t) or t is tokens]

    model: onnx.ModelProto = gs.export_onnx(graph)
    del model.graph.value_info[:]
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = max(opset.version, canonical.opset)
    model.ir_version = max(recognized.model.ir_version, 10)
    for name, (kind, shape) in canonical.known.items():
        named = [None if d == "?" else d for d in shape]
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, named))
    shifted = {
        a.mask.own.name: a.key.window_rows for a in recognized.attentions if a.key.shifted and a.mask.own is not None
    }
    tensors = tuple(replace(t, window_rows=shifted.get(t.name, t.window_rows)) for t in interface.tensors)
    changes = find_changes(tensors, model, counts, copies)
    notes = (
        *_own_masks(recognized.attentions),
        *_narrower(recognized.attentions),
        *((NOTE,) if by_tokens else ()),
        *rings.notes,
    )
    roles = (*interface.roles, *canonical.added)
    open_capacity = None if interface.fixed_capacity(options.capacity) else samples.capacity
    return model, Findings(
        canonical.written, {}, changes, tensors, roles, interface.states, notes, rings.longest, open_capacity
    )


def _own_masks(attentions: Sequence[Attention]) -> list[str]:
    own = [a.mask.own for a in attentions if not a.key.shifted]
    names = dict.fromkeys(mask.name for mask in own if mask is not None)
    return [
        f"the mask '{name}' remains an input: a session fills it with a causal mask. If the model was trained with a "
        "window, only this mask can apply the window"
        for name in names
    ]


def _narrower(attentions: Sequence[Attention]) -> list[str]:
    """Return a note if the rewrite computes float32 attention weights in the narrower type of the caches."""
    kinds = {elem_type(a.key.past) for a in attentions if a.wide_weights and not a.wide}
    return [
        f"the attention weights (results of softmax) are float32 in the exported model, but {name} here, which rounds "
        f"each weight by at most {share} %; products of queries and keys keep their types"
        for kind, name, share in ((_FLOAT16, "float16", "0.05"), (_BFLOAT16, "bfloat16", "0.4"))
        if kind in kinds
    ]


def _drop_counts(graph: gs.Graph, samples: Samples) -> set[str]:
    """Remove outputs that return the number of tokens, which callers know. Return the names of the outputs."""

    def counts(tensor: gs.Tensor) -> bool:
        values = [(step, step.probe.value(tensor.name)) for step in samples.plain]
        return all(value is not None and bool((value == step.total).all()) for step, value in values)

    counters = {str(t.name) for t in graph.outputs if elem_type(t) in (INT32, INT64) and counts(t)}
    graph.outputs = [t for t in graph.outputs if t.name not in counters]
    return counters
