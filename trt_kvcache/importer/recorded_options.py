"""Records the options of a rewrite in the rewritten file, and recognizes such files.

A rewritten file is made for TensorRT and other runtimes, and cannot be planned again. To get its plan, this package
plans the source again with the options in the metadata. `verify` can compare both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import msgspec
import onnx

from trt_kvcache.arguments import shown
from trt_kvcache.errors import InvalidModelError, OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, Dim, PlanOptions
from trt_kvcache.importer.protos import dtype_name, elem_type_of, shape_of

_RECORD = "trt_kvcache.options"
_TAIL = 1 << 16  # bytes
_KEYS = (_RECORD, "trt_kvcache.plan")  # the second key: older versions stored the plan


def record_options(model: onnx.ModelProto, options: PlanOptions) -> None:
    """Write the options with which a model was rewritten into the metadata of the model."""
    model.metadata_props.add(key=_RECORD, value=msgspec.json.encode(options).decode())


def refuse_rewritten(model: onnx.ModelProto, path: Path) -> None:
    """Raise `UnsupportedModelError` if the metadata say that the model was rewritten before."""
    if any(entry.key in _KEYS for entry in model.metadata_props):
        raise UnsupportedModelError(
            f"{path}: was rewritten by trt_kvcache already, for TensorRT and other runtimes; give the model that it "
            f"was made from, and compare the two with 'verify MODEL --rewritten {path.name}'"
        )


def was_rewritten(path: Path) -> bool:
    """True if the metadata at the end of a model file say that trt_kvcache rewrote the model."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return _RECORD.encode() in file.read()


def misfit(model: onnx.ModelProto, plan: CachePlan) -> str:
    """Describe the first difference between the inputs and outputs of a plan and of a model; empty if equal."""
    for io, values in (("input", model.graph.input), ("output", model.graph.output)):
        planned = {t.name: (t.dtype, t.shape) for t in plan.tensors if t.io == io}
        declared = {v.name: (dtype_name(elem_type_of(v)), shape_of(v)) for v in values}
        for name in dict.fromkeys((*planned, *declared)):
            wanted, actual = planned.get(name), declared.get(name)
            if wanted is None or actual is None:
                return f"{io} '{name}' is {'not in the plan' if wanted is None else 'missing'}"
            # a size that is dynamic in the plan, but fixed in the model: an engine would support only this size
            closed = io == "input" and any(
                isinstance(b, int) and not isinstance(a, int) and not a.isdecimal()
                for a, b in zip(wanted[1], actual[1] or (), strict=False)
            )
            if wanted[0] != actual[0] or closed or not _fits(wanted[1], actual[1]):
                return (
                    f"{io} '{name}' is {actual[0]} {list(actual[1] or '?')}, but the plan says {wanted[0]} "
                    f"{list(wanted[1])}"
                )
    makes = {name: node for node in model.graph.node for name in node.output}
    shapes = {v.name: shape_of(v) for v in model.graph.input}
    for cache in plan.caches:
        node, shape = makes.get(cache.present), shapes.get(cache.past, cache.physical_shape)
        if node is None or (cache.in_place and cache.past not in node.input):
            return f"no node computes '{cache.present}' from '{cache.past}'"
        if (
            not _fits(cache.physical_shape, shape)
            or cache.physical_shape[cache.physical_sequence_axis] != cache.capacity
        ):
            return (
                f"the plan says that the cache '{cache.past}' has the shape {list(cache.physical_shape)} and "
                f"{cache.capacity} rows"
            )
    return ""


def _fits(planned: Sequence[Dim], declared: Sequence[Dim] | None) -> bool:
    if declared is None or len(planned) != len(declared):
        return False
    return all(a == b for a, b in zip(planned, declared, strict=True) if isinstance(a, int) and isinstance(b, int))


def recorded_options(model: onnx.ModelProto, options: PlanOptions, path: Path) -> PlanOptions:
    """Return the options in a rewritten model's metadata, but with the limits and name patterns of `options`."""
    record = next((entry.value for entry in model.metadata_props if entry.key == _RECORD), None)
    if record is None:
        raise InvalidModelError(
            f"{path}: the file does not record the options of a rewrite; give a file that 'rewrite' wrote"
        )
    try:
        recorded = msgspec.json.decode(record, type=PlanOptions)
    except (msgspec.MsgspecError, RecursionError, OptionError) as error:
        raise InvalidModelError(
            f"{path}: its record of options cannot be read ({error}): rewrite the model again"
        ) from None
    if recorded.config is not None and options.config is None:
        raise OptionError(f"{path}: was rewritten with a file of name patterns; give the same file with --config")
    own = {
        name: getattr(options, name) for name in ("config", "checkpoint", "check_seconds", "check_memory", "recheck")
    }
    recorded, default = dataclasses.replace(recorded, **own), PlanOptions()
    for field in dataclasses.fields(PlanOptions):
        wanted, had = getattr(options, field.name), getattr(recorded, field.name)
        if wanted not in (had, getattr(default, field.name)):
            raise OptionError(
                f"{path}: was rewritten with {field.name} {_text(had)}, but the option now is {_text(wanted)}: leave "
                "the option out, or rewrite the model again"
            )
    return recorded


def check_same_interface(rewritten: onnx.ModelProto, fresh: onnx.ModelProto, path: Path, source: Path) -> None:
    """Raise `InvalidModelError` if the interface of a rewritten model differs from a fresh rewrite of its source."""
    again = "the file was made from another model or by another version, or was changed later: rewrite the model again"
    written = {f.SerializeToString(deterministic=True) for f in fresh.functions}
    for function in rewritten.functions:
        if function.SerializeToString(deterministic=True) not in written:
            raise InvalidModelError(
                f"{path}: the function {function.name} differs from that in a rewrite of {source}; {again}"
            )
    for io in ("input", "output"):
        sides = [{v.name: _type(v) for v in getattr(m.graph, io)} for m in (fresh, rewritten)]
        for name in dict.fromkeys((*sides[0], *sides[1])):
            wanted, actual = (side.get(name, "missing") for side in sides)
            if wanted != actual:
                raise InvalidModelError(
                    f"{path}: {io} '{name}' is {actual}, but {wanted} in a rewrite of {source} with the recorded "
                    f"options; {again}"
                )


def _type(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    return f"{onnx.TensorProto.DataType.Name(kind.elem_type).lower()}{dims}"


def _text(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else shown(value)
