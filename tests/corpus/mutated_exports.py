"""Exports of which a number, an operator or an attribute is changed, at fixed seeds."""

from __future__ import annotations

from collections.abc import Iterator

from mutation_trials import mutant
from stored_exports import TESTS, options

from corpus import Entry

SOURCES = ("optimum/llama", "mobius/llama_static_f32", "torch/llama_static_wrap_op24")
SEEDS = range(40)


def entries() -> Iterator[Entry]:
    for name in SOURCES:
        source = TESTS / "models" / name / "model.onnx"
        for seed in SEEDS:
            yield (
                f"mutant/{name}/{seed}",
                lambda folder, source=source, seed=seed: mutant(source, folder, seed)[0],
                options(name),
            )
