"""Run models as they are and as rewritten, and build the rewritten ones: what the conformance tests and grids share."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import trt
from builder import build_in_child
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.cache_plan import CacheUpdate, PhysicalLayout, PlanOptions

Array = NDArray[np.generic]
Feeds = dict[str, Array]

_ORT_OPSET = 26
_NOT_IN_ORT = {TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.FLOAT4E2M1}


def imported(model: onnx.ModelProto, folder: Path, options: PlanOptions | None = None) -> ImportedModel:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return import_model(path, options or PlanOptions())


def run(model: onnx.ModelProto, feeds: Feeds) -> Feeds:
    """All outputs, from ONNX Runtime where it knows the opset and the types, else from the ONNX reference."""
    types = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    opset = max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    names = [value.name for value in model.graph.output]
    if types & _NOT_IN_ORT or opset > _ORT_OPSET:
        # It computes masked rows as -inf minus -inf before they are replaced, and numpy says so.
        with np.errstate(invalid="ignore", over="ignore"):
            return dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))
    return dict(zip(names, _session(model.SerializeToString()).run(None, feeds), strict=True))


@lru_cache(maxsize=4)
def _session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])


@lru_cache(maxsize=4)
def _check_standard(model: bytes) -> None:
    onnx.checker.check_model(model, full_check=True)


def run_rewritten(result: ImportedModel, feeds: Feeds) -> Feeds:
    """Outputs of the rewritten model, for feeds and with caches in the original's layout; spans are the capacity."""
    _check_standard(result.model.SerializeToString())
    inputs = {value.name: value for value in result.model.graph.input}
    physical = dict(feeds)
    for span in result.plan.spans:
        physical[span.name] = np.arange(span.capacity, dtype=np.int64)
    if result.plan.logits_span is not None:
        physical[result.plan.logits_span.name] = np.arange(64)  # more than a step has: of all
    for cache in result.plan.caches:
        if cache.past in feeds:
            physical[cache.past] = to_physical(cache, feeds[cache.past])
    assert set(physical) == set(inputs), "the rewritten model has the original's inputs and the spans"
    for name, array in physical.items():
        check_shape(inputs[name], array)
    outputs = run(result.model, physical)
    for cache in result.plan.caches:
        if cache.present in outputs:
            outputs[cache.present] = to_logical(cache, outputs[cache.present])
    return outputs


def check_shape(value: onnx.ValueInfoProto, array: Array) -> None:
    """The array has the type and the fixed dimensions that the model declares."""
    tensor = value.type.tensor_type
    assert len(tensor.shape.dim) == array.ndim, value.name
    for dim, size in zip(tensor.shape.dim, array.shape, strict=True):
        assert not dim.HasField("dim_value") or dim.dim_value == size, (value.name, array.shape)
    assert helper.tensor_dtype_to_np_dtype(tensor.elem_type) == array.dtype, value.name


def to_physical(cache: CacheUpdate, array: Array) -> Array:
    """A cache as the model sees it, in the layout of the engine."""
    if cache.layout is PhysicalLayout.AS_IS:
        return array
    if cache.layout is PhysicalLayout.VIEW:
        axis = cache.sequence_axis
        before, after = array.shape[1:axis], array.shape[axis + 1 :]
        return array.reshape(array.shape[0], int(np.prod(before)), array.shape[axis], int(np.prod(after)))
    heads, size = cache.physical_shape[1], cache.physical_shape[3]
    assert isinstance(heads, int)
    assert isinstance(size, int)
    return array.reshape(array.shape[0], array.shape[1], heads, size).transpose(0, 2, 1, 3).copy()


def to_logical(cache: CacheUpdate, array: Array) -> Array:
    shape = [array.shape[0], *cache.logical_shape[1:]]
    if cache.layout is PhysicalLayout.HEADS_MAJOR:
        array = array.transpose(0, 2, 1, 3)
    return array.reshape([size if isinstance(size, int) else -1 for size in shape])


def ranges_of(result: ImportedModel) -> dict[str, tuple[int, int, int]]:
    """(min, opt, max) of every symbol of the rewritten model's inputs, from what the plan says each axis is."""
    capacity = min((cache.capacity for cache in result.plan.caches), default=4)
    known = {
        "batch": (1, 2, 4),
        "batch+1": (2, 3, 5),
        "sequence": (1, min(2, capacity), min(4, capacity)),
        "kept": (1, 1, min(2, capacity)),
        "tokens": (1, 2, 4),
    }
    ranges: dict[str, tuple[int, int, int]] = {}
    for tensor in result.plan.tensors:
        if tensor.io != "input":
            continue
        for dim, axis in zip(tensor.shape, tensor.axes, strict=True):
            if not isinstance(dim, str):
                continue
            if axis in known:
                ranges[dim] = known[axis]
            elif axis in ("span", "keys"):
                longest = next((s.capacity for s in result.plan.spans if s.name == tensor.name), capacity)
                ranges[dim] = (1, max(1, longest // 2), longest)
    return ranges


def build(result: ImportedModel, extra: Mapping[str, tuple[int, int, int]] | None = None) -> trt.Outcome:
    """Build the rewritten model as the engine does: parse, patch the network, a profile for prefill, one for decode."""
    path = str(result.source.path.with_name("rewritten.onnx"))
    prefill = {**ranges_of(result), **(extra or {})}
    single = symbols_of(result, "sequence") | symbols_of(result, "kept")
    decode = {**prefill, **dict.fromkeys(single, (1, 1, 1))}
    profiles = [prefill] if decode == prefill else [prefill, decode]
    return build_in_child(result.model.SerializeToString(), profiles, path, result.plan)


def symbols_of(result: ImportedModel, axis: str) -> set[str]:
    """The symbols of the input dimensions that the plan names `axis`."""
    pairs = [pair for t in result.plan.tensors if t.io == "input" for pair in zip(t.shape, t.axes, strict=True)]
    return {dim for dim, name in pairs if isinstance(dim, str) and name == axis}


def random_array(rng: np.random.Generator, dtype: int, shape: Sequence[int], scale: float = 1.0) -> Array:
    """Random values of an ONNX type: integers over a small range, floats from a normal distribution."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    if dtype == TensorProto.BOOL:
        return rng.random(shape) < 0.5
    if np.issubdtype(kind, np.integer):
        return rng.integers(0, 100, shape).astype(kind)
    return (rng.standard_normal(shape) * scale).astype(kind)


def shape_of(value: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> list[int]:
    """The declared shape with symbols replaced; a symbol of digits is its own size."""
    shape = []
    for dim in value.type.tensor_type.shape.dim:
        if dim.HasField("dim_value"):
            shape.append(dim.dim_value)
        else:
            shape.append(int(dim.dim_param) if dim.dim_param.isdigit() else sizes[dim.dim_param])
    return shape


def random_feeds(model: onnx.ModelProto, sizes: Mapping[str, int], rng: np.random.Generator) -> Feeds:
    """Random values for every input."""
    feeds = {}
    for value in model.graph.input:
        dtype = value.type.tensor_type.elem_type
        feeds[value.name] = random_array(rng, dtype, shape_of(value, sizes))
    return feeds
