"""Choose the route of each cache update into the engine, with a reason. The decision uses facts only, not the graph.

The facts about TensorRT were measured on TensorRT for RTX 1.7.1 (the parser family of TensorRT 11); tests/facts pins
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import (
    TENSORRT_DTYPES,
    CacheUpdate,
    Fallback,
    PlanOptions,
    Route,
    Target,
    TensorRole,
    UpdateContract,
    UpdateForm,
    UpdateMode,
)

NATIVE_DTYPES = ("float", "float16", "bfloat16")
"""Types that IKVCacheUpdateLayer takes."""

PLAIN_DTYPES = (*NATIVE_DTYPES, "int8", "int32", "int64", "bool")
"""Types that TensorRT's scatter takes, for plain operators."""

PLUGIN_DTYPES = (*NATIVE_DTYPES, "int8", "int32", "int64", "float8e4m3fn", "int4", "float4e2m1")
"""Types that a plugin can write: neither bool nor uint8 (NvInferRuntime.h, IPluginV3OneBuild::getOutputDataTypes)."""


def decide(facts: CacheUpdate, obstacle: str, options: PlanOptions) -> CacheUpdate:
    """Add the route, its reason and its contract with the caller to an update.

    Args:
        facts: the update, without a route.
        obstacle: why past and present cannot share a buffer with any kernel; empty if they can.
        options: target and fallback.

    Raises:
        UnsupportedModelError: no route keeps the meaning on this target.
    """
    if obstacle:
        _check_dtype(facts, PLAIN_DTYPES)
        if facts.form is UpdateForm.PACKED_NHD:
            raise UnsupportedModelError(
                f"packed update '{facts.node}': {obstacle}; a packed update has no plain form: make the cache an "
                "input and its update an output of the model"
            )
        return _by(facts, Route.FUNCTIONAL, obstacle)
    if facts.form is UpdateForm.PACKED_NHD:
        return _packed(facts, options)
    if facts.dtype not in NATIVE_DTYPES:
        return _other_dtype(facts, options)
    if facts.mode is UpdateMode.LINEAR:
        return _by(facts, Route.NATIVE, "linear update")
    return _circular(facts, options)


def _by(update: CacheUpdate, route: Route, reason: str, contract: UpdateContract | None = None) -> CacheUpdate:
    return replace(update, route=route, reason=reason, contract=contract)


def without_plugin(caches: Iterable[CacheUpdate]) -> str:
    """Advice for a plan whose plugin cannot be compiled or registered: the other routes of `decide`."""
    needed = [c for c in caches if c.route is Route.PLUGIN]
    packed = [c for c in needed if c.form is UpdateForm.PACKED_NHD]
    if packed:
        known = all(c.mode is UpdateMode.LINEAR and c.dtype in NATIVE_DTYPES for c in packed)
        return (
            "without the plugin there is no way for its packed updates"
            + (" on TensorRT before 11.0, which does them itself" if known else "")
            + ": export with padded updates"
        )
    narrow = next((c for c in needed if c.dtype not in PLAIN_DTYPES), None)
    if narrow is not None:
        return (
            f"without the plugin there is no way for its {narrow.dtype} caches: export them as float16, bfloat16 or "
            "float32"
        )
    ways = "--fallback functional (plain operators, a copy of the cache per step)"
    if all(c.mode is UpdateMode.CIRCULAR and c.dtype in NATIVE_DTYPES for c in needed):
        ways = f"--fallback contract (in place, while no update straddles the wrap) or {ways}"
    return f"or do without the plugin: {ways}"


def _packed(facts: CacheUpdate, options: PlanOptions) -> CacheUpdate:
    _check_dtype(facts, NATIVE_DTYPES if options.target is Target.TENSORRT_RTX else PLUGIN_DTYPES)
    if facts.mode is UpdateMode.CIRCULAR:
        if options.target is Target.TENSORRT_RTX:
            raise UnsupportedModelError(
                f"packed update '{facts.node}' is circular; TensorRT for RTX writes packed updates linearly, and only "
                "TensorRT can do this one, by the plugin: plan for TensorRT, or export with padded updates"
            )
        return _by(facts, Route.PLUGIN, "circular packed update, which IKVCacheUpdateLayer does not know")
    if options.packed_native and facts.dtype in NATIVE_DTYPES:
        return _by(facts, Route.NATIVE, "packed update, native from TensorRT 11.0 on and on TensorRT for RTX")
    return _by(facts, Route.PLUGIN, "packed update, which TensorRT before 11.0 does not know")


def _other_dtype(facts: CacheUpdate, options: PlanOptions) -> CacheUpdate:
    why = f"IKVCacheUpdateLayer holds float32, float16 and bfloat16, not {facts.dtype}"
    plugin = options.target is Target.TENSORRT and options.fallback is Fallback.AUTO
    if plugin and (facts.dtype in PLUGIN_DTYPES or facts.dtype not in PLAIN_DTYPES):
        _check_dtype(facts, PLUGIN_DTYPES)
        return _by(facts, Route.PLUGIN, why)
    _check_dtype(facts, PLAIN_DTYPES)
    return _by(facts, Route.FUNCTIONAL, why)


def _circular(facts: CacheUpdate, options: PlanOptions) -> CacheUpdate:
    if facts.update_length == 1:
        return _by(facts, Route.NATIVE, "circular update of one token: linear at write index mod capacity")
    if not facts.write_indices is not None:
        return _by(facts, Route.NATIVE, "circular update from index 0 never wraps: linear")
    if options.fallback is Fallback.FUNCTIONAL:
        return _by(facts, Route.FUNCTIONAL, "circular update of several tokens, with plain operators as asked")
    if options.fallback is Fallback.AUTO and options.target is Target.TENSORRT:
        return _by(facts, Route.PLUGIN, "circular update of several tokens, which IKVCacheUpdateLayer does not know")
    length = facts.update_length if isinstance(facts.update_length, int) else None
    if length is not None and facts.capacity % length:
        why = f"circular updates of {length} tokens each straddle the end of {facts.capacity} rows: plain operators"
        return _by(facts, Route.FUNCTIONAL, why)
    return _by(
        facts,
        Route.NATIVE,
        "circular update of several tokens: linear at write index mod capacity, under the contract that no update "
        "straddles the wrap",
        UpdateContract(no_straddle=True, max_update_length=length),
    )


def _check_dtype(facts: CacheUpdate, supported: tuple[str, ...]) -> None:
    if facts.dtype in supported:
        return
    extra = ""
    if facts.dtype == "double":
        extra = " (TensorRT's parser would silently narrow it to float32)"
    raise UnsupportedModelError(
        f"cache '{facts.past}' of update '{facts.node}' is {facts.dtype}, which this target cannot hold{extra}; it can "
        f"hold {', '.join(supported)}: export the cache as float16, bfloat16 or float32"
    )


def check_dtypes(tensors: Iterable[TensorRole]) -> None:
    """Refuse inputs and outputs of dtypes that TensorRT engines do not support.

    TensorRT turns double into float32 without a message. For other types its error names no tensor (measured on
    TensorRT for RTX 1.7.1).
    """
    for tensor in tensors:
        if tensor.dtype not in TENSORRT_DTYPES:
            raise UnsupportedModelError(
                f"{tensor.io} '{tensor.name}' is {tensor.dtype}, which no TensorRT engine has; supported are "
                f"{', '.join(TENSORRT_DTYPES)}: export it in one of these"
            )
