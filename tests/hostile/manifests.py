"""Manifests that contradict themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Edit = Callable[[dict[str, Any]], Any]


def _tensor(place: int, **fields: object) -> Edit:
    return lambda data: data["plan"]["tensors"][place].update(fields)


def _profile(name: str, **shapes: list[int]) -> Edit:
    usual = {"min": [1, 1], "opt": [1, 1], "max": [1, 1]}
    return lambda data: data["profiles"][0]["shapes"].update({name: usual | shapes})


CONTRADICTIONS: list[tuple[Edit, str]] = [
    (lambda data: data.update(max_batch=-1), "max_batch is -1, which is no size"),
    (lambda data: data.update(max_batch=2**70), "max_batch is 1180591620717411303424, which is no size|Integer value"),
    (lambda data: data.update(max_chunk=0), "max_chunk is 0, which is no size"),
    (lambda data: data.update(vocab=0), "vocab is 0, which is no size"),
    (lambda data: data.update(profiles=[]), "it has no profiles"),
    (lambda data: data.update(aliases={}), "aliases binds 'updated_key_cache.0' to None, the plan to"),
    (lambda data: data["aliases"].update(logits="nothing"), "aliases binds 'logits' to 'nothing', the plan to None"),
    (lambda data: data.update(double_buffered={"a": "b"}), "double_buffered binds 'a' to 'b', the plan to None"),
    (lambda data: data.update(backend="evil"), "backend 'evil'; there are"),
    (_tensor(0, dtype="evil"), r"has the dtype 'evil', which no engine has"),
    (
        lambda data: data["plan"]["caches"][0].update(dtype="evil"),
        "'key_cache.0' has the dtype 'evil'",
    ),
    (
        lambda data: data["plan"]["caches"][0].update(logical_shape=[]),
        r"cache 'key_cache.0' \[\] has no axis",
    ),
    (_tensor(0, shape=[-1, -5], axes=["batch", "sequence"]), r"has the shape \[-1, -5\]"),
    (_tensor(0, name="a\nb"), "has a control character or line break in its name"),
    (_tensor(0, name="\x9b2J"), "has a control character or line break in its name"),
    (lambda data: data["plan"]["tensors"].append(data["plan"]["tensors"][0]), "is there twice"),
    (lambda data: data["plan"]["caches"][0].update(past="gone"), "cache 'gone' is not both an input and described"),
    (_profile("nowhere"), "has 'nowhere', which is no input"),
    (_profile("input_ids", min=[2, 2]), "has sizes of 'input_ids' in no order"),
    (_profile("input_ids", max=[1, 2**40]), "has sizes of 'input_ids' in no order"),
]
"""Changes to a manifest as JSON, and what the refusal says."""
