"""Builds in a child process: a model that crashes TensorRT must fail one test, not end the test run."""

import atexit
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import tensorrt_rtx
import trt

from trt_kvcache.engine.builder import patch_network
from trt_kvcache.importer.cache_plan import AttentionKind, CachePlan, Route

CRASHED = trt.Outcome("crash", "TensorRT ended its process")

_pool: ProcessPoolExecutor | None = None


def build_in_child(
    model: bytes, profiles: Sequence[trt.Ranges], path: str = "", plan: CachePlan | None = None
) -> trt.Outcome:
    """Parse, patch the network as `plan` says, and build for `profiles`; `CRASHED` where the process died."""
    global _pool
    if _pool is None:
        _pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        atexit.register(_close)
    try:
        return _pool.submit(_build, model, [dict(profile) for profile in profiles], path, plan).result()
    except BrokenProcessPool:
        _close()
        return CRASHED


def _close() -> None:
    global _pool
    if _pool is not None:
        _pool.shutdown()
        _pool = None


def _build(model: bytes, profiles: Sequence[trt.Ranges], path: str, plan: CachePlan | None) -> trt.Outcome:
    parsed = trt.parse(model, path)
    if not parsed.ok:
        return trt.Outcome("parse", parsed.words)
    if plan is not None:
        patch_network(parsed.network, plan, tensorrt_rtx)
        audit(parsed, plan)
    return trt.build_parsed(parsed, profiles)


def audit(parsed: trt.Parsed, plan: CachePlan) -> None:
    """The network holds what the plan says: each cache's layer between its input and output, each mask in place.

    What a mask says is not left to a causal kind or to lengths as well, which the parser is known to get wrong.
    """
    updates = {layer.get_output(0).name: layer.get_input(0).name for layer in parsed.updates()}
    assert updates == {cache.present: cache.past for cache in plan.caches if cache.route is Route.NATIVE}
    outputs = {parsed.network.get_output(i).name for i in range(parsed.network.num_outputs)}
    assert outputs >= set(updates)
    layers = parsed.layers(tensorrt_rtx.LayerType.ATTENTION_INPUT)
    found = {layer.name.removesuffix("_AttentionInput"): layer.attention for layer in layers}
    for item in plan.attention:
        if item.kind is AttentionKind.LOWERED:
            assert item.node not in found
            continue
        attention = found[item.node]
        assert attention.decomposable == (item.kind is AttentionKind.DECOMPOSED)
        assert (attention.mask is not None) == (item.mask is not None)
        assert attention.key_value_lengths is None
        if item.mask is not None:
            assert attention.causal_kind == tensorrt_rtx.CausalMaskKind.NONE
