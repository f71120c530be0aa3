"""The plan of an export, and what another exporter might write better."""

from __future__ import annotations

from pathlib import Path

from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer.plan import AttentionKind, CachePlan, Route
from trt_kvcache.machine import bounded_memory, free_memory
from trt_kvcache.names import is_model
from trt_kvcache.progress import phase

__all__ = ["shortfalls"]

_TRIED = 0.5
"""Part of the free memory that a model may have to be tried in a session."""


def shortfalls(folder: Path, plan: CachePlan) -> list[str]:
    """Return what keeps an export from being as good as any: nothing to say if no other can be better.

    Kernels that depend on the size of heads or on the type are the same for every exporter, and do not count.

    Args:
        folder: of the export.
        plan: its plan.
    """
    said = []
    if not plan.caches:
        said.append("no caches")
    if others := sum(cache.route is not Route.NATIVE for cache in plan.caches):
        said.append(f"{others} of {len(plan.caches)} caches are not updated by TensorRT's own layer")
    read = [node for node in plan.attention if node.caches]
    if plain := sum(node.kind is AttentionKind.LOWERED for node in read):
        said.append(f"{plain} of {len(read)} attentions are plain products")
    if whole := sum(node.keys == "all" for node in read):
        said.append(f"{whole} of {len(read)} attentions read whole caches")
    if plan.logits_span is None:
        said.append("each step computes logits of all positions")
    if problem := _session_problem(folder, plan.options.capacity):
        said.append(f"no session runs it: {problem}")
    return said


def _session_problem(folder: Path, capacity: int | None) -> str | None:
    """Return why a session cannot run a model; None where it does, or has too little memory to be tried."""
    from trt_kvcache.runtime.session import DecodeSession

    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if not is_model(folder) or size > _TRIED * free_memory():
        return None
    try:
        with (
            phase("trying a session"),
            bounded_memory(),
            DecodeSession.open(folder, capacity=capacity, tokenizer=False, max_batch=1) as session,
        ):
            session.generate([[1, 2, 3]], max_new_tokens=2)
    except TrtKvCacheError as error:
        return error.message
    return None
