"""Checks the parsed network against the plan before the build: TensorRT ignores what it does not know."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trt_kvcache.errors import BuildError
from trt_kvcache.importer.plan import TENSORRT_DTYPES, CachePlan, Dim, Route, TensorRole


def check_network(network: Any, plan: CachePlan, trt: Any) -> None:
    """Compare the network's KV-cache layers, inputs and outputs with the plan's.

    Raises:
        BuildError: they differ; the engine would contradict its manifest.
    """
    _check_updates(network, plan, trt)
    _check_plugins(network, plan, trt)
    for io, count, tensor in (
        ("input", network.num_inputs, network.get_input),
        ("output", network.num_outputs, network.get_output),
    ):
        _check_tensors(io, [tensor(i) for i in range(count)], [t for t in plan.tensors if t.io == io])


def _check_updates(network: Any, plan: CachePlan, trt: Any) -> None:
    """Check that the KV-cache layers are the native updates, each from the cache's input to its output."""
    planned = Counter((c.past, c.present) for c in plan.caches if c.route is Route.NATIVE)
    parsed: Counter[tuple[str, str]] = Counter()
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            parsed[layer.get_input(0).name, layer.get_output(0).name] += 1
    if missing := planned - parsed:
        pairs = ", ".join(f"{past} -> {present}" for past, present in missing)
        raise BuildError(
            f"the parsed network has {parsed.total()} KV-cache layers, the plan {planned.total()}; missing: {pairs}. "
            "The engine would not update them in place; this is a fault in trt_kvcache, please report it with the model"
        )
    if surplus := parsed - planned:
        pairs = ", ".join(f"{past} -> {present}" for past, present in surplus)
        raise BuildError(
            f"the parsed network has KV-cache layers that are not in the plan: {pairs}. "
            "This is a fault in trt_kvcache, please report it with the model"
        )


def _check_plugins(network: Any, plan: CachePlan, trt: Any) -> None:
    """Check that every update by the plugin is a plugin layer from the cache's input to its output.

    If the parser does not find the plugin, it uses the node's definition in ONNX: correct, but with a copy.
    """
    planned = [(c.past, c.present) for c in plan.caches if c.route is Route.PLUGIN]
    if not planned:
        return
    parsed = set()
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.PLUGIN_V3:  # the caches come first among its inputs and outputs
            parsed |= {(layer.get_input(j).name, layer.get_output(j).name) for j in range(layer.num_outputs)}
    if missing := [pair for pair in planned if pair not in parsed]:
        pairs = ", ".join(f"{past} -> {present}" for past, present in missing)
        raise BuildError(
            f"the parsed network has no layer of the cache-update plugin for {pairs}. The engine would not update them "
            "in place; this is a fault in trt_kvcache, please report it with the model"
        )


def _check_tensors(io: str, parsed: list[Any], planned: list[TensorRole]) -> None:
    """Check names, dtypes and shapes of the network's inputs or outputs."""
    expected = {t.name: t for t in planned}
    names = [t.name for t in parsed]
    if set(names) != set(expected):
        raise BuildError(
            f"the parsed network's {io}s differ from the plan's: "
            f"missing {sorted(set(expected) - set(names))}, unknown {sorted(set(names) - set(expected))}"
        )
    for tensor in parsed:
        role = expected[tensor.name]
        dtype = tensor.dtype.name
        if dtype != TENSORRT_DTYPES.get(role.dtype):
            raise BuildError(f"TensorRT gives {io} {role.name!r} the dtype {dtype}, the model says {role.dtype}")
        if not _same_shape(tuple(tensor.shape), role.shape, exact=io == "input"):
            raise BuildError(
                f"TensorRT gives {io} {role.name!r} the shape {list(tensor.shape)}, the plan says {list(role.shape)}"
            )
        if io == "input" and tensor.is_shape_tensor:
            raise BuildError(
                f"input {role.name!r} decides shapes by its values (TensorRT reads it on the CPU before every step), "
                "which is not supported; export the model so that it takes this size from the shape of an input"
            )


def _same_shape(parsed: tuple[int, ...], planned: tuple[Dim, ...], *, exact: bool) -> bool:
    """Compare shapes. -1 is TensorRT's dynamic size; it may know more or less about an output than the model."""
    if len(parsed) != len(planned):
        return False
    for size, dim in zip(parsed, planned, strict=True):
        if isinstance(dim, int):
            if size != dim and (exact or size != -1):
                return False
        elif exact and size != -1:
            return False
    return True
