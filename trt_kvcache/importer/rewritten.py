"""Models that this package rewrote: they carry their plan, and are taken as they are.

`rewrite_model` writes the plan into the model's metadata, with a digest of the graph. Given again, such a model is not
analyzed a second time (its span inputs and masks would look like the model's own): the recorded plan is its plan.
"""

from __future__ import annotations

import dataclasses
import math

import blake3
import msgspec
import onnx

from trt_kvcache.errors import InvalidModelError, OptionError
from trt_kvcache.importer.plan import CachePlan, PlanOptions

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
    default = PlanOptions()
    for field in dataclasses.fields(PlanOptions):
        if field.name.startswith("check_"):  # limits of the check, which the model has passed
            continue
        asked, made = getattr(options, field.name), getattr(plan.options, field.name)
        if asked != made and (field.name == "target" or asked != getattr(default, field.name)):
            raise OptionError(
                f"the model was already rewritten with {field.name} {_text(made)}, and {_text(asked)} is asked for: "
                "give the original model to change that"
            )
    return plan


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
