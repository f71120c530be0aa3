"""Models that this package rewrote: they carry their plan, and are taken as they are.

`rewrite_model` writes the plan into the model's metadata, with a digest of the graph. Given again, such a model is not
analyzed a second time (its span inputs and masks would look like the model's own): the recorded plan is its plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import blake3
import msgspec
import onnx

from trt_kvcache.errors import InvalidModelError, OptionError
from trt_kvcache.importer.plan import CachePlan, Dim, PlanOptions
from trt_kvcache.importer.protos import dtype_name, elem_type_of, shape_of

PLAN_KEY = "trt_kvcache.plan"
DIGEST_KEY = "trt_kvcache.graph"
_SMALL = 1 << 14  # elements; larger tensors are weights, which an optimizer may replace without changing the plan


def record_plan(model: onnx.ModelProto, plan: CachePlan) -> None:
    """Write the plan that was followed, and a digest of the resulting graph, into the model's metadata."""
    model.metadata_props.add(key=PLAN_KEY, value=msgspec.json.encode(plan).decode())
    model.metadata_props.add(key=DIGEST_KEY, value=graph_digest(model))


def recorded_plan(model: onnx.ModelProto, options: PlanOptions) -> CachePlan | None:
    """The plan of a model that was already rewritten; None for any other model.

    Raises:
        InvalidModelError: the graph was changed since, or the record is unreadable.
        OptionError: `options` ask for something else than the model was rewritten for.
    """
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if PLAN_KEY not in metadata:
        return None
    again = "give the original model, or rewrite it again"
    try:
        plan = msgspec.json.decode(metadata[PLAN_KEY], type=CachePlan)
    except msgspec.MsgspecError as error:
        raise InvalidModelError(
            f"the model was rewritten by another version of trt_kvcache ({error}): {again}"
        ) from None
    if metadata.get(DIGEST_KEY) != graph_digest(model):
        raise InvalidModelError(f"the model was rewritten by trt_kvcache and its graph was changed since: {again}")
    _check_options(options, plan.options, "target")
    if why := misfit(model, plan):
        raise InvalidModelError(f"the model carries a plan that is not its own ({why}): {again}")
    return plan


def misfit(model: onnx.ModelProto, plan: CachePlan) -> str:
    """The first thing that a plan says otherwise than the rewritten model has it, in words; empty if there is none."""
    for io, values in (("input", model.graph.input), ("output", model.graph.output)):
        planned = {t.name: (t.dtype, t.shape) for t in plan.tensors if t.io == io}
        declared = {v.name: (dtype_name(elem_type_of(v)), shape_of(v)) for v in values}
        for name in dict.fromkeys((*planned, *declared)):
            wanted, found = planned.get(name), declared.get(name)
            if wanted is None or found is None:
                return f"{io} '{name}' is {'not in the plan' if wanted is None else 'missing'}"
            if wanted[0] != found[0] or not _fits(wanted[1], found[1]):
                return f"{io} '{name}' is {found[0]} {list(found[1] or '?')}, planned {wanted[0]} {list(wanted[1])}"
    makes = {name: node for node in model.graph.node for name in node.output}
    shapes = {v.name: shape_of(v) for v in model.graph.input}
    for cache in plan.caches:
        node, shape = makes.get(cache.present), shapes.get(cache.past, cache.physical_shape)
        if node is None or (cache.in_place and cache.past not in node.input):
            return f"no node makes '{cache.present}' of '{cache.past}'"
        if (
            not _fits(cache.physical_shape, shape)
            or cache.physical_shape[cache.physical_sequence_axis] != cache.capacity
        ):
            return f"the cache '{cache.past}' is planned {list(cache.physical_shape)}, with {cache.capacity} rows"
    return ""


def _fits(planned: Sequence[Dim], declared: Sequence[Dim] | None) -> bool:
    """True if both have one rank, and no two sizes that differ."""
    return (
        declared is not None
        and len(planned) == len(declared)
        and not any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(planned, declared, strict=True)
        )
    )


def recorded_options(model: onnx.ModelProto, options: PlanOptions, path: Path) -> PlanOptions:
    """The options that a model says it was rewritten with. Nothing else of its record is read.

    Args:
        model: the rewritten model.
        options: of the caller. Limits of the check and the file of patterns are always the caller's.
        path: of the model, for messages.

    Raises:
        InvalidModelError: the model has no record, or it is unreadable.
        OptionError: `options` ask for something else.
    """
    record = next((entry.value for entry in model.metadata_props if entry.key == PLAN_KEY), None)
    if record is None:
        raise InvalidModelError(
            f"{path}: carries no record of the options that it was rewritten with; give a file that 'rewrite' wrote"
        )
    try:
        made = msgspec.json.decode(record, type=_Record).options
    except (msgspec.MsgspecError, OptionError) as error:
        raise InvalidModelError(f"{path}: its record of options cannot be read ({error}): rewrite it again") from None
    if made.config is not None and options.config is None:
        raise OptionError(f"{path}: was rewritten with a file of patterns for roles; give the same one (--config)")
    own = {name: getattr(options, name) for name in ("config", "check_seconds", "check_memory")}
    made = dataclasses.replace(made, **own)
    _check_options(options, made)
    return made


def check_same_interface(found: onnx.ModelProto, fresh: onnx.ModelProto, path: Path, source: Path) -> None:
    """Refuses a rewritten model that takes or gives something else than a fresh rewrite of its source.

    Args:
        found: the rewritten model.
        fresh: its source, rewritten with the same options.
        path: of the rewritten model, for messages.
        source: path of its source, for messages.

    Raises:
        InvalidModelError: an input, an output or a function differs.
    """
    again = "it was made of another model or by another version, or was changed since: rewrite it again"
    written = {f.SerializeToString(deterministic=True) for f in fresh.functions}
    for function in found.functions:
        if function.SerializeToString(deterministic=True) not in written:
            raise InvalidModelError(f"{path}: defines {function.name} otherwise than a rewrite of {source}; {again}")
    for io in ("input", "output"):
        sides = [{v.name: _type(v) for v in getattr(m.graph, io)} for m in (fresh, found)]
        for name in dict.fromkeys((*sides[0], *sides[1])):
            wanted, given = (side.get(name, "missing") for side in sides)
            if wanted != given:
                raise InvalidModelError(
                    f"{path}: {io} '{name}' is {given}, and {wanted} in a rewrite of {source} with the options "
                    f"recorded; {again}"
                )


class _Record(msgspec.Struct):
    options: PlanOptions


def _check_options(asked: PlanOptions, made: PlanOptions, *exact: str) -> None:
    """Refuses options that a model was not rewritten with; defaults ask for nothing, but for the `exact` ones."""
    default = PlanOptions()
    for field in dataclasses.fields(PlanOptions):
        if field.name.startswith("check_"):  # limits of the check, which the model has passed
            continue
        wanted, had = getattr(asked, field.name), getattr(made, field.name)
        if wanted != had and (field.name in exact or wanted != getattr(default, field.name)):
            raise OptionError(
                f"the model was already rewritten with {field.name} {_text(had)}, and {_text(wanted)} is asked for: "
                "give the original model to change that"
            )


def _type(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    return f"{onnx.TensorProto.DataType.Name(kind.elem_type).lower()}{dims}"


def graph_digest(model: onnx.ModelProto) -> str:
    """BLAKE3 (hex) of everything that the plan depends on: nodes, inputs, outputs, functions and small constants."""
    digest = blake3.blake3()
    for item in (*model.graph.node, *model.graph.input, *model.graph.output, *model.functions, *model.opset_import):
        digest.update(item.SerializeToString(deterministic=True))
    for tensor in model.graph.initializer:
        small = tensor.data_location != onnx.TensorProto.EXTERNAL and math.prod(tensor.dims) < _SMALL
        digest.update(
            tensor.SerializeToString(deterministic=True)
            if small
            else f"{tensor.name}:{tensor.data_type}:{list(tensor.dims)}".encode()
        )
    return digest.hexdigest()


def _text(value: object) -> str:
    return str(getattr(value, "value", value))
