"""Options of a session, by the part that they are for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from trt_kvcache.arguments import as_whole
from trt_kvcache.errors import OptionError


@dataclass(frozen=True)
class Schedule:
    """How sequences share steps and rows of the caches.

    Attributes:
        max_sequences: most sequences at a time, at least `max_batch` of the session. Sequences that do not run move to
            host memory when another sequence needs a row. Running sequences keep their rows; new ones wait. None: new
            sequences wait for a row, and nothing is offloaded.
        prefix_cache: bytes of host memory that keep cache rows of earlier texts. A text that begins like an earlier one
            reuses its rows, in blocks of 32 tokens. `KVCache.prefix_stats` counts the reused tokens. None: no prefix
            cache.
        prefill_budget: most prompt tokens in a step in which other sequences generate. A small budget makes prompts
            wait; a large one makes generating sequences wait. None: 16 on the CPU, 256 on a GPU. If the tokens of one
            step see each other in this model, a prompt is written in one step.

    Raises:
        OptionError: `prefill_budget` is less than 1.
    """

    max_sequences: int | None = None
    prefix_cache: int | None = None
    prefill_budget: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_budget is not None and as_whole(self.prefill_budget, "prefill_budget") < 1:
            raise OptionError(f"prefill_budget is {self.prefill_budget}; it must be at least 1 token")

    def check(self, max_batch: int) -> None:
        """Refuse fewer sequences than there are rows.

        Raises:
            OptionError: there are fewer.
        """
        most = self.max_sequences
        if most is not None and as_whole(most, "max_sequences") < max_batch:
            raise OptionError(
                f"max_sequences is {most}, and max_batch is {max_batch}; give as many or more, or a smaller max_batch"
            )


@dataclass(frozen=True)
class CpuOptions:
    """How ONNX Runtime runs a model.

    Attributes:
        threads: number of threads; None: one per core.
        default_capacity: tokens per sequence of a model whose caches grow, if no capacity is given; models with a fixed
            capacity ignore it. None: the maximum length that ``config.json`` beside the model names, at most 4096.

    Raises:
        OptionError: `default_capacity` is less than 1.
    """

    threads: int | None = None
    default_capacity: int | None = None

    def __post_init__(self) -> None:
        if self.default_capacity is not None and as_whole(self.default_capacity, "default_capacity") < 1:
            raise OptionError(f"default_capacity is {self.default_capacity}; it must be at least 1 token")


@dataclass(frozen=True)
class GpuOptions:
    """How TensorRT runs an engine.

    Attributes:
        index: index of the GPU.
        cuda_graphs: record decode steps as CUDA graphs.
        kernel_cache: folder for kernels that TensorRT for RTX compiles; None: the engine's folder.
        bindings: replacements of the modules of TensorRT and CUDA, for tests.
    """

    index: int = 0
    cuda_graphs: bool = True
    kernel_cache: str | os.PathLike[str] | None = None
    bindings: Any = None
